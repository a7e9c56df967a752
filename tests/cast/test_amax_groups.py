"""Weights that share one tensor amax are cast as the one weight that a server makes of them."""

import copy
import math
from typing import Any

import pytest
import torch

import zerocast
from tests.support.claims import message_of
from tests.support.planned import cut, unsharded
from tests.support.ranks import on_ranks
from tests.support.recipes import RECIPES, each
from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from tests.support.values import draw_values
from zerocast.comm import Communicator, RecordingCommunicator, SingleRank, run_in_process
from zerocast.errors import InputError, NonFiniteError

ROWS, COLS = (32, 16, 48), 64
NAMES = ["layers.0.wq.weight", "layers.0.wk.weight", "layers.0.wv.weight"]
GROUPS = [["*.wq", "*.wk", "*.wv"]]
PAIR = [["*.wq", "*.wk"]]
NVFP4 = RECIPES["nvfp4"]


def masters(seed: int = 0) -> list[torch.Tensor]:
    """One for each weight, their amaxes far apart."""
    scales = (1.0, 30.0, 0.01)
    return [
        draw_values("normal", rows * COLS, seed + i).view(rows, COLS) * scale
        for i, (rows, scale) in enumerate(zip(ROWS, scales, strict=True))
    ]


def planned(
    given: list[torch.Tensor], recipe: zerocast.Recipe = NVFP4, **options: Any
) -> tuple[list[zerocast.QuantizedTensor], zerocast.CastPlan]:
    """Weights of one rank that has these masters, and their plan; one group, unless ``options`` say
    otherwise.
    """
    options = {"names": NAMES[: len(given)], "amax_groups": GROUPS} | options
    weights = [zerocast.empty(master.shape, recipe) for master in given]
    return weights, zerocast.CastPlan(weights, given, [0] * len(given), **options)


@on_ranks()
@each("nvfp4", "nvfp4-4over6", "current")
def test_a_group_is_cast_as_the_fused_weight(comm: Communicator, recipe: zerocast.Recipe) -> None:
    """Codes and scales of each member are those of its rows in the fused weight, for any
    partition.
    """
    whole = masters()
    fused = zerocast.quantize(torch.cat(whole), recipe, dtype=torch.bfloat16)
    weights = [zerocast.empty(master.shape, recipe) for master in whole]
    extents = [cut(master.numel(), comm.size)[comm.rank :][:2] for master in whole]
    shards = [m.view(-1)[start:end] for m, (start, end) in zip(whole, extents, strict=True)]
    starts = [start for start, _ in extents]
    plan = zerocast.CastPlan(
        weights, shards, starts, comm, names=NAMES, amax_groups=GROUPS, exchange="boundary"
    )
    plan.cast()
    plan.all_gather()
    row = 0
    for weight, rows, name in zip(weights, ROWS, NAMES, strict=True):
        assert_same_bytes(weight.rowwise_data, fused.rowwise_data[row : row + rows], name)
        scales, expected = weight.rowwise_scale_inv, fused.rowwise_scale_inv
        if "amax" in fused.quantized_storage.buffers:
            assert_same_bytes(weight.amax, fused.amax, name)
            scales, expected = scales[:rows], expected[row : row + rows]
        assert_same_bytes(scales, expected, name)
        row += rows


def test_a_member_of_one_block_keeps_its_blocks_amax() -> None:
    """A weight of 16x16 elements has one scale for its block, by the block's own amax, under the
    amax of its group.
    """
    given = [torch.full((16, 16), value) for value in (1.0, 64.0)]
    fused = zerocast.quantize(torch.cat(given), NVFP4, columnwise=False)
    weights, plan = planned(given, amax_groups=PAIR)
    plan.cast()
    for i, weight in enumerate(weights):
        rows = slice(16 * i, 16 * i + 16)
        assert_same_bytes(weight.rowwise_data, fused.rowwise_data[rows], f"codes {i}")
        assert_same_bytes(
            weight.rowwise_scale_inv[:16], fused.rowwise_scale_inv[rows], f"scales {i}"
        )


def test_layers_are_groups_of_their_own() -> None:
    """The wildcard tells groups apart; a weight that no pattern matches is alone."""
    names = ["a.wq", "a.wk", "b.wq", "b.wk", "b.wo"]
    given = [torch.full((4, 4), float(i + 1)) for i in range(5)]
    weights, plan = planned(given, RECIPES["current"], names=names, amax_groups=PAIR)
    plan.cast()
    amaxes = [round(448 * w.rowwise_scale_inv.item(), 4) for w in weights]
    assert amaxes == [2, 2, 4, 4, 5]


def test_delayed_members_remember_the_same() -> None:
    """Under delayed scaling members have one history, and so one scale from the second cast on."""
    given = masters()
    weights, plan = planned(given, RECIPES["delayed"])
    for _ in range(2):
        plan.cast()
    largest = max(master.bfloat16().abs().max().item() for master in given)
    for weight in weights:
        assert weight.quantized_storage.buffers["amax_history"][0].item() == largest
        assert_same_bytes(weight.rowwise_scale_inv, weights[0].rowwise_scale_inv, "scale_inv")


def test_a_scheme_without_a_tensor_scale_keeps_its_bytes() -> None:
    """Blockwise weights fuse as they are: a group changes none of their bytes."""
    given = masters()
    weights, plan = planned(given, RECIPES["block"])
    plan.cast()
    plan.all_gather()
    for weight, master in zip(weights, given, strict=True):
        assert_same_storage(weight, unsharded(master, RECIPES["block"]), "a grouped weight")


