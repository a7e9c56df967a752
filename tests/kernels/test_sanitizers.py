"""The kernels and the CPU library under sanitizers: nothing is touched outside of what a launch was
given, nothing is computed whose result C++ leaves open, and no two threads touch one byte without
an order. CI builds the CPU library's plain loops so; the rest is nightly.
"""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cuda_emulation.emulator import Mistake, needs_emulation
from tests.support.sanitized import (
    ADDRESSES,
    ROOT,
    SOURCES,
    THREADS,
    compiled,
    linked,
    run,
    under_the_sanitizer,
)
from zerocast.backends import native_library

pytestmark = needs_emulation

PROGRAM = """
import sys
from tests.cuda_emulation.emulator import Emulator, Mistake
from tests.kernels.subjects import SUBJECTS
from tests.support import sanitized
from zerocast.backends.cuda import CudaBackend
flags, *mistake = sys.argv[1:]
mistake = Mistake(*mistake) if mistake else None
flags = getattr(sanitized, flags)
backend = CudaBackend(Emulator("random", max_grid=2, mistake=mistake, flags=flags))
for subject in SUBJECTS.values():
    subject(backend, alone=True)
print("clean")
"""


CPU_PROGRAM = """
import sys
from pathlib import Path
import torch
from tests.kernels.subjects import SUBJECTS
from tests.support.fused_ops import FUNCTIONS, float64_target
from tests.support.operations import operand
from zerocast.backends import native_library
native_library.find_library = lambda: Path(sys.argv[1])
from tests.backends.test_changes import check
from tests.backends.test_digest import RANGES, drawn
from zerocast.backends.cpu import CpuBackend
from zerocast.layout import BlockGrid, Extent
from zerocast.numerics import DigestedBytes, FusedOp, Masters
# NaNs and infinities of both signs, with the smallest and the largest payloads, and FP32's ends.
bits = [0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFF000, 0x7FFFFFFF, 0x7F7FFFFF, 1, 0, 0x477FF000]
ends = torch.tensor(bits * 4 + [b - 2**31 for b in bits * 4], dtype=torch.int32)
ends = ends.view(torch.float32)
grid, sums = BlockGrid(2, 36, 2, 36), torch.zeros(len(RANGES), dtype=torch.int64)
for isa in native_library.instruction_sets(native_library.load()):
    backend = CpuBackend(isa, threads=1)
    for subject in SUBJECTS.values():
        subject(backend, alone=True)
    for nominal in (torch.float32, torch.bfloat16, torch.float16):
        masters, amaxes = Masters(1), torch.zeros(2, dtype=torch.int32)
        masters.bind([ends])
        shard = operand(grid, amaxes[:1], amaxes[1:], extent=Extent(0, 72), round_to=nominal)
        backend.partial_amax([shard], masters)()
        for function in FUNCTIONS:
            target = float64_target(FusedOp(function, 1e-5), ends.view(2, 36), nominal)
            backend.fused_op(target)()
    backend.digest([DigestedBytes(drawn(count), first) for first, count in RANGES], sums)()
    check(backend)
print("clean", flush=True)
cut = drawn(70)
cut.untyped_storage().resize_(69)
backend.digest([DigestedBytes(cut)], sums[:1])()
"""

AT_ONCE_PROGRAM = """
import sys
from pathlib import Path
from tests.kernels.at_once import run
run(Path(sys.argv[1]), sys.argv[2:])
print("clean")
"""


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "flags"), [("asan", "ADDRESSES"), ("tsan", "THREADS")])
def test_kernels(name: str, flags: str) -> None:
    """No kernel reads or writes past the end of a master, a code buffer, a plane or a table, or
    computes what is undefined; and no two threads of a block touch one byte, of which one writes,
    without a barrier between them.
    """
    done = under_the_sanitizer(name, PROGRAM, flags, timeout=1700)
    assert done.stdout == "clean\n", done.stderr[-3000:]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "flags", "mistake", "found"),
    [
        ("asan", "ADDRESSES", ("partial_cast", "cuda/tiles.h", "element < end", "element <= end"),
         "AddressSanitizer: heap-buffer-overflow"),
        ("asan", "ADDRESSES",
         ("fused_op", "cuda/fused_op.cu", "unit < units", "unit <= units"),
         "AddressSanitizer: heap-"),  # a row further on may lie in memory that was freed
        ("tsan", "THREADS",
         ("dequantize", "cuda/dequantize.cu", "__syncthreads();\n        decode_tile",
          "decode_tile"),
         "ThreadSanitizer: data race"),
        ("tsan", "THREADS",
         ("dequantize", "cuda/dequantize.cu", "__syncthreads();  // before the next tile", "//"),
         "ThreadSanitizer: data race"),
        ("tsan", "THREADS",
         ("partial_select", "cuda/partial_select.cu", "__syncwarp();\n            auto vector",
          "auto vector"),
         "ThreadSanitizer: data race"),
        ("tsan", "THREADS",
         ("partial_select", "cuda/partial_select.cu", "__syncwarp();  // before the next", "//"),
         "ThreadSanitizer: data race"),
    ],
    ids=["element past the end", "row past the end", "barrier", "barrier between tiles",
         "barrier of a warp", "barrier of a warp between blocks"],
)  # fmt: skip
def test_a_mistake_in_a_kernel_is_seen(
    name: str, flags: str, mistake: tuple[str, ...], found: str
) -> None:
    """A master read one element past the shard's end, a row read and written past the last one, and
    memory written while other threads read it, are found by the sanitizer itself.
    """
    done = under_the_sanitizer(name, PROGRAM, flags, *mistake, timeout=1700)
    assert done.returncode != 0
    assert found in done.stderr, done.stderr[-3000:]


