"""What a refit moves, how long it takes, and what it holds: the tables of docs/refit.md.

    python scripts/refit_report.py                       # all of it
    python scripts/refit_report.py deltas --steps 1000   # the long one

traffic: bytes that a rank sends for each element of the weights, counted by the recording
communicator. transport: refit beside gathering BF16 and quantizing on one rank, by the clock over a
link that is slowed down to ``--gigabytes`` a second (``slow_link.py``), weight by weight, and with
the next weight gathered meanwhile; in brackets CPU time of the busiest rank, and what its bytes
take. deltas: bytes an element at several learning rates, for a GPT that was trained before; every
step's delta is applied and compared with a full cast. time: what finding changes takes beside the
cast. memory: what a process of four ranks holds more at its peak.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from slow_link import SlowLink, keep_freed_memory, run_in_processes

import zerocast
from zerocast.backends.reference.digest_formula import as_integers
from zerocast.comm import Communicator, RecordingCommunicator, run_in_process
from zerocast.layout import chunk
from zerocast.numerics import Comparison
from zerocast.refit import Receiver, Refit
from zerocast.refit.delta import changed_segments

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

RANKS = 4
DIALECTS = ("deepseek/fp8", "modelopt/mxfp8", "modelopt/nvfp4")
SHAPES = [(4096, 4096), (1024, 4096), (4096, 4096), (11008, 4096)]  # of a model of 7B parameters
RATES = (1e-6, 3e-6, 1e-5)
BUCKET_BYTES = 64 << 20
"""More than the largest tensor in codes of 8 bits: what has no room beside it goes alone."""


def sharded(comm: Communicator, values: list[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """A plan over rows of BF16 values, as FSDP2 cuts them, and this rank's rows."""
    own = [chunk(value.shape[0], comm.rank, comm.size) for value in values]
    rows = [value[each.start : each.end] for value, each in zip(values, own, strict=True)]
    plan = zerocast.CastPlan(
        [zerocast.empty(value.shape, "block", dtype=torch.bfloat16) for value in values],
        rows,
        [each.start * value.shape[1] for value, each in zip(values, own, strict=True)],
        comm,
        names=[f"layers.{i}.weight" for i in range(len(values))],
    )
    return plan, rows


