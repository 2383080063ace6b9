"""Writes the list of faults into docs/faults.md from tests/faults.py: `python docs/fault_list.py [--check]`."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parent
_BLOCK = re.compile(r"(?P<start><!-- faults (?P<first>\d+)-(?P<last>\d+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


def filled(page: str) -> str:
    """Return the page with the faults of each marker's numbers listed between its markers."""
    listed = _faults()

    def fill(block: re.Match[str]) -> str:
        numbers = [f"B{number:02d}" for number in range(int(block["first"]), int(block["last"]) + 1)]
        lines = [f"- {number}: {listed.FAULTS[number]}{_note(listed, number)}\n" for number in numbers]
        return f"{block['start']}\n{''.join(lines)}\n{block['end']}"

    return _BLOCK.sub(fill, page)


def _note(listed: ModuleType, number: str) -> str:
    reason = listed.NOT_SHOWN_HERE.get(number)
    return f" *(no test: {reason})*" if reason else ""


def _faults() -> ModuleType:
    spec = importlib.util.spec_from_file_location("faults", DOCS.parent / "tests" / "faults.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError("tests/faults.py")
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
