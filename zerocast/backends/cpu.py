"""The native CPU backend: the loops of ``cuda_src/cpu``, over the arithmetic that the CUDA kernels share.

Preparing an operation writes one int64 table, a row a weight, as laid out in ``cuda_src/include/zerocast/tables.h``.
A launch is one C call over the whole table: it releases the GIL, splits the elements of all weights over threads, and
keeps a small one on the calling thread. The addresses of masters are looked up when it runs, so they may be re-bound.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from zerocast.backends import native_library
from zerocast.errors import BackendError
from zerocast.formats import E2M1, E4M3, E5M2
from zerocast.layout import BlockGrid, ScaleLayout
from zerocast.ops import (
    CastShard,
    DequantizeTarget,
    Float8Law,
    Launch,
    Law,
    Masters,
    NVFP4Law,
    ScaleTarget,
    TransposeTarget,
)

# The numbers of the C side: FormatId and Nominal in tables.h.
_FORMATS = {E2M1: 0, E4M3: 1, E5M2: 2}
_NOMINALS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class CpuBackend:
    """The native library on CPU tensors; see :class:`zerocast.ops.Backend` for what the methods promise.

    Args:
        isa: the instruction set whose code runs: ``"avx512"``, ``"avx2"`` or ``"baseline"``; None for the best that
            this machine has. All give the same bytes.
        threads: at most so many threads a launch; None for ``torch.get_num_threads()`` at the time of each launch.

    Raises:
        BackendError: where the library is missing, stale or not loadable, or the machine lacks ``isa``.
    """

    name = "cpu"

    def __init__(self, isa: str | None = None, threads: int | None = None) -> None:
        self._library = native_library.load()
        available = native_library.instruction_sets(self._library)
        if isa is not None and isa not in available:
            raise BackendError(
                f"isa must be one that this machine runs, {available}, got {isa!r}; leave it out."
            )
        if threads is not None and threads < 1:
            raise BackendError(
                f"threads must be at least 1, got {threads}; leave it out for torch's number."
            )
        self.isa = isa or available[0]
        self.threads = threads

    def partial_amax(self, shards: Sequence[CastShard], masters: Masters) -> Launch:
        return self._launch("partial_amax", None, _cast_rows(shards, masters), [shards, masters])

    def compute_scale(self, law: Law, targets: Sequence[ScaleTarget]) -> Launch:
        return self._launch("compute_scale", law, [_scale_row(t) for t in targets], targets)

    def partial_cast(self, law: Law, shards: Sequence[CastShard], masters: Masters) -> Launch:
        return self._launch("partial_cast", law, _cast_rows(shards, masters), [shards, masters])

    def transpose(self, targets: Sequence[TransposeTarget]) -> Launch:
        return self._launch("transpose", None, [_transpose_row(t) for t in targets], targets)

    def dequantize(self, law: Law, targets: Sequence[DequantizeTarget]) -> Launch:
        return self._launch("dequantize", law, [_dequantize_row(t) for t in targets], targets)

    def _launch(
        self, operation: str, law: Law | None, rows: list[list[int]], operands: Sequence[object]
    ) -> Launch:
        """The call of ``operation`` over a table of ``rows``; it keeps alive what the table points to."""
        if not rows:
            return _nothing
        function = getattr(self._library, f"zerocast_{self.isa}_{operation}")
        function.restype = None
        # On the host by name, because C reads them and the default device may be another.
        tables = [torch.tensor(rows, dtype=torch.int64, device="cpu")]
        if law is not None:
            fields = torch.tensor(_law_fields(law), dtype=torch.int64, device="cpu")
            tables.insert(0, fields)
        arguments = [*(ctypes.c_void_p(t.data_ptr()) for t in tables), ctypes.c_int64(len(rows))]
        threads = self.threads
        alive = (tables, tuple(operands))

        def launch() -> None:
            assert alive
            function(*arguments, ctypes.c_int64(threads or torch.get_num_threads()))

        return launch


def _nothing() -> None:
    """The launch of an operation on no weights."""


# --- rows of the tables; the fields are those of cuda_src/include/zerocast/tables.h, in order --------------------


def _law_fields(law: Law) -> list[int]:
    if law.fmt not in _FORMATS or (
        isinstance(law, NVFP4Law) and (law.fmt, law.scale_fmt) != (E2M1, E4M3)
    ):
        raise BackendError(
            f"the cpu backend has no code for {law}; cast it under use_backend('reference')."
        )
    if isinstance(law, Float8Law) and law.fmt is not E2M1:
        return [_FORMATS[law.fmt], int(law.power_2_scale), _float_bits(law.amax_epsilon)]
    return [_FORMATS[law.fmt], 0, 0]


def _grid(grid: BlockGrid) -> list[int]:
    return [grid.rows, grid.cols, grid.block_h, grid.block_w]


def _cast_rows(shards: Sequence[CastShard], masters: Masters) -> list[list[int]]:
    first_slot = masters.pointers.data_ptr()
    return [
        [
            first_slot + shard.slot * masters.pointers.element_size(),
            shard.extent.start,
            shard.extent.end,
            *_grid(shard.grid),
            _NOMINALS[shard.round_to],
            _address(shard.block_amax),
            _address(shard.tensor_amax),
            _address(shard.codes),
            shard.codes_start,
        ]
        for shard in shards
        if shard.extent
    ]


def _scale_row(target: ScaleTarget) -> list[int]:
    layout = target.layout
    return [
        *_grid(layout.grid),
        layout.row_repeat,
        layout.rows,
        layout.cols,
        *layout.shape,
        _padding_bits(layout, target.scale_inv),
        _address(target.block_amax),
        _address(target.tensor_amax),
        _address(target.scale_inv),
        0 if target.amax is None else _address(target.amax),
    ]


def _transpose_row(target: TransposeTarget) -> list[int]:
    rowwise, columnwise = target.layout, target.columnwise_layout
    row = [
        _FORMATS[target.fmt],
        rowwise.grid.rows,
        rowwise.grid.cols,
        _address(target.codes),
        _address(target.columnwise_codes),
    ]
    if target.columnwise_scale_inv is None:
        return row + [0] * 12
    return [
        *row,
        rowwise.grid.blocks_h,
        rowwise.grid.blocks_w,
        target.scale_inv.element_size(),
        rowwise.row_repeat,
        rowwise.shape[1],
        _address(target.scale_inv),
        columnwise.row_repeat,
        columnwise.rows,
        *columnwise.shape,
        _padding_bits(columnwise, target.columnwise_scale_inv),
        _address(target.columnwise_scale_inv),
    ]


def _dequantize_row(target: DequantizeTarget) -> list[int]:
    return [
        *_grid(target.layout.grid),
        target.layout.row_repeat,
        target.layout.shape[1],
        _address(target.codes),
        _address(target.scale_inv),
        0 if target.amax is None else _address(target.amax),
        _address(target.out),
    ]


def _padding_bits(layout: ScaleLayout, plane: torch.Tensor) -> int:
    """The bit pattern of one padding entry of ``plane``: FP32, or a one-byte code."""
    if plane.dtype == torch.float32:
        return _float_bits(layout.padding)
    return int(layout.padding)


def _float_bits(value: float) -> int:
    """The bit pattern of ``value`` rounded to FP32."""
    return int(torch.tensor(value, dtype=torch.float32, device="cpu").view(torch.int32))


def _address(tensor: torch.Tensor) -> int:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise BackendError(
            f"the cpu backend takes contiguous CPU tensors, got {tuple(tensor.shape)} on {tensor.device} with strides "
            f"{tensor.stride()}; pass a contiguous CPU tensor."
        )
    return tensor.data_ptr()
