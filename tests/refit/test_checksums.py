"""Checksums are those of the bytes in the files, by a reader that knows nothing of zerocast."""

import copy
import hashlib
import json
from pathlib import Path

import pytest
import torch

import zerocast
from tests.support.exports import of_masters, update
from tests.support.models import Pair
from tests.support.ranks import run_ranks
from tests.support.serving import LINEAR_ALONE
from zerocast.cli import main
from zerocast.export import save_pretrained
from zerocast.refit import Receiver, Refit, checksums


def of_file(path: Path) -> dict[str, str]:
    """By name, of the bytes that the header of a safetensors file says are a tensor's."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    header.pop("__metadata__", None)
    return {
        name: hashlib.sha256(data[slice(*each["data_offsets"])]).hexdigest()
        for name, each in header.items()
    }


def of_folder(folder: Path) -> dict[str, str]:
    """Of all files."""
    return {
        name: each for file in folder.glob("*.safetensors") for name, each in of_file(file).items()
    }


def told(capsys, *arguments) -> dict[str, str]:
    """What the command says as JSON."""
    assert main(["checksums", "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "world_size"),
    [(name, 3) for name in LINEAR_ALONE] + [(n, 1) for n in LINEAR_ALONE[::5]],
)
def test_checksums_are_those_of_the_files(tmp_path, capsys, name, world_size):
    """Of an export of the same masters in several files; on every rank, of what a receiver got by
    deltas, and by the command line.
    """
    torch.manual_seed(0)
    base = Pair(k=96, hidden=224, norm=True).bfloat16()
    zerocast.nn.convert(base, "nvfp4")
    assert len(list(base.parameters())) == 6

    def run(comm):
        model, receiver = copy.deepcopy(base), Receiver()
        options = {"bucket_bytes": 9000, "group": comm, **of_masters(model, comm)}
        save_pretrained(model, tmp_path, dialect=name, **options)
        refit = Refit(model, name, **options)
        update(refit, receiver)
        return checksums(model, name, **options), refit.checksums(), receiver.checksums()

    found = run_ranks("in_process" if world_size > 1 else "single_rank", world_size, run)
    expected = of_folder(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert len(expected) in (8, 10)  # two of six parameters are stored with scales
    assert all(each == expected for of_rank in found for each in of_rank)
    assert told(capsys, tmp_path) == expected
    assert len(set(expected.values())) > 6


def test_ranks_hash_a_part_each(monkeypatch):
    """Of 4 equal tensors and their scales each of 2 ranks hashes two."""
    hashed = []
    sha256 = zerocast.refit.sha256.sha256
    monkeypatch.setattr(
        zerocast.refit.sha256, "sha256", lambda each: hashed.append(each.nbytes) or sha256(each)
    )
    base = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
    zerocast.nn.convert(base.bfloat16(), "mxfp8")

    def run(comm):
        model = copy.deepcopy(base)
        return checksums(model, "modelopt/mxfp8", group=comm, **of_masters(model, comm))

    first, second = run_ranks("in_process", 2, run)
    assert first == second
    assert sorted(hashed) == 4 * [128] + 4 * [4096], "no tensor twice"


def test_checksums_of_experts_in_one_tensor():
    """In the blocks of gpt-oss: of the bytes that are sent."""
    experts = zerocast.CastPlan(
        [zerocast.empty((2, 64, 64), "mxfp4", dtype=torch.bfloat16)],
        [torch.randn(2, 64, 64)],
        [0],
        None,
        names=["mlp.experts.gate_up_proj"],
    )
    refit = Refit(experts, "gpt-oss/mxfp4", from_masters=True)
    sent = dict(refit.named_tensors())
    assert list(sent) == ["mlp.experts.gate_up_proj_blocks", "mlp.experts.gate_up_proj_scales"]
    assert refit.checksums() == {
        name: hashlib.sha256(each.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, each in sent.items()
    }


def test_every_dtype_and_shape(tmp_path, capsys):
    """An empty tensor, a number, one that is not contiguous, and one of several parts."""
    library = pytest.importorskip("safetensors.torch")
    held = {
        "empty": torch.empty(0, 3), "number": torch.tensor(3, dtype=torch.int64),
        "transposed": torch.arange(6, dtype=torch.bfloat16).view(2, 3).mT,
        "bool": torch.tensor([True, False]), "large": torch.arange(5_000_000, dtype=torch.int32),
        "scales": torch.tensor([1, 2], dtype=torch.uint8).view(torch.float8_e8m0fnu),
    }  # fmt: skip
    library.save_file({n: t.contiguous() for n, t in held.items()}, tmp_path / "a.safetensors")
    expected = of_file(tmp_path / "a.safetensors")
    assert Receiver(held).checksums() == expected
    assert told(capsys, tmp_path / "a.safetensors") == expected


def written(path: Path, header: dict, data: bytes) -> Path:
    """A safetensors file."""
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(start: int, end: int) -> dict:
    """Of the header."""
    return {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}


def test_lines_are_those_of_sha256sum(tmp_path, capsys):
    """In the order of the files and of the bytes in them; what a terminal would take is escaped."""
    written(tmp_path / "b.safetensors", {"c\x1b": entry(0, 1)}, b"c")
    written(tmp_path / "a.safetensors", {"b": entry(2, 3), "a": entry(0, 2)}, b"aab")
    assert main(["checksums", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{hashlib.sha256(data).hexdigest()}  {name}"
        for data, name in ((b"aa", "a"), (b"b", "b"), (b"c", "c\\x1b"))
    ]


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry(0, 2), "b": entry(1, 3)}, b"aab", "b does not begin where"),
        ({"a": entry(0, 2), "b": entry(3, 4)}, b"aabb", "b does not begin where"),
        ({"a": entry(0, -1)}, b"", "a does not begin where"),
        ({"a": entry(0, 2)}, b"aab", "other bytes than the file"),
        ({"a": entry(0, 2)}, b"a", "other bytes than the file"),
        ({"a": {"data_offsets": [0]}}, b"", "not a readable .safetensors file"),
        ({"a": 3}, b"", "not a readable .safetensors file"),
    ],
)
def test_damaged_files_are_refused(tmp_path, capsys, header, data, message):
    """By name; nothing is printed of the others."""
    written(tmp_path / "a.safetensors", {"fine": entry(0, 1)}, b"a")
    damaged = written(tmp_path / "b.safetensors", header, data)
    assert main(["checksums", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert str(damaged) in said.err
    assert message in said.err


def test_what_has_no_checksums_is_refused(tmp_path, capsys):
    """A path that is not there, no files of tensors, an empty file, and two tensors of one name."""
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    for path in (tmp_path / "none", tmp_path, empty):
        assert main(["checksums", str(path)]) == 2
        assert str(path) in capsys.readouterr().err
    for name in "ab":
        written(tmp_path / f"{name}.safetensors", {"w": entry(0, 1)}, b"a")
    assert main(["checksums", str(tmp_path)]) == 2
    assert "two tensors w, the second in b.safetensors" in capsys.readouterr().err
