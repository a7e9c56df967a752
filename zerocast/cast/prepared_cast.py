"""PreparedCast: the launches of a plan, for the current memory of weights and masters.

Note: amaxes that an optimizer took
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An update that writes masters has their values at hand. :meth:`PreparedCast.update` measures their
amaxes in the same pass (:meth:`zerocast.numerics.Backend.adamw_cast`), and writes the codes of
whole blocks. The next cast uses these amaxes and codes if since then, by torch's count of writes,
no master or weight was written, and none moved. Otherwise it measures again and writes all codes,
as does every later cast. A write that torch does not count (through ``.data``) must not come
between the update and the cast.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from zerocast.backends import backend_for
from zerocast.cast.addresses import Addresses
from zerocast.cast.capture import check_planning, is_captured
from zerocast.cast.cast_collectives import CastCollectives
from zerocast.cast.master_checks import check_list, check_master_tensor
from zerocast.cast.shard_spec import ShardSpec
from zerocast.comm import Attempt, alone
from zerocast.errors import InputError
from zerocast.numerics import AdamWUpdate, Float8DelayedNumerics, Masters
from zerocast.tensors import (
    CastVersion,
    QuantizedStorage,
    QuantizedTensor,
    prepare_expansion,
    rebuild_derived,
)
from zerocast.tensors.cast_steps import CastSteps
from zerocast.tensors.ledger import FORM, WRITES, Scope, look_at, watch
from zerocast.tensors.untraced import untraced


@contextmanager
def planning() -> Iterator[None]:
    """Make what a plan keeps, outside of inference mode and with Python's garbage collector paused.

    The collector scans all objects whenever their number has grown by a quarter. That took 4 of
    the 14 s of planning 100,000 weights, and frees nothing, because a plan keeps what it makes.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.inference_mode(False):
            yield
    finally:
        if collects:
            gc.enable()


