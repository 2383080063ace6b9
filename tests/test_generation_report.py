"""What `specker generate` leaves behind: JSON, a picture, several prompts, and what an interruption prints."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from specker import generation_report
from specker.accounting import GenerationStats, SequenceStats, TokenBlock, TokenKind
from specker.cli import app
from specker.packages import ModelUnavailableError
from specker.stages import StageSeconds

from . import tiny_models

pytestmark = pytest.mark.usefixtures("one_thread")

NO_TIME = StageSeconds(0.0, 0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny target."""
    model = tiny_models.tiny_llama(seed=1, vocab=tiny_models.BYTE_VOCAB, layers=3, eos=0)
    return tiny_models.save_folder(model, tmp_path_factory.mktemp("models") / "target")


def generate(folder: Path, prompts: list[str], *arguments: object) -> Result:
    options = ("--target", folder, "--device", "cpu", "--dtype", "float32", "--max-new-tokens", 20, *arguments)
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["generate", *prompts, *map(str, options)])


def stats_of(*rounds: tuple[list[TokenKind], list[float]]) -> GenerationStats:
    counters = SequenceStats()
    for kinds, accept_probs in rounds:
        counters.record(len(accept_probs), kinds, accept_probs)
    return GenerationStats((counters,), len(rounds), NO_TIME)


def test_the_json_holds_settings_texts_and_counters_that_agree(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    arguments = ("--json", file, "--draft", "layers", "--temperature", 1, "--gamma", 3, "--seed", 4)
    result = generate(folder, ["abcabc", "hello"], *arguments)
    assert result.exit_code == 0, result.output
    written = json.loads(file.read_text())
    assert (written["gamma"], written["temperature"], written["seed"], written["dtype"]) == ("3", 1.0, 4, "float32")
    assert written["prompts"] == ["abcabc", "hello"]
    assert len(written["texts"]) == len(written["sequences"]) == 2
    for name in ("rounds", "drafted", "accepted", "recovered", "bonus", "emitted"):
        assert written[name] == sum(sequence[name] for sequence in written["sequences"])
    assert written["emitted"] == written["accepted"] + written["recovered"] + written["bonus"]
    assert 0 < written["overlap"] <= 1
    assert 1 <= written["predicted_tokens_per_round"] <= 4
    assert written["seconds"]["total"] == pytest.approx(
        sum(written["seconds"][stage] for stage in ("draft", "target", "verify", "other"))
    )
    assert written["plain"]["seconds"] > 0


def test_several_prompts_run_as_one_batch_and_print_their_texts(folder: Path) -> None:
    result = generate(folder, ["abcabc", "hello"])
    assert result.exit_code == 0, result.output
    texts = result.output.split("abcabc")[1].split("plain decoding")[0].split("hello")
    singles = [
        generate(folder, [prompt]).output.split(prompt)[1].split("plain decoding")[0] for prompt in ("abcabc", "hello")
    ]
    assert [text.strip() for text in texts] == [single.strip() for single in singles]
    (line,) = [line for line in result.output.splitlines() if "greedy output equals plain" in line]
    assert "yes" in line


def test_gamma_auto_tells_what_it_chose(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    result = generate(folder, ["abcabc"], "--gamma", "auto", "--json", file, "--draft", "layers")
    assert result.exit_code == 0, result.output
    assert "gamma chosen (rounds)" in result.output
    choices = json.loads(file.read_text())["gamma_choices"]
    assert len(choices) == json.loads(file.read_text())["target_passes"]
    assert {choice["reason"] for choice in choices} <= {"explore", "model", "probe"}


@pytest.mark.parametrize("gamma", ["many", "-1", "2.5"])
def test_a_gamma_that_is_no_number_is_a_usage_error(folder: Path, gamma: str) -> None:
    result = generate(folder, ["abc"], f"--gamma={gamma}")
    assert result.exit_code == 2
    assert f"--gamma: expected a number >= 0 or auto, got {gamma}" in " ".join(result.stderr.split())


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture_is_drawn(folder: Path, tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"run.{ending}"
    result = generate(folder, ["abcabc"], "--plot", file, "--draft", "layers")
    assert result.exit_code == 0, result.output
    assert file.stat().st_size > 5_000


def test_the_picture_of_a_run_without_drafts_is_drawn_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    generation_report.draw_generation(stats_of(([TokenKind.BONUS], [])), tmp_path / "plain.png")
    assert (tmp_path / "plain.png").exists()


def test_a_picture_of_no_known_format_is_refused(folder: Path, tmp_path: Path) -> None:
    result = generate(folder, ["abc"], "--plot", tmp_path / "run.txt")
    assert result.exit_code == 1
    assert "--plot: expected a file ending in .png, .svg or .pdf" in " ".join(result.stderr.split())


def test_a_missing_matplotlib_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModelUnavailableError, match=r"pictures need the package matplotlib: .*specker\[figures\]"):
        generation_report.draw_generation(stats_of(([TokenKind.BONUS], [])), tmp_path / "plain.png")


def test_the_prediction_is_the_mean_of_the_rounds_that_were() -> None:
    accepted, recovered = TokenKind.ACCEPTED, TokenKind.RECOVERED
    stats = stats_of(([accepted, recovered], [0.5, 0.5]), ([recovered], [0.5]), ([TokenKind.BONUS], []))
    assert stats.overlap == pytest.approx(0.5)
    assert generation_report.predicted_tokens_per_round(stats) == pytest.approx((1.75 + 1.5 + 1.0) / 3)


# A shell that starts the tests in the background has its children ignore the signal.
INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from specker.cli import main
sys.argv = ["specker", "generate", *sys.argv[1:]]
main()
"""


def test_ctrl_c_prints_the_partial_text_and_the_counters(tmp_path: Path) -> None:
    # Without a token that ends it, the text is still being written when the signal comes.
    endless = tiny_models.save_folder(tiny_models.tiny_llama(seed=1, vocab=tiny_models.BYTE_VOCAB), tmp_path / "target")
    options = ["--target", str(endless), "--device", "cpu", "--dtype", "float32", "--max-new-tokens", "100000"]
    command = [sys.executable, "-c", INTERRUPTED, "abcabc", *options, "--temperature", "1"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    assert process.stdout is not None
    seen = b""
    end = time.monotonic() + 120
    while time.monotonic() < end and len(seen.partition(b"abcabc")[2]) < 40:
        seen += os.read(process.stdout.fileno(), 4096)
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=60)
    assert process.returncode == 130, words
    assert b"interrupted: " in words
    assert b"accepted" in words


def test_an_interrupted_batch_prints_what_each_text_has_so_far(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generation = importlib.import_module("specker.generation")

    def interrupted(*_: Any, on_tokens: Any, **__: Any) -> None:
        if on_tokens is not None:
            on_tokens(TokenBlock(0, (70, 71), (TokenKind.ACCEPTED, TokenKind.RECOVERED)))
            on_tokens(TokenBlock(1, (80,), (TokenKind.BONUS,)))
            raise KeyboardInterrupt

    monkeypatch.setattr(generation, "generate", interrupted)
    result = generate(folder, ["abcabc", "hello"])
    assert result.exit_code == 130
    first, second = result.output.split("abcabc")[1].split("interrupted")[0].split("hello")
    assert len(first.strip()) == 2
    assert len(second.strip()) == 1
    assert "interrupted: 3 tokens (1 accepted, 1 recovered, 1 bonus)" in result.output
