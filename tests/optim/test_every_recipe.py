"""Every recipe in a sharded optimizer: the bytes of whole weights that are cast from whole masters,
step for step, on any number of ranks, and after a stop.
"""

import itertools
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW

import zerocast
from tests.conftest import Ranks, in_turn
from tests.optim.training import (
    draw_gradients,
    make_params,
    mean_gradients,
    set_gradients,
    start_values,
    through_a_file,
)
from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from zerocast.comm import Communicator, run_in_process
from zerocast.errors import InputError
from zerocast.optim import ZeroOptimizer
from zerocast.recipes import QParams, Recipe
from zerocast.tensors import quantize_into

DRAWN = QParams(fp4_2d_quantization=True, stochastic_rounding=True)


def second_largest(history: torch.Tensor) -> torch.Tensor:
    """A way of its own to make an amax of a history."""
    return history.sort().values[-2]


def four_over_six(mode: str, use_256: str) -> Recipe:
    """NVFP4 whose blocks choose between two scales."""
    return zerocast.NVFP4BlockScaling(
        nvfp4_4over6="weights", nvfp4_4over6_err_mode=mode, nvfp4_4over6_e4m3_use_256=use_256
    )


RECIPES: dict[str, Recipe] = {
    # A history shorter than the training, so entries fall off the end.
    "delayed": zerocast.DelayedScaling(amax_history_len=3, margin=1),
    "delayed-most-recent": zerocast.DelayedScaling(amax_compute_algo="most_recent"),
    "delayed-function": zerocast.DelayedScaling(amax_compute_algo=second_largest),
    "current": zerocast.Float8CurrentScaling(),
    "rowwise": zerocast.Float8RowwiseScaling(),
    "block": zerocast.Float8BlockScaling(),
    "mxfp8": zerocast.MXFP8BlockScaling(),
    "mxfp8-32x32": zerocast.MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4": zerocast.NVFP4BlockScaling(),
    "nvfp4-unrounded": zerocast.NVFP4BlockScaling(round_master=False),
    "nvfp4-4over6-mae-256": four_over_six("MAE", "all"),
    "nvfp4-4over6-mse-256": four_over_six("MSE", "weights"),
    "nvfp4-4over6-mae-448": four_over_six("MAE", "none"),
    "nvfp4-4over6-mse-448": four_over_six("MSE", "none"),
    "nvfp4-drawn": zerocast.NVFP4BlockScaling(fp4_quant_fwd_weight=DRAWN, seed=2**40 + 3),
    "delayed-unrounded": zerocast.DelayedScaling(round_master=False, amax_history_len=2),
}
REMEMBERING = [name for name, recipe in RECIPES.items() if recipe.state]

every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
remembering = pytest.mark.parametrize("recipe", [RECIPES[n] for n in REMEMBERING], ids=REMEMBERING)

Params = list[torch.nn.Parameter]


def named(params: Params) -> list[tuple[str, torch.nn.Parameter]]:
    """Pairs as ``model.named_parameters()`` gives them."""
    return [(f"layer.{i}", param) for i, param in enumerate(params)]


def run_steps(optimizer: ZeroOptimizer, params: Params, steps: range, rank: int) -> None:
    """Steps with this rank's gradients."""
    for step in steps:
        set_gradients(params, draw_gradients([p.shape for p in params], step, rank))
        optimizer.step()


def train_whole_weights(
    recipe: Recipe, steps: int, ranks: int, optimizer_class: Any = AdamW, **options: Any
) -> Params:
    """What the numerics demands: whole weights, cast from whole masters after every step."""
    params = make_params(recipe)
    masters = start_values(params)
    for (name, param), _ in zip(named(params), masters, strict=True):
        if isinstance(param, zerocast.QuantizedTensor):
            param.quantized_storage.name_weight(name)
    optimizer = optimizer_class(masters, **options)
    for step in range(steps):
        gradients = mean_gradients([m.shape for m in masters], step, ranks)
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        optimizer.step()
        for param, master in zip(params, masters, strict=True):
            if isinstance(param, zerocast.QuantizedTensor):
                with zerocast.use_backend("reference"):
                    quantize_into(param.quantized_storage, master)
            else:
                param.data.copy_(master)
    return params


