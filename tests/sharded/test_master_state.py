"""What recipes remember travels with checkpoints: a run that is resumed goes on as if it had not
been interrupted, bit for bit.
"""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy

import zerocast
from tests.sharded.sharded import (
    BF16,
    bank,
    batch,
    converted,
    feed,
    load,
    remembered,
    reshard,
    save_plain,
    shard,
    whole_state,
)
from tests.support.claims import assert_same_tensors, message_of
from tests.support.models import Bank, SideBySide
from tests.support.ranks import on_gloo, run_ranks
from tests.support.recipes import RECIPES, REMEMBERING, each
from tests.support.same_bytes import assert_same_bytes
from tests.support.weights import through_a_file
from zerocast.comm import Communicator
from zerocast.nn.saved_state import pack, unpack
from zerocast.sharded.placement import to_local

ROWS = (37, 5)
NVFP4, DELAYED, DRAWN = (RECIPES[name] for name in ("nvfp4", "delayed", "nvfp4-drawn"))
each_recipe = each(*REMEMBERING)

MOMENTS = ("cast", "stepped", "precomputed")
"""Of a step: its forward and backward are done; the optimizer has written the masters, whose cast
is due; that cast is made ahead of the gathers."""


def train(model, comm, start, end, stop_at="precomputed"):
    """Steps ``start`` to ``end`` of SGD with given gradients, the last one up to a moment."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=True)
    for step in range(start, end):
        model(batch(comm)).backward()
        if step == end - 1 and stop_at == "cast":
            return
        feed(model.parameters(), step)
        optimizer.step()
        optimizer.zero_grad()
        if step == end - 1 and stop_at == "stepped":
            return
        zerocast.sharded.precompute_scales_for_fsdp(model)


@pytest.mark.mpi(min_size=4)
@each(*REMEMBERING, slow=["nvfp4-drawn"])
def test_a_resumed_run_is_the_uninterrupted_one(recipe):
    """Saved by torch.distributed.checkpoint on 4 ranks in the middle of a step, between step and
    cast, or after it, and loaded on 3 into a model that has run nothing and on 2 into one that has
    run something else: masters, codes, scales, histories and counters are those of the run that
    went on, at once and after two steps more.
    """

    def run_through(comm, moment):
        model = bank(recipe, ROWS)
        train(model, comm, 0, 3, stop_at=moment)
        folder = save_plain(model, comm)
        at_once = whole_state(model)
        train(model, comm, 3, 5)
        return folder, at_once, whole_state(model)

    def save(comm):
        return {moment: run_through(comm, moment) for moment in MOMENTS}

    saved = run_ranks("torch_distributed", 4, save)[0]

    def resume(comm):
        for moment, (folder, at_once, later) in saved.items():
            model = bank(recipe, ROWS, seed=1)
            if comm.size == 2:
                train(model, comm, 7, 9)
            load(model, folder)
            when = f"saved {moment}, resumed on {comm.size}"
            assert_same_tensors(whole_state(model), at_once, when)
            train(model, comm, 3, 5)
            assert_same_tensors(whole_state(model), later, f"{when} and trained")

    for world_size in (3, 2):
        run_ranks("torch_distributed", world_size, resume)


FULL = {"full_state_dict": True}
FROM_0 = FULL | {"broadcast_from_rank0": True}


@on_gloo(3)
@pytest.mark.parametrize("options", [{}, FULL, FROM_0, FROM_0 | {"cpu_offload": True}])
def test_state_dict_functions_carry_what_recipes_remember(comm, options):
    """torch's get_model_state_dict and set_model_state_dict, sharded, full, and full from rank 0
    alone, carry a run on; without anything to remember they work as well.
    """
    options = StateDictOptions(**options)
    for recipe in (DELAYED, DRAWN, NVFP4):
        model, other = bank(recipe, ROWS), bank(recipe, ROWS, seed=1)
        train(model, comm, 0, 2)
        state = get_model_state_dict(model, options=options)
        if options.broadcast_from_rank0 and comm.rank:
            state = {}
        set_model_state_dict(other, state, options=options)
        assert_same_tensors(whole_state(other), whole_state(model), "at once")
        train(model, comm, 2, 3)
        train(other, comm, 2, 3)
        assert_same_tensors(whole_state(other), whole_state(model), "after a step")


@on_gloo(2)
@each_recipe
def test_a_copied_master_repeats_its_cast(comm, recipe):
    """A deepcopy and a pickle of a shard remember what the next cast of its value starts from, as
    a state dict does, whether the cast was made or is due.
    """
    model = bank(recipe, (37,))
    for moment in MOMENTS:
        train(model, comm, 0, 2, stop_at=moment)
        expected = saved_state(model)
        master = to_local(model.layers[0].weight)
        loaded = through_a_file(master, weights_only=False)
        for twin in (copy.deepcopy(master), loaded, pickle.loads(pickle.dumps(master))):
            assert twin.low_bit_all_gather is not master.low_bit_all_gather
            assert_same_tensors(twin.low_bit_all_gather.state, expected, moment)


@on_gloo(2)
def test_a_gather_in_another_dtype_repeats_the_cast(comm):
    """One value that is gathered in one dtype after another is one entry of the history."""
    model = bank(DELAYED, (37,))
    train(model, comm, 0, 1, stop_at="cast")
    once = remembered(model)
    reshard(model)
    weight = model.layers[0].weight
    master = to_local(weight)
    for dtype in (torch.float32, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        master.fsdp_pre_all_gather(
            weight.device_mesh, weight.shape, weight.stride(), model.layers[0], policy
        )
        amax = remembered(model)["layers.0.weight amax"]
        assert torch.equal(amax, weight.full_tensor().to(dtype).float().abs().max()[None])
    assert_same_tensors(remembered(model), once, "cast again")


@on_gloo(2)
def test_copies_on_another_device_are_cast_once(comm):
    """FSDP2's CPU offload gathers a new copy of a shard each time: the cast is that of the shard
    itself, made once for each of its values.
    """
    model = bank(DELAYED, (37, 1))
    train(model, comm, 0, 2, stop_at="stepped")
    for writes in (1, 2):
        for layer in model.layers:
            weight = layer.weight
            for _ in range(2):
                copied = to_local(weight).clone()
                copied.fsdp_pre_all_gather(
                    weight.device_mesh, weight.shape, weight.stride(), layer, BF16
                )
            assert to_local(weight).low_bit_all_gather.shards.casts == 2 + writes
            amax = to_local(weight).low_bit_all_gather.state["amax_history"][0]
            assert amax == weight.full_tensor().bfloat16().abs().max()
            with torch.no_grad():
                weight.mul_(1.5)


@on_gloo(2)
def test_full_state_dicts_hold_what_autocast_remembers(comm):
    """A full state dict of a sharded model that ran under autocast has the layers' histories, and
    gives them to a fresh model.
    """
    full = StateDictOptions(full_state_dict=True)
    model, fresh = bank(NVFP4, (16, 32)), bank(NVFP4, (16, 32), seed=1)
    with zerocast.autocast(recipe=DELAYED):
        loss = model(torch.cat([batch(comm)] * 4))
    loss.backward()
    saved = get_model_state_dict(model, options=full)
    histories = [saved[f"layers.{i}._extra_state"] for i in (0, 1)]
    assert all(unpack(each, "")[1]["forward.amax_history"].any() for each in histories)
    set_model_state_dict(fresh, saved, options=full)
    again = get_model_state_dict(fresh, options=full)
    for i, history in enumerate(histories):
        assert_same_bytes(again[f"layers.{i}._extra_state"], history, f"layer {i}")


def saved_state(model) -> dict[str, torch.Tensor]:
    """What the state dict says that the recipe of the first layer's master remembers."""
    return unpack(model.state_dict()["layers.0.weight_state"], "layers.0.weight").tensors


