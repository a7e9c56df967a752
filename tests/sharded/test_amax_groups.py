"""Masters of one amax group are cast as one weight, on any number of ranks."""

import copy
import io

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zerocast
from tests.sharded.sharded import BF16, adamw, batch, feed, gathered, reshard, whole_masters
from tests.sharded.test_traffic import Collectives
from tests.support.models import Bank
from tests.support.ranks import run_ranks
from tests.support.recipes import RECIPES
from tests.support.same_bytes import assert_same_bytes
from zerocast.sharded.casts import CastGroupMember, cast_group_of, ungathered_weight
from zerocast.sharded.placement import to_local

on_ranks = pytest.mark.mpi(min_size=4)
ROWS = (48, 37, 130, 1, 32)
GROUPS = [["*.0", "*.1", "*.3"], ["*.2", "*.4"]]
NVFP4, DELAYED = RECIPES["nvfp4"], RECIPES["delayed"]
SCALED = [name for name, recipe in RECIPES.items() if recipe.scales_tensor]
"""Recipes with a scale, or an amax, of the whole tensor."""


def grouped(recipe, rows=ROWS, groups=GROUPS, *, mesh=None, wrap_layers=True, **options):
    """A :class:`Bank` whose layers' magnitudes differ, converted with groups and sharded."""
    torch.manual_seed(0)
    model = Bank(rows)
    with torch.no_grad():
        for i, layer in enumerate(model.layers):
            layer.weight.mul_(1 + i)
    zerocast.nn.convert(model, recipe, weights="master", amax_groups=groups)
    options = {"mp_policy": BF16, "mesh": mesh} | options
    for layer in model.layers if wrap_layers else ():
        fully_shard(layer, **options)
    return fully_shard(model, **options)


class OneRank:
    """What the weights must be: cast by one plan on one rank that has the whole masters."""

    def __init__(self, model, recipe, groups=GROUPS, dtype=torch.bfloat16) -> None:
        self.names = [name for name, _ in model.named_parameters()]
        self.weights = [zerocast.empty(p.shape, recipe, dtype=dtype) for p in model.parameters()]
        self.plan = zerocast.CastPlan(
            self.weights,
            [torch.zeros(p.shape) for p in model.parameters()],
            [0] * len(self.weights),
            zerocast.comm.SingleRank(),
            names=self.names,
            amax_groups=groups,
        )

    def cast(self, model) -> None:
        """Cast every master once. Collective."""
        self.plan.cast(list(whole_masters(model).values()))
        self.plan.post_all_gather_processing()

    def assert_gathered(self, model, when: str) -> None:
        """What FSDP2 gathers has these bytes, in every buffer that a layer reads."""
        found = gathered(model)
        for name, expected in zip(self.names, self.weights, strict=True):
            for buffer, actual in found[name].quantized_storage.buffers.items():
                assert_same_bytes(
                    actual, expected.quantized_storage.buffers[buffer], f"{when}, {name}.{buffer}"
                )
        reshard(model)


def train(model, comm, one_rank, steps, *, microbatches=1, precompute=(1, 2)) -> None:
    """Steps of AdamW with given gradients; what is gathered is compared in forward and backward."""
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    for step in steps:
        one_rank.cast(model)
        for _ in range(microbatches):
            loss = model(batch(comm))
            one_rank.assert_gathered(model, f"forward of step {step}")
            loss.backward()
        one_rank.assert_gathered(model, f"backward of step {step}")
        feed((p for p in model.parameters() if p.requires_grad), step)
        optimizer.step()
        optimizer.zero_grad()
        if step in precompute:
            zerocast.sharded.precompute_scales_for_fsdp(model)


@on_ranks
@pytest.mark.parametrize(
    ("world_size", "recipe"),
    [
        (3, "nvfp4"),
        (3, "delayed"),
        *(pytest.param(4, recipe, marks=pytest.mark.slow) for recipe in SCALED),
        pytest.param(2, "current", marks=pytest.mark.slow),
    ],
)
def test_groups_have_the_bytes_of_one_rank(world_size, recipe):
    """Over four steps, cast in the hooks or ahead of them, codes, scales and amaxes of two groups
    are those of one plan on one rank: members in FSDP modules of their own, with even, uneven and
    empty shards.
    """

    def run(comm):
        model = grouped(RECIPES[recipe])
        train(model, comm, OneRank(model, RECIPES[recipe]), range(4))

    run_ranks("torch_distributed", world_size, run)


