"""Finds by trial whether an optimizer may be sharded over ranks: whether it updates each element
from that element alone.

A rank does not know the other ranks' elements, so an optimizer that reads a whole tensor (a norm of
it, its rows, its inverse), at blocks of it (8-bit state) or at all parameters (a learning rate
estimated from them) would give other weights on another number of ranks. No list of names can be
complete, so the class is tried, with the options of every kind of group. It steps a matrix and a
vector whole, then flat, and then as ranks would: flat, in two pieces, each piece in a separate
optimizer. Masters, state and what the class writes into its options must come out the same. The
trial has more than 4096 elements, from where on 8-bit optimizers quantize, takes some milliseconds,
draws nothing from torch's global generators and gives the same verdict on every rank. What a class
does only after more steps, or for other values, is not found.

Where ranks step whole matrices (``shard="matrix"``) a class may read all of a matrix, but no other
matrix: in the trial it steps two matrices in one optimizer, and then each in a separate one.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import torch

from zerocast.arguments import check_choice
from zerocast.errors import InputError, UnsupportedError
from zerocast.optim.inner import has_modes

_SHAPES = (torch.Size((72, 64)), torch.Size((48,)))
_MATRICES = (torch.Size((72, 64)), torch.Size((40, 56)))
_SPLITS = (1301, 17)  # odd, and uneven, so that no statistic of the pieces equals that of the whole
_STEPS = 4
_ORTHOGONAL = 1
"""The step whose gradients are orthogonal to the tensors, which is where some classes project."""
_TOLERANCE = 1e-5
"""The relative tolerance between a whole and its pieces, because fused implementations may round an
element differently when its tensor is divided."""

_lock = threading.Lock()
"""The trial seeds torch's generators and puts them back, which threads must not do at once."""

_TrialPiece: TypeAlias = tuple[int, slice]
"""The number of a tensor, and elements of it."""

_Outcome: TypeAlias = dict[str, list[torch.Tensor]]
"""The results of a run, by name: masters, state and options of every piece, each FP64, flat, on the
CPU."""

_WHOLE = [(t, slice(None)) for t in range(len(_SHAPES))]
_FIRST = [(t, slice(split)) for t, split in enumerate(_SPLITS)]
_SECOND = [(t, slice(split, None)) for t, split in enumerate(_SPLITS)]

_REMEDY = (
    'use an element-wise one such as torch.optim.AdamW, shard="matrix", whose optimizer sees whole '
    'parameters, or masters under FSDP2 (zerocast.nn.convert(model, recipe, weights="master"))'
)


def check_shardable(
    optimizer_class: type[torch.optim.Optimizer],
    defaults: dict[str, Any],
    groups: Sequence[dict[str, Any]],
    device: torch.device,
    shard: str,
) -> None:
    """Try ``optimizer_class(groups, **defaults)``, and raise where it is not element-wise, or, with
    ``shard`` "matrix", where the step of a matrix depends on other matrices.

    Args:
        groups: the options of each group, without its parameters.

    Raises:
        InputError: where it is not an optimizer class, or refuses its options, or ``shard`` is
            neither "element" nor "matrix".
        UnsupportedError: where it is not as required, cannot step a flat tensor, or keeps state
            that can be neither divided nor saved: other than FP32 in the master's shape (of any
            shape, of whole matrices), and numbers, of each parameter.
    """
    check_choice("shard", shard, ("element", "matrix"))
    if not (
        isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    ):
        raise InputError(
            f"optimizer_class must be a class of torch optimizers such as torch.optim.AdamW, got "
            f"{optimizer_class!r}; give its options to ZeroOptimizer by name."
        )
    with undisturbed(device):
        for group in {_kind(group): group for group in groups}.values():
            shapes = _SHAPES if shard == "element" else _MATRICES
            trial = _Trial(optimizer_class, defaults, group, device, shapes)
            if shard == "matrix":
                if (difference := trial.verdict_on_matrices()) is not None:
                    raise UnsupportedError(
                        'shard="matrix" needs an optimizer that steps each matrix alone, '
                        "because ranks have different ones, and "
                        f"{optimizer_class.__name__} does not: {difference}."
                    )
            elif (difference := trial.verdict()) is not None:
                raise UnsupportedError(
                    "ZeroOptimizer needs an element-wise optimizer, because a shard does not "
                    f"contain other ranks' elements, and {optimizer_class.__name__} is not: "
                    f"{difference}; {_REMEDY}."
                )


