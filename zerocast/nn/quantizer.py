"""Quantizer: makes the codes of one tensor in a layer.

A layer has a quantizer for each tensor of its GEMMs: in the forward for input, weight and output,
in the backward for the gradients of output and input. A quantizer holds the scheme, which of the
two copies its results have and, for schemes with state, a slot of a
:class:`zerocast.nn.recipe_state.RecipeState`.

Note: scale_inv belongs to the data
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The tensor that :meth:`Quantizer.quantize` returns holds its codes and their scales, and no
reference to the quantizer or its state. So a tensor keeps its value when the recipe's state changes
later (by the next step, by loading a checkpoint), and a backward that reads it needs no separate
copy of the scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from zerocast.arguments import Device, check_device, check_flag, check_memory, check_tensor, present
from zerocast.backends import backend_for
from zerocast.errors import InputError, UnsupportedError
from zerocast.layout import Extent
from zerocast.numerics import ElementFormat, Masters, PlaneBuffers, TensorOperand
from zerocast.recipes import Recipe, as_recipe, check_nominal
from zerocast.tensors.quantize import plain_master, quantize_into
from zerocast.tensors.quantized_tensor import QuantizedTensor
from zerocast.tensors.storage import QuantizedStorage
from zerocast.tensors.tp_shard import TensorParallelShard

_READ_BY_A_CAST = ("scale", "rounding_counter")
"""The state that a cast's codes depend on."""


class RecomputeState:
    """The recipe state from which the casts of a forward started, by quantizer. Activation
    checkpointing runs the forward a second time in the backward, when that state may have advanced,
    and must get the same codes.

    An object that is made while another one is current is nested in it: while it records, the outer
    one continues to record or replay.
    """

    def __init__(self) -> None:
        self._outer = _recompute_state.get()
        self.trains: bool = self._outer is not None and self._outer.trains
        self._is_rewound = False
        self._recorded: dict[Quantizer, list[dict[str, torch.Tensor]]] = {}
        self._unread: dict[Quantizer, Iterator[dict[str, torch.Tensor]]] = {}

    @property
    def replays(self) -> bool:
        """Whether casts have been made before, and start from where they did then."""
        return self._is_rewound or (self._outer is not None and self._outer.replays)

    def rewind(self) -> None:
        """Let casts take their state from the records from now on, beginning with the first."""
        self._is_rewound = True
        self._unread = {quantizer: iter(starts) for quantizer, starts in self._recorded.items()}

    def use(self, quantizer: Quantizer, state: dict[str, torch.Tensor]) -> None:
        """Record ``state``, or, while it replays, put what was recorded into ``state``."""
        if self._is_rewound:
            recorded = next(self._unread.get(quantizer, iter(())), None)
            if recorded is None:
                raise UnsupportedError(
                    "a checkpointed function quantizes with a state that its first run did not "
                    "use; make both runs the same, or leave it out of the checkpoint."
                )
            state.update({name: start.clone() for name, start in recorded.items()})
            return
        if self._outer is not None:
            self._outer.use(quantizer, state)
        start = {name: state[name].clone() for name in state if name in _READ_BY_A_CAST}
        self._recorded.setdefault(quantizer, []).append(start)


_recompute_state: ContextVar[RecomputeState | None] = ContextVar("zerocast_recompute", default=None)


def current_recompute_state() -> RecomputeState | None:
    """Return the active RecomputeState, in which casts record their state, or from which they take
    it.
    """
    return _recompute_state.get()


@contextmanager
def recording(recompute_state: RecomputeState) -> Iterator[None]:
    """Within the context, casts record the state that they start from."""
    token = _recompute_state.set(recompute_state)
    try:
        yield
    finally:
        _recompute_state.reset(token)


@contextmanager
def replaying(recompute_state: RecomputeState) -> Iterator[None]:
    """Within the context, casts start from the state that they recorded."""
    recompute_state.rewind()
    with recording(recompute_state):
        yield


