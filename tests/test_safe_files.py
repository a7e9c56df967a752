"""Files that others may have written: what small ones may make this process take, wait for, import
or print. Each is read in a child, with limits of memory and time; what it took is measured.
"""

import contextlib
import copy
import io
import json
import os
import pickle
import resource
import secrets
import signal
import struct
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp

import zerocast
from tests.optim.training import Training
from tests.support.child_process import in_child
from tests.support.recipes import RECIPES
from zerocast.cast.fault_file import read_fault, write_fault
from zerocast.checkpoint import load, save
from zerocast.cli import main
from zerocast.comm import SingleRank
from zerocast.errors import DeltaError, InputError, VerificationError, ZerocastError
from zerocast.export import load_pretrained
from zerocast.refit import Receiver
from zerocast.refit.delta import packed, whole_segment
from zerocast.tensors.digest import digest

MIB = 2**20
SECONDS = 60
"""After which a child is ended: what is refused is refused in less than one."""

DCP = b"ctorch.distributed.checkpoint.metadata\n"


class Told(NamedTuple):
    """What a child printed, and what it took."""

    code: int
    out: str
    err: str
    grown: int
    threads: int
    imported: set[str]


def run(commands: list[list[str]], good: list[str]) -> list[Told]:
    """In a child: run commands after a good one, which imports and maps what all need."""
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):
        main(good)
    most = status("VmSize") + 6 * 1024 * MIB
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return [run_one(command) for command in commands]


def run_one(command: list[str]) -> Told:
    """Run a command, and measure what it takes."""
    before, now = set(sys.modules), status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    signal.alarm(SECONDS)
    threads, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            threads.append(len(os.listdir("/proc/self/task")))

    watcher = threading.Thread(target=watch)
    watcher.start()
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(command)
    finally:
        over.set()
    watcher.join()
    grown, imported = status("VmHWM") - now, set(sys.modules) - before
    return Told(code, out.getvalue(), err.getvalue(), grown, max(threads), imported)


def status(what: str) -> int:
    """Bytes, of this process."""
    (line,) = [s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith(what)]
    return 1024 * int(line.split()[1])


def told(paths: list[Path], command: str = "inspect") -> list[Told]:
    """What a command says of each of ``paths``: within the limits, and no traceback."""
    good = paths[0].parent / "good.pt"
    torch.save({"w": torch.ones(3)}, good)
    commands = [[command, str(path)] for path in paths]
    found = in_child(run, commands, ["inspect", str(good)])
    assert found is not None, "one was not done in time"
    for path, each in zip(paths, found, strict=True):
        files = [path] if path.is_file() else list(path.rglob("*"))
        size = sum(file.stat().st_size for file in files)
        assert each.grown <= max(64 * MIB, 10 * size), f"{path}: {each.grown / MIB:.0f} MiB"
    return found


def refused(paths: list[Path], command: str = "inspect") -> list[str]:
    """The error of one line with which a command ends for each of ``paths``."""
    found = told(paths, command)
    for each in found:
        assert (each.code, each.out, each.err.count("\n")) == (2, "", 1), each
    return [each.err for each in found]


# --- inspect: directories of torch.distributed.checkpoint ---


def directory(path: Path, edit: Callable[[Any], None] = lambda metadata: None) -> Path:
    """One with a tensor ``w`` [4, 4] of two pieces and a number, whose metadata were edited."""
    dcp.save({"w": torch.ones(2, 4), "other": torch.ones(2, 4), "n": 3}, checkpoint_id=path)
    with (path / ".metadata").open("rb") as file:
        given: Any = pickle.load(file)
    pieces, places = given.state_dict_metadata, given.storage_data
    pieces["w"].size = torch.Size([4, 4])
    (second,) = [index for index in places if index.fqn == "other"]
    index = copy.copy(second)
    vars(index).update(fqn="w", offset=torch.Size([2, 0]))
    places[index] = places.pop(second)
    del pieces["other"]
    edit(given)
    (path / ".metadata").write_bytes(pickle.dumps(given))
    return path


def piece(given: Any, last: bool = False) -> Any:
    """Where a piece of ``w`` is."""
    return [info for index, info in given.storage_data.items() if index.fqn == "w"][-last]


def size(*dimensions: int) -> Callable[[Any], None]:
    """Let the metadata say another shape."""

    def edit(given: Any) -> None:
        given.state_dict_metadata["w"].size = torch.Size(dimensions)

    return edit


