"""Which optimizers may be cut over ranks: those that update each element from that element alone.

A shard knows nothing of the other ranks' elements, so an optimizer that looks at a whole tensor (a
norm of it, its rows, its inverse), at blocks of it (8-bit state) or at all parameters (a learning
rate estimated from them) would give other weights on another number of ranks. No list of names can
say which do, so a class is tried, with the options of every kind of group. It steps a matrix and a
vector whole, then flat, and then as ranks would: flat, in two pieces, each piece in an optimizer of
its own. Masters, state and what the class writes into its options must come out the same. The trial
has more than 4096 elements, from where on 8-bit optimizers quantize, takes some milliseconds, draws
nothing from torch's global generators and gives the same verdict on every rank. What a class does
only later, or for other values than these, is not seen.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from zerocast.errors import InputError, UnsupportedError

_SHAPES = ((72, 64), (48,))
_CUTS = (1301, 17)  # odd, and uneven, so that no statistic of the pieces equals that of the whole
_STEPS = 4
_ORTHOGONAL = 1
"""The step whose gradients are orthogonal to the tensors, which is where some classes project."""
_TOLERANCE = 1e-5
"""Relative, of pieces. Fused implementations may round an element differently when its tensor is
cut."""

_lock = threading.Lock()
"""The trial seeds torch's generators and puts them back, which threads must not do at once."""

_Piece: TypeAlias = tuple[int, int, int]
"""Of which tensor, from which element, to which."""

_SIZES = tuple(torch.Size(shape).numel() for shape in _SHAPES)
_WHOLE = [(t, 0, size) for t, size in enumerate(_SIZES)]
_FIRST = [(t, 0, cut) for t, cut in enumerate(_CUTS)]
_SECOND = [(t, cut, size) for t, (cut, size) in enumerate(zip(_CUTS, _SIZES, strict=True))]

_REMEDY = (
    "use an element-wise one such as torch.optim.AdamW, or masters under FSDP2 "
    '(zerocast.nn.convert(model, recipe, weights="master")), whose optimizer sees whole parameters '
    "where it knows DTensors"
)


def check_elementwise(
    optimizer_class: type[torch.optim.Optimizer],
    defaults: dict[str, Any],
    groups: Sequence[dict[str, Any]],
    device: torch.device,
) -> None:
    """Let ``optimizer_class(groups, **defaults)`` pass where it is element-wise.

    Args:
        groups: by group the options that it has of its own.

    Raises:
        InputError: where it is no optimizer class, or refuses its options.
        UnsupportedError: where it is not element-wise, cannot step a flat tensor, or keeps state
            that can be neither cut nor saved: other than FP32 in the master's shape, and numbers,
            of each parameter.
    """
    if not (
        isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    ):
        raise InputError(
            f"optimizer_class must be a class of torch optimizers such as torch.optim.AdamW, got "
            f"{optimizer_class!r}; give its options to ZeroOptimizer by name."
        )
    kinds = {_kind(group): group for group in groups}
    with _undisturbed(device):
        for group in kinds.values():
            _check_group(optimizer_class, defaults, group, device)


def _kind(group: dict[str, Any]) -> str:
    """The same text for groups that a class treats alike: of numbers, whether they are 0."""
    plain = {
        name: bool(value) if isinstance(value, int | float) else value
        for name, value in group.items()
        if not isinstance(value, torch.Tensor)
    }
    return repr(sorted(plain.items()))


