"""What an update of FusedAdamW leaves for the cast of the same masters: amaxes and codes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import zerocast
from tests.optim.training import Training, Whole, assert_same_lists, named, set_gradients
from tests.support.compiled import ON_CPU
from tests.support.recipes import RECIPES, VARIANTS, names
from tests.support.settings import steps_of_casts
from zerocast.backends.cpu import CpuBackend
from zerocast.comm import Communicator, run_in_process
from zerocast.errors import InputError
from zerocast.optim import FusedAdamW, ZeroOptimizer
from zerocast.recipes import Recipe
from zerocast.tensors import quantize_into


@pytest.fixture
def steps() -> Iterator[list[str]]:
    """The steps of casts that are run."""
    with steps_of_casts() as ran:
        yield ran


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_bytes_of_the_one_pass(recipe: Recipe, steps: list[str]) -> None:
    """3 steps on 3 ranks give the bytes of whole weights that are cast from whole masters after
    every step, and no cast measures what the update has measured.
    """
    options = {"lr": 1e-2, "weight_decay": 0.1}
    whole = Whole(recipe, FusedAdamW, ranks=3, **options).train_weights(*range(3))

    def work(comm: Communicator) -> list[torch.nn.Parameter]:
        training = Training(comm, recipe, FusedAdamW, **options)
        comm.all_gather_object(None)
        steps.clear()
        comm.all_gather_object(None)
        return training.train(*range(3))

    for params in run_in_process(3, work):
        assert_same_lists(params, whole, "trained")
    assert "compute_scale" in steps
    assert "partial_amax" not in steps


Change = Callable[[Communicator, int, list[torch.Tensor], ZeroOptimizer], None]
"""What happens between the gradients of a step and the step."""


def assert_one_pass_is_two(
    values: list[torch.Tensor],
    recipe: Recipe,
    dtype: torch.dtype,
    threads: int,
    steps: int,
    change: Change,
    **options: Any,
) -> None:
    """On 3 ranks an update that measures gives the bytes of an update and a cast apart."""

    def work(comm: Communicator, in_one: bool) -> list[torch.Tensor]:
        with zerocast.use_backend(CpuBackend(threads=threads)):
            params: list[torch.Tensor] = [
                torch.nn.Parameter(zerocast.quantize(x, recipe, dtype=dtype)) for x in values
            ]
            optimizer = ZeroOptimizer(named(params), FusedAdamW, comm, **options)
            if not in_one:
                optimizer.inner.plan = None
            for step in range(steps):
                g = torch.Generator().manual_seed(step)
                set_gradients(params, [torch.randn(p.shape, generator=g) for p in params])
                change(comm, step, params, optimizer)
                optimizer.step()
        return params

    apart, in_one = (run_in_process(3, lambda comm, i=i: work(comm, i)) for i in (False, True))
    assert_same_lists(in_one[0], apart[0], "in one pass")


def drawn(*shapes: tuple[int, int]) -> list[torch.Tensor]:
    """Values of weights."""
    g = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=g) for shape in shapes]


@pytest.mark.parametrize("name", names(lambda recipe: not recipe.chooses_scales, RECIPES))
def test_bytes_of_large_weights(name: str) -> None:
    """Weights of several parts and turns of the pass, cut inside of rows and blocks, on two
    threads; the third wider than a strip, the last in whole groups of registers, and without a
    gradient in the second step.
    """

    def change(comm: Communicator, step: int, params: list, optimizer: ZeroOptimizer) -> None:
        if step:
            params[-1].grad = None

    values = drawn((300, 1120), (130, 2080), (2, 40000), (700, 960))
    assert_one_pass_is_two(values, RECIPES[name], torch.float32, 2, 2, change, lr=0.1)


@pytest.mark.parametrize("threads", [1, 2])
def test_bytes_of_ranks(threads: int) -> None:
    """Weights in whole and in cut parts, of a few high rows, of rows that are wider than what
    waits, and in groups of registers that no row is, where a weight is left out of a step, and the
    largest element stays or changes on one rank.
    """
    values = drawn((700, 960), (48, 8192), (20, 70016), (100, 1120))
    for each in values:
        each[-1, -1] = 8

    def change(comm: Communicator, step: int, params: list, optimizer: ZeroOptimizer) -> None:
        for param in params:
            param.grad[-1, -1] = 0
        if step == 3:
            params[0].grad = None
        if step == 4 and comm.rank == 0:
            with torch.no_grad():
                optimizer.inner.param_groups[0]["params"][0].view(-1)[7] = 50

    options = {"lr": 1e-3, "weight_decay": 0, "betas": (0, 0)}
    assert_one_pass_is_two(values, RECIPES["nvfp4"], torch.bfloat16, threads, 6, change, **options)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8-2d", "block", "delayed"])
@pytest.mark.parametrize(
    "change", ["in place", "bound", "moved", "hook", "codes", "another plan", "none"]
)
def test_masters_that_change_before_the_cast(name: str, change: str, steps: list[str]) -> None:
    """A master that is written, bound or left after the update, or a weight that moves or is
    written, is measured again: the bytes are those of the masters as they are.
    """
    if (name, change) == ("delayed", "another plan"):
        return  # that cast is one more in the history of both
    recipe = VARIANTS[name]
    g = torch.Generator().manual_seed(0)
    values = torch.randn(70, 96, generator=g)
    weight = zerocast.quantize(values, recipe)
    oracle = zerocast.quantize(values, recipe)
    master = torch.nn.Parameter(values.clone().view(-1))
    plan = zerocast.CastPlan([weight], [master.detach()], [0], zerocast.comm.SingleRank())
    optimizer = FusedAdamW([master], lr=0.1)
    optimizer.plan = plan
    if change == "hook":
        optimizer.register_step_post_hook(lambda *_: master.data.mul_(8))
    master.grad = torch.randn(70 * 96, generator=g)
    optimizer.step()
    steps.clear()
    if change == "in place":
        with torch.no_grad():
            master.mul_(8)
    elif change == "bound":
        plan.bind([master.detach() * 8])
    elif change == "moved":
        storage = weight.quantized_storage
        zerocast.replace_raw_data(weight, torch.zeros_like(storage.buffers["rowwise_data"]))
    elif change == "codes":
        weight.quantized_storage.buffers["rowwise_data"].zero_()
    elif change == "another plan":
        others = torch.ones(70 * 96)
        zerocast.CastPlan([weight], [others], [0], zerocast.comm.SingleRank()).cast()
        steps.clear()
    plan.cast()
    plan.post_all_gather_processing()
    assert ("partial_amax" in steps) == (change != "none")
    factor = 8 if change == "bound" else 1
    quantize_into(oracle.quantized_storage, factor * master.detach().view(70, 96))
    assert_same_lists([weight], [oracle], change)


def test_a_group_and_a_cast_that_failed() -> None:
    """Weights that share an amax, which one of them raises, and a cast that raised between an
    update and the next cast: the codes are those of the masters as they are.
    """
    g = torch.Generator().manual_seed(0)
    values = [torch.randn(32, 64, generator=g) for _ in range(2)]
    values[0][0, 0] = 8
    weights, others = (
        [zerocast.empty((32, 64), RECIPES["nvfp4"], dtype=torch.bfloat16) for _ in values]
        for _ in range(2)
    )
    masters = [torch.nn.Parameter(x.clone().view(-1)) for x in values]
    plan, apart = (
        zerocast.CastPlan(
            own, [master.detach() for master in masters], [0, 0], zerocast.comm.SingleRank(),
            names=["a", "b"], amax_groups=[["a", "b"]],
        )
        for own in (weights, others)
    )  # fmt: skip
    optimizer = FusedAdamW(masters, lr=0.01, weight_decay=0, betas=(0, 0))
    optimizer.plan = plan
    for i in range(8):
        for master in masters:
            master.grad = torch.randn(32 * 64, generator=g)
        masters[0].grad[0] = 0
        if i == 6:
            with torch.no_grad():
                masters[1][3] = 100
        optimizer.step()
        if i == 3:
            with pytest.raises(InputError, match="elements"):
                plan.cast([masters[0].detach()[:1], masters[1].detach()])
            with torch.no_grad():
                torch._foreach_mul_(masters, -1)
        plan.cast()
        apart.cast()
        assert_same_lists(weights, others, f"step {i}")


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8-2d", "block"])
def test_codes_past_the_caches(name: str) -> None:
    """A launch of so many elements that codes are stored past the caches writes the bytes of
    launches over a quarter of the rows each, on every instruction set.
    """
    rows, cols = 4096, 4128
    g = torch.Generator().manual_seed(0)
    master = torch.randn(rows, cols, generator=g)

    def codes(values: torch.Tensor) -> torch.Tensor:
        weight = zerocast.empty(values.shape, VARIANTS[name], dtype=torch.bfloat16)
        plan = zerocast.CastPlan([weight], [values.reshape(-1)], [0], zerocast.comm.SingleRank())
        plan.cast()
        return weight.quantized_storage.buffers["rowwise_data"]

    for backend in ON_CPU.values():
        with zerocast.use_backend(backend):
            assert torch.equal(codes(master), torch.cat(list(map(codes, master.chunk(4))))), backend
