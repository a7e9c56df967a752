"""What plans promise for recipes that need more than an amax: state, second planes, choices."""

import math
from typing import Any

import pytest
import torch

import zerocast
from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from tests.support.values import draw_values
from zerocast.comm import Communicator, RecordingCommunicator, run_in_process
from zerocast.errors import InputError, NonFiniteError, RankMismatchError
from zerocast.recipes import Recipe
from zerocast.tensors import quantize_into

SHAPE = torch.Size((40, 64))
NUMEL = SHAPE.numel()
DRAWN = zerocast.NVFP4BlockScaling(
    fp4_quant_fwd_weight=zerocast.QParams(fp4_2d_quantization=True, stochastic_rounding=True)
)
CHOOSING = zerocast.NVFP4BlockScaling(nvfp4_4over6="weights")
DELAYED = zerocast.DelayedScaling(amax_history_len=4)
TWO_PLANES = (zerocast.MXFP8BlockScaling(), zerocast.Float8RowwiseScaling())
EVERY: tuple[Recipe, ...] = (
    zerocast.NVFP4BlockScaling(),
    CHOOSING,
    DRAWN,
    zerocast.Float8CurrentScaling(),
    DELAYED,
    zerocast.Float8BlockScaling(),
    *TWO_PLANES,
    zerocast.MXFP8BlockScaling(enable_2d_quantization=True),
)


