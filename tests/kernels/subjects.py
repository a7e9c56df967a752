"""What the tests of the kernels run: a few weights through every operation, with all that is
written.

A rank owns a part of each weight, which starts and ends inside of a tile. Its master lies among
elements that are not the rank's, or *alone*, with nothing around it.
"""

from collections.abc import Callable
from functools import partial

import torch

from tests.support.operations import operand, plane
from tests.support.values import draw_values
from zerocast.formats import E4M3, E5M2
from zerocast.layout import BlockGrid, Extent, ScaleLayout, SharedBlocks, Source
from zerocast.numerics import (
    Backend,
    DelayedState,
    Float8DelayedNumerics,
    Float8Numerics,
    FourOverSixErrors,
    Masters,
    MXFP8Numerics,
    Numerics,
    NVFP4Numerics,
    Rounding,
)

Written = dict[str, torch.Tensor]
Subject = Callable[..., Written]
"""``subject(backend, alone=False)`` runs operations on fresh tensors; what they wrote."""


def bind_part(grid: BlockGrid, extent: Extent, alone: bool) -> Masters:
    """The master of a rank that owns ``extent``."""
    master = draw_values("normal", grid.numel, 5)
    # The first and the last element count, and more so those that are just not of the shard.
    master[[extent.start, extent.end - 1]] = 16
    master[[max(extent.start - 1, 0), min(extent.end, grid.numel - 1)]] = 64
    return bind(master, extent, alone)


def bind(master: torch.Tensor, extent: Extent, alone: bool) -> Masters:
    """The part ``extent`` of a whole master."""
    owned = master[extent.start : extent.end]
    masters = Masters(1)
    masters.bind([owned.clone() if alone else owned])
    return masters


def near_ties(rows: int, cols: int) -> torch.Tensor:
    """[rows * cols], a twentieth multiples of 1/4, the others 0, and sixteen columns of zeros: in
    some blocks of 16x16, as wide as 8192, both candidates of 4-over-6 have the same error, or one
    that hangs on the order in which rows are added.
    """
    g = torch.Generator().manual_seed(2)
    x = torch.randint(-24, 25, (rows * cols,), generator=g).float() / 4
    x *= torch.rand(rows * cols, generator=g) < 0.05
    x.view(rows, cols)[:, :16] = 0
    return x


def amaxes_of(grid: BlockGrid) -> tuple[torch.Tensor, torch.Tensor]:
    """Block amaxes and the tensor's, zero."""
    return torch.zeros(grid.num_blocks, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)