class PreparedCast:
    """The launches of a plan, the masters that they read, and the addresses that they hold.

    Args:
        weights: the plan's weights, in order.
        master_weights: this rank's shards of their masters.
        specs: the same weights as checked.
        collectives: the collectives of the cast, and the matrices of the weights.
        judges_amaxes: whether nothing may be written before ``compute_scale``.
        scope: which of the tensors each call checks (:mod:`zerocast.tensors.ledger`).

    Attributes:
        steps: the launches.
        matrices: what is cast: the weights, or the matrices of a weight that is a stack.
        masters: what the launches read.
        bound: for each weight the master that they read; None if this rank owns nothing.
        addresses: the addresses of the weights' buffers for which the launches were prepared.
        calls_functions: whether functions of the caller compute scales.
        own_scales: by matrix and plane name, the scales that this rank makes for all.
        gathered_scales: the memory of the scales that ranks gather, if they do.

    Raises:
        InputError: if weights share memory, a master does not match or overlaps a weight, or a
            function does not return an amax.
    """

    # A tensor made in inference mode could not be written outside of it.
    @torch.inference_mode(False)
    def __init__(
        self,
        weights: Sequence[QuantizedTensor],
        master_weights: Sequence[torch.Tensor | None],
        specs: Sequence[ShardSpec],
        collectives: CastCollectives,
        *,
        judges_amaxes: bool,
        scope: Scope,
    ) -> None:
        self._specs, self._collectives, self._matrices = specs, collectives, collectives.matrices
        self._scale_gathers, self.own_scales = collectives.scale_gathers, collectives.own_scales
        self.gathered_scales = [m for gather in self._scale_gathers for m in gather.tensors]
        self._judges_amaxes, self._scope = judges_amaxes, scope
        self._one_thread = threading.RLock()
        self._amaxes_of: tuple[object, ...] | None = None  # the masters that an update measured
        self._uncounted: object = None
        self._device = collectives.exchange.candidates.device
        self._backend = backend_for(self._device)
        held = () if self._device.type == "meta" else specs  # meta weights have no memory
        self.addresses = Addresses(weights, held, scope)
        self.calls_functions = sum(_try_function(spec.storage) for spec in specs) > 0
        self.masters = Masters(self._matrices.count)
        self._stages: Sequence[Sequence[int]] = ()
        self._is_in_graph = False
        self._in_graphs: list[CastSteps] = []  # CUDA graphs replay them while the plan lives
        self._check_overlap(master_weights)
        self.bind(master_weights)
        self._prepare()

    def rebind(self, master_weights: Sequence[torch.Tensor | None]) -> None:
        """Read these masters from now on.

        Raises:
            InputError: if they do not match.
        """
        check_list("master_weights", master_weights, self._specs)
        for spec, master in zip(self._specs, master_weights, strict=True):
            if master is not None:
                check_master_tensor(spec.name, spec.storage, master)
            size = 0 if master is None else master.numel()
            if size != spec.extent.size:
                raise InputError(
                    f"{spec.name}: the plan was made for a master of {spec.extent.size} "
                    f"elements, got {size}; make a new plan for another partition."
                )
        self._check_overlap(master_weights)
        self.bind(master_weights)

    def _check_overlap(self, master_weights: Sequence[torch.Tensor | None]) -> None:
        pairs = zip(self._specs, master_weights, strict=True)
        self.addresses.check_masters(
            (spec.name, master) for spec, master in pairs if master is not None
        )

    def bind(self, master_weights: Sequence[torch.Tensor | None]) -> None:
        """Read these masters, which are known to match, from now on."""
        pairs = zip(self._specs, master_weights, strict=True)
        self.bound = [master if spec.extent else None for spec, master in pairs]
        self.masters.bind(self._matrices.masters(self.bound))
        held = (master for master in self.bound if master is not None)
        self._watched = watch(held, FORM, self._scope)

    @contextmanager
    def for_one_call(self, uncounted: object = None) -> Iterator[None]:
        """Keep no reference to masters afterwards. Threads run this one after another.

        ``uncounted`` is a value that changes with each write of masters that torch does not count.
        """
        with self._one_thread:
            self._uncounted = uncounted
            try:
                yield
            finally:
                self.bind([None] * len(self._specs))

    def divide(self, stages: Sequence[Sequence[int]]) -> None:
        """Cast the weights of each stage, given by their indices, by separate launches."""
        self._stages = self._matrices.of_each(stages)
        self._prepare()

    def follow_moves(self) -> None:
        """Prepare again if a weight has moved since (``replace_raw_data``, ``.data =``)."""
        if self.addresses.have_moved():
            self.addresses.look()
            for gather in self._collectives.code_gathers:
                gather.look()
            if self._is_in_graph:
                self._in_graphs.append(self.steps)
            self._prepare()
            self._is_in_graph = False
        self._is_in_graph |= is_captured(self._device)

    def start_scales(self) -> Callable[[], None]:
        """Start the gather of scales; return the function that ends it and stores the scales."""
        waits = [gather.start() for gather in self._scale_gathers]

        def finish() -> None:
            for wait in waits:
                wait()
            if waits:
                self._expand_scales()

        return finish

    @alone()
    def _expand_scales(self) -> None:
        if self.addresses.hold_other_copies():  # the next cast is refused
            storages = [matrix.storage for matrix in self._matrices.specs()]
            for launch in prepare_expansion(storages, self._collectives.compact, self._backend):
                launch()
            return
        self.follow_moves()
        self.steps.run("expand_scales")

    @alone()
    def rebuild_copies(self) -> None:
        """Rebuild the derived copies of all weights from their gathered codes."""
        if self.addresses.hold_other_copies():  # as functional calls do; the next cast is refused
            rebuild_derived(spec.storage for spec in self._specs)
            return
        self.follow_moves()
        self.steps.run("transpose")

    # --- the first step of a cast ---

    @untraced
    def measure(self, version: CastVersion, attempt: Attempt) -> None:
        """Measure the amaxes of the masters, and write the codes that need no reduction.

        Skip this if an update has just done it, or after an error.
        """
        amaxes_of, self._amaxes_of = self._amaxes_of, None
        if attempt.error is not None:
            return
        with attempt:
            self._follow()
            if amaxes_of is None or amaxes_of != self._masters_now():
                self._begin(version, writes=self.steps.writes_early)
                self.steps.run("partial_amax")

    def update(
        self,
        version: CastVersion,
        updates: Sequence[AdamWUpdate],
        masters: Sequence[torch.Tensor | None] | None = None,
        uncounted: object = None,
    ) -> list[AdamWUpdate]:
        """Apply the updates of this plan's masters, and measure all masters; return the others.

        Return all updates if a cast must write nothing before its amaxes were judged.
        ``masters``, which are known to match, are kept for this call only. Codes then stay those
        of the latest cast: all updates are returned if applying one would write codes.
        """
        if masters is not None:
            if self.steps.writes_early:
                return list(updates)
            with self.for_one_call(uncounted):
                self.bind(masters)
                return self.update(version, updates)
        places = {master.data_ptr(): i for i, master in enumerate(self.bound) if master is not None}
        by_place: list[AdamWUpdate | None] = [None] * len(self.bound)
        others = []
        for update in updates:
            place = places.get(update.master.data_ptr())
            if place is None or self._judges_amaxes:
                others.append(update)
            else:
                by_place[place] = update
        if any(by_place):
            self._amaxes_of = None
            self._follow()
            self._begin(version, writes=self.steps.writes_early)
            self.steps.update(self._matrices.updates(by_place))
            self._amaxes_of = self._masters_now()
        return others

    def _follow(self) -> None:
        """Prepare again if a weight has moved, and bind the masters again if one has."""
        self.follow_moves()
        if self._watched.changed():
            self.rebind(self.bound)

    def _begin(self, version: CastVersion, *, writes: bool) -> None:
        """Clear the amaxes; with ``writes``, count the codes as written."""
        exchange = self._collectives.exchange
        exchange.follow_stream(self.gathered_scales)
        exchange.buffers.clear()
        if writes:
            version.tick(self.addresses.written)

    def _masters_now(self) -> tuple[object, ...]:
        """Return a value that changes if measured amaxes no longer apply.

        It holds the launches, which are new if a weight has moved, the addresses of the masters,
        and the writes of masters and weights. It keeps no master alive.
        """
        written = look_at([*self._watched.tensors, *self.addresses.written], WRITES)
        return self.steps, self.masters.table.tolist(), written, self._uncounted

    @torch.inference_mode(False)
    def _prepare(self) -> None:
        check_planning(self._device)
        self.matrices = self._matrices.specs()
        operands = self._collectives.operands(self.matrices, judges_amaxes=self._judges_amaxes)
        storages = [matrix.storage for matrix in self.matrices]
        self.steps = CastSteps(
            self._backend,
            list(zip(storages, operands, strict=True)),
            self.masters,
            judges_amaxes=self._judges_amaxes,
            own_scales=self.own_scales,
            compact=self._collectives.compact,
            stages=self._stages,
        )


def _try_function(storage: QuantizedStorage) -> bool:
    """Return whether a function of the caller computes the weight's scales.

    Call it once, on a copy of its argument; raise :class:`InputError` if it returns no amax.
    """
    numerics = storage.form.numerics
    if not (isinstance(numerics, Float8DelayedNumerics) and callable(numerics.amax_compute_algo)):
        return False
    for matrix in storage.matrices[:1]:
        numerics.amax_by_callable(matrix.buffers["amax_history"].clone())
    return True
