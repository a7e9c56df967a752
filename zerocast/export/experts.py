"""Experts: how checkpoints store a stack of matrices, and weights outside of linear layers.

Servers read each projection of each expert as the weight of a separate linear layer:
``experts.gate_up_proj`` [E, 2 I, K] as ``experts.<e>.gate_proj.weight`` and ``.up_proj.weight``
[I, K], which share a tensor amax, and any other stack ``experts.down_proj`` as
``experts.<e>.down_proj.weight``. So each projection is a separate entry.

gpt-oss stores a stack in one tensor, of matrices [out, in] (:mod:`zerocast.export.transposed`).

Weights that a dialect cannot store quantized stay in high precision. These are embeddings and other
matrices outside of linear layers. In all dialects except gpt-oss's, they are also experts kept as
[in, out], whose scales are along the other dimension than servers read them.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch

from zerocast.arguments import present
from zerocast.errors import InputError
from zerocast.export.dialects import Dialect, without_padding
from zerocast.export.entries import Entry, ExportSource, Shard
from zerocast.export.tp_parts import check_part
from zerocast.export.transposed import is_transposed
from zerocast.layout import NOTHING, Extent, ceil_div
from zerocast.sharded.all_gather import gather_of
from zerocast.sharded.placement import to_local
from zerocast.sharded.report import is_included
from zerocast.tensors import QuantizedStorage, QuantizedTensor, TensorParallelShard
from zerocast.tensors.tp_shard import COLUMNS, ROWS

GATE_UP = "gate_up_proj"
"""The parameter whose matrices each stack the rows of two projections, gate first."""


def has_place(dialect: Dialect, source: ExportSource, name: str, tensor: torch.Tensor) -> bool:
    """Return False if ``name`` is quantized and ``dialect`` cannot store it so; else True.

    An optimizer or a plan does not know its modules, so this returns True for its weights.
    """
    is_in_codes = isinstance(tensor, QuantizedTensor) or gather_of(tensor) is not None
    if not isinstance(source, torch.nn.Module) or not is_in_codes:
        return True
    module = source.get_submodule(name.rpartition(".")[0])
    if tensor.dim() == 2:
        return not is_included(module, name.rpartition(".")[2])
    return dialect.fuses_experts or not is_transposed(source, name)


def projections(name: str, shape: Sequence[int]) -> list[str]:
    """Return the names of the projections of the stack ``name`` [..., M, K], matrix by matrix.

    They are those in a checkpoint with a weight per projection.
    """
    *stack, rows, _ = shape
    module, _, parameter = name.rpartition(".")
    parts = ["gate_proj", "up_proj"] if parameter == GATE_UP and rows % 2 == 0 else [parameter]
    return [
        f"{module}.{'.'.join(map(str, place))}.{part}.weight".lstrip(".")
        for place in itertools.product(*map(range, stack))
        for part in parts
    ]


def matrix_entries(
    dialect: Dialect, source: ExportSource, entry: Entry, from_masters: bool
) -> Iterator[Entry]:
    """Yield ``entry``, or the entries of its projections if it is a quantized stack that
    ``dialect`` does not fuse.

    With ``from_masters``, each projection is cast separately from the masters. Unquantized experts
    stay one entry, with the names of their projections.

    Raises:
        InputError: if rows of two projections share a block whose trained scale is exported.
    """
    module, _, parameter = entry.name.rpartition(".")
    if entry.recipe is None:
        is_stack = entry.tensor.dim() == 3 and parameter != "weight"
        if is_stack and module.rpartition(".")[2] == "experts":
            is_fused = dialect.fuses_experts or is_transposed(source, entry.name)
            own = [] if is_fused else projections(entry.name, entry.shape)
            entry = dataclasses.replace(entry, experts=module, parts=tuple(own))
        yield entry
        return
    if entry.tensor.dim() < 3 or dialect.fuses_experts:
        yield entry if entry.tensor.dim() < 3 else dataclasses.replace(entry, experts=module)
        return
    names = projections(entry.name, entry.shape)
    parts = len(names) // max(entry.shape[:-2].numel(), 1)
    group = entry.amax_group or (entry.name if parts > 1 else None)
    for i, name in enumerate(names):
        number, part = divmod(i, parts)
        size = entry.shape[-2] // parts
        matrix = _matrix(entry, number, Extent(part * size, (part + 1) * size))
        if matrix.tp_shard is not None:
            check_part(name, matrix.tp_shard, entry.recipe)
        yield dataclasses.replace(
            entry,
            name=name,
            tensor=_tensor(entry, matrix, from_masters),
            shard=None if entry.shard is None else _part(entry.shard, matrix.elements),
            amax_group=None if group is None else f"{group}.{number}",
            tp_shard=matrix.tp_shard,
            experts=module,
        )


@dataclasses.dataclass(frozen=True)
class _Matrix:
    """Rows of one matrix of a stack, or this rank's part of them under tensor parallelism.

    Attributes:
        shape: the shape of this rank's part.
        number: the index of the matrix in this rank's part of the stack.
        rows: the rows within this rank's part of the matrix.
        whole_rows: the rows within the whole matrix that they belong to.
        tp_shard: the part that this rank has; None for all.
    """

    shape: torch.Size
    number: int
    rows: Extent
    whole_rows: Extent
    tp_shard: TensorParallelShard | None
    _height: int  # of this rank's matrices

    @property
    def elements(self) -> Extent:
        """Their range in the elements of this rank's part of the stack."""
        columns, before = self.shape[1], self.number * self._height
        return Extent((before + self.rows.start) * columns, (before + self.rows.end) * columns)


