"""QuantizedStorage: the bytes of one quantized weight, and whether its derived copies are true.

All tensors that alias one weight (the parameter, its ``.data``, its ``detach()``) share one
storage, so a cast, a moved buffer or a stale copy is seen by all of them.

Note: derived copies
~~~~~~~~~~~~~~~~~~~~
The columnwise copy is derived from the gathered rowwise codes. A cast changes this rank's codes at
once and those of others arrive with the all-gather, so between a cast and post-all-gather
processing the copy is *stale*: reading it is refused, because it would be rebuilt from bytes that
have not arrived. A plan casts thousands of weights, so it does not mark them one by one: it owns a
:class:`CastVersion` that ticks once a cast, each weight remembers the tick at which its copies were
last rebuilt, and a copy is stale where any clock has ticked since.

Note: codes that are on their way
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Who gathers codes may return before they have arrived, and set
:attr:`QuantizedStorage.wait_pending`, which waits for them. Every use of the bytes goes through
:attr:`QuantizedStorage.buffers` or asks whether copies are stale, and both call it first. A tensor
that was taken out of there before, such as ``weight.rowwise_data``, is live memory, whose use
nobody sees.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

from zerocast.errors import InputError, StaleCopyError
from zerocast.layout import BlockGrid, Plane
from zerocast.recipes import Recipe
from zerocast.tensors.saved import (
    check_buffers,
    check_flags,
    check_memory,
    check_nominal,
    checked_recipe,
    checked_tp_shard,
    hold_columnwise,
)
from zerocast.tensors.tp_shard import TensorParallelShard

_moves = itertools.count(1)


class CastVersion:
    """Counts the casts of one plan.

    Attributes:
        ticks: casts so far.
        rebuild_on_use: whether the next forward may rebuild derived copies by itself, because the
            caller promised that the all-gather is done by then
            (``manual_post_all_gather_processing=False``).
        retired: the plan is gone and will not tick again.
    """

    def __init__(self, *, rebuild_on_use: bool) -> None:
        self.ticks = 0
        self.rebuild_on_use = rebuild_on_use
        self.retired = False

    def retire(self) -> None:
        """The plan is gone."""
        self.retired = True

    def tick(self, written: Iterable[torch.Tensor] = ()) -> None:
        """A cast has begun to write, and derived copies made before are stale. torch counts the
        write of the tensors ``written``, so that a backward which saved one of them is an error.
        """
        self.ticks += 1
        torch.autograd.graph.increment_version(written)


class QuantizedStorage:
    """The buffers of one quantized weight.

    Attributes:
        shape, dtype: the nominal ones, which the weight presents to torch.
        recipe: the scheme that gives the bytes their meaning.
        wait_pending: called before the buffers are used; returns when codes that are on their way
            have
            arrived. None where nobody sends any.
        amax_group: weights with the same one share their tensor amax in every cast; None for a
            weight of its own.
        tp_shard: the rows or columns that this weight is of a larger one; None for a whole weight.
            A cast of it is collective over the tensor-parallel group, too.
        keeps_source: whether a copy into the weight keeps the value that it was given as
            :attr:`high_precision_init_val`, even where there was none before.
        gathered_from: the name of the master from which others make this weight again and again, so
            that nobody else may write it; None for a weight of its own.
    """

    buffers_version: int = 0
    """Changes whenever any storage's buffers are replaced, or begin to be gathered by somebody who
    does not wait, so that a plan knows in one comparison that it has to look at them."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        recipe: Recipe,
        buffers: dict[str, torch.Tensor],
    ) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.recipe = recipe
        self._buffers = buffers
        self.wait_pending: Callable[[], None] | None = None
        self.amax_group: str | None = None
        self.tp_shard: TensorParallelShard | None = None
        self.keeps_source = False
        self._name = ""  # of a weight on the meta device, whose state cannot hold it yet
        self.gathered_from: str | None = None
        # Plans that functional calls made for weights of which this is the first. Kept here, and
        # not in a global table, so that they live as long as the weights and no longer. Not copied,
        # not saved.
        self.plans: dict[Hashable, Any] = {}
        self._planes: dict[bool, tuple[Plane, ...]] = {}
        # The tick of each plan's clock at which the derived copies were true.
        self._seen: dict[CastVersion, int] = {}
        self._writes = 0
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
    ) -> QuantizedStorage:
        """An unfilled storage: every buffer holds its fill value (codes 0, padding right).

        Without ``state`` it does not hold what its recipe remembers, and without ``rowwise`` only
        what reading the columnwise codes needs; see :meth:`whole`.
        """
        specs = recipe.buffers(shape, columnwise=columnwise)
        left_out = set() if state else set(recipe.state)
        left_out |= set() if rowwise else _read_rowwise_only(specs)
        buffers = {
            name: torch.full(spec.shape, spec.fill, dtype=spec.dtype, device=device)
            for name, spec in specs.items()
            if name not in left_out
        }
        return cls(shape, dtype, recipe, buffers)

    def whole(self, state: Mapping[str, torch.Tensor]) -> QuantizedStorage:
        """What a cast writes: these buffers, ``state``, and scratch for the rest.

        Raises:
            InputError: where the recipe remembers something that is in neither.
        """
        buffers = {**self.buffers, **state}
        missing = [name for name in self.recipe.state if name not in buffers]
        if missing:
            raise InputError(
                f"this tensor of recipe {self.recipe} does not hold what the recipe remembers "
                f"between casts ({', '.join(missing)}), because a quantizer made it; cast into it "
                f"with that quantizer: quantizer.quantize(value, out=tensor)."
            )
        for name, spec in self.recipe.buffers(self.shape, columnwise=self.has_columnwise).items():
            if name not in buffers:
                buffers[name] = torch.full(
                    spec.shape, spec.fill, dtype=spec.dtype, device=self.device
                )
        whole = QuantizedStorage(self.shape, self.dtype, self.recipe, buffers)
        whole.tp_shard = self.tp_shard
        return whole

    def drop(self, *, rowwise: bool = False, columnwise: bool = False) -> None:
        """Give the memory back of what only rowwise, or only columnwise, codes are read with."""
        names: set[str] = set()
        if columnwise:
            names |= {name for name in self.buffers if name.startswith("columnwise_")}
        if rowwise:
            if self.is_stale:
                self.derived("columnwise_data")
            names |= _read_rowwise_only(self.buffers)
        for name in names:
            del self.buffers[name]
        if names:
            self.bump_buffers_version()

    @property
    def can_derive_columnwise(self) -> bool:
        """Whether a columnwise copy that is not there can be made from the rowwise codes."""
        columnwise = self.recipe.planes(self.shape)[-1]
        kept = self.recipe.buffers(self.shape, columnwise=True).keys() - set(columnwise.buffers)
        return self.has_rowwise and columnwise.is_derived and kept <= set(self._buffers)

    def add_columnwise(self) -> None:
        """Make room for a columnwise copy, unfilled, that is not there and can be derived."""
        for name, spec in self.recipe.buffers(self.shape, columnwise=True).items():
            if name not in self.buffers:
                self.buffers[name] = torch.full(
                    spec.shape, spec.fill, dtype=spec.dtype, device=self.device
                )
        self.bump_buffers_version()

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The stored tensors, by the names of :meth:`Recipe.buffers`, once their codes are here."""
        if self.wait_pending is not None:
            self.wait_pending()
        return self._buffers

    @property
    def device(self) -> torch.device:
        """Where the bytes are."""
        return next(iter(self._buffers.values())).device

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The rowwise plane, and the columnwise one of a weight that holds one."""
        columnwise = self.has_columnwise
        if columnwise not in self._planes:
            self._planes[columnwise] = self.recipe.planes(self.shape, columnwise=columnwise)
        return self._planes[columnwise]

    @property
    def cast_planes(self) -> list[Plane]:
        """The planes whose codes a cast writes, the rowwise one first; they have amaxes."""
        return [plane for plane in self.planes if plane.is_cast]

    @property
    def grid(self) -> BlockGrid:
        """The blocks of the rowwise codes."""
        return self.planes[0].grid

    @property
    def has_rowwise(self) -> bool:
        """Whether rowwise codes and scales are there, as they are unless a quantizer was told
        otherwise.
        """
        return "rowwise_data" in self._buffers and "rowwise_scale_inv" in self._buffers

    @property
    def is_whole(self) -> bool:
        """Whether a cast finds here all that it writes; see :meth:`whole`."""
        return self.has_rowwise and all(name in self.buffers for name in self.recipe.state)

    @property
    def has_scales(self) -> bool:
        """Whether a cast whose codes go elsewhere finds here all else that it writes."""
        return all(name in self.buffers for name in ("rowwise_scale_inv", *self.recipe.state))

    @property
    def has_columnwise(self) -> bool:
        """Whether this weight holds a columnwise copy at all."""
        return "columnwise_data" in self._buffers or "columnwise_scale_inv" in self._buffers

    @property
    def codes(self) -> list[torch.Tensor]:
        """The codes that are not derived from others, whether or not they have arrived."""
        return [self._buffers[name] for name in self.gathered if name in self._buffers]

    @property
    def gathered(self) -> tuple[str, ...]:
        """The names of the buffers that an all-gather moves."""
        return tuple(plane.codes_name for plane in self.planes if plane.is_gathered)

    @property
    def derived_names(self) -> tuple[str, ...]:
        """The names of the buffers that post-all-gather processing rebuilds."""
        if not self.has_rowwise or not self.shape.numel():
            return ()  # there is nothing that they could be derived from
        return tuple(name for p in self.planes if p.is_derived for name in p.buffers)

    def name_weight(self, name: str) -> None:
        """Give the weight the name that its random words depend on, where it has none yet.

        Only stochastic rounding has a use for it. The first name stays, so the bytes do not depend
        on who casts the weight later.
        """
        counter = self.buffers.get("rounding_counter")
        if counter is not None and counter.is_meta:
            self._name = self._name or name
        elif counter is not None and int(counter[0]) == 0:
            counter[0] = zlib.crc32(name.encode()) or 1  # 0 means that it has no name

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        """Let ``tensor`` (same shape, dtype, device; contiguous) be the buffer ``name``."""
        old = self.buffers[name]
        assert (tensor.shape, tensor.dtype, tensor.device) == (old.shape, old.dtype, old.device)
        self.buffers[name] = tensor
        self.bump_buffers_version()

    @staticmethod
    def bump_buffers_version() -> None:
        """Let plans look at the buffers before they use them again: some were replaced, or are
        being written by a gather that has begun.
        """
        QuantizedStorage.buffers_version = next(_moves)

    # --- versions ---

    @property
    def version(self) -> int:
        """Changes with every write of codes, by a plan's cast or by a copy.

        What was computed from the codes (a saved forward, say) holds while this stays what it was.
        torch's version counters of weight and codes count these writes, too, for operations and
        graphs of torch that save one of them.
        """
        return self._writes + sum(version.ticks for version in self._seen)

    def mark_written(self) -> None:
        """The codes have just been written by something that has no clock."""
        self._writes += 1
        self._init_val = None
        torch.autograd.graph.increment_version(counted_by_torch(self.codes))

    @property
    def high_precision_init_val(self) -> torch.Tensor | None:
        """The value that the codes were made from, on the CPU; None where they changed since."""
        if self._init_val is None or self._init_val[0] != self.version:
            return None
        return self._init_val[1]

    @high_precision_init_val.setter
    def high_precision_init_val(self, value: torch.Tensor | None) -> None:
        self._init_val = None if value is None else (self.version, value)

    # --- derived copies ---

    def watch(self, version: CastVersion) -> None:
        """From now on a tick of ``clock`` makes the derived copies stale."""
        if version not in self._seen:
            self._forget_retired()
            self._seen[version] = version.ticks
            self._writes -= version.ticks  # joining changes no code, so the version stays

    def _forget_retired(self) -> None:
        """Let one retired clock stand for all of them; version and staleness stay."""
        retired = [version for version in self._seen if version.retired]
        if len(retired) < 2:
            return
        stale = [version for version in retired if version.ticks != self._seen[version]]
        self._writes += sum(version.ticks for version in retired)
        for version in retired:
            del self._seen[version]
        if stale:
            self._set_staleness(all(version.rebuild_on_use for version in stale))
            self._writes -= 1  # the tick of the one that stands for them

    @property
    def is_stale(self) -> bool:
        """Whether a cast has changed codes since the derived copies were rebuilt."""
        if self.wait_pending is not None:
            self.wait_pending()
        was_cast = any(version.ticks != seen for version, seen in self._seen.items())
        return was_cast and bool(self.derived_names)

    def mark_rebuilt(self) -> None:
        """The derived copies have just been made from the present codes."""
        retired = sum(version.ticks for version in self._seen if version.retired)
        self._writes += retired  # leaving changes no code, either
        self._seen = {version: version.ticks for version in self._seen if not version.retired}

    def derived(self, name: str) -> torch.Tensor:
        """The columnwise buffer ``name``; :class:`StaleCopyError` where it is stale."""
        if self.is_stale:
            raise StaleCopyError(
                f"{name} was read after a cast and before its post-all-gather processing, so it "
                "belongs to the weights before the cast. All-gather the codes, then call "
                "zerocast.post_all_gather_processing([weight]); zerocast.verify tells whether all "
                "ranks then hold the same bytes."
            )
        return self.buffers[name]

    def prepare_for_forward(self, rebuild: Callable[[QuantizedStorage], None]) -> None:
        """Called where a layer is about to use the weight.

        Stale copies are rebuilt where the plan's caller asked for that, and refused otherwise.
        """
        if self.is_stale:
            if not self._staleness:
                self.derived("columnwise_data")
            rebuild(self)

    # --- copies ---

    def to(
        self, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> QuantizedStorage:
        """The same bytes in buffers of its own, on ``device``, under the nominal ``dtype``.

        The copy is stale where this storage is; its plans stay behind. The high-precision initial
        value is shared, because it is only read.
        """
        buffers = {name: b.to(device or b.device, copy=True) for name, b in self.buffers.items()}
        copy = QuantizedStorage(self.shape, dtype or self.dtype, self.recipe, buffers)
        copy._set_staleness(self._staleness)
        copy.amax_group, copy.tp_shard, copy._name = self.amax_group, self.tp_shard, self._name
        copy.high_precision_init_val = self.high_precision_init_val
        return copy

    def materialized(self, device: torch.device) -> QuantizedStorage:
        """An unfilled storage like this one, which is on the meta device, on ``device``."""
        made = QuantizedStorage.empty(
            self.shape,
            self.dtype,
            self.recipe,
            device,
            columnwise=self.has_columnwise,
            rowwise=self.has_rowwise,
            state=self.is_whole,
        )
        made.amax_group, made.tp_shard = self.amax_group, self.tp_shard
        made.keeps_source = self.keeps_source
        if self._name:
            made.name_weight(self._name)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedStorage:
        """As :meth:`to`; aliases of one weight share one storage in the copy, too."""
        copy = memo[id(self)] = self.to()
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        """Shape, dtype, recipe and bytes; a slice of a gather buffer without the rest of it, and a
        part without its group.
        """
        buffers = {
            name: b if b.untyped_storage().nbytes() == b.nbytes else b.clone()
            for name, b in self.buffers.items()
        }
        fields = self.shape, self.dtype, self.recipe, buffers, self._staleness, self.amax_group
        return restore_storage, (*fields, self.tp_shard)

    @property
    def _staleness(self) -> bool | None:
        """None where derived copies are true; else whether the next forward may rebuild them."""
        stale = [version for version, seen in self._seen.items() if version.ticks != seen]
        return all(version.rebuild_on_use for version in stale) if stale else None

    def _set_staleness(self, rebuild_on_use: bool | None) -> None:
        """Take over another storage's staleness without its clocks, which tick for that one."""
        if rebuild_on_use is not None:
            version = CastVersion(rebuild_on_use=rebuild_on_use)
            self.watch(version)
            version.tick()
            version.retired = True

    # --- operands ---

    @property
    def amax_slots(self) -> int:
        """Entries of this weight in an amax buffer: those of its rowwise blocks, of the blocks of a
        columnwise copy with amaxes of its own, and the tensor's unless that is one block.
        """
        blocks = sum(plane.grid.num_blocks for plane in self.cast_planes)
        return blocks + (not self.recipe.has_one_block)

    def shared_amaxes(self) -> list[range]:
        """The entries of :attr:`amax_slots` that are amaxes over other parts of the whole weight,
        too; none of a weight that is no part.
        """
        if self.tp_shard is None:
            return []
        return self.tp_shard.shared(self.recipe, columnwise=self.has_columnwise)


def counted_by_torch(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those of ``tensors`` whose writes torch counts."""
    return [tensor for tensor in tensors if not tensor.is_inference()]


def _read_rowwise_only(names: Iterable[str]) -> set[str]:
    """Which of a weight's buffers nothing but its rowwise codes is read with."""
    held = set(names)
    return {
        name for name in ("rowwise_data", "rowwise_scale_inv")
        if name in held and name.replace("rowwise", "columnwise") in held
    }  # fmt: skip


def restore_storage(
    shape: Sequence[int],
    dtype: torch.dtype,
    recipe: Recipe,
    buffers: dict[str, torch.Tensor],
    rebuild_on_use: bool | None,
    amax_group: str | None,
    tp_shard: TensorParallelShard | None = None,
) -> QuantizedStorage:
    """The storage that :meth:`QuantizedStorage.__reduce__` took apart.

    Raises:
        InputError: where a buffer, or anything else, is not what a weight of this recipe has.
    """
    recipe, tp_shard = checked_recipe(recipe), checked_tp_shard(tp_shard)
    check_flags(rebuild_on_use, amax_group)
    storage = checked_storage(shape, dtype, recipe, buffers, tp_shard)
    check_memory(buffers)
    storage._set_staleness(rebuild_on_use)
    storage.amax_group = amax_group
    return storage


def checked_storage(
    shape: Sequence[int],
    dtype: torch.dtype,
    recipe: Recipe,
    buffers: dict[str, torch.Tensor],
    tp_shard: TensorParallelShard | None = None,
) -> QuantizedStorage:
    """A storage of ``buffers``, which may come from anywhere.

    Raises:
        InputError: where they are not the buffers of such a weight.
    """
    columnwise = hold_columnwise(buffers)
    check_nominal(shape, dtype, recipe, tp_shard, columnwise=columnwise)
    names = _read_rowwise_only(recipe.buffers(shape, columnwise=columnwise))
    check_buffers(shape, recipe, buffers, read_rowwise_only=names)
    storage = QuantizedStorage(shape, dtype, recipe, buffers)
    storage.tp_shard = tp_shard
    return storage
