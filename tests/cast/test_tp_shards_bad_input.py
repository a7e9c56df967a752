"""Parts that do not fit together, and what is wrong with one of them: an error on all ranks of both
kinds of groups.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import zerocast
from tests.cast.test_tp_shards import two_groups
from tests.support.claims import message_of
from tests.support.ranks import on_ranks
from zerocast import TensorParallelShard
from zerocast.comm import SingleRank, run_in_process
from zerocast.errors import InputError, NonFiniteError, RankMismatchError
from zerocast.recipes import Recipe

FOUR_BITS, EIGHT_BITS = zerocast.NVFP4BlockScaling(), zerocast.Float8CurrentScaling()


def refused(given: Callable[[Any, int, int], dict[str, Any]], error: type, message: str) -> None:
    """On 2 x 2 ranks every rank raises ``error`` with ``message`` in it: a weight [32, 32] by rows,
    but for what ``given(tensor-parallel group, its rank, data-parallel rank)`` says otherwise.
    """

    def on_rank(comm: Any) -> str:
        tensor_parallel, data_parallel = two_groups(comm, 2)
        tp_shard = TensorParallelShard.chunk((32, 32), 0, tensor_parallel)
        case = {"part": tp_shard, "recipe": FOUR_BITS, "name": "w", "value": 1.0}
        case |= given(tensor_parallel, tensor_parallel.rank, data_parallel.rank)
        tp_shard = case["part"]
        weight = zerocast.empty(tp_shard.shape, case["recipe"], tp_shard=tp_shard)
        half = tp_shard.shape.numel() // 2
        shard = torch.full((half,), case["value"], dtype=case.get("dtype"))
        return message_of(
            error,
            lambda: zerocast.CastPlan(
                [weight], [shard], [half * data_parallel.rank], data_parallel,
                names=[case["name"]], check_finite=True,
            ).cast()
        )  # fmt: skip

    for text in run_in_process(4, on_rank):
        assert message in text


def test_a_wrong_master_is_heard_of_in_both_groups() -> None:
    """A master that only one of four ranks gets wrong."""
    refused(
        lambda comm, t, d: {"dtype": torch.float64 if (t, d) == (1, 1) else None},
        InputError,
        "w: the master weight must be contiguous, on the weight's device cpu, with memory of its "
        "own, and of torch.float32, torch.bfloat16 or torch.float16, got torch.float64; convert it "
        "first.",
    )


@pytest.mark.parametrize("recipe", [FOUR_BITS, zerocast.MXFP8BlockScaling()])
def test_a_master_that_is_wrong_in_a_cast_is_heard_of_in_both_groups(recipe: Recipe) -> None:
    """Whether the shards of a weight share an amax or not; the plan goes on afterwards."""

    def on_rank(comm: Any) -> str:
        tensor_parallel, data_parallel = two_groups(comm, 2)
        tp_shard = TensorParallelShard.chunk((64, 32), 0, tensor_parallel)
        weight = zerocast.empty(tp_shard.shape, recipe, tp_shard=tp_shard)
        shard, start = torch.ones(512), 512 * data_parallel.rank
        plan = zerocast.CastPlan([weight], [shard], [start], data_parallel)
        given = [torch.ones(5) if comm.rank == 3 else shard]
        message = message_of(InputError, lambda: plan.cast(given))
        plan.cast([shard])
        plan.all_gather()
        return message

    for text in run_in_process(4, on_rank):
        assert "the plan was made for a master of 512 elements, got 5" in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            lambda comm, t, d: {"recipe": EIGHT_BITS if t else FOUR_BITS},
            "recipe=NVFP4BlockScaling where rank 1 has recipe=Float8CurrentScaling for weight 0",
        ),
        (lambda comm, t, d: {"name": f"w{t}"}, "rank 0 has name=w0 where rank 1 has name=w1"),
        (
            lambda comm, t, d: {"part": TensorParallelShard.chunk((32, 32), t, comm)},
            "sharded dimension=rows where rank 1 has sharded dimension=columns",
        ),
        (
            lambda comm, t, d: {
                "part": TensorParallelShard((32 + 32 * t, 32), 0, 16 * t, 16, comm)
            },
            "shape=(32, 32) where rank 1 has shape=(64, 32)",
        ),
        (
            lambda comm, t, d: {
                "part": TensorParallelShard((64, 32), 0, 16 * ((t + d) % 2), 16, comm)
            },
            "rows [0, 16) of (64, 32)",
        ),
        (
            lambda comm, t, d: {"part": TensorParallelShard((64, 32), 0, 32 * t, 16, comm)},
            "the shards of w must cover each of the 64 rows of (64, 32) exactly once: rows [16, "
            "32) are owned by no rank.",
        ),
    ],
    ids=["recipes", "names", "dimensions", "wholes", "sharded differently", "gap"],
)
def test_ranks_that_disagree_about_parts(given: Any, message: str) -> None:
    """Recipes, names, dimensions, wholes and parts that do not fit together."""
    refused(given, RankMismatchError, message)


@pytest.mark.parametrize("recipe", [FOUR_BITS, EIGHT_BITS, zerocast.MXFP8BlockScaling()])
def test_a_nan_in_another_part_is_an_error_here(recipe: Recipe) -> None:
    """check_finite: on all ranks, whether or not parts share the tensor's amax."""

    def given(comm: Any, t: int, d: int) -> dict[str, Any]:
        tp_shard = TensorParallelShard.chunk((64, 32), 0, comm)
        value = float("nan") if (t, d) == (1, 0) else 1.0
        return {"recipe": recipe, "value": value, "part": tp_shard}

    refused(
        given, NonFiniteError, "check_finite requires finite master weights, but w holds a NaN."
    )


@on_ranks("in_process", 4)
def test_an_amax_group_over_two_tensor_parallel_groups(comm: Any) -> None:
    """Its members could not have one amax on all ranks."""
    tp_shards = [TensorParallelShard.chunk((32, 32), 0, group) for group in two_groups(comm, 2)]
    weights = [zerocast.empty((16, 32), FOUR_BITS, tp_shard=tp_shard) for tp_shard in tp_shards]
    with pytest.raises(
        InputError,
        match=r"weights of one amax group must be sharded over one tensor-parallel group, or not "
        r"at all, got l\.wq \(InProcessCommunicator\(rank=., size=2\)\) and l\.wk \(",
    ):
        zerocast.CastPlan(
            weights, [torch.randn(16, 32)] * 2, [0, 0], SingleRank(), names=["l.wq", "l.wk"],
            amax_groups=[["*.wq", "*.wk"]],
        )  # fmt: skip