EDITS: dict[str, tuple[Callable[[Any], None], str]] = {
    "2^40 elements": (size(2**20, 2**20), "missing"),
    "2^64 elements": (size(2**62, 4), "missing"),
    "-5 elements": (size(-5), "missing"),
    "a long piece": (lambda given: vars(piece(given)).update(length=2**40), "more bytes"),
    "a piece less": (
        lambda given: [
            given.storage_data.pop(each) for each in list(given.storage_data) if each.fqn == "w"
        ][:0],
        "missing",
    ),
    "a piece of another place": (
        lambda given: vars(piece(given)).update(vars(piece(given, last=True)), relative_path="x"),
        "No such file",
    ),
    "pieces without end": (lambda given: vars(piece(given)).update(length=-1), "cannot be read"),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is")  # no process group
def test_a_directory_of_pieces_is_read(tmp_path: Path) -> None:
    """Those of the edits below, before they are edited."""
    (found,) = told([directory(tmp_path / "dcp")])
    assert found.code == 0
    assert found.out.splitlines()[2].split() == ["w", "4x4", "float32", "64", "B", "1", "0.00", "%"]
    assert "1 entries are not tensors: n." in found.out


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_pieces_that_are_missing_or_claimed(tmp_path: Path) -> None:
    """What is not there is said to be missing, and nothing is allocated for it."""
    paths = [directory(tmp_path / str(i), edit) for i, (edit, _) in enumerate(EDITS.values())]
    for (edit, (_, text)), error in zip(EDITS.items(), refused(paths), strict=True):
        assert text in error, edit


def paths(doublings: int) -> bytes:
    """A path of twice the parts of the one before, and so on."""
    made = b"cpathlib\nPosixPath\n(X\x01\x00\x00\x00atRq\x00"
    return b"\x80\x02" + made + b"0cpathlib\nPosixPath\n(h\x00h\x00tRq\x00" * doublings + b"."


def many(head: bytes, each: bytes) -> bytes:
    """A list of 5,000 numbers, of which 4,000 objects are made."""
    return b"\x80\x02](" + b"K\x01" * 5000 + b"eq\x00" + head + each * 4000 + b"."


METADATA = {
    "memo": b"\x80\x02Nr" + struct.pack("<I", 2**27) + b".",
    "text of a memo": b"\x80\x02Np134217728\n.",
    "array": b"\x80\x05\x96" + struct.pack("<Q", 2**33) + b".",
    "paths": paths(27),
    "sizes": many(b"ctorch\nSize\nq\x01", b"h\x01h\x00\x85R"),
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b".",
    "module": b"\x80\x02ctorch.testing._internal.common_utils\nTestCase\n.",
    "lazy module": b"\x80\x02ctorch\nonnx\n.",
    "call": b"\x80\x02cos\nmkdir\nX\x01\x00\x00\x00x\x85R.",
    "nothing": b"",
    "another object": b"\x80\x02" + DCP + b"Metadata\n)\x81.",
    "attributes": b"\x80\x02" + DCP + b"Metadata\n)\x81}(" + b"".join(
        b"X\x04\x00\x00\x00%04dN" % i for i in range(1000)) + b"ub.",
}  # fmt: skip


def test_metadata_of_a_few_bytes(tmp_path: Path) -> None:
    """They take no memory that is not in the file, and import and call nothing."""
    for case, content in METADATA.items():
        (tmp_path / case).mkdir()
        (tmp_path / case / ".metadata").write_bytes(content)
    found = told([tmp_path / case for case in METADATA])
    for case, each in zip(METADATA, found, strict=True):
        assert (each.code, each.err.count("\n")) == (2, 1), case
        assert "is not that of torch.distributed.checkpoint" in each.err
        assert not {name for name in each.imported if name.startswith("torch.")}, case


# --- inspect: files ---


def pt(
    path: Path, state: Any, pickled: bytes | None = None, kind: int = zipfile.ZIP_STORED
) -> Path:
    """A file of torch.save whose pickle or whose compression is another."""
    saved, path = io.BytesIO(), path / "w.pt"
    torch.save(state, saved)
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(path, "w", kind) as new:
        for name in old.namelist():
            is_other = pickled is not None and name.endswith("data.pkl")
            new.writestr(name, pickled if is_other else old.read(name))
    return path


FILES: dict[str, Callable[[Path], Path]] = {
    "expanded": lambda p: pt(p, {"w": torch.zeros(1).expand(2**34)}),
    "compressed": lambda p: pt(p, {"w": torch.zeros(2**27)}, kind=zipfile.ZIP_DEFLATED),
    "bytearray": lambda p: pt(
        p, {}, b"\x80\x02cbuiltins\nbytearray\nJ" + struct.pack("<i", 2**30) + b"\x85R."
    ),
    "memo": lambda p: pt(p, {}, METADATA["text of a memo"]),
    "deep": lambda p: pt(p, {}, b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b"."),
    "doubled": lambda p: pt(p, {}, b"\x80\x02]q\x00" + b"](h\x00h\x00eq\x00" * 40 + b"."),
}


def test_files_of_a_few_bytes(tmp_path: Path) -> None:
    """Files of torch.save that would take gigabytes are refused; of tensors without values, as on
    the meta device, the rest is shown.
    """
    for case in FILES:
        (tmp_path / case).mkdir()
    refused([make(tmp_path / case) for case, make in FILES.items()])
    (found,) = told([pt(tmp_path, {"w": torch.empty(2**40, device="meta")})])
    assert found.code == 0
    assert "1099511627776" in found.out


def test_a_header_longer_than_any(tmp_path: Path) -> None:
    """A sparse file that says that 8 GiB of it are its header is refused unread, by whoever reads
    such files.
    """
    path = tmp_path / "run.safetensors"
    with path.open("wb") as file:
        file.write((2**33).to_bytes(8, "little"))
        file.truncate(2**34)
    assert refused([path])
    assert refused([path], "reproduce")
    grown = in_child(growth_of_load, path)
    assert grown is not None
    assert grown < 64 * MIB


def growth_of_load(path: Path) -> int:
    """What loading a checkpoint takes that is refused."""
    signal.alarm(SECONDS)
    training = Training()
    now = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    with pytest.raises(InputError, match="header would have"):
        load(path, training.optimizer)
    return status("VmHWM") - now


# --- pipes ---


def refusals(cases: list[tuple[Callable[[Path], Any], Path]]) -> list[str]:
    """In a child: the errors."""
    errors = []
    for read, path in cases:
        signal.alarm(SECONDS)
        with pytest.raises(ZerocastError) as raised:
            read(path)
        errors.append(str(raised.value))
    return errors


def load_training(path: Path) -> None:
    """From a checkpoint."""
    load(path, Training().optimizer)


def inspect(path: Path) -> None:
    """As the command does."""
    zerocast.cli.inspection.inspect(path)


PIPES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a checkpoint": (load_training, "run.safetensors"),
    "a manifest": (load_training, "run/checkpoint.json"),
    "a file of tensors": (load_pretrained, "model/model.safetensors"),
    "a file to look at": (inspect, "other.safetensors"),
    "a file of a directory": (inspect, "dcp/__0_0.distcp"),
    "a fault": (read_fault, "fault.safetensors"),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_nothing_is_waited_for(tmp_path: Path) -> None:
    """A pipe in a file's place is refused."""
    directory(tmp_path / "dcp")
    (tmp_path / "dcp" / "__0_0.distcp").rename(tmp_path / "dcp" / "bytes")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "run").mkdir()
    cases = []
    for read, name in PIPES.values():
        os.mkfifo(tmp_path / name)
        parent, _, _ = name.rpartition("/")
        cases.append((read, tmp_path / (parent or name)))
    said = in_child(refusals, cases)
    assert said is not None, "one was waited for"
    for case, error in zip(PIPES, said, strict=True):
        assert "is not a regular file" in error, case


