"""Whatever is given for an argument of a public call of the cast: the call is right, or ends in an
error of zerocast, on one rank and on all of three of which one alone is wrong.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import zerocast
from tests.support.claims import one_message
from tests.support.planned import unsharded
from tests.support.ranks import on_ranks
from tests.support.refusals import NUMEL, SHAPE, of_weights
from tests.support.same_bytes import assert_same_storage
from zerocast.comm import Communicator
from zerocast.errors import InputError, ZerocastError

RECIPES = (zerocast.NVFP4BlockScaling(), zerocast.MXFP8BlockScaling())


class Strange:
    """An object whose every question is answered by an exception that is none of zerocast's."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: object) -> Any:
        raise RuntimeError("no entries")

    def __iter__(self) -> Iterator[Any]:
        raise OSError("no iteration")

    def __index__(self) -> int:
        raise ValueError("no index")

    def __dlpack__(self, **kwargs: Any) -> Any:
        raise ValueError("no memory")


def values() -> list[Any]:
    """Things that are of no use anywhere, and things that are of use elsewhere."""
    return [
        None, 0, -1, 1.5, 2**70, "ab", "\ud800", b"ab", [], [[]], {}, {0: 1, 1: 2}, set(), object(),
        Strange(), iter([1, 2]), range(2), [None, None], [1, 1], ["a", "b"], ["a", "a"], [1.5, 0],
        ["\ud800", "b"], [Strange(), Strange()], [object(), None], [torch.ones(3), torch.ones(5)],
        [torch.ones(NUMEL // 3, dtype=torch.float64)] * 2, torch.ones(2), torch.ones(2, 2),
        torch.zeros(2, dtype=torch.int64), True, [True, False], [(None, None)] * 2, NotImplemented,
        [torch.zeros(0, dtype=torch.uint8)] * 2, [2**70, 0], lambda: None, zerocast, type,
        [["*"]], [["*.a"], ["*.b"]], [7], [[7]],
    ]  # fmt: skip


ARGUMENTS = (
    "model_weights", "master_weights", "start_offsets", "fsdp_shard_model_weights",
    "manual_post_all_gather_processing", "check_finite",
)  # fmt: skip
PLAN_ARGUMENTS = (*ARGUMENTS, "names", "amax_groups")


def right(comm: Communicator) -> dict[str, Any]:
    """A right call, of two weights, cut over the ranks."""
    return of_weights(comm, *RECIPES)


def error_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What an error of zerocast said, if the call ended in one."""
    try:
        call(*args, **kwargs)
    except ZerocastError as error:
        return str(error)
    return ""


@on_ranks("in_process")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    ("call", "argument"),
    [(zerocast.CastPlan, argument) for argument in PLAN_ARGUMENTS]
    + [(zerocast.quantize_master_weights, argument) for argument in ARGUMENTS],
)
def test_any_value_of_any_argument(
    comm: Communicator, call: Callable[..., Any], argument: str
) -> None:
    """Right or refused, by the same error on every rank; the group is as usable as before."""
    for value in values():
        kwargs = right(comm)
        if comm.rank == comm.size - 1:
            kwargs[argument] = value
        one_message(comm.all_gather_object(error_of(call, **kwargs)))


@on_ranks("in_process")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("call", ["cast", "bind"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_any_value_as_new_masters(comm: Communicator, call: str) -> None:
    """The same of masters that a plan is given later; it goes on afterwards."""
    kwargs = right(comm)
    plan = zerocast.CastPlan(**kwargs)
    for value in values():
        wrong = value if comm.rank == comm.size - 1 else kwargs["master_weights"]
        one_message(comm.all_gather_object(error_of(getattr(plan, call), wrong)))
    plan.cast(kwargs["master_weights"])
    plan.all_gather()
    for weight in kwargs["model_weights"]:
        assert_same_storage(weight, unsharded(torch.ones(SHAPE), weight.recipe), "afterwards")


@pytest.mark.parametrize("value", values(), ids=lambda value: type(value).__name__)
def test_any_value_that_is_processed(value: Any) -> None:
    """post_all_gather_processing and the plan's hook refuse what is no tensor or no module."""
    kwargs = right(zerocast.comm.SingleRank())
    for call in (
        zerocast.post_all_gather_processing,
        zerocast.CastPlan(**kwargs).post_all_gather_hook,
    ):
        with contextlib.suppress(ZerocastError):
            call(value)


def test_one_weight_or_plain_tensors_are_processed() -> None:
    """As in TransformerEngine, post_all_gather_processing takes one weight too, and passes plain
    tensors by; what is none is refused.
    """
    kwargs = right(zerocast.comm.SingleRank())
    zerocast.quantize_master_weights(**kwargs)
    weight, other = kwargs["model_weights"]
    with pytest.raises(zerocast.StaleCopyError):
        _ = weight.columnwise_data
    zerocast.post_all_gather_processing(weight)
    zerocast.post_all_gather_processing([torch.ones(3), other, torch.nn.Parameter(torch.ones(1))])
    zerocast.post_all_gather_processing(torch.ones(3))
    with pytest.raises(InputError, match=r"model_weights\[1\] must be a tensor, got int"):
        zerocast.post_all_gather_processing([weight, 3])
    assert_same_storage(weight, unsharded(torch.ones(SHAPE), RECIPES[0]), "one weight")


@on_ranks("in_process", 2)
def test_a_shard_of_nothing_takes_no_buffers(comm: Communicator) -> None:
    """(None, None) stands for two buffers of nothing; for a shard with elements it is refused."""
    weight = zerocast.empty(SHAPE, RECIPES[1])
    mine = torch.ones(NUMEL)
    codes = [torch.zeros(NUMEL, dtype=torch.uint8) for _ in range(2)]
    owner = comm.rank == 0
    args = ([weight], [mine if owner else None], [0 if owner else None], comm)
    zerocast.CastPlan(*args, fsdp_shard_model_weights=[codes if owner else (None, None)]).cast()
    with pytest.raises(InputError, match=r"bytes of elements \[0, \d+\), got NoneType"):
        zerocast.CastPlan(*args, fsdp_shard_model_weights=[(None, None)])
