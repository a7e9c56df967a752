"""What the tests of the kernels run: a few weights through every operation, and layers' tensors
through a function or a norm, with all that is written.

A rank owns a part of each weight, which starts and ends inside of a tile. Its master lies among
elements that are not the rank's, or *alone*, with nothing around it.
"""

import random
from collections.abc import Callable
from dataclasses import replace

import torch

import zerocast
from tests.support.fused_ops import parameters
from tests.support.operations import (
    Scheme,
    Weight,
    Written,
    nvfp4,
    per_tensor,
    plane,
    run_operations,
    run_together,
)
from tests.support.values import draw_values
from zerocast.layout import BlockGrid, Extent, ScaleLayout, Source
from zerocast.nn.quantized_ops import apply_fused
from zerocast.numerics import (
    E4M3,
    E5M2,
    AdamWNumbers,
    AdamWUpdate,
    Backend,
    CodeCopy,
    DigestedBytes,
    Float8DelayedNumerics,
    Float8Numerics,
    FusedOp,
    MXNumerics,
    NVFP4Numerics,
    SharedByte,
    TensorOperand,
)

Subject = Callable[..., Written]
"""``subject(backend, alone=False)`` runs operations on fresh tensors; what they wrote."""


def marked(numel: int, extent: Extent) -> torch.Tensor:
    """A master of which the first and the last element that a rank owns count, the last one most,
    and more so those that are just not of its shard.
    """
    master = draw_values("normal", numel, 5)
    master[[extent.start, extent.end - 1]] = torch.tensor([16.0, 17.0])
    master[[max(extent.start - 1, 0), min(extent.end, numel - 1)]] = 64
    return master


def near_ties(rows: int, cols: int) -> torch.Tensor:
    """[rows * cols], a twentieth multiples of 1/4, the others 0, and sixteen columns of zeros: in
    some blocks of 16x16, as wide as 8192, both candidates of 4-over-6 have the same error, or one
    that hangs on the order in which rows are added. In the last one the smallest scale above 0
    stands for one 1.2 times as large, under which the amax lies beyond 7, and is the better one.
    """
    g = torch.Generator().manual_seed(2)
    x = torch.randint(-24, 25, (rows * cols,), generator=g).float() / 4
    x *= torch.rand(rows * cols, generator=g) < 0.05
    x.view(rows, cols)[:, :16] = 0
    unit = 2.0**-9 / 448
    x.view(rows, cols)[:, -16:] = 0
    x[-6:] = unit / 2
    x[-1] = 7.2 * unit
    return x


def drawn(
    scheme: Scheme, extents: list[Extent], master: Callable[[], torch.Tensor], **fixed: bool
) -> Subject:
    """All operations on one weight, whose values are drawn when they run. Processes are forked from
    one that has imported this module, and the threads that torch starts for a large tensor do not
    survive a fork.
    """

    def run(backend: Backend, **options: bool) -> Written:
        return run_operations(
            backend, scheme=scheme, masters=[master()], extents=extents, **fixed, **options
        )

    return run


def part(scheme: Scheme, start: int, end: int) -> Subject:
    """A weight of which one rank owns these elements."""
    extent = Extent(start, end)
    return drawn(scheme, [extent], lambda: marked(scheme.grid.numel, extent))


def blocks_and_copy(numerics: Float8Numerics, grid: BlockGrid) -> Scheme:
    """With the transposed copy."""
    both = ScaleLayout(grid), ScaleLayout(grid.transposed())
    return Scheme(numerics, *both, source=Source.ROWWISE)


def two_planes(numerics: Float8Numerics | MXNumerics, grid: BlockGrid, height: int) -> Scheme:
    """The second one in blocks of ``height`` rows and one column."""
    second = ScaleLayout(BlockGrid(grid.rows, grid.cols, height, 1), col_multiple=4)
    return Scheme(numerics, ScaleLayout(grid, row_multiple=4), second)


def remembered(backend: Backend, alone: bool = False) -> Written:
    """Two casts in a row of three weights under delayed scaling."""
    history = tuple(float(i % 200) for i in range(257))
    scheme = Scheme(Float8DelayedNumerics(E4M3), ScaleLayout(BlockGrid(1, 20_011, 1, 20_011)),
                    history=history)  # fmt: skip
    owned = [Extent(1 + i, 20_007 - i) for i in range(3)]
    weights = [Weight(scheme, [extent], alone=alone) for extent in owned]
    return run_together(backend, weights, 2 * [[marked(20_011, extent) for extent in owned]])


def read_once(schemes: list[Scheme]) -> Subject:
    """Weights of which one pass measures and casts what a rank holds whole, all in one launch: from
    somewhere in the first row of blocks to the end, beyond which are larger values.
    """

    def run(backend: Backend, alone: bool = False) -> Written:
        owned = [Extent(5, s.grid.numel) for s in schemes]
        masters = [
            torch.cat([marked(s.grid.numel, e), torch.full((s.grid.cols,), 1000.0)])
            for s, e in zip(schemes, owned, strict=True)
        ]
        weights = [Weight(s, [e], alone=alone) for s, e in zip(schemes, owned, strict=True)]
        return run_together(backend, weights, [masters], reads_once=True)

    return run


