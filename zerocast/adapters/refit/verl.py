"""verl: the quantized parameters of an engine, for the engine's methods of the same names."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from zerocast.comm import TorchDistributedCommunicator
from zerocast.refit import Refit


class EngineWeights:
    """An implementation of ``BaseEngine.get_per_tensor_param`` and ``get_per_tensor_param_shard``,
    whose results a checkpoint engine's ``send_weights`` takes.

    Args:
        refit: the refit of the engine's model.
    """

    def __init__(self, refit: Refit) -> None:
        self.refit = refit

    def get_per_tensor_param(self, **kwargs: Any) -> tuple[Iterator[Any], None]:
        """Return an iterator of names and whole tensors; all ranks must iterate over it."""
        return self.refit.named_tensors(), None

    def get_per_tensor_param_shard(self, **kwargs: Any) -> tuple[Iterator[Any], None]:
        """Return an iterator of (name, this rank's elements, flat, ``ShardSpec``)."""
        return self._shards(), None

    def _shards(self) -> Iterator[Any]:
        shard_spec = import_module("verl.workers.engine.spec").ShardSpec
        for piece in self.refit.shards():
            given: dict[str, Any] = {"full_shape": tuple(piece.shape)}
            if isinstance(piece.comm, TorchDistributedCommunicator):
                given |= {"place": piece.start, "gather_group": piece.comm.process_group}
            yield piece.name, piece.values, shard_spec(**given)
