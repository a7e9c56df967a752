"""Layers whose weights a step sends and does not wait for: their next forward does.

Note: gathers that overlap the forward
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A model reads its layers one after another, so the weights of the last need not have arrived when
the first begins. With ``overlap_all_gather`` the weights of every layer lie in buckets of their
own; a step begins to gather all of them, and a hook before a layer's forward waits for what holds
its weights and rebuilds their derived copies. Weights outside of these layers have arrived when the
step returns. Nothing is sent by a wait, so ranks may run their layers in different orders.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from zerocast.errors import InputError
from zerocast.optim.shards import ShardedWeights


def checked_layers(layers: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """The layers as a list.

    Raises:
        InputError: for anything but modules.
    """
    if not isinstance(layers, Iterable):
        raise InputError(
            f"overlap_all_gather takes the layers that wait for their weights, such as "
            f"model.layers, got {layers!r}."
        )
    listed = list(layers)
    for layer in listed:
        if not isinstance(layer, torch.nn.Module):
            raise InputError(
                f"overlap_all_gather takes modules, got a {type(layer).__name__} among them; give "
                "the layers that wait for their weights, such as model.layers."
            )
    return listed


def wait_in_forwards(layers: Iterable[torch.nn.Module], shards: ShardedWeights) -> None:
    """Let the forward of each layer wait for its weights, as long as ``shards`` lives."""
    reference = weakref.ref(shards)  # not the layers decide how long masters are kept

    for layer in layers:
        params = set(layer.parameters())
        needed = [
            place
            for place, bucket in enumerate(shards.buckets)
            if any(shards.weights[i].param in params for i in bucket.members)
        ]

        def wait(module: torch.nn.Module, args: Any, needed: list[int] = needed) -> None:
            alive = reference()
            if alive is not None:
                alive.arrive(needed)

        layer.register_forward_pre_hook(wait, prepend=True)