@on_ranks
def test_grouped_weights_are_rows_of_one_weight():
    """Codes, block scales and amax of a group whose members are whole blocks are those of
    ``quantize`` on all their rows; so its exported scales are equal.
    """

    def run(comm):
        for recipe in (NVFP4, RECIPES["current"]):
            model = grouped(recipe, (48, 16, 128), [["*.0", "*.1", "*.2"]])
            rows = torch.cat(list(whole_masters(model).values()))
            fused = zerocast.quantize(rows, recipe, dtype=torch.bfloat16)
            weights = list(gathered(model).values())
            assert_same_bytes(
                torch.cat([weight.rowwise_data for weight in weights]), fused.rowwise_data, "codes"
            )
            for weight in weights:
                name = "amax" if recipe == NVFP4 else "rowwise_scale_inv"
                assert_same_bytes(getattr(weight, name), getattr(fused, name), name)

    run_ranks("torch_distributed", 2, run)


@on_ranks
@pytest.mark.parametrize(
    "options",
    [
        {"wrap_layers": False},
        {"reshard_after_forward": False},
        {"mesh": (2, 2)},
    ],
    ids=["one FSDP module", "kept after the forward", "replicas of shards"],
)
def test_ways_of_sharding_a_group(options):
    """With all members in one FSDP module, with weights that stay gathered, and on replicas of
    shards; two microbatches gather the codes of one cast, so histories move on once a step.
    """

    def run(comm):
        mesh = options.get("mesh")
        if mesh is not None:
            mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
        model = grouped(DELAYED, (37, 5, 48), [["*.0", "*.1"]], **options | {"mesh": mesh})
        one_rank = OneRank(model, DELAYED, [["*.0", "*.1"]])
        train(model, comm, one_rank, range(3), microbatches=2, precompute=(1,))

    run_ranks("torch_distributed", 4, run)


@on_ranks
@pytest.mark.parametrize("dp", [1, 2], ids=["alone", "FSDP2 beside"])
def test_groups_of_tensor_parallel_layers(dp):
    """Layers that two ranks split by rows, with and without shards of FSDP2, have the codes of
    their rows and the scale of all rows of the group, over two steps.
    """
    groups, recipe = [["*.0", "*.1"]], RECIPES["current"]

    def run(comm):
        mesh = init_device_mesh("cpu", (dp, 2), mesh_dim_names=("dp", "tp"))
        model = Bank((64, 32, 16))
        zerocast.nn.convert(model, recipe, weights="master", amax_groups=groups)
        parallelize_module(model, mesh["tp"], {"layers.*": ColwiseParallel()})
        if dp > 1:
            fully_shard(model, mesh=mesh["dp"])
        one_rank = OneRank(model, recipe, groups, dtype=torch.float32)
        for step in range(2):
            one_rank.cast(model)
            model(batch(comm).float()).backward()
            if dp > 1:
                model.unshard()
            for layer, expected in zip(model.layers, one_rank.weights, strict=True):
                weight = codes_of(layer)
                start = mesh["tp"].get_local_rank() * weight.shape[0]
                rows = expected.rowwise_data[start : start + weight.shape[0]]
                assert_same_bytes(weight.rowwise_data, rows, f"codes of step {step}")
                scale = expected.rowwise_scale_inv
                assert_same_bytes(weight.rowwise_scale_inv, scale, f"scale of step {step}")
            reshard(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5 + parameter.shape[0])

    run_ranks("torch_distributed", 2 * dp, run)


def codes_of(layer) -> zerocast.QuantizedTensor:
    """What a tensor-parallel layer multiplies with: gathered, or cast where it is."""
    weight = to_local(layer.weight)
    if not isinstance(weight, zerocast.sharded.MasterWeight):
        return weight
    unit = cast_group_of(
        layer, CastGroupMember(weight.low_bit_all_gather, weight.value, layer.weight)
    )
    return ungathered_weight(weight.low_bit_all_gather, unit, weight)


