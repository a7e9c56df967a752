"""What ranks hold after FSDP2's gathers is compared, once a cast; planted faults are named."""

from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import zerocast
from tests.sharded.sharded import adamw, bank, converted, shard, train_step
from tests.support.ranks import on_ranks
from tests.support.recipes import RECIPES
from zerocast.comm import Communicator
from zerocast.sharded import all_gather, verify_gathers

GROUPS = [["*.0", "*.1"]]
PROCESSES = pytest.mark.mpi(min_size=4)


@PROCESSES
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "delayed", "nvfp4-drawn"])
@on_ranks("torch_distributed", 3)
def test_right_weights_pass(comm: Communicator, recipe: str) -> None:
    """Every gather after a cast, with amax groups and rows that do not divide."""
    model = shard(converted(RECIPES[recipe], (48, 37, 130), amax_groups=GROUPS))
    verify_gathers(model, "full")
    optimizer = adamw(model.parameters())
    for step in range(3):
        train_step(model, optimizer, comm, step)
    layer = torch.nn.Sequential(torch.nn.Embedding(37, 32))
    zerocast.nn.convert(layer, RECIPES["nvfp4"], weights="master", include=["0"])
    fully_shard(layer)
    verify_gathers(layer, "full")
    layer(torch.arange(3)).float().sum().backward()


@PROCESSES
@pytest.mark.parametrize("mode", ["hash", "full"])
@on_ranks("torch_distributed", 3)
def test_faults_are_named(comm: Communicator, mode: str, tmp_path: Path) -> None:
    """On every rank the same: codes that one rank stored wrongly, found by a hash; codes that their
    owner cast wrongly, by a whole cast alone.
    """
    model = bank(rows=(48, 37))
    verify_gathers(model, mode)
    x = torch.ones(2, 96)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        model(x)
        rebuild = all_gather.rebuild_derived

        def wrong(weights: list) -> None:
            weights[0].buffers["rowwise_data"][0, 3] ^= 0x10
            rebuild(weights)

        if mode == "hash" and comm.rank == 1:
            patch.setattr(all_gather, "rebuild_derived", wrong)
        mark = all_gather.LowBitAllGather.mark_cast

        def spoilt(gather: all_gather.LowBitAllGather, *given: object) -> None:
            mark(gather, *given)
            gather.shards.sent["rowwise_data"][3] ^= 0x10

        if mode == "full" and comm.rank == 1:
            patch.setattr(all_gather.LowBitAllGather, "mark_cast", spoilt)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        with pytest.raises(zerocast.VerificationError) as caught:
            model(x)
    texts = comm.all_gather_object(str(caught.value))
    assert len(set(texts)) == 1
    assert "layers.0.weight (48, 96)" in texts[0]
    found = {
        "hash": "rank 1 holds 0x7 (6) at element [0, 7] of rowwise_data, of the shard of rank 0",
        "full": "[16, 7] of rowwise_data, of the shard of rank 1 where the unsharded cast",
    }
    assert found[mode] in texts[0]
    assert ("ranks 0, 1, 2 hold" in texts[0]) == (mode == "full")
    assert f"-rank{comm.rank}-" in texts[0] or (mode == "hash" and comm.rank != 1)


@PROCESSES
@on_ranks("torch_distributed", 3)
def test_a_rank_at_another_step_is_named(comm: Communicator) -> None:
    """By the numbers that callers of precompute_scales_for_fsdp give."""
    model = bank(rows=(48, 37))
    model(torch.ones(2, 96))
    for number in (0, 1):
        zerocast.sharded.precompute_scales_for_fsdp(model, number=number)
    with pytest.raises(zerocast.RankMismatchError, match=r"\{0: 2, 1: 2, 2: 3\}"):
        zerocast.sharded.precompute_scales_for_fsdp(model, number=2 + (comm.rank == 2))
    zerocast.sharded.precompute_scales_for_fsdp(model)
    model(torch.ones(2, 96)).sum().backward()


@PROCESSES
@on_ranks("torch_distributed", 2)
def test_what_is_refused(comm: Communicator) -> None:
    """Another mode, and a model without masters."""
    with pytest.raises(zerocast.InputError, match="verify must be 'off', 'hash' or 'full'"):
        verify_gathers(bank(rows=(48,)), "some")
    with pytest.raises(zerocast.InputError, match="verify_gathers needs a model with parameters"):
        verify_gathers(torch.nn.Linear(2, 2), "hash")
