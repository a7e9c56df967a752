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
    ("recipe", "gathered", "every", "reduced"),
    [
        ("nvfp4", 0.51, 1188, 84), ("nvfp4-drawn", 0.51, 1188, 84),
        ("nvfp4-4over6", 0.51, 1188, 84), ("mxfp8", 2.07, 18924, 1164),
        ("mxfp8-2d", 1.01, 312, 48), ("mxfp4", 1.07, 18924, 1164), ("block", 1.01, 40, 24),
        ("rowwise", 2.05, 4268, 1164), ("current", 1, 12, 12), ("delayed", 1, 12, 12),
    ],
)  # fmt: skip
def test_bytes_on_the_wire(comm, recipe, gathered, every, reduced):
    """Of weights [128, 96], [136, 96] and [512, 96] an all-gather moves at most ``gathered`` bytes
    an element, scales included. Before it ``reduced`` bytes of amaxes are all-reduced: those of
    the tensors, of the blocks that 34 rows a rank cut, of 128x128 blocks that are higher than a
    rank's rows, and of whole columns; 8 more say at which step a rank is. All amaxes are ``every``.
    The report says the same.
    """
    rows, recipe = (128, 136, 512), RECIPES[recipe]
    model = bank(recipe, rows, wrap_layers=False)
    seen = step_twice(model, comm)
    report = zerocast.sharded.report(model)
    said = sum(p.all_reduced_bytes_per_element * p.shape.numel() for p in report.parameters)
    amaxes = sum(zerocast.empty((m, 96), recipe).quantized_storage.amax_slots for m in rows)
    errors = 4 * 3 * 16 * 6 * 2 if recipe.chooses_scales else 0  # of both scales, of cut blocks
    assert seen.bytes["_allgather_base_"] / 96 / sum(rows) <= gathered
    assert seen.bytes["_allgather_base_"] == report.gathered_bytes
    assert (4 * amaxes, seen.bytes["allreduce_"]) == (every, reduced + errors + 8)
    assert said == pytest.approx(reduced)


@on_gloo(2)
def test_a_weight_that_layers_share_is_gathered_and_reported_once(comm):
    """Two layers with one weight cost one gather of it, and the report has it under its first
    name: half a byte an element, and from each rank 24 scales of a byte.
    """
    model = Bank((128, 128))
    model.layers[1].weight = model.layers[0].weight
    zerocast.nn.convert(model, NVFP4, weights="master")
    fully_shard(model, mp_policy=BF16)
    seen = step_twice(model, comm)
    (parameter,) = zerocast.sharded.report(model).parameters
    moved, name, said = seen.bytes["_allgather_base_"], parameter.name, parameter.bytes_per_element
    assert (moved, name) == (128 * 96 // 2 + 2 * 24, "layers.0.weight")
    assert said == moved / (128 * 96)


@on_gloo(4)
@pytest.mark.parametrize(("rows", "sent"), [(130, 33 * 48 + 24), (5, 2 * 48)])
def test_the_report_counts_uneven_shards(comm, rows, sent):
    """Where rows do not divide, the report counts what fills them up, too: 4 ranks send 130 rows
    as 4 x 33 of 4-bit codes and 3 x 6 scales, filled up to a quarter of a row of bytes, and 5 as
    4 x 2 rows, without scales, which every rank makes of a block that they share.
    """
    model = bank(NVFP4, (rows,), wrap_layers=False)
    seen = step_twice(model, comm)
    (parameter,) = zerocast.sharded.report(model).parameters
    moved, said = seen.bytes["_allgather_base_"], parameter.bytes_per_element
    assert moved == 4 * sent
    assert said == moved / (rows * 96)
