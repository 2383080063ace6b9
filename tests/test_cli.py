"""The command line: what generate and doctor print, exit codes, and errors in words."""

from __future__ import annotations

import importlib
import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

import specker
from specker import cli_report, embedded, models
from specker.accounting import GenerationStats, SequenceStats, TokenBlock, TokenKind
from specker.cli import app
from specker.packages import ModelUnavailableError
from specker.stages import StageSeconds

from . import tiny_models

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny target."""
    model = tiny_models.tiny_llama(seed=1, vocab=tiny_models.BYTE_VOCAB, layers=3, eos=0)
    return tiny_models.save_folder(model, tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny draft with the target's vocabulary."""
    model = tiny_models.tiny_llama(seed=2, vocab=tiny_models.BYTE_VOCAB, layers=1, eos=0)
    return tiny_models.save_folder(model, tmp_path_factory.mktemp("models") / "draft")


def run(*arguments: object, width: int = 200) -> Result:
    return CliRunner(env={"COLUMNS": str(width)}).invoke(app, list(map(str, arguments)))


def generate(folder: Path, *arguments: object) -> Result:
    return run("generate", "abcabcabc", "--target", folder, "--device", "cpu", "--dtype", "float32", *arguments)


def row(output: str, name: str) -> str:
    """Return the cells of a line of a table, joined by bars."""
    (line,) = [line for line in output.splitlines() if line.startswith(f"│ {name} ")]
    return line


def test_generate_prints_text_and_table(folder: Path) -> None:
    result = generate(folder, "--max-new-tokens", 20)
    assert result.exit_code == 0, result.output
    assert "target target, draft prompt lookup, gamma 4, temperature 0, seed 0, float32, cpu" in result.output
    for kind in ("accepted draft token", "recovered token", "bonus token"):
        assert kind in result.output
    assert "x)" in row(result.output, "tokens per second")
    assert "yes" in row(result.output, "greedy output equals plain")
    for stage in ("draft", "target", "verify", "other"):
        assert "%" in row(result.output, f"time in {stage}")


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("draft", ["layers", "path"])
def test_generate_takes_every_draft(folder: Path, draft_folder: Path, draft: str, temperature: int) -> None:
    chosen = draft_folder if draft == "path" else draft
    result = generate(folder, "--draft", chosen, "--temperature", temperature, "--max-new-tokens", 12, "--gamma", 2)
    assert result.exit_code == 0, result.output
    assert ("draft draft," if draft == "path" else "draft the target without its layers 1,") in result.output
    equality = row(result.output, "greedy output equals plain")
    assert ("yes" if temperature == 0 else "not compared") in equality


@pytest.mark.parametrize("arguments", [["--temperature", "1e-6"], ["--temperature", "1", "--top-p", "0"]])
def test_every_way_to_say_greedy_is_compared_with_plain_decoding(folder: Path, arguments: list[str]) -> None:
    result = generate(folder, *arguments, "--max-new-tokens", 12)
    assert result.exit_code == 0, result.output
    assert "yes" in row(result.output, "greedy output equals plain")


def test_a_penalty_in_the_generation_config_is_left_out_on_both_sides(folder: Path, tmp_path: Path) -> None:
    model = models.load(str(folder), dtype=torch.float32).model
    model.generation_config.repetition_penalty = 3.0
    penalised = tiny_models.save_folder(model, tmp_path / "penalised")
    assert "yes" in row(generate(penalised, "--max-new-tokens", 20).output, "greedy output equals plain")


def test_the_text_is_that_of_the_target(folder: Path) -> None:
    loaded = models.load(str(folder), dtype=torch.float32)
    prompt = loaded.tokenizer("abcabcabc", return_tensors="pt")["input_ids"]
    text = loaded.tokenizer.decode(tiny_models.greedy(loaded.model, prompt, 20, eos=0), skip_special_tokens=True)
    streamed = generate(folder, "--max-new-tokens", 20).output.split("abcabcabc")[1].split("plain decoding")[0]
    expected, printed = ([c for c in part if c.isascii() and c.isalnum()] for part in (text, streamed))
    assert len(expected) > 3
    assert printed == expected


