"""Speculative decoding in a loop of one's own: two Hugging Face models, `specker.sample` and `specker.verify`.

    python examples/own_loop.py HuggingFaceTB/SmolLM2-1.7B HuggingFaceTB/SmolLM2-135M "A rainbow is"

Target and draft are folders or hub ids of causal language models with the same vocabulary.
"""

from __future__ import annotations

import argparse
import inspect
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import specker


@torch.no_grad()
def generate(
    target: Any,
    draft: Any,
    input_ids: torch.Tensor,
    *,
    gamma: int = 4,
    max_new_tokens: int = 64,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> torch.Tensor:
    """Return `(1, length + new)`, the prompt `(1, length)` and up to `max_new_tokens` tokens behind it."""
    eos_token_id = target.generation_config.eos_token_id
    eos_token_ids = torch.tensor(eos_token_id if eos_token_id is not None else [], device=input_ids.device)
    caches = {target: DynamicCache(), draft: DynamicCache()}

    def read(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits behind every token that the model's cache does not hold yet."""
        unread = token_ids[:, caches[model].get_seq_length() :]
        # transformers 5.18 renamed the argument.
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        logits: torch.Tensor = model(input_ids=unread, use_cache=True, **{name: caches[model]}).logits
        return logits

    token_ids, end = input_ids, input_ids.shape[1] + max_new_tokens
    while token_ids.shape[1] < end:
        position = token_ids.shape[1]
        drafted, rows, receipts = token_ids, [], []
        for step in range(gamma):
            rows.append(read(draft, drafted)[:, -1])
            draw = specker.sample(rows[-1], temperature=temperature, top_p=top_p, seed=seed, position=position + step)
            receipts.append(draw.receipt)
            drafted = torch.cat([drafted, draw.token_ids[:, None]], dim=1)

        result = specker.verify(
            drafted[:, position:],
            read(target, drafted)[:, -gamma - 1 :],
            torch.stack(rows, dim=1),
            draft_receipt=specker.DraftReceipt.stack(receipts),
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            position=position,
        )
        result.raise_for_status()

        new_tokens = result.token_ids[:, : int(result.num_emitted)]
        ends = torch.isin(new_tokens[0], eos_token_ids).nonzero()
        if len(ends):
            return torch.cat([token_ids, new_tokens[:, : int(ends[0]) + 1]], dim=1)[:, :end]
        token_ids = torch.cat([token_ids, new_tokens], dim=1)
        for cache in caches.values():
            # The last token is read at the start of the next round; what was rejected is forgotten.
            surplus = cache.get_seq_length() - (token_ids.shape[1] - 1)
            if surplus > 0:
                cache.crop(-surplus)
    return token_ids[:, :end]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "draft", "prompt"):
        parser.add_argument(name)
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.target)
    large, small = (AutoModelForCausalLM.from_pretrained(name).eval() for name in (given.target, given.draft))
    print(tokenizer.decode(generate(large, small, tokenizer(given.prompt, return_tensors="pt").input_ids)[0]))
