"""What plans promise for recipes that need more than an amax: state, second planes, choices."""

import math
from typing import Any

import pytest
import torch

import zerocast
from tests.support.claims import assert_same_tensors, stored
from tests.support.planned import NUMEL, SHAPE, Planned, cut, unsharded
from tests.support.ranks import on_ranks
from tests.support.recipes import (
    CAST_COLUMNWISE,
    NOT_SHARDABLE,
    RECIPES,
    each,
    every_recipe,
)
from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from tests.support.values import draw_values
from zerocast.comm import Communicator, RecordingCommunicator, SingleRank
from zerocast.errors import InputError, NonFiniteError
from zerocast.recipes import Recipe
from zerocast.tensors import quantize_into

DRAWN, DELAYED = RECIPES["nvfp4-drawn"], RECIPES["delayed"]
two_planes = each(*CAST_COLUMNWISE)


@on_ranks("in_process", 2)
def test_a_mixed_plan_makes_one_all_reduce_and_one_for_choices(comm: Communicator) -> None:
    """Weights of all recipes in one plan: one all-reduce MAX, and one SUM where one of them chooses
    scales; gathered are two planes of codes, one all-gather each, and scales by one for all planes.
    """
    recorded = RecordingCommunicator(comm)
    start, end = cut(NUMEL, 2)[comm.rank :][:2]
    weights = [zerocast.empty(SHAPE, recipe, name=name) for name, recipe in RECIPES.items()]
    few = [w for w in weights if not w.recipe.chooses_scales]
    for given, reductions in ((weights, 2), (few, 1)):
        masters, starts = [torch.ones(end - start)] * len(given), [start] * len(given)
        for exchange, gathers in (("full", 2), ("boundary", 3)):
            plan = zerocast.CastPlan(given, masters, starts, recorded, exchange=exchange)
            recorded.reset()
            plan.cast()
            assert recorded.total().calls == recorded.total(kind="all_reduce").calls == reductions
            plan.all_gather()
            assert recorded.total(kind="all_gather").calls == gathers


@on_ranks("in_process", 2)
@two_planes
def test_two_planes_are_gathered_in_place(comm: Communicator, recipe: Recipe) -> None:
    """After ``replace_raw_data`` of both planes into flat buffers the cast and the gather write
    there, and nowhere else; bytes are those of the unsharded cast.
    """
    master = draw_values("wide", NUMEL, 1)
    expected = unsharded(master, recipe)
    planned = Planned(comm, recipe, master)
    num_bytes = expected.rowwise_data.numel()
    flats = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2)]
    zerocast.replace_raw_data(planned.weight, *flats)
    assert_same_storage(planned.cast(), expected, f"rank {comm.rank}")
    assert_same_bytes(flats[0], expected.rowwise_data.view(-1), "the rowwise buffer")
    assert_same_bytes(flats[1], expected.columnwise_data.view(-1), "the columnwise buffer")


def test_a_second_buffer_for_one_plane_is_refused() -> None:
    """``replace_raw_data`` takes a columnwise buffer only where one is gathered."""
    weight = zerocast.empty(SHAPE, RECIPES["nvfp4"])
    buffers = [torch.zeros(NUMEL // 2, dtype=torch.uint8) for _ in range(2)]
    with pytest.raises(InputError, match=r"gathers rowwise_data; leave it out"):
        zerocast.replace_raw_data(weight, *buffers)


@each(*NOT_SHARDABLE)
def test_a_cast_transpose_cannot_be_sharded(recipe: Recipe) -> None:
    """One-dimensional blocks with a columnwise copy are refused, and the remedy works."""
    with pytest.raises(InputError, match=r"make the weight with columnwise=False"):
        Planned(SingleRank(), recipe)
    Planned(SingleRank(), recipe, empty={"columnwise": False}).cast()


@on_ranks("in_process", 2)
def test_finite_delayed_masters_are_checked_before_anything_is_written(comm: Communicator) -> None:
    """With ``check_finite`` a NaN raises on both ranks; codes, scales and what the recipe remembers
    are as before. Without a NaN the bytes are those of a plan without the check.
    """
    master = draw_values("normal", NUMEL, 4)
    expected = zerocast.empty(SHAPE, DELAYED)
    for _ in range(2):
        quantize_into(expected.quantized_storage, master.view(SHAPE))
    planned = Planned(comm, DELAYED, master, check_finite=True)
    planned.plan.cast()
    before = stored({"weight": planned.weight})
    planned.master[0] = math.nan if comm.rank else 1.0
    with pytest.raises(NonFiniteError, match=r"model_weights\[0\] holds a NaN"):
        planned.cast()
    assert_same_tensors(stored({"weight": planned.weight}), before, "after the refused cast")
    planned.master[0] = master[planned.start]
    assert_same_storage(planned.cast(), expected, f"rank {comm.rank}")


@on_ranks("in_process", 2)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_delayed_amax_that_is_not_finite_shows_and_is_forgotten(
    comm: Communicator, value: float
) -> None:
    """It makes the weight NaN for this step on every rank and leaves history and scale alone, so
    the next step is as if it had not been.
    """
    master = draw_values("normal", NUMEL, 5)
    planned = Planned(comm, DELAYED, master)
    buffers = planned.cast().quantized_storage.buffers
    before = {name: buffers[name].clone() for name in ("scale", "amax_history")}
    if comm.rank == 1:
        planned.master[3] = value
    assert planned.cast().dequantize().isnan().all()
    assert_same_tensors({name: buffers[name] for name in before}, before, "after the NaN")
    planned.master[3] = master[planned.start + 3]
    assert planned.cast().dequantize().isfinite().all()


def test_drawn_codes_depend_on_name_and_step_and_seed() -> None:
    """Equal name, step and seed give equal codes; another of any of them gives others."""
    master = draw_values("normal", NUMEL, 6).view(SHAPE)

    def codes(name: str = "a", casts: int = 1, **fields: Any) -> torch.Tensor:
        recipe = zerocast.NVFP4BlockScaling(
            fp4_quant_fwd_weight=DRAWN.fp4_quant_fwd_weight, **fields
        )
        weight = zerocast.empty(SHAPE, recipe, name=name)
        for _ in range(casts):
            quantize_into(weight.quantized_storage, master)
        return weight.rowwise_data

    assert_same_bytes(codes(), codes(), "codes of the same draw")
    for other in (codes(name="b"), codes(casts=2), codes(seed=1)):
        assert not torch.equal(codes(), other)


def test_the_first_name_of_a_weight_stays() -> None:
    """A plan names a weight that has no name and leaves one that has: the codes do not depend on
    who casts it.
    """
    master = draw_values("normal", NUMEL, 7)
    named = unsharded(master, DRAWN, name="a")
    for first, later in (("a", "b"), (None, "a")):
        planned = Planned(SingleRank(), DRAWN, master, empty={"name": first}, names=[later])
        assert_same_storage(planned.cast(), named, f"{first}, {later}")


@every_recipe
def test_saved_weights_go_on_as_they_would_have(recipe: Recipe) -> None:
    """What a recipe remembers is saved with the weight: a copy casts to the same bytes."""
    first, second = (draw_values(kind, NUMEL, 8).view(SHAPE) for kind in ("normal", "wide"))
    weight = zerocast.quantize(first, recipe, name="w")
    loaded = zerocast.empty(SHAPE, recipe, dtype=torch.float32)
    loaded.copy_(weight)
    for one in (weight, loaded):
        quantize_into(one.quantized_storage, second)
    assert_same_storage(loaded, weight, "the loaded weight")
