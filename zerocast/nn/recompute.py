"""Lets layers inside activation checkpoints quantize in the second run as in the first.

``torch.utils.checkpoint`` runs a function once in the forward and once more in the backward, when
the region of :class:`zerocast.autocast` has usually been left and the scales of delayed scaling
have moved on. Its caller (a trainer, a model's own switch, a wrapper) seldom handles regions. So a
layer itself finds out whether it runs inside such a function. In the first run it stores, with the
checkpoint, its region and the scales from which its casts start; in the second run it uses both
again, and records no amaxes.

Note: how a checkpoint is found
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torch has no call that says whether a checkpoint is running, so the call stack is searched for the
functions of checkpoints. Each such function holds one object that exists as long as the
checkpoint's graph: for the reentrant kind the node of the graph, for the other kind the frame that
counts saved tensors. Notes are attributes of that object. Nested checkpoints are found in their
order: those between the layer and the nearest recomputation run for the first time, and each gets
separate notes. A compiled graph repeats some operations of its forward in its backward, so each
operation has separate notes, kept with the node of the graph.

A recomputation by another function (a framework's own checkpoint) is not found. If a layer runs
inside a backward without notes and could not make the codes of its first run again, it raises
UnsupportedError.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from inspect import unwrap
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple, Protocol

import torch

from zerocast.errors import UnsupportedError
from zerocast.nn import regions
from zerocast.nn.autocast import autocast
from zerocast.nn.quantizer import RecomputeState, current_recompute_state, recording, replaying
from zerocast.nn.regions import Autocast
from zerocast.recipes import Recipe

Run = Literal["first", "again"]

_NOTES = "_zerocast_notes"


class QuantizedLayer(Protocol):
    """The attributes that are read of a :class:`zerocast.nn.quantized_module.QuantizedModule`."""

    name: str
    _states: Any
    _quantizers: Any
    _latest_recipe: Recipe | None


class _Run(NamedTuple):
    """The region and the recipe states of one run of a layer, which has other states after a run
    under another recipe.
    """

    region: Autocast
    states: Any
    quantizers: Any


class _Notes:
    """The regions and states of the layers that ran inside one checkpoint, in the order of their
    runs.
    """

    def __init__(self) -> None:
        self.state = RecomputeState()
        self._runs: dict[QuantizedLayer, list[_Run]] = {}
        self._unread: dict[QuantizedLayer, Iterator[_Run]] = {}
        self._task: int | None = None

    def add(self, layer: QuantizedLayer, region: Autocast) -> None:
        run = _Run(region, layer._states, getattr(layer, "_quantizers", None))
        self._runs.setdefault(layer, []).append(run)

    def next(self, layer: QuantizedLayer) -> _Run | None:
        """Return the layer's next run; each backward starts with the first one."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self.state.rewind()
            self._unread = {layer: iter(runs) for layer, runs in self._runs.items()}
        return next(self._unread.get(layer, iter(())), None)


def as_in_first_run(layer: QuantizedLayer, site: int | None = None) -> AbstractContextManager[None]:
    """Within the context ``layer`` runs under the region that is active, or, in a recomputation,
    under that of its first run.

    Args:
        layer: the layer that runs.
        site: the number of the operation in a compiled graph, where it is one.

    Raises:
        UnsupportedError: in a recomputation by another function than torch's, where the codes of
            the first run cannot be made again.
    """
    if not regions.were_entered:
        return nullcontext()
    return _as_in_first_run(layer, site)


@contextmanager
def _as_in_first_run(layer: QuantizedLayer, site: int | None) -> Iterator[None]:
    present = regions.current() if site is None else regions.entered()
    region, in_backward = present, torch._C._current_graph_task_id() != -1
    checkpoints = _checkpoints(site)
    with ExitStack() as stack:
        if checkpoints and checkpoints[0].run == "again":
            _, owner, name = checkpoints.pop(0)
            notes: _Notes | None = getattr(owner, name, None)
            noted = None if notes is None else notes.next(layer)
            if notes is None or noted is None:
                _refuse_other_codes(layer, region)
            else:
                region = noted.region
                stack.enter_context(recording(notes.state))
                stack.enter_context(_with_state_of(layer, noted))
        elif in_backward:
            _refuse_other_codes(layer, region)
        else:
            layer._latest_recipe = region.recipe if region.enabled else None
        active = region
        for _, owner, name in checkpoints:
            notes = getattr(owner, name, None)
            if notes is None:
                notes = _Notes()
                setattr(owner, name, notes)
            stack.callback(notes.add, layer, region)
            stack.enter_context(recording(notes.state))
            # The first run of the reentrant kind has gradients disabled; it is no evaluation.
            if region.enabled and name == _NOTES and bool(getattr(owner, "next_functions", None)):
                active = replace(region, calibrating=True)
        if active is not present:
            stack.enter_context(regions.resumed(active))
        yield


@contextmanager
def _with_state_of(layer: QuantizedLayer, run: _Run) -> Iterator[None]:
    """Within the context ``layer`` has the recipe states of ``run``."""
    if run.states is None or run.states is layer._states:
        yield
        return
    now = layer._states, layer._quantizers
    layer._states, layer._quantizers = run.states, run.quantizers
    try:
        yield
    finally:
        layer._states, layer._quantizers = now


class _UnderRegion(NamedTuple):
    """A checkpoint's function that runs under a region."""

    function: Callable[..., Any]
    region: Autocast

    def __call__(self, *args: Any, **options: Any) -> Any:
        with regions.resumed(self.region):
            return self.function(*args, **options)


