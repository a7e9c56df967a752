"""FusedAdamW: torch's fused AdamW to the bit, and the cast of what it updates, in one pass."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import zerocast
from tests.cuda_emulation.emulator import needs_emulation
from tests.optim.training import Training, Whole, assert_same_lists, named, set_gradients
from tests.support.compiled import EMULATED, ON_CPU
from tests.support.recipes import RECIPES, VARIANTS, names
from tests.support.weights import through_a_file
from zerocast.backends.cpu import CpuBackend
from zerocast.backends.reference import ReferenceBackend
from zerocast.comm import Communicator, run_in_process
from zerocast.errors import InputError, UnsupportedError
from zerocast.numerics import AdamWNumbers, AdamWUpdate, Backend
from zerocast.optim import FusedAdamW, ZeroOptimizer
from zerocast.recipes import Recipe
from zerocast.tensors import quantize_into
from zerocast.tensors.cast_steps import CastSteps

REGISTER = 16
"""Elements that torch's kernel takes at a time, or a divisor of that; those at a tensor's end it
rounds otherwise."""

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "amsgrad": {"amsgrad": True, "weight_decay": 0.1, "lr": 0.5, "eps": 1e-40},
    "maximize": {"maximize": True, "weight_decay": 0.0, "betas": (0.3, 0.99), "eps": 0.0},
    "no momentum": {"betas": (0.0, 0.0), "lr": 1e-38},
    "one half": {"betas": (0.5, 0.5), "lr": 1e30, "amsgrad": True},
}

BACKENDS: dict[str, Any] = {
    "reference": ReferenceBackend(),
    **ON_CPU,
    "cuda": pytest.param(EMULATED["random"], marks=needs_emulation),
}
fused_torch = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch's kernel fuses products and sums where the machine can",
)


def awkward(size: int, seed: int) -> torch.Tensor:
    """Values of all magnitudes: zeros, subnormals, the largest, infinities and NaN among them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=g) * torch.exp(6 * torch.randn(size, generator=g))
    for i, value in enumerate((0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-42, -1e-45, 3e38)):
        x[i::97] = value
    return x


