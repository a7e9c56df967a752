"""The kernels and the CPU library under sanitizers: nothing is touched outside of what a launch was
given, and nothing is computed whose result C++ leaves open. CI builds the CPU library's plain loops
so; the rest is nightly.

In a process of its own, into which the sanitizer is loaded first; every tensor is an allocation
whose bounds it knows.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_emulation.emulator import needs_emulation
from zerocast.backends import native_library

pytestmark = needs_emulation

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
from tests.cuda_emulation.emulator import Emulator, Mistake
from tests.kernels.subjects import SUBJECTS
from zerocast.backends.cuda import CudaBackend
mistake = Mistake(*sys.argv[1:]) if len(sys.argv) > 1 else None
flags = ("-fsanitize=address,alignment,bounds,shift", "-fno-sanitize-recover=all")
backend = CudaBackend(Emulator("random", max_grid=7, mistake=mistake, flags=flags))
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
            backend.fused_op(None, target)()
    backend.digest([DigestedBytes(drawn(count), first) for first, count in RANGES], sums)()
    check(backend)
print("clean", flush=True)
cut = drawn(70)
cut.untyped_storage().resize_(69)
backend.digest([DigestedBytes(cut)], sums[:1])()
"""

# Of each: arguments of cmake, and flags. What CI builds has loops over lanes in plain C++ alone,
# and the sanitizers that are quick to compile.
BUILDS = {
    "plain loops": (
        ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=any"],
        "-O0 -fsanitize=address,bounds,shift,signed-integer-overflow",
    ),
    "every instruction set": ([], "-O1 -fsanitize=address,undefined"),
}


def under_the_sanitizer(
    *arguments: str, program: str = PROGRAM
) -> subprocess.CompletedProcess[str]:
    """All operations on all cases, with a mistake planted or without."""
    library = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(library).is_absolute():
        pytest.skip("g++ has no address sanitizer here")
    environment = {
        **os.environ,
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path])),
    }
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True, text=True, env=environment, timeout=900,
    )  # fmt: skip


@pytest.mark.nightly
def test_kernels_stay_inside_of_their_tensors() -> None:
    """No kernel reads or writes past the end of a master, a code buffer, a plane or a table."""
    done = under_the_sanitizer()
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "clean\n"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "mistake",
    [
        ("partial_cast", "cuda/tiles.h", "element < end", "element <= end"),
        ("fused_op", "cuda/fused_plane.h", "if (!tile_.has_row(i)) continue;", ""),
    ],
    ids=lambda mistake: mistake[0],
)
def test_an_access_past_the_end_is_seen(mistake: tuple[str, ...]) -> None:
    """A master read one element past the shard's end, and rows of codes written past the last one,
    are found by the sanitizer itself.
    """
    done = under_the_sanitizer(*mistake)
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr[-3000:]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "build", ["plain loops", pytest.param("every instruction set", marks=pytest.mark.nightly)]
)
def test_the_cpu_library_stays_inside_and_is_well_defined(build: str, tmp_path: Path) -> None:
    """No loop of any instruction set reads or writes past the end of a tensor, overflows a signed
    integer or shifts too far, for NaNs of any payload either; a read of one byte too many is seen.
    """
    if shutil.which("cmake") is None:
        pytest.skip("cmake, which builds the library, is not here")
    target, flags = BUILDS[build]
    configure = ["-S", ROOT, "-B", tmp_path, "-DCMAKE_BUILD_TYPE=None", *target]
    for command in (
        [*configure, f"-DCMAKE_CXX_FLAGS=-g0 -fno-sanitize-recover=all {flags}"],
        ["--build", tmp_path, "--parallel", "4"],
    ):
        subprocess.run(["cmake", *command], capture_output=True, text=True, check=True)
    done = under_the_sanitizer(str(tmp_path / native_library.LIBRARY), program=CPU_PROGRAM)
    assert done.stdout == "clean\n", done.stderr[-3000:]
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr[-3000:]
