"""`generate` with specker's loop: strings that end the text, and streamers."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
import transformers

from specker import InvalidInputError
from specker.generation import PromptLookup
from specker.integrations.transformers import speculative

from . import tiny_models
from .tiny_generate import CRITERIA, DRAFT, PROMPTS, VOCAB, run

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tiny_models.save_folder(
        tiny_models.tiny_llama(1, vocab=tiny_models.BYTE_VOCAB), tmp_path_factory.mktemp("bytes")
    )
    return transformers.AutoTokenizer.from_pretrained(str(folder))


def bytes_call(bytewise: Any, custom_generate: Any = None, **options: Any) -> Any:
    target = tiny_models.tiny_llama(1, vocab=tiny_models.BYTE_VOCAB)
    inputs = bytewise("rain", return_tensors="pt")
    letters = set(bytewise("abcdefghijklmnopqrstuvwxyz").input_ids)
    settings = {
        "max_new_tokens": 20,
        "do_sample": False,
        "pad_token_id": 0,
        "custom_generate": custom_generate,
        # A text of bytes that make no characters has no strings to stop at.
        "suppress_tokens": sorted(set(range(tiny_models.BYTE_VOCAB)) - letters),
    }
    return target.generate(inputs.input_ids, attention_mask=inputs.attention_mask, **{**settings, **options})


def test_stop_strings_end_the_text(tokenizer: Any) -> None:
    text = tokenizer.decode(bytes_call(tokenizer)[0, 4:].tolist())
    stop = text[6:8]
    expected = bytes_call(tokenizer, stop_strings=[stop], tokenizer=tokenizer)
    assert expected.shape[1] < 24
    draft = tiny_models.tiny_llama(1, vocab=tiny_models.BYTE_VOCAB)
    for custom_generate, options in (
        (speculative(draft, gamma=7, tokenizer=tokenizer), {"stop_strings": [stop]}),
        (
            speculative(draft, gamma=7),
            {
                "stopping_criteria": CRITERIA.StoppingCriteriaList(
                    [CRITERIA.StopStringCriteria(tokenizer=tokenizer, stop_strings=[stop])]
                )
            },
        ),
    ):
        assert bytes_call(tokenizer, custom_generate, **options).tolist() == expected.tolist()


def test_stop_strings_ask_for_a_tokenizer(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="stop_strings: expected a tokenizer with it"):
        bytes_call(tokenizer, speculative(PromptLookup()), stop_strings=["x"])


class Recorder:
    """A streamer that remembers."""

    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.pieces.append(value.reshape(-1).tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_gets_the_prompt_and_every_token_and_the_end() -> None:
    streamer = Recorder()
    tokens = run(speculative(DRAFT, streamer=streamer), rows=slice(1, 2))
    assert streamer.pieces[0] == PROMPTS[1].tolist()
    assert [*itertools.chain(*streamer.pieces)] == tokens[0].tolist()
    assert streamer.ended == 1


def test_a_text_streamer_of_another_thread_gets_the_text(tokenizer: Any) -> None:
    expected = tokenizer.decode(bytes_call(tokenizer)[0, 4:].tolist())
    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    draft = tiny_models.tiny_llama(2, vocab=tiny_models.BYTE_VOCAB)
    thread = threading.Thread(target=bytes_call, args=[tokenizer, speculative(draft, streamer=streamer)])
    thread.start()
    assert "".join(streamer) == expected
    thread.join(timeout=60)


def test_the_stream_ends_where_the_model_fails() -> None:
    broken = tiny_models.tiny_llama(seed=1, vocab=VOCAB)
    with torch.no_grad():
        broken.lm_head.weight.fill_(torch.nan)
    streamer = Recorder()
    with pytest.raises(InvalidInputError, match="a target row holds NaN"):
        run(speculative(PromptLookup(), streamer=streamer), model=broken, rows=slice(1, 2), do_sample=True)
    assert streamer.ended == 1


def test_a_streamer_takes_one_sequence() -> None:
    with pytest.raises(ValueError, match="streamer: expected one sequence with it, got a batch of 3"):
        run(speculative(DRAFT, streamer=Recorder()))
