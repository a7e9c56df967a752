"""What a plan takes, and what its checks say of what it refuses, beyond the table of refusals."""

from collections.abc import Callable

import pytest
import torch

import zerocast
from tests.support.claims import assert_same_tensors, stored, told_all
from tests.support.planned import unsharded
from tests.support.ranks import on_ranks
from tests.support.recipes import RECIPES
from tests.support.refusals import FP8, MXFP8, NUMEL, NVFP4, SHAPE, of_weights, weight
from tests.support.same_bytes import assert_same_storage
from tests.support.values import draw_values
from zerocast.cast.consistency import _likely_cause
from zerocast.comm import Communicator, InProcessCommunicator, SingleRank
from zerocast.errors import InputError, NonFiniteError, RankMismatchError
from zerocast.layout import Extent

HALF = NUMEL // 2


@on_ranks("in_process", 2)
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-4over6"])
def test_check_finite_names_what_nvfp4_decodes_to_infinities(comm, recipe) -> None:
    """Of the largest value that decoding can scale all elements are finite; of the next one the
    cast is refused on every rank, though servers, which divide first, decode what it would write.
    """
    largest = torch.tensor(torch.finfo(torch.float32).max / 448)
    values = torch.zeros(2, 32)
    values[0, :3] = torch.stack([largest, -largest / 2, largest / 6])
    weight = zerocast.empty((2, 32), RECIPES[recipe], dtype=torch.float32)
    own = values.view(-1)[32 * comm.rank : 32 * comm.rank + 32]
    plan = zerocast.CastPlan(
        [weight], [own], [32 * comm.rank], comm, names=["a.weight"], check_finite=True
    )
    plan.cast()
    plan.all_gather()
    assert weight.dequantize(torch.float32).isfinite().all()
    assert weight.dequantize(torch.float32)[0, 0] == largest
    values[0, 0] = torch.nextafter(largest, torch.tensor(torch.inf))
    text = told_all(comm, NonFiniteError, plan.cast)
    assert "but a.weight holds finite values above 7.596e+35, which NVFP4 decodes as inf" in text
    assert "Found on rank 0" in text
    if recipe == "nvfp4":
        whole = zerocast.quantize(values, RECIPES[recipe], dtype=torch.float32)
        assert not whole.dequantize(torch.float32).isfinite().all()
        scale = whole.rowwise_scale_inv[0, :1].view(torch.float8_e4m3fn).float()
        for served in (scale * (whole.amax / 2688), scale / (2688 / whole.amax)):
            torch.testing.assert_close(6 * served, values[0, :1])


def test_check_finite_names_overflow() -> None:
    """A finite master that overflows FP16 is refused as an overflow, not as an infinity in the
    master.
    """
    w = zerocast.empty((16, 16), NVFP4, dtype=torch.float16)
    plan = zerocast.CastPlan(
        [w], [torch.full((256,), 7e4)], [0], check_finite=True, names=["layer.0.weight"]
    )
    with pytest.raises(
        NonFiniteError, match=r"layer\.0\.weight holds finite values that overflow torch\.float16"
    ):
        plan.cast()


@on_ranks("in_process", 2)
@pytest.mark.parametrize(
    ("cast", "recipe"),
    [(zerocast.cast_master_weights_to_nvfp4, NVFP4), (zerocast.cast_master_weights_to_fp8, FP8)],
)
def test_fronts_cast_their_own_kind(
    comm: Communicator, cast: Callable[..., None], recipe: zerocast.Recipe
) -> None:
    """Each front gives the scales of the call that takes all kinds, and leaves the copies to
    post_all_gather_processing, as that does.
    """
    expected, got = weight(recipe), weight(recipe)
    start = comm.rank * HALF
    args = [torch.full((HALF,), 3.0)], [start], comm
    zerocast.quantize_master_weights([expected], *args)
    cast([got], *args)
    assert_same_tensors(stored({"": got}), stored({"": expected}), "after the cast")
    for made in (expected, got):
        with pytest.raises(zerocast.StaleCopyError):
            _ = made.columnwise_data


@on_ranks("in_process", 4)
def test_ranks_outside_the_group_of_the_error_hear_the_same(comm: InProcessCommunicator) -> None:
    """A wrong offset of an expert, and a NaN in it, are one message for all ranks of the plan."""
    pair = comm.split(comm.rank % 2)
    weights, groups = [weight(NVFP4), weight(FP8)], [comm, pair]
    quarter, half = NUMEL // 4, HALF
    masters = [torch.ones(quarter), torch.ones(half)]
    starts = [comm.rank * quarter, pair.rank * half]
    wrong = [starts[0], -1 if comm.rank == 3 else starts[1]]
    message = told_all(comm, InputError, zerocast.CastPlan, weights, masters, wrong, groups)
    assert message.startswith("on rank 3: model_weights[1]")
    plan = zerocast.CastPlan(weights, masters, starts, groups, check_finite=True)
    if comm.rank == 3:
        masters[1][0] = torch.nan
    assert "model_weights[1] holds a NaN" in told_all(comm, NonFiniteError, plan.cast)


@on_ranks("in_process", 2)
def test_a_message_holds_what_differs_only(comm: Communicator) -> None:
    """Other recipes at one place: their names on both sides, and not their fields."""
    kwargs = of_weights(comm)
    if comm.rank == 1:
        kwargs["model_weights"].reverse()
    message = told_all(comm, RankMismatchError, zerocast.CastPlan, **kwargs)
    assert "recipe=NVFP4BlockScaling where rank 1 has recipe=Float8CurrentScaling" in message
    assert len(message) < 300


