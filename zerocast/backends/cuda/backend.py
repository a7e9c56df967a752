"""CudaBackend: the operations of :mod:`zerocast.ops` as launches of our kernels.

Preparing an operation writes two tables, the rows of the weights (``tables.h``) and the tiles that
the launch visits, and copies them to the device. A launch is then one call of the driver for any
number of weights: it allocates nothing and waits for nothing, so it can be captured in a graph.

The addresses of masters stand in a table of their own, which is sent again only after the masters
were bound to other tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from zerocast.backends.cuda.launcher import Arguments, Kernel, Launcher
from zerocast.backends.cuda.tiling import (
    code_squares,
    copied_scale_tiles,
    scale_tiles,
    shard_tiles,
    table,
    tiled_grid,
)
from zerocast.backends.tables import (
    cast_row,
    dequantize_row,
    law_fields,
    scale_row,
    transpose_row,
)
from zerocast.errors import BackendError
from zerocast.formats import packed_columns
from zerocast.layout import Extent
from zerocast.ops import (
    CastShard,
    DequantizeTarget,
    Launch,
    Law,
    Masters,
    ScaleTarget,
    TransposeTarget,
)

THREADS = 128
"""Of a block, in every kernel whose tiles are cut for quads (``tiles.h``)."""

SQUARE_THREADS = 256
"""Of a block of ``transpose.cu``."""


class CudaBackend:
    """Our kernels through a launcher; see :class:`zerocast.ops.Backend` for what the methods
    promise.

    Args:
        launcher: who runs the kernels. Its ``launches`` counts them.
    """

    name = "cuda"

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self._pointers: weakref.WeakKeyDictionary[Masters, _MasterPointers] = (
            weakref.WeakKeyDictionary()
        )

    def partial_amax(self, shards: Sequence[CastShard], masters: Masters) -> Launch:
        kernel = Kernel("partial_amax", "partial_amax", THREADS)
        return self._cast(kernel, [], shards, masters)

    def compute_scale(self, law: Law, targets: Sequence[ScaleTarget]) -> Launch:
        kernel = Kernel("compute_scale", f"compute_scale_{law.fmt.name}", THREADS)
        rows = [scale_row(target, self._address) for target in targets]
        tiles = [
            scale_tiles(i, target.layout.shape, target.layout.row_repeat)
            for i, target in enumerate(targets)
        ]
        return self._launch(kernel, rows, tiles, law_fields(law, self.name)[2:4], targets)

    def partial_cast(self, law: Law, shards: Sequence[CastShard], masters: Masters) -> Launch:
        kernel = Kernel("partial_cast", f"partial_cast_{law.fmt.name}", THREADS)
        if law.fmt.bits == 4:
            for shard in shards:
                _check_whole_bytes(shard.grid.cols)
        return self._cast(kernel, law_fields(law, self.name)[2:4], shards, masters)

    def transpose(self, targets: Sequence[TransposeTarget]) -> Launch:
        launches = []
        for bits in (4, 8):
            chosen = [target for target in targets if target.fmt.bits == bits]
            if chosen:
                launches.append(self._transpose(bits, chosen))

        def launch() -> None:
            for run in launches:
                run()

        return launch

    def dequantize(self, law: Law, targets: Sequence[DequantizeTarget]) -> Launch:
        law_fields(law, self.name)
        kernel = Kernel("dequantize", f"dequantize_{law.fmt.name}", THREADS)
        grids = [tiled_grid(target.layout.grid) for target in targets]
        if law.fmt.bits == 4:
            for target in targets:
                _check_whole_bytes(target.layout.grid.cols)
        rows = [
            dequantize_row(target, grid, self._address)
            for target, grid in zip(targets, grids, strict=True)
        ]
        tiles = [shard_tiles(i, grid, Extent(0, grid.numel)) for i, grid in enumerate(grids)]
        return self._launch(kernel, rows, tiles, [], targets)

    # --- from operands to launches ---

    def _cast(
        self, kernel: Kernel, law: list[int], shards: Sequence[CastShard], masters: Masters
    ) -> Launch:
        """The launch of a kernel that reads masters."""
        shards = [shard for shard in shards if shard.extent]
        if not shards:
            return _nothing
        pointers = self._pointers.get(masters)
        if pointers is None:
            pointers = self._pointers[masters] = _MasterPointers(self.launcher, masters)
        grids = [tiled_grid(shard.grid) for shard in shards]
        rows = [
            cast_row(shard, grid, pointers.slot(shard.slot), self._address, self._address)
            for shard, grid in zip(shards, grids, strict=True)
        ]
        tiles = [
            shard_tiles(i, grid, shard.extent)
            for i, (shard, grid) in enumerate(zip(shards, grids, strict=True))
        ]
        run = self._launch(kernel, rows, tiles, law, (shards, masters, pointers))

        def launch() -> None:
            pointers.follow(masters)
            run()

        return launch

    def _transpose(self, bits: int, targets: Sequence[TransposeTarget]) -> Launch:
        kernel = Kernel("transpose", f"transpose_{bits}_bit", SQUARE_THREADS)
        tiles = []
        for i, target in enumerate(targets):
            rows, cols = target.layout.grid.rows, target.layout.grid.cols
            if bits == 4:
                _check_whole_bytes(cols)
            if target.columnwise_scale_inv is not None:
                layout = target.columnwise_layout
                tiles.append(copied_scale_tiles(i, layout.shape, layout.row_repeat))
            # Squares of bytes: for nibbles, of two rows by two columns a byte.
            down = packed_columns(target.fmt, rows)
            tiles.append(code_squares(i, down, packed_columns(target.fmt, cols)))
        table_rows = [transpose_row(target, self._address) for target in targets]
        return self._launch(kernel, table_rows, tiles, [], targets)

    def _launch(
        self,
        kernel: Kernel,
        rows: list[list[int]],
        tiles: Sequence[torch.Tensor],
        scalars: list[int],
        operands: object,
    ) -> Launch:
        """The launch of ``kernel`` over two tables; it keeps alive what they point to."""
        if not rows:
            return _nothing
        launcher = self.launcher
        handle = launcher.prepare(kernel)
        weights = launcher.upload(torch.tensor(rows, dtype=torch.int64, device="cpu"))
        visited = launcher.upload(table(tiles))
        count = visited.shape[0]
        arguments = Arguments([weights.data_ptr(), visited.data_ptr(), count, *scalars])
        grid = min(count, launcher.max_grid)
        alive = (weights, visited, operands)

        def launch() -> None:
            assert alive
            launcher.launch(kernel, handle, grid, arguments)

        return launch

    def _address(self, tensor: torch.Tensor) -> int:
        if tensor.device != self.launcher.device or not tensor.is_contiguous():
            raise BackendError(
                f"the cuda backend takes contiguous tensors on {self.launcher.device}, got "
                f"{tuple(tensor.shape)} on {tensor.device} with strides {tensor.stride()}; pass "
                "one of those."
            )
        return tensor.data_ptr()


class _MasterPointers:
    """The addresses of masters where kernels can read them."""

    def __init__(self, launcher: Launcher, masters: Masters) -> None:
        self._launcher = launcher
        self._version = masters.version
        self._table = launcher.upload(masters.pointers)

    def slot(self, index: int) -> int:
        """Where the address of one master stands."""
        return self._table.data_ptr() + index * self._table.element_size()

    def follow(self, masters: Masters) -> None:
        """Send the addresses again where ``masters`` were bound anew."""
        if self._version != masters.version:
            self._launcher.refresh(self._table, masters.pointers)
            self._version = masters.version


def _check_whole_bytes(cols: int) -> None:
    if cols % 2:
        raise BackendError(
            f"the cuda backend takes 4-bit codes in rows of whole bytes, got {cols} columns; cast "
            "this weight under use_backend('reference')."
        )


def _nothing() -> None:
    """The launch of an operation on no elements."""
