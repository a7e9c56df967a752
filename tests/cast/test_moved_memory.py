"""Masters and weights whose memory becomes another one after a plan was made: the cast follows, or
every rank is told; memory that was given back is never touched.
"""

import pytest
import torch

import zerocast
from tests.support.claims import assert_same_tensors, stored, told_all
from tests.support.planned import NUMEL, SHAPE, Planned, unsharded
from tests.support.ranks import on_ranks
from tests.support.recipes import RECIPES
from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from zerocast.comm import Communicator
from zerocast.errors import InputError

pytestmark = pytest.mark.usefixtures("backend")


def values(seed: int) -> torch.Tensor:
    """FP32 [NUMEL], other magnitudes for other seeds."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(NUMEL, generator=g) * seed


def planned(comm: Communicator, recipe: str) -> Planned:
    """A weight whose master was cast once."""
    made = Planned(comm, RECIPES[recipe], values(1))
    made.plan.cast()
    return made


def test_a_master_of_another_dtype_in_the_same_memory() -> None:
    """Its bits are other values from then on."""
    weight = zerocast.empty(SHAPE, RECIPES["nvfp4"])
    master = values(1).bfloat16()
    plan = zerocast.CastPlan([weight], [master], [0])
    plan.cast()
    master.data = master.data.view(torch.float16)
    plan.cast()
    plan.all_gather()
    assert_same_storage(weight, unsharded(master, RECIPES["nvfp4"]), "read as FP16")


@on_ranks()
def test_every_communicator_brings_the_trouble_of_a_rank(comm: Communicator) -> None:
    """The refusal of a cast is the same on every rank of every communicator; nothing is written,
    and with the master mended the plan goes on.
    """
    ours = planned(comm, "nvfp4")
    ours.plan.all_gather()
    before, master = stored({"weight": ours.weight}), ours.master.clone()
    if comm.rank == comm.size - 1:
        ours.master.resize_(5)
    where = f"on rank {comm.size - 1}: " if comm.size > 1 else ""
    assert told_all(comm, InputError, ours.cast).startswith(f"{where}model_weights[0]")
    assert_same_tensors(stored({"weight": ours.weight}), before, "after the refusal")
    ours.master.data = master
    ours.cast()
    assert_same_tensors(stored({"weight": ours.weight}), before, "once mended")


@on_ranks()
def test_one_rank_may_give_masters_and_another_none(comm: Communicator) -> None:
    """``plan.cast(masters)`` and ``plan.cast()`` run the same collectives everywhere."""
    ours = planned(comm, "mxfp8")
    weight = ours.cast([ours.master.clone()] if comm.rank == 0 else None)
    assert_same_storage(weight, unsharded(values(1), RECIPES["mxfp8"]), f"rank {comm.rank}")


@on_ranks("in_process", 2)
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("usage", ["rowwise_usage", "columnwise_usage"])
def test_dropped_copies_after_planning(comm: Communicator, recipe: str, usage: str) -> None:
    """A dropped copy that is exchanged is refused on every rank at the next cast, and one that is
    derived is not missed; a gather under way when it is dropped serves the others.
    """
    ours = planned(comm, recipe)
    weight, plan = ours.weight, ours.plan
    if recipe == "nvfp4":
        plan.all_gather()
    if comm.rank == 1:
        weight.update_usage(**{usage: False})
    if recipe == "mxfp8":
        plan.all_gather()
        if comm.rank == 0:
            assert_same_storage(weight, unsharded(values(1), RECIPES[recipe]), "rank 0")
    if (recipe, usage) == ("nvfp4", "columnwise_usage"):
        ours.cast()
    else:
        assert "after update_usage" in told_all(comm, InputError, plan.cast)


@on_ranks("in_process", 2)
def test_codes_in_other_memory(comm: Communicator) -> None:
    """A weight's codes that were moved behind its back are written where they lie now, also where
    that was between cast and gather, or while a gather is under way; codes whose memory was given
    back are refused, on every rank.
    """
    ours = planned(comm, "nvfp4")
    ours.cast()
    codes = ours.weight.quantized_storage.buffers["rowwise_data"]
    if comm.rank == 0:
        codes.set_(torch.zeros_like(codes))
    ours.master.mul_(2)
    ours.cast()
    expected = unsharded(values(1) * 2, RECIPES["nvfp4"])
    assert_same_bytes(codes, expected.rowwise_data, "rowwise_data")
    (gather,) = ours.plan._cast.gathers
    end = gather.start()
    if comm.rank == 0:
        codes.set_(codes.clone()).view(-1)[ours.end // 2 :] = 0
    end()
    assert_same_bytes(codes, expected.rowwise_data, "rowwise_data, gathered")
    ours.master.copy_(values(3)[ours.start : ours.end])
    ours.plan.cast()
    zerocast.replace_raw_data(ours.weight, torch.zeros_like(codes))
    ours.plan.all_gather()
    codes = ours.weight.quantized_storage.buffers["rowwise_data"]
    assert_same_bytes(codes, unsharded(values(3), RECIPES["nvfp4"]).rowwise_data, "replaced")
    if comm.rank == 0:
        codes.untyped_storage().resize_(0)
    assert "replace_raw_data" in told_all(comm, InputError, ours.cast)


@on_ranks("in_process", 2)
def test_a_shards_buffer_in_other_memory(comm: Communicator) -> None:
    """A caller's buffer for the codes of a shard that has moved receives them where it lies now."""
    own = torch.zeros(NUMEL // 4, dtype=torch.uint8)
    half = [0, NUMEL // 2, NUMEL]
    ours = Planned(
        comm, RECIPES["nvfp4"], values(1), cuts=half, fsdp_shard_model_weights=[own]
    )  # fmt: skip
    ours.plan.cast()
    own.set_(torch.zeros_like(own))
    ours.plan.cast()
    expected = unsharded(values(1), RECIPES["nvfp4"]).rowwise_data.view(-1)
    assert_same_bytes(own, expected.view(2, -1)[comm.rank], "the shard's codes")
