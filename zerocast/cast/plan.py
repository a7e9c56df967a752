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

import torch
from torch.utils.hooks import RemovableHandle

from zerocast.backends import backend_for
from zerocast.cast.amax_groups import Patterns
from zerocast.cast.capture import check_capture, check_planning
from zerocast.cast.exchange import Exchange
from zerocast.cast.finite import raise_if_not_finite
from zerocast.cast.gather import PLANES, CodeGather
from zerocast.cast.launches import Launches
from zerocast.cast.request import (
    OwnCodes,
    ShardRequest,
    as_tensors,
    check_amax_groups,
    check_rebind,
    check_request,
)
from zerocast.cast.world import (
    exchange_extents,
    fingerprint,
    members_by_group,
    parts_by_group,
    raise_in_all,
)
from zerocast.comm import Group
from zerocast.errors import InputError, ZerocastError
from zerocast.ops import Masters
from zerocast.tensors import CastClock, QuantizedStorage, QuantizedTensor, rebuild_derived


class CastPlan:
    """A cast of sharded FP32 masters into quantized model weights, planned once.

    Making a plan is collective: every rank of every group makes it, with the same weights in the
    same order. The ranks compare what they were given; an error of one is raised on all, and
    nothing is written. After that :meth:`cast` is a constant number of launches and one all-reduce
    a group, whatever the number of weights, and allocates nothing.

    Weights may be parts of larger ones (:class:`zerocast.Part`): their casts take one small
    all-reduce more for each tensor-parallel group, and plan and casts are collective over these
    groups, too. Masters and offsets are those of the part.

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
        amax_groups: weights that a server will fuse and that therefore share one tensor amax, by
            patterns of their ``names``: ``[["*.wq", "*.wk", "*.wv"], ["*.w1", "*.w3"]]``; see
            :mod:`zerocast.cast.amax_groups`. Weights that :func:`zerocast.nn.convert` grouped are
            grouped here, too.

    Attributes:
        fingerprints: a number for each group, and then for each tensor-parallel group; ranks of one
            plan have the same one.

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
        fsdp_shard_model_weights: OwnCodes | None = None,
        manual_post_all_gather_processing: bool = True,
        check_finite: bool = False,
        amax_groups: Patterns = (),
    ) -> None:
        # What has no length is refused below, on all ranks together.
        count = len(model_weights) if isinstance(model_weights, Sized) else 0
        members = members_by_group(group, count)
        parts = parts_by_group(model_weights)
        self._comms = [*members, *parts]
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
                amax_groups,
            )
            check_amax_groups(self._requests, members)
        except ZerocastError as e:
            error = e
        options = f"check_finite={check_finite}"
        extents, places = exchange_extents(members, parts, self._requests, options, error)

        self.fingerprints = [
            fingerprint([self._requests[i] for i in indices], options, found[comm], parts=cut)
            for groups, found, cut in ((members, extents, False), (parts, places, True))
            for comm, indices in groups.items()
        ]
        storages = [request.storage for request in self._requests]
        device = storages[0].device if storages else torch.device("cpu")
        self._members = members
        labels = [request.amax_group for request in self._requests]
        self._exchange = Exchange(storages, members, extents, parts, labels, device)
        self._gathers = [
            CodeGather(comm, [self._requests[i] for i in indices], extents[comm], plane)
            for comm, indices in members.items()
            for plane in PLANES
            if any(plane in storages[i].gathered for i in indices)
        ]
        self._masters = Masters(len(self._requests))
        self._bind(master_weights)
        self._clock = CastClock(rebuild_on_use=not manual_post_all_gather_processing)
        weakref.finalize(self, self._clock.retire)
        for request in self._requests:
            request.storage.watch(self._clock)
            if request.is_named:
                request.storage.name_weight(request.name)
        self._device, self._backend = device, backend_for(device)
        self._prepare()

    # --- the sentence ---

    @property
    def steps(self) -> dict[str, Callable[[], None]]:
        """The steps of :meth:`cast` by name, in order: what a profiler runs one by one instead of
        ``cast()``.
        """
        steps = {"partial_amax": self._partial_amax, "reduce_amax": self._reduce_amax}
        if self._launches.chooses_scales:
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
        check_capture(self._device, self._members)
        for gather in self._gathers:
            gather.run()
        self.post_all_gather_processing()

    def post_all_gather_processing(self) -> None:
        """Rebuild the derived copies of all weights of the plan from their gathered codes."""
        self._follow_moves()
        self._launches.run("transpose")
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
        self._exchange.amax.zero_()
        if self._launches.writes_early:
            self._clock.tick()
        self._launches.run("partial_amax")

    def _reduce_amax(self) -> None:
        check_capture(self._device, self._comms, check_finite=self._check_finite)
        self._exchange.reduce_amax()
        if self._check_finite:
            requests, amax, masters = (
                self._requests, self._exchange.tensor_amax, self._masters.tensors
            )  # fmt: skip
            raise_if_not_finite(
                self._comms,
                [
                    (comm, [(requests[i], amax(i), masters[i]) for i in indices])
                    for comm, indices in self._members.items()
                ],
            )

    def _partial_select(self) -> None:
        self._exchange.candidates.zero_()
        self._launches.run("partial_select")

    def _reduce_candidates(self) -> None:
        self._exchange.reduce_candidates()
        self._launches.run("select")

    def _compute_scale(self) -> None:
        if not self._launches.writes_early:
            self._clock.tick()
        self._launches.run("compute_scale")

    def _partial_cast(self) -> None:
        self._launches.run("partial_cast")

    # --- planning ---

    def _bind(self, master_weights: Sequence[torch.Tensor | None]) -> None:
        self._masters.bind(
            [
                master if request.extent else None
                for request, master in zip(self._requests, master_weights, strict=True)
            ]
        )

    def _prepare(self) -> None:
        """Prepare the launches for the buffers as they lie now."""
        check_planning(self._device)
        self._move = QuantizedStorage.last_move
        self._addresses = self._buffer_addresses()
        self._launches = Launches(
            self._backend,
            self._requests,
            self._exchange,
            self._masters,
            check_finite=self._check_finite,
        )

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
