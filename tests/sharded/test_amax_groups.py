"""Masters of one amax group are cast as one weight, on any number of ranks."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zerocast
from tests.sharded.sharded import (
    BF16,
    Unsharded,
    adamw,
    batch,
    converted,
    gathered,
    shard,
    train_and_compare,
    train_step,
    whole_masters,
)
from tests.support.claims import message_of, one_message
from tests.support.collectives import Collectives
from tests.support.models import Bank
from tests.support.ranks import on_gloo
from tests.support.recipes import RECIPES, SCALES_TENSOR, each
from tests.support.same_bytes import assert_same_bytes
from tests.support.weights import through_a_file

ROWS = (48, 37, 130, 1, 32)
GROUPS = [["*.0", "*.1", "*.3"], ["*.2", "*.4"]]
PAIR = [["*.0", "*.1"]]
NVFP4, DELAYED = RECIPES["nvfp4"], RECIPES["delayed"]


def grouped(recipe=NVFP4, rows=ROWS, groups=GROUPS, **options):
    """A sharded :class:`Bank` whose layers' magnitudes differ, with groups; and what its weights
    must be.
    """
    model = converted(recipe, rows, amax_groups=groups)
    with torch.no_grad():
        for i, layer in enumerate(model.layers):
            layer.weight.mul_(1 + i)
    return shard(model, **options), Unsharded(model, recipe, groups=groups)


@on_gloo()
@pytest.mark.parametrize(
    ("world_size", "recipe"),
    [
        (3, "nvfp4"),
        (3, "delayed"),
        (4, "nvfp4"),
        *(pytest.param(4, r, marks=pytest.mark.slow) for r in SCALES_TENSOR if r != "nvfp4"),
        pytest.param(2, "current", marks=pytest.mark.slow),
    ],
)
def test_groups_have_the_bytes_of_one_rank(comm, recipe):
    """Over four steps, cast in the hooks or ahead of them, codes, scales and amaxes of two groups
    are those of one plan on one rank: members in FSDP modules of their own, with even, uneven and
    empty shards.
    """
    model, expected = grouped(RECIPES[recipe])
    train_and_compare(model, batch(comm), expected, range(4))


@on_gloo(2)
def test_grouped_weights_are_rows_of_one_weight(comm):
    """Codes, block scales and amax of a group whose members are whole blocks are those of
    ``quantize`` on all their rows; so its exported scales are equal.
    """
    for recipe in (NVFP4, RECIPES["current"]):
        model, _ = grouped(recipe, (48, 16, 128), [["*.0", "*.1", "*.2"]])
        rows = torch.cat(list(whole_masters(model).values()))
        fused = zerocast.quantize(rows, recipe, dtype=torch.bfloat16)
        weights = list(gathered(model).values())
        codes = torch.cat([weight.rowwise_data for weight in weights])
        assert_same_bytes(codes, fused.rowwise_data, "codes")
        for weight in weights:
            name = "amax" if recipe == NVFP4 else "rowwise_scale_inv"
            assert_same_bytes(getattr(weight, name), getattr(fused, name), name)


@on_gloo(4)
@pytest.mark.parametrize(
    "options",
    [
        {"wrap_layers": False},
        {"reshard_after_forward": False},
        {"mesh": (2, 2)},
    ],
    ids=["one FSDP module", "kept after the forward", "replicas of shards"],
)
def test_ways_of_sharding_a_group(comm, options):
    """With all members in one FSDP module, with weights that stay gathered, and on replicas of
    shards; two microbatches gather the codes of one cast, so histories move on once a step.
    """
    mesh = options.get("mesh")
    if mesh is not None:
        mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    model, expected = grouped(DELAYED, (37, 5, 48), PAIR, **options | {"mesh": mesh})
    train_and_compare(model, batch(comm), expected, range(3), microbatches=2, ahead=(1,))


@on_gloo()
@pytest.mark.parametrize("world_size", [2, 4], ids=["alone", "FSDP2 beside"])
@each("nvfp4", "current")
def test_groups_of_tensor_parallel_layers(comm, recipe):
    """Layers that two ranks split by rows, with and without shards of FSDP2, have the codes of
    their rows and the scale of all rows of the group, over two steps.
    """
    mesh = init_device_mesh("cpu", (comm.size // 2, 2), mesh_dim_names=("dp", "tp"))
    model = converted(recipe, (64, 32, 96), amax_groups=PAIR)
    parallelize_module(model, mesh["tp"], {"layers.*": ColwiseParallel()})
    if comm.size > 2:
        fully_shard(model, mesh=mesh["dp"])
    expected = Unsharded(model, recipe, torch.float32, PAIR)
    train_and_compare(model, batch(comm).float(), expected, range(2), ahead=())


@on_gloo(3)
def test_a_group_is_cast_once_by_whoever_is_gathered_first(comm):
    """Without precompute_scales_for_fsdp a step has two all-reduces for each group and two for each
    weight of its own, in the forward, whether one was written and amaxes; with it, one.
    """
    counts = []
    for ahead in (False, True):
        model, _ = grouped(NVFP4, (16, 32, 48, 16), [["*.0", "*.2", "*.3"]])
        optimizer = adamw(model.parameters())
        for number in range(2):
            with Collectives() as seen:
                train_step(model, optimizer, comm, number, ahead=ahead)
        counts.append(seen.calls["allreduce_"])
    assert counts == [4, 1]


@on_gloo(2)
def test_the_report_names_the_others_of_a_group(comm):
    """For each member the layers whose amax it shares; for other weights none."""
    lines = [str(one) for one in zerocast.sharded.report(grouped()[0]).parameters]
    shared = [line.partition(", the tensor's shared with ")[2] for line in lines]
    assert shared == [
        "layers.1, layers.3", "layers.0, layers.3", "layers.4", "layers.0, layers.1", "layers.2",
    ]  # fmt: skip


@on_gloo(2)
@pytest.mark.parametrize("ahead", [(), range(9)], ids=["in hooks", "ahead"])
def test_a_frozen_member_is_cast_with_its_group(comm, ahead):
    """A master that nobody writes has the scale of its group all the same, also in a run that is
    resumed while the cast of the others is due, or made.
    """
    (first, expected), (second, _) = (grouped(DELAYED, (37, 5), PAIR) for _ in range(2))
    for model in (first, second):
        model.layers[0].weight.requires_grad_(False)
    train_and_compare(first, batch(comm), expected, range(2), ahead=ahead)
    second.load_state_dict(first.state_dict())
    train_and_compare(second, batch(comm), expected, range(2, 4), ahead=ahead)


@on_gloo(4)
def test_members_that_are_not_sharded_alike_are_refused(comm):
    """By the first gather, on every rank with one message: a member that fully_shard ignores, one
    on another mesh, and by its own gather one of another dtype.
    """
    ignoring, elsewhere, dtypes = (converted(NVFP4, (48, 32), amax_groups=PAIR) for _ in range(3))
    fully_shard(ignoring, ignored_params={ignoring.layers[1].weight})
    meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for layer, name in zip(elsewhere.layers, "ab", strict=True):
        fully_shard(layer, mesh=meshes[name])
    for layer, dtype in zip(dtypes.layers, (torch.bfloat16, torch.float16), strict=True):
        policy = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=True)
        fully_shard(layer, mp_policy=policy)
    x = batch(comm).float()
    ignored, elsewhere, dtypes = (
        one_message(comm.all_gather_object(message_of(zerocast.InputError, model, x)))
        for model in (ignoring, elsewhere, dtypes)
    )
    start = (
        "weights of one amax group are cast together, when the first of them is gathered, so "
        "fully_shard must shard them over the same ranks, got layers.0.weight over "
    )
    end = (
        "; call it on all their layers, or modules around them, with one mesh, or remove one from "
        "amax_groups."
    )
    assert ignored.startswith(start)
    assert ignored.endswith(f" and layers.1.weight not at all{end}")
    assert elsewhere.startswith(start)
    assert " and layers.1.weight over " in elsewhere
    assert elsewhere.endswith(end)
    assert dtypes == (
        "weights of one amax group are cast together, so they must be gathered in one dtype, got "
        "torch.bfloat16 for layers.0.weight and torch.float16 for layers.1.weight; give their "
        "modules one MixedPrecisionPolicy, or remove one from amax_groups."
    )


class Layers(torch.nn.ModuleDict):
    """Of a class that is known to have layers that servers fuse."""

    __module__ = "transformers.models.toy.modeling_toy"


class Known(torch.nn.Module):
    """Such layers side by side: [..., 96] -> [..., 96]."""

    def __init__(self) -> None:
        super().__init__()
        rows = {"q_proj": 48, "k_proj": 32, "v_proj": 16}
        self.layers = Layers({n: torch.nn.Linear(96, m, bias=False) for n, m in rows.items()})

    def forward(self, x):
        """Their outputs beside each other."""
        return torch.cat([layer(x) for layer in self.layers.values()], dim=-1)


def known(recipe=NVFP4):
    """Converted by default, their amaxes far apart."""
    torch.manual_seed(0)
    model = Known()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.mul_(1 + 9 * i)
    report = zerocast.nn.convert(model, recipe, weights="master")
    assert report.amax_groups == (("layers.q_proj", "layers.k_proj", "layers.v_proj"),)
    return model


@on_gloo(4)
@each("nvfp4", "delayed")
def test_a_group_that_nobody_named_is_one_where_its_layers_are_sharded_alike(comm, recipe):
    """Else they train as without a group: one on another mesh, and after a first
    gather one of another dtype.
    """
    names = [f"layers.{name}" for name in ("q_proj", "k_proj", "v_proj")]
    alike = known(recipe)
    for layer in alike.layers.values():
        fully_shard(layer, mp_policy=BF16)
    fully_shard(alike, mp_policy=BF16)
    expected = Unsharded(alike, recipe, groups=[names])
    train_and_compare(alike, batch(comm), expected, range(2))

    elsewhere = known(recipe)
    meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for name, layer in elsewhere.layers.items():
        fully_shard(layer, mesh=meshes["b" if name == "k_proj" else "a"], mp_policy=BF16)
    expected = Unsharded(elsewhere, recipe)
    train_and_compare(elsewhere, batch(comm), expected, range(2))
    assert "shared with" not in str(zerocast.sharded.report(elsewhere))

    dtypes = known(recipe)
    for name, layer in dtypes.layers.items():
        dtype = torch.float16 if name == "v_proj" else torch.bfloat16
        policy = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=True)
        fully_shard(layer, mp_policy=policy)
    optimizer = adamw(dtypes.parameters())
    for _ in range(2):
        for layer in dtypes.layers.values():
            layer(batch(comm).float()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        zerocast.sharded.precompute_scales_for_fsdp(dtypes)
    if not recipe.state:
        masters = whole_masters(dtypes)
        for name, weight in gathered(dtypes).items():
            whole = zerocast.quantize(masters[name], recipe, dtype=weight.dtype)
            assert_same_bytes(weight.rowwise_data, whole.rowwise_data, name)


def test_copies_of_a_model_have_groups_of_their_own():
    """The layers of a deepcopy or a pickle are grouped with each other, and with no original."""
    model = converted(amax_groups=GROUPS)
    loaded = through_a_file(model, weights_only=False)
    for one in (model, copy.deepcopy(model), loaded):
        for places in ((0, 1, 3), (2, 4)):
            layers = [one.layers[i] for i in places]
            for layer in layers:
                assert [id(other) for other in layer.amax_group.layers] == list(map(id, layers))


def test_what_is_a_group():
    """A weight that layers share is in a group once; layers that no pattern names are in none, and
    so are all under recipes without a scale of the tensor, whose weights fuse as they are.
    """
    model = Bank((16, 16, 16, 16))
    model.layers[2].weight = model.layers[0].weight
    zerocast.nn.convert(model, NVFP4, weights="master", amax_groups=[["*.0", "*.1", "*.2"]])
    group = model.layers[0].amax_group
    assert group.layers == [model.layers[0], model.layers[1]]
    assert [layer.amax_group for layer in model.layers] == [group, group, group, None]
    model = converted(RECIPES["mxfp8"], (16, 16), amax_groups=PAIR)
    assert model.layers[0].amax_group is None
