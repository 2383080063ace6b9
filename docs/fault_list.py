"""Writes the faults and their sources, of tests/, into docs/faults.md: `python docs/fault_list.py [--check]`."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parent
_BLOCK = re.compile(r"(?P<start><!-- faults (?P<first>\d+)-(?P<last>\d+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)
_LINKS = 3


def filled(page: str) -> str:
    """Return the page with the faults of each marker's numbers listed between its markers."""
    listed, links = _faults(), _links()

    def fill(block: re.Match[str]) -> str:
        numbers = [f"B{number:02d}" for number in range(int(block["first"]), int(block["last"]) + 1)]
        lines = [
            f"- {number}: {listed.FAULTS[number]}{links.get(number, '')}{_note(listed, number)}\n" for number in numbers
        ]
        return f"{block['start']}\n{''.join(lines)}\n{block['end']}"

    return _BLOCK.sub(fill, page)


def _note(listed: ModuleType, number: str) -> str:
    reason = listed.NOT_SHOWN_HERE.get(number)
    return f" *(no test: {reason})*" if reason else ""


def _links() -> dict[str, str]:
    """Return by fault the links to its first sources, in parentheses."""
    listed = _module("fault_sources")
    projects = Counter(source.split("#")[0] for sources in listed.SOURCES.values() for source in sources)
    # Forks keep their owner in the text: a name alone is the project of that name cited most.
    known = {project.split("/")[1]: project for project, _ in reversed(projects.most_common())}

    def link(source: str) -> str:
        project, number = source.split("#")
        name = project.split("/")[1]
        text = name if known[name] == project else project
        return f"[{text}#{number}](https://github.com/{project}/issues/{number})"

    return {
        number: f" ({'unconfirmed: ' * (number in listed.UNCONFIRMED)}{', '.join(map(link, sources[:_LINKS]))})"
        for number, sources in listed.SOURCES.items()
    }


def _faults() -> ModuleType:
    return _module("faults")


def _module(name: str) -> ModuleType:
    path = DOCS.parent / "tests" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(arguments: list[str]) -> int:
    """Write or check the page; 1 where it is stale."""
    page = DOCS / "faults.md"
    text = page.read_text(encoding="utf-8")
    if "--check" in arguments:
        return int(filled(text) != text)
    page.write_text(filled(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
