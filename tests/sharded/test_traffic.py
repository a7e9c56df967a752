"""What travels between the ranks, counted where torch hands it to the backend."""

import collections

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zerocast
from tests.sharded.sharded import BF16, bank, train_step
from tests.support.models import Bank
from tests.support.ranks import run_ranks
from tests.support.recipes import RECIPES

pytestmark = pytest.mark.mpi(min_size=4)
NVFP4 = RECIPES["nvfp4"]


class Collectives(TorchDispatchMode):
    """Counts the collectives of torch.distributed within the context.

    Attributes:
        calls: by operation, how often.
        bytes: by operation, of the tensors that it is given, results included.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()
        self.bytes: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2]
            self.calls[name] += 1
            # Of a list of lists of tensors or of tensors; the gathered one is the largest.
            sizes = [t.nbytes for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
            self.bytes[name] += max(sizes, default=0)
        return func(*args, **(kwargs or {}))


def step_twice(model, comm, *, ahead: bool = True) -> Collectives:
    """Two steps, in the first of which plans are made; the collectives of the second."""
    # Not foreach, which torch works out for seconds where it first sees hundreds of DTensors.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    for number in range(2):
        with Collectives() as seen:
            train_step(model, optimizer, comm, number, ahead=ahead)
    return seen


@pytest.mark.parametrize("parameters", [1, 200])
def test_one_all_reduce_a_step(parameters):
    """With precompute_scales_for_fsdp a step has one all-reduce, for 1 parameter and for 200; no
    collective beside it but FSDP2's own: gathers in forward and backward, and a reduce-scatter.
    """

    def run(comm):
        model = bank(NVFP4, (16,) * parameters, wrap_layers=False)
        return dict(step_twice(model, comm).calls)

    for calls in run_ranks("torch_distributed", 4, run):
        assert calls.pop("allreduce_") == 1
        assert calls == {"_allgather_base_": 1, "_reduce_scatter_base_": 1}


def test_without_precompute_each_parameter_has_an_all_reduce():
    """The hooks reduce for themselves: two small all-reduces a parameter a step, in the forward,
    whether any rank has written it and what its amaxes are, and none in the backward, which gathers
    what the forward cast.
    """

    def run(comm):
        model = bank(NVFP4, (16, 32, 48), wrap_layers=True)
        return dict(step_twice(model, comm, ahead=False).calls)

    for calls in run_ranks("torch_distributed", 3, run):
        assert calls["allreduce_"] == 6
        assert calls["_allgather_base_"] == 6


@pytest.mark.parametrize(
    ("recipe", "bound"),
    [
        ("nvfp4", 0.54), ("nvfp4-4over6", 0.54), ("nvfp4-drawn", 0.54), ("current", 1.01),
        ("delayed", 1.01), ("block", 1.01), ("mxfp8", 2.07), ("rowwise", 2.07),
    ],
)  # fmt: skip
def test_bytes_gathered_an_element(recipe, bound):
    """For even shards an all-gather moves at most 0.54 bytes an element for NVFP4, 1.01 for FP8 of
    one plane and 2.07 of two, and exactly what the report says.
    """
    rows = (128, 256)
    numel = sum(rows) * 96

    def run(comm):
        model = bank(RECIPES[recipe], rows, wrap_layers=False)
        seen = step_twice(model, comm)
        said = zerocast.sharded.report(model)
        return seen.bytes["_allgather_base_"], said.gathered_bytes

    for moved, said in run_ranks("torch_distributed", 4, run):
        assert moved / numel <= bound
        assert moved == said


def test_a_weight_that_layers_share_is_gathered_and_reported_once():
    """Two layers with one weight cost one gather of it, and the report has it under its first
    name.
    """

    def run(comm):
        model = Bank((128, 128))
        model.layers[1].weight = model.layers[0].weight
        zerocast.nn.convert(model, NVFP4, weights="master")
        fully_shard(model, mp_policy=BF16)
        seen = step_twice(model, comm)
        (parameter,) = zerocast.sharded.report(model).parameters
        return seen.bytes["_allgather_base_"], parameter.name, parameter.bytes_per_element

    for moved, name, said in run_ranks("torch_distributed", 2, run):
        assert (moved, name, said) == (128 * 96 // 2, "layers.0.weight", 0.5)


def test_the_report_counts_uneven_shards():
    """Where rows do not divide, the report counts what fills them up, too: 4 ranks send 130 rows
    as 4 x 33 of 4-bit codes, each rounded up to 17 rows of 96 bytes.
    """

    def run(comm):
        model = bank(NVFP4, (130,), wrap_layers=False)
        seen = step_twice(model, comm)
        (parameter,) = zerocast.sharded.report(model).parameters
        return seen.bytes["_allgather_base_"], parameter.bytes_per_element

    for moved, said in run_ranks("torch_distributed", 4, run):
        assert moved == 4 * 17 * 96
        assert said == moved / (130 * 96)
