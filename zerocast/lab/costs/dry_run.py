"""DryRun: makes a step of ZeroOptimizer as one rank of many, without memory and without other
ranks.

Nothing is worked out here a second time. The weights are on the meta device, which has shapes and
no memory. From them the objects are made that make a step: :class:`ShardedWeights`, the rounds of
gradients, :class:`CastCollectives`, :class:`CastSteps`. Their collectives run on a
:class:`RecordingCommunicator` around a rank that is alone, and their launches are those of a
backend that counts. So a dry run sends what a step sends, call by call, and takes the memory that
it takes; the tests compare both with real steps.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import cast

import torch

from zerocast.cast.amax_buffers import ExchangeKind, is_boundary
from zerocast.cast.cast_collectives import CastCollectives
from zerocast.cast.consistency import raise_in_all, tp_shards_by_group
from zerocast.cast.shard_spec import ShardSpec
from zerocast.comm import RecordingCommunicator
from zerocast.lab.costs.counted_launches import CountingBackend, Work
from zerocast.lab.costs.one_of_many import OneOfMany
from zerocast.layout import Owners, round_up
from zerocast.numerics import Backend, Masters
from zerocast.optim.buckets import BUCKET_SIZE
from zerocast.optim.gradient_rounds import BUFFER_BYTES, buffer_sizes, cut_rounds
from zerocast.optim.gradients import flag_bytes
from zerocast.optim.inner import InnerOptimizer
from zerocast.optim.matrix_owners import MatrixOwners
from zerocast.optim.shards import ShardedWeights
from zerocast.optim.stepped_weights import Weight, storage_kind
from zerocast.tensors.allocations import ALIGNMENT
from zerocast.tensors.cast_steps import CastSteps


@dataclass(frozen=True)
class StepOptions:
    """Options of :class:`zerocast.optim.ZeroOptimizer`, of the same names, and of its step.

    Attributes:
        optimizer_class: the class whose state is counted.
        backward_passes: the number of backward passes of a step, each of which sends gradients with
            ``overlap_grad_reduce``.
        exchange: as for :class:`zerocast.CastPlan`; ZeroOptimizer's is "boundary".
        device: "cuda" or "cpu": where the step would run.
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
    """One step, which the constructor makes.

    Args:
        params: names and weights, as ``model.named_parameters()`` gives them of a model on the meta
            device, quantized ones (:func:`zerocast.nn.convert`) and plain ones.
        rank, size: which of how many data-parallel ranks.
        options: the options of the optimizer.

    Attributes:
        comm: has counted what this rank sends to the others, by what it is.
        tp_comms: the same for groups of tensor parallelism that record.
        work: the launches, and the bytes that they read and write, by operation.
        memory: bytes that this rank holds, by what they are.
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
        self.work = self._backend.work
        self._plan_cast()
        self._step()
        self.memory = self._count_memory()

    def _plan_cast(self) -> None:
        """Make what a CastPlan of the weights that hold codes is made of."""
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
        tp_shards = tp_shards_by_group([shards.weights[i].param for i in places])
        self.tp_comms = [each for each in tp_shards if isinstance(each, RecordingCommunicator)]
        self._storages = [spec.storage for spec in specs]
        self._comms = [self.comm, *tp_shards]
        self._collectives = CastCollectives(
            specs,
            {self.comm: list(range(len(specs)))},
            {self.comm: Owners.of(len(specs), table)},
            tp_shards,
            boundary=is_boundary(self._options.exchange),
        )
        matrices = self._collectives.matrices.specs()
        operands = self._collectives.operands(matrices, judges_amaxes=False)
        masters = Masters(len(matrices))
        held = [shards.held.get(i) for i in places]
        masters.bind(self._collectives.matrices.masters(held))
        self._cast = CastSteps(
            cast(Backend, self._backend),
            [(each.storage, operand) for each, operand in zip(matrices, operands, strict=True)],
            masters,
            own_scales=self._collectives.own_scales,
            compact=self._collectives.compact,
        )

    # --- the step ---

    def _step(self) -> None:
        """Run the phases of ZeroOptimizer.step, in their order."""
        with self.comm.label("gradients"):
            self._reduce_gradients()
        with self.comm.label("whole gradients and masters"):
            self._update_masters()
        if self._storages:
            self._make_codes()
        elif self._options.device == "cpu":
            with self.comm.label("votes"):
                raise_in_all(self._comms, None)
        plain = [bucket for bucket in self._shards.buckets if not bucket.kind.is_codes]
        rounded = [(4 + b.kind.dtype.itemsize) * b.layout.rank_numel for b in plain]
        self._count("store_plain", sum(rounded))
        with self.comm.label("scales"):
            for gather in self._collectives.scale_gathers:
                gather.start()()
        for bucket in self._shards.buckets:
            with self.comm.label("codes" if bucket.kind.is_codes else "plain weights"):
                bucket.all_gather(self.comm)
        self._cast.run("expand_scales", "transpose")

    def _reduce_gradients(self) -> None:
        """Send the rounds; with ``overlap_grad_reduce`` all but the last with every backward."""
        passes = self._options.backward_passes if self._options.overlap_grad_reduce else 1
        memory = torch.empty(max(buffer_sizes(self._rounds)), dtype=torch.uint8, device="meta")
        for each in [*self._rounds[:-1] * passes, self._rounds[-1]]:
            each.place(memory)
            each.begin(self.comm)()
        # Gradients are copied into buffers, and the rows that arrive added to FP32 sums.
        sent = sum(each.nbytes for each in self._rounds)
        summed = 8 * self.comm.size * self._shards.num_columns
        self._count("gradients", passes * (self._gradient_bytes() + 2 * sent + summed))

    def _gradient_bytes(self) -> int:
        """Return the bytes of all weights' gradients, each in its own dtype."""
        params = [weight.param for weight in self._shards.weights]
        return sum(param.numel() * param.dtype.itemsize for param in params)

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
        held = sum(master.nbytes for master in masters.values())
        self._count("optimizer", 3 * held + 2 * self._state_bytes)

    def _make_codes(self) -> None:
        exchange = self._collectives.exchange
        self._cast.run("partial_amax")
        with self._labelled("amaxes"):
            exchange.reduce_amax()
        self._cast.run("partial_select")
        with self._labelled("choices"):
            exchange.reduce_candidates()
        self._cast.run("select", "compute_scale")
        numerics = {storage.recipe.numerics for storage in self._storages}
        if any(callable(getattr(each, "amax_compute_algo", None)) for each in numerics):
            with self._labelled("votes"):
                raise_in_all(self._comms, None)
        self._cast.run("partial_cast")

    def _count(self, name: str, nbytes: int) -> None:
        """Count what no backend is asked for: torch's own operations, without their launches."""
        self.work[name] = Work(0, nbytes)

    @contextmanager
    def _labelled(self, name: str) -> Iterator[None]:
        """Count under ``name`` what is sent to ranks of any kind within the context."""
        with ExitStack() as labels:
            for comm in (self.comm, *self.tp_comms):
                labels.enter_context(comm.label(name))
            yield

    # --- memory ---

    def _count_memory(self) -> Counter[str]:
        shards, held = self._shards, Counter[str]()
        for bucket in shards.buckets:
            name = "codes" if bucket.kind.is_codes else "plain weights"
            step = ALIGNMENT if bucket.kind.is_codes else 1  # those lie together
            held[name] += sum(round_up(flat.nbytes, step) for flat in bucket.flats)
        for storage in self._storages:
            for name, buffer in storage.buffers.items():
                if name not in storage.gathered:  # those lie in their bucket
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
        two = max(map(sum, zip(sizes, [*sizes[1:], 0], strict=True)))  # one is taken at the next
        held["gradients"] = two if self._options.overlap_grad_reduce else self._gradient_bytes()
        held["amaxes"] = sum(each.nbytes for each in self._collectives.exchange.tensors)
        held["scales in travel"] = sum(
            each.nbytes for gather in self._collectives.scale_gathers for each in gather.tensors
        )
        return held
