"""A save replaces what its own run has saved, and nothing else: whoever else saves there."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.support.claims import message_of
from tests.support.ranks import on_ranks
from zerocast import quantize
from zerocast.checkpoint import load, one_file, parts, save, writing
from zerocast.checkpoint.dcp_storage import Reader, Writer
from zerocast.checkpoint.files import DigestingWriter
from zerocast.checkpoint.manifest import read_manifest
from zerocast.checkpoint.parts import DirectorySave
from zerocast.checkpoint.runs import alone_in
from zerocast.comm import Communicator, SingleRank, run_in_process
from zerocast.errors import InputError, ZerocastError
from zerocast.optim import ZeroOptimizer

SHAPE = (48, 32)
PLACES = "c", "c.safetensors"


def job(value: float, comm: Communicator | None = None, name: str = "w") -> ZeroOptimizer:
    """The optimizer of one weight that is ``value`` everywhere."""
    weight = torch.nn.Parameter(quantize(torch.full(SHAPE, value), "nvfp4"))
    return ZeroOptimizer([(name, weight)], group=comm or SingleRank())


def value_at(path: Path, name: str = "w") -> float:
    """The value of the weight that a checkpoint holds."""
    fresh = job(0.0, name=name)
    load(path, fresh)
    return fresh.gather_master(fresh.named_weights[name])[0, 0].item()


def bytes_below(path: Path) -> dict[str, bytes]:
    """All files of a directory."""
    return {each.name: each.read_bytes() for each in path.iterdir()}


class Paused:
    """A call that stops in one thread, by its name, until it is told to go on."""

    def __init__(self, patch: pytest.MonkeyPatch, place: tuple[Any, str], thread: str) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        function = getattr(*place)

        def call(*args: Any, **options: Any) -> Any:
            if threading.current_thread().name == thread and not self.reached.is_set():
                self.reached.set()
                assert self.go.wait(60)
            return function(*args, **options)

        patch.setattr(*place, call)


class Beside:
    """A call in a thread of a name; what it raised is there once it has ended."""

    def __init__(self, name: str, run: Callable[[], object]) -> None:
        self.error: BaseException | None = None

        def body() -> None:
            try:
                run()
            except BaseException as error:
                self.error = error

        self._thread = threading.Thread(target=body, name=name)
        self._thread.start()

    def end(self) -> BaseException | None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.error

    def is_given_up(self) -> bool:
        """Whether it has ended, because another job saves into the same place."""
        error = self.end()
        return isinstance(error, ZerocastError) and "another job saves into" in str(error)


# --- whose it is ---


@pytest.mark.parametrize("place", PLACES)
@on_ranks("in_process", 2)
def test_the_checkpoint_of_another_run_is_refused_and_stays(
    comm: Communicator, tmp_path: Path, place: str
) -> None:
    """On every rank, to the byte; with ``replace`` nothing of it stays."""
    first, other = job(1.0, comm), job(2.0, comm)
    save(tmp_path / place, first)
    save(tmp_path / place, first)  # again and again
    comm.barrier()
    folder = tmp_path / place if place == "c" else tmp_path
    before = bytes_below(folder)
    comm.barrier()
    message = message_of(InputError, save, tmp_path / place, other)
    assert "has neither made nor loaded it" in message
    assert "replace=True" in message
    comm.barrier()
    assert bytes_below(folder) == before
    comm.barrier()
    save(tmp_path / place, other, replace=True)
    comm.barrier()
    assert len(bytes_below(folder)) == (3 if place == "c" else 1)
    assert value_at(tmp_path / place) == 2.0
    comm.barrier()


@pytest.mark.parametrize("place", PLACES)
def test_a_job_that_has_not_loaded_does_not_replace(tmp_path: Path, place: str) -> None:
    """The successor is the same run once it has loaded, and so is its own successor."""
    save(tmp_path / place, job(1.0))
    for value in (2.0, 3.0):
        successor = job(value)
        with pytest.raises(InputError, match="has neither made nor loaded it"):
            save(tmp_path / place, successor)
        load(tmp_path / place, successor)
        save(tmp_path / place, successor)
    assert value_at(tmp_path / place) == 1.0


def test_an_exported_file_is_not_replaced(tmp_path: Path) -> None:
    """Nor one that cannot be read, nor a directory whose manifest is damaged."""
    from safetensors.torch import save_file

    optimizer = job(1.0)
    save(tmp_path / "c", job(2.0))
    (tmp_path / "c" / "checkpoint.json").write_text("{")
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "x.safetensors").write_text("mine")
    for name, file in (
        ("model.safetensors", "model.safetensors"),
        ("x.safetensors", "x.safetensors"),
        ("c", "c/checkpoint.json"),
    ):
        before = (tmp_path / file).read_bytes()
        with pytest.raises(InputError, match=r"cannot be replaced: .*replace=True"):
            save(tmp_path / name, optimizer)
        assert (tmp_path / file).read_bytes() == before
        save(tmp_path / name, optimizer, replace=True)
        assert value_at(tmp_path / name) == 1.0
    assert len(list((tmp_path / "c").iterdir())) == 2


def test_a_part_of_what_was_saved_together_is_another_run(tmp_path: Path) -> None:
    """One optimizer of a list would remove the masters of the others."""
    pair = [job(1.0, name="a"), job(2.0, name="b")]
    save(tmp_path, pair)
    for given in (pair[0], pair[1:], [*pair, job(3.0, name="c")]):
        with pytest.raises(InputError, match="has neither made nor loaded it"):
            save(tmp_path, given)
    save(tmp_path, pair[::-1])
    assert load(tmp_path, [job(0.0, name="b"), job(0.0, name="a")]).steps == 0


@pytest.mark.filterwarnings("ignore:.*single process")
def test_a_writer_given_to_dcp_replaces_its_own_saves(tmp_path: Path) -> None:
    """Several by one writer; another writer's only with ``replace``."""
    path, found = tmp_path / "c", {"a": torch.empty(4)}
    writer = Writer(path)
    for value in (1.0, 2.0):
        dcp.save({"a": torch.full((4,), value)}, storage_writer=writer)
    with pytest.raises(CheckpointException, match="has neither made nor loaded it"):
        dcp.save({"a": torch.zeros(4)}, storage_writer=Writer(path))
    dcp.load(found, storage_reader=Reader(path))
    assert torch.equal(found["a"], torch.full((4,), 2.0))
    dcp.save({"a": torch.zeros(4)}, storage_writer=Writer(path, replace=True))
    dcp.load(found, storage_reader=Reader(path))
    assert torch.equal(found["a"], torch.zeros(4))
    assert len(os.listdir(path)) == 2


