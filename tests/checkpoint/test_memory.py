"""What saving and loading take beside a rank's own shards: bytes of tensors, counted on each rank
as they are made, so the figures are the same in every run.
"""

from pathlib import Path
from typing import Any

import torch

import zerocast
from tests.support.live_memory import LiveMemory
from tests.support.ranks import on_ranks
from zerocast.checkpoint import load, save
from zerocast.comm import Communicator
from zerocast.optim import ZeroOptimizer

RANKS = 3
SHAPES = [*[(96, 128)] * 17, (112, 80)]
TENSOR = 4 * 96 * 128
"""Bytes of the largest tensor, of which a piece is a part."""


@on_ranks("in_process", RANKS)
def test_a_save_takes_a_piece_or_a_copy_and_never_the_model(
    comm: Communicator, tmp_path: Path
) -> None:
    """At once: two pieces, whatever the model. Beside the training: one copy of this rank's shards,
    to the byte, and no more than a piece beside it. One file: four whole tensors, the collective's
    own among them. Loading: three shares at most.
    """
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    weights = [torch.nn.Parameter(zerocast.quantize(value, "nvfp4")) for value in values]
    optimizer = ZeroOptimizer([(f"w{i}", w) for i, w in enumerate(weights)], group=comm, lr=0.01)
    for weight, value in zip(weights, values, strict=True):
        weight.grad = value
    optimizer.step()
    kept = optimizer.inner.state
    share = sum(m.nbytes + sum(each.nbytes for each in kept[m].values()) for m in kept)
    steps = sum(each["step"].nbytes for each in kept.values())  # one rank writes what all have

    def taken(do: Any, *given: Any, **options: Any) -> int:
        """Bytes at the peak."""
        with LiveMemory() as live:
            result = do(*given, **options)
        if options:
            result.wait()
        return live.peak

    sharded, file = tmp_path / "c", tmp_path / "c.safetensors"
    at_once = taken(save, sharded, optimizer)
    beside = taken(save, sharded, optimizer, asynchronous=True)
    whole = taken(save, file, optimizer)
    read = [taken(load, path, optimizer) for path in (sharded, file)]
    assert at_once <= 2 * TENSOR
    assert share - steps <= beside <= share + TENSOR
    assert whole <= 4 * TENSOR
    assert max(read) <= 3 * share
