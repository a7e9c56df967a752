"""Train on a parameter buffer of codes, gathered bucket by bucket while the forward runs.

    mpirun -n 3 python -m mpi4py examples/param_buffer.py --recipe nvfp4
    torchrun --nproc-per-node 3 examples/param_buffer.py --recipe mxfp8

The distributed optimizer of Megatron-LM by hand, for a framework of your own: weights lie end to
end in buckets, every rank owns one range of each bucket, and what it owns of a weight follows from
:class:`zerocast.layout.FlatLayout` in elements and :func:`zerocast.numerics.byte_span` in bytes. A
step casts into the rank's own bytes with one all-reduce for all buckets, and begins all gathers. In
the next forward each layer waits for the buckets that hold its weights, whose derived copies are
then rebuilt; the buckets of later layers are still on their way.

It prints the loss, what the gathers send against BF16, and whether every byte of every weight is
that of the unsharded cast by the reference backend; the exit code is 1 where one differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence

import torch
from gpt.check import check_weights
from gpt.data import load_corpus, sample
from gpt.launch import fast_dtype, launched_ranks
from gpt.model import GPT

import zerocast
from zerocast.comm import Communicator, RecordingCommunicator
from zerocast.layout import Extent, FlatLayout
from zerocast.nn import convert
from zerocast.numerics import byte_span

BATCH = 2
"""Sequences a step on each rank, so that any number of ranks will do."""


class Bucket:
    """Weights of one kind end to end, codes or plain, and what this rank owns of them.

    Attributes:
        weights: parameters; all hold codes of one format, or all are plain and of one dtype.
        layout: where each lies and who owns what, in elements.
        planes: uint8, whole on every rank: the codes (both planes, where the columnwise codes are
            quantized independently), or the values of plain weights.
        master: FP32 [layout.rank_numel], this rank's range.
    """

    def __init__(self, weights: Sequence[torch.nn.Parameter], comm: Communicator) -> None:
        self.weights = weights
        self.comm = comm
        self.codes = [w for w in weights if isinstance(w, zerocast.QuantizedTensor)]
        self.layout = FlatLayout(tuple(w.numel() for w in weights), comm.size)
        self.own = self.bytes_of(self.layout.rank_extent(comm.rank))
        self.master = torch.zeros(self.layout.rank_numel)
        self.gradients = torch.zeros(self.layout.numel)
        rank = comm.rank
        places, extents = self.layout.shard_slices(rank), self.layout.shards(rank)
        for weight, place, extent in zip(weights, places, extents, strict=True):
            self.master[place] = initial_values(weight).view(-1)[extent.start : extent.end]
        size = self.bytes_of(Extent(0, self.layout.numel)).stop
        planes = len(self.codes[0].quantized_storage.gathered) if self.codes else 1
        self.planes = [torch.zeros(size, dtype=torch.uint8) for _ in range(planes)]
        for weight, extent in zip(weights, self.layout.weight_extents(), strict=True):
            places = [plane[self.bytes_of(extent)] for plane in self.planes]
            if isinstance(weight, zerocast.QuantizedTensor):
                zerocast.replace_raw_data(weight, *places)
            else:
                weight.data = places[0].view(weight.dtype).view(weight.shape).copy_(weight.data)
        self.arrivals: list[Callable[[], None]] = []

    def bytes_of(self, extent: Extent) -> slice:
        """Where elements of the bucket are stored in each of :attr:`planes`."""
        if self.codes:
            return slice(*byte_span(self.codes[0].recipe.numerics.fmt, extent.start, extent.end))
        itemsize = self.weights[0].dtype.itemsize
        return slice(extent.start * itemsize, extent.end * itemsize)

    def reduce_gradients(self) -> None:
        """Give the master the mean over ranks of its gradient."""
        for weight, extent in zip(self.weights, self.layout.weight_extents(), strict=True):
            place = self.gradients[extent.start : extent.end]
            if weight.grad is None:
                place.zero_()
            else:
                place.copy_(weight.grad.reshape(-1))
        self.master.grad = torch.empty_like(self.master)
        self.comm.reduce_scatter_sum(self.master.grad, self.gradients)
        self.master.grad /= self.comm.size

    def start_gather(self) -> None:
        """Begin to send this rank's bytes. Codes have been cast; plain weights are cast here."""
        if not self.codes:
            self.planes[0][self.own].view(self.weights[0].dtype).copy_(self.master)
        self.arrivals = [self.comm.start_all_gather_(plane) for plane in self.planes]

    def arrive(self) -> None:
        """Wait for everybody's bytes, once a gather, and rebuild what is derived from them."""
        waits, self.arrivals = self.arrivals, []
        for wait in waits:
            wait()
        if waits:
            zerocast.post_all_gather_processing(self.codes)

    def gather_masters(self) -> torch.Tensor:
        """FP32 [layout.numel]: every rank's masters. Collective."""
        everybodys = torch.zeros(self.layout.numel)
        own = self.layout.rank_extent(self.comm.rank)
        everybodys[own.start : own.end] = self.master
        self.comm.all_gather_(everybodys)
        return everybodys


