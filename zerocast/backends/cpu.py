"""The native CPU backend: the loops of ``cuda_src/cpu``, over the arithmetic shared with CUDA.

Preparing an operation writes one table of 64-bit integers, a row a weight, as laid out in
``cuda_src/arithmetic/tables.h``. A launch is one C call over the whole table: it releases the
GIL, splits the elements of all weights over threads, and keeps a small one on the calling thread.
Masters' addresses and dtypes are looked up when it runs, so they may be re-bound between launches.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from array import array
from collections.abc import Callable, Sequence
from threading import get_ident

import torch

from zerocast.backends import native_library, tables
from zerocast.backends.fused_op_rows import fused_row
from zerocast.backends.launches import nothing, with_empty_shards
from zerocast.backends.reference import ReferenceBackend
from zerocast.backends.reference.changes import Changes, most_runs
from zerocast.errors import BackendError
from zerocast.numerics import (
    AdamWUpdate,
    ChangedRuns,
    CodeCopy,
    Comparison,
    DigestedBytes,
    Float8DelayedNumerics,
    FusedOperand,
    Launch,
    LaunchOn,
    LaunchUpdates,
    Masters,
    Numerics,
    NVFP4Numerics,
    Operands,
    SharedByte,
)


class CpuBackend(ReferenceBackend):
    """The native library on CPU tensors; :class:`zerocast.numerics.Backend` says what the methods
    do.

    Args:
        isa: the instruction set whose code runs: ``"avx512"``, ``"avx2"``, ``"neon"`` or
            ``"baseline"``; None for the best that this machine has. All give the same bytes.
        threads: the most threads of a launch; None for ``torch.get_num_threads()`` at the time of
            the launch. A forked process casts on one.

    Raises:
        BackendError: where the library is missing, stale or cannot be loaded, or this machine does
            not run ``isa``.
    """

    name = "cpu"

    def __init__(self, isa: str | None = None, threads: int | None = None) -> None:
        self._library = native_library.load()
        available = native_library.instruction_sets(self._library)
        if isa is not None and isa not in available:
            raise BackendError(
                f"isa must be one of {available}, which this machine supports, got {isa!r}; leave "
                "it out for the first one."
            )
        if threads is not None and threads < 1:
            raise BackendError(f"threads must be 1 or more, got {threads}; None uses torch's.")
        self.isa = isa or available[0]
        self.threads = threads

    def partial_amax(
        self, operands: Operands, masters: Masters, numerics: Numerics | None = None
    ) -> Launch:
        rows = _cast_rows(operands, masters)
        if numerics is None or not any(operand.whole for operand in operands):
            return self._launch("partial_amax", None, rows, (operands, masters))
        return self._launch("partial_amax_cast", numerics, rows, (operands, masters))

    def adamw(self, updates: Sequence[AdamWUpdate]) -> Launch:
        rows = [tables.adamw_row(each, _address) for each in updates]
        return self._launch("adamw", None, rows, updates)

    def adamw_cast(self, numerics: Numerics, operands: Operands, masters: Masters) -> LaunchUpdates:
        rows = _cast_rows(operands, masters)
        run = self._launch("adamw_cast", numerics, rows, (operands, masters))
        slots = [operand.slot for operand in operands if operand.extent]

        def launch(updates: Sequence[AdamWUpdate | None]) -> None:
            run(_table([tables.adamw_row(updates[slot], _address) for slot in slots]))

        return launch

    def partial_select(
        self, numerics: NVFP4Numerics, operands: Operands, masters: Masters
    ) -> Launch:
        _check_candidate_blocks(operands)
        rows = _cast_rows(operands, masters)
        return self._launch("partial_select", numerics, rows, (operands, masters))

    def select(self, numerics: NVFP4Numerics, operands: Operands) -> Launch:
        _check_candidate_blocks(operands)
        rows = [tables.cast_row(t, t.grid, 0, _address, _address) for t in operands]
        return self._launch("select", numerics, rows, operands)

    def compute_scale(self, numerics: Numerics, operands: Operands) -> Launch:
        return with_empty_shards(self._compute_scale, numerics, operands)

    def _compute_scale(self, numerics: Numerics, operands: Operands) -> Launch:
        by_callable = isinstance(numerics, Float8DelayedNumerics) and callable(
            numerics.amax_compute_algo
        )
        if by_callable and any(operand.advances for operand in operands):
            # Python is called for every tensor, so compiled code would gain nothing.
            return super().compute_scale(numerics, operands)
        rows = [tables.scale_row(t, _address) for t in operands]
        return self._launch("compute_scale", numerics, rows, operands)

    def expand_scales(self, numerics: Numerics, operands: Operands) -> Launch:
        rows = [tables.expand_row(t, _address) for t in operands]
        return self._launch("expand_scales", numerics, rows, operands)

    def partial_cast(self, numerics: Numerics, operands: Operands, masters: Masters) -> Launch:
        rows = _cast_rows([o for o in operands if o.extent != o.whole], masters)
        return self._launch("partial_cast", numerics, rows, (operands, masters))

    def transpose(self, numerics: Numerics, operands: Operands) -> Launch:
        rows = [tables.transpose_row(numerics, t, _address) for t in operands]
        return self._launch("transpose", None, rows, operands)

    def dequantize(self, numerics: Numerics, operands: Operands) -> Launch:
        rows = [tables.dequantize_row(t, t.grid, _address) for t in operands]
        return self._launch("dequantize", numerics, rows, operands)

    def stage_codes(self, copies: Sequence[CodeCopy]) -> LaunchOn:
        return self._copy_codes("stage_codes", copies)

    def store_codes(self, copies: Sequence[CodeCopy], shared: Sequence[SharedByte]) -> LaunchOn:
        copy = self._copy_codes("store_codes", copies)
        join = super().store_codes((), shared)

        def launch(buffer: torch.Tensor) -> None:
            copy(buffer)
            join(buffer)

        return launch

    def _copy_codes(self, operation: str, copies: Sequence[CodeCopy]) -> LaunchOn:
        rows = [tables.copy_row(copy, _address) for copy in copies]
        launch = self._launch(operation, None, rows, copies)
        return lambda buffer: launch(_table([[_address(buffer)]]))

    def digest(self, ranges: Sequence[DigestedBytes], sums: torch.Tensor) -> Launch:
        rows = tables.digest_rows(ranges, sums, _address)
        return self._launch("digest", None, rows, (ranges, sums))

    def changed_runs(self, comparisons: Sequence[Comparison]) -> list[ChangedRuns]:
        changes = [Changes(each) for each in comparisons]
        pairs = list(zip(comparisons, changes, strict=True))
        rows = [tables.comparison_row(one, c.flags, c.digest, _address) for one, c in pairs]
        self._launch("compare", None, rows, pairs)()
        most = [most_runs(*pair) for pair in pairs]
        sizes = torch.tensor(most, dtype=torch.int64, device="cpu")
        itemsizes = [each.values.itemsize for each in comparisons]
        room = [3 * runs + size * n for (runs, n), size in zip(most, itemsizes, strict=True)]
        data = torch.empty(sum(room), dtype=torch.uint8, device="cpu").split(room)
        rows = [
            tables.runs_row(one, found.flags, size, room_of, _address)
            for (one, found), size, room_of in zip(pairs, sizes, data, strict=True)
        ]
        self._launch("runs", None, rows, (comparisons, changes, sizes, data))()
        return [
            (runs, elements, its_data[: 3 * runs + elements * size], of.digest)
            for (runs, elements), size, its_data, of in zip(
                sizes.tolist(), itemsizes, data, changes, strict=True
            )
        ]

    def fused_op(self, target: FusedOperand) -> Launch:
        return self._launch("fused_op", None, [fused_row(target, _address)], (target,))

    def _launch(
        self,
        operation: str,
        numerics: Numerics | None,
        rows: list[list[int]],
        operands: Sequence[object],
    ) -> Callable[..., None]:
        """Return the call of ``operation`` over a table of ``rows``, which point into ``operands``;
        the call keeps the operands alive. A further table may be passed to each call.
        """
        first = [] if numerics is None else [_table([tables.numerics_fields(numerics, self.name)])]
        if not rows:
            return nothing
        function = getattr(self._library, f"zerocast_{self.isa}_{operation}")
        function.restype = None
        arguments = (*first, _table(rows), ctypes.c_int64(len(rows)))
        alive = tuple(operands)

        def launch(*given: ctypes.Array[ctypes.c_int64]) -> None:
            assert alive is not None
            threads = self.threads or torch.get_num_threads()
            if get_ident() == _forked:
                threads = 1
            function(*arguments, *given, ctypes.c_int64(threads))

        return launch


_forked: int | None = None
"""The first thread of a forked process. There OpenMP would wait forever for the threads that it had
in the parent process, as it does in torch's own operations.
"""


def _note_fork() -> None:
    global _forked
    _forked = get_ident()


os.register_at_fork(after_in_child=_note_fork)


def _table(rows: list[list[int]]) -> ctypes.Array[ctypes.c_int64]:
    fields = array("q", itertools.chain.from_iterable(rows))
    return (ctypes.c_int64 * len(fields)).from_buffer(fields)


def _cast_rows(operands: Operands, masters: Masters) -> list[list[int]]:
    return [
        tables.cast_row(
            shard, shard.grid, masters.place(shard.slot, masters.table), _address, _address
        )
        for shard in operands
        if shard.extent
    ]


def _check_candidate_blocks(operands: Operands) -> None:
    for grid in (operand.grid for operand in operands):
        if grid.block_h > 16 or grid.block_w > 16:
            raise BackendError(
                "the cpu backend supports 4-over-6 for blocks of at most 16x16, got "
                f"{grid.block_h}x{grid.block_w}; cast it under use_backend('reference')."
            )


def _address(tensor: torch.Tensor | None) -> int:
    if tensor is None:
        return 0
    if not (tensor.is_cpu and tensor.is_contiguous()):  # reading .device costs more than both
        raise BackendError(
            f"the cpu backend needs contiguous CPU tensors, got one of shape {tuple(tensor.shape)} "
            f"with strides {tensor.stride()} on {tensor.device}; pass it as .cpu().contiguous()."
        )
    return tensor.data_ptr()
