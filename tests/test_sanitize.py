"""The sanitizers that `make sanitize` runs in full: the shortest part of it, faults planted and found."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _has_address_sanitizer() -> bool:
    if shutil.which("g++") is None:
        return False
    found = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True)
    return Path(found.stdout.strip()).is_absolute()


@pytest.mark.slow
@pytest.mark.skipif(not _has_address_sanitizer(), reason="there is no g++ with AddressSanitizer")
def test_the_kernels_stay_within_their_memory(tmp_path: Path) -> None:
    run = ROOT / "tests" / "sanitize" / "run.py"
    command = [sys.executable, str(run), "--quick", "--build", str(tmp_path / "build")]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.count(": reported") == 3
    assert "address, driver: nothing to report" in finished.stdout
