"""Masters and weights whose memory becomes another one after a plan was made: the cast follows, or
every rank is told; memory that was given back is never touched.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import zerocast
from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from zerocast.comm import Communicator, run_in_process
from zerocast.errors import InputError

pytestmark = pytest.mark.usefixtures("backend")

SHAPE = (32, 64)
NUMEL = 32 * 64
RECIPES = {
    "nvfp4": zerocast.NVFP4BlockScaling(),
    "mxfp8": zerocast.MXFP8BlockScaling(),
    "delayed": zerocast.DelayedScaling(),
    "four_over_six": zerocast.NVFP4BlockScaling(nvfp4_4over6="weights"),
}


def values(seed: int) -> torch.Tensor:
    """FP32 [NUMEL], other magnitudes for other seeds."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(NUMEL, generator=g) * seed


def planned(
    comm: Communicator, recipe: zerocast.Recipe
) -> tuple[zerocast.QuantizedTensor, torch.Tensor, zerocast.CastPlan]:
    """A weight, this rank's master and their plan, after one cast."""
    start, end = (NUMEL * r // comm.size for r in (comm.rank, comm.rank + 1))
    weight = torch.nn.Parameter(zerocast.empty(SHAPE, recipe), requires_grad=False)
    master = values(1)[start:end].clone()
    plan = zerocast.CastPlan([weight], [master], [start], comm)
    plan.cast()
    return weight, master, plan  # type: ignore[return-value]


def set_data(master: torch.Tensor, new: torch.Tensor) -> None:
    """``master.data = new``."""
    master.data = new


def shared(master: torch.Tensor, new: torch.Tensor) -> None:
    """To shared memory, and written there."""
    master.share_memory_()
    master.copy_(new)


def regrown(master: torch.Tensor, new: torch.Tensor) -> None:
    """Grown, which moves it, and back to its size."""
    numel = master.numel()
    master.resize_(64 * numel)
    master.resize_(numel)
    master.copy_(new)


@pytest.mark.parametrize("move", [set_data, torch.Tensor.set_, shared, regrown])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_master_in_other_memory_is_cast_from_there(
    recipe: str, move: Callable[[torch.Tensor, torch.Tensor], Any]
) -> None:
    """A master of the same size in other memory gives the bytes of what it holds now, though one
    rank alone has moved it.
    """
    given = RECIPES[recipe]
    expected = zerocast.empty(SHAPE, given)
    whole = values(1)
    plan = zerocast.CastPlan([expected], [whole], [0])
    plan.cast()
    whole[: NUMEL // 2] = values(3)[: NUMEL // 2]
    plan.cast()
    plan.all_gather()

    def on_rank(comm: Communicator) -> None:
        weight, master, plan = planned(comm, given)
        if comm.rank == 0:
            move(master, values(3)[: NUMEL // 2].clone())
        plan.cast()
        plan.all_gather()
        assert_same_storage(weight, expected, f"rank {comm.rank}")

    run_in_process(2, on_rank)


def test_a_master_of_another_dtype_in_the_same_memory() -> None:
    """Its bits are other values from then on."""
    weight = zerocast.empty(SHAPE, RECIPES["nvfp4"])
    master = values(1).bfloat16()
    plan = zerocast.CastPlan([weight], [master], [0])
    plan.cast()
    master.data = master.data.view(torch.float16)
    plan.cast()
    plan.all_gather()
    numerics = zerocast.quantize(master.view(SHAPE), RECIPES["nvfp4"], dtype=torch.bfloat16)
    assert_same_storage(weight, numerics, "read as FP16")


def cut_short(master: torch.Tensor) -> None:
    """Some elements less."""
    master.resize_(5)


def given_back(master: torch.Tensor) -> None:
    """Without memory."""
    master.untyped_storage().resize_(0)


def strided(master: torch.Tensor) -> None:
    """As many elements, with gaps."""
    master.data = torch.zeros(2 * master.numel())[::2]


def double(master: torch.Tensor) -> None:
    """A dtype that no master has."""
    master.data = master.data.double()


def refused_cast(comm: Communicator, recipe: str, spoil: Callable[[torch.Tensor], None]) -> str:
    """What every rank is told where the last one spoils its master; the weight is as it was, but
    for codes of delayed scaling.
    """
    weight, master, plan = planned(comm, RECIPES[recipe])
    plan.all_gather()
    before = {k: v.clone() for k, v in weight.quantized_storage.buffers.items()}
    kept = master.clone()
    if comm.rank == comm.size - 1:
        spoil(master)
    with pytest.raises(InputError) as refused:
        plan.cast()
    for name, buffer in weight.quantized_storage.buffers.items():
        if recipe != "delayed" or not name.endswith("_data"):
            assert_same_bytes(buffer, before[name], name)
    master.data = kept  # mended: the plan goes on
    plan.cast()
    plan.all_gather()
    for name in ("rowwise_data", "columnwise_data") if recipe != "delayed" else ():
        assert_same_bytes(getattr(weight, name), before[name], name)
    return str(refused.value)


@pytest.mark.parametrize("spoil", [cut_short, given_back, strided, double])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_master_that_no_longer_fits_is_refused_on_every_rank(
    recipe: str, spoil: Callable[[torch.Tensor], None]
) -> None:
    """Every rank hears the same in the reduction that it is in anyway; nothing is written, and with
    the master mended the next cast is right.
    """
    messages = run_in_process(2, lambda comm: refused_cast(comm, recipe, spoil))
    assert set(messages) == {messages[0]}
    assert messages[0].startswith("on rank 1: model_weights[0]")


def test_every_communicator_brings_the_trouble_of_a_rank(ranks: Any) -> None:
    """The refusal of a cast is the same on every rank of every communicator."""
    messages = ranks.run(lambda comm: refused_cast(comm, "nvfp4", cut_short))
    assert set(messages) == {messages[0]}
    assert "model_weights[0]" in messages[0]


def test_one_rank_may_give_masters_and_another_none(ranks: Any) -> None:
    """``plan.cast(masters)`` and ``plan.cast()`` run the same collectives everywhere."""
    expected = zerocast.quantize(values(1).view(SHAPE), RECIPES["mxfp8"], dtype=torch.bfloat16)

    def on_rank(comm: Communicator) -> None:
        weight, master, plan = planned(comm, RECIPES["mxfp8"])
        plan.cast([master.clone()] if comm.rank == 0 else None)
        plan.all_gather()
        for name in ("rowwise_data", "columnwise_data"):
            assert_same_bytes(getattr(weight, name), getattr(expected, name), name)

    ranks.run(on_rank)


def test_a_converted_weight_is_refused() -> None:
    """After ``module.half()`` the parameter is another weight: the plan says so, on every rank, and
    writes no orphan.
    """

    def on_rank(comm: Communicator) -> str:
        module = torch.nn.Module()
        module.weight, _, plan = planned(comm, RECIPES["nvfp4"])
        if comm.rank == 1:
            module.half()
        with pytest.raises(InputError) as refused:
            plan.cast()
        return str(refused.value)

    messages = run_in_process(2, on_rank)
    assert set(messages) == {messages[0]}
    assert "make a new plan" in messages[0]


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("usage", ["rowwise_usage", "columnwise_usage"])
def test_dropped_copies_after_planning(recipe: str, usage: str) -> None:
    """A dropped copy that is exchanged is refused on every rank at the next cast, and one that is
    derived is not missed; a gather under way when it is dropped serves the others.
    """

    def on_rank(comm: Communicator) -> str:
        weight, _, plan = planned(comm, RECIPES[recipe])
        if recipe == "nvfp4":
            plan.all_gather()
        if comm.rank == 1:
            weight.update_usage(**{usage: False})
        if recipe == "mxfp8":
            plan.all_gather()
            if comm.rank == 0:
                numerics = zerocast.quantize(
                    values(1).view(SHAPE), RECIPES[recipe], dtype=weight.dtype
                )
                assert_same_bytes(weight.rowwise_data, numerics.rowwise_data, "rowwise_data")
                assert_same_bytes(
                    weight.columnwise_data, numerics.columnwise_data, "columnwise_data"
                )
        if (recipe, usage) == ("nvfp4", "columnwise_usage"):
            plan.cast()
            plan.all_gather()
            return ""
        with pytest.raises(InputError) as refused:
            plan.cast()
        return str(refused.value)

    messages = run_in_process(2, on_rank)
    assert messages[0] == messages[1]
    assert "after update_usage" in messages[0] or not messages[0]


def test_codes_in_other_memory() -> None:
    """A weight's codes that were moved behind its back are written where they lie now; codes whose
    memory was given back are refused, on every rank.
    """

    def on_rank(comm: Communicator) -> str:
        weight, master, plan = planned(comm, RECIPES["nvfp4"])
        codes = weight.quantized_storage.buffers["rowwise_data"]
        if comm.rank == 0:
            codes.set_(torch.zeros_like(codes))
        master.mul_(2)
        plan.cast()
        plan.all_gather()
        numerics = zerocast.quantize(
            values(1).view(SHAPE) * 2, RECIPES["nvfp4"], dtype=torch.bfloat16
        )
        assert_same_bytes(codes, numerics.rowwise_data, "rowwise_data")
        if comm.rank == 0:
            codes.untyped_storage().resize_(0)
        with pytest.raises(InputError) as refused:
            plan.cast()
        return str(refused.value)

    messages = run_in_process(2, on_rank)
    assert messages[0] == messages[1]
    assert "replace_raw_data" in messages[0]
