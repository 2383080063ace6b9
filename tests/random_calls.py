"""Random calls of the operators, for differential tests: every argument, good and bad."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from specker import reference

ADJUSTMENT = ("bias_offsets", "bias_token_ids", "bias_values", "allowed_tokens")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Each side of a block of 128, a chunk of 512 and a shard of 4096 entries.
VOCABS = (1, 2, 5, 63, 128, 257, 513, 1000, 4096, 4097, 9000)
_VALUES: dict[str, Sequence[float]] = {
    "temperature": (0.0, 1e-6, 0.3, 0.7, 1.0, 1.5),
    "top_p": (0.0, 0.1, 0.5, 0.9, 0.99, 1.0, 2.0),
    "min_p": (0.0, 0.001, 0.05, 0.5, 1.0),
    "top_k": (-1, 0, 1, 2, 5, 50, 700, 10**6),
}
_BAD_VALUES: dict[str, Sequence[float]] = {
    "temperature": (-1.0, math.nan, math.inf),
    "top_p": (-1.0, math.nan),
    "min_p": (-0.1, 1.5, math.nan),
}
Choice = TypeVar("Choice")


class CallMaker:
    """Makes random calls of `verify`, as arguments by name, from one seed."""

    def __init__(self, seed: int) -> None:
        self.choices = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def chance(self, probability: float) -> bool:
        return self.choices.random() < probability

    def pick(self, options: Sequence[Choice]) -> Choice:
        return self.choices.choice(options)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def verify_call(self) -> dict[str, Any]:
        batch, gamma, vocab = self.pick((0, 1, 2, 3, 5)), self.pick((0, 1, 2, 4)), self.pick(VOCABS)
        target_is_probs, draft_is_probs = self.chance(0.25), self.chance(0.25)
        lengths = self.integers(0, gamma + 1, batch) if self.chance(0.6) else torch.full((batch,), gamma)
        flat = self.chance(0.3)
        total = int(lengths.sum())
        leading = (total,) if flat else (batch, gamma)
        has_bonus_rows = not flat or self.chance(0.7)
        target_leading = (total + batch if has_bonus_rows else total,) if flat else (batch, gamma + 1)
        target = self.rows(target_leading, vocab, target_is_probs)
        draft = self.draft(target, leading, flat, target_is_probs, draft_is_probs)
        parameters = self.parameters(batch)
        draft_parameters = parameters if self.chance(0.5) else self.parameters(batch)
        arguments: dict[str, Any] = {
            "draft_token_ids": self.tokens(draft, leading, vocab), "target": target, "draft": draft,
            "draft_receipt": None, "num_draft_tokens": None, "cu_num_draft_tokens": None, "draft_index": None,
            **parameters, **{f"draft_{name}": value for name, value in draft_parameters.items()},
            **self.adjustments(batch, target_leading[-1], flat, vocab, prefix=""),
            **self.adjustments(batch, leading[-1], flat, vocab if draft is None else draft.shape[-1], prefix="draft_"),
            "draft_columns": None, "draft_column_target_ids": None,
            **self.random_numbers(batch, target_leading), "max_num_draft_tokens": gamma,
            "target_is_probs": target_is_probs, "draft_is_probs": draft_is_probs, "return_logprobs": True,
            "return_accept_probs": self.chance(0.6),
        }  # fmt: skip
        if flat:
            bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            arguments["cu_num_draft_tokens"] = bounds.to(self.pick((torch.int32, torch.int64)))
            if draft is not None and self.chance(0.3):
                self.move_to_slots(arguments, lengths, gamma)
        else:
            self.complete_padded(arguments, batch, gamma, lengths)
        if (
            draft is not None
            and arguments["draft_index"] is None
            and arguments["draft_receipt"] is None
            and self.chance(0.2)
        ):
            self.reduce_draft(arguments, batch, leading, vocab)
        arguments["target"] = self.strided(target)
        if arguments["draft"] is not None:
            arguments["draft"] = self.strided(arguments["draft"])
        return arguments

    def adjustments(self, batch: int, rows: int, flat: bool, vocab: int, prefix: str) -> dict[str, Any]:
        """Return a bias and a mask as the operators take them, or None for each."""
        values: dict[str, Any] = dict.fromkeys(f"{prefix}{name}" for name in ADJUSTMENT)
        if self.chance(0.15):
            counts = self.integers(0, 4, batch)
            ids = [self.integers(0, vocab, int(count)).sort().values for count in counts]
            bias = torch.randn(int(counts.sum()), generator=self.generator) * 3
            if bias.numel() and self.chance(0.2):
                bias[0] = -math.inf
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
            values |= {
                f"{prefix}bias_offsets": offsets,
                f"{prefix}bias_token_ids": torch.cat([torch.zeros(0, dtype=torch.int64), *ids]),
                f"{prefix}bias_values": bias,
            }
        if self.chance(0.15):
            words = -(-vocab // 32) + self.pick((0, 2))
            leading = self.pick(((batch, 1), (1 if flat else batch, rows)))
            masks = [self.integers(-(2**31), 2**31, *leading, words) for _ in range(2)]
            either = (masks[0] | masks[1]).to(torch.int32)
            values[f"{prefix}allowed_tokens"] = either.expand(batch, rows, words)
        return values

    def move_to_slots(self, arguments: dict[str, Any], lengths: torch.Tensor, gamma: int) -> None:
        """Put the draft rows of a flat round into slots, in a random order; what is no draft row holds NaN."""
        draft, batch = arguments["draft"], len(lengths)
        slots = torch.randperm(batch + 2, generator=self.generator)[:batch]
        by_slot = torch.full((batch + 2, gamma, draft.shape[-1]), math.nan, dtype=draft.dtype)
        for slot, rows in zip(slots.tolist(), draft.split(lengths.tolist()), strict=True):
            by_slot[slot, : len(rows)] = rows
        if batch and self.chance(0.2):
            slots[0] = self.pick((-1, batch + 2))
        arguments["draft"], arguments["draft_index"] = by_slot, slots.to(self.pick((torch.int32, torch.int64)))

    def reduce_draft(self, arguments: dict[str, Any], batch: int, leading: tuple[int, ...], vocab: int) -> None:
        """Give the draft a vocabulary of its own, mapped to random target ids."""
        columns = self.pick((1, 3, 40, 5000))
        ids, order = self.integers(0, vocab, columns).sort()
        arguments["draft"] = self.rows(leading, columns, arguments["draft_is_probs"])
        arguments["draft_columns"], arguments["draft_column_target_ids"] = order, ids
        arguments["draft_token_ids"] = ids[self.integers(0, columns, *leading)]
        arguments |= self.adjustments(batch, leading[-1], len(leading) == 1, columns, prefix="draft_")

    def rows(self, leading: tuple[int, ...], vocab: int, is_probs: bool) -> torch.Tensor:
        values = torch.randn(*leading, vocab, generator=self.generator) * self.pick((0.5, 1.0, 4.0))
        shape = self.pick(("plain", "plain", "tied", "masked", "peaked"))
        if shape == "tied":
            values = (values * 2).round() / 2
        elif shape == "masked":
            values[torch.rand(values.shape, generator=self.generator) < 0.3] = -math.inf
        elif shape == "peaked":
            values[..., self.choices.randrange(vocab)] += 8
        if is_probs:
            values = values.exp().clamp(max=60000)
        if values.numel() and self.chance(0.2):
            row = values.view(-1, vocab)[self.choices.randrange(values.numel() // vocab)]
            row[self.choices.randrange(vocab)] = self.pick((math.nan, math.inf, -1.0))
            if self.chance(0.3):
                row.fill_(0.0 if is_probs else -math.inf)
        return values.to(self.pick(DTYPES))

    def draft(
        self, target: torch.Tensor, leading: tuple[int, ...], flat: bool, target_is_probs: bool, draft_is_probs: bool
    ) -> torch.Tensor | None:
        # The reference cannot index a draft tensor without rows.
        if self.chance(0.25) or 0 in leading[-1:]:
            return None
        if flat or target_is_probs or draft_is_probs or self.chance(0.5):
            return self.rows(leading, target.shape[-1], draft_is_probs)
        noise = torch.randn(*leading, target.shape[-1], generator=self.generator) * self.pick((0.0, 0.3))
        return (target[:, :-1].float() + noise).to(self.pick(DTYPES))

    def tokens(self, draft: torch.Tensor | None, leading: tuple[int, ...], vocab: int) -> torch.Tensor:
        if draft is None or not draft.numel() or self.chance(0.2):
            tokens = self.integers(0, vocab, *leading)
        else:
            likely = draft.float().nan_to_num(nan=0.0, posinf=0.0, neginf=-100.0).softmax(dim=-1)
            tokens = torch.multinomial(likely.view(-1, vocab), 1, generator=self.generator).view(leading)
        if tokens.numel() and self.chance(0.2):
            tokens.view(-1)[self.choices.randrange(tokens.numel())] = self.pick((-1, -2, vocab, vocab + 5))
        if len(leading) == 2 and self.chance(0.3):
            tokens = tokens.t().contiguous().t()
        return tokens.to(self.pick((torch.int32, torch.int64)))

    def parameters(self, batch: int) -> dict[str, torch.Tensor | None]:
        filters = self.pick((0.0, 0.5))
        present = {"temperature": True, **{name: self.chance(filters) for name in ("top_k", "top_p", "min_p")}}
        return {name: self.parameter(name, batch) if there else None for name, there in present.items()}

    def parameter(self, name: str, batch: int) -> torch.Tensor:
        dtypes = (torch.int32, torch.int64) if name == "top_k" else (torch.float32, torch.float64)
        count = 1 if self.chance(0.3) else batch
        values = [self.pick(_VALUES[name]) for _ in range(count)]
        if values and name in _BAD_VALUES and self.chance(0.05):
            values[0] = self.pick(_BAD_VALUES[name])
        return torch.tensor(values, dtype=self.pick(dtypes))

    def random_numbers(self, batch: int, leading: tuple[int, ...]) -> dict[str, torch.Tensor | None]:
        if self.chance(0.4):
            positions = self.integers(0, 2**40, self.pick((1, batch)))
            return {"seed": self.integers(-(2**40), 2**40, batch), "position": positions, "uniforms": None}
        uniforms = torch.rand(*leading, 2, generator=self.generator, dtype=torch.float64)
        if uniforms.numel() and self.chance(0.3):
            value = self.pick((0.0, 0.0, 1 - 2.0**-53, -0.1, 1.0, math.nan))
            uniforms.view(-1)[self.choices.randrange(uniforms.numel())] = value
        return {"seed": None, "position": None, "uniforms": uniforms}

    def complete_padded(self, arguments: dict[str, Any], batch: int, gamma: int, lengths: torch.Tensor) -> None:
        if self.chance(0.6):
            if batch and self.chance(0.05):
                lengths[0] = self.pick((-1, gamma + 1))
            arguments["num_draft_tokens"] = lengths.to(self.pick((torch.int32, torch.int64)))
        if arguments["draft"] is None or not batch:
            return
        if self.chance(0.2):
            slots = torch.randperm(batch, generator=self.generator)
            arguments["draft"] = arguments["draft"][slots.argsort()]
            arguments["draft_index"] = slots
            if self.chance(0.2):
                slots[0] = self.pick((-1, batch))
        elif not arguments["draft_is_probs"] and self.chance(0.3):
            self.add_receipt(arguments, batch, gamma)

    def add_receipt(self, arguments: dict[str, Any], batch: int, gamma: int) -> None:
        names = ("temperature", "top_k", "top_p", "min_p")
        temperature, top_k, top_p, min_p = (arguments[f"draft_{name}"] for name in names)
        tokens, receipts = arguments["draft_token_ids"].clone(), []
        for index in range(gamma):
            seed, position = self.integers(0, 99, batch), torch.tensor([index])
            logits = arguments["draft"][:, index]
            adjustment = [arguments[f"draft_{name}"] for name in ADJUSTMENT]
            if adjustment[3] is not None:
                adjustment[3] = adjustment[3][:, index : index + 1]
            drawn, _, receipt = reference.sample(logits, temperature, top_k, top_p, min_p, *adjustment, seed, position)
            tokens[:, index] = torch.where(drawn >= 0, drawn.to(tokens.dtype), tokens[:, index])
            receipts.append(receipt)
        arguments["draft_token_ids"], arguments["draft_receipt"] = tokens, torch.stack(receipts, dim=1)

    def strided(self, rows: torch.Tensor) -> torch.Tensor:
        layout = self.pick(("contiguous", "contiguous", "slice", "transposed"))
        if layout == "slice":
            vocab = rows.shape[-1]
            padded = torch.full((*rows.shape[:-1], vocab + 7), math.nan, dtype=rows.dtype)
            padded[..., 3 : 3 + vocab] = rows
            return padded[..., 3 : 3 + vocab]
        if layout == "transposed" and rows.dim() == 3:
            return rows.transpose(0, 1).contiguous().transpose(0, 1)
        return rows