# --- two at once ---


@pytest.mark.parametrize("place", PLACES)
def test_of_two_first_saves_the_later_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Two stages on groups of their own, both of which found nothing: on every rank of the later,
    and nothing of it is left.
    """
    stages = {name: job(value, name=name) for name, value in (("a", 1.0), ("b", 2.0))}
    pause = Paused(monkeypatch, (DigestingWriter, "finish"), "b")
    late = Beside("b", lambda: save(tmp_path / place, stages["b"]))
    assert pause.reached.wait(60)
    save(tmp_path / place, stages["a"])
    pause.go.set()
    assert late.is_given_up()
    assert value_at(tmp_path / place, "a") == 1.0
    assert len(list(tmp_path.rglob("*"))) == (3 if place == "c" else 1)


def test_groups_of_ranks_that_save_into_one_directory(tmp_path: Path) -> None:
    """Whoever is later raises on each of its ranks, and the other's checkpoint is whole."""
    stages = [*range(2)] * 2

    def body(comm: Communicator) -> str:
        own = comm.split(stages[comm.rank])  # type: ignore[attr-defined]
        optimizer = job(float(1 + stages[comm.rank]), own, f"stage{stages[comm.rank]}")
        comm.barrier()
        try:
            save(tmp_path / "c", optimizer)
        except ZerocastError:
            return "refused"
        return "saved"

    heard = run_in_process(4, body)
    assert heard[0::2] in (["saved"] * 2, ["refused"] * 2)
    assert heard[1::2] in (["saved"] * 2, ["refused"] * 2)
    assert "saved" in heard
    assert heard[0] != heard[1]
    stage = heard.index("saved")
    assert value_at(tmp_path / "c", f"stage{stage}") == 1.0 + stage
    assert len(list((tmp_path / "c").iterdir())) == 3


