"""CudaBackend: the operations of :mod:`zerocast.numerics` as launches of our kernels.

Preparing an operation writes two tables, the rows of the weights (``tables.h``) and the tiles that
the launch visits, and copies them to the device (:mod:`zerocast.backends.cuda.prepared`). A launch
is then one call of the driver for any number of weights: it allocates nothing and waits for
nothing, so it can be captured in a graph. So can the preparation of a few weights, the quantization
of an activation say, in shapes that were prepared before.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

import torch

from zerocast.backends import tables
from zerocast.backends.cuda import tiling
from zerocast.backends.cuda.code_copies import copy_codes
from zerocast.backends.cuda.cuts import (
    Cuts,
    WeightCuts,
    all_of,
    by_blocks,
    not_whole,
    patch_template,
    reads_once,
    scale_cut,
    scale_cuts,
    second_grid,
    tiled,
)
from zerocast.backends.cuda.delayed import scales_by_callable
from zerocast.backends.cuda.fused_op_launch import fused_op
from zerocast.backends.cuda.launcher import Kernel, Launcher
from zerocast.backends.cuda.prepared import Tables
from zerocast.backends.cuda.tiling import Cut
from zerocast.backends.launches import in_sequence, nothing, with_empty_shards
from zerocast.backends.reference import ReferenceBackend
from zerocast.errors import BackendError
from zerocast.layout import BlockGrid, Extent
from zerocast.numerics import (
    AdamWUpdate,
    CodeCopy,
    DigestedBytes,
    Float8DelayedNumerics,
    FusedOperand,
    Launch,
    LaunchOn,
    Masters,
    Numerics,
    NVFP4Numerics,
    Operands,
    SharedByte,
    TensorOperand,
    packed_columns,
)

THREADS = 128
"""Threads of a block in every kernel except those of ``transpose.cu``."""

SQUARE_THREADS = 256
"""Threads of a block in ``transpose.cu``."""


class CudaBackend(ReferenceBackend):
    """Our kernels through a launcher; see :class:`zerocast.numerics.Backend` for what the methods
    promise. The changed parts of a tensor are found by torch, as in the reference.

    Args:
        launcher: runs the kernels, and counts them in ``launches``.
        on_trial: whether casts run variants that no GPU has been measured with: thread blocks fetch
            their next tile, and the pass that measures and casts whole blocks writes their scales
            where ``block_amax`` of the operands points, one a block.
    """

    name = "cuda"

    def __init__(self, launcher: Launcher, *, on_trial: bool = False) -> None:
        self.launcher, self.on_trial = launcher, on_trial
        self._variant = ("true",) if on_trial else ()  # the last argument of such templates
        self._tables = Tables(launcher)

    # --- operations on shards ---

    @staticmethod
    def reads_once(numerics: Numerics, grids: Sequence[BlockGrid]) -> bool:
        return reads_once(numerics, grids)

    def partial_amax(
        self, operands: Operands, masters: Masters, numerics: Numerics | None = None
    ) -> Launch:
        if numerics is None or not any(operand.whole for operand in operands):
            return self._cast("partial_amax", (), [], operands, all_of, masters)
        fields = tables.numerics_fields(numerics, self.name)
        numerics_class = tables.numerics_class(numerics)
        launch = self._cast("partial_amax", (), [], operands, not_whole, masters)
        for blocks, whole in by_blocks(operands).items():
            template, threads = patch_template(blocks)
            template = numerics_class, *template, *self._variant
            kernel = Kernel("partial_amax_cast", threads, template)
            cuts = Cuts.of(((tiling.patch_tiles, s.grid, s.whole),) for s in whole)
            grids = [shard.grid for shard in whole]
            one_pass = self._on_masters(kernel, fields, whole, grids, cuts, masters)
            launch = in_sequence(launch, one_pass)
        return launch

    def adamw(self, updates: Sequence[AdamWUpdate]) -> Launch:
        updates = [update for update in updates if update.master.numel()]
        rows = (tables.adamw_row(update, self._address) for update in updates)
        numels = (update.master.numel() for update in updates)
        cuts = Cuts.of(((tiling.shard_tiles, BlockGrid(1, n, 1, n), Extent(0, n)),) for n in numels)
        return self._tables.launch(Kernel("adamw", THREADS), rows, cuts, [], updates)

    def partial_select(
        self, numerics: NVFP4Numerics, operands: Operands, masters: Masters
    ) -> Launch:
        fields = tables.numerics_fields(numerics, self.name)
        shards = [shard for shard in operands if shard.extent]
        for shard in shards:
            _check_choosing(shard.grid)
            _check_whole_bytes(shard.grid.cols)
        is_flat = all(shard.grid.block_h == 1 for shard in shards)  # as one recipe's blocks are
        name, variant = (
            ("partial_select_flat", ()) if is_flat else ("partial_select", self._variant)
        )
        kernel = Kernel(name, THREADS, (*_squared(numerics), *variant))
        cuts = Cuts.of(((tiling.shard_tiles, s.grid, s.extent),) for s in shards)
        return self._on_masters(kernel, fields, shards, [s.grid for s in shards], cuts, masters)

    def partial_cast(self, numerics: Numerics, operands: Operands, masters: Masters) -> Launch:
        fields = tables.numerics_fields(numerics, self.name)
        for shard in operands:
            if numerics.fmt.bits == 4:
                _check_whole_bytes(shard.grid.cols)
            no_second = (NVFP4Numerics, Float8DelayedNumerics)
            if len(shard.cast_planes) > 1 and isinstance(numerics, no_second):
                raise BackendError(
                    "the cuda backend cannot cast a second plane under a tensor scale, got one "
                    f"under {numerics}; cast it under use_backend('reference')."
                )
            if isinstance(numerics, Float8DelayedNumerics) and shard.grid.num_blocks != 1:
                raise BackendError(
                    "the cuda backend supports delayed scaling with one block per tensor, got "
                    f"{shard.grid}; cast it under use_backend('reference')."
                )
        encoder = f"NearestVec4<{numerics.fmt.name.upper()}>"
        if isinstance(numerics, NVFP4Numerics) and numerics.stochastic_rounding:
            encoder = "StochasticVec4"
        template = tables.numerics_class(numerics), encoder
        return self._cast("partial_cast", template, fields, operands, not_whole, masters)

    # --- operations on whole weights ---

    def select(self, numerics: NVFP4Numerics, operands: Operands) -> Launch:
        fields = tables.numerics_fields(numerics, self.name)
        kernel = Kernel("select", THREADS, _squared(numerics))
        chosen, weight_cuts = [], list[WeightCuts]()
        for operand in operands:
            assert operand.candidates is not None
            if count := operand.candidates.cut.numel():
                _check_choosing(operand.grid)
                chosen.append(operand)
                shape = count, operand.grid.blocks_w
                weight_cuts.append(((tiling.plane_tiles, 0, shape, tiling.CHOSEN),))
        lists = self._tables.lists(chosen)
        rows = (tables.cast_row(o, o.grid, 0, self._address, lists.address) for o in chosen)
        return self._tables.launch(
            kernel, rows, Cuts.of(weight_cuts), fields, chosen, lists.tensors
        )

    def compute_scale(self, numerics: Numerics, operands: Operands) -> Launch:
        return with_empty_shards(self._compute_scale, numerics, operands)

    def _compute_scale(self, numerics: Numerics, operands: Operands) -> Launch:
        rows = (tables.scale_row(operand, self._address) for operand in operands)
        if isinstance(numerics, Float8DelayedNumerics):
            return self._close_delayed(numerics, rows, operands)
        fields = tables.numerics_fields(numerics, self.name)
        kernel = Kernel("compute_scale", THREADS, (tables.numerics_class(numerics),))
        cuts = Cuts.of(scale_cuts(operand.scaled_planes) for operand in operands)
        return self._tables.launch(kernel, rows, cuts, fields, operands)

    def expand_scales(self, numerics: Numerics, operands: Operands) -> Launch:
        stored = "i32" if numerics.scale_dtype == torch.float32 else "u8"
        kernel = Kernel("expand_scales", THREADS, (stored,))
        rows = (tables.expand_row(operand, self._address) for operand in operands)
        cuts = Cuts.of(scale_cuts(operand.planes) for operand in operands)
        return self._tables.launch(kernel, rows, cuts, [], operands)

    def transpose(self, numerics: Numerics, operands: Operands) -> Launch:
        bits = numerics.fmt.bits
        kernel = Kernel("transpose", SQUARE_THREADS, (str(bits),))

        def cuts_of(operand: TensorOperand) -> WeightCuts:
            rows, cols = operand.grid.rows, operand.grid.cols
            if bits == 4:
                _check_whole_bytes(cols)
            # Squares of bytes: for nibbles, of two rows by two columns a byte.
            shape = packed_columns(numerics.fmt, rows), packed_columns(numerics.fmt, cols)
            codes: Cut = (tiling.plane_tiles, 0, shape, tiling.SQUARE)
            columnwise = operand.planes[1]
            if columnwise.scale_inv is None:
                return (codes,)
            return scale_cut(1, columnwise.plane.scales), codes

        cuts = Cuts.of(map(cuts_of, operands))
        rows = (tables.transpose_row(numerics, o, self._address) for o in operands)
        return self._tables.launch(kernel, rows, cuts, [], operands)

    def dequantize(self, numerics: Numerics, operands: Operands) -> Launch:
        fields = tables.numerics_fields(numerics, self.name)
        if numerics.fmt.bits == 4:
            for operand in operands:
                _check_whole_bytes(operand.grid.cols)
        shape, grids, weight_cuts = tiled(
            [(operand.grid, None, [Extent(0, operand.grid.numel)]) for operand in operands]
        )
        kernel = Kernel("dequantize", THREADS, (tables.numerics_class(numerics), shape))
        rows = (
            tables.dequantize_row(operand, grid, self._address)
            for operand, grid in zip(operands, grids, strict=True)
        )
        return self._tables.launch(kernel, rows, Cuts.of(weight_cuts), fields, operands)

    def stage_codes(self, copies: Sequence[CodeCopy]) -> LaunchOn:
        return copy_codes(self._tables, self._address, copies, into_weights=False)

    def store_codes(self, copies: Sequence[CodeCopy], shared: Sequence[SharedByte]) -> LaunchOn:
        return copy_codes(self._tables, self._address, copies, shared, into_weights=True)

    def digest(self, ranges: Sequence[DigestedBytes], sums: torch.Tensor) -> Launch:
        rows = tables.digest_rows(ranges, sums, self._address)
        cuts = Cuts.of((tiling.digest_cut(row[1], row[2]),) for row in rows)
        kernel = Kernel("digest", THREADS)
        return self._tables.launch(kernel, rows, cuts, [], (ranges, sums))

    def fused_op(self, target: FusedOperand) -> Launch:
        return fused_op(self.launcher, self._address, target)

    # --- from operands to launches ---

    def _cast(
        self,
        name: str,
        template: tuple[str, ...],
        fields: list[int],
        operands: Operands,
        visited: Callable[[TensorOperand], Sequence[Extent]],
        masters: Masters,
    ) -> Launch:
        """Return the launch of a kernel that reads the ``visited`` elements of each master, over
        the shape of tiles that fits all.
        """
        kinds: dict[tuple[BlockGrid, BlockGrid | None, tuple[Extent, ...]], int] = {}
        shards, of_shards = list[TensorOperand](), array("q")
        for shard in operands:
            if extents := tuple(filter(None, visited(shard))):
                kind = shard.grid, second_grid(shard), extents
                shards.append(shard)
                of_shards.append(kinds.setdefault(kind, len(kinds)))
        shape, grids, weight_cuts = tiled(list(kinds))
        kernel = Kernel(name, THREADS, (*template, shape, *self._variant))
        seen, cuts = (grids[kind] for kind in of_shards), Cuts(tuple(weight_cuts), of_shards)
        return self._on_masters(kernel, fields, shards, seen, cuts, masters)

    def _on_masters(
        self,
        kernel: Kernel,
        fields: list[int],
        shards: Operands,
        grids: Iterable[BlockGrid],
        cuts: Cuts,
        masters: Masters,
    ) -> Launch:
        """Return the launch over ``shards``, none of them empty, seen under ``grids``."""
        if not shards:
            return nothing
        table = self._tables.masters(masters)
        lists = self._tables.lists(shards)
        rows = (
            tables.cast_row(
                shard, grid, table.place(masters, shard.slot), self._address, lists.address
            )
            for shard, grid in zip(shards, grids, strict=True)
        )
        run = self._tables.launch(
            kernel, rows, cuts, fields, (shards, masters), [table.tensor, *lists.tensors]
        )

        def launch() -> None:
            table.follow(masters)
            run()

        return launch

    def _close_delayed(
        self,
        numerics: Float8DelayedNumerics,
        rows: Iterable[list[int]],
        operands: Operands,
    ) -> Launch:
        """Return the launch that closes casts under delayed scaling: one thread block a weight,
        then the caller's function if there is one.
        """
        by_caller = callable(numerics.amax_compute_algo)
        kernel = Kernel("compute_scale_delayed", THREADS, ("true" if by_caller else "false",))
        fields = tables.numerics_fields(numerics, self.name)
        run = self._tables.launch(kernel, rows, None, fields, operands)
        return in_sequence(run, scales_by_callable(numerics, operands)) if by_caller else run

    def _address(self, tensor: torch.Tensor | None) -> int:
        if tensor is None:
            return 0
        if tensor.device != self.launcher.device or not tensor.is_contiguous():
            raise BackendError(
                f"the cuda backend takes contiguous tensors on {self.launcher.device}, got "
                f"{tuple(tensor.shape)} on {tensor.device} with strides {tensor.stride()}; move "
                "it, or call .contiguous()."
            )
        return tensor.data_ptr()


def _squared(numerics: NVFP4Numerics) -> tuple[str]:
    """Return the template's argument of the kernels that choose: whether errors are squared."""
    return ("true" if numerics.four_over_six == "mse" else "false",)


def _check_choosing(grid: BlockGrid) -> None:
    if (grid.block_h, grid.block_w) not in ((16, 16), (1, 16)):
        raise BackendError(
            f"the cuda backend chooses scales of blocks of 16x16 and 1x16, got {grid}; cast this "
            "weight under use_backend('reference')."
        )


def _check_whole_bytes(cols: int) -> None:
    if cols % 2:
        raise BackendError(
            f"the cuda backend needs rows of whole bytes for 4-bit codes, got {cols} columns; cast "
            "this weight under use_backend('reference')."
        )