def _kind(group: dict[str, Any]) -> str:
    """Return the same text for groups that a class treats alike: numbers count as 0 or not 0."""
    plain = {
        name: bool(value) if isinstance(value, int | float) else value
        for name, value in group.items()
        if not isinstance(value, torch.Tensor)
    }
    return repr(sorted(plain.items()))


def _note(outcome: _Outcome, name: str, value: object) -> None:
    """Add a tensor or a number to ``outcome``; nothing else can be compared."""
    if isinstance(value, torch.Tensor | bool | int | float):
        number = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()
        outcome.setdefault(name, []).append(number.reshape(-1).clone())


def _difference(whole: _Outcome, other: _Outcome, how: str, tolerance: float) -> str | None:
    """Return in words the first thing in which ``other``, stepped ``how``, differs."""
    for name, pieces in whole.items():
        one, two = torch.cat(pieces), torch.cat(other.get(name, pieces))
        if one.numel() not in (1, two.numel()):
            continue  # state that a matrix alone has
        one = one.expand_as(two)  # a number, which every piece has
        scale = torch.maximum(one.abs(), one.abs().mean())
        same = (one == two) | (one.isnan() & two.isnan())
        wrong = ~(same | ((one - two).abs() <= tolerance * scale))
        if wrong.any():
            i = int(wrong.nonzero()[0])
            what = name if pieces[0].numel() == 1 else f"element {i} of {name}"
            return f"it gave {what} the value {two[i]:.9g} {how} and {one[i]:.9g} in one"
    return None


