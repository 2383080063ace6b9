"""What the wheel and the source distribution hold, and when the wheel is allowed to be pure Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from email import message_from_bytes
from pathlib import Path

import pytest

BUILD_WHEEL = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
EXTENSION = "specker/_C.abi3.so"
LINKED = ("bench", "kernels")

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")


def _names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def _python_sources(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name.endswith(".py")}


def _modules_of(tree: Path) -> dict[str, bytes]:
    """Return every module by the name it must be installed under."""
    package = {path: path.relative_to(tree) for path in (tree / "specker").rglob("*.py")}
    package = {path: name for path, name in package.items() if name.parts[1] not in LINKED}
    linked = {
        path: Path("specker") / path.relative_to(tree) for folder in LINKED for path in (tree / folder).rglob("*.py")
    }
    return {name.as_posix(): path.read_bytes() for path, name in {**package, **linked}.items()}


def _build(tree: Path, attempt: Callable[..., subprocess.CompletedProcess[str]], **changes: str) -> str:
    """Build a wheel in place, and return the log; the wheel, if any, lies in the tree's dist folder."""
    return attempt(sys.executable, "-c", BUILD_WHEEL, "dist", cwd=tree, **changes).stdout


def test_the_wheel_holds_every_module_of_all_folders(wheel: Path, source_tree: Path) -> None:
    assert _python_sources(wheel) == _modules_of(source_tree)
    assert {"specker/py.typed", "specker/bench/weigh.c"} <= _names(wheel)


def test_the_wheel_adds_nothing_to_the_top_level_but_specker(wheel: Path) -> None:
    top_level = {name.split("/")[0] for name in _names(wheel)}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"specker"}
    assert len(top_level) == 2


@needs_compiler
def test_with_torch_and_a_compiler_one_wheel_serves_every_python(wheel: Path) -> None:
    assert re.fullmatch(r"specker-[\d.]+-cp310-abi3-\w+\.whl", wheel.name)
    assert EXTENSION in _names(wheel)


def test_the_metadata_names_the_licence_the_ranges_and_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata_name,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(metadata_name))
        commands = archive.read(metadata_name.replace("METADATA", "entry_points.txt")).decode()
    assert metadata["License-Expression"] == "Apache-2.0"
    requirements = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert "torch>=2.10" in requirements
    assert any(line.startswith("triton>=3.5;") for line in requirements)
    assert not any(line.startswith("transformers") for line in requirements)
    assert "specker = specker.cli:main" in commands


def test_the_source_distribution_builds_the_same_wheel(
    sdist: Path, wheel: Path, tmp_path: Path, output_of: Callable[..., str], quick_compiler: dict[str, str]
) -> None:
    shutil.unpack_archive(sdist, tmp_path)
    (tree,) = tmp_path.iterdir()
    output_of(sys.executable, "-c", BUILD_WHEEL, "dist", cwd=tree, **quick_compiler)
    (rebuilt,) = (tree / "dist").iterdir()
    assert rebuilt.name == wheel.name
    assert _names(rebuilt) == _names(wheel)
    assert _python_sources(rebuilt) == _python_sources(wheel)


def test_the_extension_can_be_left_out(
    scratch_tree: Path, wheel: Path, attempt: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    log = _build(scratch_tree, attempt, SPECKER_BUILD_EXT="0")
    (pure,) = (scratch_tree / "dist").glob("*.whl")
    assert pure.name.endswith("-py3-none-any.whl"), log
    assert _names(pure) == _names(wheel) - {EXTENSION}


def test_without_torch_the_wheel_is_pure_and_the_log_says_so(
    scratch_tree: Path,
    build_tools: Path,
    python_with: Callable[[Path], Path],
    output_of: Callable[..., str],
) -> None:
    log = output_of(python_with(build_tools), "-c", BUILD_WHEEL, "dist", cwd=scratch_tree)
    (pure,) = (scratch_tree / "dist").glob("*.whl")
    assert pure.name.endswith("-py3-none-any.whl")
    assert "building without the C++ extension: torch is not importable" in log


def test_without_a_compiler_the_wheel_is_pure_and_the_log_says_so(
    scratch_tree: Path, attempt: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    log = _build(scratch_tree, attempt, CXX="no-such-compiler")
    (pure,) = (scratch_tree / "dist").glob("*.whl")
    assert pure.name.endswith("-py3-none-any.whl")
    assert "no C++ compiler was found (CXX='no-such-compiler')" in log


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"SPECKER_BUILD_EXT": "1", "CXX": "no-such-compiler"},
            "SPECKER_BUILD_EXT=1 asks for the C++ extension, but no C++ compiler was found",
        ),
        ({"SPECKER_BUILD_EXT": "yes"}, "SPECKER_BUILD_EXT: expected 0, 1 or nothing, got 'yes'"),
    ],
)
def test_a_wish_that_cannot_be_met_fails_in_words(
    changes: dict[str, str],
    words: str,
    scratch_tree: Path,
    attempt: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    assert words in _build(scratch_tree, attempt, **changes)
    assert not list(scratch_tree.glob("dist/*.whl"))


@needs_compiler
def test_a_compile_error_fails_the_build(
    scratch_tree: Path,
    attempt: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    source = min((scratch_tree / "csrc").glob("*.cpp"))
    source.write_text('#error "broken on purpose"\n' + source.read_text())
    assert "broken on purpose" in _build(scratch_tree, attempt)
    assert not list(scratch_tree.glob("dist/*.whl"))


def test_torch_is_no_build_requirement(source_tree: Path) -> None:
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    requires = tomllib.loads((source_tree / "pyproject.toml").read_text())["build-system"]["requires"]
    assert [re.match(r"\w+", line)[0] for line in requires] == ["setuptools"]


def test_every_pin_is_exact_and_every_requirement_has_one(source_tree: Path) -> None:
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    lines = (source_tree / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r'[a-z0-9.-]+==[\w.]+(; python_version (<|>=) "3\.11")?', line) for line in pins)
    project = tomllib.loads((source_tree / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = {re.match(r"[\w-]+", line)[0] for group in groups for line in group}
    assert wanted <= {line.split("==")[0] for line in pins}


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_a_second_install_does_nothing_and_a_changed_source_only_rebuilds(scratch_tree: Path) -> None:
    def plan() -> str:
        command = ["make", "--dry-run", "install"]
        return subprocess.run(command, cwd=scratch_tree, capture_output=True, text=True, check=True).stdout

    assert "torch" in plan()
    stamps = scratch_tree / ".venv"
    stamps.mkdir()
    for name in ("requirements.stamp", "package.stamp"):
        (stamps / name).touch()
    assert "Nothing to be done" in plan()
    written = (stamps / "package.stamp").stat().st_mtime
    os.utime(scratch_tree / "csrc" / "operators.cpp", (written + 1, written + 1))
    assert "--no-build-isolation --no-deps" in plan()
    assert "torch" not in plan()
