"""Determines by a trial whether an optimizer is element-wise, so that it can be sharded over ranks.

A rank does not have the other ranks' elements. Some optimizers read a whole tensor (its norm, rows
or inverse), blocks of it (8-bit state) or all parameters (an estimated learning rate). They would
give other weights on another number of ranks. No list of names can be complete, so the class is
tried, with the options of every kind of group. It steps a matrix and a vector whole, then flat, and
then flat in two pieces, each in a separate optimizer, as on ranks. Masters, state and the options
that the class writes must be the same in all runs.

The trial uses more than 4096 elements, from which 8-bit optimizers quantize, and takes some
milliseconds. It draws nothing from torch's global generators and has the same result on every rank.
It does not detect what a class does only after more steps, or for other values.

With ``shard="matrix"`` a class may read a whole matrix, but no other matrix. The trial then steps
two matrices in one optimizer, and then each in a separate one.
"""

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from zerocast.arguments import check_choice
from zerocast.errors import InputError, UnsupportedError
from zerocast.optim.inner import has_modes

_SHAPES = {"element": ((72, 64), (48,)), "matrix": ((72, 64), (40, 56))}
_SPLITS = (1301, 17)
"""Odd and unequal splits, so that no statistic of the pieces equals that of the whole."""
_STEPS = 4
_ORTHOGONAL = 1
"""The step whose gradients are orthogonal to the tensors, because some classes project then."""
_TOLERANCE = 1e-5
"""The relative tolerance between a whole and its pieces, because fused implementations may round an
element differently when its tensor is divided."""

_WHOLE = [{0: slice(None), 1: slice(None)}]
"""For each optimizer, the tensors that it steps, with their elements."""
_PIECES = [
    {t: slice(split) for t, split in enumerate(_SPLITS)},
    {t: slice(split, None) for t, split in enumerate(_SPLITS)},
]
_RUNS = {
    "element": (
        (_WHOLE, True, 0.0, "flat: it steps a matrix otherwise than the same elements flat"),
        (_PIECES, True, _TOLERANCE, "in two pieces: it takes statistics over a tensor or blocks "
         "of it, or takes statistics over all parameters"),
    ),
    "matrix": (([{0: slice(None)}, {1: slice(None)}], False, _TOLERANCE, "alone"),),
}  # fmt: skip
"""The runs that must each equal the previous run: what the optimizers step, whether it is flat, the
tolerance, and a description. The first run steps whole tensors in their shapes."""

_NEEDS = {
    "element": (
        "updates each element from that element alone, because a rank has only some elements",
        'use one such as torch.optim.AdamW, shard="matrix", whose optimizer sees whole parameters, '
        'or masters under FSDP2 (zerocast.nn.convert(model, recipe, weights="master"))',
    ),
    "matrix": (
        "steps each matrix alone, because ranks have different ones",
        "use one such as torch.optim.Muon",
    ),
}
"""The requirement on an optimizer, and the remedy if it is not met."""

_lock = threading.Lock()
"""The trial seeds and restores torch's generators, which threads must not do concurrently."""


def check_shardable(
    optimizer_class: type[torch.optim.Optimizer],
    defaults: dict[str, Any],
    groups: Sequence[dict[str, Any]],
    device: torch.device,
    shard: str,
) -> None:
    """Try ``optimizer_class(groups, **defaults)`` and raise unless it can be sharded.

    It must be element-wise, or with ``shard`` "matrix" step each matrix independently of others.

    Args:
        groups: the options of each group, without its parameters.

    Raises:
        InputError: if it is not an optimizer class, or refuses its options, or ``shard`` is neither
            "element" nor "matrix".
        UnsupportedError: if it does not meet the requirement, cannot step a flat tensor, or keeps
            state that cannot be divided or saved. Allowed state, by parameter, are numbers and FP32
            tensors in the master's shape (with "matrix" in any shape).
    """
    check_choice("shard", shard, ("element", "matrix"))
    if not (
        isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    ):
        raise InputError(
            f"optimizer_class must be a class of torch optimizers such as torch.optim.AdamW, got "
            f"{optimizer_class!r}; give its options to ZeroOptimizer by name."
        )
    kinds = {repr(sorted((k, _kind(v)) for k, v in group.items())): group for group in groups}
    with undisturbed(device):
        for group in kinds.values():
            try:  # every class accepts a matrix
                matrix = torch.zeros(2, 2, dtype=torch.float32, device=device)
                optimizer_class([group | {"params": [matrix]}], **defaults)
            except Exception as error:
                raise InputError(
                    f"{optimizer_class.__name__} refused its options: {error}"
                ) from error
            try:
                problem = _difference(optimizer_class, defaults, group, device, shard)
            except Exception as error:
                problem = f"it failed in a trial ({type(error).__name__}: {error})"
            if problem is not None:
                needs, remedy = _NEEDS[shard]
                raise UnsupportedError(
                    f"ZeroOptimizer(shard={shard!r}) needs an optimizer that {needs}, and "
                    f"{optimizer_class.__name__} does not: {problem}; {remedy}."
                )