def test_the_same_seed_prints_the_same_text(folder: Path) -> None:
    def text(seed: int) -> str:
        output = generate(folder, "--temperature", 1, "--seed", seed, "--max-new-tokens", 12).output
        return output.split("abcabcabc")[1].split("plain decoding")[0]

    assert text(1) == text(1) != text(2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target", "./nowhere"], "model ./nowhere: expected a local folder with config.json or a hub id"),
        (["--draft", "./nowhere"], "model ./nowhere: expected a local folder with config.json or a hub id"),
        (["--temperature", "-1"], "temperature: expected a value finite and >= 0, got -1.0"),
        (["--temperature", "nan"], "temperature: expected a value finite and >= 0, got nan"),
        (["--top-p", "-0.5"], "top_p: expected a value"),
        (["--device", "abacus"], "--device: expected a device such as cpu or cuda:0, got abacus"),
        (["--skip-layers", "1"], "--skip-layers: expected --draft layers with it, got --draft lookup"),
        (["--draft", "layers", "--skip-layers", "one"], "--skip-layers: expected numbers such as 3,17, got one"),
        (["--draft", "layers", "--skip-layers", "9"], "skipped layers: expected numbers in 0..2, got [9]"),
    ],
)
def test_errors_are_told_in_words_and_by_the_exit_code(folder: Path, arguments: list[str], words: str) -> None:
    result = generate(folder, *arguments)
    assert result.exit_code == 1
    assert f"Error: {words}" in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU that is asked for is there")
def test_a_device_that_is_not_there_is_refused(folder: Path) -> None:
    result = generate(folder, "--device", "cuda:0")
    assert result.exit_code == 1
    assert "Error: --device: expected a device that is present, got cuda:0" in result.stderr


def test_a_draft_of_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tiny_models.save_folder(tiny_models.tiny_llama(seed=2, vocab=300), tmp_path / "other")
    result = generate(folder, "--draft", other)
    assert result.exit_code == 1
    assert "Error: draft: expected the target's vocabulary of 257 tokens, got 300" in result.stderr


def test_an_empty_prompt_is_refused(folder: Path) -> None:
    result = run("generate", "", "--target", folder, "--device", "cpu")
    assert result.exit_code == 1
    assert "Error: PROMPT: expected a text of at least one token" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["--gamma", "-1"], ["--max-new-tokens", "0"], ["--dtype", "int8"], ["--nonsense"]]
)
def test_usage_errors_have_their_own_exit_code(arguments: list[str]) -> None:
    assert run("generate", *arguments).exit_code == 2


def test_missing_transformers_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_module = importlib.import_module

    def without_transformers(name: str, package: str | None = None) -> Any:
        if name.split(".")[0] == "transformers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return import_module(name, package)

    monkeypatch.setattr(importlib, "import_module", without_transformers)
    result = generate(folder)
    assert result.exit_code == 1
    assert "Error: models need the package transformers: pip install 'specker[transformers]'" in result.stderr


def test_an_interruption_prints_the_counters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, on_tokens: Any, **__: Any) -> None:
        if on_tokens is not None:
            on_tokens(TokenBlock(0, (70, 71), (TokenKind.ACCEPTED, TokenKind.RECOVERED)))
            raise KeyboardInterrupt

    monkeypatch.setattr("specker.generation.generate", interrupted)
    result = generate(folder)
    assert result.exit_code == 130
    assert "interrupted: 2 tokens (1 accepted, 1 recovered, 0 bonus)" in result.stderr


def test_the_kinds_differ_in_colour_and_in_a_text_attribute() -> None:
    console = Console(force_terminal=True, color_system="standard", width=200)

    class Letters:
        def decode(self, token_ids: list[int], **_: Any) -> str:
            return "".join(map(chr, token_ids))

    with console.capture() as capture:
        stream = cli_report.TokenStream(Letters(), console, ["prompt"])
        stream(TokenBlock(0, (65, 66), (TokenKind.ACCEPTED, TokenKind.RECOVERED)))
        stream(TokenBlock(0, (67,), (TokenKind.BONUS,)))
    output = capture.get()
    for letter, code in (("A", "4;32"), ("B", "1;31"), ("C", "3;36")):
        assert f"\x1b[{code}m{letter}\x1b[0m" in output


