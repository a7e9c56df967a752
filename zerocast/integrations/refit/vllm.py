"""vLLM: a weight source for the trainer's side of its weight transfer engines."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch

from zerocast.refit import Refit


class CodesSource:
    """A ``WeightSource``: tensors in the checkpoint's format, which the engine loads with
    ``is_checkpoint_format``.

    Args:
        refit: the refit of the trained model; its dialect is that of the server's checkpoint.
    """

    def __init__(self, refit: Refit) -> None:
        self.refit = refit

    def metadata(self) -> list[Any]:
        """Return a ``ParamMeta`` for every tensor, and cast nothing."""
        meta = import_module("vllm.distributed.weight_transfer.base").ParamMeta
        return [meta(name, dtype, tuple(shape)) for name, dtype, shape in self.refit.metadata()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Cast the weights as they are now; all ranks iterate over them."""
        return self.refit.named_tensors()