def keep_region() -> None:
    """Make torch's checkpoints around a compiled function compute it again under the region that is
    active now, for which it was compiled. Operations of its graph call this.
    """
    region = regions.entered()
    if not region.enabled:
        return
    for run, owner, _ in _checkpoints(None):
        for name in ("run_function", "recompute_fn"):  # of either kind of checkpoint
            function = getattr(owner, name, None)
            if run == "first" and function is not None and type(function) is not _UnderRegion:
                setattr(owner, name, _UnderRegion(function, region))


def _refuse_other_codes(layer: QuantizedLayer, region: Autocast) -> None:
    """Raise where ``region`` may give other codes than the layer's forward made."""
    recipe, recompute_state = layer._latest_recipe, current_recompute_state()
    if recipe is None or (recompute_state is not None and recompute_state.replays):
        return
    if region.enabled and region.recipe == recipe and not recipe.has_state:
        return
    raise UnsupportedError(
        f"{layer.name or type(layer).__name__} ran under zerocast.autocast with "
        f"{type(recipe).__name__}, and runs again inside a backward"
        f"{'' if region.enabled else ', outside of that region'}: a recomputation that is not "
        f"torch.utils.checkpoint's, which would make other codes than the forward did. Use "
        f"zerocast.nn.checkpoint or torch.utils.checkpoint.checkpoint, or pass "
        f"context_fn=zerocast.checkpoint_contexts to what takes that argument."
    )


class _Checkpoint(NamedTuple):
    """A checkpoint on the call stack: whether its function runs for the first time or again, the
    object that exists as long as its graph, and the attribute of that object that holds the notes.
    """

    run: Run
    owner: Any
    name: str


def _checkpoints(site: int | None) -> list[_Checkpoint]:
    """Return the checkpoints whose function is running, the outermost first, beginning with the
    innermost recomputation where there is one.
    """
    calls = _calls()
    found: list[_Checkpoint] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        call = calls.get(id(frame.f_code))
        if call is not None:
            run, name = call
            owner = frame.f_locals.get(name)
            if name == "gen":  # the other kind's frame is a local of a generator that waits
                waiting = getattr(owner, "gi_frame", None)
                owner = None if waiting is None else waiting.f_locals.get("new_frame")
            if owner is not None:
                found.append(_Checkpoint(run, owner, _NOTES))
                if run == "again":
                    break
        elif site is not None and (compiled := _run_of_graph(frame.f_code)) is not None:
            found.append(_Checkpoint(compiled, frame.f_locals["ctx"], f"{_NOTES}_{site}"))
            if compiled == "again":
                break
        frame = frame.f_back
    return found[::-1]


@cache
def _run_of_graph(code: CodeType) -> Run | None:
    """Say whether ``code`` runs the graph of a compiled function's forward or of its backward,
    which computes again what is inside of checkpoints.
    """
    if code.co_filename.endswith("_aot_autograd/runtime_wrappers.py"):
        if (code.co_name, *code.co_varnames[:1]) == ("forward", "ctx"):
            return "first"
        if (code.co_name, *code.co_varnames[:1]) == ("backward", "ctx"):
            return "again"
    return None


@cache
def _calls() -> dict[int, tuple[Run, str]]:
    """torch's functions that run a checkpoint's function, by the id of their code: which run it is,
    and the local variable that has the checkpoint.
    """
    from torch.utils import checkpoint as torchs

    reentrant = torchs.CheckpointFunction
    hook = torchs._checkpoint_hook.__init__.__code__
    unpack = next(code for code in hook.co_consts if getattr(code, "co_name", "") == "unpack_hook")
    codes: dict[CodeType, tuple[Run, str]] = {
        reentrant.forward.__code__: ("first", "ctx"),
        reentrant.backward.__code__: ("again", "ctx"),
        unwrap(torchs.checkpoint).__code__: ("first", "gen"),
        unpack: ("again", "frame"),
    }
    return {id(code): call for code, call in codes.items()}


class _Recomputation(AbstractContextManager[None]):
    """The region and state of a forward, for computing it again; may be entered once in each
    backward.
    """

    def __init__(self, active: Autocast, recompute_state: RecomputeState) -> None:
        self._active, self._recompute_state = active, recompute_state
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(regions.resumed(self._active))
        self._stack.enter_context(replaying(self._recompute_state))

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return two contexts for activation checkpointing: of a forward, and of its recomputation,
    which makes the same codes.

    Under ``torch.utils.checkpoint`` zerocast's layers do this without it. Pass it where a function
    that is checkpointed inside :class:`autocast` uses quantizers directly, or where another library
    computes the function again::

        torch.utils.checkpoint.checkpoint(
            function, x, use_reentrant=False, context_fn=zerocast.checkpoint_contexts
        )

    The second run happens in the backward, when the region has usually been left and delayed scales
    have moved on. It runs under what was active in the first one, from the scales that the first
    one used, and records no amaxes.
    """
    recompute_state = RecomputeState()
    return recording(recompute_state), _Recomputation(regions.current(), recompute_state)


def checkpoint(
    function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **options: Any
) -> Any:
    """``torch.utils.checkpoint.checkpoint`` for functions with zerocast's layers in them.

    Args:
        function: the function to compute, now and again in the backward.
        args: its arguments.
        use_reentrant: torch's mode; both give the same gradients as without a checkpoint, bit for
            bit.
        options: torch's further options and, without reentrance, the function's keyword arguments.

    Returns:
        What ``function`` returns.
    """
    first, again = checkpoint_contexts()
    has_run = False
    # A reentrant first run has gradients disabled, but is no evaluation.
    records = use_reentrant and torch.is_grad_enabled() and regions.current().enabled

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        now, has_run = (again if has_run else first), True
        with ExitStack() as stack:
            stack.enter_context(now)
            if now is first and records:
                active = regions.current()
                stack.enter_context(autocast(True, True, active.recipe, active.group))
            return function(*args, **kwargs)

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant, **options)
