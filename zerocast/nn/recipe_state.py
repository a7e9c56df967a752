"""RecipeState: the state of a recipe for the tensors of one layer, and their quantizers.

Most schemes have no state: their scales come from the data. Delayed scaling keeps, for each tensor,
the amaxes of earlier steps and the scale made from them; stochastic rounding counts its casts. One
RecipeState holds that for all tensors of a layer's forward, or of its backward, as stacked tensors,
and hands each quantizer its slot in them.

Note: when delayed scaling advances
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A cast multiplies by ``scale`` and raises the tensor's entry in ``amaxes`` to the amax of what it
cast, so the largest one counts where a layer runs more than once. Nothing else changes until
:class:`AmaxReduction` has reduced all entries over the ranks: then history and scale advance by
:class:`zerocast.numerics.Float8DelayedNumerics`, and the entries are 0 again. An entry of 0 (a
layer that did not run, a tensor of zeros) changes neither history nor scale.

The states of all layers have their entries in one flat buffer, in the order in which they
registered, so a reduction is one all-reduce, whatever the number of layers. All ranks reduce the
same entries: an entry keeps its place when its layer does not run, was deleted, or has another
recipe or device.
"""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch

from zerocast.arguments import check_device, check_integer, check_tensor, check_text, shown
from zerocast.backends import backend_for
from zerocast.comm import Communicator
from zerocast.errors import InputError, MissingDataError
from zerocast.layout import ONE_BLOCK
from zerocast.nn.quantizer import Quantizer, StateSlot
from zerocast.numerics import Launch, Numerics, PlaneBuffers, TensorOperand
from zerocast.recipes import Recipe, Role, as_recipe

Mode = Literal["forward", "backward"]

ROLES: dict[Mode, tuple[Role, ...]] = {
    "forward": ("input", "weight", "output"),
    "backward": ("grad_output", "grad_input"),
}
"""The tensors of one GEMM in each direction, in the order of their quantizers."""

COUNTER = "rounding_counter"
"""Counters of draws, int64 [num_quantizers, 2]: a hash of the tensor's name, and the count."""

_MOST_QUANTIZERS = 2**16
"""More than any layer has. Each is an object, and an entry of every tensor of the state."""


