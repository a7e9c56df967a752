"""Chooses the kernels that compute a fused operation and cast its result on CUDA, and makes their
arguments.

One launch, or two of the same computation: where a scale needs an amax that no thread block sees
alone (of the tensor, of whole rows or columns), the first takes the amaxes and writes what is
wanted in high precision, and the second computes everything again and writes codes. A launch's only
argument is the struct ``FusedTask`` of ``fused_tile.h``, passed by value: no table is sent to the
device.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from zerocast.backends.cuda.launcher import Arguments, Kernel, Launcher
from zerocast.backends.fused_ops import fused_row
from zerocast.backends.launches import nothing
from zerocast.backends.tables import (
    Address,
    numerics_class,
    numerics_fields,
    plane_fields,
)
from zerocast.errors import BackendError
from zerocast.layout import Plane, ceil_div
from zerocast.numerics import (
    Float8DelayedNumerics,
    Float8Numerics,
    FusedOperand,
    Launch,
    Numerics,
    NVFP4Numerics,
    PlaneBuffers,
    can_fuse,
)

TILE_COLS, LOW, TALL = 128, 32, 128
"""The columns of a tile, and the rows of both kinds of tiles."""

SPANS = 30
"""Stands for the length of a block as long as the matrix, in place of its logarithm: rows and
columns are 32 bits wide in the kernels, tiles past the edge included."""

THREADS = {LOW: 256, TALL: 512}
"""Threads of a block, by the rows of its tiles."""

NUMERICS_FIELDS, PLANE_FIELDS = 12, 18
"""The numbers of fields of ``NumericsTable`` and of ``FusedPlane``."""

UNITS = 256
"""Thread blocks that a norm is cut into at least, where it has the tiles: some for every
multiprocessor. Those side by side read the same rows for their statistics."""


def fused_op(
    launcher: Launcher, address: Address, numerics: Numerics | None, target: FusedOperand
) -> Launch:
    """Return the launches of :meth:`zerocast.numerics.Backend.fused_op`."""
    if target.rows == 0:
        return nothing
    assert numerics is None or can_fuse(numerics)
    if max(target.rows, target.cols) >= 1 << SPANS:
        raise BackendError(
            f"the cuda backend takes activations of fewer than {1 << SPANS} rows and columns, got "
            f"({target.rows}, {target.cols}); cut the tensor."
        )
    sides = [_sides(each.plane) for each in target.planes]
    zeros: list[torch.Tensor] = []  # cleared by the launch, then raised by kernels

    def amaxes(count: int) -> torch.Tensor:
        zeros.append(torch.zeros(count, dtype=torch.int32, device=launcher.device))
        return zeros[-1]

    step, looks_first = target, numerics is None
    if isinstance(numerics, Float8DelayedNumerics):
        zeros += [each.scale_inv for each in target.planes if each.scale_inv is not None]
    elif numerics is not None:
        planes = [
            replace(each, block_amax=amaxes(each.plane.grid.num_blocks)) if SPANS in own else each
            for each, own in zip(target.planes, sides, strict=True)
        ]
        step = replace(step, planes=tuple(planes))
        if isinstance(numerics, NVFP4Numerics):
            assert target.tensor_amax is None  # the kernel that casts reads it, so it is our own
            step = replace(step, tensor_amax=amaxes(1))
        looks_first = bool(zeros)

    prepared = []
    if looks_first:
        prepared.append(_prepare(launcher, None, step, sides, address))
        kept = step.tensor_amax if isinstance(numerics, NVFP4Numerics) else None
        step = replace(step, output=None, mean=None, rstd=None, tensor_amax=kept)
    if numerics is not None:
        prepared.append(_prepare(launcher, numerics, step, sides, address))

    def launch() -> None:
        for tensor in zeros:
            tensor.zero_()
        for arguments in prepared:
            launcher.launch(*arguments)

    return launch


def _sides(plane: Plane) -> tuple[int, int]:
    """Return the logarithms of a block's height and width in the result, :data:`SPANS` where a
    block is as long as the matrix: along each dimension a block lies inside of a tile or spans the
    matrix.
    """
    grid = plane.grid.transposed() if plane.is_transposed else plane.grid
    sides = []
    for dim, block, length in ((0, grid.block_h, grid.rows), (1, grid.block_w, grid.cols)):
        # A block that spans a matrix of 128 rows is no block of 128 rows: the launch that takes its
        # amax has tiles of 32.
        inside = block in (1, 16, 32, 128) and not plane.spans(dim)
        if not inside and block < length:
            raise BackendError(
                f"the cuda backend casts results in blocks of 1, 16, 32 or 128 rows and columns, "
                f"or all of them, got {grid}; use_backend('reference') takes it."
            )
        sides.append(block.bit_length() - 1 if inside else SPANS)
    if sides == [0, 0]:  # a matrix of one row or column
        return (SPANS, 0) if grid.rows == 1 else (0, SPANS)
    return sides[0], sides[1]


def _prepare(
    launcher: Launcher,
    numerics: Numerics | None,
    target: FusedOperand,
    sides: list[tuple[int, int]],
    address: Address,
) -> tuple[Kernel, int, int, Arguments]:
    """Return the arguments of one launch, which casts, or takes amaxes and writes the result in
    high precision.
    """
    height = LOW
    if numerics is not None and any(LOW < 1 << log2_h < 1 << SPANS for log2_h, _ in sides):
        height = TALL
        if not isinstance(numerics, Float8Numerics):
            raise BackendError(
                f"the cuda backend has blocks of {TALL} rows for FP8 with FP32 scales, got "
                f"{numerics} in {target.planes[0].plane.grid}; use_backend('reference') takes it."
            )
    is_norm = target.op.is_norm
    template = (
        "Norm" if is_norm else "ElementWise",
        "NoNumerics" if numerics is None else numerics_class(numerics),
        "LOW" if height == LOW else "TALL",
    )
    kernel = Kernel("fused_op", THREADS[height], template)
    strips, across = ceil_div(target.rows, height), ceil_div(target.cols, TILE_COLS)
    groups = min(across, ceil_div(UNITS, strips)) if is_norm else across
    per_unit = ceil_div(across, groups)
    task = fused_task(numerics, target, sides, per_unit, address)
    grid = min(strips * ceil_div(across, per_unit), launcher.max_grid)
    return kernel, launcher.prepare(kernel), grid, Arguments([], task, alive=target)


def fused_task(
    numerics: Numerics | None,
    target: FusedOperand,
    sides: list[tuple[int, int]],
    tiles_per_unit: int,
    address: Address,
) -> list[int]:
    """FusedTask of fused_tile.h."""
    delayed = None if target.delayed is None else target.delayed.scale
    planes = [
        fused_plane_fields(each, own, address)
        for each, own in zip(target.planes, sides, strict=True)
    ]
    planes += [[0] * PLANE_FIELDS] * (2 - len(planes))
    return [
        *fused_row(target, address),
        tiles_per_unit,
        *([0] * NUMERICS_FIELDS if numerics is None else numerics_fields(numerics, "cuda")),
        address(delayed),
        0,
        0,
        0,
        address(target.tensor_amax),
        address(target.amax),
        *planes[0],
        *planes[1],
    ]


def fused_plane_fields(
    buffers: PlaneBuffers, sides: tuple[int, int], address: Address
) -> list[int]:
    """FusedPlane of fused_tile.h."""
    codes = address(buffers.codes)
    return [*plane_fields(buffers, address), codes, int(buffers.plane.is_transposed), *sides]
