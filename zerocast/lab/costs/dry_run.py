"""DryRun: runs a step of ZeroOptimizer as one rank of many, without memory and other ranks.

It does not reimplement a step. The weights are on the meta device, which has shapes and no memory.
From them it makes the objects of a real step: :class:`ShardedWeights`, the rounds of gradients,
:class:`ShardedCast`. Their collectives run on a :class:`RecordingCommunicator` around a single
rank, and their launches on a backend that counts. So a dry run records the same collectives, call
by call, and the same memory as a real step; the tests compare both.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from zerocast.backends import use_backend
from zerocast.cast.amax_buffers import ExchangeKind, is_boundary
from zerocast.cast.consistency import tp_shards_by_group
from zerocast.cast.shard_spec import ShardSpec
from zerocast.cast.sharded_cast import ShardedCast
from zerocast.comm import RecordingCommunicator, raise_together
from zerocast.lab.costs.counted_launches import CountingBackend
from zerocast.lab.costs.one_of_many import OneOfMany
from zerocast.layout import Owners, round_up
from zerocast.optim.buckets import BUCKET_SIZE
from zerocast.optim.gradient_rounds import BUFFER_BYTES, buffer_sizes, cut_rounds
from zerocast.optim.gradients import flag_bytes
from zerocast.optim.inner import InnerOptimizer
from zerocast.optim.matrix_owners import MatrixOwners
from zerocast.optim.shards import ShardedWeights
from zerocast.optim.stepped_weights import Weight, storage_kind
from zerocast.tensors.allocations import ALIGNMENT
from zerocast.tensors.pipeline import CastPipeline

SENT = {
    "reduce_scatter": "gradients", "optimizer": "whole gradients and masters",
    "reduce_amax": "amaxes", "reduce_candidates": "choices", "compute_scale": "votes",
    "all_gather_scales": "scales",
}  # fmt: skip
"""The data that a phase sends, for phases that send one kind of data."""


@dataclass(frozen=True)
class StepOptions:
    """Options of :class:`zerocast.optim.ZeroOptimizer`, with the same names, and of its step.

    Attributes:
        optimizer_class: the class whose state is counted.
        backward_passes: the number of backward passes per step; with ``overlap_grad_reduce`` each
            sends gradients.
        exchange: see :class:`zerocast.CastPlan`; ZeroOptimizer uses "boundary".
        device: "cuda" or "cpu": the device on which the step would run.
    """

    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW
    overlap_all_gather: bool = False
    bucket_size: int | None = None
    gradient_dtype: torch.dtype | None = None
    overlap_grad_reduce: bool = False
    shard: str = "element"
    backward_passes: int = 1
    exchange: ExchangeKind = "boundary"
    device: str = "cuda"


class DryRun:
    """A dry run of one step, which the constructor runs.

    Args:
        params: names and weights of a model on the meta device, as ``model.named_parameters()``
            returns them; quantized (:func:`zerocast.nn.convert`) or not.
        rank, size: the data-parallel rank, and the number of them.
        options: the options of the optimizer.

    Attributes:
        comm: the communicator that has recorded the traffic to data-parallel ranks by label.
        tp_comms: the same for recording groups of tensor parallelism.
        launches: the launches of zerocast's kernels by phase.
        memory: the bytes that this rank holds, by kind.
    """

    def __init__(
        self,
        params: Iterable[tuple[str, torch.Tensor]],
        rank: int,
        size: int,
        options: StepOptions,
    ) -> None:
        self._options = options
        self.comm = RecordingCommunicator(OneOfMany(rank, size, options.device))
        weights = [Weight(name, param, 0, storage_kind(name, param)) for name, param in params]
        bucket_size = options.bucket_size
        if options.overlap_grad_reduce and bucket_size is None:
            bucket_size = BUCKET_SIZE
        self._shards = ShardedWeights(self.comm, weights, options.overlap_all_gather, bucket_size)
        self._owners = MatrixOwners(self._shards) if options.shard == "matrix" else None
        self._tail_bytes = flag_bytes(len(weights)).stop
        buffer_bytes = None if options.overlap_grad_reduce else BUFFER_BYTES
        self._rounds = cut_rounds(
            self._shards, options.gradient_dtype, self._tail_bytes, buffer_bytes
        )
        self._backend = CountingBackend(options.device)
        self.launches = self._backend.launches
        self._cast = self._make_cast()
        self.tp_comms = [e for e in self._cast.comms[1:] if isinstance(e, RecordingCommunicator)]
        self._pipeline().run(self._counted)
        self.memory = self._count_memory()

    def _make_cast(self) -> ShardedCast:
        """Return the cast of the weights that hold codes, as in a CastPlan."""
        shards = self._shards
        places = [i for i, weight in enumerate(shards.weights) if weight.kind.is_codes]
        specs = []
        for i in places:
            name, storage = shards.weights[i].name, shards.weights[i].storage
            assert storage is not None
            extent = shards.own[i].extent
            specs.append(ShardSpec(name, True, storage, extent, {}, storage.amax_group))
        rows = [
            (at, rank, part.start, part.end)
            for at, i in enumerate(places)
            for rank, part in shards.owners(i)
        ]
        table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(len(rows), 4)
        with use_backend(self._backend):
            return ShardedCast(
                (),  # only needed for weights that have memory
                [shards.held.get(i) for i in places],
                specs,
                {self.comm: list(range(len(specs)))},
                {self.comm: Owners.of(len(specs), table)},
                tp_shards_by_group([shards.weights[i].param for i in places]),
                boundary=is_boundary(self._options.exchange),
            )

    # --- the step ---

    def _pipeline(self) -> CastPipeline:
        """Return the steps of ZeroOptimizer.step that send, launch or hold something."""
        pipeline = CastPipeline()
        if self._cast.specs:
            pipeline = self._cast.pipeline().having(
                all_gather_scales=self._cast.gather_scales,
                post_all_gather_processing=self._cast.rebuild_copies,
            )
        return pipeline.having(
            reduce_scatter=self._reduce_gradients,
            optimizer=self._update_masters,
            all_gather=self._all_gather,
        )

    @contextmanager
    def _counted(self, step: str) -> Iterator[None]:
        """Count the launches and the traffic of a phase."""
        self._backend.step = step
        with ExitStack() as labels:
            for comm in (self.comm, *self.tp_comms):
                labels.enter_context(comm.label(SENT.get(step, "")))
            yield

    def _reduce_gradients(self) -> None:
        """Send the rounds; with ``overlap_grad_reduce``, all except the last in every backward."""
        passes = self._options.backward_passes if self._options.overlap_grad_reduce else 1
        memory = torch.empty(max(buffer_sizes(self._rounds)), dtype=torch.uint8, device="meta")
        for each in [*self._rounds[:-1] * passes, self._rounds[-1]]:
            each.place(memory)
            each.begin(self.comm)()

    def _update_masters(self) -> None:
        shards, weights = self._shards, self._shards.weights
        masters = self._owners.masters if self._owners else shards.held
        inner = InnerOptimizer(self._options.optimizer_class, {}, [{}], weights, masters)
        gradients: list[torch.Tensor | None] = [shards.master(i) for i in range(len(weights))]
        if self._owners:
            gradients = self._owners.whole_gradients(shards.masters, gradients)
        inner.step([{}], gradients)
        if self._owners:
            self._owners.return_masters()
        state = [v for i in masters for v in inner.state(i).values()]
        self._state_bytes = sum(v.nbytes for v in state if isinstance(v, torch.Tensor))
        if not self._cast.specs and self._options.device == "cpu":
            with self.comm.label(SENT["compute_scale"]):
                raise_together(self.comm, None)

    def _all_gather(self) -> None:
        for bucket in self._shards.buckets:
            with self.comm.label("codes" if bucket.kind.is_codes else "plain weights"):
                bucket.all_gather(self.comm)

    # --- memory ---

    def _count_memory(self) -> Counter[str]:
        shards, held = self._shards, Counter[str]()
        for bucket in shards.buckets:
            name = "codes" if bucket.kind.is_codes else "plain weights"
            step = ALIGNMENT if bucket.kind.is_codes else 1  # codes share one buffer
            held[name] += sum(round_up(flat.nbytes, step) for flat in bucket.flats)
        for spec in self._cast.specs:
            for name, buffer in spec.storage.buffers.items():
                if name not in spec.storage.gathered:  # gathered ones are in their bucket
                    kind = "codes" if name == "columnwise_data" else "scales"
                    held[kind] += round_up(buffer.nbytes, ALIGNMENT)
        held["masters"] = shards.masters.nbytes
        held["optimizer state"] = self._state_bytes
        if self._owners:
            held["whole masters"] = sum(each.nbytes for each in self._owners.tensors)
            held["whole gradients"] = sum(each.nbytes for each in self._owners.masters.values())
        held["mean gradients"] = 4 * shards.num_columns
        held["gradient buffers"] = sum(buffer_sizes(self._rounds))
        held["gradient buffers"] += self.comm.size * self._tail_bytes
        sizes = [weight.param.numel() * weight.param.itemsize for weight in shards.weights]
        # With overlap_grad_reduce, a gradient is released when the next one exists.
        two = max(map(sum, zip(sizes, [*sizes[1:], 0], strict=True)))
        held["gradients"] = two if self._options.overlap_grad_reduce else sum(sizes)
        held["amaxes"] = sum(each.nbytes for each in self._cast.exchange.tensors)
        held["scales in travel"] = sum(each.nbytes for each in self._cast.prepared.gathered_scales)
        return held
