"""Tape: what the casts of a forward started from, for computing that forward again.

Activation checkpointing runs a forward a second time, in the backward, and must get the same codes,
when the recipe's state may have moved on. So the first run notes the state that each cast starts
from, and the second takes its states from there, in the same order, and records no amaxes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_READ_BY_A_CAST = ("scale", "rounding_counter")
"""The state that a cast's codes depend on."""


class RecomputeState:
    """What the casts of a forward started from, by quantizer.

    A tape that is made while another one is current is nested in it: while it notes, the outer one
    goes on as it did.
    """

    def __init__(self) -> None:
        self._outer = _recompute_state.get()
        self._rewound = False
        self._noted: dict[Hashable, list[dict[str, torch.Tensor]]] = {}
        self._unread: dict[Hashable, Iterator[dict[str, torch.Tensor]]] = {}

    @property
    def replays(self) -> bool:
        """Whether casts have been made before, and start from where they did then."""
        return self._rewound or (self._outer is not None and self._outer.replays)

    def rewind(self) -> None:
        """From now on casts take from the tape, from its start."""
        self._rewound = True
        self._unread = {quantizer: iter(noted) for quantizer, noted in self._noted.items()}

    def use(self, quantizer: Hashable, state: dict[str, torch.Tensor]) -> None:
        """Note ``state``, or put what was noted in its place; in ``state`` itself."""
        if self._rewound:
            noted = next(self._unread.get(quantizer, iter(())), {})
            state.update({name: start.clone() for name, start in noted.items()})
            return
        if self._outer is not None:
            self._outer.use(quantizer, state)
        start = {name: state[name].clone() for name in state if name in _READ_BY_A_CAST}
        self._noted.setdefault(quantizer, []).append(start)


_recompute_state: ContextVar[RecomputeState | None] = ContextVar("zerocast_tape", default=None)


def current_recompute_state() -> RecomputeState | None:
    """The tape on which casts note what they start from here, or from which they take it."""
    return _recompute_state.get()


@contextmanager
def recording(recompute_state: RecomputeState) -> Iterator[None]:
    """Within the context, casts note in ``tape`` what they start from."""
    token = _recompute_state.set(recompute_state)
    try:
        yield
    finally:
        _recompute_state.reset(token)


@contextmanager
def replaying(recompute_state: RecomputeState) -> Iterator[None]:
    """Within the context, casts start from what they noted in ``tape``."""
    recompute_state.rewind()
    with recording(recompute_state):
        yield
