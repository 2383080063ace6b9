"""The sources of the engines, fetched from the package index when they are wanted and never kept in the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

FOLDER = Path(__file__).parents[2] / "build" / "peers"
"""Where sources lie; the whole folder may be deleted."""


class Source(NamedTuple):
    """One release of an engine."""

    package: str
    version: str
    binary: bool = False
    """A wheel rather than a source distribution, for an engine whose sources do not unpack without its tools."""
    build_tools: tuple[str, ...] = ()
    """What pip needs to read the metadata of a source distribution."""
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def folder(self) -> Path:
        """Where its Python files lie."""
        return FOLDER / f"{self.package}-{self.version}"


SOURCES = {
    "vllm": Source(
        "vllm",
        "0.33.0",
        build_tools=("setuptools-rust", "setuptools-scm", "semantic-version", "vcs-versioning"),
        # Without a target it asks for no compiler; without a version it appends the target to its own.
        environment=(("VLLM_TARGET_DEVICE", "empty"), ("VLLM_VERSION_OVERRIDE", "0.33.0")),
    ),
    # The last source distribution that holds the test of the chain sampler; later ones leave the tests out.
    "flashinfer": Source("flashinfer-python", "0.2.14"),
    "sglang": Source("sglang", "0.5.23", binary=True),
}


def fetch(source: Source) -> str:
    """Fetch and unpack the Python files of a release; return why that failed, or an empty string."""
    if source.folder.is_dir():
        return ""
    downloads = FOLDER / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    tools = FOLDER / "build-tools"
    if source.build_tools:
        reason = _pip(["install", "--no-deps", "--upgrade", "--target", str(tools), *source.build_tools], {})
        if reason:
            return reason
    form = "--only-binary" if source.binary else "--no-binary"
    reason = _pip(
        ["download", "--no-deps", "--no-build-isolation", form, ":all:", "--dest", str(downloads),
         f"{source.package}=={source.version}"],
        {**dict(source.environment), "PYTHONPATH": str(tools)},
    )  # fmt: skip
    if reason:
        return reason
    stem = f"{source.package.replace('-', '_')}-{source.version}"
    archive = next(file for file in sorted(downloads.iterdir()) if file.name.startswith(stem))
    unpacked = source.folder.with_name(source.folder.name + ".part")
    for path, content in _python_files(archive):
        target = unpacked / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    unpacked.rename(source.folder)
    return ""


def _pip(arguments: list[str], environment: dict[str, str]) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    lines = (done.stderr or done.stdout).strip().splitlines()
    return "" if done.returncode == 0 else f"pip {arguments[0]}: {lines[-1] if lines else 'failed'}"


def _python_files(archive: Path) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Yield path (without the folder of a source distribution) and content of every Python file."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                path = PurePosixPath(name)
                if _wanted(path):
                    yield path, wheel.read(name)
        return
    with tarfile.open(archive) as source:
        for member in source:
            path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            stream = source.extractfile(member) if member.isfile() and _wanted(path) else None
            if stream is not None:
                yield path, stream.read()


def _wanted(path: PurePosixPath) -> bool:
    return path.suffix == ".py" and not path.is_absolute() and ".." not in path.parts
