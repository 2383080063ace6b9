"""Patching vLLM: into a tree of modules that stands for it, and out again."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from specker.integrations import flashinfer, sglang
from specker.integrations import vllm as adapters
from specker.integrations.vllm import VersionError, patch

BATCH = "vllm.v1.sample.rejection_sampler"
SLOTS = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"


def batch_function(
    draft_token_ids: Any,
    num_draft_tokens: Any,
    max_spec_len: Any,
    cu_num_draft_tokens: Any,
    draft_probs: Any,
    target_logits: Any,
    bonus_token_ids: Any,
    sampling_metadata: Any,
    synthetic_mode: bool = False,
) -> str:
    """Stand for vLLM's first function."""
    return "vLLM's own"


def slots_function(
    target_logits: Any,
    draft_logits: Any,
    draft_sampled: Any,
    cu_num_logits: Any,
    pos: Any,
    idx_mapping: Any,
    expanded_idx_mapping: Any,
    expanded_local_pos: Any,
    temperature: Any,
    seed: Any,
    num_speculative_steps: Any,
    use_fp64: bool = False,
) -> str:
    """Stand for vLLM's second function."""
    return "vLLM's own"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, ModuleType]]:
    """Return a function that puts a vLLM of some version into sys.modules."""

    def put(version: str = "0.33.0", functions: dict[str, Any] | None = None) -> dict[str, ModuleType]:
        functions = {BATCH: batch_function, SLOTS: slots_function} if functions is None else functions
        modules: dict[str, ModuleType] = {}
        for path in functions or {"vllm": None}:
            parts = path.split(".")
            for depth in range(1, len(parts) + 1):
                name = ".".join(parts[:depth])
                if name not in modules:
                    modules[name] = ModuleType(name)
                    modules[name].__path__ = []
                    monkeypatch.setitem(sys.modules, name, modules[name])
        for path, function in functions.items():
            if function is not None:
                modules[path].rejection_sample = function
        modules["vllm"].__version__ = version
        return modules

    return put


def functions_of(modules: dict[str, ModuleType]) -> list[Any]:
    """Return what stands in both places."""
    return [modules[BATCH].rejection_sample, modules[SLOTS].rejection_sample]


def test_both_runners_are_patched_and_restored(install: Callable[..., dict[str, ModuleType]]) -> None:
    modules = install()
    handle = patch()
    assert functions_of(modules) == [adapters.rejection_sample, adapters.rejection_sample_by_slot]
    assert set(handle.modules) == {BATCH, SLOTS}
    handle.restore()
    assert functions_of(modules) == [batch_function, slots_function]
    assert handle.modules == ()
    handle.restore()
    assert functions_of(modules) == [batch_function, slots_function]


def test_a_block_restores_however_it_ends(install: Callable[..., dict[str, ModuleType]]) -> None:
    modules = install("0.26.1+cpu")
    with pytest.raises(ZeroDivisionError), patch():  # noqa: PT012 (the block is what is tested)
        assert modules[BATCH].rejection_sample is adapters.rejection_sample
        _ = 1 / 0
    assert functions_of(modules) == [batch_function, slots_function]


def test_one_runner_is_enough(install: Callable[..., dict[str, ModuleType]]) -> None:
    modules = install(functions={BATCH: batch_function})
    with patch() as handle:
        assert handle.modules == (BATCH,)
        assert modules[BATCH].rejection_sample is adapters.rejection_sample
    assert modules[BATCH].rejection_sample is batch_function


def test_a_later_patch_of_somebody_else_is_not_overwritten(install: Callable[..., dict[str, ModuleType]]) -> None:
    modules = install()
    handle = patch()
    modules[SLOTS].rejection_sample = slots_function
    with pytest.raises(RuntimeError, match="expected specker's adapter, got <function slots_function"):
        handle.restore()
    assert modules[BATCH].rejection_sample is adapters.rejection_sample
    modules[SLOTS].rejection_sample = adapters.rejection_sample_by_slot
    handle.restore()
    assert functions_of(modules) == [batch_function, slots_function]


def test_patching_twice_is_refused(install: Callable[..., dict[str, ModuleType]]) -> None:
    install()
    with patch(), pytest.raises(RuntimeError, match="got specker's: patched already"):
        patch()


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.0", "dev"])
def test_other_versions_are_refused_in_words(install: Callable[..., dict[str, ModuleType]], version: str) -> None:
    modules = install(version)
    with pytest.raises(VersionError, match=rf"vLLM {version} is installed; .* made for 0\.26 to 0\.33"):
        patch()
    assert functions_of(modules) == [batch_function, slots_function]


def test_a_function_of_other_parameters_is_refused_and_nothing_is_changed(
    install: Callable[..., dict[str, ModuleType]],
) -> None:
    def of_probabilities(draft_token_ids: Any, num_draft_tokens: Any, target_probs: Any) -> None:
        """Take probabilities where logits are expected."""

    modules = install(functions={BATCH: batch_function, SLOTS: of_probabilities})
    with pytest.raises(VersionError, match=r"to begin with \(target_logits, .* got \(draft_token_ids, .*target_probs"):
        patch()
    assert functions_of(modules) == [batch_function, of_probabilities]


def test_a_parameter_that_is_not_known_is_refused(install: Callable[..., dict[str, ModuleType]]) -> None:
    def longer(*, new_rule: bool = False) -> None:
        """Take an option that nobody has read about."""

    install(functions={BATCH: longer})
    with pytest.raises(VersionError, match=r"nothing that specker does not know, got \(new_rule\)"):
        patch()


def test_missing_functions_and_modules_are_told(install: Callable[..., dict[str, ModuleType]]) -> None:
    install(functions={BATCH: None})
    with pytest.raises(VersionError, match=f"expected a function rejection_sample in {BATCH}, found none"):
        patch()


def test_a_vllm_without_either_module_is_told(install: Callable[..., dict[str, ModuleType]]) -> None:
    install(functions={})
    with pytest.raises(VersionError, match=r"expected one of vllm\.v1\.sample\.rejection_sampler, .* found neither"):
        patch()


def test_an_absent_vllm_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ModuleNotFoundError, match="vllm"):
        patch()


def test_a_vllm_that_does_not_import_shows_its_own_error(
    install: Callable[..., dict[str, ModuleType]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    modules = install(functions={})
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "__init__.py").write_text("import a_package_that_is_absent\n")
    modules["vllm"].__path__ = [str(tmp_path)]
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_absent"):
        patch()


def test_the_lines_of_the_readme_swap_the_functions_in(install: Callable[..., dict[str, ModuleType]]) -> None:
    text = (Path(__file__).resolve().parents[1] / "README.md").read_text()
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "vllm.patch()" in block]
    modules = install()
    names: dict[str, Any] = {
        "flashinfer": SimpleNamespace(sampling=SimpleNamespace()),
        "eagle_utils": SimpleNamespace(),
    }
    exec(block, names)
    names["handle"].restore()
    assert functions_of(modules) == [batch_function, slots_function]
    assert names["flashinfer"].sampling.chain_speculative_sampling is flashinfer.chain_speculative_sampling
    assert names["eagle_utils"].chain_speculative_sampling_triton is sglang.chain_speculative_sampling_triton
