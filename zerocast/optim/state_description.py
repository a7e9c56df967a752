"""Describes a saved training state, and checks which optimizer may load it.

A state (:mod:`zerocast.optim.training_state`) continues a run bit for bit only in an optimizer that
computes the same from it. So every state describes its optimizer and progress, in JSON values::

    format      the version of this description
    numerics    the version of the arithmetic (:data:`zerocast.numerics.NUMERICS_VERSION`)
    optimizer   the class of the inner optimizer, with its module
    groups      the number of param groups
    weights     for each: name, shape, index of its group, recipe (if quantized), dtype (None if it
                is not known yet) and the names of the weights that share its tensor amax
    steps       the number of completed steps; 0 if they are not counted
    mode        "train" or "eval"
    averages    the decays of averages, which are state under ``ema(DECAY)``
    due         the weights whose recipe state precedes the cast of these masters
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerocast.errors import InputError, NonFiniteError
from zerocast.optim.average import check_decay
from zerocast.optim.elementwise import undisturbed
from zerocast.optim.inner import has_modes
from zerocast.optim.param_groups import options
from zerocast.optim.progress import LARGEST_STEP

FORMAT = 2

PROGRESS = "steps", "mode", "averages", "due"

Description = dict[str, Any]
"""The description that the module's docstring lists, as JSON values."""

_NEVER_NEGATIVE = {
    "step", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "acc_delta", "sum",
}  # fmt: skip
"""State of torch's optimizers that is a count or a sum of squares or magnitudes."""


def check_format(given: Mapping[str, Any]) -> None:
    """Raise :class:`InputError` unless a state with the description ``given`` has this format."""
    if given.get("format") != FORMAT:
        raise InputError(
            f"a state must be of format {FORMAT}, got {given.get('format')!r}; load it by the "
            "version of zerocast that saved it."
        )


def check_described(given: Mapping[str, Any], this: Description) -> None:
    """Raise :class:`InputError` unless a state described by ``given`` can continue in an optimizer
    described by ``this``. The message names the difference and both values.
    """
    check_format(given)
    for what, label in (
        ("numerics", "version of the numerics"),
        ("optimizer", "class"),
        ("groups", "number of param groups"),
    ):
        check_equal(label, given[what], this[what])
    theirs, ours = (
        {weight["name"]: weight for weight in each["weights"]} for each in (given, this)
    )
    if alone := sorted(theirs.keys() ^ ours.keys()):
        has, lacks = ("it", "this one") if alone[0] in theirs else ("this one", "it")
        raise InputError(
            f"a state must be loaded into an optimizer of the same weights: {has} has "
            f"{alone[0]!r}, and {lacks} does not."
        )
    for name, present in ours.items():
        weight = theirs[name]
        for what in present:
            if what == "dtype" and None in (weight[what], present[what]):
                continue
            saved, own = weight[what], present[what]
            if isinstance(saved, dict) and isinstance(own, dict):  # recipes: say what differs
                saved = {k: v for k, v in weight[what].items() if own.get(k) != v}
                own = {k: v for k, v in present[what].items() if weight[what].get(k) != v}
            check_equal(f"{what} of {name}", saved, own)
    steps, mode, averages, due = (given.get(key) for key in PROGRESS)
    are_names = isinstance(due, list) and all(name in ours for name in due)
    for what, required, value, is_right in (
        (
            "steps",
            f"a number of steps, from 0 to {LARGEST_STEP}",
            steps,
            type(steps) is int and 0 <= steps <= LARGEST_STEP,
        ),
        ("mode", "'train' or 'eval'", mode, mode in ("train", "eval")),
        ("averages", "a list of decays", averages, isinstance(averages, list)),
        ("due", "a list of names of weights", due, are_names),
    ):
        if not is_right:
            raise InputError(
                f"{what} of a state must be {required}, got {value!r}; the state is damaged."
            )
    for decay in given["averages"]:
        check_decay(decay)


