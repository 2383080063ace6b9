"""Drawing the draft token: the other half of an exact verify step, with the receipt that makes it cheap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from specker import checks, operators
from specker.adjustments import LogitBias, allowed_operand, bias_operands
from specker.distribution import greedy_rows
from specker.sampling import GREEDY_TEMPERATURE, Sampling
from specker.status import INVALID_ARGUMENT, raise_for_bits


@dataclass(frozen=True)
class DraftReceipt:
    """What a draw leaves behind, so that verify need not read the draft row again for the ratio.

    Made by `sample`; `stack` joins the receipts of one round. Verify still takes the draft logits with it, and reads
    a draft row only where it draws from a residual.
    """

    values: torch.Tensor
    """`(batch, 4)` or, stacked, `(batch, gamma, 4)` float64: token logit, row maximum, threshold, weight sum."""
    sampling: Sampling
    """The parameters that the rows were sampled with, as given; tensors must keep their values until verify."""
    vocab: int
    """Vocabulary of the rows."""
    dtype: torch.dtype
    """Dtype of the rows."""
    adjusted: bool = False
    """Whether a logit bias or an allowed-token mask changed the rows."""

    @property
    def token_logit(self) -> torch.Tensor:
        """Logit of the token drawn, float64."""
        return self.values[..., 0]

    @property
    def threshold(self) -> torch.Tensor:
        """Smallest logit that the filters keep, float64; -inf without filters."""
        return self.values[..., 2]

    @property
    def log_sum_exp(self) -> torch.Tensor:
        """Log-sum-exp of the filtered, tempered row, float64; the row maximum where the row is greedy."""
        temperature, top_p = (
            torch.as_tensor(value, dtype=torch.float64, device=self.values.device)
            for value in (self.sampling.temperature, self.sampling.top_p)
        )
        divisor = torch.where(greedy_rows(temperature, top_p), 1.0, temperature)
        if divisor.dim() == 1 and self.values.dim() == 3:
            divisor = divisor.unsqueeze(-1)
        return self.values[..., 1] / divisor + self.values[..., 3].log()

    @staticmethod
    def stack(receipts: Sequence[DraftReceipt]) -> DraftReceipt:
        """Return the `(batch, gamma)` form of gamma receipts of one step each.

        Raises:
            TypeError: one is no receipt.
            ValueError: there is no receipt, or they differ in batch, vocabulary, dtype or parameters.

        Example:
            >>> steps = [sample(torch.zeros(2, 8), seed=1, position=step).receipt for step in range(3)]
            >>> DraftReceipt.stack(steps).values.shape
            torch.Size([2, 3, 4])
        """
        if not receipts:
            raise ValueError("receipts: expected at least one receipt, got none")
        first = receipts[0]
        for receipt in receipts:
            if not isinstance(receipt, DraftReceipt):
                raise TypeError(f"receipts: expected each a DraftReceipt, as in a result, got {type(receipt).__name__}")
            if receipt.values.shape != first.values.shape:
                shapes = f"{tuple(first.values.shape)} and {tuple(receipt.values.shape)}"
                raise ValueError(f"receipts: expected equal shapes, got {shapes}")
            receipt.check(first.vocab, first.dtype, first.sampling, first.adjusted)
        values = torch.stack([receipt.values for receipt in receipts], dim=1)
        return replace(first, values=values)

    def check(self, vocab: int, dtype: torch.dtype, sampling: Sampling, adjusted: bool) -> None:
        """Raise ValueError where the receipt contradicts the rows it is used with; reads no row."""
        if self.vocab != vocab:
            raise ValueError(f"draft_receipt: expected one of vocabulary {vocab}, got {self.vocab}")
        if self.dtype != dtype:
            raise ValueError(f"draft_receipt: expected one made from {dtype} rows, got {self.dtype}")
        if self.adjusted != adjusted:
            made_how, used_how = ("with" if flag else "without" for flag in (self.adjusted, adjusted))
            raise ValueError(f"draft_receipt: expected one made {used_how} a logit bias or mask, got one {made_how}")
        # Equal numbers are the common case, and a look at each would cost a tenth of the call they are for.
        if checks.NUMBERS.issuperset(map(type, self.sampling + sampling)) and self.sampling == sampling:
            return
        for name, made, given in zip(Sampling._fields, self.sampling, sampling, strict=True):
            if _visibly_differ(name, made, given, vocab):
                raise ValueError(f"draft_receipt: expected one made with {name} {given}, got {made}")


def _visibly_differ(name: str, made: float | torch.Tensor, given: float | torch.Tensor, vocab: int) -> bool:
    if made is given:
        return False
    if type(made) is type(given) and not isinstance(made, torch.Tensor) and made == given:
        return False
    tensors = [value for value in (made, given) if isinstance(value, torch.Tensor)]
    # Values on a device, or under a trace, cannot be compared without waiting for them.
    if any(tensor.device.type != "cpu" for tensor in tensors) or (tensors and torch.compiler.is_compiling()):
        return False
    if len(tensors) == 2 and tensors[0].shape != tensors[1].shape:
        return True
    return bool((_canonical(name, made, vocab) != _canonical(name, given, vocab)).any())


def _canonical(name: str, value: float | torch.Tensor, vocab: int) -> torch.Tensor:
    """Return a parameter with one number for each way to say the same."""
    number = torch.as_tensor(value, dtype=torch.float64, device="cpu")
    if name == "temperature":
        return torch.where(number < GREEDY_TEMPERATURE, 0.0, number)
    if name == "top_k":
        return torch.where((number <= 0) | (number >= vocab), 0.0, number)
    return number.clamp(0.0, 1.0) if name == "top_p" else number


class SampleResult(NamedTuple):
    """Tokens drawn by `sample`, one a row."""

    token_ids: torch.Tensor
    """`(batch,)` int64; -1 for an invalid row."""
    status: torch.Tensor
    """`(batch,)` int32 bit mask of `Status`."""
    seed: torch.Tensor
    """`(batch,)` int64, the seeds used."""
    receipt: DraftReceipt
    """Hand it to `verify(draft_receipt=...)`, stacked over the steps of the round."""

    def raise_for_status(self) -> None:
        """Wait for the status and raise InvalidInputError if a row was invalid."""
        raise_for_bits(self.status)


def sample(
    logits: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor = 0,
    top_p: float | torch.Tensor = 1.0,
    min_p: float | torch.Tensor = 0.0,
    logit_bias: LogitBias | None = None,
    allowed_tokens: torch.Tensor | None = None,
    seed: int | torch.Tensor | None = None,
    position: int | torch.Tensor | None = None,
) -> SampleResult:
    """Draw one token a row, with random numbers that never meet those of `verify`.

    Equivalent to, for a batch that is not filtered:

        probs = torch.softmax(logits.double() / temperature, dim=-1)
        token_ids = torch.multinomial(probs, 1).squeeze(-1)

    Args:
        logits: `(batch, vocab)` float32, bfloat16 or float16; last axis contiguous, other strides free.
        temperature: finite, >= 0; below 1e-5 takes the arg-max, ties to the lowest id. A number or a `(batch,)`
            float32 or float64 tensor, as are all parameters (`top_k`: int32 or int64).
        top_k: keep the top_k largest logits and all ties; <= 0 or >= vocab keeps all.
        top_p: keep the smallest set of largest probabilities with mass >= top_p, and ties; >= 1 keeps all.
        min_p: keep ids with probability >= min_p times the largest; 0 keeps all.
        logit_bias: values added to single logits before temperature and filters.
        allowed_tokens: `(batch, words)` int32 bit mask of the tokens a row may give, bit `token % 32` of word
            `token // 32`.
        seed: `(batch,)` int64, one stream a sequence; an int s means s + row; None draws seeds by torch's generator.
        position: `(batch,)` int64 or int, absolute index in the sequence of the token drawn; None is 0.

    Returns:
        SampleResult.

    Raises:
        TypeError, ValueError: an argument has the wrong rank, shape, dtype or device, or a value out of range (values
            of device tensors are judged by the kernel and told in `status`).

        BackendUnavailableError: the forced backend cannot serve these tensors.

    Guarantees: inverse CDF in ascending ids by one uniform of purpose 0; equal tokens on every backend for the same
        seed; no host synchronisation for device tensors; nothing vocabulary-sized is allocated.

    Source: Leviathan et al. 2023, section 2.2: the draft token is drawn from the distribution that verify divides by.

    Example:
        >>> sample(torch.tensor([[0.0, 9.0]]), temperature=0.0).token_ids
        tensor([1])
    """
    rows = checks.check_rows("logits", logits, ("batch", "vocab"), None)
    batch, vocab = rows.shape
    sampling = Sampling(temperature, top_k, top_p, min_p)
    parameters = checks.check_parameters(sampling, batch, vocab, rows.device)
    adjustment = (
        *bias_operands("logit_bias", logit_bias, batch, vocab, is_probs=False, device=rows.device),
        allowed_operand("allowed_tokens", allowed_tokens, batch, 1, vocab, flat=False, device=rows.device),
    )
    seeds = checks.seed_tensor(seed, batch, rows.device)
    positions = checks.position_tensor(position, batch, rows.device)
    adjusted = logit_bias is not None or allowed_tokens is not None
    token_ids, status, receipt = operators.operator("sample", rows.device)(
        rows, *parameters, *adjustment, seeds, positions
    )
    if checks.has_tensor(sampling) and checks.host_readable(rows.device):
        raise_for_bits(status, INVALID_ARGUMENT)
    return SampleResult(token_ids, status, seeds, DraftReceipt(receipt, sampling, vocab, rows.dtype, adjusted))
