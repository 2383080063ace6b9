"""Argument checks, one function a property; every message names the argument, what was expected and what came."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from specker.sampling import Parameters, Sampling

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INDEX_DTYPES = (torch.int64, torch.int32)
_PARAMETER_DTYPES = (torch.float32, torch.float64)
NUMBERS = frozenset((float, int))
_CPU = torch.device("cpu")


def check_tensor(
    name: str,
    value: object,
    shape: Sequence[int | str | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None,
) -> torch.Tensor:
    """Return the tensor if its rank, shape, dtype and device are right; a name or None in `shape` admits any size."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name}: expected dtype {wanted}, got {str(value.dtype).removeprefix('torch.')}")
    actual = value.shape
    # The exact comparison first: it is what most calls need.
    if actual != shape and not _admits(shape, actual):
        wanted = ", ".join("*" if size is None else str(size) for size in shape) + "," * (len(shape) == 1)
        raise ValueError(f"{name}: expected shape ({wanted}), got {tuple(actual)}")
    if device is not None and value.device != device:
        raise ValueError(f"{name}: expected device {device}, that of the target, got {value.device}")
    return value


def _admits(shape: Sequence[int | str | None], actual: Sequence[int]) -> bool:
    if len(actual) != len(shape):
        return False
    # A loop, since a generator costs as much as the rest of a call's checks.
    for want, got in zip(shape, actual, strict=True):
        if want is not None and want != got and not isinstance(want, str):
            return False
    return True


def check_rows(
    name: str, value: object, shape: Sequence[int | str | None], device: torch.device | None
) -> torch.Tensor:
    """Return a tensor of logits or probabilities whose last axis is contiguous and not empty."""
    rows = check_tensor(name, value, shape, LOGIT_DTYPES, device)
    if rows.shape[-1] == 0:
        raise ValueError(f"{name}: expected a vocabulary of at least 1, got shape {tuple(rows.shape)}")
    if rows.stride(-1) != 1 and rows.shape[-1] > 1:
        raise ValueError(f"{name}: expected a contiguous last axis (stride 1), got strides {rows.stride()}")
    return rows


def check_index(name: str, value: object, shape: Sequence[int | str | None], device: torch.device) -> torch.Tensor:
    """Return a tensor of int32 or int64 indices."""
    return check_tensor(name, value, shape, INDEX_DTYPES, device)


def check_parameters(sampling: Sampling, batch: int, vocab: int, device: torch.device, prefix: str = "") -> Parameters:
    """Return the sampling parameters as device tensors; identities given as Python numbers become None.

    Raises:
        TypeError, ValueError: a Python number is out of range, or a tensor has the wrong dtype, shape or device.
    """
    temperature, top_k, top_p, min_p = sampling
    if (
        type(temperature) in NUMBERS
        and type(top_k) in NUMBERS
        and type(top_p) in NUMBERS
        and type(min_p) in NUMBERS
        and _keeps_values(device)
    ):
        return _cached_parameters(temperature, top_k, top_p, min_p, vocab, device, prefix)
    return _parameters(temperature, top_k, top_p, min_p, batch, vocab, device, prefix)


# Numbers are checked and made tensors once; typed, since a bool equals an int and is refused.
@functools.lru_cache(maxsize=256, typed=True)
def _cached_parameters(
    temperature: object, top_k: object, top_p: object, min_p: object, vocab: int, device: torch.device, prefix: str
) -> Parameters:
    return _parameters(temperature, top_k, top_p, min_p, 1, vocab, device, prefix)


def _parameters(
    temperature: object,
    top_k: object,
    top_p: object,
    min_p: object,
    batch: int,
    vocab: int,
    device: torch.device,
    prefix: str,
) -> Parameters:
    return (
        _real(prefix + "temperature", temperature, 0.0, math.inf, batch, device),
        _count(prefix + "top_k", top_k, batch, vocab, device),
        _real_or_none(prefix + "top_p", top_p, 1.0, batch, device, upper=math.inf),
        _real_or_none(prefix + "min_p", min_p, 0.0, batch, device, upper=1.0),
    )


