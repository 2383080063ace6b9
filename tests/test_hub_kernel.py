"""The hub kernel: built, loaded by Hugging Face's own package, and used."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import kernels
import specker
from specker import hub


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a kernel repository, built once: a folder registers its operators when it is loaded."""
    root = tmp_path_factory.mktemp("hub")
    (root / "build" / "torch-cpu").mkdir(parents=True)
    (root / "build" / "torch-cpu" / "stale.py").write_text("")
    hub.main(root / "build")
    return root


@pytest.fixture(scope="module")
def loaded(repository: Path) -> dict[str, ModuleType]:
    """Return both variants, loaded where no other copy of the package can be imported."""
    patch = pytest.MonkeyPatch()
    for name in [name for name in sys.modules if name.split(".")[0] == "specker"]:
        patch.setitem(sys.modules, name, None)
    variants = {
        "chosen": kernels.get_local_kernel(repository),
        "torch-cpu": kernels.get_local_kernel(repository / "build" / "torch-cpu"),
        "torch-cuda": kernels.get_local_kernel(repository / "build" / "torch-cuda"),
    }
    patch.undo()
    return variants


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the other variant is chosen")
def test_the_variant_for_this_machine_is_found(loaded: dict[str, ModuleType]) -> None:
    assert loaded["chosen"] is loaded["torch-cpu"]
    assert loaded["torch-cuda"] is not loaded["torch-cpu"]


@pytest.mark.parametrize(("variant", "backend"), [("torch-cpu", "reference"), ("torch-cuda", "triton")])
def test_a_variant_verifies_as_the_package_does(loaded: dict[str, ModuleType], variant: str, backend: str) -> None:
    module = loaded[variant]
    generator = torch.Generator().manual_seed(3)
    target_logits = torch.randn(3, 3, 40, generator=generator)
    draft_logits = target_logits[:, :2] + torch.randn(3, 2, 40, generator=generator)
    ids = torch.randint(40, (3, 2), generator=generator)
    wanted = specker.verify(ids, target_logits, draft_logits, temperature=0.8, top_p=0.9, seed=5)
    with module.backend(backend):
        got = module.verify(ids, target_logits, draft_logits, temperature=0.8, top_p=0.9, seed=5)
    assert got.token_ids.tolist() == wanted.token_ids.tolist()
    assert type(got) is module.VerifyResult is not specker.VerifyResult


def test_a_variant_offers_the_public_names_and_says_what_it_lacks(loaded: dict[str, ModuleType]) -> None:
    for module in loaded.values():
        assert module.__all__ == specker.__all__
        assert module.available_backends()["cpp"] == "the C++ extension specker._C is not installed"


def test_metadata_names_the_variant(repository: Path) -> None:
    for folder, backend in (("torch-cpu", "cpu"), ("torch-cuda", "cuda")):
        metadata = json.loads((repository / "build" / folder / "metadata.json").read_text())
        assert metadata.pop("id").startswith(f"specker_{backend}_")
        assert metadata == {
            "name": "specker",
            "version": hub.HUB_VERSION,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }


def test_files_import_what_the_hub_allows(repository: Path) -> None:
    """Relative modules, the standard library, torch and triton."""
    files = sorted(repository.glob("build/*/**/*.py"))
    assert len(files) > 40
    assert not any(file.name == "stale.py" for file in files)
    allowed = {*sys.stdlib_module_names, "torch", "triton"}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [str(node.module)]
            assert {name.split(".")[0] for name in names} <= allowed, file


def test_a_build_is_repeatable_and_its_name_follows_its_content(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [json.loads((folder / "metadata.json").read_text())["id"] for folder in hub.build(tmp_path)]
    built = [repository / "build" / folder / "metadata.json" for folder in hub.VARIANTS]
    assert names == [json.loads(file.read_text())["id"] for file in built]
    monkeypatch.setattr(hub, "HUB_VERSION", hub.HUB_VERSION + 1)
    changed = [json.loads((folder / "metadata.json").read_text())["id"] for folder in hub.build(tmp_path)]
    assert not set(names) & set(changed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import specker.checks\n", "import specker.checks: expected `from specker.checks import"),
        ("if True: from specker import checks\n", "status.py: expected every import of the package to have a"),
        (
            '_NAMESPACES = {"default": "specker"}\n',
            "status.py: expected the namespaces .* in operators.py alone, got 1",
        ),
    ],
)
def test_a_source_that_cannot_be_moved_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    sources = dict(hub._sources(Path(hub.__file__).parent))
    monkeypatch.setattr(hub, "_sources", lambda _package: {**sources, "status.py": text})
    with pytest.raises(ValueError, match=message):
        hub.build(tmp_path)
