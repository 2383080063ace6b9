"""The random numbers of the library: Philox-4x32-10, stateless, the same bits on every backend.

Key = the sequence's 64-bit seed. Counter = (position low, position high, purpose, 0). Nothing else enters, so a
sequence's numbers depend neither on its neighbours nor on what was called before.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import torch

DRAFT_PURPOSE = 0
"""Counter word of the draws that choose a draft token."""
VERIFY_PURPOSE = 1
"""Counter word of the draws that verify: acceptance, recovered and bonus tokens."""

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def uniforms(seed: int | torch.Tensor, position: int | torch.Tensor, purpose: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the accept and the emission uniform of a position.

    Args:
        seed: int64 tensor or int; all 64 bits count, negative seeds too.
        position: int64 tensor or int, the absolute index of the token decided; broadcasts against seed.
        purpose: 0 for drawing a draft token, 1 for verifying.

    Returns:
        (accept, emission), float64 in [0, 1), of the broadcast shape.

    Guarantees: stateless and bit-identical on every backend and device.

    Example:
        >>> accept, emission = uniforms(seed=7, position=0, purpose=VERIFY_PURPOSE)
        >>> bool((0 <= accept) & (accept < 1))
        True
    """
    device = next((value.device for value in (seed, position) if isinstance(value, torch.Tensor)), None)
    seed_bits, position_bits = torch.broadcast_tensors(_as_int64(seed, device), _as_int64(position, device))
    words = philox(
        (
            position_bits & _WORD,
            (position_bits >> 32) & _WORD,
            torch.full_like(seed_bits, purpose),
            torch.zeros_like(seed_bits),
        ),
        (seed_bits & _WORD, (seed_bits >> 32) & _WORD),
    )
    return uniform_from_words(words[0], words[1]), uniform_from_words(words[2], words[3])


def uniform_from_words(low: int | torch.Tensor, high: int | torch.Tensor) -> torch.Tensor:
    """Return the uniform of the 64-bit word `high * 2**32 + low`: its upper 53 bits times 2**-53.

    Args:
        low: lower 32 bits, 0..2**32-1, an int or an int64 tensor.
        high: upper 32 bits, likewise.

    Returns:
        float64 in [0, 1): word 0 gives 0.0 and word 2**64-1 gives 1 - 2**-53.

    Example:
        >>> float(uniform_from_words(0, 0x80000000))
        0.5
    """
    # The upper 53 of the 64 bits are the high word and the upper 21 bits of the low one.
    upper_bits = (_as_int64(high) << 21) | (_as_int64(low) >> 11)
    return upper_bits.to(torch.float64) * 2.0**-53


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    key: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the four output words of Philox-4x32-10 for int64 tensors that hold 32-bit words.

    Source: Salmon et al. 2011, section 3.3.

    Example:
        >>> zero = torch.zeros((), dtype=torch.int64)
        >>> [f"{int(word):08x}" for word in philox((zero, zero, zero, zero), (zero, zero))]
        ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    word0, word1, word2, word3 = counter
    key0, key1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(word0, _MULTIPLIERS[0])
        high2, low2 = _multiply(word2, _MULTIPLIERS[1])
        word0, word1, word2, word3 = high2 ^ word1 ^ key0, low2, high0 ^ word3 ^ key1, low0
        key0, key1 = (key0 + _KEY_INCREMENTS[0]) & _WORD, (key1 + _KEY_INCREMENTS[1]) & _WORD
    return word0, word1, word2, word3


def _multiply(word: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    # The product wraps modulo 2**64 in int64; its bits are right, and the shift's sign bits are masked away.
    product = word * multiplier
    return (product >> 32) & _WORD, product & _WORD


def _as_int64(value: int | torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.to(torch.int64)
    wrapped = value & 0xFFFFFFFFFFFFFFFF
    return torch.tensor(wrapped - (1 << 64) if wrapped >> 63 else wrapped, dtype=torch.int64, device=device)