class ParamBuffer:
    """All weights of a model in buckets, and the optimizer of their masters.

    Every rank makes one, from equal models.

    Args:
        model: its quantized weights hold codes (``zerocast.nn.convert``).
        units: tuples of modules. The forward of the first waits for the weights of all of them, and
            none of these is read before. Together they hold every weight.
        comm: the ranks.
        bucket_size: a bucket is closed as soon as it holds so many elements.
        lr: of AdamW.

    Raises:
        ValueError: where a weight is in no unit.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        units: Iterable[tuple[torch.nn.Module, ...]],
        comm: Communicator,
        bucket_size: int,
        lr: float,
    ) -> None:
        self.buckets = [
            Bucket(weights, comm) for weights in fill_buckets(model.parameters(), bucket_size)
        ]
        self.inner = torch.optim.AdamW([bucket.master for bucket in self.buckets], lr=lr)
        self.plan = plan_cast([bucket for bucket in self.buckets if bucket.codes], comm)
        awaited = set()
        for unit in units:
            weights = {weight for module in unit for weight in module.parameters()}
            buckets = [bucket for bucket in self.buckets if weights.intersection(bucket.weights)]
            unit[0].register_forward_pre_hook(lambda module, args, buckets=buckets: arrive(buckets))
            awaited |= weights
        for name, weight in model.named_parameters():
            if weight not in awaited:
                raise ValueError(f"every weight must be in a unit, and {name} is in none; add one.")

    @torch.no_grad()
    def step(self) -> None:
        """Step the masters, cast them, and begin to gather; the next forward waits. Collective."""
        arrive(self.buckets)  # what no forward has waited for
        for bucket in self.buckets:
            bucket.reduce_gradients()
        self.inner.step()
        self.plan.cast()  # one all-reduce for all buckets, then this rank's own bytes
        for bucket in self.buckets:
            bucket.start_gather()

    def gather_master(self, weight: torch.Tensor) -> torch.Tensor:
        """FP32, in the weight's shape: its whole master, from all ranks. Collective."""
        for bucket in self.buckets:
            for each, extent in zip(bucket.weights, bucket.layout.weight_extents(), strict=True):
                if each is weight:
                    return bucket.gather_masters()[extent.start : extent.end].view(weight.shape)
        raise ValueError("gather_master needs a weight of this buffer.")


def plan_cast(buckets: Sequence[Bucket], comm: Communicator) -> zerocast.CastPlan:
    """One cast for the codes of all buckets. The caller rebuilds what is derived from them."""
    masters, starts = [], []
    for bucket in buckets:
        extents = bucket.layout.shards(comm.rank)
        masters += [bucket.master[place] for place in bucket.layout.shard_slices(comm.rank)]
        starts += [extent.start for extent in extents]
    return zerocast.CastPlan(
        [weight for bucket in buckets for weight in bucket.weights],
        masters,
        starts,
        comm,
        manual_post_all_gather_processing=True,
    )


