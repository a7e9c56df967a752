"""Gathers of codes: where they stage, and that what changes in them is found."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zerocast
from tests.conftest import stamp
from tests.support.claims import message_of
from tests.support.ranks import on_ranks, run_ranks
from tests.support.values import draw_values
from tests.support.verified import Weights
from zerocast.cast import CastPlan
from zerocast.comm import Communicator, RecordingCommunicator, processes
from zerocast.errors import VerificationError


class Damaged(RecordingCommunicator):
    """A gather after which rank 1 holds another first byte."""

    def start_all_gather_(self, buffer: torch.Tensor, counts: Any = None) -> Callable[[], None]:
        wait = super().start_all_gather_(buffer, counts)

        def damaged() -> None:
            wait()
            buffer[0] ^= 0x10 * (self.rank == 1)

        return damaged


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "block"])
def test_what_changes_in_a_staged_gather_is_found(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the gather itself: codes that change in it, or scales before it."""
    monkeypatch.chdir(tmp_path)

    def on_rank(comm: Communicator) -> list[str]:
        each = Weights(comm, recipe, verify="hash")
        each.step()
        each.plan.cast()
        each.buffers(1)["rowwise_scale_inv"].view(torch.uint8)[0] ^= comm.rank == 2
        damaged = Weights(Damaged(comm), recipe, verify="hash")
        damaged.plan.cast()
        return [message_of(VerificationError, one.plan.all_gather) for one in (each, damaged)]

    by_rank = run_ranks("in_process", 3, on_rank)
    assert by_rank[0] == by_rank[1] == by_rank[2]
    stale, damaged = by_rank[0]
    assert "b.weight" in stale
    assert "rank 2 holds" in stale
    assert "a.weight" in damaged
    assert "rank 1 holds" in damaged
    assert "[0, 0] of rowwise_data, of the shard of rank 0" in damaged or recipe == "nvfp4"


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "block"])
@pytest.mark.parametrize("kind", ["in_process", stamp("mpi"), stamp("torch_distributed")])
def test_what_changes_in_a_gather_in_place_is_found(
    kind: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of threads, or of processes of one node, which read large codes from each other; right codes
    pass, in the same memory or in other.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "_LARGE", 20000)
    master = draw_values("normal", 1 << 18, 0).chunk(4)

    def on_rank(comm: Communicator) -> str:
        weight = zerocast.empty((512, 512), recipe)
        own, start = [master[comm.rank]], [comm.rank << 16]
        buffers = weight.quantized_storage.buffers
        plan = CastPlan([weight], own, start, comm, names=["a.weight"], verify="hash")
        for turn in range(3):
            plan.cast()
            plan.all_gather()
            if turn == 1:
                sizes = [buffers[gather._plane].numel() for gather in plan._cast.gathers]
                moved = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
                zerocast.replace_raw_data(weight, *moved)
        plan = CastPlan([weight], own, start, Damaged(comm), names=["a.weight"], verify="hash")
        plan.cast()
        return message_of(VerificationError, plan.all_gather)

    first, *others = run_ranks(kind, 4, on_rank)
    assert others == [first] * 3
    assert "rank 1 holds" in first
    assert "of rowwise_data, of the shard of rank 0" in first


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8"])
@on_ranks("in_process", 2)
def test_gathers_stage_in_one_buffer(comm: Communicator, recipe: str) -> None:
    """Of all planes and steps, whether in inference mode or not. One that is in use, or was left by
    an error, is not used by another gather.
    """
    each = Weights(comm, recipe, verify="hash")
    with torch.inference_mode():
        each.step()
    gathers = each.plan._cast.gathers
    (spare,) = gathers[0]._spare
    for _ in range(2):
        each.step()
        assert [kept.data_ptr() for kept in gathers[-1]._spare] == [spare.data_ptr()]
    end = gathers[0].start()
    assert gathers[0]._spare == []
    each.step()
    assert gathers[0]._spare[0].data_ptr() != spare.data_ptr()
    end()
    assert len(gathers[0]._spare) == 1
