"""The ways in which FSDP2 is used, each with codes in its gathers."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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
    feed,
    gradients,
    reshard,
    shard,
    train_step,
    whole_masters,
)
from tests.support.claims import assert_same_tensors
from tests.support.models import Bank, Blocks
from tests.support.ranks import run_ranks, shared_folder
from tests.support.recipes import RECIPES, each
from zerocast.sharded.placement import to_local

pytestmark = pytest.mark.mpi(min_size=4)

NVFP4, DELAYED = RECIPES["nvfp4"], RECIPES["delayed"]


@each("nvfp4", "mxfp8", slow=["mxfp8"])
def test_resharding_after_the_forward_changes_nothing(recipe):
    """Weights that are freed after the forward and gathered again give the losses and gradients of
    weights that stay, over three steps, under quantized activations, too.
    """

    def run(comm):
        results = []
        for reshards in (True, False):
            model = blocks(recipe, reshard_after_forward=reshards)
            optimizer = adamw(model.parameters())
            trace = {}
            for step in range(3):
                with zerocast.autocast(recipe=RECIPES["current"]):
                    loss = model(torch.cat([batch(comm)] * 4))
                loss.backward()
                found = {"loss": loss.detach()} | gradients(model)
                trace |= {f"{name}, step {step}": value for name, value in found.items()}
                optimizer.step()
                optimizer.zero_grad()
            results.append(trace)
        assert_same_tensors(*results)

    run_ranks("torch_distributed", 3, run)


def test_gradients_accumulate_over_microbatches():
    """Two microbatches gather the codes of one cast, so what delayed scaling remembers moves on
    once a step; their gradients add up, with and without communication between them.
    """

    def run(comm):
        results = []
        for syncs in (True, False):
            model = bank(DELAYED)
            for last in (False, True):
                model.set_requires_gradient_sync(last or syncs)
                model(batch(comm) * (2 if last else 1)).backward()
            assert_unsharded_casts(model, DELAYED)
            results.append(gradients(model))
        for name, gradient in results[0].items():
            torch.testing.assert_close(results[1][name], gradient, rtol=2e-2, atol=1e-4)

    run_ranks("torch_distributed", 2, run)


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
def test_a_policy_says_what_masters_are_rounded_to(policy, dtype):
    """The weight that is gathered presents the policy's dtype, or the master's own, and elements
    are rounded to it first.
    """

    def run(comm):
        model = bank(rows=(37, 48), policy=policy)
        loss = model(batch(comm).to(dtype))
        assert_unsharded_casts(model, NVFP4, dtype=dtype)
        loss.backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}

    run_ranks("torch_distributed", 3, run)


def blocks(recipe, checkpoints: bool = False, **options) -> Blocks:
    """Converted, each block sharded by itself."""
    torch.manual_seed(0)
    model = Blocks(checkpoints=checkpoints)
    zerocast.nn.convert(model, recipe, weights="master")
    for block in model.blocks:
        fully_shard(block, mp_policy=BF16, **options)
    return fully_shard(model, mp_policy=BF16, **options)


@pytest.mark.slow
@each("nvfp4", "delayed")
def test_checkpointed_activations_give_the_same_gradients(recipe):
    """A forward that is run again in the backward gathers the same codes."""

    def run(comm):
        results = []
        for checkpoints in (False, True):
            model = blocks(recipe, checkpoints=checkpoints)
            model(batch(comm)).backward()
            results.append(gradients(model))
        assert_same_tensors(*results)

    run_ranks("torch_distributed", 2, run)


@pytest.mark.slow
def test_a_model_starts_on_the_meta_device():
    """Converted and sharded without memory, then given some and initialised: the masters are
    masters still, and are gathered in codes.
    """

    def run(comm):
        with torch.device("meta"):
            model = bank(rows=(37, 48))
        model.to_empty(device="cpu")
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(feed_values(p))
        model(batch(comm)).backward()
        assert_unsharded_casts(model)

    def feed_values(p):
        feed([p], step=7)
        values, p.grad = p.grad, None
        return values

    run_ranks("torch_distributed", 4, run)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")
def test_reset_parameters_draws_sharded_masters():
    """A converted layer of a sharded model draws its weight anew where it lies."""

    def run(comm):
        with torch.device("meta"):
            model = bank(rows=(48,))
        model.to_empty(device="cpu")
        model.layers[0].reset_parameters()
        (weight,) = whole_masters(model).values()
        assert weight.abs().max() <= K**-0.5
        assert weight.unique().numel() > 1000
        model(batch(comm)).backward()
        assert_unsharded_casts(model)

    run_ranks("torch_distributed", 2, run)


@pytest.mark.slow
def test_replicas_of_shards_gather_equal_codes():
    """On a mesh of 2 replicas of 2 shards (HSDP) every rank gathers the unsharded cast, and both
    replicas train the same masters.
    """

    def run(comm):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = bank(mesh=mesh)
        optimizer = adamw(model.parameters())
        for _ in range(2):
            train_step(model, optimizer, comm, ahead=True)
            assert_unsharded_casts(model)
        return whole_masters(model)

    first, *others = run_ranks("torch_distributed", 4, run)
    for masters in others:
        assert_same_tensors(masters, first)


def test_checkpoints_hold_plain_masters():
    """A state dict has the masters as plain tensors: torch.distributed.checkpoint saves them on 4
    ranks and loads them on 2, into a converted model, which gathers their codes, and into one that
    never heard of codes.
    """

    def save(comm):
        folder, model = shared_folder(comm), bank()
        model(batch(comm)).backward()
        adamw(model.parameters()).step()
        state = model.state_dict()
        assert all(type(tensor.to_local()) is torch.Tensor for tensor in state.values())
        dcp.save(state, checkpoint_id=folder)
        return folder, whole_masters(model)

    folder, saved = run_ranks("torch_distributed", 4, save)[0]

    def load(comm):
        model, plain = bank(seed=1), shard(Bank(saved_rows))
        model(batch(comm))  # codes of the values before
        for target in (model, plain):
            state = target.state_dict()
            dcp.load(state, checkpoint_id=folder)
            target.load_state_dict(state)
            assert_same_tensors(whole_masters(target), saved)
        assert_unsharded_casts(model)

    saved_rows = tuple(master.shape[0] for master in saved.values())
    run_ranks("torch_distributed", 2, load)


@pytest.mark.slow
def test_a_checkpoint_is_seen_without_load_state_dict():
    """torch.distributed.checkpoint writes into the memory of the masters; the next gather sends
    codes of what it wrote.
    """

    def run(comm):
        model = bank()
        model(batch(comm))
        reshard(model)
        for tensor in model.state_dict().values():
            tensor.to_local().mul_(3)
        assert_unsharded_casts(model)

    run_ranks("torch_distributed", 3, run)


@pytest.mark.slow
def test_assigned_state_dicts_keep_codes_in_gathers():
    """load_state_dict(assign=True) of plain sharded tensors leaves the parameters masters."""

    def run(comm):
        model, other = bank(), bank(seed=1)
        model(batch(comm))
        reshard(model)
        values = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        model.load_state_dict(values, assign=True)
        assert_unsharded_casts(model)
        assert_same_tensors(whole_masters(model), whole_masters(other))

    run_ranks("torch_distributed", 3, run)


@pytest.mark.slow
def test_loading_nothing_casts_nothing():
    """A load that leaves a parameter alone makes no rank cast it again, also those whose rows FSDP2
    pads anew.
    """

    def run(comm):
        model = bank(DELAYED, (37,))
        model(batch(comm)).backward()
        model.load_state_dict({}, strict=False)
        assert_unsharded_casts(model, DELAYED)  # one cast, on all ranks

    run_ranks("torch_distributed", 4, run)


@pytest.mark.slow
def test_values_that_a_clone_kept_are_cast():
    """Averaged masters that are copied into a master are gathered in codes, also where both were
    written as often.
    """

    def run(comm):
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

    run_ranks("torch_distributed", 2, run)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor's, of torch.jit
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_blocks_give_the_same_gradients(backend):
    """Blocks that torch.compile compiles under FSDP2 use the gathered codes, also those of the
    second step, which are not compiled again.
    """

    def run(comm):
        results = []
        for compiles in (False, True):
            torch.compiler.reset()
            model = blocks(NVFP4)
            optimizer = adamw(model.parameters())
            if compiles:
                for block in model.blocks:
                    block.compile(backend=backend)
            trace = {}
            for step in range(2):
                model(batch(comm)).backward()
                trace |= {f"{name}, step {step}": g for name, g in gradients(model).items()}
                optimizer.step()
                optimizer.zero_grad()
            results.append(trace)
        assert_same_tensors(*results)

    run_ranks("torch_distributed", 2, run)


@pytest.mark.slow
def test_destroyed_groups_leave_nothing_behind():
    """A model that outlives its process group does not keep it."""

    def run(comm):
        model = bank(rows=(48,))
        model(batch(comm)).backward()
        return

    run_ranks("torch_distributed", 2, run)
    assert not dist.is_initialized()
