"""Masters that tensor parallelism splits: their codes are those of the whole weight's cast."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import zerocast
from tests.sharded.sharded import (
    BF16,
    Unsharded,
    adamw,
    feed,
    gathered,
    gradients,
    load,
    placed_like,
    reshard,
    save_plain,
    train_and_compare,
    whole_masters,
)
from tests.support.claims import assert_same_tensors, assert_unsharded_cast, message_of, stored
from tests.support.collectives import Collectives
from tests.support.models import Pair, SideBySide
from tests.support.ranks import on_gloo, run_ranks
from tests.support.recipes import RECIPES, each, param
from tests.tensor_parallel.parallel import batch, mesh_of, pair, split
from zerocast.nn import quantized_module
from zerocast.sharded.master_weight import as_plain
from zerocast.sharded.placement import tp_shard_of

NVFP4 = RECIPES["nvfp4"]


def parallel(recipe, tp: int, **options) -> Pair:
    """The two layers with masters, over a mesh of both kinds of parallelism, or of one."""
    return shard(pair(recipe, "master", bias=False, **options), tp)


def shard(model: torch.nn.Module, tp: int, split=split) -> torch.nn.Module:
    """Split over ``tp`` ranks, and each part sharded by FSDP2 over the others, where there are."""
    dp = dist.get_world_size() // tp
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    split(model, mesh["tp"])
    return fully_shard(model, mesh=mesh["dp"], mp_policy=BF16) if dp > 1 else model


def dtype_of(tp: int) -> torch.dtype:
    """That of the weights: what FSDP2's policy says, or the masters' own."""
    return torch.bfloat16 if dist.get_world_size() > tp else torch.float32


def input_of(comm, tp: int) -> torch.Tensor:
    """The same for all ranks of one replica."""
    return batch(comm.rank // tp).to(dtype_of(tp))


@contextlib.contextmanager
def watching(weights: dict):
    """Within the context, note what layers quantize of their weights, by the layers' names."""
    plain = quantized_module.observer

    def recording(layer, gemm):
        def watch(role, tensor, quantized):
            if role == "weight":
                weights[layer.name] = quantized

        return watch

    quantized_module.observer = recording
    try:
        yield
    finally:
        quantized_module.observer = plain


MESHES = pytest.mark.parametrize(
    ("world_size", "tp"), [pytest.param(2, 2, marks=pytest.mark.slow), (4, 2)]
)


@on_gloo()
@pytest.mark.parametrize(
    ("recipe", "hidden", "world_size", "tp"),
    [
        *(
            param(name, 256, size, tp, slow=size == tp and name != "nvfp4")
            for name in RECIPES
            for size, tp in ((2, 2), (4, 4), (4, 2))
            if (name, tp) != ("block", 4)  # 256 rows are two blocks
        ),
        *(param(name, 100, 3, 3, slow=True) for name in ("current", "delayed", "rowwise")),
        param("current", 101, 4, 2, slow=True),
    ],
)
def test_codes_are_the_parts_of_the_unsharded_cast(comm, recipe, hidden, tp):
    """After each of 3 steps codes, scales, amax, padding and columnwise copies on every rank are
    those of its part of ``quantize(full master)``, in forward and backward, cast by the layers or
    ahead of them; also where rows and columns do not divide over the ranks.
    """
    model = pair(recipe, "master", bias=False, hidden=hidden)
    with torch.no_grad():  # so that no two parts have one amax, in BF16 neither
        for p in model.parameters():
            rows, cols = (torch.linspace(1, 2, size) for size in p.shape)
            p.mul_(rows[:, None] * cols)
    shard(model, tp)
    train_and_compare(
        model, input_of(comm, tp), Unsharded(model, recipe, dtype_of(tp)), range(3), ahead=(1,)
    )


@on_gloo(4)
def test_replicas_of_parts_have_equal_codes(comm):
    """On a mesh of three dimensions (HSDP and tensor parallelism) parts are those of the unsharded
    cast.
    """
    model = pair(NVFP4, "master", bias=False)
    names = ("replicate", "shard", "tp")
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=names)
    split(model, mesh["tp"])
    fully_shard(model, mesh=mesh["replicate", "shard"], mp_policy=BF16)
    train_and_compare(model, input_of(comm, 2), Unsharded(model, NVFP4), range(1))


