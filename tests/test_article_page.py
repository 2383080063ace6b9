"""The executed page: its blocks run, print what it shows, and the pictures it links exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def execute_page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("execute_page", DOCS / "execute_page.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError("docs/execute_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_its_blocks_print(execute_page: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute_page.main([str(DOCS / "article.md")]) == 0, capsys.readouterr().err


def test_every_part_runs_code_and_every_picture_exists() -> None:
    text = (DOCS / "article.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (?=\d\. )", text, flags=re.MULTILINE)[1:]
    assert [part[0] for part in parts] == list("123456789")
    assert all("```python" in part for part in parts)
    pictures = re.findall(r"!\[.+?\]\((.+?)\)", text)
    assert len(pictures) == 5
    assert all((DOCS / picture).read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_a_stale_page_is_noticed_and_rewritten(
    execute_page: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("A\n\n```python\nvalue = 2\n```\n\n```python\nprint(value + 1)\n```\n\n```text\n4\n```\nB\n")
    assert execute_page.main([str(page)]) == 1
    assert "-4\n+3\n" in capsys.readouterr().err
    assert execute_page.main([str(page), "--write"]) == 0
    assert execute_page.main([str(page)]) == 0
    assert page.read_text().endswith("```text\n3\n```\nB\n")
