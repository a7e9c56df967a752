"""The kernels under the address sanitizer: nothing is touched outside of what a launch was given.

In a process of its own, into which the sanitizer is loaded first; every tensor is an allocation
whose bounds it knows.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_emulation.emulator import needs_emulation

pytestmark = [needs_emulation, pytest.mark.slow]

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


def under_the_sanitizer(*mistake: str) -> subprocess.CompletedProcess[str]:
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
        [sys.executable, "-c", PROGRAM, *mistake],
        capture_output=True, text=True, env=environment, timeout=250,
    )  # fmt: skip


def test_kernels_stay_inside_of_their_tensors() -> None:
    """No kernel reads or writes past the end of a master, a code buffer, a plane or a table."""
    done = under_the_sanitizer()
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "clean\n"


def test_a_read_past_the_end_is_seen() -> None:
    """A master read one element past the shard's end is found by the sanitizer itself."""
    done = under_the_sanitizer(
        "partial_cast", "include/zerocast/tiles.h", "element < end", "element <= end"
    )
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr[-3000:]
