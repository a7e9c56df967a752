"""Every recipe in a sharded optimizer: the bytes of whole weights that are cast from whole masters,
step for step, on any number of ranks, and after a stop.
"""

from typing import Any

import pytest
import torch
from torch.optim import SGD

import zerocast
from tests.conftest import Ranks, in_turn, stamp
from tests.optim.training import (
    Training,
    Whole,
    assert_same_lists,
    draw_gradients,
    make_params,
    named,
    set_gradients,
)
from tests.support.claims import assert_same_tensors, assert_unsharded_cast, stored
from tests.support.ranks import on_ranks
from tests.support.recipes import NOT_SHARDABLE, RECIPES, SHARDABLE, VARIANTS, each, names
from zerocast.comm import Communicator, run_in_process
from zerocast.errors import InputError
from zerocast.optim import ZeroOptimizer
from zerocast.recipes import Recipe

# What a cast depends on beside the recipe's kind: of histories, of choices, of rounding.
IDS = [
    name
    for name in SHARDABLE
    if not name.startswith(("rowwise-", "block-", "mxfp8-e5m2", "current-"))
]
every_recipe = each(*IDS)
REMEMBERING = names(lambda recipe: recipe.state, IDS)


@pytest.mark.parametrize(
    ("recipe", "ranks"),
    in_turn({name: (VARIANTS[name],) for name in RECIPES})
    + in_turn({n: (VARIANTS[n],) for n in IDS if n not in RECIPES}, [stamp("in_process", 3)]),
    indirect=["ranks"],
)
def test_sharded_training_gives_the_bytes_of_whole_weights(ranks: Ranks, recipe: Recipe) -> None:
    """5 steps on any ranks: codes of both planes, scales, padding, amaxes and what the recipe
    remembers are those of whole weights that are cast from whole masters after every step.
    """
    whole = Whole(recipe, ranks=ranks.size, lr=1e-2).train_weights(*range(5))
    for params in ranks.run(lambda comm: Training(comm, recipe, lr=1e-2).train(*range(5))):
        assert_same_lists(params, whole, "trained")


@pytest.mark.parametrize(
    ("saved_on", "loaded_on", "recipe"),
    [
        *((5, 2, VARIANTS[name]) for name in IDS),
        *(
            (*ranks, VARIANTS[name])
            for ranks in ((3, 3), (1, 4))
            for name in ("nvfp4", *REMEMBERING)
        ),
    ],
)
def test_a_resumed_run_continues_bit_for_bit(saved_on: int, loaded_on: int, recipe: Recipe) -> None:
    """3 steps, save, load into an optimizer over other weights, 3 steps: after loading the weights,
    whose codes are not saved, are the cast of the loaded masters at once, and in the end they are
    those of 6 steps without a stop. On as many ranks each loads its own state dict, else all
    ranks'.
    """

    def train(comm: Communicator) -> tuple[list[torch.nn.Parameter], Any]:
        training = Training(comm, recipe, lr=1e-2, weight_decay=0.1)
        return training.train(*range(3), alike=True), training.saved()

    before, saved = zip(*run_in_process(saved_on, train), strict=True)

    def resume(comm: Communicator) -> list[torch.nn.Parameter]:
        training = Training(comm, recipe, seed=99)
        own = saved[comm.rank] if saved_on == loaded_on else saved
        training.optimizer.load_state_dict(own)
        assert training.optimizer.param_groups[0]["lr"] == 1e-2
        assert_same_lists(training.params, before[0], "after loading")
        return training.train(*range(3, 6), alike=True)

    whole = Whole(recipe, lr=1e-2, weight_decay=0.1).train_weights(*range(6))
    for params in run_in_process(loaded_on, resume):
        assert_same_lists(params, whole, "resumed")


@each(*REMEMBERING)
@on_ranks("in_process", 3)
def test_making_an_optimizer_and_loading_advance_nothing(
    comm: Communicator, recipe: Recipe
) -> None:
    """What a recipe remembers is as before, however often its optimizer is made or loaded."""
    params = Training(comm, recipe).train(0, 1)
    kept = remembered(params)
    for _ in range(3):
        optimizer = ZeroOptimizer(params, group=comm)
        optimizer.load_state_dict(optimizer.state_dict())
    assert_same_tensors(remembered(params), kept, "once loaded")


