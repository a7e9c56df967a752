"""Recipe: defines how an amax becomes a scale, and where codes and scales of a weight are stored.

A recipe is a frozen configuration, hashable and comparable, so weights of equal recipes are cast by
the same launches. It states arithmetic and planes: its numerics, its blocks, where columnwise codes
come from, how scales are stored, what a weight stores beside them. It calls no operation and no
backend; a backend does not depend on recipes.
"""

from __future__ import annotations

import ctypes
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch

from zerocast.arguments import check_fields, check_shape, shown
from zerocast.errors import InputError, UnsupportedError
from zerocast.layout import FULL, Block, BlockGrid, Plane, ScaleLayout, Source, grid_of
from zerocast.numerics import DelayedState, Numerics, Rounding, packed_columns

Role = Literal["input", "weight", "output", "grad_output", "grad_input"]
"""The roles of tensors in a layer's GEMMs: three in the forward, two in the backward."""

_FILLED_AT_ONCE = 1 << 14
"""Elements that torch fills on one thread."""

Buffers = Mapping[str, torch.Tensor]
"""A weight's stored tensors, by the names that :meth:`Recipe.buffers` gives."""


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One stored tensor of a weight: its shape and dtype, and its initial value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float = 0

    def allocate(self, device: torch.device, *leading: int) -> torch.Tensor:
        """Return a tensor of shape [*leading, *shape], filled with the initial value."""
        shape = (*leading, *self.shape)
        if device.type != "cpu":
            return torch.full(shape, self.fill, dtype=self.dtype, device=device)
        # Without torch's threads, for which a forked process would wait for ever.
        made = torch.empty(shape, dtype=self.dtype, device=device)
        if self.fill:
            for part in made.view(-1).split(_FILLED_AT_ONCE):
                part.fill_(self.fill)
            return made
        try:
            ctypes.memset(made.data_ptr(), 0, made.nbytes)
        except RuntimeError:  # torch.compile looks at tensors that have no memory
            made.zero_()
        return made


def fixed(value: Any, reason: str) -> Any:
    """Make a field of TransformerEngine's recipe of which only ``value`` is accepted here, for the
    ``reason`` given.
    """
    return field(default=value, repr=False, metadata={"reason": reason})


_NO_ATTENTION = "zerocast has no attention"