def assert_same_weights(params: Params, expected: Params, what: str) -> None:
    """Every byte of every weight, what recipes remember included."""
    for (name, param), other in zip(named(params), expected, strict=True):
        if isinstance(param, zerocast.QuantizedTensor):
            assert_same_storage(param, other, f"{what}, {name}")
        else:
            assert_same_bytes(param.detach(), other.detach(), f"{what}, {name}")


@pytest.mark.parametrize(
    ("recipe", "ranks"),
    in_turn({name: (recipe,) for name, recipe in RECIPES.items()}),
    indirect=["ranks"],
)
def test_sharded_training_gives_the_bytes_of_whole_weights(ranks: Ranks, recipe: Recipe) -> None:
    """5 steps on any ranks: codes of both planes, scales, padding, amaxes and what the recipe
    remembers are those of whole weights that are cast from whole masters after every step.
    """

    def train(comm: Communicator) -> Params:
        params = make_params(recipe)
        optimizer = ZeroOptimizer(named(params), group=comm, lr=1e-2)
        run_steps(optimizer, params, range(5), comm.rank)
        return params

    whole = train_whole_weights(recipe, 5, ranks.size, lr=1e-2)
    for rank, params in enumerate(ranks.run(train)):
        assert_same_weights(params, whole, f"rank {rank}")


@every_recipe
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 2), (3, 2), (1, 3)])
def test_a_resumed_run_continues_bit_for_bit(saved_on: int, loaded_on: int, recipe: Recipe) -> None:
    """3 steps, save, load into an optimizer over other weights, 3 steps, on as many ranks or on
    others: after loading the weights are the saved ones, and in the end those of 6 steps without a
    stop.
    """

    def train(comm: Communicator) -> tuple[Params, Any]:
        params = make_params(recipe)
        optimizer = ZeroOptimizer(named(params), group=comm, lr=1e-2)
        run_steps(optimizer, params, range(3), rank=0)
        return params, through_a_file(optimizer.state_dict())

    before, saved = zip(*run_in_process(saved_on, train), strict=True)

    def resume(comm: Communicator) -> Params:
        params = make_params(recipe, seed=99)
        optimizer = ZeroOptimizer(params, group=comm)
        optimizer.load_state_dict(saved[comm.rank] if saved_on == loaded_on else saved)
        assert_same_weights(params, before[0], f"rank {comm.rank} after loading")
        run_steps(optimizer, params, range(3, 6), rank=0)
        return params

    whole = train_whole_weights(recipe, 6, 1, lr=1e-2)
    for rank, params in enumerate(run_in_process(loaded_on, resume)):
        assert_same_weights(params, whole, f"rank {rank}")


@remembering
def test_making_an_optimizer_and_loading_advance_nothing(recipe: Recipe) -> None:
    """What a recipe remembers is as before, however often its optimizer is made or loaded."""

    def make_and_load(comm: Communicator) -> None:
        params = make_params(recipe)
        optimizer = ZeroOptimizer(named(params), group=comm)
        run_steps(optimizer, params, range(2), comm.rank)
        kept = remembered(params)
        for _ in range(3):
            optimizer = ZeroOptimizer(params, group=comm)
            optimizer.load_state_dict(optimizer.state_dict())
        assert_same_memory(remembered(params), kept)

    run_in_process(3, make_and_load)