def _check_group(
    optimizer_class: type[torch.optim.Optimizer],
    defaults: dict[str, Any],
    group: dict[str, Any],
    device: torch.device,
) -> None:
    name = optimizer_class.__name__
    try:
        # Of a shape that all take.
        param = torch.zeros(2, 2, dtype=torch.float32, device=device)
        optimizer_class([group | {"params": [param]}], **defaults)
    except Exception as error:
        raise InputError(f"{name} refused its options: {error}") from error
    trial = _Trial(optimizer_class, defaults, group, device)
    try:
        whole = trial.run([_WHOLE], flat=False)
        flat = trial.run([_WHOLE])
        apart = trial.run([_FIRST], [_SECOND])
    except UnsupportedError:
        raise
    except Exception as error:
        raise UnsupportedError(
            "ZeroOptimizer needs an optimizer that steps flat FP32 shards element by element, "
            f"and {name} failed ({type(error).__name__}: {error}); {_REMEDY}."
        ) from error
    if (difference := whole.difference(flat, "flat", 0.0)) is not None:
        why = "It steps a matrix otherwise than the same elements flat, and shards are flat"
    elif (difference := flat.difference(apart, "in two pieces", _TOLERANCE)) is not None:
        together = trial.run([_FIRST, _SECOND])
        why = (
            "It takes statistics over all parameters, and each rank has only a part of them"
            if flat.difference(together, "in two pieces", _TOLERANCE) is None
            else "It takes statistics over a tensor or over blocks of it, and ranks cut it anywhere"
        )
    else:
        return
    raise UnsupportedError(
        "ZeroOptimizer needs an element-wise optimizer, because a shard knows nothing of "
        f"other ranks' elements, and {name} is not: {difference}. {why}; {_REMEDY}."
    )


class _Outcome:
    """What a run has left: tensors by name, of all pieces, and numbers by name, of each piece."""

    def __init__(self) -> None:
        self.tensors: dict[str, list[torch.Tensor]] = {}
        self.numbers: dict[str, list[float]] = {}

    def add(self, name: str, value: object) -> None:
        """Take a tensor or a number; nothing else can be compared."""
        if isinstance(value, torch.Tensor) and value.numel() > 1:
            self.tensors.setdefault(name, []).append(value.detach().float().reshape(-1).clone())
        elif isinstance(value, torch.Tensor | bool | int | float):
            self.numbers.setdefault(name, []).append(float(value))

    def difference(self, other: _Outcome, how: str, tolerance: float) -> str | None:
        """The first thing in which ``other``, stepped ``how``, differs, in words."""
        for name, parts in self.tensors.items():
            one, two = torch.cat(parts), torch.cat(other.tensors.get(name, parts))
            if one.shape != two.shape:
                continue  # state that a matrix alone has
            scale = torch.maximum(one.abs(), one.abs().mean())
            wrong = ~((one - two).abs() <= tolerance * scale) & ~(one.isnan() & two.isnan())
            if wrong.any():
                i = int(wrong.nonzero()[0])
                what = "" if name.startswith("master") else f"'s {name}"
                return (
                    f"it gave element {i} of a tensor{what} {two[i].item():.9g} {how} and "
                    f"{one[i].item():.9g} in one"
                )
        for name, (number, *_) in self.numbers.items():
            for theirs in other.numbers.get(name, ()):
                if abs(number - theirs) > tolerance * max(abs(number), abs(theirs)):
                    return f"its {name} became {theirs:.9g} {how} and {number:.9g} in one"
        return None


