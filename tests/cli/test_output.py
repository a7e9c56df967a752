"""What commands write: never over what exists, unless asked; never over what they read."""

import io
import itertools
import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from zerocast.cli import COMMANDS, conformance, inspection, main, output
from zerocast.lab.conformance import Pack


@pytest.fixture
def model(tmp_path) -> Path:
    """A checkpoint of one tensor."""
    path = tmp_path / "model.pt"
    torch.save({"a": torch.ones(3)}, path)
    return path


@pytest.fixture
def quick(monkeypatch) -> None:
    """Let packs take no time to be made."""
    monkeypatch.setattr(conformance, "packs", lambda: [Pack("values", "e4m3", "", [])])


def commands(model: Path) -> dict[str, tuple[list[str], object, str]]:
    """By command its arguments up to the path that it writes to, and what does its work."""
    return {
        "inspect": (["inspect", str(model), "--html"], inspection, "entries"),
        "conform": (["conform", "--packs"], conformance, "packs"),
    }


@pytest.mark.parametrize("name", ["inspect", "conform"])
def test_a_command_overwrites_nothing_unless_asked(
    name, tmp_path, model, quick, monkeypatch, capsys
):
    """A file that exists, a link, and one to nowhere, are refused before the work, and stay;
    --overwrite replaces a file or a link, not what it leads to; a new one needs no option. Nothing
    else is left beside it.
    """
    arguments, module, work = commands(model)[name]
    output = tmp_path / "output"
    written = output / "values-e4m3.json" if name == "conform" else output
    written.parent.mkdir(exist_ok=True)
    target = tmp_path / "target"
    target.write_text("kept")
    for make in (
        lambda: written.write_text("kept"),
        lambda: written.symlink_to(target),
        lambda: written.symlink_to(tmp_path / "nowhere"),
    ):
        make()
        before = written.lstat().st_ino, written.lstat().st_mtime_ns
        with monkeypatch.context() as patch:
            patch.setattr(module, work, lambda *given, **options: pytest.fail("worked"))
            assert main([*arguments, str(output)]) == 2
        assert "exists; choose another file, or give --overwrite" in capsys.readouterr().err
        assert (written.lstat().st_ino, written.lstat().st_mtime_ns) == before
        assert not (tmp_path / "nowhere").exists()
        if written.exists():
            assert main([*arguments, str(output), "--overwrite"]) == 0
            assert not written.is_symlink()
            assert written.read_text() != "kept"
        written.unlink()
        (output / "SHA256SUMS").unlink(missing_ok=True) if output.is_dir() else None
    assert target.read_text() == "kept"
    assert main([*arguments, str(output)]) == 0
    assert written.stat().st_size
    assert {path.name for path in tmp_path.iterdir()} == {"model.pt", "output", "target"}
    assert len(list(written.parent.iterdir())) == (2 if name == "conform" else 3)


@pytest.mark.filterwarnings("ignore:torch.distributed is")  # no process group
@pytest.mark.parametrize("way", ["itself", "its hard link", "its link", "another path"])
@pytest.mark.parametrize("option", [[], ["--overwrite"]])
def test_no_command_writes_to_what_it_reads(tmp_path, model, quick, way, option, capsys):
    """Whatever its name: the file, or a file of a directory."""
    folder = tmp_path / "folder"
    dcp.save({"a": torch.ones(3)}, checkpoint_id=folder)
    piece = next(folder.glob("*.distcp"))
    for arguments, read in (
        (["inspect", str(model), "--html"], model),
        (["inspect", str(folder), "--html"], piece),
        (["inspect", str(tmp_path), "--html"], model),
    ):
        other = tmp_path / "other"
        if way == "its hard link":
            os.link(read, other)
        elif way == "its link":
            other.symlink_to(read)
        output = {"itself": read, "another path": read.parent / ".." / read.parent.name / read.name}
        before = read.read_bytes()
        assert main([*arguments, str(output.get(way, other)), *option]) == 2
        assert "is read by the command" in capsys.readouterr().err
        assert read.read_bytes() == before
        other.unlink(missing_ok=True)


