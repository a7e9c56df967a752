"""Reading the memory of another process: its bytes, or an error and nothing else."""

import ctypes
import errno
import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

from zerocast.comm.peer_memory import PeerBuffer, draw_token, read


def hold(pipe: Connection) -> None:
    """Tell where some bytes are, and stay until that is answered."""
    held = torch.arange(300, dtype=torch.uint8)
    pipe.send(PeerBuffer.of(held, token := draw_token(3)))
    pipe.recv()
    assert token.value % 2**20 == 3


def test_bytes_of_another_process_are_read() -> None:
    """From any byte on; when it has ended it is an error, and so is another token, for a process
    that has its number by then.
    """
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=hold, args=(theirs,))
    process.start()
    peer = ours.recv()
    assert peer.process == process.pid
    expected = torch.arange(300, dtype=torch.uint8)
    for start, end in ((0, 300), (7, 8), (299, 300), (5, 5)):
        into = torch.full((end - start + 2,), 255, dtype=torch.uint8)
        read(peer, start, into[1:-1])
        assert torch.equal(into[1:-1], expected[start:end])
        assert into[[0, -1]].tolist() == [255, 255]
    with pytest.raises(ProcessLookupError):
        read(peer._replace(token=peer.token ^ 1), 0, into)
    with pytest.raises(OSError, match="Bad address"):
        read(peer._replace(address=1), 0, into)
    ours.send("enough")
    process.join()
    with pytest.raises(ProcessLookupError):
        read(peer, 0, into)


def test_a_token_is_drawn_for_each_reading_and_no_other_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So a copy of a process has another one, and a rank that finds itself by the number of its
    peer reads nothing, even where both have drawn alike.
    """
    assert len({draw_token(5).value for _ in range(99)}) == 99
    monkeypatch.setattr("secrets.randbits", lambda bits: 2**bits - 1)
    own, theirs = (draw_token(rank) for rank in (0, 2**23 - 1))
    assert 0 < own.value < theirs.value == 2**63 - 1
    held, into = torch.zeros(4, dtype=torch.uint8), torch.ones(4, dtype=torch.uint8)
    peer = PeerBuffer.of(held, own)
    read(peer, 0, into)
    assert not into.any()
    held.fill_(2)
    with pytest.raises(ProcessLookupError):
        read(peer._replace(token=theirs.value), 0, into)
    assert not into.any()


def test_where_the_system_cannot_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As any other that keeps memory from being read."""
    monkeypatch.setattr(ctypes, "CDLL", lambda *given, **named: object())
    with pytest.raises(OSError) as error:
        read(PeerBuffer(1, 1, 1, 1), 0, torch.zeros(1, dtype=torch.uint8))
    assert error.value.errno == errno.ENOSYS