def _kind(value: object) -> str:
    """Return the same text for options that a class treats alike. Numbers are 0 or not 0."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    return repr(bool(value) if isinstance(value, int | float) else value)


@torch.no_grad()
def _difference(
    optimizer_class: Any,
    defaults: dict[str, Any],
    group: dict[str, Any],
    device: torch.device,
    shard: str,
) -> str | None:
    """Return a description of state that ranks could not save, or of the first difference between
    runs; None if there is neither.
    """
    generator, values, gradients = torch.Generator("cpu").manual_seed(0), [], []
    shapes = [torch.Size(shape) for shape in _SHAPES[shard]]
    for size in map(torch.Size.numel, shapes):
        # Magnitudes grow along a tensor, gradients twice as fast, so the statistics of pieces
        # differ. Gradients keep their direction, which learning rate estimates follow, except at
        # some elements, where momentum then has the opposite sign.
        slope = torch.logspace(-2, 1, size, dtype=torch.float32, device="cpu")
        drawn = torch.randn(
            2 + _STEPS, size, generator=generator, dtype=torch.float32, device="cpu"
        )
        own = drawn[1] * slope.square() * (1 + drawn[2:] / 8)
        own[-1, ::5].neg_()
        values.append((drawn[0] * slope).to(device))
        gradients.append(own.to(device))

    before: dict[str, torch.Tensor] = {}
    for run, flat, tolerance, how in ((_WHOLE, False, 0.0, ""), *_RUNS[shard]):
        found: dict[str, list[torch.Tensor]] = {}
        for pieces in run:
            params = {
                t: values[t][part].clone().view(-1 if flat else shapes[t])
                for t, part in pieces.items()
            }
            groups = [group | {"params": [params[t]] if t in params else []} for t in (0, 1)]
            optimizer = optimizer_class(groups, **defaults)
            if has_modes(optimizer):
                optimizer.train()
            for step in range(_STEPS):
                for t, param in params.items():
                    gradient = gradients[t][step]
                    if step == _ORTHOGONAL and not before:  # for the other runs, too
                        value = param.view(-1)
                        gradient -= value * (gradient @ value / value.square().sum())
                    param.grad = gradient[pieces[t]].clone().view(param.shape)
                optimizer.step()
                if (problem := _unsavable(optimizer, list(params.values()), flat=flat)) is not None:
                    return f"it keeps {problem}, which cannot be saved or sharded at any element"
            for name, value in _outcome(optimizer, params):
                number = torch.as_tensor(value, dtype=torch.float64, device="cpu").reshape(-1)
                found.setdefault(name, []).append(number.clone())
        after = {name: torch.cat(parts) for name, parts in found.items()}
        for name, one in before.items():
            two = after.get(name, one)
            if one.numel() in (1, two.numel()):  # else state of matrices only
                near = (one - two).abs() <= tolerance * torch.maximum(one.abs(), one.abs().mean())
                if not bool((near | (one == two) | (one.isnan() & two.isnan())).all()):
                    return f"it gave {name} other values {how}"
        before = after
    return None


def _outcome(optimizer: Any, params: dict[int, torch.Tensor]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the tensors and numbers that an optimizer produces."""
    left = [(f"tensor {t}", param) for t, param in params.items()]
    for t, param in params.items():
        left += [(f"state {k!r} of tensor {t}", v) for k, v in optimizer.state[param].items()]
    for g, group in enumerate(optimizer.param_groups):
        left += [(f"option {k!r} of group {g}", v) for k, v in group.items()]
    yield from ((name, v) for name, v in left if isinstance(v, torch.Tensor | bool | int | float))
    if has_modes(optimizer):
        optimizer.eval()
        yield from ((f"tensor {t} after eval()", param) for t, param in params.items())


def _unsavable(
    optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor], *, flat: bool
) -> str | None:
    """Return a description of state that cannot be sharded or saved; None if there is none.

    Such state belongs to no parameter, cannot be divided, or is not restored by torch's
    ``load_state_dict``. Without ``flat``, state may have any shape.
    """
    for owner, state in optimizer.state.items():
        if not any(owner is param for param in params):
            return f"state of {owner!r}, which is not one of its parameters"
        for name, value in state.items():
            kind = type(value).__name__
            if isinstance(value, torch.Tensor):
                kind += f" {tuple(value.shape)} of {value.dtype}"
                alike = value.dtype == torch.float32 and (value.shape == owner.shape or not flat)
                is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
                can_be = is_plain and (value.numel() == 1 or alike)
            else:
                can_be = value is None or isinstance(value, bool | int | float | str) or not flat
            if not can_be:
                return f"{name!r} as a {kind} for a master of shape {tuple(owner.shape)}"
    return None


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Seed torch's generators with 0 within the context, and restore them afterwards. Compiled code
    runs eagerly within the context, because compiling takes seconds.
    """
    devices = [device] if device.type == "cuda" else []
    compiles = "torch._dynamo" in sys.modules
    with (
        _lock,
        torch.random.fork_rng(devices),
        torch.compiler.set_stance("force_eager") if compiles else nullcontext(),
    ):
        torch.manual_seed(0)
        yield
