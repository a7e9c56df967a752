"""CastPlan: a cast worked out once and run every step.

Note: casting a sharded weight
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An FP32 *master weight* is split over the ranks of a data-parallel group; the *model weight* is its
quantized form, whole on every rank. A cast is one sentence::

            rank r                                          all ranks
    grad --reduce_scatter--> grad shard
              | optimizer             FP32, only the elements I own
            master shard
              | partial_amax          over my extent; blocks I do not touch stay 0
            amax ------------ reduce_amax: ONE all-reduce MAX ----------- amax
              | compute_scale         the same arithmetic everywhere
            scale_inv
              | partial_cast          only my codes, in place in the gather buffer
            codes[r] --------------- all_gather (in place) -------------- codes
              | post_all_gather_processing      columnwise copies, padded scales
            weight ready

Two schemes say it with a difference. Delayed scaling casts with a scale that it has from earlier
casts, so its one pass over the masters comes first and takes the amax along; the reduced amax then
makes the next scale. 4-over-6 lets each block choose between two scales, for which the errors of
shared blocks travel in one all-reduce more, between ``reduce_amax`` and ``compute_scale``.

The words, each used for nothing else:

    element     one logical weight value; every offset in Python is in elements
    byte        one stored byte; derived from elements by ``zerocast.formats.byte_span``, never a
                second offset system
    shard       what one rank owns of one master weight: an ``Extent`` of elements, possibly empty
    block       the elements that share a scale
    amax        the largest magnitude over a block; travels between ranks before the all-gather
    scale       multiplies a weight before rounding; ``scale_inv`` multiplies a code after, and is
                stored with its codes
    rowwise     the codes as [M, K]; *columnwise* is the copy that the transposed GEMM reads
    derived     what post-all-gather processing rebuilds; it may be *stale*, knows it, and refuses
                to be read then

The law: whatever the partition, the gathered shards are exactly the codes, scales and padding of
``quantize`` on the whole weight, the same on every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass

import torch
from torch.utils.hooks import RemovableHandle

from zerocast.backends import backend_for
from zerocast.cast.capture import check_capture, check_planning
from zerocast.cast.finite import raise_if_not_finite
from zerocast.cast.gather import PLANES, CodeGather
from zerocast.cast.request import ShardRequest, as_tensors, check_rebind, check_request
from zerocast.cast.world import exchange_extents, fingerprint, members_by_group, raise_in_all
from zerocast.comm import Communicator, Group
from zerocast.errors import InputError, ZerocastError
from zerocast.layout import Cuts, Extent
from zerocast.ops import Candidates, Launch, Masters, SelectTarget
from zerocast.recipes import Recipe
from zerocast.tensors import CastClock, QuantizedStorage, QuantizedTensor, rebuild_derived


@dataclass(frozen=True, slots=True)
class _GroupShare:
    """The weights of one group: ``members`` are their places in the plan, ``amax`` their part of
    the amax buffer.
    """

    comm: Communicator
    members: list[int]
    amax: torch.Tensor  # int32 [sum of the members' amax slots]
    candidates: torch.Tensor  # int32, what the members' blocks choose their scales by
    gathers: list[CodeGather]


class CastPlan:
    """A cast of sharded FP32 masters into quantized model weights, planned once.

    Making a plan is collective: every rank of every group makes it, with the same weights in the
    same order. The ranks compare what they were given; an error of one is raised on all, and
    nothing is written. After that :meth:`cast` is a constant number of launches and one all-reduce
    a group, whatever the number of weights, and allocates nothing.

    Args:
        model_weights: the quantized weights, whole on every rank. A tied weight is given once.
        master_weights: for each weight this rank's FP32 shard, contiguous, any shape, as a torch
            tensor or anything that speaks DLPack (a CuPy array); None or no elements where the rank
            owns nothing. Read by every :meth:`cast`, so update it in place,
            or hand new ones to :meth:`cast`.
        start_offsets: for each weight the element, in the flattened weight, at which the master
            starts; None with a master of None.
        group: the ranks that share the weights: a zerocast communicator, an mpi4py communicator, a
            torch.distributed ProcessGroup, or None for the default group. A list or tuple of these
            gives each weight its own (experts).
        names: what error messages call the weights.
        fsdp_shard_model_weights: for each weight None, or a uint8 buffer that receives the codes of
            this rank's shard instead of the weight: ceil(end / 2) - floor(start / 2) bytes for
            4-bit codes, one an element for 8-bit. A pair of buffers, rowwise and columnwise, for a
            weight whose columnwise codes are quantized independently (MXFP8, row-wise FP8).
        manual_post_all_gather_processing: True: after the all-gather the caller calls
            :func:`zerocast.post_all_gather_processing`, and a derived copy read before that is
            refused. False: the next forward that uses a weight rebuilds its derived copies.
        check_finite: raise :class:`NonFiniteError` on every rank, before any code or scale is
            written, where a master holds a NaN or an infinity after rounding to the weight's dtype.
            Costs a host synchronisation a cast.

    Attributes:
        fingerprints: a number for each group; ranks of one plan have the same one.

    Raises:
        InputError: on every rank, for a wrong argument on any.
        RankMismatchError: on every rank, where the ranks' weights, order, recipes or shards do not
            fit together.
    """

    def __init__(
        self,
        model_weights: Sequence[torch.Tensor],
        master_weights: Sequence[torch.Tensor | None],
        start_offsets: Sequence[int | None],
        group: Group | Sequence[Group] = None,
        *,
        names: Sequence[str] | None = None,
        fsdp_shard_model_weights: Sequence[torch.Tensor | None] | None = None,
        manual_post_all_gather_processing: bool = True,
        check_finite: bool = False,
    ) -> None:
        # What has no length is refused below, on all ranks together.
        count = len(model_weights) if isinstance(model_weights, Sized) else 0
        members = members_by_group(group, count)
        self._comms = list(members)
        self._check_finite = check_finite
        self._requests: list[ShardRequest] = []
        error: ZerocastError | None = None
        try:
            master_weights = as_tensors(master_weights)
            self._requests = check_request(
                model_weights,
                master_weights,
                start_offsets,
                fsdp_shard_model_weights,
                names,
                manual_post_all_gather_processing,
            )
        except ZerocastError as e:
            error = e
        raise_in_all(self._comms, error)

        options = f"check_finite={check_finite}"
        extents: dict[Communicator, torch.Tensor] = {}
        for comm, indices in members.items():
            shares = [self._requests[i] for i in indices]
            try:
                extents[comm] = exchange_extents(comm, shares, options)
            except ZerocastError as e:
                error = error or e
        raise_in_all(self._comms, error)

        self.fingerprints = [
            fingerprint([self._requests[i] for i in indices], options, extents[comm])
            for comm, indices in members.items()
        ]
        self._allocate(members, extents)
        self._masters = Masters(len(self._requests))
        self._bind(master_weights)
        self._clock = CastClock(rebuild_on_use=not manual_post_all_gather_processing)
        weakref.finalize(self, self._clock.retire)
        for request in self._requests:
            request.storage.watch(self._clock)
            if request.is_named:
                request.storage.name_weight(request.name)
        self._backend = backend_for(self._amax.device)
        self._prepare()

    # --- the sentence ---

    @property
    def steps(self) -> dict[str, Callable[[], None]]:
        """The steps of :meth:`cast` by name, in order: what a profiler runs one by one instead of
        ``cast()``.
        """
        steps = {"partial_amax": self._partial_amax, "reduce_amax": self._reduce_amax}
        if self._launches["select"]:
            steps |= {
                "partial_select": self._partial_select,
                "reduce_candidates": self._reduce_candidates,
            }
        return steps | {"compute_scale": self._compute_scale, "partial_cast": self._partial_cast}

    def cast(self, master_weights: Sequence[torch.Tensor | None] | None = None) -> None:
        """Cast this rank's shards: afterwards scales, amax and padding are right on every rank, and
        this rank's codes.

        Args:
            master_weights: other tensors to read the masters from, from now on; of the sizes that
                the plan was made with. Checked on all ranks together.

        Raises:
            InputError: on every rank, for ``master_weights`` that do not fit.
            NonFiniteError: on every rank, with ``check_finite``; nothing has been written.
        """
        if master_weights is not None:
            self.bind(master_weights)
        for step in self.steps.values():
            step()

    def cast_and_release(self, master_weights: Sequence[torch.Tensor | None]) -> None:
        """Cast from masters that are known to fit, and keep none of them alive: what the functional
        calls do.
        """
        self._bind(master_weights)
        try:
            self.cast()
        finally:
            self._bind([None] * len(self._requests))

    def all_gather(self) -> None:
        """Bring every rank's codes to every rank, then rebuild the derived copies. Right for every
        partition.
        """
        check_capture(self._amax.device, self._comms)
        for share in self._shares:
            for gather in share.gathers:
                gather.run()
        self.post_all_gather_processing()

    def post_all_gather_processing(self) -> None:
        """Rebuild the derived copies of all weights of the plan from their gathered codes."""
        self._follow_moves()
        self._run("transpose")
        for request in self._requests:
            request.storage.mark_rebuilt()

    def post_all_gather_hook(self, module: torch.nn.Module) -> RemovableHandle:
        """Let ``module`` rebuild stale derived copies before its forward, once a cast; returns the
        hook's handle.

        For a framework that all-gathers parameters before the forward of each module and offers a
        hook there. It covers the weights of this plan among ``module``'s parameters.

        Raises:
            InputError: where ``module`` has no parameter that belongs to this plan.
        """
        planned = {id(request.storage) for request in self._requests}
        storages = [
            p.storage
            for p in module.parameters()
            if isinstance(p, QuantizedTensor) and id(p.storage) in planned
        ]
        if not storages:
            raise InputError(
                f"post_all_gather_hook needs a module with parameters of this plan, got "
                f"{type(module).__name__} with none of its {len(planned)} weights."
            )

        def rebuild_stale(module: torch.nn.Module, args: object) -> None:
            rebuild_derived([storage for storage in storages if storage.is_stale])

        return module.register_forward_pre_hook(rebuild_stale)

    def bind(self, master_weights: Sequence[torch.Tensor | None]) -> None:
        """Read the masters from these tensors from now on: dtype, device and sizes as when the plan
        was made.

        Collective. Raises :class:`InputError` on every rank, for a wrong tensor on any.
        """
        error: ZerocastError | None = None
        try:
            master_weights = as_tensors(master_weights)
            check_rebind(self._requests, master_weights)
        except ZerocastError as e:
            error = e
        raise_in_all(self._comms, error)
        self._bind(master_weights)

    # --- the steps ---

    def _partial_amax(self) -> None:
        self._follow_moves()
        self._amax.zero_()
        if self._writes_early:
            self._clock.tick()
        self._run("partial_amax")

    def _reduce_amax(self) -> None:
        check_capture(self._amax.device, self._comms, check_finite=self._check_finite)
        for share in self._shares:
            share.comm.all_reduce_max_(share.amax)
        if self._check_finite:
            raise_if_not_finite(
                [
                    (
                        share.comm,
                        [
                            (self._requests[i], self._slots[i], self._masters.tensors[i])
                            for i in share.members
                        ],
                    )
                    for share in self._shares
                ]
            )

    def _partial_select(self) -> None:
        self._exchanged.zero_()
        self._run("partial_select")

    def _reduce_candidates(self) -> None:
        for share in self._shares:
            if len(share.candidates):
                share.comm.all_reduce_sum_(share.candidates)
        self._run("select")

    def _compute_scale(self) -> None:
        if not self._writes_early:
            self._clock.tick()
        self._run("compute_scale")

    def _partial_cast(self) -> None:
        self._run("partial_cast")

    def _run(self, step: str) -> None:
        for launch in self._launches[step]:
            launch()

    # --- planning ---

    def _allocate(
        self, members: dict[Communicator, list[int]], extents: dict[Communicator, torch.Tensor]
    ) -> None:
        """One amax buffer and one of candidates, group after group; ``_slots[i]`` and
        ``_candidates[i]`` are the parts of weight i.
        """
        storages = [request.storage for request in self._requests]
        device = storages[0].device if storages else torch.device("cpu")
        cuts: dict[int, Cuts] = {}
        for comm, indices in members.items():
            for place, i in enumerate(indices):
                if storages[i].recipe.chooses_scales:
                    owned = extents[comm][:, place].tolist()
                    cuts[i] = Cuts.of(storages[i].grid, [Extent(*pair) for pair in owned])
        order = [i for indices in members.values() for i in indices]
        slots = _parts([storages[i].amax_slots for i in order], device)
        words = [Candidates.words(storages[i].grid, cuts[i]) if i in cuts else 0 for i in order]
        exchanged = _parts(words, device)
        self._amax, self._exchanged = slots.whole, exchanged.whole
        self._slots = dict(zip(order, slots.parts, strict=True))
        self._candidates = {
            i: Candidates.carve(part, storages[i].grid, cuts[i])
            for i, part in zip(order, exchanged.parts, strict=True)
            if i in cuts
        }
        self._shares: list[_GroupShare] = []
        first = 0
        for comm, indices in members.items():
            requests = [self._requests[i] for i in indices]
            last = first + len(indices)
            self._shares.append(
                _GroupShare(
                    comm,
                    indices,
                    slots.join(first, last),
                    exchanged.join(first, last),
                    [
                        CodeGather(comm, requests, extents[comm], plane)
                        for plane in PLANES
                        if any(plane in request.storage.gathered for request in requests)
                    ],
                )
            )
            first = last

    def _bind(self, master_weights: Sequence[torch.Tensor | None]) -> None:
        self._masters.bind(
            [
                master if request.extent else None
                for request, master in zip(self._requests, master_weights, strict=True)
            ]
        )

    def _prepare(self) -> None:
        """Prepare the launches: one a step and recipe, for the buffers as they lie now."""
        check_planning(self._amax.device)
        self._move = QuantizedStorage.last_move
        self._addresses = self._buffer_addresses()
        self._launches: dict[str, list[Launch]] = {
            "partial_amax": [], "partial_select": [], "select": [],
            "compute_scale": [], "partial_cast": [], "transpose": []
        }  # fmt: skip
        self._writes_early = False
        by_recipe: dict[Recipe, list[int]] = {}
        for i, request in enumerate(self._requests):
            by_recipe.setdefault(request.storage.recipe, []).append(i)
        for recipe, indices in by_recipe.items():
            self._prepare_recipe(recipe, indices)

    def _prepare_recipe(self, recipe: Recipe, indices: Sequence[int]) -> None:
        backend, masters, launches = self._backend, self._masters, self._launches
        requests = [(i, self._requests[i]) for i in indices]
        shards = [
            shard
            for i, r in requests
            for shard in r.storage.cast_shards(
                i,
                r.extent,
                self._slots[i],
                codes=r.codes.get("rowwise_data"),
                columnwise_codes=r.codes.get("columnwise_data"),
                codes_start=r.codes_start,
                candidates=self._candidates.get(i),
            )
        ]
        scales = [
            target
            for i, r in requests
            for target in r.storage.scale_targets(self._slots[i], self._candidates.get(i))
        ]
        copies = [r.storage.transpose_target() for _, r in requests if r.storage.derived_names]
        amax = recipe.partial_amax(backend, shards, masters)
        scale = recipe.compute_scale(backend, scales)
        cast = recipe.partial_cast(backend, shards, masters)
        if not recipe.casts_before_reduction:
            launches["partial_amax"].append(amax)
            launches["compute_scale"].append(scale)
            launches["partial_cast"].append(cast)
        elif self._check_finite:
            # Nothing may be written before the amaxes were judged, so they take a pass of their
            # own; and the scale that the cast uses must not have moved on yet.
            launches["partial_amax"].append(amax)
            launches["compute_scale"] += [cast, scale]
        else:
            self._writes_early = True
            launches["partial_amax"].append(cast)
            launches["compute_scale"].append(scale)
        if recipe.chooses_scales:
            choices = [
                SelectTarget(r.storage.grid, *_ends(r.storage, self._slots[i]), self._candidates[i])
                for i, r in requests
            ]
            launches["partial_select"].append(recipe.partial_select(backend, shards, masters))
            launches["select"].append(recipe.select(backend, choices))
        launches["transpose"].append(recipe.post_all_gather_processing(backend, copies))

    def _buffer_addresses(self) -> list[int]:
        return [
            t.data_ptr() for request in self._requests for t in request.storage.buffers.values()
        ]

    def _follow_moves(self) -> None:
        """Prepare anew where ``replace_raw_data`` has moved a weight of this plan since the last
        time.
        """
        if self._move != QuantizedStorage.last_move:
            if self._addresses != self._buffer_addresses():
                self._prepare()
            self._move = QuantizedStorage.last_move


@dataclass(frozen=True, slots=True)
class _Parts:
    """An int32 buffer, and its parts end to end."""

    whole: torch.Tensor
    parts: list[torch.Tensor]

    def join(self, first: int, last: int) -> torch.Tensor:
        """Parts ``first`` to ``last``, exclusive, as one tensor."""
        sizes = [part.numel() for part in self.parts]
        return self.whole[sum(sizes[:first]) : sum(sizes[:last])]


def _parts(sizes: Sequence[int], device: torch.device) -> _Parts:
    whole = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
    return _Parts(whole, list(whole.split(list(sizes))))


def _ends(storage: QuantizedStorage, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight's rowwise block amaxes, and the tensor's."""
    block_amax, _, tensor_amax = storage.split_amax(amax)
    return block_amax, tensor_amax
