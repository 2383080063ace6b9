"""`specker bench` runs, says what it did, and the README shows what it measured."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from specker import cli
from specker.bench import bench_verify, cases, gpu_table, plots, provider, providers, table

ROOT = Path(__file__).resolve().parents[1]
TINY = ("--case", "tiny", "--seconds", "0.1", "--no-compiled", "--device", "cpu")


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def small_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    def small(*, quick: bool = False) -> dict[str, tuple[cases.Case, ...]]:
        return {
            "vocab": tuple(cases.Case(f"vocab {vocab}", 1, 2, vocab, torch.float32) for vocab in (100, 10_000)),
            "gamma": tuple(cases.Case(f"gamma {gamma}", 1, gamma, 100, torch.float32) for gamma in (1, 2)),
        }

    monkeypatch.setattr(bench_verify, "sweeps", small)


def bench(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, ["bench", *map(str, arguments)])


def test_the_readme_shows_the_committed_measurement() -> None:
    page = (ROOT / "README.md").read_text()
    assert "<!-- bench: cpu -->" in page
    assert table.filled(page, ROOT / "bench" / "results") == page


def test_the_readme_shows_the_committed_picture() -> None:
    assert "docs/figures/bench-cpu.png" in (ROOT / "README.md").read_text()
    assert (ROOT / "docs" / "figures" / "bench-cpu.png").read_bytes().startswith(b"\x89PNG")


def test_another_measurement_makes_another_table(tmp_path: Path) -> None:
    results = json.loads((ROOT / "bench" / "results" / "cpu.json").read_text())
    results["cases"][0]["providers"]["specker"]["warm"]["median"] = 0.0123456
    (tmp_path / "cpu.json").write_text(json.dumps(results))
    page = tmp_path / "page.md"
    page.write_text("above\n<!-- bench: cpu -->\nold\n<!-- end -->\nbelow\n")
    page.write_text(table.filled(page.read_text(), tmp_path))
    above, filled, below = page.read_text().partition(table.markdown(results))
    assert filled
    assert "| 12.35 |" in filled
    assert above.startswith("above\n<!-- bench: cpu -->\nMilliseconds")
    assert below == "\n<!-- end -->\nbelow\n"


def test_the_table_of_a_gpu_appears_with_its_measurement(tmp_path: Path) -> None:
    page = "<!-- bench: gpu_* -->\n<!-- end -->\n"
    assert "No measurement on a GPU yet" in table.filled(page, tmp_path)
    results = json.loads((ROOT / "bench" / "results" / "cpu.json").read_text())
    results["environment"] |= {"device": "NVIDIA H200", "backend": "triton"}
    (tmp_path / "gpu_cuda.json").write_text(json.dumps(results))
    filled = table.filled(page, tmp_path)
    assert "No measurement" not in filled
    assert "NVIDIA H200, read bandwidth" in filled
    assert table.markdown(results) in filled


def test_the_table_of_the_gpu_check_appears_with_its_measurement(tmp_path: Path) -> None:
    seconds = {"eager": 1.2e-3, "specker": 9e-5, "specker, graph": 6e-5, "smart eager, filters": 4e-3}
    record = {
        "case": "8 x 128256 torch.bfloat16",
        "seconds": seconds,
        "share_of_bandwidth": {"specker": 0.3, "specker, graph": 0.45},
        "eager_over_this": {"specker": 13.3, "specker, graph": 20.0},
    }
    versions = {name: f"{name}-1" for name in ("specker", "torch", "triton", "device", "date")}
    checks = {"grid": {"passed": True}, "law": {"passed": False}}
    measured = {"versions": versions, "checks": checks, "times": {"copy_bandwidth": 4.1e12, "cases": [record]}}
    (tmp_path / "gpu_device.json").write_text(json.dumps(measured))
    filled = table.filled("<!-- bench: gpu_* -->\n<!-- end -->\n", tmp_path)
    assert "device-1, copy bandwidth 4.10 TB/s" in filled
    assert "1 of 2 checks passed" in filled
    assert "| 8 x 128256 bfloat16 | 1200.0 | 90.0 | 60.0 | 4000.0 | 20.0x |  | 45% |" in filled


def test_a_dry_run_of_the_gpu_check_fits_the_table() -> None:
    """The fields are those that gpu_check writes: its timing of one small case in the interpreter's place, the CPU."""
    timing = pytest.importorskip("specker.bench.gpu_timing")
    case = cases.Case("2 x 40 torch.float32", 2, 4, 40, torch.float32)
    record = timing.time_case(case, torch.device("cpu"), 1e9, compiled=False)
    lines = gpu_table.markdown({"times": {"copy_bandwidth": 1e9, "cases": [record]}}).splitlines()
    assert lines[2].startswith("| 2 x 40 float32 | ")
    assert lines[0].count("|") == lines[2].count("|")


