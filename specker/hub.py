"""Write the package in the layout of Hugging Face's kernel hub: `python -m specker.hub build`.

A hub kernel is a folder that is imported under a name of its own: imports inside it are relative, and its operators
live in namespaces that no other copy of the package has. Both folders hold the public functions, the eager reference
and the Triton kernels; none holds the C++ extension, so on the CPU the reference serves (exact, and slow).
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

HUB_VERSION = 1
"""Version of the interface on the hub; to be raised with any change of a public signature."""
VARIANTS = {"torch-cuda": "cuda", "torch-cpu": "cpu"}
"""Folder of each variant and the backend that its metadata names."""
_IMPORT = re.compile(r"^(\s*from )specker(?:\.([\w.]+))?( import )", re.MULTILINE)
_NAMESPACES = re.compile(r'^_NAMESPACES = (\{.*"specker.*\})$', re.MULTILINE)
_OWN_MODULE = re.compile(r'f?"specker\.(?=_C"|kernels\.)')


def build(output: Path) -> list[Path]:
    """Write `output/torch-cuda` and `output/torch-cpu` and return them; what they held before is removed.

    Args:
        output: the folder `build` of a kernel repository.

    Returns:
        the folders, each with the package and metadata.json, as `kernels.get_local_kernel` loads them.

    Raises:
        ValueError: a source file imports or names the package in a way that this module does not know.

    Guarantees: deterministic; the name under which a folder is imported changes with its content.

    Source: `docs/source/kernel-requirements.md` of the package kernels 0.17.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     [variant.name for variant in build(Path(folder))]
        ['torch-cuda', 'torch-cpu']
    """
    sources = dict(_sources(Path(__file__).parent))
    return [_write_variant(output / folder, backend, sources) for folder, backend in VARIANTS.items()]


def _sources(package: Path) -> Iterator[tuple[str, str]]:
    """Yield path and text of every file that `import specker` leads to, and of the kernels."""
    wanted, seen = ["__init__"], set()
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        text = (package / f"{name}.py").read_text()
        yield f"{name}.py", text
        for module, attribute in _imports(text):
            path = f"{module}.{attribute}" if module == "specker" else module
            candidate = path.removeprefix("specker.")
            if (package / f"{candidate}.py").is_file():
                wanted.append(candidate)
    for file in sorted((package / "kernels").glob("*.py")):
        yield f"kernels/{file.name}", file.read_text()


def _imports(text: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of every import from the package."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "specker":
            yield from ((node.module, alias.name) for alias in node.names)
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "specker":
                    raise ValueError(
                        f"import {alias.name}: expected `from {alias.name} import ...`, which has a relative form"
                    )


def _write_variant(folder: Path, backend: str, sources: dict[str, str]) -> Path:
    content = json.dumps([backend, HUB_VERSION, sorted(sources.items())])
    name = f"specker_{backend}_{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    shutil.rmtree(folder, ignore_errors=True)
    for path, text in sources.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_relative(path, text, name))
    metadata = {
        "name": "specker",
        "id": name,
        "version": HUB_VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return folder


def _relative(path: str, text: str, name: str) -> str:
    """Return a source file with relative imports and with operators in namespaces that begin with `name`."""
    text = _IMPORT.sub(lambda found: f"{found[1]}.{found[2] or ''}{found[3]}", text)
    text = _OWN_MODULE.sub('f"{__package__}.', text)
    text, count = _NAMESPACES.subn(lambda found: "_NAMESPACES = " + found[1].replace('"specker', f'"{name}'), text)
    if count != (path == "operators.py"):
        raise ValueError(f"{path}: expected the namespaces of the operators in operators.py alone, got {count} of them")
    if any(True for _ in _imports(text)):
        raise ValueError(f"{path}: expected every import of the package to have a relative form")
    return text


def main(output: Annotated[Path, typer.Argument(help="The folder `build` of a kernel repository.")]) -> None:
    """Write the package in the layout of Hugging Face's kernel hub."""
    for folder in build(output):
        typer.echo(folder)


if __name__ == "__main__":
    typer.run(main)