# --- what is printed ---


def test_names_move_no_cursor(tmp_path: Path) -> None:
    """Control characters and line ends in names are printed as escapes, in tables and errors."""
    name = "w\x1b[2J\n0.0 %\u202e"
    torch.save({name: torch.ones(2), "x" + name: 3}, tmp_path / "w.pt")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"\x80\x02cposix\x1b[2J\nmkdir\n.")
    found, error = told([tmp_path / "w.pt", tmp_path / "dcp"])
    assert found.out.count("\n") == 5
    assert r"w\x1b[2J\n0.0 %\u202e" in found.out
    assert r"not tensors: xw\x1b[2J\n0.0 %\u202e." in found.out
    assert r"posix\x1b[2J.mkdir" in error.err


# --- reproduce ---


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What verify leaves of a weight [96, 64] under delayed scaling."""
    monkeypatch.chdir(tmp_path)
    weight = zerocast.empty((96, 64), RECIPES["delayed"])
    plan = zerocast.CastPlan(
        [weight], [torch.linspace(-3, 3, 96 * 64)], [0], SingleRank(), verify="full"
    )
    plan.cast()
    plan.all_gather()
    weight.quantized_storage.buffers["rowwise_data"].view(-1)[3] ^= 1
    with pytest.raises(VerificationError):
        plan.verify()
    (path,) = tmp_path.glob("zerocast-fault*")
    return path


def edited(path: Path, **changes: Any) -> Path:
    """A fault file that says something else."""
    described, tensors = read_fault(path)
    path = path.with_name(f"fault-{secrets.token_hex(4)}.safetensors")
    write_fault(path, described | changes, tensors)
    return path


def test_as_many_threads_as_help(fault: Path) -> None:
    """3,000 owners are played by 16 threads, and the bytes are right."""
    owners = [[i, 2 * i, 2 * i + 2] for i in range(3072)]
    (found,) = told([edited(fault, owners=owners, name="w\x1b[2J\n")], "reproduce")
    assert found.code == 1
    assert r"w\x1b[2J\n (96, 64)" in found.out
    line = "cast from the shards of 3072 ranks on 16 threads: the bytes that the reference casts"
    assert line in found.out
    assert found.threads < 16 + 8


def test_what_a_fault_file_says_is_that_of_its_tensors(fault: Path) -> None:
    """Owners own every element once; a history of 2^29 amaxes is refused before it is allocated,
    and so are many tensors of the same bytes, whose copies would take gigabytes.
    """
    wrong: list[list[list[int]]] = [[[0, 0, 6000]], [[0, 0, 4000], [1, 3000, 6144]], []]
    cases = [(edited(fault, owners=each), "must own every element") for each in wrong]
    name, fields = json.loads(read_fault(fault)[0]["recipe"])
    text = json.dumps([name, fields | {"amax_history_len": 2**29}])
    cases.append((edited(fault, recipe=text), "its recipe must be"))
    data = fault.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header |= {f"held/{i}": header["master"] for i in range(100_000)}
    text = json.dumps(header).encode()
    fault.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    cases.append((fault, "overlaps the tensor before it"))
    for (_, text), error in zip(cases, refused([c for c, _ in cases], "reproduce"), strict=True):
        assert text in error


# --- deltas ---


@pytest.mark.parametrize("dtype", [torch.quint8, torch.uint1, torch.quint4x2])
def test_deltas_of_dtypes_that_cannot_be_held(dtype: torch.dtype) -> None:
    """A delta whose seal is right is refused by its own error, and nothing is held."""
    data, receiver = torch.zeros(4, dtype=torch.uint8), Receiver()
    delta = packed(
        [whole_segment(data)], since=None, version=1, total=int(digest(data)), shape=[4],
        dtype=dtype,
    )  # fmt: skip
    with pytest.raises(DeltaError, match="damaged in transfer"):
        receiver.apply_delta("w", delta)
    assert not receiver.tensors


def test_deltas_of_shapes_that_torch_has_not() -> None:
    """Of no elements, beside dimensions that do not fit in 64 bits."""
    data = torch.zeros(0, dtype=torch.uint8)
    shape = [2**40, 2**40, 0]
    delta = packed(
        [whole_segment(data)], since=None, version=1, total=int(digest(data)), shape=shape,
        dtype=torch.uint8,
    )  # fmt: skip
    with pytest.raises(DeltaError, match="damaged in transfer"):
        Receiver().apply_delta("w", delta)


# --- what is written ---


def test_a_fault_file_follows_no_link(tmp_path: Path) -> None:
    """One at its name is refused, and what it leads to stays."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "fault").symlink_to(tmp_path / "mine")
    with pytest.raises(FileExistsError):
        write_fault(tmp_path / "fault", {}, {"master": torch.ones(1)})
    assert (tmp_path / "mine").read_text() == "mine"


def test_new_directories_are_synced_in_their_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that a save makes, for a directory and for one file: a loss of power forgets none."""
    synced, sync = list[str](), os.fsync

    def record(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        sync(handle)

    monkeypatch.setattr(os, "fsync", record)
    optimizer = Training().optimizer
    save(tmp_path / "runs" / "a", optimizer)
    save(tmp_path / "files" / "b" / "run.safetensors", optimizer)
    for made in ("", "runs", "runs/a", "files", "files/b"):
        assert str(tmp_path / made) in synced