def host_readable(device: torch.device) -> bool:
    """Return whether values can be looked at: not on a device, where it would wait, and not in a trace."""
    # Comparing devices is quicker than reading their type.
    return (device == _CPU or device.type == "cpu") and not torch.compiler.is_compiling()


def has_tensor(sampling: Sampling | None) -> bool:
    """Return whether a parameter is a tensor, whose values only the operator reads."""
    if sampling is None:
        return False
    temperature, top_k, top_p, min_p = sampling
    return (
        isinstance(temperature, torch.Tensor)
        or isinstance(top_k, torch.Tensor)
        or isinstance(top_p, torch.Tensor)
        or isinstance(min_p, torch.Tensor)
    )


def _real_or_none(
    name: str, value: object, identity: float, batch: int, device: torch.device, upper: float
) -> torch.Tensor | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return _real(name, value, 0.0, upper, batch, device)
    # A top_p of 1 and all above it keep everything.
    if value == identity or (identity == 1.0 and value > identity):
        return None
    return _real(name, value, 0.0, upper, batch, device)


def _real(name: str, value: object, lower: float, upper: float, batch: int, device: torch.device) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return check_tensor(name, value, (batch,), _PARAMETER_DTYPES, device)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number or a (batch,) tensor, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (lower <= number <= upper and number < math.inf):
        bound = "finite and >= 0" if upper == math.inf else f"in [{lower:g}, {upper:g}]"
        raise ValueError(f"{name}: expected a value {bound}, got {value}")
    return scalar_tensor(number, torch.float64, device)


def _count(name: str, value: object, batch: int, vocab: int, device: torch.device) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return check_tensor(name, value, (batch,), INDEX_DTYPES, device)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int or a (batch,) tensor, got {type(value).__name__}")
    return None if value <= 0 or value >= vocab else scalar_tensor(value, torch.int64, device)


def scalar_tensor(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a one-element tensor that broadcasts over the batch, made once per value and device."""
    if _keeps_values(device):
        return _cached_scalar(value, dtype, device)
    return torch.full((1,), value, dtype=dtype, device=device)


def _keeps_values(device: torch.device) -> bool:
    # What is made in a trace, under a mode (fake tensors) or in a captured graph holds its value only there.
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or (device != _CPU and device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    )


@functools.lru_cache(maxsize=256)
def _cached_scalar(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # What is kept has to serve in every mode, not only in the one it was made in.
    with torch.inference_mode(False):
        return torch.full((1,), value, dtype=dtype, device=device)


def seed_tensor(seed: int | torch.Tensor | None, batch: int, device: torch.device) -> torch.Tensor:
    """Return the `(batch,)` int64 seeds: given, counted up from an int, or drawn from torch's generator."""
    if seed is None:
        return torch.randint(-(1 << 63), (1 << 63) - 1, (batch,), dtype=torch.int64, device=device)
    if isinstance(seed, torch.Tensor):
        return check_tensor("seed", seed, (batch,), (torch.int64,), device)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed: expected an int, a (batch,) int64 tensor or None, got {type(seed).__name__}")
    # The usual seed first: a compiler that traces it as a symbol cannot take it modulo 2**64.
    if -(1 << 63) <= seed <= (1 << 63) - 1 - batch:
        return torch.arange(seed, seed + batch, device=device)
    # The sum wraps around.
    return torch.arange(batch, dtype=torch.int64, device=device) + ((seed + (1 << 63)) % (1 << 64) - (1 << 63))


def position_tensor(position: int | torch.Tensor | None, batch: int, device: torch.device) -> torch.Tensor:
    """Return the positions as an int64 tensor of one or `batch` elements; None is 0."""
    if position is None:
        return scalar_tensor(0, torch.int64, device)
    if isinstance(position, torch.Tensor):
        return check_tensor("position", position, (batch,), (torch.int64,), device)
    if isinstance(position, bool) or not isinstance(position, int):
        raise TypeError(f"position: expected an int, a (batch,) int64 tensor or None, got {type(position).__name__}")
    if not -(1 << 63) <= position < 1 << 63:
        raise ValueError(f"position: expected a 64-bit integer, got {position}")
    return torch.full((1,), position, dtype=torch.int64, device=device)
