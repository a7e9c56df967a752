"""QuantizedStorage knows whether its derived copies are true and whether its codes have changed."""

import copy
import pickle

import pytest
import torch

from tests.support.same_bytes import assert_same_storage
from tests.support.weights import FP8, NVFP4, both_recipes, note_cast
from zerocast.errors import MissingDataError, StaleCopyError
from zerocast.recipes import Recipe
from zerocast.tensors import CastVersion, QuantizedTensor, quantize, rebuild_derived
from zerocast.tensors.staleness import Writes


def watched(recipe: Recipe, *, rebuild_on_use: bool = False) -> tuple[QuantizedTensor, CastVersion]:
    """A weight, and the clock of a plan that casts it."""
    weight, clock = quantize(torch.randn(9, 32), recipe), CastVersion(rebuild_on_use=rebuild_on_use)
    weight.quantized_storage.writes.watch(clock)
    return weight, clock


@both_recipes
def test_a_derived_copy_is_refused_between_a_cast_and_its_rebuild(recipe):
    """Both columnwise buffers, through every alias; the rowwise ones can always be read."""
    weight, clock = watched(recipe)
    alias = weight.detach()
    assert weight.columnwise_data.data_ptr() == alias.columnwise_data.data_ptr()
    note_cast(clock)
    for name in ("columnwise_data", "columnwise_scale_inv"):
        with pytest.raises(StaleCopyError, match="post_all_gather_processing"):
            getattr(alias, name)
    _ = weight.rowwise_data, weight.rowwise_scale_inv, weight.dequantize()
    rebuild_derived([weight.quantized_storage])
    _ = alias.columnwise_data, alias.columnwise_scale_inv


def test_a_weight_without_a_columnwise_copy_is_never_stale():
    """There is nothing to rebuild, so a forward is not refused."""
    weight = quantize(torch.randn(9, 32), NVFP4, columnwise=False)
    clock = CastVersion(rebuild_on_use=False)
    weight.quantized_storage.writes.watch(clock)
    note_cast(clock)
    assert not weight.quantized_storage.is_stale
    weight.quantized_storage.prepare_for_forward(lambda storage: pytest.fail("rebuilt"))


def test_any_of_several_plans_makes_a_copy_stale():
    """A forward rebuilds only where every plan that cast since has asked for that."""
    weight, manual = watched(NVFP4)
    automatic = CastVersion(rebuild_on_use=True)
    weight.quantized_storage.writes.watch(automatic)
    rebuilt = []
    note_cast(automatic)
    weight.quantized_storage.prepare_for_forward(rebuilt.append)
    assert rebuilt == [weight.quantized_storage]
    note_cast(manual)
    with pytest.raises(StaleCopyError):
        weight.quantized_storage.prepare_for_forward(rebuilt.append)


def test_a_copy_into_a_stale_weight_makes_it_true_again():
    """copy_ writes every code, so nothing is missing any more."""
    weight, clock = watched(NVFP4)
    note_cast(clock)
    weight.copy_(torch.ones(9, 32))
    assert_same_storage(weight, quantize(torch.ones(9, 32), NVFP4), "copied")
    assert weight.columnwise_data.any()


@pytest.mark.parametrize("rebuild_on_use", [True, False])
@pytest.mark.parametrize(
    "duplicate", [torch.clone, copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))]
)
def test_a_copy_of_a_stale_weight_is_stale(duplicate, rebuild_on_use):
    """Until it is rebuilt; the plan's later casts do not concern it."""
    weight, clock = watched(NVFP4, rebuild_on_use=rebuild_on_use)
    note_cast(clock)
    twin = duplicate(weight)  # type: ignore[operator]
    with pytest.raises(StaleCopyError):
        _ = twin.columnwise_data
    if not rebuild_on_use:
        with pytest.raises(StaleCopyError):
            twin.quantized_storage.prepare_for_forward(lambda storage: None)
    rebuild_derived([twin.quantized_storage])
    note_cast(clock)
    _ = twin.columnwise_data
    rebuild_derived([weight.quantized_storage])
    with_true_copies = duplicate(weight)  # type: ignore[operator]
    note_cast(clock)
    _ = with_true_copies.columnwise_data


