"""The ways in which FSDP2 is used, each with codes in its gathers."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zerocast
from tests.sharded.sharded import (
    BF16,
    K,
    adamw,
    assert_unsharded_casts,
    bank,
    batch,
    gradient,
    gradients,
    load,
    placed_like,
    reshard,
    save_plain,
    shard,
    train_step,
    trajectory,
    whole_masters,
)
from tests.support.claims import assert_same_tensors
from tests.support.models import Bank, Blocks, InRegion
from tests.support.ranks import on_gloo, run_ranks
from tests.support.recipes import RECIPES, each
from zerocast.sharded.placement import to_local

NVFP4, DELAYED = RECIPES["nvfp4"], RECIPES["delayed"]


@on_gloo(3)
@each("nvfp4", "mxfp8", slow=["mxfp8"])
def test_resharding_after_the_forward_changes_nothing(comm, recipe):
    """Weights that are freed after the forward and gathered again give the losses and gradients of
    weights that stay, over three steps, under quantized activations, too.
    """
    freed, kept = (
        InRegion(blocks(recipe, reshard_after_forward=reshards), RECIPES["current"])
        for reshards in (True, False)
    )
    x = torch.cat([batch(comm)] * 4)
    assert_same_tensors(trajectory(freed, x, 3), trajectory(kept, x, 3))


@on_gloo(2)
def test_gradients_accumulate_over_microbatches(comm):
    """Two microbatches gather the codes of one cast, so what delayed scaling remembers moves on
    once a step; their gradients add up, with and without communication between them.
    """
    results = []
    for syncs in (True, False):
        model = bank(DELAYED)
        for last in (False, True):
            model.set_requires_gradient_sync(last or syncs)
            model(batch(comm) * (2 if last else 1)).backward()
        assert_unsharded_casts(model, DELAYED)
        results.append(gradients(model))
    torch.testing.assert_close(*results, rtol=2e-2, atol=1e-4)


@on_gloo(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        (MixedPrecisionPolicy(), torch.float32),
        (MixedPrecisionPolicy(param_dtype=torch.float16), torch.float16),
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32),
         torch.bfloat16),
    ],
)  # fmt: skip
def test_a_policy_says_what_masters_are_rounded_to(comm, policy, dtype):
    """The weight that is gathered presents the policy's dtype, or the master's own, and elements
    are rounded to it first.
    """
    model = bank(rows=(37, 48), policy=policy)
    loss = model(batch(comm).to(dtype))
    assert_unsharded_casts(model, NVFP4, dtype=dtype)
    loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def blocks(recipe, checkpoints: bool = False, **options) -> Blocks:
    """Converted, each block sharded by itself."""
    torch.manual_seed(0)
    model = Blocks(checkpoints=checkpoints)
    zerocast.nn.convert(model, recipe, weights="master")
    for block in model.blocks:
        fully_shard(block, mp_policy=BF16, **options)
    return fully_shard(model, mp_policy=BF16, **options)


@on_gloo(2)
@pytest.mark.slow
@each("nvfp4", "delayed")
def test_checkpointed_activations_give_the_same_gradients(comm, recipe):
    """A forward that is run again in the backward gathers the same codes."""
    plain, checkpointed = (
        trajectory(blocks(recipe, checkpoints=checkpoints), batch(comm), 1)
        for checkpoints in (False, True)
    )
    assert_same_tensors(checkpointed, plain)


@on_gloo(4)
@pytest.mark.slow
def test_a_model_starts_on_the_meta_device(comm):
    """Converted and sharded without memory, then given some and initialised: the masters are
    masters still, and are gathered in codes.
    """
    with torch.device("meta"):
        model = bank(rows=(37, 48))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(placed_like(gradient(p.shape, step=7), p))
    model(batch(comm)).backward()
    assert_unsharded_casts(model)


@on_gloo(2)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")
def test_reset_parameters_draws_sharded_masters(comm):
    """A converted layer of a sharded model draws its weight anew where it lies."""
    with torch.device("meta"):
        model = bank(rows=(48,))
    model.to_empty(device="cpu")
    model.layers[0].reset_parameters()
    (weight,) = whole_masters(model).values()
    assert weight.abs().max() <= K**-0.5
    assert weight.unique().numel() > 1000
    model(batch(comm)).backward()
    assert_unsharded_casts(model)


@on_gloo(4)
@pytest.mark.slow
def test_replicas_of_shards_gather_equal_codes(comm):
    """On a mesh of 2 replicas of 2 shards (HSDP) every rank gathers the unsharded cast, and both
    replicas train the same masters.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = bank(mesh=mesh)
    optimizer = adamw(model.parameters())
    for _ in range(2):
        train_step(model, optimizer, comm, ahead=True)
        assert_unsharded_casts(model)
    masters = whole_masters(model)
    for others in comm.all_gather_object(masters):
        assert_same_tensors(others, masters)