class RecipeState:
    """The state of ``recipe`` for ``num_quantizers`` tensors; :meth:`create` makes it.

    Attributes:
        recipe: the scheme, not yet for any role.
        mode: ``"forward"`` or ``"backward"``.
        roles: the role of each tensor in its GEMM.
        recipes: the scheme of each tensor.
        tensors: the state, by the names of :attr:`Recipe.state`; the first dimension counts the
            tensors.
        amaxes: int32 [num_quantizers]: the largest amax of each tensor since the latest reduction.
        is_delayed: whether there are amaxes to reduce.
        records: whether casts raise ``amaxes``; off in an evaluation.
        reduction: the one that reduces ``amaxes``, once the state is registered with one.
    """

    def __init__(
        self, recipe: Recipe, mode: Mode, num_quantizers: int, device: torch.device, name: str
    ) -> None:
        roles = ROLES[mode]
        self.recipe, self.mode = recipe, mode
        self.roles = tuple(roles[i % len(roles)] for i in range(num_quantizers))
        self.recipes = tuple(recipe.for_role(role) for role in self.roles)
        self.is_delayed = any(each.casts_before_reduction for each in self.recipes)
        self.records = True
        self.reduction: AmaxReduction | None = None
        with torch.inference_mode(False):  # else only inference mode could write it
            self.tensors = self._fresh_tensors(device, name)
            self.amaxes = torch.zeros(num_quantizers, dtype=torch.int32, device=device)

    def _fresh_tensors(self, device: torch.device, name: str) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for recipe in self.recipes:
            specs = recipe.own_buffers()
            for state in recipe.state:
                if state not in tensors:
                    tensors[state] = specs[state].allocate(device, self.num_quantizers)
        if COUNTER in tensors:
            names = (f"{name}.{self.mode}.{i}" for i in range(self.num_quantizers))
            hashes = [zlib.crc32(each.encode()) for each in names]
            tensors[COUNTER][:, 0] = torch.tensor(hashes, dtype=torch.int64, device="cpu")
        return tensors

    @classmethod
    def create(
        cls,
        recipe: Recipe | str,
        mode: Mode,
        num_quantizers: int = 1,
        device: torch.device | str | None = None,
        *,
        name: str = "",
    ) -> RecipeState:
        """Return the state that a layer of ``recipe`` starts with.

        Args:
            recipe: the scheme, or its name.
            mode: ``"forward"``, three quantizers a GEMM (input, weight, output), or ``"backward"``,
                two (gradients of output and input).
            num_quantizers: the number of quantizers; those of several GEMMs follow each other.
            device: where the tensors to be quantized are; torch's default device by default.
            name: the name of the layer; under stochastic rounding layers of different names draw
                different random bits.

        Raises:
            InputError: for anything else.
        """
        recipe = as_recipe(recipe)
        if not isinstance(mode, str) or mode not in ROLES:
            raise InputError(f"mode must be 'forward' or 'backward', got {shown(mode)}.")
        check_integer("num_quantizers", num_quantizers, 0, _MOST_QUANTIZERS)
        check_text("name", name)
        return cls(recipe, mode, num_quantizers, check_device("device", device), name)

    def make_quantizers(self) -> list[Quantizer]:
        """Return one quantizer for each tensor, in the order of :attr:`roles`."""
        slots = (
            StateSlot(functools.partial(self.views, i), functools.partial(self._record, i))
            for i in range(self.num_quantizers)
        )
        return [
            Quantizer(recipe, slot=slot if recipe.state else None)
            for recipe, slot in zip(self.recipes, slots, strict=True)
        ]

    @property
    def num_quantizers(self) -> int:
        """The number of tensors that the state is for."""
        return len(self.roles)

    @property
    def scale(self) -> torch.Tensor:
        """FP32 [num_quantizers]: what the next casts multiply by, under delayed scaling; a view.
        :class:`MissingDataError` under another scheme.
        """
        return self._tensor("scale").view(-1)

    @property
    def amax_history(self) -> torch.Tensor:
        """FP32 [num_quantizers, amax_history_len]: under delayed scaling, newest first; a view.
        :class:`MissingDataError` under another scheme.
        """
        return self._tensor("amax_history")

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self.tensors:
            raise MissingDataError(
                f"{name} is state of delayed scaling, and {type(self.recipe).__name__} makes "
                f"its scales from the data; each quantized tensor holds its own."
            )
        return self.tensors[name]

    # --- delayed scaling: the reduction ---

    @property
    def device(self) -> torch.device:
        """The device of the state."""
        return self.amaxes.device

    def register_with(self, reduction: AmaxReduction) -> None:
        """Register :attr:`amaxes` with ``reduction``, and with no other one."""
        if self.reduction is not reduction and self.is_delayed:
            if self.reduction is not None:
                self.reduction.forget_layout()
            self.reduction = reduction
            reduction.register(self)

    def operands(self, scale_inv: torch.Tensor) -> list[TensorOperand]:
        """Return the operands that advance history and scale from reduced :attr:`amaxes`;
        ``scale_inv``, FP32 [num_quantizers], receives scales that nothing reads, because every cast
        has stored its own.
        """
        made = []
        pairs = zip(self.amaxes.split(1), scale_inv.split(1), strict=True)
        for i, (amax, scale) in enumerate(pairs):
            views = self.views(i)
            planes = (PlaneBuffers(ONE_BLOCK, amax, scale_inv=scale),)
            delayed = self.recipes[i].delayed_state(views)
            made.append(
                TensorOperand(planes, tensor_amax=amax, amax=views["amax"], delayed=delayed)
            )
        return made

    def views(self, i: int) -> dict[str, torch.Tensor]:
        """Return the state of tensor ``i``, as live views."""
        return {name: self.tensors[name][i] for name in self.recipes[i].state}

    def _record(self, i: int, amax: torch.Tensor) -> None:
        if self.records:
            entry = self.amaxes[i : i + 1]
            torch.maximum(entry, amax, out=entry)

    # --- saving, moving, copying ---

    def _saved(self) -> dict[str, torch.Tensor]:
        return {**self.tensors, **({"amaxes": self.amaxes} if self.is_delayed else {})}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return a copy of the state, with the amaxes that wait for their reduction.

        Those are this rank's own. Where one rank saves for all, let all ranks call
        :func:`zerocast.reduce_amaxes` first, after which none wait.
        """
        return {name: tensor.clone() for name, tensor in self._saved().items()}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Continue, bit for bit, from the state that :meth:`state_dict` returned.

        Raises:
            InputError: where names, shapes or dtypes differ. Nothing has been changed.
        """
        own = self._saved()
        if not isinstance(state_dict, Mapping):
            raise InputError(
                f"state_dict must be that of RecipeState.state_dict(), got {shown(state_dict)}."
            )
        if set(own) != set(state_dict):
            raise InputError(
                f"the state of {self.recipe} holds {sorted(own)}, got {sorted(state_dict)}; load "
                f"it into a state of the recipe that it was saved from."
            )
        for name, tensor in own.items():
            given = check_tensor(name, state_dict[name])
            if (given.shape, given.dtype) != (tensor.shape, tensor.dtype):
                raise InputError(
                    f"{name} must be {tensor.dtype} {list(tensor.shape)}, got {given.dtype} "
                    f"{list(given.shape)}; the layer or the recipe differs."
                )
        for name, tensor in own.items():
            tensor.copy_(state_dict[name])

    def to(self, device: torch.device | str) -> RecipeState:
        """Move the state to ``device``; quantizers follow. Returns this state."""
        if torch.device(device) != self.device:
            self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
            self.amaxes = self.amaxes.to(device)
            if self.reduction is not None:
                self.reduction.register(self)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return a copy of the state, not registered with a reduction, for copies and pickles."""
        tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        return vars(self) | {"tensors": tensors, "amaxes": self.amaxes.clone(), "reduction": None}

    def __repr__(self) -> str:
        return f"RecipeState({self.recipe}, {self.mode!r}, {self.num_quantizers} quantizers)"


class _Entry(NamedTuple):
    """The entry of one state: ``size`` amaxes on ``device``."""

    state: weakref.ref[RecipeState]
    size: int
    device: torch.device


class AmaxReduction:
    """Reduces the amaxes of the states that are registered with it, over the ranks of ``comm``."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._entries: list[_Entry] = []
        # A flat buffer for each device, with what is to be launched once it is reduced.
        self._steps: list[tuple[torch.Tensor, list[Launch]]] | None = []

    def register(self, state: RecipeState) -> None:
        """Reduce the amaxes of ``state`` from now on, on the device where they are now."""
        if not any(e.state() is state and e.device == state.device for e in self._entries):
            gone = weakref.ref(state, lambda _: self.forget_layout())
            self._entries.append(_Entry(gone, state.num_quantizers, state.device))
        self.forget_layout()

    def forget_layout(self) -> None:
        """Drop the layout of the entries, which the next reduction makes again."""
        self._steps = None

    def run(self) -> None:
        """Collective: reduce by maximum, advance histories and scales, clear the amaxes."""
        if self._steps is None:
            with torch.inference_mode(False):  # else only inference mode could write the buffers
                self._steps = self._lay_out()
        for amaxes, advances in self._steps:
            self._comm.all_reduce_max_(amaxes)
            for advance in advances:
                advance()
            amaxes.zero_()

    def _lay_out(self) -> list[tuple[torch.Tensor, list[Launch]]]:
        if self._comm.size == 1:  # there is no other rank that keeps the places of entries
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
            compute_scale = backend_for(device).compute_scale
            steps.append((flat, [compute_scale(*group) for group in operands.items()]))
        return steps

    def _present(self, entry: _Entry) -> RecipeState | None:
        """Return the state of an entry; None if it was deleted, is registered elsewhere, or is on
        another device.
        """
        state = entry.state()
        is_here = state and state.reduction is self and state.device == entry.device
        return state if is_here else None