def test_the_version_changes_exactly_when_codes_are_written():
    """By casts, copies and zero_; not by watching, rebuilding, moving or the end of a plan."""
    weight, clock = watched(FP8)
    storage = weight.quantized_storage
    seen = [storage.version]
    note_cast(clock)
    seen.append(storage.version)
    weight.copy_(torch.ones(9, 32))
    seen.append(storage.version)
    weight.zero_()
    seen.append(storage.version)
    weight.copy_(quantize(torch.ones(9, 32), FP8))
    seen.append(storage.version)
    assert len(set(seen)) == 5
    late = CastVersion(rebuild_on_use=True)
    late.ticks = 41
    storage.writes.watch(late)
    storage.writes.watch(clock)
    clock.retired = True
    rebuild_derived([storage])
    storage.replace("rowwise_data", weight.rowwise_data.clone())
    assert storage.version == seen[-1]
    note_cast(late)
    assert storage.version != seen[-1]


def test_the_high_precision_initial_value_lasts_until_the_next_write():
    """A cast, or a copy of other quantized bytes, ends it; loading values into it replaces it.
    hasattr tells whether there is one, as frameworks ask; asking anyway raises.
    """
    weight, clock = watched(FP8)
    assert not hasattr(weight, "get_high_precision_init_val")
    with pytest.raises(MissingDataError, match="preserve_high_precision_init_val=True"):
        weight.get_high_precision_init_val()
    x = torch.randn(9, 32)
    weight.quantized_storage.high_precision_init_val = x
    assert weight.detach().get_high_precision_init_val() is x
    weight.copy_(2 * x)
    assert torch.equal(weight.get_high_precision_init_val(), 2 * x)
    assert torch.equal(copy.deepcopy(weight).get_high_precision_init_val(), 2 * x)
    other = quantize(torch.zeros(9, 32), FP8)
    other.quantized_storage.high_precision_init_val = torch.zeros(9, 32)
    other.copy_(weight)
    assert torch.equal(other.get_high_precision_init_val(), 2 * x)
    note_cast(clock)
    assert not hasattr(weight, "get_high_precision_init_val")
    weight.copy_(3 * x)
    other.copy_(weight)
    assert not hasattr(other, "get_high_precision_init_val")
    other.quantized_storage.high_precision_init_val = x
    other.clear_high_precision_init_val()
    assert not hasattr(other, "get_high_precision_init_val")


def test_a_plan_marks_its_weights_by_the_clock() -> None:
    """A rebuilding by one plan of a weight that is in two makes the copies true for both, of none
    of the other's weights, and of nothing that is cast afterwards.
    """
    writes = shared, _ = Writes(), Writes()
    first, second = (CastVersion(rebuild_on_use=False) for _ in range(2))
    for version, watching in ((first, (shared,)), (second, writes)):
        for each in watching:
            each.watch(version)
    note_cast(second)
    assert [each.were_cast for each in writes] == [True, True]
    first.mark_rebuilt()
    assert [each.were_cast for each in writes] == [False, True]
    note_cast(first)
    second.mark_rebuilt()
    assert [each.were_cast for each in writes] == [False, False]
    note_cast(first)
    assert [each.were_cast for each in writes] == [True, False]
    first.retire()
    for _ in range(3):  # retired versions are forgotten, the staleness is not
        passing = CastVersion(rebuild_on_use=False)
        shared.watch(passing)
        passing.retire()
    assert shared.were_cast
    shared.mark_rebuilt()
    assert not shared.were_cast
    late = Writes()
    note_cast(second)
    late.watch(second)
    assert not late.were_cast