class _Trial:
    """Runs a class over the same values and gradients, divided in different ways."""

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        defaults: dict[str, Any],
        group: dict[str, Any],
        device: torch.device,
        shapes: Sequence[torch.Size],
    ) -> None:
        self._name, self._shapes, self._is_first = optimizer_class.__name__, shapes, True
        self._make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = lambda groups: (
            optimizer_class([group | each for each in groups], **defaults)
        )
        try:
            # A matrix is a shape that every class takes.
            self._make([{"params": [torch.zeros(2, 2, dtype=torch.float32, device=device)]}])
        except Exception as error:
            raise InputError(f"{self._name} refused its options: {error}") from error
        generator = torch.Generator("cpu").manual_seed(0)

        def draw(size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")

        self._values, self._gradients = [], []
        for size in map(torch.Size.numel, shapes):
            # Magnitudes grow along a tensor, gradients twice as fast, so the statistics of pieces
            # differ; gradients keep their direction, which estimates of a learning rate follow, but
            # for some elements, where momentum then has another sign.
            slope = torch.logspace(-2, 1, size, dtype=torch.float32, device="cpu")
            value, gradient = draw(size) * slope, draw(size) * slope.square()
            gradients = [gradient * (1 + draw(size) / 8) for _ in range(_STEPS)]
            gradients[-1][::5].neg_()
            self._values.append(value.to(device))
            self._gradients.append([each.to(device) for each in gradients])

    def verdict(self) -> str | None:
        """Return None for an element-wise class, else what differs and why, in words."""
        try:
            whole = self.run(_WHOLE, flat=False)
            flat = self.run(_WHOLE)
            apart = self.run(_FIRST, _SECOND)
        except UnsupportedError:
            raise
        except Exception as error:
            raise UnsupportedError(
                "ZeroOptimizer needs an optimizer that steps flat FP32 shards element by element, "
                f"and {self._name} failed ({type(error).__name__}: {error}); {_REMEDY}."
            ) from error
        if (found := _difference(whole, flat, "flat", 0.0)) is not None:
            why = "It steps a matrix otherwise than the same elements flat, and shards are flat"
        elif (found := _difference(flat, apart, "in two pieces", _TOLERANCE)) is None:
            return None
        elif _difference(flat, self.run(_FIRST + _SECOND), "in two pieces", _TOLERANCE) is None:
            why = "It takes statistics over all parameters, and each rank has only a part of them"
        else:
            why = (
                "It takes statistics over a tensor or over blocks of it, and ranks cut it anywhere"
            )
        return f"{found}. {why}"

    def verdict_on_matrices(self) -> str | None:
        """Return None for a class that steps each matrix alone, else what differs."""
        try:
            together = self.run(_WHOLE, flat=False)
            alone = self.run(_WHOLE[:1], _WHOLE[1:], flat=False)
        except UnsupportedError:
            raise
        except Exception as error:
            raise UnsupportedError(
                f'shard="matrix" needs an optimizer that steps FP32 matrices, and {self._name} '
                f"failed ({type(error).__name__}: {error})."
            ) from error
        return _difference(together, alone, "alone", _TOLERANCE)

    @torch.no_grad()
    def run(self, *optimizers: Sequence[_TrialPiece], flat: bool = True) -> _Outcome:
        """Step each of ``optimizers``, given by its pieces, which are flat or in their shapes. The
        first run steps whole tensors.
        """
        outcome: _Outcome = {}
        for pieces in optimizers:
            params, groups = [], [{"params": list[torch.Tensor]()} for _ in self._shapes]
            for t, elements in pieces:
                param = self._values[t][elements].clone()
                params.append(param if flat else param.view(self._shapes[t]))
                groups[t]["params"].append(params[-1])
            optimizer: Any = self._make(groups)
            if has_modes(optimizer):
                optimizer.train()
            for step in range(_STEPS):
                for (t, elements), param in zip(pieces, params, strict=True):
                    gradient = self._gradients[t][step]
                    if step == _ORTHOGONAL and self._is_first:  # for the other runs, too
                        value = param.view(-1)
                        gradient -= value * (gradient @ value / value.square().sum())
                    param.grad = gradient[elements].clone().view(param.shape)
                optimizer.step()
                self._check_state(optimizer, params, flat=flat)
            for (t, _), param in zip(pieces, params, strict=True):
                _note(outcome, f"tensor {t}", param)
                for name, value in optimizer.state[param].items():
                    _note(outcome, f"state {name!r} of tensor {t}", value)
            for g, group in enumerate(optimizer.param_groups):
                for name, value in group.items():
                    _note(outcome, f"option {name!r} of group {g}", value)
            if has_modes(optimizer):
                optimizer.eval()
                for (t, _), param in zip(pieces, params, strict=True):
                    _note(outcome, f"tensor {t} after eval()", param)
        self._is_first = False
        return outcome

    def _check_state(
        self, optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor], *, flat: bool
    ) -> None:
        """Refuse state that belongs to no parameter, which no rank would save, what cannot be
        divided, and what torch's ``load_state_dict`` does not bring back. A matrix, which is no
        shard, may have state of any shape.
        """
        for owner, state in optimizer.state.items():
            if not any(owner is param for param in params):
                raise UnsupportedError(
                    "ZeroOptimizer needs state that belongs to a parameter, because ranks save "
                    f"that of their parts, and {self._name} keeps {owner!r} of none; {_REMEDY}."
                )
            for name, value in state.items():
                if (found := _undividable(value, owner, flat=flat)) is not None:
                    raise UnsupportedError(
                        "ZeroOptimizer needs state that is FP32 in the shape of a master, or "
                        f"numbers, because ranks cut it anywhere, and {self._name} keeps {name!r} "
                        f"as a {found} for a master of shape {tuple(owner.shape)}; use a class "
                        "with FP32 state such as torch.optim.AdamW, whose state is divided by the "
                        "number of ranks."
                    )


def _undividable(value: object, param: torch.Tensor, *, flat: bool) -> str | None:
    """Describe state of ``param`` that cannot be divided or loaded; None where it can."""
    if isinstance(value, torch.Tensor):
        plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        alike = value.dtype == torch.float32 and (value.shape == param.shape or not flat)
        if plain and (value.numel() == 1 or alike):
            return None
        return f"{type(value).__name__} {tuple(value.shape)} of {value.dtype}"
    if value is None or isinstance(value, bool | int | float | str) or not flat:
        return None
    return type(value).__name__


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Within the context random numbers are the same on every rank, afterwards what they would have
    been; and what a class compiles is run without its compiler, which takes seconds.
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
