"""The products of a layer inside torch.compile, under recipes that remember something.

What a recipe remembers stays with the layer, and so does what a forward does on the host: a layer
makes its states at its first forward, joins the reduction of the region around it, and takes part
in activation checkpoints. So an operation of the graph is given the layer's *handle*, an int64
tensor with a number, and runs what an uncompiled forward runs, with the layer's own quantizers
(:mod:`zerocast.nn.traced_functions`). A handle is an input of the graph: one graph serves all
layers of a kind, and a graph that another process made serves this one's layers.

For the backward the operation gives a *ticket*, another number, by which the quantizer of the
gradient is found: that of this forward, though the layer may have met another recipe since.

Note: the order of operations
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Compilers merge equal operations, drop, move and repeat them. Layers join a reduction in the same
order on all ranks, and draws of stochastic rounding are counted. So each operation says that it
writes a tensor which the next one writes, too (one in forwards, one in backwards), so that none can
be merged with another one or run before it. Nobody reads these tensors. Each run of a graph has one
of its own for the forward, for a graph with checkpoints saves it. (``torch.library`` has effects
for the purpose; torch 2.13 reorders them in a backward, and cannot compile them in a checkpoint.)

Repeated are operations inside of a checkpoint, in the backward. Each has the number of its place in
the graph, *site*, by which :mod:`zerocast.nn.recompute` finds what its first run started from.
"""

from __future__ import annotations

import itertools
import struct
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from zerocast.errors import UnsupportedError
from zerocast.nn import regions
from zerocast.nn.linear_functions import GemmQuantizers, Watch
from zerocast.nn.quantizer import Quantizer
from zerocast.nn.recompute import as_in_first_run, keep_region
from zerocast.nn.regions import shown_recipe
from zerocast.nn.statistics import observer
from zerocast.nn.traced_functions import (
    fake_backward,
    fake_forward,
    in_buffers,
    run_backward,
    run_forward,
)
from zerocast.nn.traced_product import BACKWARD, FORWARD, kept_weight, needed
from zerocast.recipes import recipe_from_text
from zerocast.tensors import QuantizedTensor


def _new_number(number: int) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor([number], dtype=torch.int64, device="cpu")


class _Here(threading.local):
    """Of each thread: what the operations of the next run of a graph write."""

    def __init__(self) -> None:
        self.order = _new_number(0)


_here = _Here()
_order_of_grads = _new_number(0)

_numbers = itertools.count(1)
_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_tickets: weakref.WeakValueDictionary[int, _Ticket] = weakref.WeakValueDictionary()
_quantizers: weakref.WeakValueDictionary[int, Quantizer] = weakref.WeakValueDictionary()
_numbers_of_quantizers: weakref.WeakKeyDictionary[Quantizer, int] = weakref.WeakKeyDictionary()

_MOST_SAVED = 8  # mean, rstd, and three buffers of each operand


def new_handle(layer: object) -> torch.Tensor:
    """int64 [1]: a number of its own for ``layer``."""
    number = next(_numbers)
    _layers[number] = layer
    return _new_number(number)


class _Ticket(bytearray):
    """The memory of a ticket, two numbers: its own and its quantizer's. It lives as long as the
    tensor does, and the quantizer with it; a copy of the tensor (on its way through hooks on saved
    tensors) has the second number, by which a layer that still has the quantizer is served.
    """

    quantizer: Quantizer
    watch: Watch | None

    @classmethod
    def new(cls, quantizer: Quantizer, watch: Watch | None) -> torch.Tensor:
        """int64 [2]."""
        number = next(_numbers)
        if quantizer not in _numbers_of_quantizers:
            _numbers_of_quantizers[quantizer] = next(_numbers)
            _quantizers[_numbers_of_quantizers[quantizer]] = quantizer
        ticket = cls(struct.pack("=qq", number, _numbers_of_quantizers[quantizer]))
        ticket.quantizer, ticket.watch = quantizer, watch
        _tickets[number] = ticket
        return torch.frombuffer(ticket, dtype=torch.int64)

    @staticmethod
    def found(tensor: torch.Tensor) -> tuple[Quantizer, Watch | None]:
        """The quantizer, and who is shown what it quantizes."""
        number, of_quantizer = tensor.tolist()
        ticket = _tickets.get(number)
        if ticket is not None:
            return ticket.quantizer, ticket.watch
        quantizer = _quantizers.get(of_quantizer)
        if quantizer is None:
            raise UnsupportedError(
                "the backward of a compiled layer needs what its recipe remembered when its "
                "forward ran, and the layer has met another recipe since, while hooks on saved "
                "tensors (such as save_on_cpu) held copies. Run the backward before the layer's "
                "forward under another recipe, or leave out the hooks."
            )
        return quantizer, None


