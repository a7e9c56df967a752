"""What of the comparison with TransformerEngine runs without a GPU and without a checkout of it.

The library is a stand-in that copies bytes; what it stands for is compiled and linked, and its
launches are timed, only where there is a checkout.
"""

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import bench_cuda
import bench_transformer_engine as beside
import build_transformer_engine as build
import cuda_report
import pytest
import torch

from tests.cuda_emulation.emulator import Emulator, needs_emulation
from zerocast.backends.cuda import CudaBackend

SCRIPTS = Path(__file__).parents[2] / "scripts"
SHAPES = [(48, 64), (34, 96), (256, 160)]


def test_the_table_is_the_drivers():
    """Python names the fields of a row, the steps and the schemes as the C++ driver declares
    them.
    """
    text = (SCRIPTS / "bench_transformer_engine.cpp").read_text()
    body = re.search(r"struct Weight \{(.*?)\};", text, re.DOTALL)
    assert body is not None
    fields = [
        name.strip(" *")
        for line in re.sub(r"//.*", "", body[1]).split(";")
        if line.strip()
        for name in re.sub(r"^\s*[\w:]+[ *]", "", line).split(",")
    ]
    assert tuple(fields) == beside.WEIGHT
    steps = re.search(r"enum Step : i64 \{ (.*), STEPS \}", text)
    schemes = re.search(r"enum Scheme : i64 \{ (.*) \}", text)
    assert steps is not None
    assert schemes is not None
    assert tuple(steps[1].lower().split(", ")) == beside.STEPS
    assert schemes[1].lower().split(", ") == sorted(beside.SCHEMES, key=beside.SCHEMES.get)


class CopyingDriver:
    """In the library's place: writes our results where it is told to write its own."""

    def __init__(self, fields: tuple[str, ...], work: object, nibbles: bool) -> None:
        self.fields, self.work, self.nibbles = fields, work, nibbles
        self.ran: list[tuple[bool, str]] = []

    def prepare(self, scheme: int, table: torch.Tensor, bf16: bool, flag: torch.Tensor) -> object:
        """Checks every row against the shard that it describes."""
        rows = [dict(zip(self.fields, row, strict=True)) for row in table.tolist()]
        for row, shard, master in zip(
            rows, self.work.shards, self.work.masters.tensors, strict=True
        ):
            assert (row["rows"], row["cols"]) == (shard.grid.rows, shard.grid.cols)
            assert (row["start"], row["owned"]) == (shard.extent.start, shard.extent.size)
            assert (row["master"] == 0) == (shard.extent.size == 0)
            if master is not None and not bf16:
                assert row["master"] == master.data_ptr()
        return SimpleNamespace(step=lambda name: self.step(rows, bf16, name), close=lambda: None)

    def step(self, rows: list[dict[str, int]], bf16: bool, name: str) -> None:
        """Copies."""
        self.ran.append((bf16, name))
        for row, shard, storage in zip(rows, self.work.shards, self.work.storages, strict=True):
            if name == "amax":
                wide = shard.grid.blocks_w
                for i in range(shard.grid.blocks_h):
                    ctypes.memmove(
                        row["block_amax"] + 4 * i * row["amax_cols"],
                        shard.planes[0].block_amax.data_ptr() + 4 * i * wide,
                        4 * wide,
                    )
            elif name == "cast":
                codes, per_byte = storage.buffers["rowwise_data"], 2 if self.nibbles else 1
                first, last = shard.extent.start // per_byte, -(-shard.extent.end // per_byte)
                ctypes.memmove(row["codes"], codes.data_ptr() + first, last - first)
            elif name == "transpose":
                assert row["gathered"] == storage.buffers["rowwise_data"].data_ptr()
                copy = storage.buffers["columnwise_data"]
                ctypes.memmove(row["columnwise"], copy.data_ptr(), copy.nbytes)


def run_once(work: Callable[[], object]) -> float:
    """In place of a clock."""
    work()
    return 1.0


