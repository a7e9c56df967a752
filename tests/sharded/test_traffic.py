"""What travels between the ranks, counted where torch hands it to the backend."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import zerocast
from tests.sharded.sharded import BF16, bank, train_step
from tests.support.collectives import Collectives
from tests.support.models import Bank
from tests.support.ranks import on_gloo
from tests.support.recipes import RECIPES

NVFP4 = RECIPES["nvfp4"]


def step_twice(model, comm, *, ahead: bool = True) -> Collectives:
    """Two steps, in the first of which plans are made; the collectives of the second."""
    # Not foreach, which torch works out for seconds where it first sees hundreds of DTensors.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    for number in range(2):
        with Collectives() as seen:
            train_step(model, optimizer, comm, number, ahead=ahead)
    return seen


@on_gloo(4)
@pytest.mark.parametrize("parameters", [1, 200])
def test_one_all_reduce_a_step(comm, parameters):
    """With precompute_scales_for_fsdp a step has one all-reduce, for 1 parameter and for 200; no
    collective beside it but FSDP2's own: gathers in forward and backward, and a reduce-scatter.
    """
    model = bank(NVFP4, (16,) * parameters, wrap_layers=False)
    calls = dict(step_twice(model, comm).calls)
    assert calls.pop("allreduce_") == 1
    assert calls == {"_allgather_base_": 1, "_reduce_scatter_base_": 1}


@on_gloo(3)
def test_without_precompute_each_parameter_has_an_all_reduce(comm):
    """The hooks reduce for themselves: two small all-reduces a parameter a step, in the forward,
    whether any rank has written it and what its amaxes are, and none in the backward, which gathers
    what the forward cast.
    """
    model = bank(NVFP4, (16, 32, 48), wrap_layers=True)
    calls = dict(step_twice(model, comm, ahead=False).calls)
    assert calls["allreduce_"] == 6
    assert calls["_allgather_base_"] == 6


@on_gloo(4)
@pytest.mark.parametrize(
    ("recipe", "bound"),
    [
        ("nvfp4", 0.54), ("nvfp4-4over6", 0.54), ("nvfp4-drawn", 0.54), ("current", 1.01),
        ("delayed", 1.01), ("block", 1.01), ("mxfp8", 2.07), ("mxfp4", 1.07), ("rowwise", 2.07),
    ],
)  # fmt: skip
def test_bytes_gathered_an_element(comm, recipe, bound):
    """For even shards an all-gather moves at most 0.54 bytes an element for NVFP4, 1.01 for FP8 of
    one plane and 2.07 of two, and exactly what the report says.
    """
    rows = (128, 256)
    numel = sum(rows) * 96
    model = bank(RECIPES[recipe], rows, wrap_layers=False)
    seen = step_twice(model, comm)
    said = zerocast.sharded.report(model)
    moved, said = seen.bytes["_allgather_base_"], said.gathered_bytes
    assert moved / numel <= bound
    assert moved == said


@on_gloo(2)
def test_a_weight_that_layers_share_is_gathered_and_reported_once(comm):
    """Two layers with one weight cost one gather of it, and the report has it under its first
    name.
    """
    model = Bank((128, 128))
    model.layers[1].weight = model.layers[0].weight
    zerocast.nn.convert(model, NVFP4, weights="master")
    fully_shard(model, mp_policy=BF16)
    seen = step_twice(model, comm)
    (parameter,) = zerocast.sharded.report(model).parameters
    moved, name, said = seen.bytes["_allgather_base_"], parameter.name, parameter.bytes_per_element
    assert (moved, name, said) == (128 * 96 // 2, "layers.0.weight", 0.5)


@on_gloo(4)
@pytest.mark.parametrize(("rows", "sent"), [(130, 33 * 48), (5, 2 * 48)])
def test_the_report_counts_uneven_shards(comm, rows, sent):
    """Where rows do not divide, the report counts what fills them up, too: 4 ranks send 130 rows
    as 4 x 33 of 4-bit codes, and 5 as 4 x 2.
    """
    model = bank(NVFP4, (rows,), wrap_layers=False)
    seen = step_twice(model, comm)
    (parameter,) = zerocast.sharded.report(model).parameters
    moved, said = seen.bytes["_allgather_base_"], parameter.bytes_per_element
    assert moved == 4 * sent
    assert said == moved / (rows * 96)
