"""Masters that tensor parallelism splits: their codes are those of the whole weight's cast."""

import contextlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zerocast
from tests.sharded.sharded import (
    BF16,
    Unsharded,
    adamw,
    gathered,
    multiplied,
    reshard,
    whole_masters,
)
from tests.sharded.test_traffic import Collectives
from tests.support.claims import (
    assert_same_tensors,
    assert_unsharded_cast,
    message_of,
    one_message,
    stored,
)
from tests.support.models import Attention, Pair, SideBySide
from tests.support.ranks import run_ranks, shared_folder
from tests.support.recipes import RECIPES, each, param
from tests.tensor_parallel.parallel import (
    Gathers,
    batch,
    mesh_of,
    pair,
    split,
    whole,
)
from zerocast.nn import quantized_module
from zerocast.sharded.placement import tp_shard_of

pytestmark = pytest.mark.mpi(min_size=4)

NVFP4, CURRENT = RECIPES["nvfp4"], RECIPES["current"]


def parallel(recipe, dp: int, tp: int, **options) -> Pair:
    """The two layers with masters, over a mesh of both kinds of parallelism, or of one."""
    return shard(pair(recipe, "master", bias=False, **options), dp, tp)


def shard(model: Pair, dp: int, tp: int) -> Pair:
    """Split over ``tp`` ranks, and each part sharded by FSDP2 over ``dp``, unless that is one."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    split(model, mesh["tp"])
    return fully_shard(model, mesh=mesh["dp"], mp_policy=BF16) if dp > 1 else model


def dtype_of(dp: int) -> torch.dtype:
    """That of the weights: what FSDP2's policy says, or the masters' own."""
    return torch.bfloat16 if dp > 1 else torch.float32


def input_of(replica: int, dp: int) -> torch.Tensor:
    """The same for all ranks of one replica."""
    return batch(replica).to(dtype_of(dp))


def feed(model: torch.nn.Module, step: int) -> None:
    """Let every parameter have a gradient that is the same whatever it is split over."""
    for i, p in enumerate(model.parameters()):
        draw = torch.Generator().manual_seed(step * 1000 + i)
        p.grad = as_split(torch.randn(p.shape, generator=draw), p)


def as_split(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``whole``, placed as ``like`` is."""
    if not isinstance(like, DTensor):
        return whole
    tp_shard = tp_shard_of("", like, is_fsdp_sharded=like.device_mesh.ndim > 1)
    own = tp_shard.slice_of(whole)
    if like.device_mesh.ndim > 1:
        own = own.chunk(like.device_mesh.size(0))[like.device_mesh.get_local_rank(0)]
    return DTensor.from_local(
        own.contiguous(), like.device_mesh, like.placements, run_check=False,
        shape=like.shape, stride=like.stride(),
    )  # fmt: skip


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


MESHES = pytest.mark.parametrize(("dp", "tp"), [pytest.param(1, 2, marks=pytest.mark.slow), (2, 2)])


