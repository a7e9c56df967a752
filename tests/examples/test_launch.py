"""What examples ask of their hosts: nothing that hosts must know of each other but an address."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zerocast.comm import run_in_process

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch):
    """The module ``gpt.launch``, which changes the environment of this test alone."""
    monkeypatch.syspath_prepend(EXAMPLES)
    from gpt import launch

    monkeypatch.setattr(os, "environ", {})
    return launch


def test_ranks_find_their_store_on_hosts_without_names(launch, monkeypatch) -> None:
    """Where no host's name leads to an address; gloo is told the interface of the address."""
    monkeypatch.setattr(socket, "gethostname", lambda: "a-host-that-nobody.knows.invalid")

    def found(comm) -> list[str]:
        store = launch.common_store(comm)
        store.set(f"{comm.rank}", f"of {comm.rank}")
        said = [store.get(f"{rank}").decode() for rank in range(comm.size)]
        comm.barrier()
        return said

    assert run_in_process(2, found) == [["of 0", "of 1"]] * 2
    assert os.environ[launch.INTERFACE] in launch.interfaces().values()


def test_an_interface_that_the_user_names_is_the_only_one(launch) -> None:
    """Others are not offered, and a name without an address is none."""
    os.environ[launch.INTERFACE] = "lo,no-such-interface"
    assert launch.interfaces() == {"127.0.0.1": "lo"}
    with pytest.raises(ConnectionError, match="no address of rank 0 answers at port 1: 127.0.0.1"):
        launch.route(["127.0.0.1"], 1)


@pytest.mark.parametrize(("own", "threads"), [("a", 8), ("b", 4)])
def test_a_rank_has_its_part_of_its_own_hosts_cores(launch, monkeypatch, own, threads) -> None:
    """Of 8, where one rank runs on host a and two on host b."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(socket, "gethostname", lambda: own)
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    comm = SimpleNamespace(size=3, all_gather_object=lambda name: ["a", "b", "b"])
    assert launch.share_cores(comm) is comm
    assert given == [threads]
