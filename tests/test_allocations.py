"""Memory that the package allocates is stated in full and written in full.

torch's default dtype and default device belong to the program around zerocast, and fresh memory
holds what was there before; no byte that zerocast makes may follow any of them.
"""

import ast
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD

import zerocast
from tests.support.claims import assert_same_tensors, stored
from tests.support.recipes import every_recipe
from tests.support.settings import default_dtype, deterministic
from tests.support.values import draw_values
from zerocast.recipes import Recipe

pytestmark = pytest.mark.own_defaults

PACKAGE = Path(zerocast.__file__).parent

FACTORIES = {
    *("arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace"),
    *("normal", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
}
"""The functions of torch that make a tensor from no other, of the default dtype and device."""


def unstated(source: str) -> list[str]:
    """The calls in ``source`` of a factory without ``dtype=`` or ``device=``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"):
            continue
        given = {keyword.arg for keyword in node.keywords}
        missing = {"dtype", "device"} - given
        if node.func.attr in FACTORIES and missing:
            found.append(f"line {node.lineno}: torch.{node.func.attr} without {sorted(missing)}")
    return found


def test_every_allocation_states_dtype_and_device():
    """No tensor of the package is of torch's default dtype or on its default device."""
    wrong = [
        f"{file.relative_to(PACKAGE)}, {text}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for text in unstated(file.read_text())
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "torch.empty(3)",
        "torch.zeros(3, dtype=t)",
        "torch.full((2,), 1.0, device=d)",
        "torch.rand(2)",
    ],
)
def test_an_unstated_allocation_is_seen(source):
    """The check sees a call that leaves out the dtype, the device, or both."""
    assert len(unstated(source)) == 1


# --- the same bytes whatever the process has set ---

SHAPE = (32, 96)
MADE: dict[str, Any] = {"device": "cpu", "params_dtype": torch.float32}

Written = dict[str, torch.Tensor]


@cache
def _drawn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return draw_values("normal", torch.Size(shape).numel(), seed).view(shape)


def values(*shape: int, seed: int = 3) -> torch.Tensor:
    """FP32 values on the CPU, drawn before any setting was changed."""
    return _drawn(shape, seed).clone()


def casts(recipe: Recipe) -> Written:
    """``quantize``, a plan and a functional call; everything that their weights hold."""
    quantized = zerocast.quantize(values(*SHAPE), recipe, dtype=torch.bfloat16, name="w")
    planned, functional = (
        zerocast.empty(SHAPE, recipe, dtype=torch.bfloat16, device="cpu", name="w") for _ in "ab"
    )
    master = values(*SHAPE).view(-1)
    plan = zerocast.CastPlan([planned], [master], [0], check_finite=True)
    plan.cast()
    plan.all_gather()
    zerocast.quantize_master_weights([functional], [master], [0])
    zerocast.post_all_gather_processing([functional])
    weights = {"quantized": quantized, "planned": planned, "functional": functional}
    return stored(weights) | {way: weight.dequantize() for way, weight in weights.items()}


def layers(recipe: Recipe) -> Written:
    """Forward and backward of layers with quantized operands, and steps of the optimizer."""
    torch.manual_seed(0)  # what a weight starts from stays in the history of delayed scaling
    with zerocast.model_init(recipe=recipe):
        model = torch.nn.Sequential(
            zerocast.nn.Linear(32, 32, device="cpu", dtype=torch.float32),
            zerocast.nn.LayerNormLinear(32, 64, normalization="RMSNorm", **MADE),
            zerocast.nn.LayerNormMLP(64, 32, activation="gelu", **MADE),
            zerocast.nn.LayerNormLinear(64, 32, **MADE),
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(values(*parameter.shape) / 8)
    parameters = dict(model.named_parameters())
    optimizer = zerocast.optim.ZeroOptimizer(parameters.items(), SGD, lr=0.1, momentum=0.9)
    for step in range(2):
        x = values(32, 32, seed=step).requires_grad_()
        with zerocast.autocast(recipe=recipe):
            y = model(x)
        y.square().sum().backward()
        assert x.grad is not None
        optimizer.clip_grad_norm_(1e9, math.inf)
        optimizer.step()
    found = {"y": y, "x.grad": x.grad}
    for name, parameter in parameters.items():
        master = optimizer.gather_master(parameter)
        assert master.dtype == torch.float32
        found |= {name: parameter.detach(), f"master of {name}": master}
    return stored(found)


SETTINGS = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),
    "garbage": deterministic,
}


def assert_nothing_follows(work: Callable[[Recipe], Written], recipe: Recipe) -> None:
    """``work`` writes the same bytes in every setting."""
    expected = work(recipe)
    for name, setting in SETTINGS.items():
        with setting():
            written = work(recipe)
        assert_same_tensors(written, expected, f"under {name}")


@every_recipe
@pytest.mark.usefixtures("backend")
def test_casts_follow_no_default_and_no_fresh_memory(recipe: Recipe):
    """Casts write the same bytes under a default dtype of BF16 or float64, under a default device,
    and where fresh memory is filled with garbage.
    """
    assert_nothing_follows(casts, recipe)


@every_recipe
@pytest.mark.parametrize("backend", ["cpu", pytest.param("reference", marks=pytest.mark.slow)])
def test_layers_follow_no_default_and_no_fresh_memory(backend: str, recipe: Recipe):
    """Layers, fused ones included, compute the same bytes in each of those settings, and so does
    the optimizer, whose masters are FP32 in all.
    """
    with zerocast.use_backend(backend):
        assert_nothing_follows(layers, recipe)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "make",
    [
        lambda: zerocast.nn.Linear(32, 64),
        lambda: zerocast.nn.LayerNormLinear(32, 64),
        lambda: zerocast.nn.LayerNormMLP(32, 64),
        lambda: zerocast.nn.LayerNorm(32),
        lambda: zerocast.nn.RMSNorm(32),
    ],
)
def test_layers_are_made_in_the_default_dtype(make: Callable[[], torch.nn.Module], dtype):
    """A layer that is given no dtype has parameters of the default dtype, as those of torch.nn."""
    with default_dtype(dtype):
        layer = make()
    assert {parameter.dtype for parameter in layer.parameters()} == {dtype}
