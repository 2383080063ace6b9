"""specker in a plain PyTorch loop, the way gpt-fast is written: no library of models, static caches, a batch.

The model is a stand-in of random weights; what matters is `generate`, which replaces the probabilities, the Python
`if`s and the `multinomial`s of such a loop by `specker.sample` and `specker.verify`. Caches of a fixed size need no
cropping: a rejected position is simply written again, so every sequence accepts what it accepts.

    python examples/gpt_fast_loop.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import specker


class Attention(nn.Module):
    """Causal self-attention that keeps the keys and values of every position in place."""

    cache: torch.Tensor

    def __init__(self, width: int, heads: int, batch: int, max_length: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.register_buffer("cache", torch.zeros(2, batch, max_length, heads, width // heads))

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Attend from `(batch, length, width)` at `positions` to all that `mask` shows."""
        query, key, value = (part.unflatten(-1, (self.heads, -1)) for part in self.inputs(hidden).chunk(3, dim=-1))
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        self.cache[0, rows, positions], self.cache[1, rows, positions] = key, value
        keys, values = self.cache.transpose(2, 3)
        mixed = functional.scaled_dot_product_attention(query.transpose(1, 2), keys, values, attn_mask=mask)
        attended: torch.Tensor = self.output(mixed.transpose(1, 2).flatten(-2))
        return attended


class Transformer(nn.Module):
    """A decoder called as gpt-fast's: token ids and their positions in, logits out."""

    slots: torch.Tensor

    def __init__(self, *, vocab: int, width: int, layers: int, heads: int, batch: int, max_length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.places = nn.Embedding(max_length, width)
        self.attention = nn.ModuleList(Attention(width, heads, batch, max_length) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers + 1))
        self.head = nn.Linear(width, vocab)
        self.register_buffer("slots", torch.arange(max_length))

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Read `(batch, length)` token ids at `(batch, length)` positions; return `(batch, length, vocab)`."""
        mask = (self.slots <= positions[..., None])[:, None]
        hidden = self.tokens(token_ids) + self.places(positions)
        for norm, attention in zip(self.norms, self.attention, strict=False):
            hidden = hidden + attention(norm(hidden), positions, mask)
        logits: torch.Tensor = self.head(self.norms[-1](hidden))
        return logits


@torch.no_grad()
def generate(
    target: Transformer,
    draft: Transformer,
    prompts: torch.Tensor,
    *,
    new_tokens: int,
    gamma: int = 4,
    temperature: float = 0.8,
    top_k: int = 200,
    seed: torch.Tensor,
) -> torch.Tensor:
    """Continue `(batch, length)` prompts by `new_tokens`, each sequence at its own pace; `seed (batch,)`."""
    batch, length = prompts.shape
    device, end = prompts.device, length + new_tokens
    rows, window = torch.arange(batch, device=device)[:, None], torch.arange(gamma + 1, device=device)
    # Room for a last round that runs over the end; both models need as many positions.
    token_ids = torch.zeros(batch, end + gamma + 1, dtype=torch.int64, device=device)
    token_ids[:, :length] = prompts

    position = torch.full((batch,), length, device=device)
    prompt_positions = torch.arange(length - 1, device=device).expand(batch, -1)
    for model in (target, draft):
        # All but the last token: every round begins by reading the newest one.
        model(prompts[:, :-1], prompt_positions)
    while int(position.min()) < end:
        # Finished sequences idle at the end, on positions that nobody reads.
        start = position.clamp(max=end)
        places = start[:, None] + window
        receipts, draft_rows = [], []
        for step in range(gamma + 1):
            # The last pass only fills the draft's cache, in case all its tokens are accepted.
            read = places[:, step : step + 1] - 1
            logits = draft(token_ids.gather(1, read), read)[:, 0]
            if step < gamma:
                draft_rows.append(logits)
                draw = specker.sample(logits, temperature=temperature, top_k=top_k, seed=seed, position=start + step)
                receipts.append(draw.receipt)
                token_ids.scatter_(1, places[:, step : step + 1], draw.token_ids[:, None])

        result = specker.verify(
            token_ids.gather(1, places[:, :gamma]),
            target(token_ids.gather(1, places - 1), places - 1),
            torch.stack(draft_rows, dim=1),
            draft_receipt=specker.DraftReceipt.stack(receipts),
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            position=start,
        )
        result.raise_for_status()
        token_ids[rows, places] = result.token_ids.clamp(min=0)
        position = start + result.num_emitted
    return token_ids[:, :end]


if __name__ == "__main__":
    torch.manual_seed(0)
    large, small = (
        Transformer(vocab=1000, width=64, layers=layers, heads=4, batch=2, max_length=64) for layers in (4, 1)
    )
    print(generate(large, small, torch.randint(1000, (2, 8)), new_tokens=24, seed=torch.tensor([1, 2])))
