"""A dry run sends what a step of ZeroOptimizer sends, and takes the memory that it takes."""

import gc
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

import zerocast
from tests.support.nightly import nightly
from tests.support.recipes import RECIPES, VARIANTS
from zerocast import TensorParallelShard
from zerocast.backends.cuda import CudaBackend
from zerocast.backends.cuda.launcher import MAX_GRID, Kernel
from zerocast.cast.amax_buffers import ExchangeKind
from zerocast.comm import (
    Communicator,
    InProcessCommunicator,
    RecordingCommunicator,
    SingleRank,
    run_in_process,
)
from zerocast.lab.costs.dry_run import DryRun, StepOptions
from zerocast.lab.costs.one_of_many import OneOfMany
from zerocast.optim import ZeroOptimizer

KINDS = {
    "reduce_scatter": "gradients", "optimizer": "between owners", "reduce_amax": "amaxes",
    "reduce_candidates": "choices", "all_gather_scales": "scales", "all_gather": "weights",
    "whole gradients and masters": "between owners", "codes": "weights", "plain weights": "weights",
    "votes": "between owners", "compute_scale": "between owners",
}  # fmt: skip
"""The phases of a step, and what a dry run calls what it sends, under common names."""

Params = list[tuple[str, torch.nn.Parameter]]
Sent = dict[tuple[str, str], tuple[int, int, int]]


def sent(*comms: RecordingCommunicator) -> Sent:
    """By name and kind of collective: calls, bytes of the buffers, and bytes sent."""
    found: Counter[Any] = Counter()
    for (label, kind), traffic in itertools.chain(*(comm.traffic.items() for comm in comms)):
        counts = traffic.calls, traffic.payload_bytes, traffic.sent_bytes
        for i, count in enumerate(counts):
            found[KINDS.get(label, label), kind, i] += count
    return {(a, b): tuple(found[a, b, i] for i in range(3)) for a, b, _ in found}  # type: ignore[misc]