class StateSlot(NamedTuple):
    """The state of one quantizer's recipe.

    Attributes:
        tensors: gives live views, by the names of :attr:`Recipe.state`.
        record: notes that data of this amax, int32 [1], was cast; the largest one counts.
    """

    tensors: Callable[[], dict[str, torch.Tensor]]
    record: Callable[[torch.Tensor], None]


class Quantizer:
    """Quantizes tensors of one role.

    Args:
        recipe: the scheme, or its name; already for the role (:meth:`Recipe.for_role`).
        rowwise: whether results hold rowwise codes.
        columnwise: whether results hold columnwise codes.
        slot: where the state of a recipe with :attr:`Recipe.state` is; those quantizers are made by
            :meth:`zerocast.nn.recipe_state.RecipeState.make_quantizers`.

    Attributes:
        recipe, rowwise, columnwise, slot: as given.
        tp_shard: the rows or columns that the next tensors are of a larger one, or None; with it
            casts are collective over ``tp_shard.comm``, and all its ranks make them alike.

    Raises:
        InputError: where a recipe with state is given without a slot, or no codes at all are
            asked for.
    """

    def __init__(
        self,
        recipe: Recipe | str,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        slot: StateSlot | None = None,
    ) -> None:
        recipe = as_recipe(recipe)
        if recipe.state and slot is None:
            raise InputError(
                f"{recipe} keeps {', '.join(recipe.state)} between casts, so its quantizers "
                f"come from RecipeState.create(recipe, ...).make_quantizers()."
            )
        self.recipe: Recipe = recipe
        self.slot = slot
        self.tp_shard: TensorParallelShard | None = None
        self.rowwise = self.columnwise = True
        self.set_usage(rowwise=rowwise, columnwise=columnwise)

    @property
    def dtype(self) -> ElementFormat:
        """The format of the codes."""
        return self.recipe.numerics.fmt

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Set which codes results hold from now on; None changes nothing.

        Raises:
            InputError: where neither would be left.
        """
        rowwise = self.rowwise if rowwise is None else check_flag("rowwise", rowwise)
        columnwise = self.columnwise if columnwise is None else check_flag("columnwise", columnwise)
        if not (rowwise or columnwise):
            raise InputError(
                "a quantizer makes rowwise codes, columnwise codes or both, got rowwise=False and "
                "columnwise=False."
            )
        self.rowwise, self.columnwise = rowwise, columnwise

    def make_empty(
        self, shape: Sequence[int], *, dtype: torch.dtype = torch.bfloat16, device: Device = None
    ) -> QuantizedTensor:
        """Return an unfilled tensor such as :meth:`quantize` writes: nominal ``shape`` and
        ``dtype``.

        Raises:
            InputError: where the recipe cannot hold it.
        """
        self._check(shape, dtype)
        device = check_device("device", device)
        storage = QuantizedStorage.empty(
            shape,
            dtype,
            self.recipe,
            device,
            rowwise=self.rowwise,
            columnwise=self.columnwise,
            state=False,
            tp_shard=self.tp_shard,
        )
        return QuantizedTensor(storage)

    def quantize(
        self, tensor: torch.Tensor, *, out: QuantizedTensor | None = None
    ) -> QuantizedTensor:
        """Cast ``tensor``: codes, and the scales that belong to them.

        Under delayed scaling the amax of the tensor is recorded. A gradient does not flow through.

        Args:
            tensor: FP32, BF16 or FP16, of a shape that the recipe holds; any strides.
            out: a tensor that this quantizer, or one like it, made of the same shape and dtype; it
                is overwritten, and returned.

        Raises:
            InputError: for another dtype or shape, or an ``out`` that does not fit.
        """
        check_memory("tensor", check_tensor("tensor", tensor))
        if out is None:
            out = self.make_empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        else:
            self.check_out(out, tensor)
        with self.cast_into(out.quantized_storage) as whole:
            self.record(quantize_into(whole, tensor, advances=False))
        return out

    __call__ = quantize

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Record the amax of ``tensor`` as :meth:`quantize` would, and nothing else.

        Schemes that take their scales from the data have nothing to record.

        Raises:
            InputError: as :meth:`quantize`.
        """
        dtype: Any = getattr(tensor, "dtype", type(tensor).__name__)
        self._check(tensor.shape, dtype)
        if not self.recipe.casts_before_reduction:
            return
        master = plain_master(tensor, tensor.device)
        masters = Masters(1)
        masters.bind([master])
        amax = torch.zeros(1, dtype=torch.int32, device=master.device)
        planes = (PlaneBuffers(self.recipe.planes(tensor.shape)[0], amax),)
        round_to, whole = self.recipe.round_to(tensor.dtype), Extent(0, master.numel())
        operand = TensorOperand(planes, 0, whole, round_to, tensor_amax=amax)
        backend_for(master.device).partial_amax([operand], masters)()
        if self.tp_shard is not None:
            self.tp_shard.require_comm().all_reduce_max_(amax)
        self.record(amax)

    # --- the parts of quantize(), for an operation that makes what it casts ---

    @contextmanager
    def cast_into(self, storage: QuantizedStorage) -> Iterator[QuantizedStorage]:
        """Yield ``storage``, which :meth:`make_empty` made, with all buffers that a cast reads and
        writes: also scratch memory for copies that are not kept, and the recipe's state.

        Under delayed scaling the cast does not advance that state, which waits for the reduction of
        the amax that :meth:`record` takes afterwards.
        """
        state = {} if self.slot is None else self.slot.tensors()
        recompute_state = current_recompute_state()
        if state and recompute_state is not None:
            recompute_state.use(self, state)
        whole = storage
        if state or not storage.is_whole:
            whole = storage.whole(state)
        yield whole
        if whole is not storage:
            storage.mark_written()

    def record(self, amax: torch.Tensor) -> None:
        """Under delayed scaling, record the amax of a cast, the last entry of ``amax``, int32; not
        if a forward is computed again, which has recorded it before.
        """
        recompute_state = current_recompute_state()
        if self.recipe.casts_before_reduction and not (
            recompute_state is not None and recompute_state.replays
        ):
            present(self.slot).record(amax[-1:])

    def _check(self, shape: Sequence[int], dtype: object) -> None:
        check_nominal("what is quantized", dtype)
        if self.recipe.stack_of(shape):
            raise InputError(
                f"a quantizer under {type(self.recipe).__name__} takes a matrix, got shape "
                f"{tuple(shape)}, a stack of them; flatten its leading dimensions first."
            )
        if self.tp_shard is None:
            self.recipe.check_shape(shape)
        else:
            self.tp_shard.check(self.recipe, shape, columnwise=self.columnwise)

    def check_out(self, out: QuantizedTensor, tensor: torch.Tensor) -> None:
        """Raise :class:`InputError` where ``out`` is not what this quantizer would make of
        ``tensor``.
        """
        if not isinstance(out, QuantizedTensor):
            raise InputError(f"out must be a zerocast.QuantizedTensor, got {type(out).__name__}.")
        storage = out.quantized_storage
        for name, has, wanted in (
            ("recipe", out.recipe, self.recipe),
            ("shape", tuple(out.shape), tuple(tensor.shape)),
            ("dtype", out.dtype, tensor.dtype),
            ("device", out.device, tensor.device),
            ("rowwise", storage.has_rowwise, self.rowwise),
            ("columnwise", storage.has_columnwise, self.columnwise),
            ("tensor-parallel shard", storage.tp_shard, self.tp_shard),
        ):
            if has != wanted:
                raise InputError(
                    f"out must have {name} {wanted} to be overwritten by this quantizer, got "
                    f"{has}; leave it out, or make it with quantizer.make_empty(...)."
                )

    def __repr__(self) -> str:
        return f"Quantizer({self.recipe}, rowwise={self.rowwise}, columnwise={self.columnwise})"