@on_ranks
def test_a_group_is_cast_once_by_whoever_is_gathered_first():
    """Without precompute_scales_for_fsdp a step has two all-reduces for each group and two for each
    weight of its own, in the forward, whether one was written and amaxes; with it, one.
    """

    def run(comm):
        counts = []
        for precompute in ((), range(4)):
            model = grouped(NVFP4, (16, 32, 48, 16), [["*.0", "*.2", "*.3"]])
            optimizer = adamw(model.parameters())
            for step in range(2):
                with Collectives() as seen:
                    model(batch(comm)).backward()
                    feed(model.parameters(), step)
                    optimizer.step()
                    optimizer.zero_grad()
                    if step in precompute:
                        zerocast.sharded.precompute_scales_for_fsdp(model)
            counts.append(seen.calls["allreduce_"])
        return counts

    for counts in run_ranks("torch_distributed", 3, run):
        assert counts == [4, 1]


@on_ranks
def test_the_report_names_the_others_of_a_group():
    """For each member the layers whose amax it shares; for other weights none."""

    def run(comm):
        return [str(one) for one in zerocast.sharded.report(grouped(NVFP4)).parameters]

    lines = run_ranks("torch_distributed", 2, run)[0]
    shared = [line.partition("amaxes")[2] for line in lines]
    assert shared == [
        f", the tensor's shared with {others}"
        for others in (
            "layers.1, layers.3",
            "layers.0, layers.3",
            "layers.4",
            "layers.0, layers.1",
            "layers.2",
        )
    ]


@on_ranks
@pytest.mark.parametrize("precompute", [(), range(9)], ids=["in hooks", "ahead"])
def test_a_frozen_member_is_cast_with_its_group(precompute):
    """A master that nobody writes has the scale of its group all the same, also in a run that is
    resumed while the cast of the others is due, or made.
    """

    def run(comm):
        models = []
        for _ in range(2):
            model = grouped(DELAYED, (37, 5), [["*.0", "*.1"]])
            model.layers[0].weight.requires_grad_(False)
            models.append(model)
        one_rank = OneRank(models[0], DELAYED, [["*.0", "*.1"]])
        train(models[0], comm, one_rank, range(2), precompute=precompute)
        models[1].load_state_dict(models[0].state_dict())
        train(models[1], comm, one_rank, range(2, 4), precompute=precompute)

    run_ranks("torch_distributed", 2, run)


def message(action) -> str:
    """Of the InputError that ``action`` raises."""
    with pytest.raises(zerocast.InputError) as raised:
        action()
    return str(raised.value)


@on_ranks
def test_members_that_are_not_sharded_alike_are_refused():
    """By the first gather, on every rank with one message: a member that fully_shard ignores, one
    on another mesh, and by its own gather one of another dtype.
    """
    rows, groups = (48, 32), [["*.0", "*.1"]]

    def converted():
        model = Bank(rows)
        zerocast.nn.convert(model, NVFP4, weights="master", amax_groups=groups)
        return model

    def run(comm):
        ignoring = converted()
        fully_shard(ignoring, ignored_params={ignoring.layers[1].weight})
        meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        elsewhere = converted()
        for layer, name in zip(elsewhere.layers, "ab", strict=True):
            fully_shard(layer, mesh=meshes[name])
        dtypes = converted()
        for layer, dtype in zip(dtypes.layers, (torch.bfloat16, torch.float16), strict=True):
            policy = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=True)
            fully_shard(layer, mp_policy=policy)
        x = batch(comm).float()
        return [message(lambda model=model: model(x)) for model in (ignoring, elsewhere, dtypes)]

    ((ignored, elsewhere, dtypes),) = set(map(tuple, run_ranks("torch_distributed", 4, run)))
    start = (
        "weights of one amax group are cast together, when the first of them is gathered, so "
        "fully_shard must shard them over the same ranks, got layers.0.weight over "
    )
    end = (
        "; call it on all their layers, or modules around them, with one mesh, or leave one out of "
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
        "modules one MixedPrecisionPolicy, or leave one out of amax_groups."
    )


def test_copies_of_a_model_have_groups_of_their_own():
    """The layers of a deepcopy or a pickle are grouped with each other, and with no original."""
    model = Bank(ROWS)
    zerocast.nn.convert(model, NVFP4, weights="master", amax_groups=GROUPS)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
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
    model = Bank((16, 16))
    zerocast.nn.convert(model, RECIPES["mxfp8"], weights="master", amax_groups=[["*.0", "*.1"]])
    assert model.layers[0].amax_group is None
