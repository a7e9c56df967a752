"""Plants faults on one of four ranks, on every communicator and in every phase of a step.

A cell of the table is good where every rank that lives ends with an error in time, nothing that was
half written can be read, and the step, repeated by the processes that live with a new group from
the last checkpoint, gives the bytes of the run without a fault. What one rank may do otherwise than
the others is good where no rank has an error, and all have the same bytes.

    scripts/fault_matrix.sh [--only PATTERN] [--communicators threads gloo mpi] [--out FILE]
                            [--patience SECONDS]

Ranks of gloo and of threads run in processes forked for the cell; those of MPI in one job for all
cells that leave the processes alive, and in one of its own for each that ends one. What does not
end within ``--patience`` seconds is ended and called a hang: programs start slowly beside others.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zerocast
from zerocast.cast.prepared_cast import PreparedCast
from zerocast.cast.verified import Verification
from zerocast.comm import (
    Communicator,
    MpiCommunicator,
    TorchDistributedCommunicator,
    run_in_process,
)
from zerocast.optim import ZeroOptimizer

RANKS, FAULTY, TIMEOUT = 4, 1, 3.0
PHASES = (
    "reduce_scatter", "optimizer", "partial_amax", "reduce_amax", "compute_scale", "partial_cast",
    "store_plain", "all_gather_scales", "all_gather", "post_all_gather_processing",
)  # fmt: skip
IN_PHASES = ("raises", "interrupted", "stalls", "signalled while others wait", "killed", "stopped")
ENDS_PROCESS = ("killed", "stopped")
OF_GLOO = ("fsdp2",)
NOT_OF_THREADS = (*ENDS_PROCESS, *OF_GLOO, "signalled while others wait")
STEPS = 3
GOOD = ("error on all living ranks, nothing lost", "no error, the same bytes", "MPI ended")


class Run:
    """One rank's model and optimizer; ``since`` is when the fault could first be noticed."""

    def __init__(
        self,
        comm: Communicator,
        optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
        **options: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(5)
        values = [torch.randn(shape, generator=generator) for shape in ((48, 32), (32, 64), (40,))]
        quantized = [zerocast.quantize(values[0], "nvfp4"), zerocast.quantize(values[1], "mxfp8")]
        tensors = [*quantized, values[2].bfloat16()]
        self.params = [torch.nn.Parameter(tensor) for tensor in tensors]
        self.comm, self.since = comm, time.monotonic()
        named = list(zip("abc", self.params, strict=True))
        self.optimizer = ZeroOptimizer(named, optimizer, comm, **{"lr": 0.1, **options})

    def step(self, number: int) -> None:
        """Make step ``number``, whose gradients are the same on every rank."""
        generator = torch.Generator().manual_seed(100 + number)
        for param in self.params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        self.optimizer.step(number=number)

    def digest(self) -> str | None:
        """Of all weights; None where they cannot be read."""
        digest = hashlib.sha256()
        try:
            for param in self.params:
                is_codes = isinstance(param, zerocast.QuantizedTensor)
                value = param.dequantize() if is_codes else param.detach()
                digest.update(value.float().numpy().tobytes())
        except zerocast.ZerocastError:
            return None
        return digest.hexdigest()


def without_fault() -> list[str | None]:
    """The digests of the weights before a step and after each, on one rank."""
    run = Run(zerocast.comm.SingleRank())
    digests = [run.digest()]
    for number in range(STEPS + 1):
        run.step(number)
        digests.append(run.digest())
    return digests


class AtPhase:
    """Does what a fault does when a phase begins."""

    def __init__(self, phase: str, fault: Callable[[], None]) -> None:
        self.phase, self.fault = phase, fault

    def __call__(self, name: str) -> Any:
        if name == self.phase:
            self.fault()
        return nullcontext()


def _raise(error: BaseException) -> None:
    raise error


def in_phase(fault: str, phase: str) -> Callable[[Run], None]:
    """What a rank does in the second step and after it, with ``fault`` planted in ``phase``."""

    def go_on(run: Run) -> None:
        rank = run.comm.rank
        if fault == "signalled while others wait" and rank == 0:
            threading.Timer(0.7, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        does = {
            "raises": lambda: _raise(OSError("planted")),
            "interrupted": lambda: _raise(KeyboardInterrupt()),
            "stalls": lambda: time.sleep(TIMEOUT + 2),
            "signalled while others wait": lambda: time.sleep(1.5),
            "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        }[fault]
        if rank == FAULTY:
            run.optimizer.on_phase = AtPhase(phase, does)
        for number in range(1, STEPS):
            run.step(number)

    return go_on


def on_faulty(act: Callable[[Run], None]) -> Callable[[Run], None]:
    """``act`` on the faulty rank, and two steps on all."""

    def go_on(run: Run) -> None:
        if run.comm.rank == FAULTY:
            act(run)
        for number in range(1, STEPS):
            run.step(number)

    return go_on


def _other_plan(run: Run, **given: Any) -> None:
    """A plan and a cast on all ranks, with something else on the faulty one."""
    comm, is_faulty = run.comm, run.comm.rank == FAULTY
    weights = [zerocast.empty((32, 32), "nvfp4"), zerocast.empty((32, 32), "mxfp8")]
    masters: list[Any] = [torch.ones(256), torch.ones(256)]
    starts, options = [256 * comm.rank] * 2, dict[str, Any]()
    checks = not (given.get("none checks") or (is_faulty and given.get("unchecked")))
    if is_faulty:
        if given.get("dtype"):
            weights[0] = zerocast.empty((32, 32), "nvfp4", dtype=torch.float16)
        if given.get("rowwise"):
            weights[1] = zerocast.empty((32, 32), "mxfp8", columnwise=False)
        if given.get("count"):
            weights, masters, starts = weights[:1], masters[:1], starts[:1]
        if given.get("overlap"):
            starts[0] -= 16
        if given.get("names"):
            options = {"names": [3, 4]}
        if given.get("recipe"):
            weights[0] = zerocast.empty((32, 32), "current")
        if given.get("order"):
            weights.reverse()
        if given.get("shape"):
            weights[0] = zerocast.empty((16, 64), "nvfp4")
        if given.get("gap"):
            starts[0] += 16
        if given.get("master"):
            masters[0] = torch.ones(256, dtype=torch.float64)
        if given.get("groups"):
            options = {"amax_groups": 7}
        if given.get("short"):
            masters = masters[:1]
    if given.get("verify"):
        options["verify"] = "hash"
    if given.get("moved"):
        options["verify"] = "full"
    broken = {"memory": (PreparedCast, "_prepare", MemoryError()),
              "verify": (Verification, "_numbers", OSError("planted"))}  # fmt: skip
    breaks = [broken[name] for name in broken if is_faulty and given.get(name)]
    with breaking(*breaks[0]) if breaks else nullcontext():
        if is_faulty and given.get("absent"):
            zerocast.quantize_master_weights(weights, masters, starts, comm)
            return
        plan = zerocast.CastPlan(weights, masters, starts, comm, check_finite=checks, **options)
        _cast_by(plan, weights, masters, starts, comm, given)
    run.params = weights


def _cast_by(
    plan: zerocast.CastPlan,
    weights: list[Any],
    masters: list[Any],
    starts: list[int],
    comm: Communicator,
    given: dict[str, Any],
) -> None:
    """Two casts and gathers, with something else on the faulty rank."""
    is_faulty = comm.rank == FAULTY
    if is_faulty and given.get("overflow"):
        masters[0][3] = 3.4e38
    if given.get("twice") == "functional":
        for _ in range(1 + is_faulty):
            zerocast.quantize_master_weights(weights, masters, starts, comm)
    if is_faulty and given.get("nan"):
        masters[0][3] = float("nan")
    if is_faulty and given.get("inf"):
        masters[1][3] = float("inf")
    if is_faulty and given.get("moved"):
        masters[0].data = torch.full((256,), 3.0)
    if is_faulty and given.get("freed"):
        masters[0].untyped_storage().resize_(0)
    if not (is_faulty and given.get("skips") == "cast"):
        plan.cast()
    if is_faulty and given.get("twice") == "cast":
        plan.cast()
    if is_faulty and given.get("size"):
        plan.cast([torch.ones(8), torch.ones(8)])
    elif given.get("size"):
        plan.cast()
    if not (is_faulty and given.get("skips") == "gather"):
        plan.all_gather()
    if is_faulty and given.get("twice") == "gather":
        plan.all_gather()
    plan.cast()
    plan.all_gather()


@contextmanager
def breaking(owner: type, name: str, error: Exception) -> Iterator[None]:
    """Let a method raise on the rank that calls this, which may be one of many threads."""
    rank, method = threading.get_ident(), getattr(owner, name)

    def fail(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == rank:
            raise error
        return method(*args, **kwargs)

    setattr(owner, name, fail)
    try:
        yield
    finally:
        setattr(owner, name, method)


def planned(**given: Any) -> Callable[[Run], None]:
    """A rank's part where plans differ by what is ``given``."""
    return lambda run: _other_plan(run, **given)


def _raising_generator(run: Run) -> None:
    def params() -> Any:
        yield "w", run.params[0]
        if run.comm.rank == FAULTY:
            raise OSError("planted")

    ZeroOptimizer(params(), torch.optim.SGD, run.comm, lr=0.1)


def _bad_weight(run: Run) -> None:
    is_faulty = run.comm.rank == FAULTY
    weight = torch.ones(8, dtype=torch.int64 if is_faulty else torch.float32)
    ZeroOptimizer([("w", torch.nn.Parameter(weight, requires_grad=not is_faulty))], group=run.comm)


def made(optimizer: Any = torch.optim.AdamW, **options: Any) -> Callable[[Run], None]:
    """A rank's part where the faulty one makes another optimizer."""

    def go_on(run: Run) -> None:
        Run(run.comm, **({"optimizer": optimizer, **options} if run.comm.rank == FAULTY else {}))

    return go_on


def loaded(damage: Callable[[dict[str, Any]], Any]) -> Callable[[Run], None]:
    """A rank's part where the faulty one loads a damaged state."""

    def go_on(run: Run) -> None:
        state = run.optimizer.state_dict()
        if run.comm.rank == FAULTY:
            damage(state)
        run.optimizer.load_state_dict(state)

    return go_on


def _without_exp_avg(state: dict[str, Any]) -> None:
    for each in state["state"].values():
        del each["exp_avg"]


def _other_ranks_state(run: Run) -> None:
    states = run.comm.all_gather_object(run.comm.rank)
    state = run.optimizer.state_dict()
    if run.comm.rank == FAULTY:
        state["zero"] = {**state["zero"], "rank": states[0]}
    run.optimizer.load_state_dict(state)


def _closure(run: Run) -> None:
    for param in run.params:
        param.grad = torch.zeros(param.shape, dtype=param.dtype)
    run.optimizer.step(lambda: _raise(OSError("planted")) if run.comm.rank == FAULTY else None)


def _inner(run: Run) -> None:
    if run.comm.rank == FAULTY:
        run.optimizer.inner.step = lambda *_: _raise(OSError("planted"))  # type: ignore[method-assign]
    run.step(1)


def _returns(run: Run) -> None:
    if run.comm.rank != FAULTY:
        run.step(1)


def numbered(*numbers: int) -> Callable[[Run], None]:
    """A rank's part where the faulty one makes these steps instead of 1, 2 and 3."""

    def go_on(run: Run) -> None:
        for number in numbers if run.comm.rank == FAULTY else (1, 2, 3):
            run.step(number)

    return go_on


def _hook(run: Run) -> None:
    if run.comm.rank == FAULTY:
        run.optimizer.register_step_pre_hook(lambda *_: _raise(OSError("planted")))
    run.step(1)


def under_way(signal_: int) -> Callable[[Run], None]:
    """A rank's part where the faulty one gets a signal while codes are gathered."""

    def go_on(run: Run) -> None:
        overlapping = Run(run.comm, overlap_all_gather=True)
        overlapping.step(0)
        if run.comm.rank == FAULTY:
            os.kill(os.getpid(), signal_)
        overlapping.digest()
        overlapping.step(1)

    return go_on


def under_fsdp2(act: Callable[[torch.nn.Module], None]) -> Callable[[Run], None]:
    """A rank's part where the faulty one does something to a model of masters under FSDP2."""

    def go_on(run: Run) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(2)))
        zerocast.nn.convert(model, "nvfp4", weights="master")
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*model, model):
            fully_shard(module, mp_policy=policy)
        for number in range(2):
            run.since = time.monotonic()
            if number and run.comm.rank == FAULTY:
                act(model)
            model(torch.ones(4, 64).bfloat16()).sum().backward()
        for module in (*model, model):
            module.unshard()
        run.params = list(model.parameters())

    return go_on


def _raise_in_forward(model: torch.nn.Module) -> None:
    model[1].register_forward_pre_hook(lambda *_: _raise(OSError("planted")))  # type: ignore[index]


def _write_master(model: torch.nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.to_local().mul_(2)  # type: ignore[index]


def _late(run: Run) -> None:
    if run.comm.rank == FAULTY:
        run.optimizer.on_phase = AtPhase("all_gather", lambda: time.sleep(TIMEOUT / 2))
    run.step(1)


def _other_backend(run: Run) -> None:
    with zerocast.use_backend("reference" if run.comm.rank == FAULTY else "cpu"):
        other = Run(run.comm)
        for number in range(2):
            other.step(number)
    run.params = other.params


def fed(value: float | None) -> Callable[[Run], None]:
    """A rank's part where the faulty one has such gradients, or none."""

    def go_on(run: Run) -> None:
        for param in run.params:
            is_other = run.comm.rank == FAULTY
            given = value if is_other else 1.0
            param.grad = None if given is None else torch.full(param.shape, given).to(param.dtype)
        run.optimizer.step()

    return go_on


def _set_lr(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] = 0.7


OTHERS: dict[str, Callable[[Run], None]] = {
    "plan: another recipe": planned(recipe=True),
    "plan: another order": planned(order=True),
    "plan: another shape": planned(shape=True),
    "plan: a gap": planned(gap=True),
    "plan: a bad master": planned(master=True),
    "plan: a list that is too short": planned(short=True),
    "plan: amax_groups=7": planned(groups=True),
    "plan: another dtype": planned(dtype=True),
    "plan: another columnwise copy": planned(rowwise=True),
    "plan: another number of weights": planned(count=True),
    "plan: another check_finite": planned(unchecked=True),
    "plan: an overlap": planned(overlap=True),
    "plan: names that are no text": planned(names=True),
    "plan: MemoryError after the agreement": planned(memory=True),
    "plan: made by the others only": planned(absent=True),
    "cast: NaN in a master": planned(nan=True),
    "cast: Inf in a master": planned(inf=True),
    "cast: masters of another size": planned(size=True),
    "cast: a master whose memory was freed": planned(freed=True),
    "cast: skipped": planned(skips="cast"),
    "cast: twice": planned(twice="cast"),
    "cast: a value that overflows BF16": planned(overflow=True),
    "cast: functional, twice": planned(twice="functional"),
    "gather: skipped": planned(skips="gather"),
    "gather: twice": planned(twice="gather"),
    "verify: raises while ranks compare": planned(verify=True),
    "optimizer: a bad weight": _bad_weight,
    "optimizer: another lr": made(lr=0.2),
    "optimizer: another class": made(torch.optim.SGD),
    "optimizer: another bucket size": made(bucket_size=512),
    "optimizer: another overlap": made(overlap_all_gather=True),
    "optimizer: generator raises": _raising_generator,
    "optimizer: another lr later": on_faulty(_set_lr),
    "optimizer: a weight moved": on_faulty(
        lambda run: setattr(run.params[2], "data", run.params[2].data.clone())
    ),
    "step: closure raises": _closure,
    "step: inner step raises": _inner,
    "step: skipped, and returned": _returns,
    "step: a hook raises": _hook,
    "step: left out in the middle": numbered(2, 3),
    "step: made twice in the middle": numbered(1, 1, 2, 3),
    "step: one more than the others": numbered(1, 2, 3, 4),
    "clip_grad_norm_ on one rank": on_faulty(lambda run: run.optimizer.clip_grad_norm_(1.0)),
    "load: a damaged state": loaded(lambda state: state.pop("zero")),
    "load: a state of another format": loaded(lambda state: state["zero"].update(format=99)),
    "load: a state of other numerics": loaded(lambda state: state["zero"].update(numerics=99)),
    "load: a state without exp_avg": loaded(_without_exp_avg),
    "killed while codes are gathered": under_way(signal.SIGKILL),
    "stopped while codes are gathered": under_way(signal.SIGSTOP),
    "load: another rank's state": _other_ranks_state,
    "fsdp2: raises in a forward": under_fsdp2(_raise_in_forward),
}

HARMLESS: dict[str, Callable[[Run], None]] = {
    "may be late, in time": _late,
    "may have another backend": _other_backend,
    "may have no gradient": fed(None),
    "may have a gradient of NaN": fed(float("nan")),
    "fsdp2: may write its master": under_fsdp2(_write_master),
    "may move a master": planned(moved=True),
    "may have NaN, where none checks": planned(nan=True, **{"none checks": True}),
}
STEPS_OF = {"may be late, in time": 2, "may have another backend": 2}
"""Those after which the weights are those of the run without a fault, after so many steps."""

CELLS = {
    **{f"{fault}, {phase}": in_phase(fault, phase) for fault in IN_PHASES for phase in PHASES},
    **OTHERS,
    **HARMLESS,
}


# --- a rank ---


def first_part(comm: Communicator, cell: str) -> tuple[dict[str, Any], bytes]:
    """What this rank saw of a fault, and its checkpoint of the step before."""
    run = Run(comm)
    run.step(0)
    buffer = io.BytesIO()
    torch.save(run.optimizer.state_dict(), buffer)
    run.since, error = time.monotonic(), None
    try:
        CELLS[cell](run)
    except BaseException as e:
        error = e
    saw = {
        "error": type(error).__name__ if error else None,
        "text": str(error)[:300],
        "ours": isinstance(error, zerocast.ZerocastError),
        "seconds": round(time.monotonic() - run.since, 1),
        "digest": run.digest(),
    }
    return saw, buffer.getvalue()


def second_part(comm: Communicator, checkpoint: bytes) -> str | None:
    """The weights after the faulty step, repeated from the checkpoint."""
    run = Run(comm)
    run.optimizer.load_state_dict(torch.load(io.BytesIO(checkpoint), weights_only=True))
    run.step(1)
    return run.digest()


def write(folder: Path, rank: int, saw: dict[str, Any]) -> None:
    """Leave what a rank saw, whole or not at all."""
    path = folder / f"{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(saw))
    path.with_suffix(".part").rename(path)


def threads_cell(cell: str, folder: Path) -> None:
    """All ranks of a cell, as threads of this process."""
    saws: list[Any] = [None] * RANKS

    def body(comm: Communicator) -> None:
        saws[comm.rank] = first_part(comm, cell)

    with suppress(BaseException):  # each rank has noted its own
        run_in_process(RANKS, body, timeout=TIMEOUT)
    while None in saws:
        time.sleep(0.05)
    again = run_in_process(RANKS, lambda comm: second_part(comm, saws[comm.rank][1]))
    for rank, (saw, _) in enumerate(saws):
        write(folder, rank, {**saw, "again": again[rank]})


def gloo_rank(cell: str, folder: Path, rank: int) -> None:
    """One rank of a cell, in a process of its own."""
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    comm = TorchDistributedCommunicator(dist.group.WORLD, timeout=TIMEOUT)
    saw, checkpoint = first_part(comm, cell)
    write(folder, rank, saw)
    if ends(cell):
        return
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / "again"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    again = second_part(TorchDistributedCommunicator(dist.group.WORLD, timeout=30), checkpoint)
    write(folder, rank, {**saw, "again": again})
    dist.destroy_process_group()


def mpi_rank(cells: list[str], folder: Path) -> None:
    """One rank of a job, cell after cell, each with a group of its own."""
    from mpi4py import MPI

    for cell in cells:
        comm = MpiCommunicator(MPI.COMM_WORLD.Dup(), timeout=TIMEOUT)
        here = folder / slug(cell)
        here.mkdir(exist_ok=True)
        saw, checkpoint = first_part(comm, cell)
        write(here, comm.rank, saw)
        if not ends(cell):
            again = second_part(MpiCommunicator(MPI.COMM_WORLD.Dup(), timeout=30), checkpoint)
            write(here, comm.rank, {**saw, "again": again})


# --- the table ---


def ends(cell: str) -> bool:
    """Whether the faulty process ends."""
    return cell.startswith(ENDS_PROCESS)


def slug(cell: str) -> str:
    """A folder's name."""
    return "".join(c if c.isalnum() else "_" for c in cell)


def forked(function: Callable[[], None]) -> int:
    """The id of a process that runs ``function`` and ends."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        function()
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def wait_for(pids: list[int], needed: Callable[[], bool], patience: float) -> bool:
    """Wait until all processes have ended, or those that are ``needed`` have; whether in time."""
    left, until = list(pids), time.monotonic() + patience
    while left and time.monotonic() < until and not needed():
        left = [pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == 0]
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return time.monotonic() < until


def judged(cell: str, folder: Path, whole: list[str | None], in_time: bool, *, ended: str) -> str:
    """What is written into the table."""
    saws = {
        rank: json.loads((folder / f"{rank}.json").read_text())
        for rank in range(RANKS)
        if (folder / f"{rank}.json").exists()
    }
    living = [rank for rank in range(RANKS) if not (ends(cell) and rank == FAULTY)]
    missing = [rank for rank in living if rank not in saws]
    if missing:
        return ended if ended and ends(cell) else f"HANG or death of ranks {missing}"
    problems = []
    if not in_time:
        problems.append("a process did not end")
    if cell in HARMLESS:
        digests = {saws[rank]["digest"] for rank in living}
        is_same = digests == {whole[STEPS_OF[cell]]} if cell in STEPS_OF else len(digests) == 1
        problems += [f"rank {r} raised {saws[r]['error']}: {saws[r]['text']}"
                     for r in living if saws[r]["error"]]  # fmt: skip
        if None in digests or not is_same:
            problems.append("ranks hold other bytes")
        return "; ".join(problems) or "no error, the same bytes on all ranks"
    for rank in living:
        saw = saws[rank]
        is_own = rank == FAULTY or (rank == 0 and cell.startswith("signalled"))
        returned = rank == FAULTY and cell.startswith("step: skipped")
        returned |= rank != FAULTY and cell.startswith("step: one more")  # all steps were made
        if saw["error"] is None and not returned:
            problems.append(f"rank {rank} has no error")
        elif saw["error"] and not saw["ours"] and not is_own and not cell.startswith(OF_GLOO):
            problems.append(f"rank {rank} raised {saw['error']}")
        if saw["digest"] is not None and saw["digest"] not in whole:
            problems.append(f"rank {rank} can read weights of two steps")
        if not ends(cell) and saw.get("again") != whole[2]:
            problems.append(f"rank {rank} cannot repeat the step")
    slowest = max(saws[rank]["seconds"] for rank in living)
    if slowest > TIMEOUT + 3:
        problems.append("late")
    kinds = "/".join(sorted({str(saws[r]["error"]) for r in living if saws[r]["ours"]}))
    said = "; ".join(problems) or "error on all living ranks, nothing lost"
    return f"{said}, in {slowest:.1f} s ({kinds})"


def run_forked(kind: str, cell: str, whole: list[str | None], patience: float) -> str:
    """What a cell on threads or gloo gave."""
    folder = Path(tempfile.mkdtemp())
    try:
        if kind == "threads":
            pids = [forked(lambda: threads_cell(cell, folder))]
        else:
            pids = [forked(lambda r=rank: gloo_rank(cell, folder, r)) for rank in range(RANKS)]

        def rest_is_done() -> bool:
            others = [rank for rank in range(RANKS) if rank != FAULTY]
            return ends(cell) and all((folder / f"{rank}.json").exists() for rank in others)

        in_time = wait_for(pids, rest_is_done, patience)
        return judged(cell, folder, whole, in_time, ended="")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_mpi(cells: list[str], whole: list[str | None], patience: float) -> dict[str, str]:
    """What the cells of one MPI job gave."""
    folder = Path(tempfile.mkdtemp())
    mpiexec = os.environ.get("MPIEXEC", "mpiexec")
    command = [mpiexec, "-n", str(RANKS), sys.executable, __file__, "--mpi-rank", str(folder)]
    ended, in_time = "", True
    try:
        job = subprocess.run(
            [*command, *cells], timeout=patience + 10 * len(cells), capture_output=True, check=False
        )
        ended = f"MPI ended the whole job (status {job.returncode})"
    except subprocess.TimeoutExpired:
        in_time = False
    found = {c: judged(c, folder / slug(c), whole, in_time, ended=ended) for c in cells}
    shutil.rmtree(folder, ignore_errors=True)
    return found


def main() -> None:
    """Print the table; the exit status says whether a cell is bad."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of the cells' names")
    parser.add_argument("--communicators", nargs="+", default=["threads", "gloo", "mpi"])
    parser.add_argument("--out", type=Path, help="where the table is written, too")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds for a cell")
    parser.add_argument("--mpi-rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("cells", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    torch.set_num_threads(1)
    if args.mpi_rank is not None:
        mpi_rank(args.cells, args.mpi_rank)
        return
    whole, patience = without_fault(), args.patience
    lines, bad = [], 0
    cells = [cell for cell in CELLS if any(fnmatch.fnmatch(cell, each) for each in args.only)]
    for kind in args.communicators:
        others = {"threads": NOT_OF_THREADS, "mpi": OF_GLOO}.get(kind, ())
        own = [cell for cell in cells if not cell.startswith(others)]
        alive = [cell for cell in own if not ends(cell)]
        of_mpi: dict[str, str] = run_mpi(alive, whole, patience) if kind == "mpi" and alive else {}
        for cell in own:
            if kind != "mpi":
                said = run_forked(kind, cell, whole, patience)
            else:
                said = of_mpi.get(cell) or run_mpi([cell], whole, patience)[cell]
            good = said.startswith(GOOD)
            bad += not good
            lines.append(f"{'good' if good else 'BAD '} {kind:8} {cell:46} {said}")
            print(lines[-1], flush=True)
    lines.append(f"{len(lines)} cells, {bad} bad; {RANKS} ranks, timeout {TIMEOUT:g} s")
    print(lines[-1])
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