def remembers(recipe: str) -> bool:
    """Whether the recipe of this text remembers something between casts."""
    return bool(recipe_from_text(recipe).remembers)


def _next_site() -> int:
    """The number of the next operation in the graph that is being traced."""
    traced = torch._guards.CompileContext.current_compile_id()
    if traced != _sites[0]:
        _sites[:] = [traced, 0]
    _sites[1] += 1
    return int(_sites[1])


_sites: list[Any] = [None, 0]

# As torch.compiler.assume_constant_result does, which loads the compiler.
remembers._dynamo_marked_constant = True  # type: ignore[attr-defined]
_next_site._dynamo_marked_constant = True  # type: ignore[attr-defined]


# --- what a layer calls where it is traced ---


def register(handle: torch.Tensor, recipe: str) -> None:
    """Let the layer of ``handle`` take part in a region, without rows to quantize."""
    _register(_here.order, handle, recipe, torch.is_grad_enabled(), _next_site())


def traced_product_that_remembers(
    handle: torch.Tensor,
    gemm: int,
    input: torch.Tensor,
    norm: list[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: str,
    source: str,
    dtype: torch.dtype,
    wants_norm: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """:func:`zerocast.nn.traced_product.traced_product`, product ``gemm`` of the layer whose
    ``handle`` this is.
    """
    needs = needed(input, norm, weight, bias)
    given = (recipe, source, dtype, wants_norm, needs)
    at = (gemm, torch.is_grad_enabled(), _next_site())
    if any(needs):
        tensors = (input, *[*norm, None, None][:2], weight, bias)
        made = _Remembering.apply(*tensors, handle, _here.order, _order_of_grads, given, at)
        return (made[0], made[1]) if wants_norm else (made, None)
    made = _forward(input, norm, [weight], bias, *given, "", _here.order, handle, *at)
    return made[0], made[1] if wants_norm else None


class _Remembering(torch.autograd.Function):
    """The derivative, for torch registers none of an operation that writes its arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        gamma: torch.Tensor | None,
        beta: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        handle: torch.Tensor,
        order: torch.Tensor,
        order_of_grads: torch.Tensor,
        given: tuple[str, str, torch.dtype, bool, list[bool]],
        at: tuple[int, bool, int],
    ) -> Any:
        recipe, source, _, wants_norm, needs = given
        norm = [each for each in (gamma, beta) if each is not None]
        out, normed, *saved = _forward(input, norm, [weight], bias, *given, "", order, handle, *at)
        kept = [input, *norm] if source else []
        ctx.num_inputs = len(kept)
        kept += kept_weight(weight, needs)
        ctx.num_kept = len(kept)
        ctx.save_for_backward(*kept, *saved)
        ctx.order = order_of_grads  # not saved: the backwards of other steps write it in between
        ctx.recipe, ctx.source, ctx.needs, ctx.wants_norm = recipe, source, needs, wants_norm
        ctx.shape, ctx.weight_dtype = tuple(weight.shape), weight.dtype
        return (out, normed) if wants_norm else out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        tensors = ctx.saved_tensors
        ticket, *saved = tensors[ctx.num_kept :]
        made = _backward(
            grads[0], grads[1] if ctx.wants_norm else None,
            list(tensors[: ctx.num_inputs]), saved,
            list(tensors[ctx.num_inputs : ctx.num_kept]),
            ctx.recipe, ctx.source, "", ctx.shape, ctx.weight_dtype, ctx.needs, ctx.order, ticket,
        )  # fmt: skip
        needed_ones = [grad if need else None for grad, need in zip(made, ctx.needs, strict=True)]
        return *needed_ones, None, None, None, None, None


# --- the operations ---

# Operations that write their arguments return a fixed number of tensors: empty ones fill up.


@torch.library.custom_op(
    "zerocast::enrol",
    mutates_args=("order",),
    schema="(Tensor(a!) order, Tensor handle, str recipe, bool grads, int site) -> ()",
)
def _register(
    order: torch.Tensor, handle: torch.Tensor, recipe: str, grads: bool, site: int
) -> None:
    layer = _running(handle)
    with as_in_first_run(layer, site):
        _registered(layer, recipe, handle.device, grads)


@_register.register_fake
def _(*args: Any) -> None:
    return None


@torch.library.custom_op(
    "zerocast::remembering_linear",
    mutates_args=("order",),
    schema=f"({FORWARD}, Tensor(a!) order, Tensor handle, int gemm, bool grads, int site) -> "
    f"({', '.join(['Tensor'] * (3 + _MOST_SAVED))})",
)
def _forward(
    input: torch.Tensor,
    norm: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    recipe: str,
    source: str,
    dtype: torch.dtype,
    wants_norm: bool,
    needs: Sequence[bool],
    meaning: str,
    order: torch.Tensor,
    handle: torch.Tensor,
    gemm: int,
    grads: bool,
    site: int,
) -> tuple[torch.Tensor, ...]:
    """The result, what the norm made, the ticket, and what the backward reads."""
    keep_region()
    layer = _running(handle)
    with as_in_first_run(layer, site):
        quantizers = _registered(layer, recipe, input.device, grads)[gemm]
        quantizers.weight.tp_shard = None
        watch = observer(layer, gemm)
        out, normed, saved = run_forward(
            quantizers, watch,
            input, norm, weight, bias, source, dtype, wants_norm, needs, meaning,
        )  # fmt: skip
    ticket = _Ticket.new(quantizers.grad_output, watch)
    return out, _or_empty(normed, out), ticket, *_filled(saved, out, _MOST_SAVED)


@_forward.register_fake
def _(
    input: torch.Tensor,
    norm: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    *others: Any,
) -> tuple[torch.Tensor, ...]:
    out, normed, saved = fake_forward(input, weight, *others[:6])
    ticket = torch.empty(2, dtype=torch.int64, device="cpu")
    return out, _or_empty(normed, out), ticket, *_filled(saved, out, _MOST_SAVED)


@torch.library.custom_op(
    "zerocast::remembering_linear_backward",
    mutates_args=("order",),
    schema=f"({BACKWARD}, Tensor(a!) order, Tensor ticket) -> ({', '.join(['Tensor'] * 5)})",
)
def _backward(*given: Any) -> tuple[torch.Tensor, ...]:
    """The gradients of input, gamma, beta, weight and bias."""
    *others, _, ticket = given
    quantizer, watch = _Ticket.found(ticket)
    made = run_backward(quantizer, watch, *others)
    return tuple(_or_empty(each, others[0]) for each in made)


@_backward.register_fake
def _(*given: Any) -> tuple[torch.Tensor, ...]:
    grad, _, inputs = given[:3]
    return tuple(_or_empty(each, grad) for each in fake_backward(grad, inputs, *given[8:11]))


for _operation in (_forward, _backward):
    QuantizedTensor.operations[_operation._opoverload] = in_buffers


def _or_empty(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(0) if tensor is None else tensor


def _filled(tensors: list[torch.Tensor], like: torch.Tensor, count: int) -> list[torch.Tensor]:
    assert len(tensors) <= count, (len(tensors), count)
    return [*tensors, *(like.new_empty(0) for _ in range(count - len(tensors)))]


def _running(handle: torch.Tensor) -> Any:
    """The layer of ``handle``; the run of its graph keeps what its operations write to itself."""
    _here.order = _new_number(0)
    return _layers[int(handle)]


def _registered(layer: Any, recipe: str, device: torch.device, grads: bool) -> list[GemmQuantizers]:
    """The layer's quantizers in the region that is open around the compiled function."""
    region = regions.entered()
    if not region.enabled or region.recipe is None or shown_recipe(region.recipe) != recipe:
        raise UnsupportedError(
            f"{layer.name or type(layer).__name__} was compiled for zerocast.autocast with "
            f"{recipe}, and runs under {region.recipe if region.enabled else 'no region'}, by "
            f"contextvars.Context.run or the like. Enter the region where the function is called."
        )
    with torch.set_grad_enabled(grads):
        return layer._registered(region, device)
