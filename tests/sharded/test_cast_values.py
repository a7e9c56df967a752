"""When a cast is due: a master knows whether it was written since the latest one."""

import copy
import pickle

import pytest
import torch

import zerocast
from tests.support.recipes import RECIPES
from zerocast.sharded.all_gather import LowBitAllGather


def master(rows: int = 6, recipe=RECIPES["nvfp4"]) -> zerocast.sharded.MasterWeight:
    """Rows of a weight, as if just cast."""
    gather = LowBitAllGather((rows, 16), recipe, "weight")
    made = zerocast.sharded.MasterWeight(torch.randn(rows, 16), gather)
    gather.cast_values.set_to(made.value)
    return made


def is_due(tensor: zerocast.sharded.MasterWeight) -> bool:
    """Whether a gather of ``tensor`` would cast."""
    return tensor.low_bit_all_gather.is_due(tensor.value)


def by_dlpack(weight: zerocast.sharded.MasterWeight) -> None:
    """Through memory whose writes torch counts elsewhere."""
    torch.from_dlpack(weight.value).mul_(2)


def test_rounded_values_that_come_back_are_due():
    """A BF16 copy of a master is not its value."""
    weight = master()
    weight.copy_(torch.empty_like(weight, dtype=torch.bfloat16).copy_(weight))
    assert is_due(weight)


@pytest.mark.parametrize("rows", [6, 0])
def test_moved_rows_are_not_due(rows):
    """Rows that FSDP2 moves into memory that it pads, again and again, are those that were cast;
    what is written to other copies does not matter to them.
    """
    weight = master(rows)
    for _ in range(3):
        padded = weight.new_zeros((8, 16))
        padded.narrow(0, 0, rows).copy_(weight)
        average = weight.clone().lerp_(torch.ones(rows, 16), 0.5)
        average.copy_(weight)
        average.mul_(2)
        weight = padded.narrow(0, 0, rows)
        assert not is_due(weight)
        assert is_due(average)
    weight.mul_(2)
    assert is_due(weight)


def test_due_rows_stay_due_where_they_are_moved():
    """A write that no gather has seen is not forgotten by a move."""
    weight = master()
    weight.value.mul_(2)
    assert is_due(weight.new_zeros((8, 16)).narrow(0, 0, 6).copy_(weight))


@pytest.mark.parametrize("write", [lambda m: m.mul_(2), lambda m: m.value.mul_(2), by_dlpack])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_what_was_cast_is_due_once_it_is_written(copied, write):
    """Before, its first cast repeats that of the original; and where recipes remember nothing, a
    copy without codes is always cast.
    """
    for recipe in (zerocast.NVFP4BlockScaling(), zerocast.DelayedScaling()):
        twin = copied(master(recipe=recipe))
        assert is_due(twin) is not bool(recipe.state)
        assert is_due(twin.clone()) is not bool(recipe.state)
        write(twin)
        assert is_due(twin)