def expanded(backend: Backend, alone: bool = False) -> Written:
    """Stored scales of one each block, of both dtypes, in layouts with everything: repeats and
    padding, rows and columns exchanged, tiles cut off at both edges.
    """
    written: Written = {}
    for numerics in (MXNumerics(), Float8Numerics(E4M3)):
        grids = BlockGrid(37, 1030, 3, 1), BlockGrid(71, 90, 1, 5)
        layouts = [ScaleLayout(grids[0], 3, 8, 16, padding=2),
                   ScaleLayout(grids[1], 1, 1, 1, 1, col_repeat=5, transposed=True)]  # fmt: skip
        first, second = (
            replace(
                plane(layout, scale_inv=torch.full(layout.shape, 9, dtype=numerics.scale_dtype)),
                compact=torch.arange(layout.grid.num_blocks)
                .remainder(251)
                .to(numerics.scale_dtype),
            )
            for layout in layouts
        )
        backend.expand_scales(numerics, [TensorOperand((first, second))])()
        for name, made in (("first", first), ("second", second)):
            assert made.scale_inv is not None
            written[f"{name} plane of {numerics}"] = made.scale_inv
    return written


def chosen(
    error: str,
    rows: int,
    cols: int,
    cuts: list[int],
    master: Callable[[int, int], torch.Tensor],
    height: int = 16,
    **options: bool,
) -> Subject:
    """Choices under 4-over-6 of ranks between whom the weight is cut."""
    scheme = nvfp4(rows, cols, NVFP4Numerics(four_over_six=error), height)
    extents = [Extent(*ends) for ends in zip([0, *cuts], [*cuts, rows * cols], strict=True)]

    return drawn(scheme, extents, lambda: master(rows, cols), **options)


def normal(rows: int, cols: int) -> torch.Tensor:
    """[rows * cols] values."""
    return draw_values("normal", rows * cols, 5)


def unaligned(rows: int, cols: int) -> torch.Tensor:
    """[rows * cols] values that no vectors read."""
    return draw_values("normal", rows * cols + 1, 5)[1:]


def fused(op: FusedOp, kind: str) -> Subject:
    """The result of an operation: rows that one warp computes and several, of any alignment."""

    def run(backend: Backend, alone: bool = False) -> Written:
        written: Written = {}
        for rows, cols, dtype in ((13, 163, torch.float32), (9, 1160, torch.bfloat16),
                                  (3, 1031, torch.float16)):  # fmt: skip
            if alone:  # small, for the sanitizer is slow
                cols //= 16
            source = cols * (2 if op.function == "swiglu" else 1)
            x = draw_values(kind, rows * source, 1).view(rows, source)
            x = x.to(dtype, copy=True)
            with zerocast.use_backend(backend):
                made = apply_fused(op, x, statistics=True, **parameters(op.function, cols, 2))
            found = {"output": made.output, "mean": made.mean, "rstd": made.rstd}
            written |= {f"{dtype} {key}": t for key, t in found.items() if t is not None}
        return written

    return run


def copied_codes(backend: Backend, alone: bool = False) -> Written:
    """Codes of every alignment into the buffer in which they travel and back, up to some tiles
    long, and bytes that two ranks share, or one.
    """
    sizes = [*range(1, 9), 31, 47, 70, 16_384, 40_003] * (1 if alone else 5)
    draws = random.Random(3)
    codes, copies, at = [], [], 0
    for i, size in enumerate(sizes):
        start = 0 if alone else draws.randrange(16)
        whole = random_bytes(start + size + start, i)
        codes.append(whole)
        at += 0 if alone else draws.randrange(7)
        copies.append(CodeCopy(whole[start : start + size], at))
        at += size
    staged, gathered = torch.zeros(at, dtype=torch.uint8), random_bytes(at, 99)
    places = [(low, high) for low in (None, 0, at - 1) for high in (None, 0, at - 2)]
    bytes_of_two = [random_bytes(1, 200 + i) for i in range(len(places))]
    shared = [SharedByte(c, *place) for c, place in zip(bytes_of_two, places, strict=True)]
    backend.stage_codes(copies)(staged)
    backend.store_codes(copies, shared)(gathered)
    written = {f"codes {i}": each for i, each in enumerate([*codes, *bytes_of_two])}
    return {**written, "staged": staged, "gathered": gathered}