def later_state(recipe) -> torch.Tensor:
    """The state of a layer whose master was cast some times."""
    state = converted(recipe, (37,)).state_dict()["layers.0.weight_state"]
    owner, tensors = unpack(state, "layers.0.weight")
    return pack(owner, {name: tensor + i + 1 for i, (name, tensor) in enumerate(tensors.items())})


@each_recipe
def test_a_state_that_was_loaded_is_saved_and_copied(recipe):
    """Before the first gather, too: by state_dict, deepcopy and pickle, on no memory of the
    original's.
    """
    model, given = converted(recipe, (37,)), later_state(recipe)
    model.load_state_dict(model.state_dict() | {"layers.0.weight_state": given})
    loaded = through_a_file(model, weights_only=False)
    twin = copy.deepcopy(model)
    for one in (model, twin, loaded):
        assert_same_bytes(one.state_dict()["layers.0.weight_state"], given, "saved")
    twin.load_state_dict(converted(recipe, (37,)).state_dict())
    assert_same_bytes(model.state_dict()["layers.0.weight_state"], given, "after")


@each_recipe
def test_a_model_on_the_meta_device_has_the_entries_and_takes_the_state(recipe):
    """accelerate's memory-saving loading looks at the state dict of a model that has no values,
    and assigns it one.
    """
    model, given = converted(recipe, (37,)), later_state(recipe)
    saved = converted(recipe, (37,)).state_dict() | {"layers.0.weight_state": given}
    model.to("meta")
    assert model.state_dict().keys() == saved.keys()
    assert all(model.state_dict()[name].shape == tensor.shape for name, tensor in saved.items())
    model.load_state_dict(saved, assign=True)
    assert_same_bytes(model.state_dict()["layers.0.weight_state"], given, "assigned")
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def test_without_a_state_dictionaries_are_those_of_torch():
    """Masters of a recipe that remembers nothing have the state dict of plain layers, and load it
    strictly; so does a model whose recipe starts anew.
    """
    plain = Bank((37,))
    for recipe in (NVFP4, DELAYED):
        model = converted(recipe, (37,))
        model.load_state_dict(plain.state_dict(), strict=True)
        assert_same_bytes(model.layers[0].weight.value, plain.layers[0].weight, "loaded")
    state = converted(NVFP4, (37,)).state_dict()
    assert state.keys() == plain.state_dict().keys()
    plain.load_state_dict(state, strict=True)


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
def test_weights_that_are_no_masters_pass_over_what_a_master_remembered(weights):
    """A checkpoint of masters loads strictly where weights hold codes, or stay as they are."""
    saved = converted(DELAYED, (37,)).state_dict()
    saved["layers.0.weight_state"] = later_state(DELAYED)
    model = converted(DELAYED, (37,), weights=weights)
    before = model.state_dict().keys()
    model.load_state_dict(saved, strict=True)
    assert model.state_dict().keys() == before


