"""The script that checks and times the kernels on a GPU, as far as a processor can run it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)
ROOT = Path(__file__).resolve().parents[1]


def test_a_dry_run_checks_and_times_and_writes_one_file(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "bench.gpu_check", "--dry-run", "--json", str(path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    told = json.loads(path.read_text())
    assert {name for name, check in told["checks"].items() if "skipped" not in check} == {"grid", "law", "far rows"}
    assert told["checks"]["law"]["rounds"] == 40
    assert {"torch", "triton", "device"} <= set(told["versions"])
    case = told["times"]["cases"][0]
    assert {"eager", "specker", "specker, receipt", "specker, filters"} <= set(case["seconds"])
    assert set(case["share_of_bandwidth"]) == {name for name in case["seconds"] if name.startswith("specker")}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "bench.gpu_check"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 2
    assert "no GPU" in run.stderr