def differs(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Where the bits do; every NaN is one value."""
    same = actual.view(torch.int32) == expected.view(torch.int32)
    return ~(same | (actual.isnan() & expected.isnan()))


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Raise where they differ."""
    wrong = differs(actual, expected).nonzero().flatten()
    if len(wrong):
        i = int(wrong[0])
        raise AssertionError(f"{what}: element {i} is {actual[i]:.9g}, not {expected[i]:.9g}")


@fused_torch
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_bits_are_those_of_torch(options: dict[str, Any], backend: Backend) -> None:
    """Masters and state after 3 steps, of 1 to 1025 elements that start anywhere in memory, are
    those that torch's fused kernel gives in whole registers, each element by itself.
    """
    defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
    given = {**defaults, "maximize": False, "amsgrad": False, **options}
    size = 1040
    whole = awkward(size, 0).requires_grad_()
    optimizer = torch.optim.AdamW([whole], fused=True, **given)
    sizes = (1, 15, 16, 17, 1025)
    own = [
        torch.cat([torch.zeros(n % 5), whole.detach()[:n], *[torch.zeros(n)] * 3]) for n in sizes
    ]
    amsgrad = given.pop("amsgrad")
    for step in range(1, 4):
        whole.grad = awkward(size, step)
        optimizer.step()
        updates = []
        for n, memory in zip(sizes, own, strict=True):
            master, average, square, largest = memory[n % 5 :].split(n)
            numbers = AdamWNumbers.of(step, **given)
            gradient = whole.grad[:n].clone()
            updates.append(
                AdamWUpdate(
                    master, gradient, average, square, largest if amsgrad else None, numbers
                )
            )
        backend.adamw(updates)()
        expected = [whole.detach(), *list(optimizer.state[whole].values())[1:]]
        for n, update in zip(sizes, updates, strict=True):
            found = [update.master, update.exp_avg, update.exp_avg_sq, update.max_exp_avg_sq]
            for i, (one, other) in enumerate(zip(found, expected, strict=False)):
                if one is not None:
                    assert_same_bits(one, other[:n], f"step {step}, {n} elements, tensor {i}")


def pair(size: int = 4 * REGISTER) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Two parameters, twice; the second of them never has a gradient."""
    g = torch.Generator().manual_seed(0)
    values = [torch.randn(size, generator=g), torch.randn(3, REGISTER, generator=g)]
    ours, theirs = ([torch.nn.Parameter(value.clone()) for value in values] for _ in range(2))
    return ours, theirs


def train(optimizers: Sequence[Any], lists: Sequence[Any], steps: range) -> None:
    """Steps of both with equal gradients, of the first parameter alone."""
    for step in steps:
        for optimizer, params in zip(optimizers, lists, strict=True):
            g = torch.Generator().manual_seed(step)
            params[0].grad = torch.randn(params[0].shape, generator=g)
            optimizer.step()


@fused_torch
def test_it_takes_the_place_of_torchs() -> None:
    """Param groups, a learning rate that is a tensor and one that a scheduler moves, a parameter
    without a gradient; state dicts go both ways in mid-run.
    """
    ours, theirs = pair()
    classes = (FusedAdamW, torch.optim.AdamW)
    makes = [
        lambda params, c=c: c(
            [{"params": params[:1], "lr": torch.tensor(0.1)}, {"params": params[1:], "eps": 1e-3}],
            fused=True,
            amsgrad=True,
        )
        for c in classes
    ]
    optimizers = [make(params) for make, params in zip(makes, (ours, theirs), strict=True)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in optimizers]
    for first in range(0, 4, 2):
        train(optimizers, (ours, theirs), range(first, first + 2))
        for scheduler in schedulers:
            scheduler.step()
        assert not optimizers[0].state[ours[1]]
        one, other = optimizers[0].state[ours[0]], optimizers[1].state[theirs[0]]
        assert list(one) == list(other)
        for name in one:
            assert (one[name].shape, one[name].dtype) == (other[name].shape, other[name].dtype)
            assert torch.equal(one[name], other[name]), name
        # Each goes on from the other's state.
        states = [through_a_file(each.state_dict()) for each in reversed(optimizers)]
        optimizers = [make(params) for make, params in zip(makes, (ours, theirs), strict=True)]
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in optimizers]
    train(optimizers, (ours, theirs), range(4, 6))
    assert torch.equal(ours[0], theirs[0])


def test_parameters_of_any_strides() -> None:
    """Parameters that are not contiguous, or empty, are stepped as contiguous ones; a closure's
    loss is returned, and torch counts the writes.
    """
    g = torch.Generator().manual_seed(0)
    value = torch.randn(6, 8, 4, 4, generator=g)
    plain, last = value.clone(), value.clone(memory_format=torch.channels_last)
    cut = torch.randn(6, 16, 4, 4)[:, ::2].copy_(value)
    params = [torch.nn.Parameter(each) for each in (plain, last, cut, torch.empty(0))]
    optimizer = FusedAdamW(params)
    versions = [param._version for param in params]

    def closure() -> float:
        for param in params:
            param.grad = value.clone() if param.numel() else torch.empty(0)
        return 7.0

    assert optimizer.step(closure) == 7.0
    optimizer.step(closure)
    assert torch.equal(params[0], params[1])
    assert torch.equal(params[0], params[2])
    assert all(param._version > before for param, before in zip(params, versions, strict=True))
    copied = copy.deepcopy(optimizer).state_dict()["state"]
    assert torch.equal(copied[0]["exp_avg"], optimizer.state[params[0]]["exp_avg"])


@pytest.mark.parametrize(
    ("error", "told", "options"),
    [
        (UnsupportedError, "capturable=True", {"capturable": True}),
        (UnsupportedError, "foreach=True", {"foreach": True}),
        (UnsupportedError, "fused=False", {"fused": False}),
        (UnsupportedError, "differentiable=True", {"differentiable": True}),
        (InputError, "'momentum'", {"momentum": 0.9}),
        (InputError, "lr must be 0 or more, got -1", {"lr": -1}),
        (InputError, "one element", {"lr": torch.ones(2)}),
        (InputError, "betas must be two numbers", {"betas": (0.9, 1.0)}),
        (InputError, "eps must be", {"eps": float("nan")}),
    ],
)
def test_options_that_are_refused(
    error: type[Exception], told: str, options: dict[str, Any]
) -> None:
    """By name, and a group's as well as the optimizer's."""
    param = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(error, match=told):
        FusedAdamW([param], **options)
    if error is InputError and "momentum" not in options:
        with pytest.raises(error, match=told):
            FusedAdamW([{"params": [param], **options}])


@pytest.mark.parametrize(
    "param",
    [
        torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)),
        torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)),
        torch.nn.Parameter(zerocast.quantize(torch.zeros(16, 16), RECIPES["nvfp4"])),
    ],
    ids=["bf16", "fp64", "quantized"],
)
def test_parameters_that_are_refused(param: torch.nn.Parameter) -> None:
    """What is not plain FP32 is refused before anything is written."""
    other = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdamW([other, param])
    other.grad = torch.ones(3)
    param.grad = torch.zeros(param.shape, dtype=param.dtype)
    with pytest.raises(UnsupportedError, match="dense FP32"):
        optimizer.step()
    assert torch.equal(other, torch.ones(3))
    assert not optimizer.state


# --- one pass for the update and the cast ---


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps of casts that are run."""
    ran: list[str] = []
    run = CastSteps.run

    def recorded(self: CastSteps, *names: str) -> None:
        ran.extend(names)
        run(self, *names)

    monkeypatch.setattr(CastSteps, "run", recorded)
    return ran


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


SHAPES = ((300, 1120), (130, 2080), (2, 40000), (700, 960))
"""Several parts and turns of the pass; the third wider than a strip, the last in whole groups of
registers.
"""


@pytest.mark.parametrize("name", names(lambda recipe: not recipe.chooses_scales, RECIPES))
def test_bytes_of_large_weights(name: str) -> None:
    """Weights of many parts, on 3 ranks, cut inside of rows and blocks, on two threads: the
    codes and scales of an update and a cast apart.
    """
    recipe = RECIPES[name]

    def work(comm: Communicator, in_one: bool) -> list[torch.Tensor]:
        with zerocast.use_backend(CpuBackend(threads=2)):
            g = torch.Generator().manual_seed(0)
            params = [
                torch.nn.Parameter(zerocast.quantize(torch.randn(s, generator=g), recipe))
                for s in SHAPES
            ]
            optimizer = ZeroOptimizer(named(params), FusedAdamW, comm, lr=0.1)
            if not in_one:
                optimizer.inner.plan = None
            for step in range(2):
                g = torch.Generator().manual_seed(step)
                gradients = [torch.randn(p.shape, generator=g) for p in params]
                set_gradients(params, gradients)
                if step:
                    params[-1].grad = None
                optimizer.step()
        return params

    apart, in_one = (run_in_process(3, lambda comm, i=i: work(comm, i)) for i in (False, True))
    assert_same_lists(in_one[0], apart[0], name)


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


# --- codes that are written under a guess of the tensor's amax ---


@pytest.mark.parametrize("backend", ON_CPU.values(), ids=ON_CPU)
@pytest.mark.parametrize(
    "change",
    ["none", "amax", "twice", "in place", "bound", "moved", "codes", "another plan", "cast anew",
     "no gradient", "infinite", "nan"],
)  # fmt: skip
def test_codes_under_a_guess(change: str, backend: CpuBackend) -> None:
    """An update writes NVFP4's codes under the amax that the two casts before had; where that is
    not the tensor's amax, or other masters are cast than were updated, the cast writes them anew.
    """
    g = torch.Generator().manual_seed(0)
    values = torch.randn(70, 192, generator=g)
    values[0, 0] = 8  # the largest, without a gradient
    if change in ("infinite", "nan"):
        values[1, 1] = values[17, 70] = -torch.inf
        values[5, 5] = values[69, 191] = -torch.nan if change == "nan" else torch.inf
    weight = zerocast.empty(values.shape, RECIPES["nvfp4"], dtype=torch.bfloat16)
    master = torch.nn.Parameter(values.clone().view(-1))
    with zerocast.use_backend(backend):
        plan = zerocast.CastPlan([weight], [master.detach()], [0], zerocast.comm.SingleRank())
    optimizer = FusedAdamW([master], lr=0.01, weight_decay=0)
    optimizer.plan = plan
    codes = weight.quantized_storage.buffers["rowwise_data"]
    for i in range(4):
        master.grad = torch.randn(values.numel(), generator=g)
        master.grad[0] = 0
        if i == 3 and change == "amax":
            with torch.no_grad():
                master[5] = 100
        if i == 3 and change == "no gradient":
            with torch.no_grad():
                master.mul_(-1)
            master.grad = None
        before = codes.clone()
        optimizer.step()
        if i == 3 and change == "twice":
            master.grad *= -7
            optimizer.step()
        updated = codes.clone()
        if change not in ("infinite", "nan"):  # whose codes are all alike
            assert torch.equal(updated, before) == (i < 2 or (change == "no gradient" and i == 3))
        if i == 3 and change == "cast anew":
            plan.cast()
        if i == 3 and change in ("in place", "cast anew"):
            with torch.no_grad():
                master[::2].mul_(-1)
        elif i == 3 and change == "bound":
            master = -master.detach()
            plan.bind([master])
        elif i == 3 and change == "moved":
            codes = torch.zeros_like(codes)
            zerocast.replace_raw_data(weight, codes)
        elif i == 3 and change == "codes":
            codes.zero_()
        elif i == 3 and change == "another plan":
            with zerocast.use_backend(backend):
                single = zerocast.comm.SingleRank()
                zerocast.CastPlan([weight], [-master.detach()], [0], single).cast()
        plan.cast()
    plan.post_all_gather_processing()
    wrong = ("amax", "in place", "bound", "cast anew", "no gradient")
    assert torch.equal(codes, updated) == (change not in wrong)
    oracle = zerocast.quantize(master.detach().view(70, 192), weight.recipe, dtype=torch.bfloat16)
    assert_same_lists([weight], [oracle], change)


@pytest.mark.parametrize("threads", [1, 2])
def test_guesses_of_ranks(threads: int) -> None:
    """On 3 ranks weights in whole and in cut parts, of a few high rows, of rows that are wider than
    what waits, and in groups of registers that no row is: the bytes of an update and a cast apart,
    where a weight is left out of a step, and the largest element stays or changes on one rank.
    """
    shapes = ((700, 960), (48, 8192), (20, 70016), (100, 1120))

    def work(comm: Communicator, in_one: bool) -> list[torch.Tensor]:
        with zerocast.use_backend(CpuBackend(threads=threads)):
            g = torch.Generator().manual_seed(0)
            values = [torch.randn(s, generator=g) for s in shapes]
            for each in values:
                each[-1, -1] = 8
            params = [
                torch.nn.Parameter(zerocast.quantize(x, RECIPES["nvfp4"], dtype=torch.bfloat16))
                for x in values
            ]
            optimizer = ZeroOptimizer(
                named(params), FusedAdamW, comm, lr=1e-3, weight_decay=0, betas=(0, 0)
            )
            if not in_one:
                optimizer.inner.plan = None
            for step in range(6):
                g = torch.Generator().manual_seed(step)
                gradients = [torch.randn(p.shape, generator=g) for p in params]
                for each in gradients:
                    each[-1, -1] = 0
                set_gradients(params, gradients)
                if step == 3:
                    params[0].grad = None
                if step == 4 and comm.rank == 0:
                    with torch.no_grad():
                        optimizer.inner.param_groups[0]["params"][0].view(-1)[7] = 50
                optimizer.step()
        return params

    apart, in_one = (run_in_process(3, lambda comm, i=i: work(comm, i)) for i in (False, True))
    assert_same_lists(in_one[0], apart[0], "ranks")


def test_guesses_of_a_group_and_of_a_cast_that_failed() -> None:
    """Weights that share an amax, which one of them raises after the guess, and a cast that raised
    between an update and the next cast: the codes are those of the masters as they are.
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
