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
from zerocast.backends.tables import (
    cast_row,
    dequantize_row,
    law_fields,
    scale_row,
    transpose_row,
)
from zerocast.errors import BackendError
from zerocast.ops import (
    CastShard,
    DequantizeTarget,
    Launch,
    Law,
    Masters,
    ScaleTarget,
    TransposeTarget,
)


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
        return self._launch("compute_scale", law, [scale_row(t, _address) for t in targets], targets)

    def partial_cast(self, law: Law, shards: Sequence[CastShard], masters: Masters) -> Launch:
        return self._launch("partial_cast", law, _cast_rows(shards, masters), [shards, masters])

    def transpose(self, targets: Sequence[TransposeTarget]) -> Launch:
        return self._launch("transpose", None, [transpose_row(t, _address) for t in targets], targets)

    def dequantize(self, law: Law, targets: Sequence[DequantizeTarget]) -> Launch:
        rows = [dequantize_row(t, t.layout.grid, _address) for t in targets]
        return self._launch("dequantize", law, rows, targets)

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
            fields = torch.tensor(law_fields(law, self.name), dtype=torch.int64, device="cpu")
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


def _cast_rows(shards: Sequence[CastShard], masters: Masters) -> list[list[int]]:
    first_slot = masters.pointers.data_ptr()
    size = masters.pointers.element_size()
    return [
        cast_row(shard, shard.grid, first_slot + shard.slot * size, _address)
        for shard in shards
        if shard.extent
    ]


def _address(tensor: torch.Tensor) -> int:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise BackendError(
            f"the cpu backend takes contiguous CPU tensors, got {tuple(tensor.shape)} on {tensor.device} with strides "
            f"{tensor.stride()}; pass a contiguous CPU tensor."
        )
    return tensor.data_ptr()
