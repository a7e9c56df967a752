"""The view that torch.compile has of a layer: whether its graph holds it, and the numbers by which
the operations of the graph (:mod:`zerocast.nn.traced_products`) find the layer and its quantizers.
"""

from __future__ import annotations

import functools
import itertools
import struct
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from zerocast.errors import UnsupportedError
from zerocast.nn import regions
from zerocast.nn.layer_product import GemmQuantizers, Watch
from zerocast.nn.quantizer import Quantizer
from zerocast.nn.recompute import as_in_first_run
from zerocast.nn.regions import HIGH_PRECISION, NO_REGION, UNTRACEABLE, shown_recipe
from zerocast.recipes import recipe_from_text
from zerocast.tensors import QuantizedTensor

Forward = TypeVar("Forward", bound=Callable[..., Any])


def eager_in_regions(forward: Forward) -> Forward:
    """Make torch.compile leave a layer's ``forward`` out of its graph in regions of autocast where
    the graph cannot hold it.

    A graph that holds the layer is guarded by the region's recipe. (``torch.compiler.disable`` as a
    decorator would load the compiler with the package.)
    """

    @functools.wraps(forward)
    def run(self: Any, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            recipe, exports = self._traced_recipe(), not torch.compiler.is_dynamo_compiling()
            if recipe in (NO_REGION, HIGH_PRECISION):
                return forward(self, *args, **options)
            holds = recipe != UNTRACEABLE and self.is_traceable
            holds = holds and not options.get("fp8_output", False)
            holds = holds and not any(isinstance(each, QuantizedTensor) for each in args)
            if holds and has_state(recipe):
                holds = self._handle is not None and not exports and not _is_exporting()
            if holds:
                return forward(self, *args, **options)
            if exports or _is_exporting():
                raise UnsupportedError(
                    f"torch.export cannot hold what a layer does under zerocast.autocast with a "
                    f"recipe that keeps state between casts, nor layers with quantized "
                    f"inputs or outputs, got {self.name or type(self).__name__}; export the model "
                    f"outside of the region."
                )
            torch._dynamo.graph_break(
                msg="under zerocast.autocast no layers are traced that are tensor-parallel or have "
                "quantized inputs or outputs, none where calibrating=True stands beside "
                "enabled=False, and none in an asyncio task or another thread than the region's"
            )
            return torch.compiler.disable(run)(self, *args, **options)
        with as_in_first_run(self):
            return forward(self, *args, **options)

    return cast("Forward", run)


def _is_exporting() -> bool:
    return bool(getattr(torch.compiler, "is_exporting", bool)())


def quantizers_of(
    layer: Any, recipe: str, device: torch.device, grads: bool
) -> list[GemmQuantizers]:
    """Return the layer's quantizers in the region that is open around the compiled function."""
    region = regions.entered()
    if not region.enabled or region.recipe is None or shown_recipe(region.recipe) != recipe:
        raise UnsupportedError(
            f"{layer.name or type(layer).__name__} was compiled for zerocast.autocast with "
            f"{recipe}, and runs under {region.recipe if region.enabled else 'no region'}, by "
            f"contextvars.Context.run or the like. Enter the region where the function is called."
        )
    with torch.set_grad_enabled(grads):
        return layer._registered(region, device)


# --- what is constant in a graph ---


def has_state(recipe: str) -> bool:
    """Say whether the recipe of this text keeps state between casts."""
    return bool(recipe_from_text(recipe).has_state)


_sites: list[Any] = [None, 0]


def next_site() -> int:
    """Return the number of the next operation in the graph that is being traced."""
    traced = torch._guards.CompileContext.current_compile_id()
    if traced != _sites[0]:
        _sites[:] = [traced, 0]
    _sites[1] += 1
    return int(_sites[1])


# torch.compiler.assume_constant_result sets this attribute, but also loads the compiler.
has_state._dynamo_marked_constant = True  # type: ignore[attr-defined]
next_site._dynamo_marked_constant = True  # type: ignore[attr-defined]


# --- numbers for objects: handles of layers, tickets of forwards ---

_numbers = itertools.count(1)
_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_tickets: weakref.WeakValueDictionary[int, Ticket] = weakref.WeakValueDictionary()
_quantizers: weakref.WeakValueDictionary[int, Quantizer] = weakref.WeakValueDictionary()
_numbers_of_quantizers: weakref.WeakKeyDictionary[Quantizer, int] = weakref.WeakKeyDictionary()


def new_handle(layer: object) -> torch.Tensor:
    """Return int64 [1], a new number by which graphs refer to ``layer``."""
    number = next(_numbers)
    _layers[number] = layer
    return numbered(number)


def layer_of(handle: torch.Tensor) -> Any:
    """Return the layer that has this handle."""
    return _layers[int(handle)]


def numbered(number: int) -> torch.Tensor:
    """Return int64 [1], which can be written outside of inference mode, too."""
    with torch.inference_mode(False):
        return torch.tensor([number], dtype=torch.int64, device="cpu")


class Ticket(bytearray):
    """The memory of a ticket, two numbers: its own and its quantizer's. It refers to the quantizer,
    which so exists as long as the ticket's tensor. A copy of the tensor (made by hooks on saved
    tensors) does not, but its second number finds the quantizer as long as the layer has it.
    """

    quantizer: Quantizer
    watch: Watch | None

    @classmethod
    def new(cls, quantizer: Quantizer, watch: Watch | None) -> torch.Tensor:
        """Return a new ticket, int64 [2]."""
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
        """Return the quantizer, and the function that is called with what it quantizes."""
        number, of_quantizer = tensor.tolist()
        ticket = _tickets.get(number)
        if ticket is not None:
            return ticket.quantizer, ticket.watch
        quantizer = _quantizers.get(of_quantizer)
        if quantizer is None:
            raise UnsupportedError(
                "the backward of a compiled layer needs the recipe state that its forward had, and "
                "the layer has met another recipe since, while hooks on saved tensors (such as "
                "save_on_cpu) held copies. Run the backward before the layer's forward under "
                "another recipe, or leave out the hooks."
            )
        return quantizer, None