def arrive(buckets: Iterable[Bucket]) -> None:
    """Wait for buckets that are on their way."""
    for bucket in buckets:
        bucket.arrive()


def fill_buckets(
    weights: Iterable[torch.nn.Parameter], size: int
) -> list[list[torch.nn.Parameter]]:
    """Weights in the model's order, those of one kind together, until ``size`` elements or more are
    in a bucket. A weight is never split between buckets: ranks split it.
    """
    buckets: list[list[torch.nn.Parameter]] = []
    filling: dict[object, list[torch.nn.Parameter]] = {}
    for weight in weights:
        kind = weight.recipe if isinstance(weight, zerocast.QuantizedTensor) else weight.dtype
        if kind not in filling:
            filling[kind] = []
            buckets.append(filling[kind])
        filling[kind].append(weight)
        if sum(member.numel() for member in filling[kind]) >= size:
            del filling[kind]
    return buckets


def initial_values(weight: torch.nn.Parameter) -> torch.Tensor:
    """What a weight was before it was quantized; a plain one as it is."""
    if not isinstance(weight, zerocast.QuantizedTensor):
        return weight.detach()
    if not hasattr(weight, "get_high_precision_init_val"):  # none was kept
        return weight.dequantize(torch.float32)
    values = weight.get_high_precision_init_val()
    weight.clear_high_precision_init_val()
    return values


def train(recipe: str, steps: int, bucket_size: int, comm: RecordingCommunicator) -> bool:
    """Train the GPT, print what came of it on rank 0; whether the weights are right. Collective."""
    torch.manual_seed(0)  # the same model on every rank
    model = GPT()
    convert(model, zerocast.recipes.RECIPES[recipe](), filter_fqns=["head"])
    model.to(fast_dtype(comm))
    # GPT.forward calls `bytes`, and then reads the weight of `positions` without a call.
    units = [
        (model.bytes, model.positions),
        *((b,) for b in (*model.blocks, model.norm, model.head)),
    ]
    buffer = ParamBuffer(model, units, comm, bucket_size, lr=1e-3)
    warmup = torch.optim.lr_scheduler.LinearLR(buffer.inner, 0.05, total_iters=20)

    text = load_corpus().training
    draw = torch.Generator().manual_seed(comm.rank)
    losses = torch.zeros(steps)
    for step in range(steps):
        loss = model(*sample(text, BATCH, GPT.context, draw))
        loss.backward()
        with comm.label("step"):
            buffer.step()
        warmup.step()
        model.zero_grad()
        losses[step] = loss.item()
    arrive(buffer.buckets)

    comm.all_reduce_sum_(losses)
    gathers = comm.total(kind="all_gather", label="step")
    elements = sum(bucket.layout.numel for bucket in buffer.buckets)
    right, verdict = check_weights(model, buffer.gather_master, comm)
    if comm.rank == 0:
        first, last = losses[0] / comm.size, losses[-10:].mean() / comm.size
        sent, in_bf16 = gathers.sent_bytes / steps, 2 * elements * (comm.size - 1) / comm.size
        print(f"{comm.size} ranks, {steps} steps, {len(buffer.buckets)} buckets, {recipe}")
        print(f"loss: {first:.3f} at first, {last:.3f} at the end (nats a byte)")
        print(f"a rank's gathers send {sent / 1e3:,.1f} kB a step; BF16: {in_bf16 / 1e3:,.1f} kB")
        print(f"begun and waited for in {gathers.seconds / steps * 1e3:.2f} ms a step")
        print(verdict, flush=True)
    return right


def main() -> int:
    """Run what was asked for; 0, or 1 where the check found wrong weights."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", choices=zerocast.recipes.RECIPES, default="nvfp4")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--bucket-size", type=int, default=2**19, help="elements")
    arguments = parser.parse_args()
    with launched_ranks() as comm:
        recording = RecordingCommunicator(comm)
        return int(not train(arguments.recipe, arguments.steps, arguments.bucket_size, recording))


if __name__ == "__main__":
    sys.exit(main())