@pytest.mark.parametrize(
    ("recipe", "dp", "tp"),
    [
        param(name, dp, tp, slow=dp == 1 and name != "nvfp4")
        for name in RECIPES
        for dp, tp in ((1, 2), (1, 4), (2, 2))
    ],
)
def test_codes_are_the_parts_of_the_unsharded_cast(recipe, dp, tp):
    """After each of 3 steps codes, scales, amax, padding and columnwise copies on every rank are
    those of its part of ``quantize(full master)``, in forward and backward, cast by the layers or
    ahead of them.
    """
    if recipe.float8_block_scaling() and tp == 4:
        pytest.skip("256 rows are two blocks")

    def run(comm):
        model = parallel(recipe, dp, tp)
        whole = Unsharded(model, recipe, dtype_of(dp))
        optimizer = adamw(model.parameters())
        for step in range(3):
            whole.cast(whole_masters(model))
            loss = model(input_of(comm.rank // tp, dp)).square().mean()
            whole.assert_gathered(model, f"forward of step {step}")
            loss.backward()
            whole.assert_gathered(model, f"backward of step {step}")
            feed(model, step)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                zerocast.sharded.precompute_scales_for_fsdp(model)

    run_ranks("torch_distributed", dp * tp, run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "dp", "tp", "hidden"),
    [
        ("current", 1, 3, 100),
        ("delayed", 1, 3, 100),
        ("rowwise", 1, 3, 100),
        ("current", 2, 2, 101),
    ],
)
def test_parts_need_not_be_equal(recipe, dp, tp, hidden):
    """Rows and columns that do not divide over the ranks have the codes of the unsharded cast, in
    two steps.
    """

    def run(comm):
        model = parallel(RECIPES[recipe], dp, tp, hidden=hidden)
        whole = Unsharded(model, RECIPES[recipe], dtype_of(dp))
        optimizer = adamw(model.parameters())
        for step in range(2):
            whole.cast(whole_masters(model))
            model(input_of(comm.rank // tp, dp)).square().mean().backward()
            whole.assert_gathered(model, f"backward of step {step}")
            optimizer.step()
            optimizer.zero_grad()
            zerocast.sharded.precompute_scales_for_fsdp(model)

    run_ranks("torch_distributed", dp * tp, run)


def test_replicas_of_parts_have_equal_codes():
    """On a mesh of three dimensions (HSDP and tensor parallelism) parts are those of the unsharded
    cast.
    """

    def run(comm):
        model = pair(NVFP4, "master", bias=False)
        names = ("replicate", "shard", "tp")
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=names)
        split(model, mesh["tp"])
        fully_shard(model, mesh=mesh["replicate", "shard"], mp_policy=BF16)
        whole = Unsharded(model, NVFP4)
        whole.cast(whole_masters(model))
        model(input_of(comm.rank // 2, 2)).square().mean().backward()
        whole.assert_gathered(model, "after the backward")

    run_ranks("torch_distributed", 4, run)


@pytest.mark.parametrize("dp", [1, 2])
def test_parts_of_an_amax_group_share_the_amax_of_all_wholes(dp):
    """wq, wk and wv in one amax group have the largest amax of the three whole weights, on every
    rank.
    """

    def grouped():
        torch.manual_seed(0)
        model = Attention()
        with torch.no_grad():
            model.wk.weight.mul_(3)
        zerocast.nn.convert(model, NVFP4, weights="master", amax_groups=[["wq", "wk", "wv"]])
        return model

    def run(comm):
        model = grouped()
        mesh = init_device_mesh("cpu", (dp, 2), mesh_dim_names=("dp", "tp"))
        layers = dict.fromkeys(("wq", "wk", "wv"), ColwiseParallel())
        parallelize_module(model, mesh["tp"], layers)
        if dp > 1:
            fully_shard(model, mesh=mesh["dp"], mp_policy=BF16)
        model(input_of(0, dp)).square().mean().backward()
        return {float(multiplied(weight).amax) for weight in gathered(model).values()}

    values = [p.detach().to(dtype_of(dp)).abs().max().item() for p in grouped().parameters()]
    for amaxes in run_ranks("torch_distributed", 2 * dp, run):
        assert amaxes == {max(values)}


# --- training ---


def pairs() -> SideBySide:
    """A pair of layers for each recipe, of the same values at every call."""
    torch.manual_seed(0)
    return SideBySide(torch.nn.ModuleDict({name: Pair(bias=False) for name in RECIPES}))


@pytest.mark.slow
@MESHES
def test_equal_gradients_train_equal_weights_however_they_are_split(dp, tp):
    """With the same gradients fed, masters of every recipe, side by side, are after 20 steps of
    foreach AdamW bit for bit those of plain unsplit tensors.
    """
    plain = pairs()
    optimizer = adamw(plain.parameters())
    for step in range(20):
        feed(plain, step)
        optimizer.step()

    def run(comm):
        model = pairs()
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        for name, recipe in RECIPES.items():
            zerocast.nn.convert(model.layers[name], recipe, weights="master")
            split(model.layers[name], mesh["tp"])
        if dp > 1:
            fully_shard(model, mesh=mesh["dp"], mp_policy=BF16)
        optimizer = adamw(model.parameters())
        for step in range(20):
            model(input_of(comm.rank // tp, dp)).backward()
            feed(model, step)
            optimizer.step()
            optimizer.zero_grad()
            zerocast.sharded.precompute_scales_for_fsdp(model)
        return whole_masters(model)

    for masters in run_ranks("torch_distributed", dp * tp, run):
        assert_same_tensors(masters, stored(plain), "after 20 steps")


@MESHES
def test_loss_and_gradients_are_those_of_one_rank(dp, tp):
    """Loss and gradients with split masters are those of unsplit layers with the decoded weights,
    up to the order of sums.
    """
    alone = pair(bias=False)
    for p in alone.parameters():
        p.data = zerocast.quantize(p.data, NVFP4, dtype=dtype_of(dp)).dequantize(torch.float32)
    x = torch.cat([batch(seed) for seed in range(dp)])
    expected = alone(x).square().mean()
    expected.backward()

    def run(comm):
        model = parallel(NVFP4, dp, tp)
        loss = model(input_of(comm.rank // tp, dp)).float().square().mean()
        loss.backward()
        gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
        return loss.detach(), gradients

    found = run_ranks("torch_distributed", dp * tp, run)
    near = {"rtol": 2e-2, "atol": 2e-3} if dp > 1 else {"rtol": 1e-4, "atol": 1e-5}
    losses = torch.stack([loss for loss, _ in found])
    torch.testing.assert_close(losses.mean(), expected.detach(), **near)
    for _, gradients in found:
        for name, p in alone.named_parameters():
            torch.testing.assert_close(gradients[name].float(), p.grad, **near)


@pytest.mark.slow
@MESHES
@each("current", "delayed", "nvfp4")
def test_quantized_products_go_on_with_the_parts_codes(recipe, dp, tp):
    """Under autocast, too, where inputs and gradients are quantized, the weights are the parts of
    the unsharded cast, and the loss is near that of high precision.
    """

    def run(comm):
        model = parallel(recipe, dp, tp)
        whole = Unsharded(model, recipe, dtype_of(dp))
        whole.cast(whole_masters(model))
        exact = pair(bias=False)(batch(comm.rank // tp)).square().mean().item()
        for _ in range(2):
            with zerocast.autocast(recipe=recipe):
                loss = model(input_of(comm.rank // tp, dp)).float().square().mean()
            loss.backward()
        whole.assert_gathered(model, "after the backward")
        return loss.item() / exact

    for ratio in run_ranks("torch_distributed", dp * tp, run):
        assert 0.9 < ratio < 1.1


# --- weights in high precision, quantized by each forward ---


@pytest.mark.slow
@each(*(name for name in RECIPES if name != "nvfp4-drawn"))
@pytest.mark.parametrize("tp", [2, 4])
def test_weights_that_each_forward_quantizes_are_parts_of_the_whole_cast(recipe, tp):
    """weights="high_precision": what a forward under autocast quantizes of a split weight has the
    bytes of its part of the whole weight's, in each of three steps.
    """
    if recipe.float8_block_scaling() and tp == 4:
        pytest.skip("256 rows are two blocks")

    def run(comm):
        model, alone = pair(recipe), pair(recipe)
        split(model, mesh_of(comm.size))
        for step in range(3):
            found, expected = {}, {}
            group = {"amax_reduction_group": zerocast.comm.SingleRank()}
            with watching(found), zerocast.autocast(recipe=recipe):
                model(batch(step)).square().mean().backward()
            with watching(expected), zerocast.autocast(recipe=recipe, **group):
                alone(batch(step)).square().mean().backward()
            for name, storage in found.items():
                layer = model.get_submodule(name)
                tp_shard = tp_shard_of(name, layer.weight, is_fsdp_sharded=False)
                whole = zerocast.QuantizedTensor(expected[name])
                weight = zerocast.QuantizedTensor(storage)
                assert_unsharded_cast(weight, whole, f"{name}, step {step}", tp_shard=tp_shard)
            for p in (*model.parameters(), *alone.parameters()):
                p.grad = None
            with torch.no_grad():
                for p in (*model.parameters(), *alone.parameters()):
                    p.mul_(1.5)
        return len(found)

    assert run_ranks("torch_distributed", tp, run) == [2] * tp


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["master", "high_precision"])
def test_compiled_models_give_the_same_gradients(weights):
    """A model that torch.compile compiles under FSDP2 and tensor parallelism gives the output and
    the gradients of one that it does not.
    """

    def run(comm):
        results = []
        for compiles in (False, True):
            model = shard(pair(NVFP4, weights, bias=False), 2, 2)
            if compiles:
                model.compile(backend="aot_eager")
            out = model(input_of(comm.rank // 2, 2))
            out.square().mean().backward()
            gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
            results.append({"output": out.detach()} | gradients)
        assert_same_tensors(results[1], results[0], "compiled")

    run_ranks("torch_distributed", 4, run)


# --- the ways there ---


def test_a_model_starts_on_the_meta_device():
    """Converted, split and sharded without memory, then given some and initialised: the masters
    are parts of what was drawn, and so are the codes.
    """

    def run(comm):
        with torch.device("meta"):
            model = Pair(bias=False)
        zerocast.nn.convert(model, NVFP4, weights="master")
        shard(model, 2, 2)
        model.to_empty(device="cpu")
        values = dict(pair(bias=False, seed=5).named_parameters())
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(as_split(values[name].detach(), p))
        whole = Unsharded(model, NVFP4)
        whole.cast({name: value.detach() for name, value in values.items()})
        model(input_of(comm.rank // 2, 2)).square().mean().backward()
        whole.assert_gathered(model, "after the backward")

    run_ranks("torch_distributed", 4, run)


def test_checkpoints_hold_plain_masters():
    """A state dict of masters that are split and sharded on 2 x 2 ranks is saved by
    torch.distributed.checkpoint and loaded on 1 x 2, 2 x 2 and on one rank that never heard of
    codes.
    """

    def save(comm):
        folder = shared_folder(comm)
        model = parallel(NVFP4, 2, 2)
        model(input_of(comm.rank // 2, 2)).square().mean().backward()
        adamw(model.parameters()).step()
        state = model.state_dict()
        assert all(type(tensor.to_local()) is torch.Tensor for tensor in state.values())
        dcp.save(state, checkpoint_id=folder)
        return folder, whole_masters(model)

    folder, saved = run_ranks("torch_distributed", 4, save)[0]

    def load(comm, dp, tp):
        model = parallel(NVFP4, dp, tp, seed=1) if tp > 1 else pair(bias=False, seed=1)
        state = model.state_dict()
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state)
        assert_same_tensors({name: whole(p) for name, p in model.named_parameters()}, saved)
        if tp > 1:
            expected = Unsharded(model, NVFP4, dtype_of(dp))
            expected.cast(saved)
            model(input_of(comm.rank // tp, dp))
            expected.assert_gathered(model, "after loading")

    for dp, tp in ((1, 1), (1, 2), (2, 2)):
        run_ranks("torch_distributed", dp * tp, lambda comm, dp=dp, tp=tp: load(comm, dp, tp))


@each("nvfp4", "mxfp8", "current")
def test_the_report_counts_what_a_gather_of_parts_moves(recipe):
    """On 2 x 2 ranks the report says what the gathers among the ranks of one part move, which is
    what they do.
    """

    def run(comm):
        model = parallel(recipe, 2, 2)
        model(input_of(comm.rank // 2, 2)).square().mean().backward()
        reshard(model)
        with Gathers() as seen:
            gathered(model)
        report = zerocast.sharded.report(model)
        return seen.bytes, report.gathered_bytes, [tuple(p.shape) for p in report.parameters]

    for moved, said, shapes in run_ranks("torch_distributed", 4, run):
        assert moved == said
        assert shapes == [(128, 64), (64, 128)]


def test_one_all_reduce_for_each_kind_of_ranks():
    """With precompute_scales_for_fsdp the cast of all parameters is one all-reduce among the ranks
    that share a part and one among the parts.
    """

    def run(comm):
        model = parallel(NVFP4, 2, 2)
        optimizer = adamw(model.parameters())
        for _ in range(2):
            model(input_of(comm.rank // 2, 2)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with Collectives() as seen:
                zerocast.sharded.precompute_scales_for_fsdp(model)
        return seen.calls["allreduce_"] + seen.calls["all_reduce"]

    for calls in run_ranks("torch_distributed", 4, run):
        assert calls == 2


# --- what is refused ---


@pytest.mark.parametrize("weights", ["master", "high_precision"])
def test_cuts_through_blocks_are_refused(weights):
    """Rows that a recipe's blocks cannot be cut by raise in the first forward, on every rank, also
    on those whose own part would do.
    """
    recipe = RECIPES["block"]

    def run(comm):
        model = split(pair(recipe, weights, bias=False, hidden=192), mesh_of(comm.size))
        with zerocast.autocast(recipe=recipe):
            return message_of(zerocast.InputError, model, batch())

    message = one_message(run_ranks("torch_distributed", 3, run))
    what = "up.weight" if weights == "master" else "the layer's weight"
    assert message == (
        f"{what}: a shard of a weight under Float8BlockScaling must begin and end between blocks, "
        f"at multiples of 128 rows, got rows [0, 64) of (192, 64); choose another number of ranks, "
        f"or leave the weight uncut or in high precision."
    )


@pytest.mark.parametrize("weights", ["master", "high_precision"])
def test_ranks_without_a_part_are_refused(weights):
    """Fewer rows than ranks raise in the first forward, on every rank."""

    def run(comm):
        model = split(pair(CURRENT, weights, bias=False, hidden=5), mesh_of(comm.size))
        with zerocast.autocast(recipe=CURRENT):
            return message_of(zerocast.InputError, model, batch())

    message = one_message(run_ranks("torch_distributed", 4, run))
    what = "up.weight" if weights == "master" else "the layer's weight"
    assert message == (
        f"{what}: each of 4 tensor-parallel ranks must have a shard of the weight, got rows [5, "
        f"5) of (5, 64); choose fewer ranks, or do not split the weight."
    )


def test_sharding_parts_by_columns_is_refused():
    """FSDP2 must shard parts by rows, too; fully_shard says so on every rank."""

    def run(comm):
        model = pair(NVFP4, "master", bias=False)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        split(model, mesh["tp"])
        options = {"mesh": mesh["dp"], "shard_placement_fn": lambda p: Shard(1)}
        return message_of(zerocast.UnsupportedError, fully_shard, model, **options)

    message = one_message(run_ranks("torch_distributed", 4, run))
    assert message.startswith(
        "up.weight: a low-bit all-gather needs masters sharded by rows, got a split of dimension 1;"
    )


def test_masters_that_fsdp_shards_and_nobody_gathers_are_refused():
    """A layer whose module's forward does not run has shards of its part: an error on every
    rank.
    """

    def run(comm):
        model = parallel(NVFP4, 2, 2)
        return message_of(zerocast.UnsupportedError, model.up, batch())

    message = one_message(run_ranks("torch_distributed", 4, run))
    assert message.startswith("up was to be all-gathered in codes before its layer runs")
