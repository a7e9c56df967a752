"""Philox 4x32-10: 128 random bits from a counter and a key, without a state.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # the golden ratio less 1, the square root of 3 less 1
_LOW = 0xFFFFFFFF
ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Four words of 32 bits, each in an int64 tensor [n]."""


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Return the four words that belong to each counter under ``key``, two words of 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # An int64 product keeps the low 64 bits of the true one, and its upper half is the right
        # one after masking, whatever its sign.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (p1 >> 32 & _LOW) ^ c1 ^ k0,
            p1 & _LOW,
            (p0 >> 32 & _LOW) ^ c3 ^ k1,
            p0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def element_draws(index: torch.Tensor, seed: int, name_hash: int, step: int) -> torch.Tensor:
    """Return the 16 random bits of each element, int64 [n].

    Args:
        index: int64 [n] flat indices in the whole weight.
        seed: 64 bits.
        name_hash: 32 bits.
        step: the number of the draw, of which 32 bits count.
    """
    group = index // 8
    low, high = group & _LOW, group >> 32
    counter = (low, high, torch.full_like(low, name_hash & _LOW), torch.full_like(low, step & _LOW))
    words = philox(counter, (seed & _LOW, seed >> 32 & _LOW))
    word = torch.stack(words).gather(0, (index // 2 % 4).unsqueeze(0)).squeeze(0)
    return torch.where(index % 2 == 0, word & 0xFFFF, word >> 16)
