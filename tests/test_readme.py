"""The code of the README runs, and does what the text says it does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import specker

BLOCKS = re.findall(
    r"```python\n(.*?)```", (Path(__file__).resolve().parents[1] / "README.md").read_text(), flags=re.DOTALL
)
BATCH, GAMMA, VOCAB = 3, 2, 11


def _round() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        "torch": torch,
        "specker": specker,
        "batch": BATCH,
        "gamma": GAMMA,
        "temperature": 0.7,
        "seed": 5,
        "draft_token_ids": torch.randint(0, VOCAB, (BATCH, GAMMA), generator=generator),
        "target_logits": torch.randn(BATCH, GAMMA + 1, VOCAB, generator=generator),
        "draft_logits": torch.randn(BATCH, GAMMA, VOCAB, generator=generator),
        "token_ids": torch.randint(0, VOCAB, (BATCH, 4), generator=generator),
    }


def test_the_eager_round_and_the_call_that_replaces_it_both_run() -> None:
    eager, replacement = _round(), _round()
    exec(BLOCKS[0], eager)
    exec(BLOCKS[1], replacement)
    assert eager["num_accepted"].shape == replacement["result"].num_accepted.shape == (BATCH,)
    assert eager["next_token"].shape == (BATCH, 1)
    assert replacement["result"].token_ids.shape == (BATCH, GAMMA + 1)


def test_the_eager_round_is_the_rule() -> None:
    names = _round()
    names["draft_logits"] = names["target_logits"][:, :GAMMA]
    exec(BLOCKS[0], names)
    assert names["num_accepted"].tolist() == [GAMMA] * BATCH


def test_the_whole_round_runs_as_it_stands() -> None:
    (block,) = [block for block in BLOCKS if "import specker\n" in block]
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        exec(block, names)
    assert names["result"].token_ids.shape == (2, 5)
    assert (names["position"] - torch.tensor([40, 25])).tolist() == names["result"].num_emitted.tolist()
    assert int(names["result"].num_accepted.sum()) > 0


def test_the_penalty_lowers_what_the_text_and_the_draft_hold() -> None:
    names = _round()
    before = names["target_logits"].clone()
    (penalty,) = [block for block in BLOCKS if "repetition_penalty" in block]
    exec(penalty, names)
    for step in range(GAMMA + 1):
        so_far = torch.cat([names["token_ids"], names["draft_token_ids"][:, :step]], dim=1)
        changed = names["target_logits"][:, step] != before[:, step]
        held = torch.zeros_like(changed).scatter(-1, so_far, True)
        assert torch.equal(changed, held)
        assert bool((names["target_logits"][:, step] <= before[:, step]).all())