def test_a_character_of_several_tokens_is_printed_once_it_is_complete() -> None:
    class Bytes:
        def decode(self, token_ids: list[int], **_: Any) -> str:
            return bytes(token_ids).decode(errors="replace")

    console = Console(width=200)
    with console.capture() as capture:
        stream = cli_report.TokenStream(Bytes(), console, ["prompt"])
        for token_id in "né".encode():
            stream(TokenBlock(0, (token_id,), (TokenKind.BONUS,)))
    assert capture.get().endswith("né")


def test_a_difference_from_plain_decoding_is_explained() -> None:
    model = tiny_models.tiny_llama(seed=1)
    prompt = torch.tensor([[3, 7]])
    plain = torch.tensor(tiny_models.greedy(model, prompt, 6))
    other = plain.clone()
    other[4] = (plain[4] + 1) % 32
    difference = cli_report.first_difference(model, prompt, other, plain)
    assert difference is not None
    assert difference.position == 4
    row = model(torch.cat([prompt[0], plain[:4]])[None]).logits[0, -1].detach()
    assert difference.logit_gap == pytest.approx(float(row[plain[4]] - row[other[4]]), abs=1e-5)
    assert difference.logit_gap > 0
    counters = SequenceStats()
    counters.record(0, [TokenKind.BONUS])
    stats = GenerationStats((counters,), 1, StageSeconds(0.1, 0.2, 0.3, 0.4))
    console = Console(width=200)
    with console.capture() as capture:
        cli_report.print_report(console, stats, cli_report.Plain([plain], 1.0), difference, greedy=True)
    assert "no, from token 5 on" in capture.get()
    assert "the model's own rounding" in " ".join(capture.get().split())


def test_a_shorter_text_differs_where_it_ends() -> None:
    difference = cli_report.first_difference(None, torch.tensor([[1]]), torch.tensor([2]), torch.tensor([2, 3]))
    assert difference is not None
    assert difference.position == 1


@pytest.mark.parametrize("command", ["generate", "bench"])
@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(
    command: str, option: str, tmp_path: Path
) -> None:
    result = run(command, option, tmp_path / "absent" / "file.png", width=300)
    assert result.exit_code == 2
    assert "expected a file in a folder that exists, got" in " ".join(result.output.replace("│", "").split())


def test_a_picture_of_no_format_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    result = run("generate", "--target", tmp_path / "absent", "--plot", tmp_path / "figure.txt")
    assert result.exit_code == 1
    assert "--plot: expected a file ending in .png, .svg or .pdf" in result.output


def test_doctor_tells_versions_devices_and_backends() -> None:
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert specker.__version__ in row(result.output, "specker")
    assert importlib.metadata.version("torch") in row(result.output, "torch")
    assert f"{torch.get_num_threads()} thread" in row(result.output, "cpu")
    backends = result.output.split("backends")[1]
    for backend, reason in specker.available_backends().items():
        assert (f"cannot serve: {reason}" if reason else "serves") in row(backends, backend)
    assert ("cpp" if not specker.available_backends()["cpp"] else "reference") in row(
        result.output, "CPU tensors go to"
    )


def test_doctor_tells_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Any:
        raise ModelUnavailableError("the package is not here")

    monkeypatch.setattr(embedded, "gguf_file", missing)
    monkeypatch.setattr(specker, "available_backends", lambda: {"reference": "", "cpp": "no file", "triton": "no GPU"})
    output = run("doctor").output
    assert "missing: the package is not here" in output
    assert "cannot serve: no file; pip install --no-build-isolation" in row(output, "cpp")
    assert "reference" in row(output, "CPU tensors go to")


def test_the_version_is_printed() -> None:
    result = run("--version")
    assert (result.exit_code, result.output) == (0, f"specker {specker.__version__}\n")


def test_the_command_is_installed() -> None:
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="specker")
    assert entry.load().__module__ == "specker.cli"