# --- training ---


def pairs() -> SideBySide:
    """A pair of layers for each recipe, of the same values at every call."""
    torch.manual_seed(0)
    return SideBySide(torch.nn.ModuleDict({name: Pair(bias=False) for name in RECIPES}))


@on_gloo()
@pytest.mark.slow
@MESHES
def test_equal_gradients_train_equal_weights_however_they_are_split(comm, tp):
    """With the same gradients fed, masters of every recipe, side by side, are after 20 steps of
    foreach AdamW bit for bit those of plain unsplit tensors.
    """

    def split_each(model, mesh):
        for name, recipe in RECIPES.items():
            zerocast.nn.convert(model.layers[name], recipe, weights="master")
            split(model.layers[name], mesh)

    plain, model = pairs(), shard(pairs(), tp, split_each)
    alone, optimizer = adamw(plain.parameters()), adamw(model.parameters())
    for step in range(20):
        feed(plain.parameters(), step)
        alone.step()
        model(input_of(comm, tp)).backward()
        feed(model.parameters(), step)
        optimizer.step()
        optimizer.zero_grad()
        zerocast.sharded.precompute_scales_for_fsdp(model)
    assert_same_tensors(whole_masters(model), stored(plain), "after 20 steps")


@on_gloo()
@MESHES
def test_loss_and_gradients_are_those_of_one_rank(comm, tp):
    """Loss and gradients with split masters are those of unsplit layers with the decoded weights,
    up to the order of sums.
    """
    dp = comm.size // tp
    alone = pair(bias=False)
    for p in alone.parameters():
        p.data = zerocast.quantize(p.data, NVFP4, dtype=dtype_of(tp)).dequantize(torch.float32)
    expected = alone(torch.cat([batch(seed) for seed in range(dp)])).square().mean()
    expected.backward()

    model = parallel(NVFP4, tp)
    loss = model(input_of(comm, tp)).float().square().mean()
    loss.backward()
    near = {"rtol": 2e-2, "atol": 2e-3} if dp > 1 else {"rtol": 1e-4, "atol": 1e-5}
    losses = torch.tensor(comm.all_gather_object(loss.item()))
    torch.testing.assert_close(losses.mean(), expected.detach(), **near)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient.float(), alone.get_parameter(name).grad, **near)


@on_gloo()
@pytest.mark.slow
@MESHES
@each("current", "delayed", "nvfp4")
def test_quantized_products_go_on_with_the_parts_codes(comm, recipe, tp):
    """Under autocast, too, where inputs and gradients are quantized, the weights are the parts of
    the unsharded cast, and the loss is near that of high precision.
    """
    model = parallel(recipe, tp)
    expected = Unsharded(model, recipe, dtype_of(tp))
    expected.cast(whole_masters(model))
    exact = pair(bias=False)(batch(comm.rank // tp)).square().mean().item()
    for _ in range(2):
        with zerocast.autocast(recipe=recipe):
            loss = model(input_of(comm, tp)).float().square().mean()
        loss.backward()
    expected.assert_gathered(model, "after the backward")
    assert 0.9 < loss.item() / exact < 1.1


# --- weights in high precision, quantized by each forward ---


@on_gloo()
@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "world_size"),
    [
        param(name, size)
        for name in RECIPES
        for size in (2, 4)
        if name != "nvfp4-drawn" and (name, size) != ("block", 4)  # 256 rows are two blocks
    ],
)
def test_weights_that_each_forward_quantizes_are_parts_of_the_whole_cast(comm, recipe):
    """weights="high_precision": what a forward under autocast quantizes of a split weight has the
    bytes of its part of the whole weight's, in each of three steps.
    """
    model, alone = pair(recipe), pair(recipe)
    split(model, mesh_of(comm.size))
    assert_parts_are_quantized(
        model, alone, recipe, lambda layer: tp_shard_of("", layer.weight, is_fsdp_sharded=False)
    )