def updated(backend: Backend, alone: bool = False) -> Written:
    """AdamW on tensors of up to some tiles, the last one with amsgrad, that start anywhere."""
    g = torch.Generator().manual_seed(4)
    numbers = AdamWNumbers.of(
        1, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, maximize=False
    )
    updates = []
    for size in (1, 127, 8192, 20_003):
        start = 0 if alone else size % 3 + 1
        tensors = [
            torch.randn(start + size + start, generator=g)[start : start + size] for _ in range(5)
        ]
        own = [tensor.clone() if alone else tensor for tensor in tensors]
        own[3].abs_()
        updates.append(AdamWUpdate(*own[:4], own[4] if size == 20_003 else None, numbers))
    backend.adamw(updates)()
    return {
        f"{name} of {i}": tensor._base if tensor._base is not None else tensor
        for i, update in enumerate(updates)
        for name in ("master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        if (tensor := getattr(update, name)) is not None
    }


def digested(backend: Backend, alone: bool = False) -> Written:
    """Digests of bytes that begin and end anywhere in rows of keys, up to some tiles of them, at
    addresses that are read by sixteen bytes and at others.
    """
    places = [(1, 70), (0, 4095), (4092, 9), (4095, 4098), (12_289, 40_000)]
    ranges = []
    for apart in (0, 3):
        for first, size in places:
            start = first % 16 + apart
            data = random_bytes(start + size + 16, first)[start : start + size]
            ranges.append(DigestedBytes(data.clone() if alone else data, first))
    sums = torch.full((len(ranges),), -5, dtype=torch.int64)
    backend.digest(ranges, sums)()
    return {"sums": sums}


def random_bytes(count: int, seed: int) -> torch.Tensor:
    """uint8 [count]."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count,), dtype=torch.uint8, generator=g)


DRAWN = NVFP4Numerics(stochastic_rounding=True, seed=9)

# Those of "nvfp4" and "mxfp8" start one element into a whole tile, and end one element before the
# end of one.
SUBJECTS: dict[str, Subject] = {
    "nvfp4": part(nvfp4(70, 1040), 16_641, 47 * 1040 + 1023),
    "nvfp4 rows": part(nvfp4(70, 1040), 1043, 1040 * 66 + 1),
    "fp8 blocks": part(
        blocks_and_copy(Float8Numerics(E4M3), BlockGrid(140, 259, 128, 128)), 1, 35_001
    ),
    "fp8": part(per_tensor(140, 259, Float8Numerics(E4M3)), 5, 36_002),
    "nvfp4 drawn": part(nvfp4(70, 1040, DRAWN, height=1), 3, 64 * 1040 - 3),
    # Of a wider matrix, whose elements are drawn for by eights in each row, or from a four on.
    "nvfp4 drawn in columns": part(
        replace(nvfp4(70, 1040, DRAWN), place=(1048, 2072)), 17_000, 60 * 1040
    ),
    "nvfp4 drawn from a four": part(replace(nvfp4(35, 272, DRAWN), place=(4, 0)), 5, 34 * 272),
    "mxfp8": part(
        two_planes(MXNumerics(), BlockGrid(70, 1056, 1, 32), 32), 32 * 1056 + 1, 63 * 1056 + 1023
    ),
    "fp8 rows": part(
        two_planes(Float8Numerics(E5M2), BlockGrid(70, 1027, 1, 1027), 70), 1029, 69 * 1027 + 3
    ),
    "mx in one pass": read_once(
        [
            two_planes(MXNumerics(), BlockGrid(*shape, 1, 32), 32)
            for shape in ((100, 358), (70, 644), (40, 160))
        ]
    ),
    "squares of 32 in one pass": read_once(
        [
            Scheme(MXNumerics(), ScaleLayout(BlockGrid(*shape, 32, 32)))
            for shape in ((150, 196), (64, 31))
        ]
    ),
    "fp8 in one pass": read_once(
        [
            Scheme(Float8Numerics(E4M3), ScaleLayout(BlockGrid(*shape, 128, 128)))
            for shape in ((270, 516), (260, 131))
        ]
    ),
    "rows of 128 in one pass": read_once(
        [Scheme(Float8Numerics(E4M3), ScaleLayout(BlockGrid(50, 384, 1, 128)))]
    ),
    "expanded": expanded,
    "delayed": remembered,
    "4-over-6": chosen("mse", 70, 1040, [16 * 1040, 40_001, 41_055, 69 * 1040 + 3], normal),
    "4-over-6, whole": chosen("mae", 16, 8192, [], near_ties),
    "4-over-6, cut": chosen("mae", 16, 8192, [17], near_ties),
    "4-over-6, cast": chosen(
        "mse", 70, 1040, [16 * 1040 + 1, 64 * 1040 - 1], normal, reads_once=True
    ),
    "4-over-6, whole, cast": chosen("mae", 16, 8192, [], near_ties, reads_once=True),
    "4-over-6, anywhere": chosen("mse", 70, 528, [33 * 528], unaligned, reads_once=True),
    "4-over-6, flat": chosen(
        "mse", 70, 1030, [1037, 40_001, 40_005], normal, height=1, reads_once=True
    ),
    "copied codes": copied_codes,
    "adamw": updated,
    "digests": digested,
    "silu": fused(FusedOp("silu"), "wide"),
    "swiglu": fused(FusedOp("swiglu"), "normal"),
    "layernorm": fused(FusedOp("layernorm"), "normal"),
}
