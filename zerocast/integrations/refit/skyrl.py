"""SkyRL: a weight extractor that gives codes and scales."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch

from zerocast.refit import Refit


class CodesExtractor:
    """A ``WeightExtractor``: what a dialect stores, and no conversion to the dtype that is asked
    for.

    Args:
        refit: the refit of the policy's model; its ``dtype`` is that of what is not quantized.
    """

    def __init__(self, refit: Refit) -> None:
        self.refit = refit

    def extract_weights(self, dtype: torch.dtype) -> Iterator[Any]:
        """Yield a ``WeightChunk`` for each tensor; all ranks iterate over them."""
        chunk = import_module("skyrl.backends.skyrl_train.weight_sync.base").WeightChunk
        for name, tensor in self.refit.named_tensors():
            described = {"names": [name], "dtypes": [str(tensor.dtype)]}
            yield chunk(**described, shapes=[list(tensor.shape)], tensors=[tensor])

    def get_weight_metadata(self, dtype: torch.dtype) -> dict[str, list[Any]]:
        """Return names, dtypes and shapes, and cast nothing."""
        found = self.refit.metadata()
        return {
            "names": [name for name, _, _ in found],
            "dtype_names": [str(dtype).removeprefix("torch.") for _, dtype, _ in found],
            "shapes": [list(shape) for _, _, shape in found],
        }