def test_a_group_costs_no_collective() -> None:
    """One all-reduce, as without groups."""

    def on_rank(comm: Communicator) -> int:
        recording, whole = RecordingCommunicator(comm), masters()
        weights = [zerocast.empty(master.shape, NVFP4) for master in whole]
        owns = comm.rank == 0
        shards, starts = (whole, [0] * 3) if owns else ([None] * 3, [None] * 3)
        plan = zerocast.CastPlan(
            weights, shards, starts, recording, names=NAMES, amax_groups=GROUPS
        )
        recording.reset()
        plan.cast()
        return recording.total().calls

    assert run_in_process(2, on_rank) == [1, 1]


def test_the_weight_that_is_not_finite_is_named() -> None:
    """With ``check_finite`` the message names the member that holds the NaN, and no other."""
    given = masters()
    given[1][0, 0] = math.nan
    _, plan = planned(given, check_finite=True)
    with pytest.raises(NonFiniteError, match=r"but layers\.0\.wk\.weight holds a NaN\. Nothing"):
        plan.cast()


def test_a_copied_weight_keeps_its_group() -> None:
    """Copies and pickles of a weight stay in its group."""
    weight = zerocast.empty((16, 16), NVFP4)
    weight.quantized_storage.amax_group = "g"
    assert copy.deepcopy(weight).quantized_storage.amax_group == "g"


# --- stacks of matrices ---

EXPERTS = torch.Size((4, 32, 32))
GATE_UP = [["*.w1", "*.w3"]]


def experts() -> list[torch.Tensor]:
    """Two stacks whose matrices have amaxes of their own, now of the one and now of the other."""
    factors = torch.tensor([[1.0, 2, 3, 4], [50, 0.1, 10, 300]])
    normal = draw_values("normal", EXPERTS.numel(), 7).view(EXPERTS)
    return [normal * factor[:, None, None] for factor in factors]


def cast_experts(parts: list[zerocast.TensorParallelShard | None]) -> list[list[float]]:
    """The amaxes of this rank's matrices of each stack, of which it has these parts."""
    given = [m if p is None else p.slice_of(m) for m, p in zip(experts(), parts, strict=True)]
    weights = [
        zerocast.empty(m.shape, NVFP4, tp_shard=p) for m, p in zip(given, parts, strict=True)
    ]
    flat = [m.contiguous().view(-1) for m in given]
    plan = zerocast.CastPlan(
        weights, flat, [0, 0], SingleRank(), names=["x.w1", "x.w3"], amax_groups=GATE_UP
    )
    plan.cast()
    return [weight.amax.flatten().tolist() for weight in weights]


def whole_amaxes() -> list[float]:
    """Of each matrix, of both stacks."""
    both = torch.stack(experts()).bfloat16().abs()
    return both.amax((0, 2, 3)).tolist()


@pytest.mark.parametrize("other", [0, 1, 2], ids=["matrices", "rows", "columns"])
@on_ranks("in_process", 2)
def test_matrix_i_shares_its_amax_with_matrix_i(comm: Communicator, other: int) -> None:
    """Of the whole stacks, where tensor parallelism leaves a rank whole matrices of one, and of the
    other matrices, too, or rows or columns of each.
    """
    chunk = zerocast.TensorParallelShard.chunk
    mine = range(2 * comm.rank, 2 * comm.rank + 2)
    first, second = cast_experts([chunk(EXPERTS, 0, comm), chunk(EXPERTS, other, comm)])
    whole = whole_amaxes()
    assert first == [whole[i] for i in mine]
    assert second == (first if other == 0 else whole)


@on_ranks("in_process", 2)
def test_stacks_of_which_ranks_have_other_matrices_are_refused(comm: Communicator) -> None:
    """On every rank: no rank has what matrix i needs of both. So is a whole stack beside a part."""
    shard = zerocast.TensorParallelShard
    uneven = shard(EXPERTS, 0, 32 * comm.rank, 32 * (1 + 2 * comm.rank), comm)
    even = shard.chunk(EXPERTS, 0, comm)
    own, theirs = ("[0, 1)", "[0, 2)") if comm.rank == 0 else ("[1, 4)", "[2, 4)")
    text = message_of(InputError, cast_experts, [uneven, even])
    assert f"x.w1 (matrices {own}) and x.w3 (matrices {theirs}); split them alike" in text
    assert f"x.w3 (matrices {theirs})" in message_of(InputError, cast_experts, [None, even])


@pytest.mark.parametrize("other", [(32, 32), (2, 32, 32), (2, 2, 32, 32)], ids=str)
def test_a_stack_shares_with_stacks_of_as_many_matrices(other: tuple[int, ...]) -> None:
    """And with no matrix, for which of its amaxes would that one's be?"""
    weights = [zerocast.empty(shape, NVFP4) for shape in (EXPERTS, other)]
    given = [torch.ones(weight.numel()) for weight in weights]
    with pytest.raises(InputError, match=r"got x\.w1 \(stack \(4,\)\) and x\.w3 \(stack"):
        zerocast.CastPlan(weights, given, [0, 0], names=["x.w1", "x.w3"], amax_groups=GATE_UP)


def test_errors_name_a_matrix_by_its_place_in_the_whole_stack() -> None:
    """Also on a rank that has only the last ones."""

    def on_rank(comm: Communicator) -> str:
        part = zerocast.TensorParallelShard.chunk(EXPERTS, 0, comm)
        weight = zerocast.empty(part.shape, NVFP4, tp_shard=part)
        values = torch.ones(part.shape)
        values[1, 0, 0] = math.nan
        plan = zerocast.CastPlan(
            [weight], [values.view(-1)], [0], SingleRank(), names=["w"], check_finite=True
        )
        with pytest.raises(NonFiniteError) as error:
            plan.cast()
        return str(error.value)

    first, last = run_in_process(2, on_rank)
    assert "w[1] holds a NaN" in first
    assert "w[3] holds a NaN" in last
