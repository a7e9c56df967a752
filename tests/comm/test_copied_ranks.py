"""Ranks that are copies of one process: forked from it, or restored from a snapshot of it."""

import os
import socket
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.programs import run
from zerocast.comm.peers import node
from zerocast.comm.torch_peers import TorchPeers


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's namespaces of processes")
@pytest.mark.parametrize(
    ("copies", "found"),
    [
        ("processes", "True True 0"),
        ("containers", "False False 0"),
        ("machines", "True False 0"),
    ],
)
def test_no_copy_of_a_rank_is_taken_for_it(copies: str, found: str, tmp_path: Path) -> None:
    """Not this process itself, which has the number that the other rank has elsewhere, and the
    same memory at the same addresses. Processes that are the ranks meant are read.
    """
    program = Path(__file__).with_name("copied_ranks.py")
    done = run([sys.executable, program, tmp_path / "store", copies], timeout=120)
    if done.returncode == 77:
        pytest.skip("needs unshare(CLONE_NEWPID), which this user may not call")
    assert sorted(done.stdout.splitlines()) == [f"rank {r}: {found}" for r in range(2)], done
    assert done.returncode == 0


def test_a_node_is_a_host_its_kernel_and_the_namespace_of_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another of any of them is another node. Where the system has no /proc, it is the host's name,
    as it is now.
    """
    known = {"name": "host", "boot": "1", "namespace": "pid:[1]"}
    monkeypatch.setattr(socket, "gethostname", lambda: known["name"])
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: known["boot"])
    monkeypatch.setattr(os, "readlink", lambda _: known["namespace"])
    found = {node()}
    for name in known:
        known[name] += "2"
        found.add(node())
    assert len(found) == 4

    def refused(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", refused)
    monkeypatch.setattr(os, "readlink", refused)
    assert node() == "host2"


def test_a_group_that_is_made_again_does_not_read_the_former_ones_states() -> None:
    """It has its name, in a store that outlives both, as torchrun's does."""
    store, error = dist.HashStore(), ValueError("planted")
    found = []
    for _ in range(2):
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        peers = TorchPeers.of(dist.group.WORLD)
        peers._thread.call(lambda: None, 60)  # it has made what it was given before
        found.append(peers._store.check(["any state"]))
        peers.announce(error)
        peers._thread.call(lambda: None, 60)
        found.append(peers._store.check(["any state", "0"]))
        dist.destroy_process_group()
    assert found == [False, True] * 2
