"""A rank is interrupted amid a save or load: the others are told at once, and nothing is lost."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.optim.training import Training, assert_same_lists, held_by
from tests.support.ranks import on_ranks
from tests.support.recipes import RECIPES
from zerocast.checkpoint import load, loading, one_file, save, saving
from zerocast.checkpoint.files import DigestingWriter
from zerocast.checkpoint.manifest import read_manifest
from zerocast.comm import Communicator
from zerocast.errors import PeerFailedError

WAIT = 20.0
"""Seconds, far below the timeout."""


def interrupted(
    comm: Communicator,
    monkeypatch: pytest.MonkeyPatch,
    place: tuple[Any, str],
    run: Callable[[], object],
) -> None:
    """Rank 1 is interrupted in a function that ``run`` calls; the others hear who was."""
    function = getattr(*place)

    def interrupting(*args: Any, **options: Any) -> Any:
        if threading.current_thread().name == "rank 1":
            raise KeyboardInterrupt
        return function(*args, **options)

    comm.barrier()
    if comm.rank == 0:
        monkeypatch.setattr(*place, interrupting)
    comm.barrier()
    begin = time.monotonic()
    if comm.rank == 1:
        with pytest.raises(KeyboardInterrupt):
            run()
    else:
        with pytest.raises(PeerFailedError, match="rank 1 raised KeyboardInterrupt"):
            run()
    assert time.monotonic() - begin < WAIT


@on_ranks("in_process", 3)
@pytest.mark.parametrize(
    ("target", "place"),
    [
        ("c", (saving, "check_numbers")),
        ("c", (saving, "digest_of")),
        ("c", (DigestingWriter, "write_tensor")),
        ("c.safetensors", (saving, "check_numbers")),
        ("c.safetensors", (one_file, "_gather")),
    ],
    ids=[
        "directory-begun",
        "directory-compared",
        "directory-written",
        "file-begun",
        "file-gathered",
    ],
)
def test_amid_a_save(
    comm: Communicator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    place: tuple[Any, str],
) -> None:
    """Wherever the interrupt comes, the checkpoint before it stays whole."""
    path = tmp_path / target
    training = Training(comm, RECIPES["delayed"])
    save(path, training.optimizer, extra={"epoch": torch.tensor(1)})
    expected = training.masters()
    training.train(0)
    again = lambda: save(path, training.optimizer, extra={"epoch": torch.tensor(2)})  # noqa: E731
    interrupted(comm, monkeypatch, place, again)
    alone = Training(None, RECIPES["delayed"], seed=1)
    assert load(path, alone.optimizer).extra["epoch"] == 1
    assert_same_lists(alone.masters(), expected, "the one before")


@on_ranks("in_process", 3)
@pytest.mark.parametrize("name", ["read_manifest", "fill", "decode"])
def test_amid_a_load(
    comm: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """No rank has taken over anything."""
    training = Training(comm, RECIPES["delayed"])
    save(tmp_path / "c", training.optimizer, of_rank={"place": comm.rank})
    training.train(0)
    expected = held_by(training.optimizer)
    run = lambda: load(tmp_path / "c", training.optimizer)  # noqa: E731
    interrupted(comm, monkeypatch, (loading, name), run)
    assert_same_lists(held_by(training.optimizer), expected, "after the interrupt")


def test_the_draft_of_a_killed_save_is_removed(tmp_path: Path) -> None:
    """Of one file, by the next save of the run."""
    training = Training(None, RECIPES["delayed"])
    save(tmp_path / "c.safetensors", training.optimizer)
    run = read_manifest(tmp_path / "c.safetensors").run
    (tmp_path / f".{run}-{'0' * 16}.draft").write_bytes(b"half of a file" * 1000)
    save(tmp_path / "c.safetensors", training.optimizer)
    assert [each.name for each in tmp_path.iterdir()] == ["c.safetensors"]
    assert load(tmp_path / "c.safetensors", training.optimizer).steps == 0
