"""Masters of other libraries, read where they lie."""

import numpy as np
import pytest
import torch

import zerocast
from tests.support.same_bytes import assert_same_storage
from tests.support.values import draw_values
from zerocast.errors import InputError

RECIPE = zerocast.NVFP4BlockScaling()


def whole(master: np.ndarray) -> torch.Tensor:
    """The unsharded cast of what the array holds now."""
    return zerocast.quantize(
        torch.from_numpy(master.copy()).view(32, 48), RECIPE, dtype=torch.bfloat16
    )


def test_a_plan_reads_an_array() -> None:
    """A plan reads an array that speaks DLPack in place, when it is made and when it is bound."""
    master = draw_values("normal", 32 * 48, 1).numpy()
    weight = zerocast.empty((32, 48), RECIPE)
    plan = zerocast.CastPlan([weight], [master], [0])
    master *= 3  # seen by the next cast: nothing was copied
    plan.cast()
    plan.all_gather()
    assert_same_storage(weight, whole(master), "the array")
    other = draw_values("wide", 32 * 48, 2).numpy()
    plan.cast([other])
    plan.all_gather()
    assert_same_storage(weight, whole(other), "the other array")


def test_a_functional_call_reads_an_array() -> None:
    """The functional calls take such arrays too."""
    master = draw_values("normal", 32 * 48, 3).numpy()
    weight = zerocast.empty((32, 48), RECIPE)
    zerocast.cast_master_weights_to_nvfp4([weight], [master], [0])
    zerocast.post_all_gather_processing([weight])
    assert_same_storage(weight, whole(master), "the array")


def test_memory_that_cannot_be_shared_is_refused() -> None:
    """An array that does not hand out its memory is refused by its type, before anything is
    written.
    """
    master = np.ones(32 * 48, dtype=">f4")  # DLPack knows no byte order
    with pytest.raises(InputError, match=r"master_weights\[0\] must be a torch .* got a ndarray"):
        zerocast.CastPlan([zerocast.empty((32, 48), RECIPE)], [master], [0])
