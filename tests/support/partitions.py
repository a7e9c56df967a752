"""Partitions of weights over ranks, as awkward as the numerics allows."""

import random
from itertools import pairwise

from zerocast.layout import Extent


def draw_partition(numel: int, world_size: int, rng: random.Random) -> list[Extent]:
    """By rank: extents that cover ``numel`` elements exactly once, in any order over ranks, some of
    them empty.
    """
    pieces = rng.randint(1, world_size)
    cuts = sorted({0, numel, *(rng.randint(0, numel) for _ in range(pieces - 1))})
    if rng.random() < 0.3:  # a piece of one element
        at = rng.randrange(numel)
        cuts = sorted({*cuts, at, at + 1})
    extents = [Extent(a, b) for a, b in pairwise(cuts)]
    while len(extents) > world_size:
        merged = rng.randrange(len(extents) - 1)
        extents[merged : merged + 2] = [Extent(extents[merged].start, extents[merged + 1].end)]
    extents += [Extent(0, 0)] * (world_size - len(extents))
    rng.shuffle(extents)
    return extents