def twins(path: Path) -> tuple[ZeroOptimizer, ZeroOptimizer]:
    """A job, and its successor that has loaded what it saved."""
    old, new = job(1.0), job(2.0)
    save(path, old)
    load(path, new)
    return old, new


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_job_that_is_not_quite_dead_loses_nothing_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """The old one is between its parts and its manifest while the new one saves: the old hears it,
    and the new one's checkpoint stays whole.
    """
    old, new = twins(tmp_path)
    thread = "zerocast-save" if asynchronous else "old"
    pause = Paused(monkeypatch, (DirectorySave, "end"), thread)

    def run() -> None:
        pending = save(tmp_path, old, asynchronous=asynchronous)
        if pending is not None:
            pending.wait()

    late = Beside("old", run)
    assert pause.reached.wait(60)
    save(tmp_path, new)
    pause.go.set()
    assert late.is_given_up()
    last = read_manifest(tmp_path).saved
    assert sorted(bytes_below(tmp_path)) == sorted(
        ["checkpoint.json", f"{read_manifest(tmp_path).run}-{last}-rank00000.safetensors"]
    )
    assert value_at(tmp_path) == 1.0
    with pytest.raises(InputError, match="neither made nor loaded"):  # and at the next save again
        save(tmp_path, old)
    load(tmp_path, old)
    save(tmp_path, old)