@remembering
def test_a_skipped_step_advances_nothing(recipe: Recipe) -> None:
    """An overflow on one rank skips the second of three steps on all: what recipes remember stays,
    and the weights are in the end those of two steps.
    """

    def train(comm: Communicator) -> Params:
        params = make_params(recipe)
        optimizer = ZeroOptimizer(named(params), SGD, group=comm, lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        for step in (0, None, 1):
            optimizer.zero_grad()
            gradients = draw_gradients([p.shape for p in params], step or 0, comm.rank)
            if step is None and comm.rank == 1:
                gradients[0][0, 0] = torch.inf
            for param, gradient in zip(params, gradients, strict=True):
                scaler.scale((param * gradient.to(param.dtype)).sum()).backward()
            before = remembered(params)
            scaler.step(optimizer)
            if step is None:
                assert_same_memory(remembered(params), before)
            scaler.update()
        return params

    whole = train_whole_weights(recipe, 2, 3, SGD, lr=0.5)
    for rank, params in enumerate(run_in_process(3, train)):
        assert_same_weights(params, whole, f"rank {rank}")


@every_recipe
def test_weights_do_not_depend_on_which_optimizer_holds_them(recipe: Recipe) -> None:
    """One optimizer for all weights, or one for each, so cut elsewhere: the same bytes."""

    def train(comm: Communicator) -> Params:
        params = make_params(recipe)
        optimizers = [ZeroOptimizer([pair], SGD, group=comm, lr=0.1) for pair in named(params)]
        for step in range(3):
            set_gradients(params, draw_gradients([p.shape for p in params], step, comm.rank))
            for optimizer in reversed(optimizers):
                optimizer.step()
        return params

    whole = train_whole_weights(recipe, 3, 2, SGD, lr=0.1)
    for rank, params in enumerate(run_in_process(2, train)):
        assert_same_weights(params, whole, f"rank {rank}")


def test_weights_draw_by_their_names() -> None:
    """Under stochastic rounding equal weights of different names get different codes, and of equal
    names in two optimizers the same.
    """
    value = torch.randn(48, 64, generator=torch.Generator().manual_seed(3))

    def drawn(name: str) -> torch.Tensor:
        weight = torch.nn.Parameter(zerocast.quantize(value, RECIPES["nvfp4-drawn"]))
        optimizer = ZeroOptimizer([(name, weight)], SGD, lr=0.1)
        weight.grad = value.flip(0)  # away from the values that codes stand for
        optimizer.step()
        return weight.rowwise_data

    assert torch.equal(drawn("a"), drawn("a"))
    assert not torch.equal(drawn("a"), drawn("b"))


def test_ranks_that_remember_differently_take_what_rank_0_remembers() -> None:
    """Weights that differ between ranks have other amaxes behind them; afterwards weights are equal
    everywhere, and the history is rank 0's.
    """
    recipe = RECIPES["delayed"]

    def train(comm: Communicator) -> tuple[Params, list[torch.Tensor]]:
        params = make_params(recipe, seed=comm.rank)
        kept = remembered(params)
        optimizer = ZeroOptimizer(named(params), group=comm)
        at_start = remembered(params)
        run_steps(optimizer, params, range(2), comm.rank)
        return params, [*kept, *at_start]

    (first, memory), *others = run_in_process(3, train)
    before, at_start = memory[: len(memory) // 2], memory[len(memory) // 2 :]
    assert_same_memory(at_start, before)
    for params, memory in others:
        assert_same_memory(memory[len(memory) // 2 :], before)
        assert_same_weights(params, first, "another rank")


def test_ranks_may_have_functions_of_their_own() -> None:
    """Processes have the same function at different addresses, and that is no disagreement."""

    def train(comm: Communicator) -> Params:
        recipe = zerocast.DelayedScaling(amax_compute_algo=lambda history: history.max())
        params = make_params(recipe)
        run_steps(ZeroOptimizer(named(params), group=comm), params, range(2), comm.rank)
        return params

    first, second = run_in_process(2, train)
    assert_same_weights(first, second, "rank 1")


@pytest.mark.parametrize(
    "recipe",
    [
        zerocast.NVFP4BlockScaling(disable_2d_quantization=True),
        zerocast.Float8BlockScaling(w_block_scaling_dim=1),
    ],
    ids=["nvfp4-1x16", "block-1x128"],
)
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
    assert_same_storage(weight, expected, "w")


def test_a_state_of_another_recipe_is_refused_by_what_it_remembers() -> None:
    """Both sides of the disagreement are in the message, and nothing has changed."""
    current = ZeroOptimizer(make_params(RECIPES["current"]))
    delayed = ZeroOptimizer(make_params(RECIPES["delayed"]))
    for optimizer, given in itertools.permutations((current, delayed)):
        with pytest.raises(InputError, match=r"remembers .*, and the state dict has"):
            optimizer.load_state_dict(given.state_dict())


def remembered(params: Params) -> list[torch.Tensor]:
    """Copies of what recipes remember of ``params``."""
    return [
        param.quantized_storage.buffers[name].clone()
        for param in params
        if isinstance(param, zerocast.QuantizedTensor)
        for name in param.recipe.state
    ]


def assert_same_memory(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """The same bytes in what recipes remember."""
    for a, e in zip(actual, expected, strict=True):
        assert_same_bytes(a, e, "what a recipe remembers")