def test_a_command_that_fails_writes_nothing(tmp_path, model, quick, monkeypatch, capsys):
    """The old file stays whole, and no draft beside it; nor is one put over what another program
    wrote meanwhile, or over what is no file.
    """
    page = tmp_path / "page.html"
    page.write_text("kept")
    assert main(["inspect", str(tmp_path / "none.pt"), "--html", str(page), "--overwrite"]) == 2
    assert main(["inspect", str(model), "--html", str(tmp_path), "--overwrite"]) == 2
    assert main(["inspect", str(model), "--html", os.devnull, "--overwrite"]) == 2
    assert main(["conform", "--packs", str(page), "--overwrite"]) == 2
    capsys.readouterr()
    new, entries = tmp_path / "new.html", inspection.entries

    def meanwhile(path):
        new.write_text("another's")
        return entries(path)

    monkeypatch.setattr(inspection, "entries", meanwhile)
    assert main(["inspect", str(model), "--html", str(new)]) == 2
    assert "File exists" in capsys.readouterr().err
    assert (page.read_text(), new.read_text()) == ("kept", "another's")
    assert {path.name for path in tmp_path.iterdir()} == {"model.pt", "new.html", "page.html"}


def test_a_file_has_the_mode_of_the_umask(tmp_path, model, quick):
    """And its directory is made."""
    before = os.umask(0o027)
    try:
        assert main(["inspect", str(model), "--html", str(tmp_path / "a" / "page.html")]) == 0
    finally:
        os.umask(before)
    assert (tmp_path / "a" / "page.html").stat().st_mode & 0o777 == 0o640


def test_every_command_prints_json_alone(tmp_path, quick, capsys):
    """One document on stdout, without NaN and infinity, which JSON does not have."""
    library = pytest.importorskip("safetensors.torch")
    for name, values in (("a", [3e38, torch.inf]), ("b", [-3e38, 1.0])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        weights = {"x": torch.tensor(values), "y.weight": torch.ones(32, 32)}
        library.save_file(weights, tmp_path / name / "model.safetensors")
    a, b, packs = str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "packs")
    found = {}
    for command, *arguments in (
        ("doctor",), ("inspect", a), ("checksums", a), ("compare", a, b),
        ("convert", b, str(tmp_path / "c"), "--to", "modelopt/mxfp8", "--verify"),
        ("estimate", "llama-8b", "--dp", "8"), ("conform", "torch"),
        ("conform", "--packs", packs),
    ):  # fmt: skip
        main([command, *arguments, "--json"])
        found[command] = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert {*found, "reproduce"} == set(COMMANDS)
    (differing,) = found["compare"]["differences"]
    assert (differing["name"], differing["largest"]) == ("x", None)
    assert found["conform"] == {"packs": 1, "written": 1}


def test_progress_is_shown_in_terminals_alone(monkeypatch):
    """After two seconds, with the time left; the line is removed at the end."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stderr, told in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(output.sys, "stderr", stderr)
        clock = itertools.count(0, 1.5)  # a second and a half between any two looks at it
        monkeypatch.setattr(output.time, "monotonic", lambda clock=clock: next(clock))
        with output.progress("inspect", 8_000_000) as add:
            add(1_000_000)
            assert not stderr.getvalue()
            add(1_000_000)
            line = "inspect: 2.00 MB of 8.00 MB, 666.67 kB a second, 0 min 09 s left"
            assert (line in stderr.getvalue()) == told
        assert stderr.getvalue().endswith(f"\r{'':79}\r" if told else "")
        with output.progress("conform", 4, "packs") as add:
            add(1)
            add(1)
            assert ("conform: 2 of 4 packs, 0 min 03 s left" in stderr.getvalue()) == told