@pytest.mark.parametrize("place", PLACES)
def test_a_manifest_that_came_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Where the files of this save are still there, too."""
    old, new = twins(tmp_path / place)
    target = (DirectorySave, "end") if place == "c" else (DigestingWriter, "finish")
    pause = Paused(monkeypatch, target, "new")
    late = Beside("new", lambda: save(tmp_path / place, new))
    assert pause.reached.wait(60)
    for module in (parts, one_file):
        remove = "remove_saved" if module is parts else "remove_files"
        monkeypatch.setattr(module, remove, lambda *_: None)  # as if it had begun before
    save(tmp_path / place, old)
    last = read_manifest(tmp_path / place).saved
    pause.go.set()
    assert late.is_given_up()
    assert read_manifest(tmp_path / place).saved == last
    assert value_at(tmp_path / place) == 1.0


def test_no_two_jobs_put_a_manifest_in_place_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file system has locks; a process that was forked meanwhile keeps none."""
    optimizer = job(1.0)
    save(tmp_path, optimizer)
    before = bytes_below(tmp_path)
    with alone_in(tmp_path):
        with pytest.raises(ZerocastError, match="another job is saving into .* now"):
            save(tmp_path, optimizer)
        links = {fd: os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
        inherited = [os.dup(int(fd)) for fd, path in links.items() if path == str(tmp_path)]
        assert inherited
    assert bytes_below(tmp_path) == before
    save(tmp_path, optimizer)
    for each in inherited:
        os.close(each)

    def none(*_: int) -> None:
        raise OSError(95, "not supported")

    monkeypatch.setattr("fcntl.flock", none)
    save(tmp_path, optimizer)


def test_a_file_is_never_the_half_of_another_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs write one file at once; the first to end puts its own in place."""
    path = tmp_path / "c.safetensors"
    a, b = twins(path)
    pauses = {n: Paused(monkeypatch, (DigestingWriter, "write_tensor"), n) for n in "ab"}
    first = Beside("a", lambda: save(path, a))
    assert pauses["a"].reached.wait(60)
    other = Beside("b", lambda: save(path, b))
    assert pauses["b"].reached.wait(60)
    pauses["a"].go.set()
    assert first.is_given_up()  # b has taken its draft for that of a dead save
    assert value_at(path) == 1.0
    pauses["b"].go.set()
    assert other.end() is None
    assert value_at(path) == 1.0
    assert os.listdir(tmp_path) == ["c.safetensors"]


# --- where it is ---


@pytest.mark.parametrize("ending", [".draft", "-rank00000.safetensors"])
def test_a_link_in_the_directory_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """A save writes new files only, though somebody knows their names."""
    (tmp_path / "mine").write_text("mine")
    optimizer = job(1.0)
    save(tmp_path / "c", optimizer)
    before = read_manifest(tmp_path / "c")
    begin = DirectorySave.begin

    def linking(self: DirectorySave) -> None:
        begin(self)
        (self.path / f"{self.claim.prefix}{ending}").symlink_to(tmp_path / "mine")

    monkeypatch.setattr(DirectorySave, "begin", linking)
    with pytest.raises(ZerocastError, match="FileExistsError"):
        save(tmp_path / "c", optimizer)
    assert (tmp_path / "mine").read_text() == "mine"
    assert read_manifest(tmp_path / "c") == before


def test_a_link_under_a_name_of_old_is_not_followed(tmp_path: Path) -> None:
    """It is no file of a save."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".checkpoint.json.draft").symlink_to(tmp_path / "mine")
    with pytest.raises(InputError, match="which zerocast did not save"):
        save(tmp_path / "c", job(1.0))
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("by", ["directory", "link"])
def test_a_thread_writes_where_the_path_led_when_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Though the program has gone to another directory, or the link leads elsewhere."""
    here, there = tmp_path / "here", tmp_path / "there"
    for each, value in ((here, 1.0), (there, 2.0)):
        each.mkdir()
        save(each / "run", job(value))
    (tmp_path / "link").symlink_to(here)
    monkeypatch.chdir(here)
    optimizer = job(0.0)
    load("run", optimizer)
    optimizer.load_state_dict(job(3.0).state_dict())
    pause = Paused(monkeypatch, (DigestingWriter, "__init__"), "zerocast-save")
    path = "run" if by == "directory" else tmp_path / "link" / "run"
    pending = save(path, optimizer, asynchronous=True)
    assert pending is not None
    assert pause.reached.wait(60)
    monkeypatch.chdir(there)
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(there)
    pause.go.set()
    pending.wait()
    assert value_at(here / "run") == 3.0
    assert value_at(there / "run") == 2.0


# --- what fails leaves nothing ---


def failing_in(threads: set[int], function: Callable[..., Any], error: Exception) -> Any:
    """The function, which fails in these threads."""

    def call(*args: Any, **options: Any) -> Any:
        if threading.get_ident() in threads:
            raise error
        return function(*args, **options)

    return call


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The threads for which the disk is full where a file ends."""
    threads = set[int]()
    finish = failing_in(threads, DigestingWriter.finish, OSError(28, "no space"))
    monkeypatch.setattr(DigestingWriter, "finish", finish)
    return threads


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_save_leaves_no_file(
    tmp_path: Path, full: set[int], place: str, rank: int
) -> None:
    """Of any rank, whichever failed; the checkpoint before it stays."""
    if place != "c" and rank:
        rank = 0  # which alone writes

    def body(comm: Communicator) -> None:
        optimizer = job(1.0, comm)
        save(tmp_path / place, optimizer)
        comm.barrier()
        before = sorted(tmp_path.rglob("*"))
        comm.barrier()
        if comm.rank == rank:
            full.add(threading.get_ident())
        for _ in range(2):
            with pytest.raises(ZerocastError, match="no space"):
                save(tmp_path / place, optimizer)
            comm.barrier()
            assert sorted(tmp_path.rglob("*")) == before
            comm.barrier()
        full.discard(threading.get_ident())
        save(tmp_path / place, optimizer)

    run_in_process(2, body)
    assert value_at(tmp_path / place) == 1.0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_save_beside_the_training_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Nor a note of any rank, whichever failed, once it has been waited for."""
    write = writing.write_part

    def full(path: Path, *given: Any) -> Any:
        if f"rank0000{rank}" in path.name:
            raise OSError(28, "no space")
        return write(path, *given)

    def body(comm: Communicator) -> None:
        optimizer = job(1.0, comm)
        save(tmp_path, optimizer)
        comm.barrier()
        before = sorted(os.listdir(tmp_path))
        comm.barrier()
        if comm.rank == 0:
            monkeypatch.setattr(writing, "write_part", full)
        comm.barrier()
        pending = save(tmp_path, optimizer, asynchronous=True)
        assert pending is not None
        with pytest.raises(ZerocastError, match="no space"):
            pending.wait()
        comm.barrier()
        assert sorted(os.listdir(tmp_path)) == before
        comm.barrier()
        if comm.rank == 0:
            monkeypatch.undo()
        comm.barrier()
        save(tmp_path, optimizer)

    run_in_process(3, body)
    assert value_at(tmp_path) == 1.0


def test_parts_of_dead_saves_make_room_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of this run; another run's may be on their way to its manifest."""
    optimizer = job(1.0)
    save(tmp_path, optimizer)
    run = read_manifest(tmp_path).run
    dead = [f"{run}-{'0' * 16}-rank0000{i}.safetensors" for i in range(3)]
    dead.append(f"{run}-{'0' * 16}.draft")
    other = f"{'1' * 16}-{'0' * 16}-rank00000.safetensors"
    for name in (*dead, other):
        (tmp_path / name).write_bytes(b"half of a file")
    begin, seen = DigestingWriter.__init__, []

    def looking(self: DigestingWriter, path: Path) -> None:
        seen.append(set(os.listdir(tmp_path)))
        begin(self, path)

    monkeypatch.setattr(DigestingWriter, "__init__", looking)
    save(tmp_path, optimizer)
    assert not seen[0] & {*dead}
    assert len(seen[0]) == 3  # the checkpoint before it, and the other's
    assert other in os.listdir(tmp_path)
    save(tmp_path, optimizer, replace=True)
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize(
    ("place", "target"),
    [("c", (writing, "_copied")), ("c.safetensors", (one_file.torch, "empty"))],
    ids=["copy", "gather"],
)
def test_a_rank_without_memory_raises_on_all_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, target: tuple[Any, str]
) -> None:
    """Where a save copies shares or gathers tensors; training and saving go on."""
    threads = set[int]()
    monkeypatch.setattr(*target, failing_in(threads, getattr(*target), MemoryError("no memory")))

    def body(comm: Communicator) -> None:
        optimizer = job(1.0, comm)
        save(tmp_path / place, optimizer)
        asked = {"asynchronous": True} if place == "c" else {}
        comm.barrier()
        if comm.rank == 1:
            threads.add(threading.get_ident())
        comm.barrier()
        assert "no memory" in message_of(
            ZerocastError, lambda: save(tmp_path / place, optimizer, **asked)
        )
        threads.discard(threading.get_ident())
        for weight in optimizer.named_weights.values():
            weight.grad = torch.ones(SHAPE)
        optimizer.step()
        save(tmp_path / place, optimizer, **asked)
        assert load(tmp_path / place, optimizer).steps == 1

    run_in_process(3, body, timeout=60)


