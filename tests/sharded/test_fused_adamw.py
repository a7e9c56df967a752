"""FusedAdamW on masters that FSDP2 gathers: the bytes of an update and a cast apart, and one read
fewer where the update takes the amaxes.
"""

import functools

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

import zerocast
from tests.sharded.sharded import (
    K,
    Unsharded,
    assert_unsharded_casts,
    bank,
    batch,
    converted,
    feed,
    reshard,
    shard,
    train_and_compare,
    whole_masters,
)
from tests.support.claims import assert_same_tensors, message_of
from tests.support.ranks import on_gloo
from tests.support.recipes import RECIPES, each
from tests.support.settings import steps_of_casts
from zerocast.optim import FusedAdamW
from zerocast.sharded.all_gather import gather_of
from zerocast.sharded.master_weight import MasterWeight
from zerocast.sharded.placement import distributed, to_local

ROWS = (48, 37, 5)
"""Over 2 and 3 ranks, none without rows: even or not."""

fused = functools.partial(FusedAdamW, lr=0.05)


def step(model, optimizer, number: int) -> None:
    """Update every trained master by given gradients."""
    reshard(model)
    feed((p for p in model.parameters() if p.requires_grad), number)
    optimizer.step()
    optimizer.zero_grad()


@on_gloo(3)
@each(*RECIPES, slow=set(RECIPES) - {"nvfp4", "mxfp8"})
def test_bytes_are_those_of_an_update_and_a_cast_apart(comm, recipe):
    """Four steps of two microbatches: what is gathered is the unsharded cast, with even, uneven and
    empty shards, cast in the hooks or ahead of them; the masters are those of whole tensors.
    """
    model, plain = bank(recipe), converted(recipe, weights="high_precision")
    expected, x = Unsharded(model, recipe), batch(comm)
    train_and_compare(model, x, expected, range(4), microbatches=2, make=fused)
    optimizer = fused(plain.parameters())
    for number in range(4):
        step(plain, optimizer, number)
    masters = {name: p.detach() for name, p in plain.named_parameters()}
    assert_same_tensors(whole_masters(model), masters)


@on_gloo(2)
@each("nvfp4", "current", "nvfp4-4over6", "mxfp8", "delayed", slow=["current", "nvfp4-4over6"])
def test_no_cast_measures_what_the_update_has(comm, recipe):
    """No cast measures masters that an update has, in the hooks or ahead of them. Where it writes
    codes while it measures, it does both in its only read.
    """
    model = bank(recipe, (128, 64))  # on each rank whole blocks of every recipe
    optimizer = fused(model.parameters())
    model(batch(comm))
    writes_early = recipe in (RECIPES["mxfp8"], RECIPES["delayed"])
    for number, ahead in enumerate((False, False, True, True, True)):
        step(model, optimizer, number)
        with steps_of_casts() as ran:
            if ahead:
                zerocast.sharded.precompute_scales_for_fsdp(model)
            model(batch(comm))
        assert "compute_scale" in ran
        makes_plan = number == 2  # that of all masters, which no update knows yet
        assert ("partial_amax" in ran) == (writes_early or makes_plan), number


def by_rebinding(model):
    """As who puts other tensors in their place."""
    for p in model.parameters():
        p._local_tensor.data = to_local(p).value.clone().mul_(3)


def unseen(model):
    """As a kernel that is launched with addresses, whose caller says so."""
    for p in model.parameters():
        to_local(p).value.data.mul_(3)
    zerocast.sharded.mark_written(model)


def by_loading(model):
    """From a state dict."""
    model.load_state_dict({name: 3 * value for name, value in model.state_dict().items()})


def by_average(model):
    """Copied into entries of a state dict."""
    for entry in model.state_dict().values():
        entry.copy_(torch.full_like(entry, 0.7))


CHANGES = {
    "nothing": lambda model: None,
    "in place": lambda model: [p.detach().mul_(3) for p in model.parameters()],
    "local": lambda model: [to_local(p).value.mul_(3) for p in model.parameters()],
    "one row": lambda model: [to_local(p)[:1].zero_() for p in model.parameters()],
    "average": by_average,
    "loaded": by_loading,
    "rebound": by_rebinding,
    "unseen": unseen,
    "another optimizer": lambda model: step(model, torch.optim.SGD(model.parameters(), lr=0.3), 9),
}


@on_gloo(2)
@pytest.mark.parametrize("ahead", [False, True])
def test_masters_that_change_before_the_cast(comm, ahead):
    """A master that is written, loaded or rebound after the update, by any means, is measured
    again: the bytes are those of the masters as they are.
    """
    model = bank(rows=ROWS)
    optimizer = fused(model.parameters())
    model(batch(comm))
    for number, (name, change) in enumerate(CHANGES.items()):
        for _ in range(2):  # the first makes the plan that the second's update knows
            step(model, optimizer, number)
            with steps_of_casts() as ran:
                change(model)
                if ahead:
                    zerocast.sharded.precompute_scales_for_fsdp(model)
                model(batch(comm))
            assert_unsharded_casts(model, when=f"after {name}")
        assert ("partial_amax" in ran) == (name != "nothing"), name
        reshard(model)