class _Trial:
    """Runs a class over the same values and gradients, cut in different ways."""

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        defaults: dict[str, Any],
        group: dict[str, Any],
        device: torch.device,
    ) -> None:
        self._class, self._defaults, self._group = optimizer_class, defaults, group
        generator = torch.Generator("cpu").manual_seed(0)

        def draw(size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")

        self._values, self._gradients = [], []
        for size in _SIZES:
            # Magnitudes grow along a tensor, gradients twice as fast, so the statistics of pieces
            # differ; gradients keep their direction, which estimates of a learning rate follow, but
            # for some elements, where momentum then has another sign.
            slope = torch.logspace(-2, 1, size, dtype=torch.float32, device="cpu")
            value, gradient = draw(size) * slope, draw(size) * slope.square()
            gradients = [gradient * (1 + draw(size) / 8) for _ in range(_STEPS)]
            gradients[-1][::5].neg_()
            self._values.append(value.to(device))
            self._gradients.append([each.to(device) for each in gradients])

    @torch.no_grad()
    def run(self, *optimizers: Sequence[Sequence[_Piece]], flat: bool = True) -> _Outcome:
        """Step each of ``optimizers``, given by the pieces of its groups."""
        outcome = _Outcome()
        for groups in optimizers:
            self._run(outcome, [piece for group in groups for piece in group], flat=flat)
        return outcome

    def _run(self, outcome: _Outcome, pieces: Sequence[_Piece], *, flat: bool) -> None:
        params = []
        for t, start, end in pieces:
            shape = (-1,) if flat else _SHAPES[t]
            params.append(self._values[t][start:end].clone().view(shape))
        groups = [self._group | {"params": []} for _ in _SHAPES]
        for (t, _, _), param in zip(pieces, params, strict=True):
            groups[t]["params"].append(param)
        optimizer = self._class(groups, **self._defaults)
        _call(optimizer, "train")
        for step in range(_STEPS):
            for (t, start, end), param in zip(pieces, params, strict=True):
                if step == _ORTHOGONAL and not flat:  # the first run, for all
                    gradient, value = self._gradients[t][step], param.view(-1)
                    gradient -= value * (gradient @ value / value.square().sum())
                param.grad = self._gradients[t][step][start:end].clone().view(param.shape)
            optimizer.step()
            for param in params:
                for name, value in optimizer.state[param].items():
                    self._check_state(name, value, param, flat=flat)
        self._check_owners(optimizer, params)
        for (t, _, _), param in zip(pieces, params, strict=True):
            outcome.add(f"master {t}", param)
            for name, value in optimizer.state[param].items():
                outcome.add(f"state {name!r} {t}", value)
        for g, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                outcome.add(f"option {name!r} {g}", value)
        if _call(optimizer, "eval"):
            for (t, _, _), param in zip(pieces, params, strict=True):
                outcome.add(f"master {t} in eval()", param)

    def _check_owners(
        self, optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]
    ) -> None:
        """Refuse state of no parameter, which no rank would save."""
        owners = {id(param) for param in params}
        for owner in optimizer.state:
            if id(owner) not in owners:
                raise UnsupportedError(
                    "ZeroOptimizer needs state that belongs to a parameter, because ranks save "
                    f"that of their parts, and {self._class.__name__} keeps {owner!r} of none; "
                    f"{_REMEDY}."
                )

    def _check_state(self, name: str, value: object, param: torch.Tensor, *, flat: bool) -> None:
        """Refuse what no cut keeps, or what torch's ``load_state_dict`` does not bring back; of a
        matrix, which is no shard, in any shape.
        """
        if isinstance(value, torch.Tensor):
            plain = type(value) in (torch.Tensor, torch.nn.Parameter)
            alike = value.dtype == torch.float32 and (value.shape == param.shape or not flat)
            if plain and (value.numel() == 1 or alike):
                return
            found = f"{type(value).__name__} {tuple(value.shape)} of {value.dtype}"
        elif value is None or isinstance(value, bool | int | float | str) or not flat:
            return
        else:
            found = type(value).__name__
        raise UnsupportedError(
            "ZeroOptimizer needs state that is FP32 in the shape of a master, or numbers, because "
            f"ranks cut it anywhere, and {self._class.__name__} keeps {name!r} as a {found} for a "
            f"master of shape {tuple(param.shape)}; use a class with FP32 state such as "
            "torch.optim.AdamW, whose state is divided by the number of ranks."
        )


def _call(optimizer: torch.optim.Optimizer, method: str) -> bool:
    """Call ``train()`` or ``eval()`` of an optimizer that has both."""
    has_modes = all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
    if has_modes:
        getattr(optimizer, method)()
    return has_modes


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Within the context random numbers are the same on every rank, afterwards what they would have
    been; and what a class compiles is run without its compiler, which takes seconds.
    """
    compiled = "torch._dynamo" in sys.modules
    devices = [device] if device.type == "cuda" else []
    with _lock, torch.random.fork_rng(devices):
        torch.manual_seed(0)
        if compiled:
            with torch.compiler.set_stance("force_eager"):
                yield
        else:
            yield
