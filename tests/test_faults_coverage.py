"""Every fault of the list has a test or a reason why it has none."""

from __future__ import annotations

import re
from pathlib import Path

from .faults import FAULTS, NOT_SHOWN_HERE


def test_every_fault_of_the_list_has_a_test_or_a_reason() -> None:
    tested = set()
    for path in Path(__file__).parent.glob("test_faults_*.py"):
        for call in re.findall(r"fault(?:_case)?\(\s*((?:\"B\d+\",?\s*)+)", path.read_text()):
            tested.update(re.findall(r"B\d+", call))
    assert set(FAULTS) == {f"B{number:02}" for number in range(1, 135)}
    assert tested | set(NOT_SHOWN_HERE) == set(FAULTS)
    assert not tested & set(NOT_SHOWN_HERE)