@each("nvfp4", *REMEMBERING)
@pytest.mark.parametrize("unscale_first", [False, True])
@on_ranks("in_process", 3)
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    comm: Communicator, recipe: Recipe, unscale_first: bool
) -> None:
    """Of three steps the second overflows on rank 1 alone: all ranks skip it and halve the scale of
    ``torch.amp.GradScaler``, what recipes remember stays, and the weights are in the end those of
    the two others, bit for bit (scales are powers of two).
    """
    t = Training(comm, recipe, SGD, lr=0.5, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for step, scale in ((0, 1024.0), (None, 512.0), (1, 512.0)):
        t.scaled_backward(scaler, step or 0, overflows=step is None and comm.rank == 1)
        before = remembered(t.params)
        if unscale_first:
            scaler.unscale_(t.optimizer)
        scaler.step(t.optimizer)
        if step is None:
            assert_same_tensors(remembered(t.params), before, "once skipped")
        scaler.update()
        assert scaler.get_scale() == scale
    whole = Whole(recipe, SGD, ranks=3, lr=0.5, momentum=0.9).train_weights(0, 1)
    assert_same_lists(t.params, whole, "after two steps")


@every_recipe
@on_ranks("in_process", 2)
def test_weights_do_not_depend_on_which_optimizer_holds_them(
    comm: Communicator, recipe: Recipe
) -> None:
    """One optimizer for all weights, or one for each, so cut elsewhere: the same bytes."""
    params = make_params(recipe)
    optimizers = [ZeroOptimizer([pair], SGD, group=comm, lr=0.1) for pair in named(params)]
    for step in range(3):
        set_gradients(params, draw_gradients(params, step, comm.rank))
        for optimizer in reversed(optimizers):
            optimizer.step()
    whole = Whole(recipe, SGD, ranks=2, lr=0.1).train_weights(*range(3))
    assert_same_lists(params, whole, "of three optimizers")


@on_ranks("in_process", 3)
def test_ranks_that_remember_differently_take_what_rank_0_remembers(comm: Communicator) -> None:
    """Weights that differ between ranks have other amaxes behind them; afterwards weights are equal
    everywhere, and the history is rank 0's.
    """
    of_rank_0 = remembered(make_params(RECIPES["delayed"], seed=0))
    t = Training(comm, RECIPES["delayed"], seed=comm.rank)
    assert_same_tensors(remembered(t.params), of_rank_0, "at the start")
    params = t.train(0, 1)
    zerocast.verify(params, comm)


@on_ranks("in_process", 2)
def test_ranks_may_have_functions_of_their_own(comm: Communicator) -> None:
    """Processes have the same function at different addresses, and that is no disagreement."""
    recipe = zerocast.DelayedScaling(amax_compute_algo=lambda history: history.max())
    zerocast.verify(Training(comm, recipe).train(0, 1), comm)


@each(*NOT_SHARDABLE)
def test_weights_that_no_sharded_cast_can_fill_are_refused_before_they_move(recipe: Recipe) -> None:
    """A columnwise copy that is cast from the transposed tensor has no shards: the error says so,
    and the weight stays where it is. Without that copy it is served.
    """
    value = torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
    weight = torch.nn.Parameter(zerocast.quantize(value, recipe))
    address = weight.rowwise_data.data_ptr()
    with pytest.raises(InputError, match=r"w: under .* make the weight with columnwise=False"):
        ZeroOptimizer([("w", weight)])
    assert weight.rowwise_data.data_ptr() == address

    weight = torch.nn.Parameter(zerocast.quantize(value, recipe, columnwise=False))
    optimizer = ZeroOptimizer([("w", weight)])
    weight.grad = torch.ones(weight.shape)
    optimizer.step()
    expected = zerocast.quantize(optimizer.gather_master(weight), recipe, columnwise=False)
    assert_unsharded_cast(weight, expected, "w")


def remembered(params: list[torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Copies of what recipes remember of ``params``."""
    states = {key for p in params for key in getattr(getattr(p, "recipe", None), "state", ())}
    found = stored(dict(named(params)))
    return {name: tensor for name, tensor in found.items() if name.split(".")[-1] in states}
