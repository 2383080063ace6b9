"""Every fault of the list has a test or a reason why it has none."""

from __future__ import annotations

import re
from pathlib import Path

from .fault_sources import SOURCES, UNCONFIRMED
from .faults import FAULTS, NOT_SHOWN_HERE

PAGE = Path(__file__).resolve().parents[1] / "docs" / "faults.md"


def test_every_fault_of_the_list_has_a_test_or_a_reason() -> None:
    tested = set()
    for path in Path(__file__).parent.glob("test_faults_*.py"):
        for call in re.findall(r"fault(?:_case)?\(\s*((?:\"B\d+\",?\s*)+)", path.read_text()):
            tested.update(re.findall(r"B\d+", call))
    assert set(FAULTS) == {f"B{number:02}" for number in range(1, 135)}
    assert tested | set(NOT_SHOWN_HERE) == set(FAULTS)
    assert not tested & set(NOT_SHOWN_HERE)


def test_every_source_is_an_issue_of_a_fault() -> None:
    assert set(SOURCES) <= set(FAULTS)
    assert set(SOURCES) >= UNCONFIRMED
    for sources in SOURCES.values():
        assert sources
        assert len(set(sources)) == len(sources)
        assert all(re.fullmatch(r"[\w-]+/[\w.-]+#[1-9]\d*", source) for source in sources)


def test_the_page_links_the_first_sources_of_a_fault() -> None:
    lines = dict(re.findall(r"^- (B\d+): (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(lines) == set(FAULTS)
    for number, line in lines.items():
        linked = tuple("#".join(found) for found in re.findall(r"\(https://github\.com/([^)]+)/issues/(\d+)\)", line))
        assert linked == SOURCES.get(number, ())[:3]
        assert ("(unconfirmed: [" in line) == (number in UNCONFIRMED)