def test_a_run_prints_and_writes_everything(tmp_path: Path, small_sweeps: None) -> None:
    file, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    result = bench(*TINY, "--json", file, "--plot", picture)
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    for expected in (
        "tiny overhead: 1 x 4 x 1,000 float32",
        "clock processor time",
        f"torch {torch.__version__}",
        "memory_bandwidth",
        "skipped vLLM: ",
        "gate: eager: the exact law: chi-square p = ",
        (
            "specker | specker, receipt | specker, point mass | specker, filters | specker, filters, receipt: "
            "the reference's tokens under the same seeds"
        ),
    ):
        assert expected in words
    results = json.loads(file.read_text())
    (record,) = results["cases"]
    ours = record["providers"]["specker"]
    assert 0 < ours["warm"]["low"] <= ours["warm"]["median"] <= ours["warm"]["high"]
    assert ours["warm"]["calls"] == ours["cold"]["calls"] >= 5
    seconds = ours["floor_bytes"] / results["environment"]["memory_bandwidth"]
    assert ours["cold"]["floor_seconds"] == pytest.approx(seconds, rel=1e-4)
    # One or two of four tokens are accepted: two or three target rows and as many draft rows of 1,000 float32 decide.
    assert ours["floor_bytes"] == ours["moved_bytes"] in (4 * 4_000, 6 * 4_000)
    assert record["providers"]["eager"]["moved_bytes"] > 9 * 4_000
    assert {size: len(records) for size, records in results["sweeps"].items()} == {"vocab": 2, "gamma": 2}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_both_commands_are_the_same_code() -> None:
    (command,) = [entry for entry in cli.app.registered_commands if entry.callback is bench_verify.bench]
    assert command.name is None
    module = [sys.executable, "-m", "bench.bench_verify", "--case", "nonsense"]
    outcome = subprocess.run(module, cwd=ROOT, capture_output=True, text=True)
    assert outcome.returncode == bench("--case", "nonsense").exit_code == 2
    words = " ".join(outcome.stderr.replace("│", "").split())
    assert "expected part of one of these, got 'nonsense': tiny overhead: 1 x 4 x 1,000 float32; Llama 2" in words


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("TINY", ["tiny overhead"]),
        ("8 x 4 x 128,256 BF", ["Llama 3, batch 8"]),
        ("64 x", ["Llama 2, batch 64, gamma 8"]),
    ],
)
def test_a_case_is_named_or_told_by_its_shape(given: str, names: list[str]) -> None:
    assert [case.name for case in bench_verify._chosen(given, quick=False)] == names


def test_a_provider_that_disagrees_is_refused_by_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = providers.EAGER[0]._replace(read=lambda returned: provider.Outcome(returned[0], returned[1] * 0))
    monkeypatch.setattr(bench_verify, "all_providers", lambda: (wrong,))
    result = bench(*TINY)
    assert result.exit_code == 1
    assert "refused: eager: " in result.output


def test_a_quick_run_leaves_out_what_it_has_no_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_verify, "_QUICK_DEADLINE", 0.0)
    start = time.perf_counter()
    result = bench("--quick", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert f"left out for want of time: {', '.join(cases.QUICK)}" in result.output
    assert "gate:" not in result.output
    assert time.perf_counter() - start < 10


def test_quick_cases_exist() -> None:
    assert set(cases.QUICK) < {case.name for case in cases.CASES}


def test_missing_matplotlib_is_told_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    import_module = importlib.import_module

    def without_matplotlib(name: str, package: str | None = None) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name="matplotlib")
        return import_module(name, package)

    monkeypatch.setattr(importlib, "import_module", without_matplotlib)
    with pytest.raises(plots.PlotsUnavailableError, match=r"pip install 'specker\[bench\]'"):
        plots.require_matplotlib()
    result = bench(*TINY, "--plot", "unused.png")
    assert result.exit_code == 2
    assert result.output.strip() == "pictures need the package matplotlib: pip install 'specker[bench]'"


def test_a_broken_matplotlib_shows_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, package: str | None = None) -> Any:
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="numpy"):
        plots.require_matplotlib()


@pytest.mark.parametrize(
    ("row_bytes", "crossing"), [([10, 1000], 10.0), ([10, 100], None), ([101, 1000], None), ([1, 100, 10_000], 10.0)]
)
def test_the_crossing_lies_where_the_rows_fill_the_cache(row_bytes: list[int], crossing: float | None) -> None:
    sizes = [10 ** (index * 2 if len(row_bytes) == 2 else index) for index in range(len(row_bytes))]
    found = plots.crossing_of(sizes, row_bytes, 100)
    assert found == (crossing if crossing is None else pytest.approx(crossing))


def test_pytest_benchmark_runs_the_same_cases(tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    command = [
        *(sys.executable, "-m", "pytest", "bench", "--benchmark-only", "-k", "tiny and not compile", "-p", "no:xdist"),
        *("--benchmark-max-time=0.01", "--benchmark-warmup=off", f"--benchmark-json={saved}", "-p", "no:cacheprovider"),
    ]
    # pytest-benchmark measures nothing where it takes itself to be in a worker of pytest-xdist.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=alone)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    runs = json.loads(saved.read_text())["benchmarks"]
    assert {run["group"] for run in runs} == {"tiny overhead: 1 x 4 x 1,000 float32"}
    assert "test_verify[tiny overhead-specker]" in {run["name"] for run in runs}
    words = ("the exact law", "the reference's tokens", "a yardstick")
    assert all(run["extra_info"]["gate"].startswith(words) for run in runs)
