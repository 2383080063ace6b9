"""What `specker generate` prints: the streamed text and the table behind it."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specker.accounting import GenerationStats, TokenBlock, TokenKind, cut_at_eos

# Colour and a text attribute, so that the kinds can be told apart without colours too.
_STYLES = {
    TokenKind.ACCEPTED: "green underline",
    TokenKind.RECOVERED: "bold red",
    TokenKind.BONUS: "italic cyan",
}
_LEGENDS = {
    TokenKind.ACCEPTED: "accepted draft token (underlined)",
    TokenKind.RECOVERED: "recovered token, after a rejection (bold)",
    TokenKind.BONUS: "bonus token, after the last draft (italic)",
}


class TokenStream:
    """Prints tokens in the style of their kinds; the `on_tokens` callback.

    A single text is printed block by block as it comes; several are printed one behind the other by `finish`.

    Args:
        tokenizer: turns token ids into text.
        console: where to print.
        prompts: printed above their texts.

    Example:
        >>> stream = TokenStream(tokenizer, Console(), ["Hello"])  # doctest: +SKIP
    """

    def __init__(self, tokenizer: Any, console: Console, prompts: Sequence[str]) -> None:
        self._console = console
        self._prompts = prompts
        self._texts = [_StyledText(tokenizer) for _ in prompts]
        self._kinds: Counter[TokenKind] = Counter()
        legend = Text("  ").join(Text(words, style=_STYLES[kind]) for kind, words in _LEGENDS.items())
        console.print(legend)
        if len(prompts) == 1:
            console.print(Text(f"\n{prompts[0]}\n", style="dim"))

    def __call__(self, block: TokenBlock) -> None:
        """Take the tokens of one block, and print them where there is one text only."""
        for token_id, kind in zip(block.token_ids, block.kinds, strict=True):
            self._kinds[kind] += 1
            piece = self._texts[block.sequence].add(token_id, kind)
            if len(self._prompts) == 1:
                self._console.print(piece, end="", soft_wrap=True)

    def finish(self) -> None:
        """Print what has not been printed yet: several texts, each under its prompt."""
        if len(self._prompts) > 1:
            for prompt, text in zip(self._prompts, self._texts, strict=True):
                self._console.print(Text(f"\n{prompt}\n", style="dim"))
                self._console.print(text.whole, soft_wrap=True)

    def counters(self) -> str:
        """Return the counters so far in words."""
        kinds = ", ".join(f"{self._kinds[kind]} {kind.value}" for kind in TokenKind)
        return f"{sum(self._kinds.values())} tokens ({kinds})"


class _StyledText:
    """A text that grows by tokens, each in the style of its kind."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self.whole = Text()

    def add(self, token_id: int, kind: TokenKind) -> Text:
        """Return what the token adds to the text."""
        self._token_ids.append(token_id)
        text = self._tokenizer.decode(self._token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        # A character that is not complete yet decodes to this mark; it is printed with its last token.
        complete = not text.endswith("\N{REPLACEMENT CHARACTER}")
        piece = Text(text[len(self.whole) :] if complete else "", style=_STYLES[kind])
        self.whole.append_text(piece)
        return piece


class Plain(NamedTuple):
    """A run of plain decoding: the new tokens of each prompt, one-dimensional, and its seconds."""

    token_ids: list[torch.Tensor]
    seconds: float

    @property
    def emitted(self) -> int:
        """New tokens of all prompts."""
        return sum(map(len, self.token_ids))

    @staticmethod
    def measure(
        decode: Callable[[], torch.Tensor], input_ids: torch.Tensor, eos_token_ids: Collection[int] = ()
    ) -> Plain:
        """Time a call that returns prompts and new tokens, `(batch, length)`, padded behind the end of a text."""
        start = time.perf_counter()
        # Copying to the host waits for a GPU to finish.
        token_ids = decode()[:, input_ids.shape[1] :].cpu()
        seconds = time.perf_counter() - start
        return Plain([torch.tensor(cut_at_eos(row, eos_token_ids)) for row in token_ids.tolist()], seconds)


class Difference(NamedTuple):
    """Where two greedy texts part, and how far the target held the two tokens apart."""

    position: int
    logit_gap: float


def first_difference(
    model: Any, input_ids: torch.Tensor, token_ids: torch.Tensor, plain_token_ids: torch.Tensor
) -> Difference | None:
    """Return where the new tokens first differ from those of plain decoding, or None where they are equal.

    Example:
        >>> first_difference(None, torch.tensor([[1]]), torch.tensor([2]), torch.tensor([2])) is None
        True
    """
    token_ids, plain_token_ids = token_ids.cpu(), plain_token_ids.cpu()
    if torch.equal(token_ids, plain_token_ids):
        return None
    length = min(len(token_ids), len(plain_token_ids))
    differing = (token_ids[:length] != plain_token_ids[:length]).nonzero()
    index = int(differing[0]) if len(differing) else length
    if index == length:
        return Difference(index, float("nan"))
    prefix = torch.cat([input_ids[0].cpu(), plain_token_ids[:index]])[None].to(input_ids.device)
    with torch.no_grad():
        row = model(prefix).logits[0, -1].float()
    return Difference(index, abs(float(row[plain_token_ids[index]] - row[token_ids[index]])))


def print_report(
    console: Console, stats: GenerationStats, plain: Plain, difference: Difference | None, *, greedy: bool
) -> None:
    """Print the table of one run: speed beside plain decoding, acceptance, time by stage, equality."""
    speed = stats.emitted / stats.seconds.total
    plain_speed = plain.emitted / plain.seconds
    plain_passes = max(map(len, plain.token_ids))
    table = Table("", "plain", "speculative", title="one run each, after warm-up; seconds include the prompt")
    table.add_row("new tokens", str(plain.emitted), str(stats.emitted))
    table.add_row("seconds", f"{plain.seconds:.2f}", f"{stats.seconds.total:.2f}")
    table.add_row("tokens per second", f"{plain_speed:.1f}", f"{speed:.1f} ({speed / plain_speed:.2f}x)")
    table.add_row("target passes", str(plain_passes), str(stats.target_passes))
    per_pass = f"{plain.emitted / plain_passes:.2f}", f"{stats.tokens_per_target_pass:.2f}"
    table.add_row("tokens per target pass", *per_pass)
    table.add_section()
    table.add_row("drafted tokens", "", str(stats.drafted))
    table.add_row("accepted / recovered / bonus", "", f"{stats.accepted} / {stats.recovered} / {stats.bonus}")
    table.add_row("accepted per round", "", f"{stats.accepted_per_round:.2f} in {stats.rounds} rounds")
    shares = " ".join(f"{share:.2f}" for share in stats.acceptance_by_position)
    table.add_row("acceptance by position", "", shares or "nothing was drafted")
    overlap = "nothing was drafted" if stats.overlap is None else f"{stats.overlap:.3f}"
    table.add_row("estimated overlap α", "", overlap)
    if stats.gamma_choices:
        table.add_row("gamma chosen (rounds)", "", _choices(stats))
    for stage, seconds in stats.seconds._asdict().items():
        table.add_row(f"time in {stage}", "", f"{100 * seconds / stats.seconds.total:.1f} %")
    table.add_section()
    table.add_row("greedy output equals plain", "", _equality(difference, greedy))
    console.print(table)
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores + 0.5:
        console.print(
            f"Other programs are using the processor (load {load:.1f} on {cores} cores): the times say little."
        )
    if greedy and difference is not None:
        console.print(_explanation(difference), markup=False)


def _choices(stats: GenerationStats) -> str:
    """Return how often the cost model chose each gamma, rounds of exploration included."""
    counts = Counter(choice.gamma for choice in stats.gamma_choices)
    return ", ".join(f"{gamma} ({count})" for gamma, count in sorted(counts.items()))


def _equality(difference: Difference | None, greedy: bool) -> str:
    if not greedy:
        return "not compared: both runs are sampled"
    return "yes" if difference is None else f"no, from token {difference.position + 1} on"


def _explanation(difference: Difference) -> str:
    return (
        f"The texts part at token {difference.position + 1}, where the target's logits of the two tokens are "
        f"{difference.logit_gap:.3g} apart. A pass over several tokens rounds otherwise than a pass over one, and in "
        "half precision that decides between near ties. It is the model's own rounding: the verifier keeps exactly the "
        "arg-max of the logits it is given. With --dtype float32 the texts agree unless the tie is closer still."
    )
