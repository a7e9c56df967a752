"""QuantizedStorage: the bytes of one quantized weight, and whether its derived copies are stale.

All tensors that alias one weight (the parameter, its ``.data``, its ``detach()``) share one
storage. So a cast, a moved buffer or a stale copy concerns all of them. "Note: derived copies" in
:mod:`zerocast.tensors.staleness` says when copies are stale.

Note: codes that are being gathered
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A gather may return before the codes have arrived, and set :attr:`QuantizedStorage.wait_pending`,
which waits for them. Every use of the bytes reads :attr:`QuantizedStorage.buffers` or checks
whether copies are stale; both call it first. A tensor that was taken earlier, such as
``weight.rowwise_data``, is the same memory, and using it does not wait.

NOT here: whether buffers from a file are those of a weight (:mod:`zerocast.tensors.saved_storage`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

from zerocast.errors import InputError, StaleCopyError
from zerocast.recipes import BufferSpec, Recipe
from zerocast.tensors.held_planes import HeldPlanes, read_rowwise_only
from zerocast.tensors.ledger import announce
from zerocast.tensors.staleness import Writes
from zerocast.tensors.tp_shard import TensorParallelShard


class QuantizedStorage(HeldPlanes):
    """The buffers of one quantized weight.

    Attributes:
        shape, dtype: the nominal ones, which torch sees.
        recipe, tp_shard: as in :class:`HeldPlanes`.
        wait_pending: a function, called before the buffers are used, that returns when the codes
            of a gather have arrived. None if no gather is in flight.
        amax_group: a label; weights with the same one share their tensor amax in every cast. None
            for a weight that shares none.
        keeps_source: whether a copy into the weight keeps the given value as
            :attr:`high_precision_init_val`, even if there was none before.
        gathered_from: the name of the master from which every gather makes this weight, so that
            nothing else may write it; otherwise None.
        writes: the counters of the writes of the codes, with the plans that write them.
        plans: the plans of :mod:`zerocast.cast.plan_cache` of which this weight is the first. They
            refer to the weight, so they are kept here and have its lifetime; a global table would
            keep both alive. They are neither copied nor saved.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        recipe: Recipe,
        buffers: dict[str, torch.Tensor],
        tp_shard: TensorParallelShard | None = None,
    ) -> None:
        super().__init__(torch.Size(shape), recipe, buffers, tp_shard)
        self.dtype = dtype
        self.wait_pending: Callable[[], None] | None = None
        self.amax_group: str | None = None
        self.keeps_source = False
        self.gathered_from: str | None = None
        self.plans: dict[Hashable, Any] = {}
        self._name = ""  # used on the meta device, where the state cannot hold the name yet
        self.writes = Writes()
        self._init_val: tuple[int, torch.Tensor] | None = None

    @classmethod
    def empty(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        recipe: Recipe,
        device: torch.device,
        *,
        columnwise: bool,
        rowwise: bool = True,
        state: bool = True,
        tp_shard: TensorParallelShard | None = None,
    ) -> QuantizedStorage:
        """Return an unfilled storage: every buffer holds its fill value (codes 0, valid padding).

        Without ``state`` it lacks the recipe state; without ``rowwise`` it holds only what reading
        the columnwise codes needs. See :meth:`whole`.
        """
        specs = recipe.buffers(shape, columnwise=columnwise)
        left_out = set() if state else set(recipe.state)
        left_out |= set() if rowwise else read_rowwise_only(specs)
        buffers = {n: spec.allocate(device) for n, spec in specs.items() if n not in left_out}
        return cls(shape, dtype, recipe, buffers, tp_shard)

    def whole(self, state: Mapping[str, torch.Tensor]) -> QuantizedStorage:
        """Return a storage for a cast: these buffers, ``state``, and scratch for the rest.

        Raises:
            InputError: if a part of the recipe state is in neither.
        """
        buffers = {**self.buffers, **state}
        missing = [name for name in self.recipe.state if name not in buffers]
        if missing:
            raise InputError(
                f"this tensor of recipe {self.recipe} does not hold the recipe's state "
                f"({', '.join(missing)}), because a quantizer made it; cast into it "
                f"with that quantizer: quantizer.quantize(value, out=tensor)."
            )
        buffers |= self._lacking(buffers, columnwise=self.has_columnwise)
        return QuantizedStorage(self.shape, self.dtype, self.recipe, buffers, self.tp_shard)

    def _lacking(self, held: Mapping[str, Any], *, columnwise: bool) -> dict[str, torch.Tensor]:
        """Allocate, unfilled, the buffers of a weight that ``held`` lacks."""
        specs: Mapping[str, BufferSpec] = self.recipe.buffers(self.shape, columnwise=columnwise)
        return {n: spec.allocate(self.device) for n, spec in specs.items() if n not in held}

    def drop(self, *, rowwise: bool = False, columnwise: bool = False) -> None:
        """Free the buffers that only rowwise, or only columnwise, codes are read with."""
        names: set[str] = set()
        if columnwise:
            names |= {name for name in self.buffers if name.startswith("columnwise_")}
        if rowwise:
            if self.is_stale:
                self.derived("columnwise_data")
            names |= read_rowwise_only(self.buffers)
        for name in names:
            del self.buffers[name]
        if names:
            self._form = None
            announce()

    @property
    def can_derive_columnwise(self) -> bool:
        """Whether a missing columnwise copy can be made from the rowwise codes."""
        columnwise = self.recipe.planes(self.shape)[-1]
        kept = self.recipe.buffers(self.shape, columnwise=True).keys() - set(columnwise.buffers)
        return self.has_rowwise and columnwise.is_derived and kept <= set(self._buffers)

    def add_columnwise(self) -> None:
        """Allocate, unfilled, a columnwise copy that is missing and can be derived."""
        self.buffers.update(self._lacking(self.buffers, columnwise=True))
        self._form = None
        announce()

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The stored tensors, by the names of :meth:`Recipe.buffers`; waits for a gather."""
        if self.wait_pending is not None:
            self.wait_pending()
        return self._buffers

    @property
    def matrices(self) -> list[QuantizedStorage]:
        """The matrices of a stack, in order, for operands; otherwise this storage itself."""
        return [self.matrix(i) for i in range(self.form.num_matrices)] if self.stack else [self]

    def matrix(self, index: int) -> QuantizedStorage:
        """Return matrix ``index`` of a stack, as views of the current buffers."""
        dims = len(self.stack)
        buffers = {name: b.flatten(end_dim=dims - 1)[index] for name, b in self.buffers.items()}
        tp_shard = None if self.tp_shard is None else self.tp_shard.of_matrix(self.recipe)
        matrix = QuantizedStorage(self.shape[dims:], self.dtype, self.recipe, buffers, tp_shard)
        matrix._form = self.form.of_matrix
        return matrix

    @property
    def first_matrix(self) -> int:
        """The index, in the whole stack, of the first matrix of this one."""
        return 0 if self.tp_shard is None else self.tp_shard.first_matrix(self.recipe)

    @property
    def originals(self) -> dict[str, torch.Tensor]:
        """The :attr:`buffers` that are not derived from others."""
        self.writes.require_scales()
        derived = self.derived_names
        return {name: buffer for name, buffer in self.buffers.items() if name not in derived}

    @property
    def device(self) -> torch.device:
        """The device of the bytes."""
        return next(iter(self._buffers.values())).device

    def name_weight(self, name: str) -> None:
        """Set the name that the weight's random bits depend on, unless it has one.

        Only stochastic rounding uses it. The first name stays, so the bytes do not depend on what
        casts the weight later. Matrix ``i`` of the stack ``experts`` is ``experts[i]``.
        """
        counter = self.buffers.get("rounding_counter")
        if counter is None or not counter.numel():  # a rank may have no matrix of a stack
            return
        if counter.is_meta:
            self._name = self._name or name
        elif int(counter.view(-1)[0]) == 0:
            count, first = counter.numel() // 2, self.first_matrix
            names = [f"{name}[{first + i}]" for i in range(count)] if self.stack else [name]
            hashes = [zlib.crc32(each.encode()) or 1 for each in names]  # 0 means: no name
            counter.view(count, 2)[:, 0] = torch.tensor(
                hashes, dtype=counter.dtype, device=counter.device
            )

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        """Make ``tensor`` (same shape, dtype, device; contiguous) the buffer ``name``."""
        old = self.buffers[name]
        assert (tensor.shape, tensor.dtype, tensor.device) == (old.shape, old.dtype, old.device)
        self.buffers[name] = tensor
        announce()

    # --- versions ---

    @property
    def version(self) -> int:
        """A number that changes with every write of codes, by a plan's cast or by a copy.

        What was computed from the codes (a saved forward, say) is valid while this does not
        change. Torch's version counters of weight and codes count these writes, too, for torch's
        operations and graphs that save one of them.
        """
        return self.writes.version

    def mark_written(self) -> None:
        """Record that something other than a plan has just written the codes."""
        self.writes.note_other()
        self._init_val = None
        torch.autograd.graph.increment_version(counted_by_torch(self.codes))

    @property
    def high_precision_init_val(self) -> torch.Tensor | None:
        """The value that the codes were made from, on the CPU; None if they changed since."""
        if self._init_val is None or self._init_val[0] != self.version:
            return None
        return self._init_val[1]

    @high_precision_init_val.setter
    def high_precision_init_val(self, value: torch.Tensor | None) -> None:
        self._init_val = None if value is None else (self.version, value)

    # --- derived copies ---

    @property
    def is_stale(self) -> bool:
        """Whether a cast has changed codes since the derived copies were rebuilt."""
        if self.wait_pending is not None:
            self.wait_pending()
        return self.writes.were_cast and bool(self.derived_names)

    def derived(self, name: str) -> torch.Tensor:
        """Return the columnwise buffer ``name``; raise :class:`StaleCopyError` if it is stale."""
        self.writes.require_scales()
        if self.is_stale:
            raise StaleCopyError(
                f"{name} was read after a cast and before its post-all-gather processing, so it "
                "belongs to the weights before the cast. All-gather the codes, then call "
                "zerocast.post_all_gather_processing([weight]); zerocast.verify tells whether all "
                "ranks then hold the same bytes."
            )
        return self.buffers[name]

    def prepare_for_forward(self, rebuild: Callable[[QuantizedStorage], None]) -> None:
        """Rebuild stale copies if the plan's caller asked for it, else raise an error.

        The error is :class:`StaleCopyError`. A layer calls this before it uses the weight.
        """
        self.writes.require_scales()
        if self.is_stale:
            if not self.writes.rebuild_on_use:
                self.derived("columnwise_data")
            rebuild(self)

    # --- copies ---

    def to(
        self, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> QuantizedStorage:
        """Return the same bytes in new buffers, on ``device``, under the nominal ``dtype``.

        The copy is stale if this storage is; its plans are not copied. The high-precision initial
        value is shared, because it is only read.
        """
        self.writes.require_scales()
        buffers = {name: b.to(device or b.device, copy=True) for name, b in self.buffers.items()}
        copy = QuantizedStorage(
            self.shape, dtype or self.dtype, self.recipe, buffers, self.tp_shard
        )
        copy.writes.take_over(self.writes.rebuild_on_use)
        copy.amax_group, copy._name = self.amax_group, self._name
        copy.high_precision_init_val = self.high_precision_init_val
        return copy

    def materialized(self, device: torch.device) -> QuantizedStorage:
        """Return an unfilled storage on ``device`` like this one on the meta device."""
        made = QuantizedStorage.empty(
            self.shape, self.dtype, self.recipe, device, columnwise=self.has_columnwise,
            rowwise=self.has_rowwise, state=self.is_whole, tp_shard=self.tp_shard,
        )  # fmt: skip
        made.amax_group, made.keeps_source = self.amax_group, self.keeps_source
        if self._name:
            made.name_weight(self._name)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedStorage:
        """Copy by :meth:`to`; copied aliases of one weight also share one storage."""
        copy = memo[id(self)] = self.to()
        return copy


def counted_by_torch(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return those of ``tensors`` whose writes torch counts."""
    return [tensor for tensor in tensors if not tensor.is_inference()]