@on_gloo(2)
def test_updates_of_some_masters(comm):
    """Masters of two optimizers, of param groups, frozen ones and those without a gradient, an
    update twice, and a hook of the optimizer that writes: what is gathered is the cast of all.
    """
    model = bank(rows=ROWS)
    first, second, third = model.parameters()
    both = [fused([first]), fused([{"params": [second], "lr": 0.1}, {"params": [third]}])]
    model(batch(comm))

    def gathered(when):
        zerocast.sharded.precompute_scales_for_fsdp(model)
        assert_unsharded_casts(model, when=when)
        reshard(model)

    for number in range(2):
        for optimizer in both:
            step(model, optimizer, number)
        gathered("two optimizers")
    optimizer = fused(model.parameters())
    third.requires_grad_(False)
    for number in range(2):
        step(model, optimizer, number)
        step(model, optimizer, number)
        gathered("a frozen master")
    third.requires_grad_(True)
    for number in range(2):
        feed([first, second], number)
        optimizer.step()
        optimizer.zero_grad()
        gathered("a master without a gradient")
    optimizer.register_step_post_hook(lambda *_: to_local(first).value.data.mul_(8))
    step(model, optimizer, 7)
    gathered("a hook that writes")


@on_gloo(2)
def test_masters_that_were_sharded_anew(comm):
    """Masters that were found with other rows than were cast last, as after a gather that was
    refused before its cast, are updated as these rows: the latest plan, which is for others,
    measures none.
    """
    model = bank(rows=ROWS)
    model(batch(comm))
    reshard(model)
    found, expected = [], []
    for p in model.parameters():
        gather, rows = gather_of(p), torch.full((1 + comm.rank, K), 0.5)
        assert gather.latest is not None
        local = MasterWeight(rows, gather)
        anew = torch.nn.Parameter(distributed(local, p.device_mesh, p.placements[0], p.shape))
        gather.find(anew)
        plain = torch.nn.Parameter(rows.clone())
        plain.grad = torch.ones_like(rows)
        anew.grad = distributed(plain.grad, p.device_mesh, p.placements[0], p.shape)
        found.append(anew)
        expected.append(plain)
    for parameters in (found, expected):
        fused(parameters).step()
    assert_same_tensors(
        {i: to_local(p).value.detach() for i, p in enumerate(found)},
        {i: p.detach() for i, p in enumerate(expected)},
    )


@on_gloo(2)
def test_masters_of_another_dtype(comm):
    """Masters that were prepared for another dtype than they were cast in last, as by a gather that
    was refused before its cast, are measured by no plan: the latest one is for that dtype.
    """
    model = bank(rows=ROWS)
    model(batch(comm))
    gathers = [gather_of(p) for p in model.parameters()]
    for gather in gathers:
        assert gather.latest is not None
        shards = gather.shards
        gather.prepare(gather.comm, torch.float16, shards.storage.device, is_due=False)
    step(model, fused(model.parameters()), 0)
    assert [gather.latest for gather in gathers] == [None] * 3


@on_gloo(2)
@pytest.mark.parametrize("way", ["offload", "foreach", "compiled"])
def test_ways_around_the_step(comm, way):
    """What is gathered is the cast of the masters, also where FSDP2 offloads them to the CPU, where
    torch's foreach functions write between the update and the cast, and where the loss and the step
    are compiled.
    """
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if way == "offload" else {}
    model = bank(rows=ROWS, **options)
    optimizer = fused(model.parameters())
    update = torch.compile(optimizer.step, backend="eager") if way == "compiled" else optimizer.step
    for number in range(4):
        model(batch(comm)).float().square().mean().backward()
        reshard(model)
        feed(model.parameters(), number)
        update()
        if way == "foreach":
            with torch.no_grad():
                torch._foreach_mul_(list(model.parameters()), 3.0)
        optimizer.zero_grad()
        assert_unsharded_casts(model, when=f"{way}, step {number}")
        reshard(model)


@on_gloo(2)
def test_masters_of_an_amax_group(comm):
    """They are measured and cast together, also where one alone is gathered."""
    groups = [["layers.0*", "layers.1*"]]
    recipe = RECIPES["nvfp4"]
    model = shard(converted(recipe, ROWS, amax_groups=groups))
    expected = Unsharded(model, recipe, groups=groups)
    train_and_compare(model, batch(comm), expected, range(4), make=fused)


@on_gloo(2)
def test_a_backward_after_the_update_sends_what_its_forward_did(comm):
    """An update between a forward and its backward changes no code that the backward gathers."""
    for name in ("nvfp4", "mxfp8"):
        found = []
        for updates in (False, True):
            model = bank(RECIPES[name], ROWS)
            optimizer = fused(model.parameters())
            for number in range(2):
                model(batch(comm))
                step(model, optimizer, number)
            loss = model(batch(comm))
            if updates:
                step(model, optimizer, 5)
            loss.backward()
            found.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
        assert_same_tensors(*found)


@on_gloo(2)
def test_weights_that_are_gathered_are_no_parameters(comm):
    """FSDP2 leaves the root's gathered after a forward, and an optimizer of them would step none:
    the constructor says so on every rank, and after ``reshard()`` all are trained.
    """
    model = shard(converted(rows=ROWS), wrap_layers=False)
    with torch.no_grad():
        model(batch(comm))
    message = message_of(zerocast.InputError, fused, model.parameters())
    assert "layers.0.weight as FSDP2 has gathered it" in message
    assert "model.reshard()" in message
    model.reshard()
    before = whole_masters(model)
    optimizer = fused(model.parameters())
    model(batch(comm)).backward()
    optimizer.step()
    for name, master in whole_masters(model).items():
        assert not torch.equal(master, before[name])
