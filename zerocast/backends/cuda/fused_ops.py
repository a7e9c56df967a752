"""Activations on CUDA: which kernels compute a function and cast its result, and what they are
told.

One launch, or two of the same computation: where a scale needs an amax that no thread block sees
alone (of the tensor, of whole rows or columns), the first takes the amaxes and writes what is
wanted in high precision, and the second computes everything again and writes codes. A launch's only
argument is the struct ``ActivationTask`` of ``activation_tile.h``, passed by value: no table is
sent to the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zerocast.backends.cuda.launcher import Arguments, Kernel, Launcher
from zerocast.backends.cuda.prepared import nothing
from zerocast.backends.fused_ops import fused_fields
from zerocast.backends.tables import Address, numerics_class, numerics_fields
from zerocast.errors import BackendError
from zerocast.layout import ceil_div
from zerocast.numerics import (
    NOMINALS,
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
"""A tile: columns, and rows of the two kinds."""

LARGEST = 2**30
"""Rows and columns are 32 bits wide in the kernels, tiles past the edge included."""

THREADS = {LOW: 256, TALL: 512}
"""Of a block, by its tiles' rows."""

PLANE_FIELDS = 14
"""Of one ``CastPlane`` of activation_tile.h."""

NUMERICS_FIELDS = 10
"""Of ``NumericsTable`` of tables.h."""

UNITS = 256
"""Thread blocks that a norm is cut into at least, where it has the tiles: some for every
multiprocessor. Those side by side read the same rows for their statistics."""


def fused_op(
    launcher: Launcher, address: Address, numerics: Numerics | None, target: FusedOperand
) -> Launch:
    """The launches of :meth:`zerocast.numerics.Backend.fused_op`."""
    if target.rows == 0:
        return nothing
    assert numerics is None or can_fuse(numerics)
    if max(target.rows, target.cols) >= LARGEST:
        raise BackendError(
            f"the cuda backend takes activations of fewer than {LARGEST} rows and columns, got "
            f"({target.rows}, {target.cols}); cut the tensor."
        )
    planes = [_Plane.of(plane, target) for plane in target.planes]
    task = _Task(target, numerics, address)
    zeros: list[torch.Tensor] = []  # cleared by the launch, then raised by kernels

    def amaxes(count: int) -> torch.Tensor:
        zeros.append(torch.zeros(count, dtype=torch.int32, device=launcher.device))
        return zeros[-1]

    tensor_amax = target.tensor_amax
    block_amaxes: list[torch.Tensor | None] = [None] * len(planes)
    if isinstance(numerics, Float8DelayedNumerics):
        zeros += [plane.scale_inv for plane in target.planes if plane.scale_inv is not None]
    elif numerics is not None:
        block_amaxes = [amaxes(plane.num_blocks) if plane.is_wide else None for plane in planes]
        if isinstance(numerics, NVFP4Numerics):
            assert tensor_amax is None  # the kernel that casts reads it, so it is our own
            tensor_amax = amaxes(1)
    looks_first = numerics is None or (
        bool(zeros) and not isinstance(numerics, Float8DelayedNumerics)
    )

    steps = []
    if looks_first:
        wide = [
            plane.fields(LOW, amax, address)
            for plane, amax in zip(planes, block_amaxes, strict=True)
            if amax is not None
        ]
        steps.append(task.step(False, LOW, tensor_amax, wide))
    if numerics is not None:
        height = _height(numerics, planes)
        every = [
            plane.fields(height, amax, address)
            for plane, amax in zip(planes, block_amaxes, strict=True)
        ]
        if looks_first:
            task.leave_out_outputs()
            tensor_amax = tensor_amax if isinstance(numerics, NVFP4Numerics) else None
        steps.append(task.step(True, height, tensor_amax, every))
    launches = [
        (kernel, launcher.prepare(kernel), min(units, launcher.max_grid), arguments)
        for kernel, units, arguments in steps
    ]
    alive = (target, zeros)

    def launch() -> None:
        assert alive
        for tensor in zeros:
            tensor.zero_()
        for step in launches:
            launcher.launch(*step)

    return launch


def _height(numerics: Numerics, planes: list[_Plane]) -> int:
    """Of the tiles in which every block lies that is scaled by itself."""
    if isinstance(numerics, Float8DelayedNumerics):
        return LOW  # no block is scaled by itself
    tall = [plane for plane in planes if plane.height == TALL]
    if tall and not isinstance(numerics, Float8Numerics):
        raise BackendError(
            f"the cuda backend has blocks of {TALL} rows for FP8 with FP32 scales, got "
            f"{numerics} in "
            f"{tall[0].buffers.plane.grid}; use_backend('reference') takes it."
        )
    return TALL if tall else LOW


