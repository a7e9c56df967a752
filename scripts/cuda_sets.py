"""The weights that scripts/bench_cuda.py casts, and what rank 0 of a group owns of them.

llama      the 224 linear weights of Llama-3-8B: 32 layers of 7
experts    5,568 small expert weights, in the proportions of DeepSeek-V3: 58 layers of 32
           experts of 3 matrices, each an eighth of the original's sides
"""

from __future__ import annotations

from zerocast.layout import Extent, FlatLayout

Shape = tuple[int, int]

LLAMA: list[Shape] = [
    (4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096),
    (14336, 4096), (14336, 4096), (4096, 14336),
] * 32  # fmt: skip
EXPERTS: list[Shape] = [(256, 896), (256, 896), (896, 256)] * (58 * 32)

SETS = {"llama": LLAMA, "experts": EXPERTS}
WORLD_SIZES = (1, 8, 64, 512)


def rank_0(shapes: list[Shape], world_size: int) -> list[Extent]:
    """What the first of ``world_size`` ranks owns of each weight, as a ZeRO optimizer cuts them."""
    layout = FlatLayout(tuple(rows * cols for rows, cols in shapes), world_size)
    return layout.shards(0)
