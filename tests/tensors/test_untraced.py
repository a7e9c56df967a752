"""Functions that torch.compile must not follow run as they are, and cost nothing without it."""

import subprocess
import sys

import pytest
import torch

import zerocast
from tests.support.same_bytes import assert_same_storage
from tests.support.values import draw_values
from zerocast.tensors.untraced import untraced

SHAPE = (32, 32)
INDUCTOR = pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.filterwarnings("ignore")])


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graphs() -> int:
    """How many were compiled since the test began."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("backend", ["eager", INDUCTOR])
def test_a_compiled_step_calls_a_plan_between_its_graphs(backend: str) -> None:
    """The steps of a plan that compiled code calls see the masters that it wrote, and nothing of
    them is in a graph: one is made of what comes before, one of what comes after.
    """
    weight, master = zerocast.empty(SHAPE, "nvfp4"), draw_values("normal", 1024, 1)
    plan = zerocast.CastPlan([weight], [master], [0])

    @torch.compile(backend=backend)
    def step(scale: torch.Tensor) -> torch.Tensor:
        master.mul_(scale)
        plan.cast()
        plan.all_gather()
        return scale + 1

    for factor in (2.0, 3.0, 5.0):
        expected = zerocast.quantize((master * factor).view(SHAPE), "nvfp4", dtype=torch.bfloat16)
        assert step(torch.tensor(factor)).item() == factor + 1
        assert_same_storage(weight, expected, f"times {factor}")
    assert graphs() == 2


def test_what_it_calls_is_not_traced_either() -> None:
    """Nor is it when a function between it and the compiled one cannot be traced, and so runs by
    itself.
    """

    def inner(x: torch.Tensor) -> int:
        assert not torch.compiler.is_compiling()
        return x.add(1).data_ptr()

    def between(x: torch.Tensor) -> int:
        torch._dynamo.graph_break()
        return untraced(inner)(x)

    @torch.compile(backend="eager")
    def outer(x: torch.Tensor) -> torch.Tensor:
        between(x * 2)
        return x + 1

    assert torch.equal(outer(torch.ones(2)), torch.full((2,), 2.0))
    assert graphs() == 2


def test_a_whole_graph_is_refused() -> None:
    """As torch refuses what must not be traced."""
    function = untraced(lambda x: x.data_ptr())
    compiled = torch.compile(lambda x: (function(x), x + 1), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="marked as skipped"):
        compiled(torch.ones(2))


def test_a_cast_does_not_import_the_compiler() -> None:
    """Which would take each rank seconds."""
    program = (
        "import sys, torch, zerocast\n"
        "plan = zerocast.CastPlan([zerocast.empty((32, 32), 'nvfp4')], [torch.ones(1024)], [0])\n"
        "plan.cast()\n"
        "plan.all_gather()\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
