"""The benchmark runs, refuses wrong answers, and the README shows what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def _run(*arguments: str) -> str:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=200).stdout


def test_the_readme_shows_the_committed_measurement() -> None:
    table = _run("bench.table", "bench/results/cpu.json")
    assert table in (ROOT / "README.md").read_text()


def test_a_short_run_writes_its_figures(tmp_path: Path) -> None:
    report = tmp_path / "figures.json"
    options = ("--case", "tiny", "--seconds", "0.2", "--no-compiled", "--json", str(report))
    assert "tiny overhead: 1 x 4 x 1,000 float32" in _run("bench.bench_verify", *options)
    (record,) = json.loads(report.read_text())["cases"]
    assert record["timings"]["specker"]["median"] > 0


CHECK = """
import itertools
import specker, torch
from bench import bench_verify, cases
{fault}
inputs = cases.make_inputs(cases.CASES[0], specker.Sampling(), torch.device("cpu"))
bench_verify.check_against_reference(cases.CASES[0], inputs)
"""
FAULT = """
right, calls = specker.verify, itertools.count()
specker.verify = lambda *rows, **options: right(*rows, **options)._replace(token_ids=torch.tensor(next(calls)))
"""


def test_a_provider_that_disagrees_with_the_reference_is_refused() -> None:
    for fault, message in (("", ""), (FAULT, "tiny overhead: expected the reference's 1, got 0")):
        command = [sys.executable, "-c", CHECK.format(fault=fault)]
        outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert (outcome.returncode != 0) is bool(fault)
        assert message in outcome.stderr