def test_the_state_of_another_recipe_is_refused():
    """Fields that differ are named on both sides, and a state that is not what the recipe keeps;
    nothing of the layer is changed.
    """
    model, another = converted(DELAYED, (37,)), converted(DELAYED, (37,), seed=1)
    held = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    owner, tensors = unpack(later_state(DELAYED), "")
    short = pack(owner, {**tensors, "amax_history": tensors["amax_history"][:2]})
    for state, said in (
        (
            later_state(zerocast.DelayedScaling(amax_history_len=5)),
            "was saved under one of amax_history_len 5, and the weight's is of amax_history_len 3",
        ),
        (
            later_state(dataclasses.replace(DELAYED, margin=1)),
            "was saved under one of margin 1, and the weight's is of margin 0",
        ),
        (
            later_state(DRAWN),
            "was saved under one of class 'NVFP4BlockScaling'",
        ),
        (pack({}, tensors), "was saved under one of class None"),
        (short, "and the state dict has amax torch.float32 [1], amax_history torch.float32 [2]"),
    ):
        given = another.state_dict() | {"layers.0.weight_state": state}
        message = message_of(zerocast.InputError, model.load_state_dict, given)
        assert (
            "recipe state must be loaded into a weight of the same recipe: the state of" in message
        )
        assert said in message
        assert message.endswith(
            "; convert with the recipe that it was saved under, or take the layer's 'weight_state' "
            "out of the state dict to start without it."
        )
        for name in ("layers.0.weight", "layers.0.weight_state"):
            assert_same_bytes(model.state_dict()[name], held[name], name)
    assert not saved_state(model)["amax_history"].any()


def test_parts_that_were_converted_one_by_one_have_the_bytes_of_their_names() -> None:
    """Though two masters have one name; cast ahead of the gathers, all in one plan, or one by one,
    under a recipe that draws by names.
    """

    def body(comm: Communicator) -> None:
        found = []
        for ahead in (True, False):
            torch.manual_seed(0)
            layers = (torch.nn.Sequential(torch.nn.Linear(96, m, bias=False)) for m in (48, 37))
            model = SideBySide(torch.nn.ModuleList(layers))
            for layer in model.layers:
                zerocast.nn.convert(layer, DRAWN, weights="master")
            optimizer = torch.optim.SGD(shard(model).parameters(), lr=0.05, foreach=True)
            model(batch(comm)).backward()
            feed(model.parameters(), 0)
            optimizer.step()
            if ahead:
                zerocast.sharded.precompute_scales_for_fsdp(model)
            found.append(whole_state(model))
        assert_same_tensors(*found, "ahead, and one by one")

    run_ranks("forked", 2, body)


def test_plain_weights_load_where_torch_fills_in_the_empty_entry() -> None:
    """``set_model_state_dict`` gives a model its own empty buffer for an entry that is missing."""
    plain = torch.nn.Sequential(torch.nn.Linear(32, 48)).state_dict()
    model = torch.nn.Sequential(torch.nn.Linear(32, 48))
    zerocast.nn.convert(model, "delayed", weights="master")
    model.load_state_dict(plain | {"0.weight_state": torch.empty(0, dtype=torch.uint8)})
    assert torch.equal(model.state_dict()["0.weight"], plain["0.weight"])
    with pytest.raises(zerocast.InputError, match="weight_state|recipe state"):
        model.load_state_dict(plain | {"0.weight_state": torch.empty(0)})