@dataclass(frozen=True, slots=True)
class _Plane:
    """A copy of the codes as a tile sees it: along each dimension a block lies inside of a tile, or
    is as long as the matrix.
    """

    buffers: PlaneBuffers
    height: int  # of the lowest tile that holds its blocks
    log2_h: int | None  # None where a block is as high as the matrix
    log2_w: int | None
    num_blocks: int

    @classmethod
    def of(cls, buffers: PlaneBuffers, target: FusedOperand) -> _Plane:
        plane = buffers.plane
        grid = plane.grid.transposed() if plane.is_transposed else plane.grid
        assert (grid.rows, grid.cols) == (target.rows, target.cols)
        # A block that spans a matrix of 128 rows is no block of 128 rows: the launch that takes its
        # amax has tiles of 32.
        log2_h = None if plane.spans(0) else _log2(grid.block_h, grid.rows, TALL)
        log2_w = None if plane.spans(1) else _log2(grid.block_w, grid.cols, TILE_COLS)
        if log2_h == log2_w == 0:  # a matrix of one row or column
            log2_h, log2_w = (None, 0) if grid.rows == 1 else (0, None)
        if log2_h == -1 or log2_w == -1 or (log2_w is None and grid.block_w < grid.cols):
            raise BackendError(
                f"the cuda backend casts results in blocks of 1, 16, 32 or 128 rows and columns, "
                f"or all of them, got {grid}; use_backend('reference') takes it."
            )
        height = TALL if log2_h is not None and 1 << log2_h > LOW else LOW
        return cls(buffers, height, log2_h, log2_w, grid.num_blocks)

    @property
    def is_wide(self) -> bool:
        """Whether its blocks do not lie inside of tiles."""
        return self.log2_h is None or self.log2_w is None

    def fields(self, height: int, amax: torch.Tensor | None, address: Address) -> list[int]:
        """CastPlane of activation_tile.h."""
        buffers, layout = self.buffers, self.buffers.plane.scales
        stride = layout.shape[1]
        steps = (1, stride) if layout.transposed else (stride, 1)
        entries = [
            (layout.row_repeat, layout.rows, steps[0]),
            (layout.col_repeat, layout.cols, steps[1]),
        ]
        if buffers.plane.is_transposed:
            entries.reverse()
        (down_repeat, down_entries, down_stride), (right_repeat, right_entries, right_stride) = (
            entries
        )
        return [
            0 if buffers.codes is None else address(buffers.codes),
            0 if buffers.scale_inv is None else address(buffers.scale_inv),
            0 if amax is None else address(amax),
            int(buffers.plane.is_transposed),
            height.bit_length() - 1 if self.log2_h is None else self.log2_h,
            TILE_COLS.bit_length() - 1 if self.log2_w is None else self.log2_w,
            int(self.log2_h is not None),
            int(self.log2_w is not None),
            down_repeat,
            right_repeat,
            down_entries,
            right_entries,
            down_stride,
            right_stride,
        ]


class _Task:
    """``ActivationTask`` of activation_tile.h, for the steps of one target."""

    def __init__(self, target: FusedOperand, numerics: Numerics | None, address: Address) -> None:
        self._target, self._address = target, address
        self._table = fused_fields(target, address)
        operands = (target.source, target.weight, target.bias)
        self._types = [0 if t is None else NOMINALS[t.dtype] for t in operands]
        self._class, self._numerics = "", [0] * NUMERICS_FIELDS
        if numerics is not None:
            self._class = numerics_class(numerics)
            self._numerics = numerics_fields(numerics, "cuda")
        scale = None if target.delayed is None else target.delayed.scale
        self._delayed = [self._of(scale), 0, 0, 0]

    def step(
        self, casts: bool, height: int, tensor_amax: torch.Tensor | None, planes: list[list[int]]
    ) -> tuple[Kernel, int, Arguments]:
        """One launch in tiles of ``height``, which casts, or takes amaxes and writes the result in
        high precision: the kernel, how many thread blocks, the argument.
        """
        is_norm = self._target.op.is_norm
        name = "normalization" if is_norm else "activation"
        template = self._class if casts else "NoNumerics", "TALL" if height == TALL else "LOW"
        kernel = Kernel(name, THREADS[height], template)
        strips, across = ceil_div(self._target.rows, height), ceil_div(self._target.cols, TILE_COLS)
        groups = min(across, ceil_div(UNITS, strips)) if is_norm else across
        per_unit = ceil_div(across, groups)
        amaxes = [self._of(tensor_amax), self._of(self._target.amax)]
        missing = [0] * (PLANE_FIELDS * (2 - len(planes)))
        fields = [*self._table, *self._types, per_unit, *self._numerics, *self._delayed, *amaxes]
        fields += [field for plane in planes for field in plane] + missing
        return kernel, strips * ceil_div(across, per_unit), Arguments([], fields)

    def leave_out_outputs(self) -> None:
        """Let the steps to come write codes only: an earlier one has written output and
        statistics.
        """
        self._table[-3:] = [0, 0, 0]

    def _of(self, tensor: torch.Tensor | None) -> int:
        return 0 if tensor is None else self._address(tensor)


def _log2(block: int, matrix: int, largest: int) -> int | None:
    """Of a side of a block inside of a tile; None where it is as long as the matrix, -1 where it is
    neither.
    """
    if block in (1, 16, 32, 128) and block <= largest:
        return block.bit_length() - 1
    return None if block >= matrix else -1