def _matrix(entry: Entry, number: int, rows: Extent) -> _Matrix:
    """Return ``rows`` of matrix ``number`` of the stack of ``entry``."""
    height, columns = entry.shape[-2:]
    whole, given = torch.Size((rows.size, columns)), entry.tp_shard
    if given is None:
        return _Matrix(whole, number, rows, rows, None, height)
    if given.dim == ROWS and not given.per_matrix:  # whole matrices
        own, first = rows, given.start // height
        if not 0 <= number - first < given.size // height:
            own, first = NOTHING, number
        part = TensorParallelShard(whole, ROWS, 0, own.size, given.comm)
        return _Matrix(part.shape, number - first, own, rows, part, height)
    if given.dim == COLUMNS:
        part = TensorParallelShard(whole, COLUMNS, given.start, given.size, given.comm)
        return _Matrix(part.shape, number, rows, rows, part, height)
    own = rows.intersect(Extent(given.start, given.start + given.size))
    start = own.start - rows.start if own else 0
    part = TensorParallelShard(whole, ROWS, start, own.size, given.comm)
    own = own.shifted(-given.start) if own else NOTHING
    return _Matrix(part.shape, number, own, rows, part, given.size)


def _part(shard: Shard, own: Extent) -> Shard:
    """Return this rank's shard of the elements ``own`` of a weight of which it has ``shard``."""
    common, read = shard.extent.intersect(own), shard.read
    if read is not None and common:
        its_own = common.shifted(-own.start)
        return Shard(None, its_own, shard.comm, lambda part: read(part.shifted(own.start)))
    if shard.values is None or not common:
        return Shard(None, NOTHING, shard.comm)
    held = common.shifted(-shard.extent.start)
    values = shard.values.reshape(-1)[held.start : held.end]
    return Shard(values, common.shifted(-own.start), shard.comm)


def _tensor(entry: Entry, matrix: _Matrix, from_masters: bool) -> torch.Tensor:
    """Return this rank's quantized bytes of a matrix; or, if it is cast, an expanded tensor of that
    shape, which stands for it without using memory.
    """
    recipe, shape, rows = present(entry.recipe), matrix.shape, matrix.rows
    plane = recipe.planes(entry.shape[-2:], columnwise=False)[0]
    height, one_block = plane.grid.block_h, plane.grid.blocks_h == 1
    if matrix.whole_rows.start % height and not one_block and not from_masters:
        raise InputError(
            f"{entry.name} has two projections of {matrix.whole_rows.size} rows, and a block of "
            f"{height} rows has rows of both; give from_masters=True to cast each separately."
        )
    if entry.shard is not None:
        like = torch.empty((), dtype=entry.dtype, device=to_local(entry.tensor).device)
        return like.expand(shape)
    assert isinstance(entry.tensor, QuantizedTensor)
    given = entry.tensor.quantized_storage
    if not rows:
        return QuantizedTensor(
            QuantizedStorage.empty(shape, given.dtype, recipe, given.device, columnwise=False)
        )
    held = given.matrix(matrix.number)
    codes = held.buffers[plane.codes_name][rows.start : rows.end]
    spec = recipe.buffers(shape, columnwise=False)[plane.scales_name]
    scales = without_padding(held.planes[0], held.buffers[plane.scales_name])
    if not one_block:
        step = 1 if plane.scales.rows == plane.grid.rows else height
        scales = scales[rows.start // step : ceil_div(rows.end, step)]
    own = spec.allocate(held.device)
    without_padding(recipe.planes(shape, columnwise=False)[0], own).copy_(scales)
    buffers = {**held.originals, plane.codes_name: codes, plane.scales_name: own}
    kept = {name: buffers[name] for name in recipe.buffers(shape, columnwise=False)}
    return QuantizedTensor(QuantizedStorage(shape, held.dtype, recipe, kept))
