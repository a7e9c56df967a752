"""Which layers torch.compile traces in a region of autocast, and which run uncompiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from zerocast.errors import UnsupportedError
from zerocast.nn.recompute import as_in_first_run
from zerocast.nn.regions import HIGH_PRECISION, NO_REGION, UNTRACEABLE
from zerocast.nn.traced_memory import remembers
from zerocast.tensors import QuantizedTensor

if TYPE_CHECKING:
    from zerocast.nn.quantized_module import QuantizedModule

Forward = TypeVar("Forward", bound=Callable[..., Any])


def eager_in_regions(forward: Forward) -> Forward:
    """Let torch.compile leave out a layer's ``forward`` where its graph cannot hold what that does
    in a region of autocast.

    A graph that holds the layer is guarded by the region's recipe. (``torch.compiler.disable`` as a
    decorator would load the compiler with the package.)
    """

    @functools.wraps(forward)
    def run(self: QuantizedModule, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            recipe, exports = self._traced_recipe(), not torch.compiler.is_dynamo_compiling()
            if recipe in (NO_REGION, HIGH_PRECISION):
                return forward(self, *args, **options)
            holds = recipe != UNTRACEABLE and self.is_traceable
            holds = holds and not options.get("fp8_output", False)
            holds = holds and not any(isinstance(each, QuantizedTensor) for each in args)
            if holds and remembers(recipe):
                holds = self._handle is not None and not exports and not _is_exporting()
            if holds:
                return forward(self, *args, **options)
            if exports or _is_exporting():
                raise UnsupportedError(
                    f"torch.export cannot hold what a layer does under zerocast.autocast with a "
                    f"recipe that remembers something between casts, nor layers with quantized "
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
