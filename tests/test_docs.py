"""The pages and the docstrings: every example runs, every list is current, a broken link fails the build."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer

import specker
from specker import cli

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
# The article has a test of its own; the pages of the reference hold no code but the docstrings'.
PAGES = sorted(page.name for page in DOCS.glob("*.md") if page.name != "article.md")


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _modules() -> Iterator[str]:
    yield "specker"
    for module in pkgutil.walk_packages(specker.__path__, "specker."):
        if module.name != "specker._C":
            yield module.name
    for folder in ("bench", "kernels"):
        yield from (f"specker.{folder}.{path.stem}" for path in sorted((ROOT / folder).glob("*.py")))


def _with_examples() -> list[str]:
    named = ((name, ROOT / Path(*name.split("."))) for name in _modules())
    files = ((name, path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py")
             for name, path in named)  # fmt: skip
    return [name for name, path in files if ">>>" in path.read_text(encoding="utf-8")]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_what_its_blocks_print(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    if page == "loop.md":
        pytest.importorskip("transformers")
    assert _script("execute_page").main([str(DOCS / page)]) == 0, capsys.readouterr().err


def test_every_subject_has_its_page() -> None:
    subjects = ("exact", "loop", "guarantees", "performance", "numerics", "faults")
    assert {f"{subject}.md" for subject in subjects} < set(PAGES)


@pytest.mark.parametrize("name", _with_examples())
def test_the_examples_of_a_module_run(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    # numpy and torch are what a reader of an example has imported, whatever its module needs.
    known = {**vars(specker), **vars(module), "torch": torch, "specker": specker}
    results = doctest.testmod(module, extraglobs=known, optionflags=doctest.ELLIPSIS)
    assert results.failed == 0


def test_the_list_of_faults_is_current() -> None:
    assert _script("fault_list").main(["--check"]) == 0, "python docs/fault_list.py writes it"


def test_a_stale_list_of_faults_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    script = _script("fault_list")
    listed = script._faults()
    listed.FAULTS["B05"] = "another fault"
    monkeypatch.setattr(script, "_faults", lambda: listed)
    assert script.main(["--check"]) == 1


def _build(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Build a site of one page by the settings of ours."""
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    head, nav = settings.split("nav:\n")
    rest = nav[nav.index("validation:") : nav.index("plugins:")]
    (folder / "mkdocs.yml").write_text(head + rest, encoding="utf-8")
    (folder / "docs").mkdir()
    (folder / "docs" / "index.md").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("link", ["absent.md", "#absent", "/absent.md"])
def test_a_broken_link_fails_the_build(link: str, tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    outcome = _build(tmp_path, f"# Page\n\n[link]({link})\n")
    assert outcome.returncode != 0
    assert link in outcome.stderr


def test_a_page_without_broken_links_builds(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    outcome = _build(tmp_path, "# Page\n\n[link](#page)\n")
    assert outcome.returncode == 0, outcome.stderr
    assert (tmp_path / "build" / "site" / "index.html").exists()


def test_every_public_name_is_in_the_reference() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    documented = {line.split(".")[-1] for line in pages.splitlines() if line.startswith("::: ")}
    public = {name for name in specker.__all__ if name != "__version__"}
    assert public <= documented


PROSE = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
_CODE = re.compile(r"```sh\n.*?```|`[^`\n]+(?:\n[^`\n]+)?`", re.DOTALL)


def _commands(tool: str) -> set[tuple[str, ...]]:
    """Return what follows a tool's name wherever the pages show a command of it, to the end of the line."""
    code = "\n".join(match[0].strip("`") for page in PROSE for match in _CODE.finditer(page.read_text("utf-8")))
    found = re.findall(rf"(?:^|&& ){tool} ((?:.+\\\n)*.+)", code, flags=re.MULTILINE)
    return {tuple(command.split("  #")[0].split()) for command in found}


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_the_files_that_a_page_links_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_the_targets_that_the_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = {words[0] for words in _commands("make")}
    assert {"demo", "test", "bench"} <= named <= targets


def test_the_commands_that_the_pages_name_exist_with_their_options() -> None:
    commands = typer.main.get_command(cli.app).commands
    named = _commands("specker")
    assert {"bench", "doctor", "generate"} <= {words[0] for words in named} <= set(commands)
    for command, *words in named:
        options = {option for parameter in commands[command].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options
