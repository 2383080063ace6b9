"""Each way of installing gives a package that works, beside Hugging Face's kernels and without it."""

from __future__ import annotations

import json
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

PIP = ("-m", "pip", "install", "--no-build-isolation")
pytestmark = pytest.mark.slow
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")

# Draws from rows that leave no choice, so that the right answer is known without a reference.
PROBE = """
import importlib, json, pkgutil, torch, specker, specker.kernels
logits = torch.full((2, 2, 5), -torch.inf)
logits[:, 0, 3] = 0.0
logits[:, 1, 4] = 0.0
result = specker.verify(torch.tensor([[3], [1]]), logits, seed=0)
print(json.dumps({
    "package": specker.__file__,
    "kernels": [str(path) for path in specker.kernels.__path__],
    "modules": sorted(module.name for module in pkgutil.iter_modules(specker.kernels.__path__)),
    "cpp": specker.available_backends()["cpp"],
    "token_ids": result.token_ids.tolist(),
}))
"""
RIGHT_TOKENS = [[3, 4], [3, -1]]

CLASH_PROBE = """
import importlib.util, json
import transformers.integrations
from transformers.utils import is_kernels_available
from transformers import AutoModelForCausalLM
import specker.kernels
spec = importlib.util.find_spec("kernels")
if spec.origin is not None:
    import kernels
print(json.dumps({
    "theirs": spec.origin,
    "ours": [str(path) for path in specker.kernels.__path__],
    "available": is_kernels_available(),
}))
"""


def _probe(output_of: Callable[..., str], python: Path, code: str, cwd: Path) -> dict[str, object]:
    return dict(json.loads(output_of(python, "-c", code, cwd=cwd).splitlines()[-1]))


def _kernel_modules(tree: Path) -> list[str]:
    return sorted(path.stem for path in (tree / "kernels").glob("*.py"))


@needs_compiler
def test_pip_install_gives_the_package_with_its_extension(
    scratch_tree: Path,
    tmp_path: Path,
    all_packages: Path,
    python_with: Callable[[Path], Path],
    output_of: Callable[..., str],
    quick_compiler: dict[str, str],
) -> None:
    python = python_with(all_packages)
    output_of(python, *PIP, ".", cwd=scratch_tree, **quick_compiler)
    found = _probe(output_of, python, PROBE, tmp_path)
    assert Path(str(found["package"])).is_relative_to(tmp_path / "venv")
    assert found["modules"] == _kernel_modules(scratch_tree)
    assert found["cpp"] == ""
    assert found["token_ids"] == RIGHT_TOKENS
    assert (tmp_path / "venv" / "bin" / "specker").exists()
    assert "Usage" in output_of(python, "-m", "specker.bench.bench_verify", "--help", cwd=tmp_path)


@needs_compiler
def test_an_editable_install_works_from_the_tree_and_from_elsewhere(
    scratch_tree: Path,
    tmp_path: Path,
    all_packages: Path,
    python_with: Callable[[Path], Path],
    output_of: Callable[..., str],
    quick_compiler: dict[str, str],
) -> None:
    python = python_with(all_packages)
    output_of(python, *PIP, "--editable", ".", cwd=scratch_tree, **quick_compiler)
    for folder in (tmp_path, scratch_tree):
        found = _probe(output_of, python, PROBE, folder)
        assert Path(str(found["package"])) == scratch_tree / "specker" / "__init__.py"
        assert found["modules"] == _kernel_modules(scratch_tree)
        assert found["cpp"] == ""
        assert found["token_ids"] == RIGHT_TOKENS


def test_the_pure_wheel_verifies_on_the_reference_and_says_what_is_missing(
    scratch_tree: Path,
    tmp_path: Path,
    all_packages: Path,
    python_with: Callable[[Path], Path],
    output_of: Callable[..., str],
) -> None:
    python = python_with(all_packages)
    output_of(python, *PIP, ".", cwd=scratch_tree, SPECKER_BUILD_EXT="0")
    found = _probe(output_of, python, PROBE, tmp_path)
    assert found["cpp"] == "the C++ extension specker._C is not installed"
    assert found["token_ids"] == RIGHT_TOKENS


@pytest.mark.parametrize("folder", ["bench", "kernels"])
def test_the_linked_folders_can_never_be_regular_packages(folder: str, source_tree: Path) -> None:
    assert not (source_tree / folder / "__init__.py").exists()
    link = source_tree / "specker" / folder
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{folder}"


def test_hugging_faces_kernels_wins_its_name_in_the_root_of_the_tree(
    source_tree: Path,
    tmp_path: Path,
    all_packages: Path,
    python_with: Callable[[Path], Path],
    output_of: Callable[..., str],
) -> None:
    installed = Path(sysconfig.get_path("purelib"))
    theirs = [installed / "kernels", *installed.glob("kernels-*.dist-info")]
    assert len(theirs) == 2, "Hugging Face's kernels belongs to the test requirements"
    both = shutil.copytree(all_packages, tmp_path / "both", symlinks=True)
    for path in theirs:
        (both / path.name).symlink_to(path)
    found = _probe(output_of, python_with(both), CLASH_PROBE, source_tree)
    assert Path(str(found["theirs"])) == both / "kernels" / "__init__.py"
    assert found["ours"] == [str(source_tree / "specker" / "kernels")]


def test_the_tree_alone_is_never_taken_for_hugging_faces_kernels(
    source_tree: Path,
    all_packages: Path,
    python_with: Callable[[Path], Path],
    output_of: Callable[..., str],
) -> None:
    found = _probe(output_of, python_with(all_packages), CLASH_PROBE, source_tree)
    assert found["theirs"] is None
    assert found["available"] is False
    assert found["ours"] == [str(source_tree / "specker" / "kernels")]