def halves(rank: int, size: int = 2) -> tuple[int, int]:
    """Start and end of this rank's elements; the cut lies inside a row, a block and a byte."""
    cuts = [0, *(NUMEL * r // size + 7 for r in range(1, size)), NUMEL]
    return cuts[rank], cuts[rank + 1]


def test_a_mixed_plan_makes_one_all_reduce_and_one_for_choices() -> None:
    """Weights of all recipes in one plan: one all-reduce MAX, and one SUM where one of them chooses
    scales; gathered are two planes of codes, one all-gather each.
    """
    masters = [draw_values("normal", NUMEL, i) for i in range(len(EVERY))]

    def on_rank(inner: Communicator) -> None:
        comm = RecordingCommunicator(inner)
        start, end = halves(comm.rank)
        weights = [zerocast.empty(SHAPE, r, name=f"w{i}") for i, r in enumerate(EVERY)]
        plan = zerocast.CastPlan(weights, [m[start:end] for m in masters], [start] * 9, comm)
        comm.reset()
        plan.cast()
        assert comm.total().calls == comm.total(kind="all_reduce").calls == 2
        plan.all_gather()
        assert comm.total(kind="all_gather").calls == 2
        comm.reset()
        few = [w for w in weights if not w.recipe.chooses_scales]
        plan = zerocast.CastPlan(few, [m[start:end] for m in masters[1:]], [start] * 8, comm)
        comm.reset()
        plan.cast()
        assert comm.total().calls == comm.total(kind="all_reduce").calls == 1

    run_in_process(2, on_rank)


@pytest.mark.parametrize("recipe", TWO_PLANES)
def test_two_planes_are_gathered_in_place(recipe: Recipe) -> None:
    """After ``replace_raw_data`` of both planes into flat buffers the cast and the gather write
    there, and nowhere else; bytes are those of the unsharded cast.
    """
    master = draw_values("wide", NUMEL, 1)
    expected = zerocast.quantize(master.view(SHAPE), recipe, dtype=torch.bfloat16)

    def on_rank(comm: Communicator) -> None:
        weight = zerocast.empty(SHAPE, recipe)
        flats = [torch.zeros(NUMEL, dtype=torch.uint8) for _ in range(2)]
        zerocast.replace_raw_data(weight, *flats)
        start, end = halves(comm.rank)
        plan = zerocast.CastPlan([weight], [master[start:end]], [start], comm)
        plan.cast()
        plan.all_gather()
        assert_same_storage(weight, expected, f"rank {comm.rank}")
        assert_same_bytes(flats[0], expected.rowwise_data.view(-1), "the rowwise buffer")
        assert_same_bytes(flats[1], expected.columnwise_data.view(-1), "the columnwise buffer")

    run_in_process(2, on_rank)


def test_a_second_buffer_for_one_plane_is_refused() -> None:
    """``replace_raw_data`` takes a columnwise buffer only where one is gathered."""
    weight = zerocast.empty(SHAPE, zerocast.NVFP4BlockScaling())
    with pytest.raises(InputError, match=r"gathers rowwise_data; leave it out"):
        zerocast.replace_raw_data(
            weight,
            torch.zeros(NUMEL // 2, dtype=torch.uint8),
            torch.zeros(NUMEL // 2, dtype=torch.uint8),
        )


@pytest.mark.parametrize("recipe", TWO_PLANES)
def test_one_shard_buffer_for_two_planes_is_refused(recipe: Recipe) -> None:
    """``fsdp_shard_model_weights`` has a buffer for each gathered plane."""
    weight = zerocast.empty(SHAPE, recipe)
    with pytest.raises(InputError, match=r"rowwise_data and columnwise_data, got 1"):
        zerocast.CastPlan(
            [weight],
            [torch.zeros(NUMEL)],
            [0],
            fsdp_shard_model_weights=[torch.zeros(NUMEL, dtype=torch.uint8)],
        )


@pytest.mark.parametrize(
    "recipe",
    [
        zerocast.NVFP4BlockScaling(disable_2d_quantization=True),
        zerocast.Float8BlockScaling(w_block_scaling_dim=1),
    ],
)
def test_a_cast_transpose_cannot_be_sharded(recipe: Recipe) -> None:
    """One-dimensional blocks with a columnwise copy are refused, and the remedy works."""
    with pytest.raises(InputError, match=r"make the weight with columnwise=False"):
        zerocast.CastPlan([zerocast.empty(SHAPE, recipe)], [torch.zeros(NUMEL)], [0])
    weight = zerocast.empty(SHAPE, recipe, columnwise=False)
    zerocast.CastPlan([weight], [torch.zeros(NUMEL)], [0]).cast()


def test_finite_delayed_masters_are_checked_before_anything_is_written() -> None:
    """With ``check_finite`` a NaN raises on both ranks; codes, scales and what the recipe remembers
    are as before. Without a NaN the bytes are those of a plan without the check.
    """
    master = draw_values("normal", NUMEL, 4)
    expected = zerocast.empty(SHAPE, DELAYED)
    for _ in range(2):
        quantize_into(expected.quantized_storage, master.view(SHAPE))

    def on_rank(comm: Communicator) -> None:
        start, end = halves(comm.rank)
        shard = master[start:end].clone()
        weight = zerocast.empty(SHAPE, DELAYED)
        plan = zerocast.CastPlan([weight], [shard], [start], comm, check_finite=True)
        plan.cast()
        before = {name: b.clone() for name, b in weight.quantized_storage.buffers.items()}
        shard[0] = math.nan if comm.rank else 1.0
        with pytest.raises(NonFiniteError, match=r"model_weights\[0\] holds a NaN"):
            plan.cast()
        for name, buffer in weight.quantized_storage.buffers.items():
            assert_same_bytes(buffer, before[name], f"{name} after the refused cast")
        shard[0] = master[start]
        plan.cast()
        plan.all_gather()
        assert_same_storage(weight, expected, f"rank {comm.rank}")

    run_in_process(2, on_rank)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_delayed_amax_that_is_not_finite_shows_and_is_forgotten(value: float) -> None:
    """It makes the weight NaN for this step on every rank and leaves history and scale alone, so
    the next step is as if it had not been.
    """
    master = draw_values("normal", NUMEL, 5)

    def on_rank(comm: Communicator) -> None:
        start, end = halves(comm.rank)
        shard = master[start:end].clone()
        weight = zerocast.empty(SHAPE, DELAYED)
        plan = zerocast.CastPlan([weight], [shard], [start], comm)
        plan.cast()
        state = {
            name: weight.quantized_storage.buffers[name].clone()
            for name in ("scale", "amax_history")
        }
        if comm.rank == 1:
            shard[3] = value
        plan.cast()
        plan.all_gather()
        assert weight.dequantize().isnan().all()
        for name, before in state.items():
            assert_same_bytes(weight.quantized_storage.buffers[name], before, name)
        if comm.rank == 1:
            shard[3] = master[start + 3]
        plan.cast()
        plan.all_gather()
        assert weight.dequantize().isfinite().all()

    run_in_process(2, on_rank)


@pytest.mark.parametrize(("recipe", "buffer"), [(DELAYED, "scale"), (DRAWN, "rounding_counter")])
def test_ranks_that_remember_different_things_are_told_apart(recipe: Recipe, buffer: str) -> None:
    """A plan over weights whose recipes remember other casts on another rank is refused on both,
    and names what differs, with both digests.
    """

    def on_rank(comm: Communicator) -> None:
        weight = zerocast.empty(SHAPE, recipe, name="w")
        weight.quantized_storage.buffers[buffer] += comm.rank
        start, end = halves(comm.rank)
        both = rf"rank 0 has {buffer}=#\w+ where rank 1 has {buffer}=#"
        with pytest.raises(RankMismatchError, match=both):
            zerocast.CastPlan([weight], [torch.zeros(end - start)], [start], comm)

    run_in_process(2, on_rank)


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
    named = zerocast.quantize(master.view(SHAPE), DRAWN, dtype=torch.bfloat16, name="a")
    for first, later in (("a", "b"), (None, "a")):
        weight = zerocast.empty(SHAPE, DRAWN, name=first)
        zerocast.CastPlan([weight], [master], [0], names=[later]).cast()
        assert_same_bytes(weight.rowwise_data, named.rowwise_data, f"{first}, {later}")


@pytest.mark.parametrize("recipe", EVERY)
def test_saved_weights_go_on_as_they_would_have(recipe: Recipe) -> None:
    """What a recipe remembers is saved with the weight: a copy casts to the same bytes."""
    first, second = (draw_values(kind, NUMEL, 8).view(SHAPE) for kind in ("normal", "wide"))
    weight = zerocast.quantize(first, recipe, name="w")
    loaded = zerocast.empty(SHAPE, recipe, dtype=torch.float32)
    loaded.copy_(weight)
    for one in (weight, loaded):
        quantize_into(one.quantized_storage, second)
    assert_same_storage(loaded, weight, "the loaded weight")
