"""The view that torch.compile has of a layer: whether its graph holds it, and the number by which
the operations of the graph (:mod:`zerocast.nn.traced_products`) find the layer.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from zerocast.errors import UnsupportedError
from zerocast.nn import regions
from zerocast.nn.recompute import note_compiled_run, recipe_of, run_layer
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
        if regions.is_traced():
            recipe = self._traced_recipe()
            if recipe in (regions.NO_REGION, regions.HIGH_PRECISION):
                return forward(self, *args, **options)
            holds = recipe != regions.UNTRACEABLE and self.is_traceable
            holds = holds and not options.get("fp8_output", False)
            holds = holds and not any(isinstance(each, QuantizedTensor) for each in args)
            if holds:
                return forward(self, *args, **options)
            if regions.is_exporting():
                raise UnsupportedError(
                    f"{regions.OLDER_TORCH}torch.export cannot hold what a layer does under "
                    f"zerocast.autocast with a recipe that keeps state between forwards, nor "
                    f"layers with quantized inputs or outputs, got "
                    f"{self.name or type(self).__name__}; export the model outside of the region."
                )
            torch._dynamo.graph_break(
                msg=f"{regions.OLDER_TORCH}under zerocast.autocast torch.compile cannot trace "
                "tensor-parallel layers, layers with quantized inputs or outputs, or recipes "
                "that keep state between forwards. Nor can it trace calibrating=True with "
                "enabled=False, or an asyncio task or thread other than the region's"
            )
            return torch.compiler.disable(run_uncompiled)(self, *args, **options)
        return run_layer(self, forward, *args, **options)

    def run_uncompiled(*args: Any, **options: Any) -> Any:
        # The compiled function, too, may be computed again without its region.
        note_compiled_run(recipe_of(regions.current()))
        return run(*args, **options)

    return cast("Forward", run)


# --- what is constant in a graph ---


def draws_gradients(recipe: str) -> bool:
    """Say whether the recipe of this text rounds gradients stochastically."""
    return bool(recipe_from_text(recipe).for_role("grad_output").state)


# torch.compiler.assume_constant_result sets this attribute, but also loads the compiler.
draws_gradients._dynamo_marked_constant = True  # type: ignore[attr-defined]


# --- handles ---

_numbers = itertools.count(1)
_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def new_handle(layer: object) -> torch.Tensor:
    """Return int64 [1], a new number by which graphs refer to ``layer``."""
    number = next(_numbers)
    _layers[number] = layer
    return numbered(number)


def layer_of(handle: torch.Tensor) -> Any:
    """Return the layer that has this handle."""
    layer = _layers.get(int(handle))
    if layer is None:
        raise UnsupportedError(
            "the backward of a compiled layer that rounds gradients stochastically needs the "
            "layer, which has been deleted since its forward; keep the model until then."
        )
    return layer


def numbered(number: int) -> torch.Tensor:
    """Return int64 [1], which can be written outside of inference mode, too."""
    with torch.inference_mode(False):
        return torch.tensor([number], dtype=torch.int64, device="cpu")
