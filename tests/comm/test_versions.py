"""Ranks that run different versions find it out at their first plan, and all of them say so."""

import sys
from pathlib import Path

import pytest
import torch

import zerocast
from tests.support.programs import on_mpi_ranks, on_torchrun_ranks, output_of
from zerocast.comm import RecordingCommunicator, lines_that_differ, run_in_process

TORCH = torch.__version__.partition("+")[0]
PYTHON = ".".join(map(str, sys.version_info[:2]))


def described(own: str = zerocast.__version__, release: str = TORCH, python: str = PYTHON) -> str:
    """The versions of a rank, as the error has them."""
    return f"zerocast {own}, torch {release}, Python {python}"


@pytest.mark.parametrize(("transport", "on"), [("mpi", on_mpi_ranks), ("gloo", on_torchrun_ranks)])
def test_another_version_on_one_rank_is_an_error_on_all(transport: str, on) -> None:
    """It has the versions of all ranks, by rank. Another patch release of Python, or build of
    torch, is none; and the group casts after the error.
    """
    program = Path(__file__).with_name("version_ranks.py")
    lines = [line for line in output_of(on(3, program, transport)).splitlines() if "|" in line]
    found = dict.fromkeys(range(3), ())
    for rank, what, error in (line.split("|") for line in lines):
        found[int(rank)] += ((what, error),)
    rest = "; install the same on all hosts."
    before = f"every rank must run the same versions, got {described()} on ranks 0, 2; "
    assert found == dict.fromkeys(range(3), (
        ("zerocast", f"{before}{described(own='9.8.7')} on rank 1{rest}"),
        ("torch", f"{before}{described(release='9.8.7')} on rank 1{rest}"),
        ("Python", f"{before}{described(python='9.8')} on rank 1{rest}"),
        ("a Python's patch", ""),
        ("a torch's build", ""),
    ))  # fmt: skip


def test_versions_are_compared_in_the_exchange_that_there_is() -> None:
    """They cost no collective: lines that agree take one all-reduce of 40 bytes."""

    def body(comm):
        recording = RecordingCommunicator(comm)
        assert lines_that_differ(recording, ["a line"]) is None
        return {kind: (t.calls, t.payload_bytes) for (_, kind), t in recording.traffic.items()}

    assert run_in_process(3, body) == [{"all_reduce": (1, 40)}] * 3