@on_gloo(2)
@each("current", "rowwise", "nvfp4")
def test_plain_parts_are_quantized_as_the_parts_that_they_are(comm, recipe):
    """The same of parts that are plain tensors, where the layer is told which part it has."""
    model, alone = pair(recipe, bias=False), pair(recipe, bias=False)
    for layer, dim in ((model.up, 0), (model.down, 1)):
        layer.tp_shard = zerocast.TensorParallelShard.chunk(layer.weight.shape, dim, comm)
        part = layer.weight.detach().chunk(comm.size, dim)[comm.rank]
        layer.weight = torch.nn.Parameter(part.contiguous())
    assert_parts_are_quantized(model, alone, recipe, lambda layer: layer.tp_shard)


def assert_parts_are_quantized(model, alone, recipe, part_of) -> None:
    """What three forwards quantize of each weight is the part of what ``alone`` quantizes."""
    for step in range(3):
        found, expected = {}, {}
        group = {"amax_reduction_group": zerocast.comm.SingleRank()}
        with watching(found), zerocast.autocast(recipe=recipe):
            model(batch(step)).square().mean().backward()
        with watching(expected), zerocast.autocast(recipe=recipe, **group):
            alone(batch(step)).square().mean().backward()
        assert len(found) == 2
        for name, storage in found.items():
            tp_shard = part_of(model.get_submodule(name))
            weight, whole = map(zerocast.QuantizedTensor, (storage, expected[name]))
            assert_unsharded_cast(weight, whole, f"{name}, step {step}", tp_shard=tp_shard)
        with torch.no_grad():
            for p in (*model.parameters(), *alone.parameters()):
                p.grad = None
                p.mul_(1.5)


@on_gloo(4)
@pytest.mark.slow
@pytest.mark.parametrize("weights", ["master", "high_precision"])
def test_compiled_models_give_the_same_gradients(comm, weights):
    """A model that torch.compile compiles under FSDP2 and tensor parallelism gives the output and
    the gradients of one that it does not.
    """
    results = []
    for compiles in (False, True):
        model = shard(pair(NVFP4, weights, bias=False), 2)
        if compiles:
            model.compile(backend="aot_eager")
        out = model(input_of(comm, 2))
        out.square().mean().backward()
        results.append({"output": out.detach()} | gradients(model))
    assert_same_tensors(results[1], results[0], "compiled")


# --- the ways there ---


@on_gloo(4)
def test_a_model_starts_on_the_meta_device(comm):
    """Converted, split and sharded without memory, then given some and initialised: the masters
    are parts of what was drawn, and so are the codes.
    """
    with torch.device("meta"):
        model = Pair(bias=False)
    zerocast.nn.convert(model, NVFP4, weights="master")
    shard(model, 2)
    model.to_empty(device="cpu")
    values = dict(pair(bias=False, seed=5).named_parameters())
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(placed_like(values[name].detach(), p))
    whole = Unsharded(model, NVFP4)
    whole.cast({name: value.detach() for name, value in values.items()})
    model(input_of(comm, 2)).square().mean().backward()
    whole.assert_gathered(model, "after the backward")


@on_gloo()
@pytest.mark.parametrize(("world_size", "tp"), [(2, 2), (4, 2)])
def test_plain_parts_that_take_the_place_of_masters_are_masters(comm, tp):
    """Code that knows no masters makes plain tensors of their parts, and registers those, as
    torchtitan does: they are cast, and gathered in codes.
    """

    def split_plainly(model, mesh):
        for layer, dim in ((model.up, 0), (model.down, 1)):
            parts = as_plain(layer.weight).detach().chunk(mesh.size(), dim)
            part = torch.nn.Parameter(parts[mesh.get_local_rank()].contiguous())
            layer.register_parameter("weight", part)
            own = DTensor.from_local(layer.weight.data, mesh, [Shard(dim)])
            layer.weight = torch.nn.Parameter(own)
        split(model, mesh)

    model = shard(pair(NVFP4, "master", bias=False), tp, split_plainly)
    train_and_compare(model, input_of(comm, tp), Unsharded(model, NVFP4, dtype_of(tp)), range(2))


