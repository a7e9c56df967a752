"""A master whose cast was made before it was saved or copied, and that is written before its first
gather, has the next cast: a run that goes on from it is, bit for bit, the one that never stopped.
"""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zerocast
from tests.sharded.sharded import (
    bank,
    batch,
    converted,
    feed,
    gathered,
    load,
    reshard,
    save_plain,
    shard,
    whole_masters,
    whole_state,
)
from tests.support.claims import assert_same_tensors, stored
from tests.support.ranks import on_gloo, run_ranks, shared_folder
from tests.support.recipes import RECIPES, REMEMBERING, each
from zerocast.optim import FusedAdamW
from zerocast.sharded.all_gather import gather_of
from zerocast.sharded.placement import to_local

ROWS = (37, 5)
DRAWN = RECIPES["nvfp4-drawn"]


def sgd(model, lr=0.05) -> torch.optim.Optimizer:
    """torch's."""
    return torch.optim.SGD(model.parameters(), lr=lr)


def steps(model, optimizer, *numbers: int) -> None:
    """Steps with given gradients, and no gather in between."""
    for number in numbers:
        feed(model.parameters(), number)
        optimizer.step()
        optimizer.zero_grad()


def trained(recipe, *, rows=ROWS, ahead=False, **options):
    """A model whose masters have been cast three times, the third time as they are."""
    model = bank(recipe, rows, **options)
    optimizer = sgd(model)
    for number in (0, 1):
        gathered(model)
        reshard(model)
        steps(model, optimizer, number)
    if ahead:
        zerocast.sharded.precompute_scales_for_fsdp(model)
    else:
        gathered(model)
        reshard(model)
    return model, optimizer


# --- ways to go on ---


def by_checkpoint(model, optimizer, comm, recipe):
    """Into a model that has run nothing."""
    folder, other = shared_folder(comm), bank(recipe, ROWS, seed=1)
    zerocast.checkpoint.save(folder, optimizer, model)
    zerocast.checkpoint.load(folder, sgd(other), other)
    return other


def by_two_checkpoints(model, optimizer, comm, recipe):
    """What was loaded is saved at once, and loaded again."""
    first, again = by_checkpoint(model, optimizer, comm, recipe), bank(recipe, ROWS)
    folder = shared_folder(comm)
    zerocast.checkpoint.save(folder, sgd(first), first)
    zerocast.checkpoint.load(folder, sgd(again), again)
    return again


def by_a_checkpoint_of_another_run(model, optimizer, comm, recipe):
    """Into a model that was trained, in the middle of a step."""
    folder = shared_folder(comm)
    other, its_optimizer = trained(recipe, ahead=True)
    steps(other, its_optimizer, 7)
    zerocast.checkpoint.save(folder, optimizer, model)
    zerocast.checkpoint.load(folder, its_optimizer, other)
    return other


def by_dcp(model, optimizer, comm, recipe):
    """torch.distributed.checkpoint, twice."""
    for _ in range(2):
        other = bank(recipe, ROWS, seed=1)
        load(other, save_plain(model, comm))
        model = other
    return model


