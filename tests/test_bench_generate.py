"""The benchmarks of whole texts run, count what they should, and the committed figures hold every row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from specker.bench import bench_cache, bench_generate, decoders

from . import tiny_models

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    with tiny_models.one_thread():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny target."""
    model = tiny_models.tiny_llama(seed=1, vocab=tiny_models.BYTE_VOCAB, layers=3, eos=0)
    return tiny_models.save_folder(model, tmp_path_factory.mktemp("models") / "target")


def test_every_row_is_measured_and_written(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ("--target", folder, "--dtype", "float32", "--new-tokens", 5, "--repeats", 1, "--json", file)
    result = CliRunner().invoke(bench_generate.app, list(map(str, options)))
    assert result.exit_code == 0, result.output
    written = json.loads(file.read_text())
    assert [(row["mode"], row["draft"], row["batch"]) for row in written["rows"]] == [
        (mode, draft, batch) for mode in ("greedy", "sampled") for draft in ("lookup", "layers") for batch in (1, 4, 8)
    ]
    for row in written["rows"]:
        assert list(row["decoders"]) == ["plain", *(["assisted"] if row["batch"] == 1 else []), "specker"]
        for name, figures in row["decoders"].items():
            assert figures["tokens"] == 40
            assert figures["tokens_per_second"] > 0
            if row["mode"] == "greedy":
                assert figures["texts_equal_to_plain"] == 8, (row, name)
        assert row["decoders"]["plain"]["target_passes"] == 5 * 8 / row["batch"]
        assert row["decoders"]["specker"]["drafted"] >= row["decoders"]["specker"]["accepted"]
    assert "greedy, lookup: specker is " in result.output
    assert "sampled, layers: a batch of 8 is " in result.output


def test_greedy_assisted_generation_and_the_loop_need_as_many_passes() -> None:
    target = tiny_models.tiny_llama(seed=1, layers=3)
    pair = decoders.Pair(target, [1])
    prompts = decoders.Prompts(**tiny_models.left_padded([[3, 7, 7, 1, 3, 7]]))
    for draft in ("lookup", "layers"):
        found = {name: decode(prompts, 20, 0) for name, decode in pair.decoders("greedy", draft, 1).items()}
        assert found["assisted"].token_ids == found["specker"].token_ids == found["plain"].token_ids
        # Assisted generation drafts past the end of the text, so it may save the last pass.
        assert abs(found["assisted"].target_passes - found["specker"].target_passes) <= 1


def test_a_row_that_does_not_exist_is_refused(folder: Path) -> None:
    result = CliRunner().invoke(bench_generate.app, ["--target", str(folder), "--row", "fast"])
    assert result.exit_code == 2
    assert "expected part of a row such as 'greedy lookup 1', got 'fast'" in " ".join(result.output.split())


def test_prompts_in_a_group_lose_the_padding_they_share() -> None:
    prompts = decoders.Prompts(**tiny_models.left_padded([[1], [2, 3], [4, 5, 6, 7]]))
    group = prompts.only(slice(0, 2))
    assert group.input_ids.tolist() == [[7, 1], [2, 3]]
    assert group.attention_mask.tolist() == [[0, 1], [1, 1]]


def test_every_cache_of_the_comparison_reads_the_same() -> None:
    model = tiny_models.tiny_llama(seed=1)
    block = torch.randint(32, (4, 3), generator=torch.Generator().manual_seed(0))
    for way in (
        bench_cache.equal(model, block),
        bench_cache.realigned(model, block),
        bench_cache.slots(model, block, [200] * 4),
        bench_cache.slots(model, block, [200, 190, 180, 170]),
    ):
        way()
        way()


def test_the_committed_figures_hold_every_row() -> None:
    written = json.loads((RESULTS / "generate_cpu.json").read_text())
    assert len(written["rows"]) == 12
    assert written["command"].startswith("python -m bench.bench_generate")
    assert json.loads((RESULTS / "cache_cpu.json").read_text())["seconds"].keys() == {
        "equal", "realigned", "slots, equal", "slots, ragged",
    }  # fmt: skip
