"""Throw-away copies of the project, wheels built from them, and virtual environments that need no network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD_TOOLS = {"_distutils_hack", "packaging", "pip", "setuptools"}
BUILD_WHEEL = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"

Attempt = Callable[..., "subprocess.CompletedProcess[str]"]


def _clean_environment() -> dict[str, str]:
    """Return the environment of a user who set nothing: no build switch, no import path, no index."""
    ours = {"PYTHONPATH", "SPECKER_BUILD_EXT", "CXX", "CC", "TRITON_INTERPRET"}
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return {**kept, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def _mirror(folder: Path, keep: Callable[[str], bool]) -> Path:
    """Fill a folder with links to the installed packages that `keep` lets through."""
    folder.mkdir()
    for installed in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(installed).iterdir():
            if keep(entry.name.partition("-")[0]):
                (folder / entry.name).symlink_to(entry)
    return folder


def _venv(folder: Path, packages: Path) -> Path:
    """Create an environment that sees those packages, and return its interpreter."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "packages.pth").write_text(f"{packages}\n")
    return folder / "bin" / "python"


@pytest.fixture(scope="session")
def attempt() -> Attempt:
    """Run an interpreter in a folder and return what came back, whether it failed or not."""

    def run(python: Path | str, *arguments: str, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(python), *arguments],
            cwd=cwd,
            env={**_clean_environment(), **changes},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def output_of(attempt: Attempt) -> Callable[..., str]:
    """Run an interpreter and return its output; a failure shows everything that was said."""

    def run(python: Path | str, *arguments: str, cwd: Path, **changes: str) -> str:
        done = attempt(python, *arguments, cwd=cwd, **changes)
        assert done.returncode == 0, f"{arguments} failed:\n{done.stdout}"
        return done.stdout.strip()

    return run


@pytest.fixture(scope="session")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the working tree as a clean clone would be, links kept."""
    copy = tmp_path_factory.mktemp("source") / "specker"
    left_out = shutil.ignore_patterns(
        ".git", ".venv", "build", "dist", "*.egg-info", "*.so", "__pycache__", ".*_cache", ".hypothesis"
    )
    return Path(shutil.copytree(ROOT, copy, symlinks=True, ignore=left_out))


@pytest.fixture(scope="session")
def quick_compiler(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings for builds whose speed nobody will measure: the same compiler without its optimiser."""
    script = tmp_path_factory.mktemp("compiler") / "c++"
    script.write_text('#!/bin/sh\nexec c++ "$@" -O0\n')
    script.chmod(0o755)
    return {"CXX": str(script)}


@pytest.fixture
def scratch_tree(source_tree: Path, tmp_path: Path) -> Path:
    """A copy that one test may change and build in."""
    return Path(shutil.copytree(source_tree, tmp_path / "tree", symlinks=True))


@pytest.fixture(scope="session")
def all_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything installed but specker itself and Hugging Face's kernels."""

    def keep(name: str) -> bool:
        return name not in {"specker", "kernels"} and not name.startswith("__editable__")

    return _mirror(tmp_path_factory.mktemp("packages") / "all", keep)


@pytest.fixture(scope="session")
def build_tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an isolated build has: no torch."""
    return _mirror(tmp_path_factory.mktemp("packages") / "tools", lambda name: name in BUILD_TOOLS)


@pytest.fixture
def python_with(tmp_path: Path) -> Callable[[Path], Path]:
    """Return the interpreter of a new environment that sees the packages of a folder."""
    return lambda packages: _venv(tmp_path / "venv", packages)


@pytest.fixture(scope="session")
def wheel(
    source_tree: Path,
    tmp_path_factory: pytest.TempPathFactory,
    output_of: Callable[..., str],
    quick_compiler: dict[str, str],
) -> Path:
    """The wheel of a copied tree, with the extension where torch and a compiler are present."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = shutil.copytree(source_tree, folder / "tree", symlinks=True)
    output_of(sys.executable, "-c", BUILD_WHEEL, str(folder), cwd=tree, **quick_compiler)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def sdist(source_tree: Path, tmp_path_factory: pytest.TempPathFactory, output_of: Callable[..., str]) -> Path:
    """The source distribution of a copied tree."""
    folder = tmp_path_factory.mktemp("sdist")
    tree = shutil.copytree(source_tree, folder / "tree", symlinks=True)
    output_of(sys.executable, "-c", BUILD_SDIST, str(folder), cwd=tree)
    (built,) = folder.glob("*.tar.gz")
    return built