@on_ranks("in_process", 2)
def test_the_same_function_made_twice_is_the_same(comm: Communicator) -> None:
    """Ranks that run the same source hold equal functions that are other objects."""
    scale = torch.tensor([2.0])
    recipe = zerocast.DelayedScaling(amax_compute_algo=lambda h: h.max() * scale)
    kwargs = of_weights(comm)
    kwargs["model_weights"][0] = zerocast.empty(SHAPE, recipe)
    zerocast.CastPlan(**kwargs).cast()


@on_ranks("in_process", 2)
def test_an_empty_master_needs_no_offset(comm: Communicator) -> None:
    """A rank that owns nothing may give a master without elements, and no offset."""
    w = weight()
    master = torch.ones(NUMEL * (1 - comm.rank))
    plan = zerocast.CastPlan([w], [master], [None if comm.rank else 0], comm)
    plan.cast()
    plan.all_gather()
    expected = zerocast.quantize(torch.ones(SHAPE), NVFP4, dtype=torch.bfloat16)
    assert_same_tensors(stored({"": w}), stored({"": expected}), "after the gather")


@pytest.mark.parametrize(
    "owned",
    [[(0, 4), (0, 4)], [(0, 8), (4, 16)], [(2, 10), (8, 16)], [(4, 16), (0, 0)]],
    ids=["too few at 0", "too many", "shifted", "one of two"],
)
def test_no_cause_is_guessed_for_other_wrong_partitions(owned: list[tuple[int, int]]) -> None:
    """Where sizes do not add up, or starts are no multiple of the right ones, none is named."""
    assert _likely_cause(16, [Extent(start, end) for start, end in owned]) == ""


def test_quantize_reads_a_negative_view() -> None:
    """``quantize`` resolves what torch would: the signs of a view with the negative bit."""
    x = torch.randn(SHAPE)
    for backend in ("reference", "cpu"):
        with zerocast.use_backend(backend):
            assert_same_storage(
                zerocast.quantize(torch._neg_view(x), NVFP4), zerocast.quantize(-x, NVFP4), backend
            )


def test_masters_may_lie_beside_a_buffer_and_in_none() -> None:
    """Memory up to the first byte of the codes, or from their end on, is no part of them; what lies
    in any buffer of a weight, the lowest and the highest too, is refused by the buffer's name.
    """
    weight = zerocast.empty(SHAPE, NVFP4)
    flat = torch.zeros(2 * NUMEL, dtype=torch.uint8)
    zerocast.replace_raw_data(weight, flat[NUMEL : NUMEL + HALF])
    plan = zerocast.CastPlan([weight], [torch.ones(NUMEL)], [0], SingleRank())
    check = plan._prepared.addresses.check_masters
    check([("before", flat[:NUMEL]), ("behind", flat[NUMEL + HALF :]), ("nothing", flat[:0])])
    for name, buffer in weight.quantized_storage.buffers.items():
        with pytest.raises(InputError, match=f"{name} of model_weights"):
            check([("a master", buffer)])


@on_ranks("in_process", 2)
def test_a_shard_may_be_received_where_the_gather_puts_it(comm: Communicator) -> None:
    """A shard's own buffer may be the slice of its weight's codes."""
    x = draw_values("normal", NUMEL, 1)
    weight = zerocast.empty(SHAPE, NVFP4, dtype=torch.float32)
    start = HALF * comm.rank
    own = weight.rowwise_data.view(-1)[start // 2 : (start + HALF) // 2]
    mine = x[start : start + HALF].clone()
    plan = zerocast.CastPlan([weight], [mine], [start], comm, fsdp_shard_model_weights=[own])
    plan.cast()
    plan.all_gather()
    assert_same_storage(weight, zerocast.quantize(x.view(SHAPE), NVFP4), "gathered")


def test_one_weight_or_plain_tensors_are_processed() -> None:
    """As in TransformerEngine, post_all_gather_processing takes one weight too, and passes plain
    tensors by; what is none is refused.
    """
    kwargs = of_weights(SingleRank(), NVFP4, MXFP8)
    zerocast.quantize_master_weights(**kwargs)
    first, other = kwargs["model_weights"]
    with pytest.raises(zerocast.StaleCopyError):
        _ = first.columnwise_data
    zerocast.post_all_gather_processing(first)
    zerocast.post_all_gather_processing([torch.ones(3), other, torch.nn.Parameter(torch.ones(1))])
    zerocast.post_all_gather_processing(torch.ones(3))
    with pytest.raises(InputError, match=r"model_weights\[1\] must be a tensor, got int"):
        zerocast.post_all_gather_processing([first, 3])
    assert_same_storage(first, unsharded(torch.ones(SHAPE), NVFP4), "one weight")


@on_ranks("in_process", 2)
def test_a_shard_of_nothing_takes_no_buffers(comm: Communicator) -> None:
    """(None, None) stands for two buffers of nothing; for a shard with elements it is refused."""
    weight = zerocast.empty(SHAPE, MXFP8)
    mine = torch.ones(NUMEL)
    codes = [torch.zeros(NUMEL, dtype=torch.uint8) for _ in range(2)]
    owner = comm.rank == 0
    args = ([weight], [mine if owner else None], [0 if owner else None], comm)
    zerocast.CastPlan(*args, fsdp_shard_model_weights=[codes if owner else (None, None)]).cast()
    with pytest.raises(InputError, match=r"bytes of elements \[0, \d+\), got NoneType"):
        zerocast.CastPlan(*args, fsdp_shard_model_weights=[(None, None)])