@pytest.mark.mpi(min_size=4)
def test_checkpoints_hold_plain_masters():
    """A state dict of masters that are split and sharded on 2 x 2 ranks is saved by
    torch.distributed.checkpoint and loaded on 1 x 2, 2 x 2 and on one rank that never heard of
    codes.
    """

    def save(comm):
        model = parallel(NVFP4, 2)
        model(input_of(comm, 2)).square().mean().backward()
        adamw(model.parameters()).step()
        return save_plain(model, comm), whole_masters(model)

    folder, saved = run_ranks("torch_distributed", 4, save)[0]

    def resume(comm, tp):
        model = parallel(NVFP4, tp, seed=1) if tp > 1 else pair(bias=False, seed=1)
        load(model, folder)
        assert_same_tensors(whole_masters(model), saved)
        if tp > 1:
            expected = Unsharded(model, NVFP4, dtype_of(tp))
            expected.cast(saved)
            model(input_of(comm, tp))
            expected.assert_gathered(model, "after loading")

    for world_size, tp in ((1, 1), (2, 2), (4, 2)):
        run_ranks("torch_distributed", world_size, lambda comm, tp=tp: resume(comm, tp))


@on_gloo(4)
@each("nvfp4", "mxfp8", "current")
def test_the_report_counts_what_a_gather_of_parts_moves(comm, recipe):
    """On 2 x 2 ranks the report says what the gathers among the ranks of one part move, which is
    what they do.
    """
    model = parallel(recipe, 2)
    model(input_of(comm, 2)).square().mean().backward()
    reshard(model)
    with Collectives() as seen:
        gathered(model)
    report = zerocast.sharded.report(model)
    assert seen.all_gathers[1] == report.gathered_bytes
    assert [tuple(p.shape) for p in report.parameters] == [(128, 64), (64, 128)]


@on_gloo(4)
def test_one_all_reduce_for_each_kind_of_ranks(comm):
    """With precompute_scales_for_fsdp the cast of all parameters is one all-reduce among the ranks
    that share a part and one among the parts.
    """
    model = parallel(NVFP4, 2)
    optimizer = adamw(model.parameters())
    for _ in range(2):
        model(input_of(comm, 2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with Collectives() as seen:
            zerocast.sharded.precompute_scales_for_fsdp(model)
    assert seen.all_reduces == 2


# --- what is refused ---


@on_gloo()
@pytest.mark.parametrize("weights", ["master", "high_precision"])
@pytest.mark.parametrize(
    ("recipe", "world_size", "hidden", "message"),
    [
        pytest.param(
            RECIPES["block"], 3, 192,
            "a shard of a weight under Float8BlockScaling must begin and end between blocks, at "
            "multiples of 128 rows, got rows [0, 64) of (192, 64); choose another number of ranks, "
            "or leave the weight whole or in high precision.",
            id="through blocks",
        ),
        pytest.param(
            RECIPES["current"], 4, 5,
            "each of 4 tensor-parallel ranks must have a shard of the weight, got rows [5, 5) of "
            "(5, 64); choose fewer ranks, or do not split the weight.",
            id="ranks without a part",
        ),
    ],
)  # fmt: skip
def test_cuts_that_cannot_be_cast_are_refused(comm, recipe, hidden, message, weights):
    """Rows that a recipe's blocks cannot be cut by, and fewer rows than ranks, raise in the first
    forward, on every rank, also on those whose own part would do.
    """
    model = split(pair(recipe, weights, bias=False, hidden=hidden), mesh_of(comm.size))
    what = "up.weight" if weights == "master" else "the layer's weight"
    with zerocast.autocast(recipe=recipe):
        assert message_of(zerocast.InputError, model, batch()) == f"{what}: {message}"


@on_gloo(4)
def test_sharding_parts_by_columns_is_refused(comm):
    """FSDP2 must shard parts by rows, too; fully_shard says so on every rank."""
    model = pair(NVFP4, "master", bias=False)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    split(model, mesh["tp"])
    options = {"mesh": mesh["dp"], "shard_placement_fn": lambda p: Shard(1)}
    message = message_of(zerocast.UnsupportedError, fully_shard, model, **options)
    assert message.startswith(
        "up.weight: a low-bit all-gather needs masters sharded by rows, got a split of dimension 1;"
    )


@on_gloo(4)
def test_masters_that_fsdp_shards_and_nobody_gathers_are_refused(comm):
    """A layer whose module's forward does not run has shards of its part: an error on every
    rank.
    """
    model = parallel(NVFP4, 2)
    message = message_of(zerocast.UnsupportedError, model.up, batch())
    assert message.startswith("up was to be all-gathered in codes before its layer runs")