def by_state_dict_functions(model, optimizer, comm, recipe):
    """A full state dict that rank 0 has alone."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    other, state = bank(recipe, ROWS, seed=1), {}
    whole = get_model_state_dict(model, options=options)
    if comm.rank == 0:
        state = whole
    set_model_state_dict(other, state, options=options)
    return other


def by_loading_before_sharding(model, optimizer, comm, recipe):
    """The whole state dict goes into a whole model, which ``fully_shard`` cuts afterwards."""
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=options)
    other = converted(recipe, ROWS, seed=1)
    other.load_state_dict(state)
    return shard(other)


WAYS = [
    by_checkpoint,
    by_two_checkpoints,
    by_a_checkpoint_of_another_run,
    by_dcp,
    by_state_dict_functions,
    by_loading_before_sharding,
]


@on_gloo(3)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@each("nvfp4-drawn", "delayed")
def test_what_is_loaded_goes_on_as_the_run_that_never_stopped(comm, recipe, way):
    """At once, after one step, after two without a gather between, and after one of rate 0, which
    changes no value and is a write all the same; cast by a gather, or ahead of it.
    """
    for ahead in (False, True):
        for numbers, lr in (((), 0.05), ((2,), 0.05), ((2, 3), 0.05), ((2,), 0.0)):
            model, optimizer = trained(recipe, ahead=ahead)
            other = way(model, optimizer, comm, recipe)
            found = []
            for each_model in (other, model):
                steps(each_model, sgd(each_model, lr), *numbers)
                found.append(whole_state(each_model))
                steps(each_model, sgd(each_model), 4)
                found[-1] |= {f"{k}, later": v for k, v in whole_state(each_model).items()}
            assert_same_tensors(*found, f"{numbers} at {lr}, {ahead=}")


@pytest.mark.mpi(min_size=4)
@each(*REMEMBERING, slow=["nvfp4-drawn"])
def test_any_number_of_ranks_goes_on(recipe):
    """Saved on 4 ranks after a cast, loaded on 2 and stepped before the first gather."""

    def first(comm):
        model, optimizer = trained(recipe)
        folder = shared_folder(comm)
        zerocast.checkpoint.save(folder / "zerocast", optimizer, model)
        dcp.save(model.state_dict(), checkpoint_id=folder / "dcp")
        steps(model, optimizer, 2)
        return folder, whole_state(model)

    folder, expected = run_ranks("torch_distributed", 4, first)[0]

    def second(comm):
        for name in ("zerocast", "dcp"):
            model = bank(recipe, ROWS, seed=1)
            optimizer = sgd(model)
            if name == "dcp":
                load(model, folder / name)
            else:
                zerocast.checkpoint.load(folder / name, optimizer, model)
            steps(model, optimizer, 2)
            assert_same_tensors(whole_state(model), expected, name)

    run_ranks("torch_distributed", 2, second)


@on_gloo(2)
def test_writes_that_torch_does_not_count_are_written_all_the_same(comm):
    """Between a load and the first gather: by FusedAdamW, and by the address."""
    for write in ("fused", "address"):
        found = []
        model, _ = trained(DRAWN)
        other = bank(DRAWN, ROWS, seed=1)
        load(other, save_plain(model, comm))
        for each_model in (other, model):
            if write == "fused":
                steps(each_model, FusedAdamW(each_model.parameters(), lr=0.05), 2)
            else:
                for parameter in each_model.parameters():
                    torch.from_dlpack(to_local(parameter).detach()).mul_(-1.5)
            found.append(whole_state(each_model))
        assert_same_tensors(*found, write)


@on_gloo(2)
def test_a_cast_of_masters_that_are_as_loaded_advances_the_state(comm):
    """``precompute_scales_for_fsdp`` casts what was written, or all, of a loaded model as of the
    one that never stopped.
    """
    for only_written in (False, True):
        for is_fresh in (False, True):
            found = []
            model, _ = trained(DRAWN)
            other = bank(DRAWN, ROWS, seed=1) if is_fresh else trained(DRAWN)[0]
            load(other, save_plain(model, comm))
            for each_model in (other, model):
                zerocast.sharded.precompute_scales_for_fsdp(each_model, only_written=only_written)
                found.append(whole_state(each_model))
            assert_same_tensors(*found, f"{only_written=} {is_fresh=}")


@on_gloo(2)
def test_a_group_is_cast_together_after_a_load(comm):
    """One of two masters of an amax group is stepped, before the save or after the load: both have
    the next cast, as they had without a stop.
    """
    for is_stepped in (False, True):
        groups = {"amax_groups": [["*.0", "*.1"]]}
        models = [shard(converted(RECIPES["delayed"], ROWS, seed=i, **groups)) for i in range(2)]
        gathered(models[0])
        reshard(models[0])
        if is_stepped:
            steps(models[0].layers[0], sgd(models[0].layers[0]), 0)
        folder = shared_folder(comm)
        zerocast.checkpoint.save(folder, sgd(models[0]), models[0])
        zerocast.checkpoint.load(folder, sgd(models[1]), models[1])
        found = []
        for model in models:
            steps(model.layers[0], sgd(model.layers[0], 0.5), 1)
            found.append(whole_state(model))
        assert_same_tensors(*found, f"{is_stepped=}")


@on_gloo(2)
def test_a_copied_model_goes_on_as_its_original(comm):
    """A copied master that is written before its first gather has the cast that the original has;
    under tensor parallelism models can be copied whole.
    """
    mesh = init_device_mesh("cpu", (comm.size,))
    model = converted(DRAWN, (64,))
    parallelize_module(model, mesh, {"layers.0": ColwiseParallel()})
    x, found = batch().float(), []
    with torch.no_grad():
        model(x)
        for each_model in (copy.deepcopy(model), model):
            each_model.layers[0].weight.mul_(1.5)
            out = each_model(x)
            gather = gather_of(each_model.layers[0].weight)
            codes = stored({"codes": zerocast.QuantizedTensor(gather.kept)})
            found.append({"out": out, **gather.state, **codes, **whole_masters(each_model)})
    assert_same_tensors(*found, "copy")


@on_gloo(2)
def test_a_model_that_is_moved_after_a_load_repeats_its_cast(comm):
    """Clones and conversions to the same dtype are no new values."""
    model, _ = trained(DRAWN)
    other = converted(DRAWN, ROWS, seed=1)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    other.load_state_dict(state)
    for layer in other.layers:
        layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
    shard(other.to(torch.float32))
    for each_model in (other, model):
        gathered(each_model)
        reshard(each_model)
    found = [whole_state(each_model) for each_model in (other, model)]
    assert_same_tensors(*found, "moved")