def check_values(
    name: str,
    shape: Sequence[int],
    state: Mapping[str, Any],
    expected: Mapping[str, Any],
) -> None:
    """Raise unless a weight's optimizer state, or this rank's part of it, is valid.

    Args:
        name: the weight's name.
        shape: the shape of its master, or of this rank's part.
        state: the state of the inner optimizer; empty for a weight that was never stepped.
        expected: the result of :func:`state_kinds`.

    Raises:
        InputError: if state is missing, has another kind or shape, or is negative although it is a
            count or a sum of magnitudes or squares.
        NonFiniteError: if it contains a NaN.
    """
    for key in expected if state else ():
        if key not in state:
            raise InputError(
                f"the state of {name} must have {', '.join(expected)}, as its optimizer keeps "
                f"them, and has no {key}; the state is damaged."
            )
    for key, value in state.items():
        kind, tensor = expected.get(key), value
        if isinstance(value, bool) or not isinstance(value, torch.Tensor | int | float):
            if isinstance(kind, torch.Tensor | torch.dtype):
                raise InputError(
                    f"{key} of {name} must be a tensor, got a {type(value).__name__}; the state is "
                    "damaged."
                )
            continue
        if not isinstance(tensor, torch.Tensor):
            tensor = torch.tensor(tensor, dtype=torch.float64, device="cpu")
        if isinstance(kind, torch.Tensor | torch.dtype):
            given, needed = [tensor.dtype, list(tensor.shape)], [kind, list(tensor.shape)]
            if isinstance(kind, torch.Tensor):
                needed = [kind.dtype, list(shape) if kind.dim() else []]
            if given != needed:
                raise InputError(
                    f"{key} of {name} must be {needed[0]} {needed[1]}, got {given[0]} {given[1]}; "
                    "the state is damaged."
                )
        check_numbers(f"{key} of {name}", tensor, finite=False)
        if key in _NEVER_NEGATIVE and bool((tensor < 0).any()):
            raise InputError(
                f"{key} of {name} must not be negative, got {float(tensor.min()):g}; the state is "
                "damaged."
            )


def check_numbers(what: str, tensor: torch.Tensor, *, finite: bool) -> None:
    """Raise :class:`NonFiniteError` if ``tensor`` has a NaN, or with ``finite`` an infinity. The
    message begins with ``what``.
    """
    wrong = ~tensor.isfinite() if finite else tensor.isnan()
    if bool(wrong.any()):
        place = int(wrong.reshape(-1).nonzero()[0])
        raise NonFiniteError(
            f"{what} must be {'finite' if finite else 'numbers'}, got "
            f"{float(tensor.reshape(-1)[place])} at element {place}; load an earlier state."
        )


def state_kinds(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], like: torch.Tensor
) -> dict[str, Any]:
    """Return the state that an optimizer of this class keeps of a parameter with options ``saved``.

    The result maps each key to a number, to a tensor without dimensions or in the parameter's
    shape, or to the dtype of a tensor of another shape. It is determined by stepping a small
    parameter, and is empty if that is not possible.

    Args:
        like: a parameter that gives the dtype, device and number of dimensions.

    Raises:
        InputError: if an option is missing, or the class refuses the options.
        NonFiniteError: if an option is a NaN.
    """
    for name, option in saved.items():
        for value in option if isinstance(option, list | tuple) else [option]:
            if isinstance(value, float):
                value = torch.tensor(value, dtype=torch.float64, device="cpu")
            if isinstance(value, torch.Tensor):
                check_numbers(f"{name} of the saved options", value, finite=False)
    kind: Any = type(optimizer)
    shape = tuple(range(2, 2 + like.dim()))
    with undisturbed(like.device), torch.inference_mode(False), torch.no_grad():
        try:
            _kept(kind, options(optimizer.param_groups[0]), like.new_ones(shape))
        except Exception:  # a class that needs more than the options of its groups
            return {}
        needed = {name for name, value in optimizer.defaults.items() if value is not None}
        missing = needed - saved.keys()
        if missing:
            raise InputError(
                f"the saved options of {kind.__name__} must have {min(missing)!r}, and have only "
                f"{', '.join(saved)}; the state is damaged, or of another version of the class."
            )
        try:
            return _kept(kind, saved, like.new_ones(shape))
        except Exception as error:
            raise InputError(f"{kind.__name__} refuses the saved options: {error}") from error


def _kept(kind: Any, given: Mapping[str, Any], values: torch.Tensor) -> dict[str, Any]:
    param = torch.nn.Parameter(values)
    optimizer = kind([{**copy.deepcopy(dict(given)), "params": [param]}])
    if has_modes(optimizer):
        optimizer.train()
    param.grad = torch.ones_like(param)
    optimizer.step()
    return {
        key: value.dtype
        if isinstance(value, torch.Tensor) and value.shape not in (param.shape, ())
        else value
        for key, value in optimizer.state[param].items()
        if value is not None
    }


def check_equal(what: str, saved: object, own: object) -> None:
    """Raise :class:`InputError` unless ``what`` is equal in a state and in this optimizer."""
    if saved != own:
        raise InputError(
            f"a state must be loaded into an optimizer of the same {what}: it was saved with "
            f"{saved}, and this one has {own}."
        )