@pytest.mark.mpi(min_size=4)
def test_checkpoints_hold_plain_masters():
    """A state dict has the masters as plain tensors: torch.distributed.checkpoint saves them on 4
    ranks and loads them on 2, into a converted model, which gathers their codes, and into one that
    never heard of codes.
    """

    def save(comm):
        model = bank()
        model(batch(comm)).backward()
        adamw(model.parameters()).step()
        return save_plain(model, comm), whole_masters(model)

    folder, saved = run_ranks("torch_distributed", 4, save)[0]

    def resume(comm):
        model, plain = bank(seed=1), shard(Bank(saved_rows))
        model(batch(comm))  # codes of the values before
        for target in (model, plain):
            load(target, folder)
            assert_same_tensors(whole_masters(target), saved)
        assert_unsharded_casts(model)

    saved_rows = tuple(master.shape[0] for master in saved.values())
    run_ranks("torch_distributed", 2, resume)


@on_gloo(3)
@pytest.mark.slow
def test_assigned_state_dicts_keep_codes_in_gathers(comm):
    """load_state_dict(assign=True) of plain sharded tensors leaves the parameters masters."""
    model, other = bank(), bank(seed=1)
    model(batch(comm))
    reshard(model)
    values = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    model.load_state_dict(values, assign=True)
    assert_unsharded_casts(model)
    assert_same_tensors(whole_masters(model), whole_masters(other))


@on_gloo(4)
@pytest.mark.slow
def test_loading_nothing_casts_nothing(comm):
    """A load that leaves a parameter alone makes no rank cast it again, also those whose rows FSDP2
    pads anew.
    """
    model = bank(DELAYED, (37,))
    model(batch(comm)).backward()
    model.load_state_dict({}, strict=False)
    assert_unsharded_casts(model, DELAYED)  # one cast, on all ranks


@on_gloo(2)
@pytest.mark.slow
def test_values_that_a_clone_kept_are_cast(comm):
    """Averaged masters that are copied into a master are gathered in codes, also where both were
    written as often.
    """
    model = bank(rows=(37,))
    weight = model.layers[0].weight
    with torch.no_grad():
        average = weight.detach().clone().mul_(3)
        writes = [to_local(tensor).value._version for tensor in (weight, average)]
        for _ in range(abs(writes[0] - writes[1])):
            (weight if writes[0] < writes[1] else average).mul_(1)
        model(batch(comm))
        reshard(model)
        weight.copy_(average)
    assert_unsharded_casts(model)


@on_gloo(2)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor's, of torch.jit
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_blocks_give_the_same_gradients(comm, backend):
    """Blocks that torch.compile compiles under FSDP2 use the gathered codes, also those of the
    second step, which are not compiled again.
    """
    torch.compiler.reset()
    eager, compiled = blocks(NVFP4), blocks(NVFP4)
    for block in compiled.blocks:
        block.compile(backend=backend)
    assert_same_tensors(trajectory(compiled, batch(comm), 2), trajectory(eager, batch(comm), 2))


@pytest.mark.mpi(min_size=4)
@pytest.mark.slow
def test_destroyed_groups_leave_nothing_behind():
    """A model that outlives its process group does not keep it."""

    def run(comm):
        model = bank(rows=(48,))
        model(batch(comm)).backward()

    run_ranks("torch_distributed", 2, run)
    assert not dist.is_initialized()