@dataclass(frozen=True, kw_only=True)
class Recipe(ABC):
    """A scaling scheme: how weights are quantized, and by :meth:`for_role` every other tensor.

    Attributes:
        round_master: round each FP32 master element to the weight's nominal dtype before the amax
            and the cast, as TransformerEngine and Megatron do; so a cast equals "cast to BF16, then
            quantize". False quantizes straight from FP32.
        per_matrix: whether a weight [..., M, K] of more than two dimensions (experts) is a *stack*:
            each of its matrices is quantized separately, with its own blocks, amax and state. False
            takes all as one tensor, as TransformerEngine does.
        fp8_dpa, fp8_mha: must stay False: attention is not quantized.
        backward_override: must stay None: the backward's products are quantized as the forward's.

    Raises:
        UnsupportedError: for another value of a field that must stay what it is.
    """

    scheme: ClassVar[str] = ""
    """The short name of the scheme, as ``zerocast.recipes.RECIPES`` has it."""

    scales_tensor: ClassVar[bool] = False
    """Whether an amax of the whole tensor enters every scale, so that weights can share it."""

    casts_before_reduction: ClassVar[bool] = False
    """Whether the codes do not depend on the amax of what is cast (delayed scaling): then one pass
    casts and takes the amax."""

    round_master: bool = True
    per_matrix: bool = False
    fp8_dpa: bool = fixed(False, _NO_ATTENTION)
    fp8_mha: bool = fixed(False, _NO_ATTENTION)
    backward_override: None = fixed(None, "the backward multiplies what the forward quantized")

    def __post_init__(self) -> None:
        for each in fields(self):
            given = getattr(self, each.name)
            # A format may be given by its name.
            same = isinstance(given, type(each.default) | str) and given == each.default
            if "reason" in each.metadata and not same:
                raise UnsupportedError(
                    f"{type(self).__name__}({each.name}={shown(given)}) is not supported: "
                    f"{each.metadata['reason']}; leave it {each.default!r}."
                )
        check_fields(self)

    def __str__(self) -> str:
        """Return the class, and the fields that are not its defaults."""
        own = ((each, getattr(self, each.name)) for each in fields(self))
        given = (f"{each.name}={value!r}" for each, value in own if value != each.default)
        return f"{type(self).__name__}({', '.join(given)})"

    # --- what a scheme states ---

    @property
    @abstractmethod
    def numerics(self) -> Numerics:
        """The arithmetic."""

    @property
    @abstractmethod
    def block(self) -> Block:
        """The blocks of the rowwise codes."""

    @property
    @abstractmethod
    def columnwise_source(self) -> Source:
        """The source of columnwise codes."""

    @property
    def columnwise_has_shards(self) -> bool:
        """Whether ranks with shards of a weight can make its columnwise copy. One that is cast from
        the transposed tensor needs the whole tensor.
        """
        return self.columnwise_source is not Source.TRANSPOSED_MASTER

    # --- what a scheme may state ---

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise :class:`InputError` where this scheme cannot hold a weight of ``shape``."""
        self._check_elements(shape, "one dimension or more")

    def scale_layout(self, grid: BlockGrid) -> ScaleLayout:
        """Say how the scales of ``grid`` are stored, rowwise ones and those of the transpose."""
        return ScaleLayout(grid)

    @property
    def columnwise_block(self) -> Block:
        """The blocks of the columnwise codes."""
        return self.block

    def columnwise_scale_layout(self, grid: BlockGrid) -> ScaleLayout:
        """Say how the columnwise scales are stored."""
        return self.scale_layout(grid)

    def own_buffers(self) -> dict[str, BufferSpec]:
        """Return what a weight stores beside codes and block scales, by name: ``amax``, and what
        :attr:`state` names.
        """
        return {}

    def of_activations(self, *, gradients: bool) -> dict[str, Any]:
        """Return the fields of :meth:`for_role` that differ for inputs and outputs of layers, or
        with ``gradients`` for the gradients of these.
        """
        return {}

    @property
    def state(self) -> tuple[str, ...]:
        """The names of buffers with state between casts, which are saved with masters and never
        gathered.
        """
        return ()

    @property
    def chooses_scales(self) -> bool:
        """Whether blocks choose between two scales (4-over-6), which takes one more exchange."""
        return False

    # --- what follows from it ---

    def for_role(self, role: Role) -> Recipe:
        """Return the recipe that quantizes *its weights* as this one does tensors of ``role``."""
        if role == "weight":
            return self
        gradients = role in ("grad_output", "grad_input")
        own = {"per_matrix": type(self).per_matrix}  # as the scheme has it: only weights are stacks
        return replace(self, **own | self.of_activations(gradients=gradients))

    def stack_of(self, shape: Sequence[int]) -> torch.Size:
        """Return the leading dimensions of a weight of ``shape`` that is a stack of matrices; none
        of one that is quantized as one tensor.
        """
        return torch.Size(shape[:-2] if self.per_matrix else ())

    def planes(self, shape: Sequence[int], *, columnwise: bool = True) -> tuple[Plane, ...]:
        """Return the rowwise plane of a weight of ``shape``, or of each matrix of a stack; with
        ``columnwise`` the other one, too.
        """
        shape = shape[len(self.stack_of(shape)) :]
        rows, cols = math.prod(shape[:-1]), shape[-1]
        layout = self.scale_layout(grid_of(rows, cols, self.block))
        rowwise = Plane("rowwise", Source.MASTER, self.block, layout)
        if not columnwise:
            return (rowwise,)
        source, block = self.columnwise_source, self.columnwise_block
        if source in (Source.TRANSPOSED_MASTER, Source.ROWWISE):
            rows, cols = cols, rows
        layout = self.columnwise_scale_layout(grid_of(rows, cols, block))
        return rowwise, Plane("columnwise", source, block, layout)

    def buffers(self, shape: Sequence[int], *, columnwise: bool) -> dict[str, BufferSpec]:
        """Return every tensor that a weight of ``shape`` stores, by name; with or without the
        columnwise copy.

        The names are the attributes of the weight: ``rowwise_data``, ``rowwise_scale_inv``,
        ``columnwise_data``, ``columnwise_scale_inv``, ``amax``, and those of :attr:`state`. Codes
        are in the weight's own shape, or [K, M] where their plane is transposed; 4-bit ones are
        packed along the last dimension. A stack stores each buffer of its matrices in one tensor,
        behind its leading dimensions.
        """
        specs, fmt, stack = {}, self.numerics.fmt, self.stack_of(shape)
        if stack:
            each = self.buffers(shape[len(stack) :], columnwise=columnwise)
            return {n: replace(spec, shape=(*stack, *spec.shape)) for n, spec in each.items()}
        for plane in self.planes(shape, columnwise=columnwise):
            if plane.stores_codes:
                leading = (plane.grid.rows,) if plane.is_transposed else tuple(shape[:-1])
                packed = (*leading, packed_columns(fmt, plane.grid.cols))
                specs[plane.codes_name] = BufferSpec(packed, torch.uint8)
            if plane.stores_scales:
                dtype, fill = self.numerics.scale_dtype, plane.scales.padding
                specs[plane.scales_name] = BufferSpec(plane.scale_shape, dtype, fill)
        return specs | self.own_buffers()

    @property
    def has_one_block(self) -> bool:
        """Whether the tensor is one block, whatever its shape: then its amax is the tensor's."""
        return self.block == (FULL, FULL)

    @cached_property
    def has_forward_state(self) -> bool:
        """Whether quantizing inputs, weights and outputs of a layer depends on earlier casts."""
        return any(self.for_role(role).state for role in ("input", "weight", "output"))

    @cached_property
    def text(self) -> str:
        """The scheme and its fields, for :func:`zerocast.recipes.recipe_from_text`. A recipe that
        holds a function has no text.
        """
        given = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        changed = {name: value for name, (value, default) in given.items() if value != default}
        return json.dumps([type(self).__name__, changed], default=asdict)

    def rewind(self, buffers: Buffers) -> None:
        """Restore :attr:`state` so that one more cast of the same masters gives the present codes,
        as a loaded checkpoint needs; that cast then advances the state again.
        """
        delayed, rounding = self.delayed_state(buffers), self.rounding(buffers)
        if delayed is not None:
            delayed.scale.copy_(delayed.cast_scale)
        if rounding is not None:
            rounding.counter[..., 1] -= 1

    def wrong_state(self, buffers: Buffers) -> str | None:
        """Say which part of :attr:`state` no cast can have produced; None if there is none."""
        delayed, rounding = self.delayed_state(buffers), self.rounding(buffers)
        if delayed is not None:
            for name, scale in (("scale", delayed.scale), ("cast_scale", delayed.cast_scale)):
                if not bool((scale.isfinite() & (scale > 0)).all()):
                    return f"{name} that is not finite and above 0"
            history = delayed.amax_history
            if not bool((history.isfinite() & (history >= 0)).all()):
                return "an amax_history that is not finite and 0 or more"
        if rounding is not None and bool((rounding.counter < -1).any()):
            return "a rounding_counter below -1, which is that of a first cast to be repeated"
        return None

    def round_to(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype to which a master element is rounded first, for a weight of nominal
        dtype ``dtype``.
        """
        return dtype if self.round_master else torch.float32

    def delayed_state(self, buffers: Buffers) -> DelayedState | None:
        """Return a weight's state under delayed scaling."""
        if "amax_history" not in buffers:
            return None
        return DelayedState(*(buffers[name] for name in ("scale", "cast_scale", "amax_history")))

    def rounding(self, buffers: Buffers) -> Rounding | None:
        """Return a weight's state under stochastic rounding."""
        counter = buffers.get("rounding_counter")
        return None if counter is None else Rounding(counter)

    def _check_elements(self, shape: Sequence[int], accepted: str) -> None:
        """Raise :class:`InputError` for a weight without elements; ``accepted`` says which
        dimensions a shape may have.
        """
        shape = check_shape("shape", shape)
        if not shape or min(shape) < 1:
            raise InputError(
                f"{type(self).__name__} needs a weight of {accepted} with at least one element, "
                f"got shape {tuple(shape)}."
            )

    def _check_matrix(self, shape: Sequence[int], multiple: int, reason: str) -> None:
        """Raise :class:`InputError` unless ``shape`` is [M, K] or [..., M, K] of a stack.

        K must be a multiple of ``multiple``, for the ``reason`` given.
        """
        name = type(self).__name__
        self._check_elements(shape, "shape [M, K] or [..., M, K]")
        if len(shape) - len(self.stack_of(shape)) != 2:
            raise InputError(
                f"{name} needs a 2-D weight [M, K] or a stack of them [..., M, K], got shape "
                f"{tuple(shape)}; reshape it first."
            )
        if shape[-1] % multiple:
            raise InputError(
                f"{name} needs K, the last dimension, to be a multiple of {multiple} ({reason}), "
                f"got K = {shape[-1]} in shape {tuple(shape)}; pad the weight or leave it in high "
                f"precision."
            )
