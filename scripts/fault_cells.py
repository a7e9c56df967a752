"""The cells of scripts/fault_matrix.py: what one rank of four does otherwise than the others.

A cell is a rank's part from the second step on, the same function on every rank. Who runs it is in
fault_transports.py, and what has to come of it in fault_matrix.py.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zerocast
from zerocast.cast.prepared_cast import PreparedCast
from zerocast.cast.verified import Verification
from zerocast.comm import Communicator
from zerocast.optim import ZeroOptimizer

RANKS, FAULTY, TIMEOUT = 4, 1, 3.0
PHASES = (
    "reduce_scatter", "optimizer", "partial_amax", "reduce_amax", "compute_scale", "partial_cast",
    "store_plain", "all_gather_scales", "all_gather", "post_all_gather_processing",
)  # fmt: skip
WITH_STORE = ("killed with the store", "stopped with the store")
"""How cells begin in which the faulty rank serves the group's store."""
IN_PHASES = ("raises", "interrupted", "stalls", "signalled while others wait", "killed", "stopped",
             *WITH_STORE)  # fmt: skip
ENDS_PROCESS = ("killed", "stopped", "exits")
"""How cells begin whose faulty process ends."""
ALL_EXIT = "may all exit while codes are gathered"
OF_GLOO = ("fsdp2",)
NOT_OF_THREADS = (*ENDS_PROCESS, ALL_EXIT, *OF_GLOO, "signalled while others wait")
STEPS = 3
PLANNED = "nvfp4", "mxfp8"
"""The recipes of the weights of cells that make plans: zeros at first, whose masters are ones."""


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
            "killed": _by_signal(signal.SIGKILL),
            "stopped": _by_signal(signal.SIGSTOP),
        }[fault.removesuffix(" with the store")]
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
    weights = [zerocast.quantize(torch.zeros(32, 32), r, dtype=torch.bfloat16) for r in PLANNED]
    run.params = list(weights)
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
    state["state"] = {k: v for k, v in state["state"].items() if not k.endswith(".exp_avg")}


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


def under_way(act: Callable[[], object], on: tuple[int, ...] = (FAULTY,)) -> Callable[[Run], None]:
    """A rank's part where one rank, or some, ``act`` while codes are gathered."""

    def go_on(run: Run) -> None:
        overlapping = Run(run.comm, overlap_all_gather=True)
        overlapping.step(0)
        if run.comm.rank in on:
            act()
        overlapping.digest()
        overlapping.step(1)

    return go_on


def _exit() -> None:
    """End the interpreter as the end of a program does, from any depth."""
    sys.stdout.flush()
    ctypes.pythonapi.Py_Exit(0)


def _by_signal(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


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
    "killed while codes are gathered": under_way(_by_signal(signal.SIGKILL)),
    "stopped while codes are gathered": under_way(_by_signal(signal.SIGSTOP)),
    "exits while codes are gathered": under_way(_exit),
    "sys.exit while codes are gathered": under_way(lambda: sys.exit(3)),
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
    ALL_EXIT: under_way(_exit, on=tuple(range(RANKS))),
}
NOT_GATHERED = ("cast: twice", "cast: functional, twice", "cast: masters of another size",
                "gather: skipped")  # fmt: skip
"""Cells in which ranks read weights between a plan's cast and the caller's gather: codes of two
casts, and nobody can know.
"""
STEPS_OF = {"may be late, in time": 2, "may have another backend": 2}
"""Those after which the weights are those of the run without a fault, after so many steps."""

CELLS = {
    **{f"{fault}, {phase}": in_phase(fault, phase) for fault in IN_PHASES for phase in PHASES},
    **OTHERS,
    **HARMLESS,
}


def ends(cell: str) -> bool:
    """Whether the faulty process ends, or all do."""
    return cell.startswith((*ENDS_PROCESS, ALL_EXIT))
