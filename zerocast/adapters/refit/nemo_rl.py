"""NeMo-RL: the map from names to local shards that its resharding refit sends."""

from importlib import import_module
from typing import Any

import torch

from zerocast.refit import Piece, Refit


class LocalShards:
    """This rank's rows of every tensor of a checkpoint, for ``build_hf_to_local_param_map``.

    Args:
        refit: the refit of the policy's model, whose shards are whole rows, as under FSDP2.
    """

    def __init__(self, refit: Refit) -> None:
        self.refit = refit
        self._pieces: dict[str, Piece] = {}

    def cast(self) -> None:
        """Cast this rank's shards; called on all ranks before each refit."""
        self._pieces = {piece.name: piece for piece in self.refit.shards()}

    def build_hf_to_local_param_map(self, refit_info: dict[str, Any]) -> Any:
        """Return the ``HFToLocalParamMap`` of all tensors, which looks up the latest rows."""
        utils = import_module("nemo_rl.weight_sync.nccl_reshard_utils")
        return utils.HFToLocalParamMap(specs={
            name: utils.LocalParamSpec(
                base=name, pre=lambda name: utils.RefitCtx(buf=self.rows(name))
            )
            for name, *_ in self.refit.metadata()
        })  # fmt: skip

    def rows(self, name: str) -> torch.Tensor:
        """Return this rank's rows of one tensor from the latest cast."""
        piece = self._pieces[name]
        return piece.values.view(-1, *piece.shape[1:]) if piece.shape else piece.values
