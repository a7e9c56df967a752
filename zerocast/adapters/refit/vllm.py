"""vLLM: a weight source for the trainer's side of its weight transfer engines."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch

from zerocast.refit import Refit


def codes_source(refit: Refit) -> Any:
    """Return a ``WeightSource`` of whole tensors in the checkpoint's format, on every rank.

    Args:
        refit: the refit of the trained model; its dialect is that of the server's checkpoint.
    """
    base = import_module("vllm.distributed.weight_transfer.base")
    # vLLM 0.30, which SkyRL uses, accepts any order, and has no groups.
    groups_of = getattr(base, "layerwise_groups", lambda names: [names])

    class CodesSource(base.WeightSource):  # type: ignore[name-defined]
        def metadata(self) -> list[Any]:
            """Return a ``ParamMeta`` for every tensor, group by group, without a cast."""
            found = {name: (name, dtype, tuple(shape)) for name, dtype, shape in refit.metadata()}
            groups = groups_of(list(found))
            return [base.ParamMeta(*found[name]) for group in groups for name in group]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            """Cast and yield the current weights; all ranks must iterate over them."""
            tensors, early = refit.named_tensors(), dict[str, torch.Tensor]()
            for meta in self.metadata():
                while meta.name not in early:  # keep tensors that come later in the groups' order
                    early.update([next(tensors)])
                yield meta.name, early.pop(meta.name)

    return CodesSource()
