"""RecipeState: roles and formats, the rule of delayed scaling, one reduction for all, saving."""

import copy
import gc
import pickle

import pytest
import torch

from tests.support.claims import assert_same_tensors
from tests.support.same_bytes import assert_same_bytes
from tests.support.weights import through_a_file
from zerocast.comm import SingleRank, run_in_process
from zerocast.errors import InputError, MissingDataError
from zerocast.nn.recipe_state import AmaxReduction, RecipeState
from zerocast.numerics import E2M1, E4M3, E5M2
from zerocast.recipes import DelayedScaling, Float8CurrentScaling, NVFP4BlockScaling

pytestmark = pytest.mark.usefixtures("backend")

HISTORY = 5
DELAYED = DelayedScaling(amax_history_len=HISTORY)
DRAWN = NVFP4BlockScaling()


def with_amax(amax: float) -> torch.Tensor:
    """[3, 2] FP32 values of which the largest magnitude is ``amax``, exactly."""
    return torch.tensor([[0.0, amax / 2], [-amax, -amax / 4], [amax, -0.0]])


# --- what a state is ---


def test_quantizers_follow_the_gemms():
    """Forward: input, weight, output, of one GEMM after the other; backward: grad_output and
    grad_input. Formats follow the direction.
    """
    forward = RecipeState.create(DELAYED, mode="forward", num_quantizers=6)
    assert forward.roles == ("input", "weight", "output") * 2
    backward = RecipeState.create(DELAYED, mode="backward", num_quantizers=4)
    assert backward.roles == ("grad_output", "grad_input") * 2
    assert [q.dtype for q in forward.make_quantizers()] == [E4M3] * 6
    assert [q.dtype for q in backward.make_quantizers()] == [E5M2] * 4
    assert RecipeState.create(DRAWN, mode="forward").make_quantizers()[0].dtype == E2M1
    assert forward.scale.tolist() == [1.0] * 6
    assert forward.amax_history.shape == (6, HISTORY)
    assert not forward.amax_history.any()


def test_a_recipe_without_state_has_none():
    """Nothing to save, nothing to reduce, and its scales are in the tensors, as the error says."""
    state = RecipeState.create(Float8CurrentScaling(), "forward", 3)
    assert (state.state_dict(), state.is_delayed) == ({}, False)
    with pytest.raises(MissingDataError, match="Float8CurrentScaling"):
        _ = state.scale
    assert [q.slot for q in state.make_quantizers()] == [None] * 3


# --- one reduction for all ---


def test_a_state_keeps_its_entry_when_others_go():
    """A layer that one rank has dropped (or not yet) leaves a gap there: the others' amaxes still
    meet their own.
    """

    def rank(comm):
        reduction = AmaxReduction(comm)
        first, second, third = (RecipeState.create(DELAYED, "forward", n) for n in (1, 2, 1))
        for state in (first, second, third):
            state.register_with(reduction)
        reduction.run()
        if comm.rank == 1:
            del state, second
            gc.collect()
        third.make_quantizers()[0].calibrate(with_amax(4.0 + comm.rank))
        first.make_quantizers()[0].calibrate(with_amax(2.0 - comm.rank))
        reduction.run()
        return [first.amax_history[0, 0].item(), third.amax_history[0, 0].item()]

    assert run_in_process(2, rank) == [[2.0, 5.0]] * 2


def test_a_state_belongs_to_the_reduction_that_it_joined_last():
    """What it has recorded goes with it, and the other one leaves it alone, back and forth."""
    state = RecipeState.create(DELAYED, "forward", 1)
    (quantizer,) = state.make_quantizers()
    reductions = [AmaxReduction(SingleRank()) for _ in range(2)]
    for step in range(4):
        mine, other = reductions[step % 2], reductions[1 - step % 2]
        state.register_with(mine)
        quantizer.calibrate(with_amax(1.0 + step))
        other.run()
        assert state.amaxes.view(torch.float32).tolist() == [1.0 + step]
        mine.run()
        assert state.amax_history[0, 0] == 1.0 + step


def test_a_state_can_be_made_where_inference_runs():
    """Made, joined and reduced in inference mode, it can be trained on afterwards."""
    reduction = AmaxReduction(SingleRank())
    with torch.inference_mode():
        state = RecipeState.create(DELAYED, "forward", 1)
        (quantizer,) = state.make_quantizers()
        state.register_with(reduction)
        quantizer.quantize(with_amax(2.0))
        reduction.run()
    quantizer.quantize(with_amax(4.0))
    reduction.run()
    assert state.amax_history[0, :2].tolist() == [4.0, 2.0]


# --- saving and copying ---


@pytest.mark.parametrize("recipe", [DELAYED, DRAWN], ids=["delayed", "nvfp4"])
def test_a_loaded_state_goes_on_bit_for_bit(recipe):
    """Saved in the middle of a step, amaxes waiting, and loaded into a fresh state: everything that
    follows is the same. So is it for deepcopy and pickle, and the original is not disturbed.
    """
    mode = "forward" if recipe is DELAYED else "backward"

    def go_on(state, steps):
        reduction = AmaxReduction(SingleRank())
        state.register_with(reduction)
        made = []
        for step in steps:
            for quantizer in state.make_quantizers():
                x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)) * step
                made.append(quantizer.quantize(x).rowwise_data)
            if step != steps[-1]:
                reduction.run()
        return made

    state = RecipeState.create(recipe, mode, 2, name="layer")
    go_on(state, range(3))
    loaded = RecipeState.create(recipe, mode, 2)
    loaded.load_state_dict(through_a_file(state.state_dict()))
    copies = [loaded, copy.deepcopy(state), pickle.loads(pickle.dumps(state))]
    for other in copies:
        assert_same_tensors(other.state_dict(), state.state_dict())
    expected = go_on(state, range(3, 7))
    for other in copies:
        for ours, theirs in zip(go_on(other, range(3, 7)), expected, strict=True):
            assert_same_bytes(ours, theirs, "codes")
        assert_same_tensors(other.state_dict(), state.state_dict())


def test_a_foreign_state_is_refused():
    """Other names, shapes or dtypes; nothing is changed, and the message shows both sides."""
    state = RecipeState.create(DELAYED, "forward", 2)
    with pytest.raises(InputError, match=r"'scale'\], got \[\]"):
        state.load_state_dict({})
    other = RecipeState.create(DelayedScaling(amax_history_len=7), "forward", 2)
    other.scale.fill_(5)
    with pytest.raises(InputError, match=r"\[2, 5\], got torch\.float32 \[2, 7\]"):
        state.load_state_dict(other.state_dict())
    assert state.scale.tolist() == [1.0, 1.0]
