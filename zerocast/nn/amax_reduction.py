"""AmaxReduction: the amaxes of all delayed tensors of a model, reduced over its ranks at once.

The states of all layers have their entries in one flat buffer, in the order in which they joined.
So a reduction is one all-reduce and one launch numerics, whatever the number of layers.

All ranks reduce the same entries: their states join in the same order, and an entry keeps its place
when its layer does not run, is gone, or has moved to another group. It is 0 then, and advances
nothing.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from zerocast.backends import backend_for
from zerocast.comm import Communicator
from zerocast.nn.recipe_state import RecipeState
from zerocast.numerics import Launch, Numerics, TensorOperand


@dataclass(frozen=True)
class _Entry:
    """The place of one state: ``size`` amaxes on ``device``."""

    state: weakref.ref[RecipeState]
    size: int
    device: torch.device


class AmaxReduction:
    """Reduces the amaxes of the states that have joined it (:meth:`RecipeState.join`).

    Args:
        comm: the ranks; they make the same states join in the same order.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._entries: list[_Entry] = []
        # A flat buffer for each device, with what is to be launched once it is reduced.
        self._steps: list[tuple[torch.Tensor, list[Launch]]] | None = []

    def register(self, state: RecipeState) -> None:
        """Called by the state that joins, and by one that has moved to another device."""
        known = any(e.state() is state and e.device == state.device for e in self._entries)
        if not known:
            gone = weakref.ref(state, lambda _: self.forget_layout())
            self._entries.append(_Entry(gone, state.num_quantizers, state.device))
        self.forget_layout()

    def forget_layout(self) -> None:
        """Lay the entries out anew before the next reduction."""
        self._steps = None

    def run(self) -> None:
        """Collective: reduce by maximum, advance histories and scales, clear the amaxes."""
        if self._steps is None:
            with torch.inference_mode(False):  # else only inference could ever write the buffers
                self._steps = self._lay_out()
        for amaxes, advances in self._steps:
            self._comm.all_reduce_max_(amaxes)
            for advance in advances:
                advance()
            amaxes.zero_()

    def _lay_out(self) -> list[tuple[torch.Tensor, list[Launch]]]:
        if self._comm.size == 1:  # nobody to agree with about the places of those that are gone
            self._entries = [entry for entry in self._entries if self._present(entry)]
        steps = []
        for device in dict.fromkeys(entry.device for entry in self._entries):
            entries = [entry for entry in self._entries if entry.device == device]
            flat = torch.zeros(sum(e.size for e in entries), dtype=torch.int32, device=device)
            unread = torch.empty(flat.shape, dtype=torch.float32, device=device)
            operands: dict[Numerics, list[TensorOperand]] = {}
            sizes = [entry.size for entry in entries]
            for entry, amaxes, scale_inv in zip(
                entries, flat.split(sizes), unread.split(sizes), strict=True
            ):
                state = self._present(entry)
                if state is not None:
                    amaxes.copy_(state.amaxes)
                    state.amaxes = amaxes
                    made = state.operands(scale_inv)
                    for recipe, operand in zip(state.recipes, made, strict=True):
                        operands.setdefault(recipe.numerics, []).append(operand)
            backend = backend_for(device)
            steps.append(
                (flat, [backend.compute_scale(numerics, t) for numerics, t in operands.items()])
            )
        return steps

    def _present(self, entry: _Entry) -> RecipeState | None:
        """The state whose amaxes these are; None where it is gone, has left, or has moved away."""
        state = entry.state()
        if state is None or state.reduction is not self or state.device != entry.device:
            return None
        return state