@needs_emulation
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("recipe", ["nvfp4", "fp8", "fp8_blockwise"])
def test_compares_the_same_tensors(recipe, world_size):
    """The library is given our masters, shards and gathered codes; equal results are found equal,
    one byte of each kind changed is found once.
    """
    work = bench_cuda.prepare_rank_0(
        CudaBackend(Emulator()), bench_cuda.RECIPES[recipe], SHAPES, world_size, "cpu"
    )
    driver = CopyingDriver(beside.WEIGHT, work, recipe == "nvfp4")
    found = beside.compare(driver, recipe, work, (10, 0), run_once)
    assert found["differing"] == {"amax": 0, "cast": 0, "transpose": 0}
    assert found["not_run"] == {}
    assert driver.ran == [(bf16, step) for bf16 in (False, True) for step in beside.STEPS]

    class WrongDriver(CopyingDriver):
        def step(self, rows, bf16, name):
            super().step(rows, bf16, name)
            field = {"amax": "block_amax", "cast": "codes", "transpose": "columnwise"}.get(name)
            if field is not None:
                byte = ctypes.c_uint8.from_address(rows[0][field])
                byte.value ^= 1

    wrong = WrongDriver(beside.WEIGHT, work, recipe == "nvfp4")
    found = beside.compare(wrong, recipe, work, (10, 0), run_once)
    assert found["differing"] == {"amax": 1, "cast": 1, "transpose": 1}


@needs_emulation
def test_says_what_did_not_run():
    """A kernel that the device cannot run is not launched, one that fails ends no other: each has
    its reason on the page, and its goal stays open.
    """
    work = bench_cuda.prepare_rank_0(
        CudaBackend(Emulator()), bench_cuda.RECIPES["nvfp4"], SHAPES, 1, "cpu"
    )

    class FailingDriver(CopyingDriver):
        def step(self, rows, bf16, name):
            assert name != "cast", "capability 9.0 has no FP4 conversion"
            if name == "scale":
                raise RuntimeError("out of luck")
            super().step(rows, bf16, name)

    driver = FailingDriver(beside.WEIGHT, work, True)
    row = beside.compare(driver, "nvfp4", work, (9, 0), run_once)
    assert row["differing"] == {"amax": 0, "transpose": 0}
    row |= {"set": "llama", "recipe": "nvfp4", "world_size": 1}
    report = {"rows": [], "transformer_engine": {"version": "2.20", "rows": [row]}}
    page = "\n".join(cuda_report.transformer_engine(report))
    where = "- llama, nvfp4, rank 0 of 1: "
    assert f"{where}scale not run: out of luck." in page
    assert f"{where}cast not run: its NVFP4 cast converts by an instruction" in page
    assert "| llama | nvfp4 | 1 | amax | 1000.000 | 1000.000 | 1000.000 | 1.0 / 1.0 | 0 |" in page
    assert "| llama | nvfp4 | 1 | amax + cast | 2000.000 | - | - | - |  |" in page
    assert cuda_report.verdicts(report) == [
        "- nvfp4 beside TransformerEngine at rank 0 of 1: amax + cast not measured, 2.5 OPEN"
    ]


def test_the_verdict_counts_the_rounding():
    """The goal is held against the BF16 way, its rounding counted in: (1 + 1 + 2) / 0.4 is 10."""
    ours = {"amax": 0.2, "scale": 0.1, "cast": 0.2, "transpose": 0.1}
    theirs = {"amax": 1.0, "scale": 0.1, "cast": 2.0, "transpose": 0.1}
    row = {
        "set": "llama", "recipe": "fp8", "world_size": 64, "ours": ours, "FP32": theirs,
        "BF16": {**theirs, "round": 1.0}, "not_run": {}, "differing": {"cast": 7},
    }  # fmt: skip
    failed = {"set": "llama", "recipe": "nvfp4", "world_size": 64, "reason": "no memory"}
    report = {"rows": [], "transformer_engine": {"version": "2.20", "rows": [row, failed]}}
    page = "\n".join(cuda_report.transformer_engine(report))
    assert "| fp8 | 64 | amax + cast | 400.000 | 3000.000 | 4000.000 | 7.5 / 10.0 |" in page
    assert "| fp8 | 64 | cast | 200.000 | 2000.000 | 2000.000 | 10.0 / 10.0 | 7 |" in page
    assert "- llama, nvfp4, rank 0 of 64: not measured: no memory." in page
    assert cuda_report.verdicts(report) == [
        "- fp8 beside TransformerEngine at rank 0 of 64: amax + cast 10.0 times as fast, 10 met",
        "- nvfp4 beside TransformerEngine at rank 0 of 64: amax + cast not measured, 10 OPEN",
    ]