def codes_of(numerics: Numerics, grid: BlockGrid) -> torch.Tensor:
    """Codes that a cast writes over."""
    return torch.full((grid.numel * numerics.fmt.bits // 8,), 0x5A, dtype=torch.uint8)


def one_plane(
    numerics: Numerics, grid: BlockGrid, extent: Extent, backend: Backend, alone: bool = False
) -> Written:
    """Amax, scale, cast, transpose and decoding of a weight with one plane."""
    bits = numerics.fmt.bits
    repeats = (grid.block_h, 128, 4) if bits == 4 else (1, 1, 1)
    layout = ScaleLayout(grid, *repeats)
    columnwise = ScaleLayout(grid.transposed(), *repeats)
    block_amax, tensor_amax = amaxes_of(grid)
    codes = codes_of(numerics, grid)
    scale_inv = torch.zeros(layout.shape, dtype=numerics.scale_dtype)
    stored = torch.zeros(1)
    copied = torch.zeros(grid.cols, -(-grid.rows * bits // 8), dtype=torch.uint8)
    copied_scales = torch.zeros(columnwise.shape, dtype=numerics.scale_dtype)
    out = torch.zeros(grid.rows, grid.cols)
    masters = bind_part(grid, extent, alone)
    made = operand(
        layout, block_amax, tensor_amax, codes, scale_inv, extent=extent, round_to=torch.bfloat16,
        second=plane(columnwise, None, copied, copied_scales, Source.ROWWISE), amax=stored,
        rounding=Rounding(torch.tensor([77, 2])), values=out,
    )  # fmt: skip
    backend.partial_amax([made], masters)()
    backend.compute_scale(numerics, [made])()
    backend.partial_cast(numerics, [made], masters)()
    backend.transpose(numerics, [made])()
    backend.dequantize(numerics, [made])()
    return {
        "block_amax": block_amax, "tensor_amax": tensor_amax, "codes": codes,
        "scale_inv": scale_inv, "columnwise codes": copied, "columnwise scales": copied_scales,
        "values": out,
    }  # fmt: skip


def two_planes(
    numerics: Numerics,
    grid: BlockGrid,
    height: int,
    extent: Extent,
    backend: Backend,
    alone: bool = False,
) -> Written:
    """Amax, scale, cast and decoding of a weight whose second plane has blocks of ``height`` rows
    and one column.
    """
    second = BlockGrid(grid.rows, grid.cols, height, 1)
    planes = [ScaleLayout(grid, row_multiple=4), ScaleLayout(second, col_multiple=4)]
    block_amax, tensor_amax = amaxes_of(grid)
    columnwise_amax, _ = amaxes_of(second)
    codes, columnwise_codes = codes_of(numerics, grid), codes_of(numerics, grid)
    scales = [torch.zeros(layout.shape, dtype=numerics.scale_dtype) for layout in planes]
    values = [torch.zeros(grid.rows, grid.cols) for _ in planes]
    masters = bind_part(grid, extent, alone)
    made = operand(
        planes[0], block_amax, tensor_amax, codes, scales[0], extent=extent,
        round_to=torch.bfloat16, values=values[0],
        second=plane(planes[1], columnwise_amax, columnwise_codes, scales[1]),
    )  # fmt: skip
    backend.partial_amax([made], masters)()
    backend.compute_scale(numerics, [made])()
    backend.partial_cast(numerics, [made], masters)()
    backend.dequantize(numerics, [made])()
    columnwise = operand(planes[1], codes=columnwise_codes, scale_inv=scales[1], values=values[1])
    backend.dequantize(numerics, [columnwise])()
    return {
        "block_amax": block_amax, "tensor_amax": tensor_amax, "columnwise_amax": columnwise_amax,
        "codes": codes, "columnwise_codes": columnwise_codes, "scale_inv": scales[0],
        "columnwise_scale_inv": scales[1], "values": values[0], "columnwise values": values[1],
    }  # fmt: skip


def remembered(
    numerics: Float8DelayedNumerics, length: int, backend: Backend, alone: bool = False
) -> Written:
    """Two casts in a row of three weights under delayed scaling."""
    masters = Masters(3)
    amax = torch.zeros(3, 1, dtype=torch.int32)
    written: Written = {"amax": amax}
    made = []
    for i in range(3):
        grid = BlockGrid(1, 20_011, 1, 20_011)
        codes, scale_inv = codes_of(numerics, grid), torch.zeros(1)
        state = DelayedState(
            torch.full((1,), 3.0), torch.zeros(1), torch.arange(length).remainder(200).float()
        )
        own = Extent(1 + i, 20_007 - i)
        made.append(
            operand(grid, amax[i], amax[i], codes, scale_inv, slot=i, extent=own,
                    round_to=torch.bfloat16, delayed=state)
        )  # fmt: skip
        written |= {
            f"codes {i}": codes, f"scale_inv {i}": scale_inv, f"scale {i}": state.scale,
            f"cast_scale {i}": state.cast_scale, f"history {i}": state.amax_history,
        }  # fmt: skip
    masters.bind([bind_part(s.grid, s.extent, alone).tensors[0] for s in made])
    for _ in range(2):
        backend.partial_cast(numerics, made, masters)()
        backend.compute_scale(numerics, made)()
    return written


def chosen(
    numerics: NVFP4Numerics,
    grid: BlockGrid,
    owned: list[Extent],
    master: Callable[[int, int], torch.Tensor],
    backend: Backend,
    alone: bool = False,
) -> Written:
    """The choices under 4-over-6, of ranks that own ``owned``, and what they exchanged."""
    cuts = SharedBlocks.of(grid, owned)
    block_amax, tensor_amax = amaxes_of(grid)
    values, tp_shards = master(grid.rows, grid.cols), []
    buffers = torch.zeros(len(owned), FourOverSixErrors.words(grid, cuts), dtype=torch.int32)
    for own, buffer in zip(owned, buffers, strict=True):
        shard = operand(
            grid, block_amax, tensor_amax, torch.empty(0), extent=own, round_to=torch.bfloat16,
            candidates=FourOverSixErrors.carve(buffer, grid, cuts),
        )  # fmt: skip
        masters = bind(values, own, alone)
        backend.partial_amax([shard], masters)()
        tp_shards.append((shard, masters))
    for shard, masters in tp_shards:
        backend.partial_select(numerics, [shard], masters)()
    total = FourOverSixErrors.carve(buffers.sum(0, dtype=torch.int32), grid, cuts)
    backend.select(numerics, [operand(grid, block_amax, tensor_amax, candidates=total)])()
    return {
        "parts": buffers, "choices": total.choices, "errors": total.row_errors,
        "block_amax": block_amax,
    }  # fmt: skip


# Those of "nvfp4" and "mxfp8" start one element into a whole tile, and end one element before the
# end of one.
SUBJECTS: dict[str, Subject] = {
    "nvfp4": partial(
        one_plane, NVFP4Numerics(), BlockGrid(70, 1040, 16, 16), Extent(16_641, 47 * 1040 + 1023)
    ),
    "nvfp4 rows": partial(
        one_plane, NVFP4Numerics(), BlockGrid(70, 1040, 16, 16), Extent(1041, 1040 * 66 + 3)
    ),
    "fp8 blocks": partial(
        one_plane, Float8Numerics(E4M3), BlockGrid(140, 259, 128, 128), Extent(1, 35_001)
    ),
    "fp8": partial(
        one_plane, Float8Numerics(E4M3), BlockGrid(140, 259, 140, 259), Extent(5, 36_002)
    ),
    "nvfp4 drawn": partial(
        one_plane,
        NVFP4Numerics(stochastic_rounding=True, seed=9),
        BlockGrid(70, 1040, 1, 16),
        Extent(1, 64 * 1040 - 1),
    ),
    "mxfp8": partial(
        two_planes,
        MXFP8Numerics(),
        BlockGrid(70, 1056, 1, 32),
        32,
        Extent(32 * 1056 + 1, 63 * 1056 + 1023),
    ),
    "fp8 rows": partial(
        two_planes,
        Float8Numerics(E5M2),
        BlockGrid(70, 1027, 1, 1027),
        70,
        Extent(1029, 66 * 1027 + 3),
    ),
    "delayed": partial(remembered, Float8DelayedNumerics(E4M3), 257),
    "4-over-6": partial(
        chosen,
        NVFP4Numerics(four_over_six="mse"),
        BlockGrid(70, 1040, 16, 16),
        [
            Extent(0, 16 * 1040),
            Extent(16 * 1040, 40_015),
            Extent(40_015, 69 * 1040 + 3),
            Extent(69 * 1040 + 3, 70 * 1040),
        ],
        lambda rows, cols: draw_values("normal", rows * cols, 5),
    ),
    "4-over-6, whole": partial(
        chosen,
        NVFP4Numerics(four_over_six="mae"),
        BlockGrid(16, 8192, 16, 16),
        [Extent(0, 16 * 8192)],
        near_ties,
    ),
    "4-over-6, cut": partial(
        chosen,
        NVFP4Numerics(four_over_six="mae"),
        BlockGrid(16, 8192, 16, 16),
        [Extent(0, 17), Extent(17, 16 * 8192)],
        near_ties,
    ),
}