@pytest.mark.parametrize("keep", [lambda t: [t], lambda t: {"latest": t}])
def test_state_that_would_not_come_back_is_refused(tmp_path: Path, keep: Any) -> None:
    """Tensors inside of a list or dict that an optimizer keeps of a weight: by name, at the save,
    and what was saved before stays.
    """
    optimizer = job(1.0)
    save(tmp_path / "c", optimizer)
    (weight,) = optimizer.inner.param_groups[0]["params"]
    optimizer.inner.state[weight]["window"] = keep(torch.ones(3))
    message = message_of(InputError, save, tmp_path / "c", optimizer)
    assert "under 'window' of w" in message, message
    assert value_at(tmp_path / "c") == 1.0


def test_state_of_one_rank_that_would_not_come_back_is_refused_on_all(tmp_path: Path) -> None:
    """Of a matrix that one rank steps, the other has no state."""

    def run(comm: Communicator) -> str:
        weight = torch.nn.Parameter(quantize(torch.ones(SHAPE), "nvfp4"))
        optimizer = ZeroOptimizer([("w", weight)], group=comm, shard="matrix")
        for own in optimizer.inner.param_groups[0]["params"]:
            if own.numel():
                optimizer.inner.state[own]["window"] = [torch.ones(3)]
        return message_of(InputError, save, tmp_path / "c", optimizer)

    assert all("under 'window' of w" in said for said in run_in_process(2, run))


@pytest.mark.parametrize("differ", [lambda rank: torch.full((3,), float(rank)), lambda rank: rank])
def test_state_of_a_torch_optimizer_that_only_one_rank_would_save_is_refused(
    tmp_path: Path, differ: Callable[[int], Any]
) -> None:
    """What is no part of a sharded tensor is saved once: other values on other ranks are refused
    on all, and state that one rank alone has is not.
    """

    def run(comm: Communicator) -> str:
        model = torch.nn.Linear(32, 32, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = optimizer.state[model.weight]
        state["same"] = torch.ones(3)
        if comm.rank == 1:
            state["own"] = torch.ones(3)
        save(tmp_path / "c", optimizer, model, group=comm)
        state["window"] = differ(comm.rank)
        return message_of(InputError, save, tmp_path / "c", optimizer, model, group=comm)

    assert all("'window' of weight is neither" in said for said in run_in_process(2, run))
