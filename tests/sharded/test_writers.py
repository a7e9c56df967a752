"""Whoever writes masters, by whatever means and on whichever ranks: the next gather sends codes of
what was written, and one cast makes them.
"""

import ctypes
import functools
from importlib.util import find_spec

import pytest
import torch

import zerocast
from tests.sharded.sharded import (
    adamw,
    assert_unsharded_casts,
    bank,
    batch,
    gradients,
    reshard,
    train_step,
    whole_masters,
)
from tests.support.claims import assert_same_tensors
from tests.support.ranks import on_gloo
from tests.support.recipes import RECIPES
from zerocast.sharded.placement import to_local

DELAYED = RECIPES["delayed"]
ROWS = (37, 1)
"""Over 3 ranks: a last shard of 11 rows, and two without any."""


def by_address(rows):
    """As a kernel that is launched with a pointer."""
    numbers = (ctypes.c_float * rows.numel()).from_address(rows.data_ptr() or 1)
    for i in range(0, rows.numel(), 7):
        numbers[i] += 1


def by_rebinding(rows):
    """As who puts another tensor in its place."""
    rows.data = rows.detach().clone().value.mul_(3)


WRITERS = {
    "address": by_address,
    "dlpack": lambda rows: torch.from_dlpack(rows).mul_(3),
    "plain": lambda rows: rows.value.mul_(3),
    "rebound": by_rebinding,
    "index": lambda rows: rows.__setitem__(slice(0, 1), 3.0),
    "one row": lambda rows: [row.zero_() for row in rows.unbind()[:1]],
    "select": lambda rows: rows.select(1, 5).fill_(3),
    "diagonal": lambda rows: rows.diagonal().fill_(3),
    "permute": lambda rows: rows.permute(1, 0).mul_(3),
    "transpose": lambda rows: rows.transpose(0, 1)[2:].mul_(3),
    "flat": lambda rows: rows.flatten()[7:].mul_(3),
    "foreach": lambda rows: torch._foreach_add_([rows], 1),
    "detached": lambda rows: rows.detach().value.add_(1),
    "copied": lambda rows: rows.copy_(torch.ones(rows.shape)),
    "its clone": lambda rows: rows.copy_(rows.detach().clone().mul_(2)),
    "its copy": lambda rows: rows.copy_(torch.empty_like(rows).copy_(rows).mul_(2)),
    "its end": lambda rows: rows[: len(rows) // 2].copy_(rows[(len(rows) + 1) // 2 :]),
}
UNSEEN = ("address", "dlpack", "one row")
"""Those which torch does not see, or not on a rank without rows."""


def write(model, writer: str) -> None:
    """Let ``writer`` write this rank's rows."""
    with torch.no_grad():
        for parameter in model.parameters():
            WRITERS[writer](parameter._local_tensor)


def casts(model) -> list[int]:
    """Of each master, so far."""
    return [to_local(p).low_bit_all_gather.shards.casts for p in model.parameters()]


@on_gloo(3)
def test_what_any_rank_writes_is_cast_once(comm):
    """A write on all ranks, or on one alone, is cast on all of them by the next gather, and once;
    after precompute_scales_for_fsdp that of all ranks, too, where mark_written tells of one that
    torch does not see on all of them.
    """
    model = bank(rows=ROWS)
    model(batch(comm)).backward()
    for writer in WRITERS:
        for writers in ((0, 1, 2), (1,), (0,)):
            if comm.rank in writers:
                write(model, writer)
            when = f"written by {writer} on {writers}"
            assert_unsharded_casts(model, when=when)
            once = casts(model)
            assert_unsharded_casts(model, when=when)
            assert casts(model) == once
        zerocast.sharded.precompute_scales_for_fsdp(model)
        write(model, writer)
        if writer in UNSEEN:
            zerocast.sharded.mark_written(model)
        assert_unsharded_casts(model, when=f"written by {writer} after a cast ahead")


@on_gloo(3)
@pytest.mark.parametrize(
    "write_entry",
    [
        lambda entry: entry.mul_(3),
        lambda entry: entry.copy_(torch.zeros_like(entry)),
        lambda entry: entry[0].fill_(3),
        lambda entry: entry.to_local().mul_(3),
    ],
    ids=["whole", "copied", "a row", "local"],
)
def test_entries_of_a_state_dict_are_the_masters(comm, write_entry):
    """Who writes a plain DTensor of a state dict, an old or a new one, between a cast ahead and the
    next gather, is seen by ranks without rows, too.
    """
    model = bank(rows=ROWS)
    model(batch(comm)).backward()
    reshard(model)
    old = model.state_dict()
    for entries in (old, None, old):
        zerocast.sharded.precompute_scales_for_fsdp(model)
        once = casts(model)
        for entry in (entries or model.state_dict()).values():
            write_entry(entry)
        assert_unsharded_casts(model)
        assert casts(model) == [number + 1 for number in once]


@on_gloo(3)
def test_precompute_casts_all_masters_or_those_written(comm):
    """precompute_scales_for_fsdp casts every master, and with ``only_written`` those that any rank
    has written, seen by torch or not, and those that mark_written names; the gathers that follow
    cast nothing.
    """
    model = bank(rows=(37, 5))
    model(batch(comm)).backward()
    reshard(model)
    precompute = zerocast.sharded.precompute_scales_for_fsdp
    found = [casts(model)]
    first = to_local(model.layers[0].weight)

    def after(action, *arguments, **options):
        action(*arguments, **options)
        assert_unsharded_casts(model)
        found.append(casts(model))

    after(precompute, model)
    after(precompute, model, only_written=True)
    if comm.rank == 1:
        by_address(first)
    after(precompute, model, only_written=True)
    zerocast.sharded.mark_written(model)
    after(precompute, model, only_written=True)
    assert found == [[1, 1], [2, 2], [2, 2], [3, 2], [4, 3]]


@on_gloo(3)
@pytest.mark.parametrize("reshards", [True, False])
def test_microbatches_are_cast_once(comm, reshards):
    """Two microbatches of a value that was written unseen gather one cast, which moves what delayed
    scaling remembers on once, also where the backward gathers again.
    """
    model = bank(DELAYED, ROWS, reshard_after_forward=reshards)
    for step in (1, 2):
        for _ in range(2):
            model(batch(comm)).backward()
        assert casts(model) == [step] * len(ROWS)
        for parameter in model.parameters():
            by_address(to_local(parameter))


@on_gloo(2)
def test_a_backward_sends_what_its_forward_did(comm):
    """Masters that are written between a forward and its backward change neither the codes that the
    backward gathers nor its gradients.
    """
    results = []
    for writes in (False, True):
        model = bank(rows=ROWS)
        loss = model(batch(comm))
        if writes:
            write(model, "address")
            write(model, "flat")
        loss.backward()
        results.append(gradients(model))
    assert_same_tensors(*results)


@on_gloo()
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor's, of torch.jit
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("precomputes", [False, True])
def test_a_compiled_step_trains_as_an_eager_one(comm, precomputes):
    """AdamW whose step torch.compile compiles with inductor trains masters to eager's losses, to
    the rounding of its fused arithmetic, and what is gathered is the cast of them, to the byte.
    """
    losses = []
    for compiles in (False, True):
        torch.compiler.reset()
        model = bank(rows=(48,))
        optimizer = adamw(model.parameters())
        if compiles:
            optimizer.step = torch.compile(optimizer.step)
        for i in range(4):
            losses.append(train_step(model, optimizer, comm, i, ahead=precomputes))
            assert_unsharded_casts(model)
    torch.testing.assert_close(losses[:4], losses[4:], rtol=2e-2, atol=0)
    assert len({float(loss) for loss in losses[:4]}) == 4


@on_gloo(2)
@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torchao's, of its own
def test_the_compiled_8_bit_optimizer_of_torchao_trains_masters(comm, monkeypatch):
    """AdamW8bit, which compiles its step for each parameter, takes sharded masters, and what it
    writes is gathered.
    """
    from torchao.optim import AdamW8bit

    # Not inductor, which compiles for a minute.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    model = bank(rows=(128,))
    optimizer = AdamW8bit(model.parameters(), lr=0.05)
    before = whole_masters(model)
    for number in range(2):
        train_step(model, optimizer, comm, number)
        assert_unsharded_casts(model)
    after = whole_masters(model)
    assert all((after[name] - before[name]).abs().mean() > 0.01 for name in before)