def check_cpu_library(library: Path) -> None:
    """Nothing is found but what is planted."""
    done = under_the_sanitizer("asan", CPU_PROGRAM, str(library))
    assert done.stdout == "clean\n", done.stderr[-3000:]
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr[-3000:]


@pytest.mark.timeout(1800)
def test_the_cpu_library_stays_inside_and_is_well_defined(tmp_path: Path) -> None:
    """No plain loop reads or writes past the end of a tensor, overflows a signed integer, shifts
    too far or loads what is not aligned for it, for NaNs of any payload either; a read of one byte
    too many is seen.
    """
    check_cpu_library(linked(tmp_path, compiled(tmp_path, ADDRESSES), ADDRESSES))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_every_instruction_set_stays_inside_and_is_well_defined(tmp_path: Path) -> None:
    """Nor does a loop of another instruction set, as CMake builds them."""
    if shutil.which("cmake") is None:
        pytest.skip("cmake, which builds the library, is not here")
    flags = f"-DCMAKE_CXX_FLAGS=-g0 -O1 {' '.join(ADDRESSES)}"
    run(["cmake", "-S", str(ROOT), "-B", str(tmp_path), "-DCMAKE_BUILD_TYPE=None", flags])
    run(["cmake", "--build", str(tmp_path), "--parallel", "4"])
    check_cpu_library(tmp_path / native_library.LIBRARY)


# --- threads ---


@dataclass(frozen=True)
class Watched:
    """The CPU library's plain loops under the thread sanitizer.

    Attributes:
        sources: in which a thread is worth 256 elements, so that small launches have teams.
        objects: by the name of their unit.
    """

    sources: Path
    objects: dict[str, Path]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """Compiled once."""
    folder = tmp_path_factory.mktemp("threads")
    sources = Path(shutil.copytree(SOURCES, folder / "sources"))
    worth = "ELEMENTS_PER_THREAD = 1 << "
    Mistake("", "cpu/launch.h", f"{worth}16", f"{worth}8").plant(sources)
    return Watched(sources, compiled(folder, THREADS, sources=sources))


def launched_at_once(
    folder: Path, objects: dict[str, Path], *subjects: str
) -> subprocess.CompletedProcess[str]:
    """All subjects or these, from several threads that launch teams of several threads."""
    library = linked(folder, objects, THREADS, Path(__file__).with_name("at_once.cpp"))
    return under_the_sanitizer("tsan", AT_ONCE_PROGRAM, str(library), *subjects)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_launches_at_once_do_not_race(watched: Watched, tmp_path: Path) -> None:
    """Neither the threads of a launch nor those that launch at once touch one byte without an
    order: with masters, data and tables in common, of which nothing is written.
    """
    done = launched_at_once(tmp_path, watched.objects)
    assert done.stdout == "clean\n", done.stderr[-3000:]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("mistake", "subject"),
    [
        (Mistake("digest", "cpu/digest.cpp",
                 "__atomic_fetch_add(target.sum, digest, __ATOMIC_RELAXED)",
                 "*target.sum += digest"), "digests"),
        (Mistake("casts", "cpu/plane_amax.h", "return num_threads > 1 &&", "return false &&"),
         "nvfp4"),
        (Mistake("casts", "cpu/launch.h", ": 128;", ": 1;"), "nvfp4"),
    ],
    ids=["a sum", "amaxes of a block", "nibbles of a byte"],
)  # fmt: skip
def test_a_race_is_seen(mistake: Mistake, subject: str, watched: Watched, tmp_path: Path) -> None:
    """Two threads that add to a digest's sum, raise a block's amax or write a byte of codes, as
    they would without an atomic operation or between cuts at any element.
    """
    sources = Path(shutil.copytree(watched.sources, tmp_path / "sources"))
    mistake.plant(sources)
    changed = compiled(tmp_path, THREADS, [mistake.source], sources)
    done = launched_at_once(tmp_path, {**watched.objects, **changed}, subject)
    assert done.returncode != 0
    assert "ThreadSanitizer: data race" in done.stderr, done.stderr[-3000:]