# --- building ---


def checkout(folder: Path) -> Path:
    """A folder that has the files of a checkout, empty."""
    for name in (
        "include/transformer_engine/transformer_engine.h",
        *build.SOURCES,
        *build.EMBEDDED,
    ):
        path = folder / build.COMMON / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


class Compiler:
    """In place of subprocess.run: takes note, and makes the file that was asked for."""

    def __init__(self, toolkit: Path) -> None:
        self.toolkit = toolkit
        self.commands: list[list[str]] = []
        self.fails_at = "nothing"

    def __call__(self, command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if "--dryrun" in command:
            return subprocess.CompletedProcess(command, 0, f"#$ TOP={self.toolkit}\n")
        if any(self.fails_at in word for word in command):
            return subprocess.CompletedProcess(command, 2, "a note\nx.cu(3): error: no\nmore\n")
        if "-o" in command:
            Path(command[command.index("-o") + 1]).write_text("made")
        return subprocess.CompletedProcess(command, 0, "")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """With a toolkit that has every library."""
    toolkit = tmp_path / "toolkit"
    (toolkit / "lib64").mkdir(parents=True)
    for name in ("cudart", *build.LIBRARIES):
        (toolkit / "lib64" / f"lib{name}.so").touch()
    compiler = Compiler(toolkit)
    monkeypatch.setattr(build.subprocess, "run", compiler)
    return compiler


def test_compiles_what_the_casts_call(compiler, tmp_path):
    """Each source is compiled for the one architecture, outside the checkout, once; a change in the
    checkout, or another architecture, makes another library.
    """
    root = checkout(tmp_path / "checkout")
    before = sorted(root.rglob("*"))
    made = build.library(root, "90", tmp_path / "build")
    assert made.read_text() == "made"
    assert sorted(made.parent.iterdir()) == [made], "work files stayed behind"
    assert sorted(root.rglob("*")) == before
    compiled = [c for c in compiler.commands if c[0] == "nvcc" and "-o" in c]
    assert len(compiled) == 1 + len(build.SOURCES)
    assert all("-gencode=arch=compute_90,code=sm_90" in c for c in compiled)
    assert [c[0] for c in compiler.commands].count("objcopy") == 1

    count = len(compiler.commands)
    assert build.library(root, "90", tmp_path / "build") == made
    assert len(compiler.commands) == count + 1, "only the toolkit is looked for"
    assert build.library(root, "100a", tmp_path / "build") != made
    (root / build.COMMON / "utils.cuh").write_text("changed")
    assert build.library(root, "90", tmp_path / "build") != made


def test_links_what_is_built(compiler, tmp_path):
    """Where the checkout holds its library, only the driver is compiled."""
    root = checkout(tmp_path / "checkout")
    ready = root / "libtransformer_engine.so"
    ready.touch()
    build.library(root, "90", tmp_path / "build")
    compiled = [c for c in compiler.commands if c[0] == "nvcc" and "-o" in c]
    assert [Path(c[c.index("-c") + 1]).name for c in compiled] == ["bench_transformer_engine.cpp"]
    assert str(ready) in compiler.commands[-1]


def test_says_why_there_is_no_library(compiler, tmp_path, capsys):
    """A folder that is no checkout, and a source that does not compile, give one line."""
    (tmp_path / "empty").mkdir()
    assert build.main([str(tmp_path / "empty")]) == 1
    assert capsys.readouterr().err == (
        "TransformerEngine of unknown version: no transformer_engine/common/include/"
        "transformer_engine/transformer_engine.h: is it a checkout, of about version 2.20?\n"
    )
    root = checkout(tmp_path / "checkout")
    compiler.fails_at = "nvfp4.cu"
    with pytest.raises(build.BuildError, match=r"^nvcc: x.cu\(3\): error: no$"):
        build.library(root, "90", tmp_path / "build")
    assert list((tmp_path / "build").iterdir()) == [], "work files stayed behind"


def test_architectures():
    """From capability 10.0 on a device has a target of its own."""
    assert build.architecture((9, 0)) == "90"
    assert build.architecture((10, 0)) == "100a"