class Case:
    """Weights, ranks and options, drawn by a seed: several recipes in one model, sides that blocks
    do not fill, vectors, a scalar, weights without elements, rows and columns of larger weights.
    """

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.tp = draw.choice([1, 1, 2])
        self.size = draw.choice([1, 2, 3, 4] if self.tp > 1 else [1, 2, 3, 4, 5, 7, 8])
        names = draw.sample(list(RECIPES), draw.choice([0, 1, 1, 2, 3]))
        if draw.random() < 0.2:
            names.append("delayed-function")
        # Shape, recipe or dtype, and the dimension that tensor parallelism shards.
        self.weights: list[tuple[tuple[int, ...], str | torch.dtype, int | None]] = []
        for _ in range(draw.randint(1, 6)):
            if names and draw.random() < 0.7:
                shape, dim = (draw.randint(1, 150), 32 * draw.randint(1, 6)), None
                if self.tp > 1 and draw.random() < 0.7:
                    shape, dim = (256, 256), draw.choice([0, 1])
                self.weights.append((shape, draw.choice(names), dim))
            else:
                shape = draw.choice([(), (37,), (3, 5), (200, 130), (0, 4)])
                self.weights.append((shape, draw.choice([torch.bfloat16, torch.float32]), None))
        self.options: dict[str, Any] = {
            "overlap_all_gather": draw.random() < 0.3,
            "bucket_size": draw.choice([None, None, 1, 5000]),
            "gradient_dtype": draw.choice([None, torch.bfloat16, torch.float32]),
            "overlap_grad_reduce": draw.random() < 0.5,
            "shard": draw.choice(["element", "element", "matrix"]),
        }
        self.passes = draw.choice([1, 2]) if self.options["overlap_grad_reduce"] else 1

    def params(self, device: str, tp_comm: Communicator) -> Params:
        """The weights, unfilled."""
        found = []
        for i, (shape, kind, dim) in enumerate(self.weights):
            if isinstance(kind, str):
                part = None if dim is None else TensorParallelShard.chunk(shape, dim, tp_comm)
                shape = shape if part is None else part.shape
                weight = zerocast.empty(shape, VARIANTS[kind], device=device, tp_shard=part)
            else:
                weight = torch.zeros(shape, dtype=kind, device=device)
            found.append((f"weight.{i}", torch.nn.Parameter(weight)))
        return found

    def train(
        self, comm: Communicator, tp_comm: Communicator, on_phase: Callable[..., Any]
    ) -> tuple[Params, ZeroOptimizer]:
        """Make a step of ZeroOptimizer, each of whose phases runs in the context ``on_phase``."""
        params = self.params("cpu", tp_comm)
        optimizer = ZeroOptimizer(params, group=comm, **self.options)
        optimizer.on_phase = on_phase
        for _ in range(self.passes):
            with on_phase("gradients"):
                sum((p.float() * 0.5).sum() for _, p in params).backward()
        optimizer.step()
        optimizer.wait_for_all_gather()
        return params, optimizer

    def record(self, world: InProcessCommunicator) -> tuple[Sent, Sent]:
        """What a step of ZeroOptimizer sends: to data-parallel and to tensor-parallel ranks."""
        dp_comm = RecordingCommunicator(world.split(world.rank % self.tp))
        tp_comm = RecordingCommunicator(world.split(world.rank // self.tp))

        @contextmanager
        def on_phase(name: str) -> Iterator[None]:
            with dp_comm.label(name), tp_comm.label(name):
                yield

        self.train(dp_comm, tp_comm, on_phase)
        for comm in dp_comm, tp_comm:  # what was made before the step has no label
            comm.traffic = {key: t for key, t in comm.traffic.items() if key[0]}
        return sent(dp_comm), sent(tp_comm)

    def estimate(self, rank: int, tp_rank: int = 0) -> DryRun:
        """The same without memory."""
        options = StepOptions(**self.options, backward_passes=self.passes, device="cpu")
        tp_comm = RecordingCommunicator(OneOfMany(tp_rank, self.tp, "cpu"))
        return DryRun(self.params("meta", tp_comm), rank, self.size, options)

    def __repr__(self) -> str:
        return f"{self.size} x {self.tp} ranks, {self.weights}, {self.options}"


@pytest.mark.parametrize("seed", [*range(12), *map(nightly, range(100, 500))])
def test_a_dry_run_sends_what_a_step_sends(seed: int) -> None:
    """Calls, bytes of buffers and bytes sent are those of a step, on every rank, exactly."""
    case = Case(seed)
    for i, recorded in enumerate(run_in_process(case.size * case.tp, case.record)):
        dry = case.estimate(i // case.tp, i % case.tp)
        estimated = sent(dry.comm), sent(*dry.tp_comms)
        assert estimated == recorded, f"seed {seed}, rank {i}: {case}"


def memory() -> dict[int, int]:
    """The bytes of the memory behind every tensor that Python knows, by its address."""
    gc.collect()
    tensors = (
        each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)
    )
    storages = [
        each.untyped_storage()
        for each in tensors
        if not each.is_meta and each.layout is torch.strided
    ]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


@pytest.mark.parametrize(
    "options", [{}, {"shard": "matrix"}, {"overlap_grad_reduce": True, "bucket_size": 5000}]
)
def test_a_dry_run_takes_the_memory_that_a_step_takes(options: dict[str, Any]) -> None:
    """All memory that weights and optimizer hold after a step, on all ranks together; but for what
    ranks agree by, less than 512 bytes each. Gradients that a backward pass frees are gone then.
    """
    case = Case(0)
    case.tp, case.size, case.passes = 1, 3, 1
    names = ["nvfp4", "nvfp4-4over6", "mxfp8", "block", "delayed"]
    case.weights = [((133, 160), name, None) for name in names]
    case.weights += [((200, 130), torch.bfloat16, None), ((37,), torch.float32, None)]
    case.options = options

    def hold(comm: Communicator) -> Any:
        return case.train(comm, SingleRank(), on_phase=nullcontext)

    run_in_process(case.size, hold)  # loads what is loaded once
    before = memory()
    held = run_in_process(case.size, hold)
    taken = sum(nbytes for at, nbytes in memory().items() if before.get(at) != nbytes)
    assert len(held) == case.size
    estimated = sum((case.estimate(rank).memory for rank in range(case.size)), Counter())
    if "overlap_grad_reduce" in options:
        del estimated["gradients"]
    assert abs(taken - estimated.total()) < 512 * case.size, (taken, estimated)


class CountingLauncher:
    """Takes kernels and counts them, and runs none."""

    device, max_grid, capturing = torch.device("cpu"), MAX_GRID, False
    launches = 0

    def upload(self, table: torch.Tensor) -> torch.Tensor:
        return table

    refresh = torch.Tensor.copy_

    def prepare(self, kernel: Kernel) -> int:
        return 0

    def launch(self, *given: object) -> None:
        self.launches += 1


@pytest.mark.parametrize("exchange", ["full", "boundary"])
def test_a_dry_run_launches_what_the_cuda_backend_launches(exchange: ExchangeKind) -> None:
    """A cast and its post-processing launch as many kernels, for one recipe and for all at once."""
    for names in [*([name] for name in RECIPES), list(RECIPES)]:
        weights = [zerocast.empty((256, 192), RECIPES[name]) for name in names]
        masters = [torch.ones(256 * 192) for _ in weights]
        launcher = CountingLauncher()
        with zerocast.use_backend(CudaBackend(launcher)):
            plan = zerocast.CastPlan(
                weights, masters, [0] * len(weights), SingleRank(), exchange=exchange
            )
            launcher.launches = 0
            plan.cast()
            plan.all_gather_scales()
            plan.post_all_gather_processing()
        params = [
            (name, zerocast.empty((256, 192), RECIPES[name], device="meta")) for name in names
        ]
        dry = DryRun(params, 0, 1, StepOptions(exchange=exchange, device="cuda"))
        assert dry.launches.total() == launcher.launches, names