def drawn(shapes: list[tuple[int, int]], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Weights as a model has them."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=generator) * 0.02).to(dtype) for shape in shapes]


def refit_of(plan: zerocast.CastPlan, dialect: str, comm: Communicator, **options: Any) -> Refit:
    """From the masters of ``plan``, 16-bit ones as they are."""
    return Refit(plan, dialect, from_masters=True, dtype=torch.bfloat16, group=comm, **options)


def traffic() -> None:
    """Bytes by kind of collective."""
    values = drawn(SHAPES)
    elements = sum(value.numel() for value in values)
    print(f"bytes sent by each of {RANKS} ranks, times D / (D - 1), over {elements:,} elements")
    for dialect in DIALECTS:

        def run(comm: Communicator, dialect: str = dialect) -> dict[str, float]:
            recording = RecordingCommunicator(comm)
            plan, _ = sharded(recording, values)
            refit = refit_of(plan, dialect, recording)
            found = {}
            for name in ("named_tensors", "shards"):
                recording.reset()
                for _ in getattr(refit, name)():
                    pass
                for kind in ("all_gather", "all_reduce", "all_gather_object"):
                    sent = recording.total(kind=kind).sent_bytes
                    found[f"{name} {kind}"] = sent * RANKS / (RANKS - 1) / elements
            return found

        by_rank = run_in_process(RANKS, run)
        most = {key: max(found[key] for found in by_rank) for key in by_rank[0]}
        print(f"  {dialect}: " + ", ".join(f"{key} {value:.5f}" for key, value in most.items()))


def transport(gigabytes: float, rounds: int) -> None:
    """Interleaved rounds of all ways, over links of one rate, a core for each rank."""
    values = drawn(SHAPES * 4)
    elements = sum(value.numel() for value in values)
    ranks = min(RANKS, os.cpu_count() or 1)
    keep_freed_memory()
    print(f"milliseconds over {gigabytes} GB/s, medians of {rounds} interleaved rounds of {ranks} "
          f"ranks, a process and a core each; {elements:,} elements")  # fmt: skip
    for dialect in DIALECTS:

        def run(comm: Communicator, dialect: str = dialect) -> list[list[Cost]]:
            link = SlowLink(comm, gigabytes * 1e9)
            plan, rows = sharded(link, values)
            refit = refit_of(plan, dialect, link, bucket_bytes=BUCKET_BYTES)
            recipe = zerocast.export.DIALECTS[dialect].recipe

            def begin(own: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
                whole = torch.empty(link.size, *own.shape, dtype=torch.bfloat16)
                whole[link.rank].copy_(own)
                return whole.view(-1, own.shape[1]), link.start_all_gather_(whole.view(-1))

            def quantize(value: torch.Tensor) -> None:
                if link.rank == 0:  # one rank quantizes and sends
                    zerocast.quantize(value, recipe, columnwise=False)

            def one_by_one() -> None:
                for own in rows:
                    value, wait = begin(own)
                    wait()
                    quantize(value)

            def overlapped() -> None:
                value, wait = begin(rows[0])
                for own in rows[1:]:
                    wait()
                    gathered, (value, wait) = value, begin(own)
                    quantize(gathered)
                wait()
                quantize(value)

            def refitted() -> None:
                for _ in refit.named_tensors():
                    pass

            ways = (one_by_one, overlapped, refitted)
            return [[cost(way, link) for way in ways] for _ in range(rounds)]

        by_rank = run_in_processes(ranks, max(value.nbytes for value in values), run)
        # Of each way the medians over the rounds of what the slowest rank took.
        medians = [
            [
                statistics.median(
                    max(rank[i][way][what] for rank in by_rank) for i in range(rounds)
                )
                for what in range(3)
            ]
            for way in range(3)
        ]
        costs = "; ".join(
            f"{name} {1e3 * clock:.0f} (CPU {1e3 * cpu:.0f}, link {sent / gigabytes / 1e6:.0f})"
            for name, (clock, cpu, sent) in zip(WAYS, medians, strict=True)
        )
        *others, ours = (clock for clock, *_ in medians)
        print(f"  {dialect}: {costs}; " + ", ".join(f"{other / ours:.2f}x" for other in others))


WAYS = ("gather, then quantize", "gather the next meanwhile", "refit")

Cost = tuple[float, float, float]
"""Seconds by the clock until all ranks are done; this rank's CPU seconds and bytes sent."""


def cost(function: Callable[[], None], link: SlowLink) -> Cost:
    """What it takes."""
    link.reset()
    link.comm.barrier()
    clock, cpu = time.perf_counter(), time.thread_time()
    function()
    cpu = time.thread_time() - cpu
    link.comm.barrier()
    return time.perf_counter() - clock, cpu, link.total().sent_bytes


def timed(
    function: Callable[[], None],
    comm: Communicator,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds until all ranks have run it."""
    comm.barrier()
    start = clock()
    function()
    comm.barrier()
    return clock() - start


# --- deltas ---


def deltas(steps: int, pretraining: int, rates: list[float]) -> None:
    """Fine-tune a small GPT at each rate; apply every delta."""
    from gpt.data import load_corpus, sample
    from gpt.model import GPT

    corpus, draw = load_corpus(), torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = GPT(layers=2, width=128)

    def train(optimizer: torch.optim.Optimizer) -> None:
        model(*sample(corpus.training, 4, GPT.context, draw)).backward()
        optimizer.step()
        optimizer.zero_grad()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(pretraining):
        train(optimizer)
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    print(f"bytes an element of the linear layers in each of {steps} deltas; every byte compared")
    print(f"  after {pretraining} steps at 1e-3; headers are about 0.4 kB a weight of these")
    for rate in rates:
        model.load_state_dict(trained)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        options: dict[str, Any] = {"include": ["blocks.*"], "dtype": torch.bfloat16}
        feeds = {
            "FP8": Refit(model, "deepseek/fp8", **options),
            "NVFP4": Refit(model, "modelopt/nvfp4", **options),
            "NVFP4, amax held": Refit(model, "modelopt/nvfp4", hold_tensor_amax=True, **options),
        }
        receivers = {name: Receiver() for name in feeds}
        sent = dict.fromkeys([*feeds, "BF16"], 0)
        linear = {n: p for n, p in model.named_parameters() if "blocks" in n and p.dim() == 2}
        snapshot = {name: p.detach().bfloat16() for name, p in linear.items()}
        for step in range(steps + 1):
            for name, refit in feeds.items():
                for tensor, delta in refit.deltas(receivers[name].version):
                    receivers[name].apply_delta(tensor, delta)
                    if step and tensor.partition(".weight")[0] + ".weight" in linear:
                        sent[name] += delta.nbytes
                check_equal(receivers[name], refit)
            for name, p in linear.items() if step else ():
                old, new = (as_integers(each) for each in (snapshot[name], p.detach().bfloat16()))
                (segment,), _ = changed_segments([Comparison(old, new, 0)])
                sent["BF16"] += segment.data.nbytes
            train(optimizer)
        elements = sum(p.numel() for p in linear.values())
        print(f"  {rate:g}: " + ", ".join(
            f"{name} {total / steps / elements:.5f}" for name, total in sent.items()
        ), flush=True)  # fmt: skip


def check_equal(receiver: Receiver, refit: Refit) -> None:
    """Every byte that is held is that of a full cast."""
    for name, tensor in refit.named_tensors():
        held = receiver.tensors[name]
        assert torch.equal(held.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


def extra_time(rounds: int) -> None:
    """Deltas beside the cast that they begin with, on one rank, and no gather."""
    values = drawn(SHAPES, torch.float32)
    keep_freed_memory()  # both cast into new memory
    print(f"CPU seconds, medians of {rounds} interleaved rounds on one rank, 1 in 300 "
          f"elements changed")  # fmt: skip
    comm = zerocast.comm.SingleRank()
    for dialect in DIALECTS:
        plan, _ = sharded(comm, values)
        refit = refit_of(plan, dialect, comm, hold_tensor_amax=True)
        for _ in refit.deltas():
            pass
        times: list[tuple[float, float]] = []
        for i in range(rounds):
            generator = torch.Generator().manual_seed(i)
            for value in values:
                value[torch.rand(value.shape, generator=generator) < 1 / 300] *= 1.1

            def cast(refit: Refit = refit) -> None:
                for _ in refit.shards():
                    pass

            def find(refit: Refit = refit) -> None:
                for _ in refit.deltas(refit.version):
                    pass

            clock = time.process_time
            times.append((timed(cast, comm, clock), timed(find, comm, clock)))
        before, after = (statistics.median(each) for each in zip(*times, strict=True))
        print(f"  {dialect}: cast {before:.4f}, cast and deltas {after:.4f}: "
              f"{100 * (after / before - 1):.0f} % more")  # fmt: skip


# --- memory ---


def memory() -> None:
    """The high-water mark of a process whose threads are the ranks, above what it held before."""
    shapes, bucket = [(1024, 1024)] * 96, 4 << 20
    elements = sum(rows * columns for rows, columns in shapes)
    print(f"MB above the masters, of {RANKS} ranks in one process; {elements:,} elements, buckets "
          f"of {bucket / 1e6:.1f} MB")  # fmt: skip
    for dialect in DIALECTS:
        values = drawn(shapes)
        marks: dict[str, float] = {}

        def run(
            comm: Communicator, dialect: str = dialect, marks: Any = marks, values: Any = values
        ) -> None:
            plan, _ = sharded(comm, values)
            refit = refit_of(plan, dialect, comm, bucket_bytes=bucket)
            for name in ("named_tensors", "shards"):
                comm.barrier()
                if comm.rank == 0:
                    before = reset_mark()
                comm.barrier()
                for _ in getattr(refit, name)():
                    pass
                comm.barrier()
                if comm.rank == 0:
                    marks[name] = (status("VmHWM") - before) / 1e6

        run_in_process(RANKS, run)
        bits = zerocast.export.DIALECTS[dialect].recipe.numerics.fmt.bits
        whole = RANKS * elements * bits / 8 / 1e6
        print(f"  {dialect}: " + ", ".join(f"{n} {m:.0f}" for n, m in marks.items())
              + f"; whole codes on every rank are {whole:.0f}")  # fmt: skip


def status(field: str) -> int:
    """Bytes, of Linux's account of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def reset_mark() -> int:
    """Let the high-water mark begin at what is resident now, which is returned."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def main() -> None:
    """Print the parts that are asked for."""
    parts = ["traffic", "transport", "deltas", "time", "memory"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=parts, help=", ".join(parts))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--pretraining", type=int, default=300)
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    arguments = parser.parse_args()
    runs: dict[str, Callable[[], None]] = {
        "traffic": traffic,
        "transport": lambda: transport(arguments.gigabytes, arguments.rounds),
        "deltas": lambda: deltas(arguments.steps, arguments.pretraining, arguments.rates),
        "time": lambda: extra_time(arguments.rounds),
        "memory": memory,
    }
    for part in arguments.parts:
        runs[part]()


if __name__ == "__main__":
    main()
