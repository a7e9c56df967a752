"""Mistakes planted in the fused kernels are caught by what the tests compare; and the kernels stay
inside of their tensors.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

import zerocast
from tests.cuda_emulation.emulator import ORDERS, Emulator, KernelFault, Mistake, needs_emulation
from tests.support.child_process import in_child
from tests.support.fused_ops import RECIPES, parameters, quantizer_of
from tests.support.values import draw_values
from zerocast.backends.cuda import CudaBackend
from zerocast.backends.cuda.sources import cuda_sources
from zerocast.nn.fused import apply_fused
from zerocast.numerics import FusedOp

pytestmark = needs_emulation

ROOT = Path(__file__).parents[2]
TILE, PLANE, KERNEL = "cuda/fused_tile.h", "cuda/fused_plane.h", "cuda/fused_op.cu"
ARITHMETIC = "arithmetic/fused_op.h"
BARRIER = "__syncthreads();"
BARRIERS = range((cuda_sources() / PLANE).read_text().count(BARRIER))
ANY_COLS = ("delayed", "current", "rowwise", "blocks 1x128", "blocks 128x128")


def run(backend: CudaBackend, function: str, alone: bool = False) -> dict[str, torch.Tensor]:
    """All that is written, under every recipe, in more than one tile of a thread block.

    ``alone``: with a source that is an allocation of its own, and small, for the sanitizer is slow.
    """
    written = {}
    for name, recipe in RECIPES.items():
        rows, cols = (133, 163) if name in ANY_COLS else (136, 160)
        if alone:
            cols = 35 if name in ANY_COLS else 32
        kind = "wide" if function == "silu" else "normal"
        x = draw_values(kind, rows * cols, 1).view(rows, cols)
        x = x.clone() if alone else x
        quantizer = quantizer_of(recipe)
        with zerocast.use_backend(backend):
            made = apply_fused(
                FusedOp(function), x, quantizer, output=True,
                statistics=True, **parameters(function, cols, 2),
            )  # fmt: skip
        assert made.quantized is not None
        written |= {
            f"{name} {key}": b for key, b in made.quantized.quantized_storage.buffers.items()
        }
        others = {"output": made.output, "mean": made.mean, "rstd": made.rstd}
        written |= {f"{name} {key}": t for key, t in others.items() if t is not None}
        if quantizer.slot is not None:
            written[f"{name} amax"] = quantizer.slot._state.amaxes.clone()  # type: ignore[attr-defined]
    return written


@cache
def expected(function: str) -> dict[str, bytes]:
    """What kernels without a mistake write."""
    return in_bytes(run(CudaBackend(Emulator()), function))


def is_caught(function: str, file: str, right: str, wrong: str, nth: int = 0) -> bool:
    """Whether any order of threads shows other bytes, or a fault."""
    mistake = Mistake("fused_op", file, right, wrong, nth)
    return in_child(shows, function, mistake, expected(function)) is not False


def shows(function: str, mistake: Mistake, expected: dict[str, bytes]) -> bool:
    """As :func:`is_caught`, in a process whose memory the mistake may overwrite."""
    for order in ORDERS:
        backend = CudaBackend(Emulator(order, max_grid=2, mistake=mistake))
        try:
            made = run(backend, function)
        except KernelFault:
            return True
        if in_bytes(made) != expected:
            return True
    return False


def in_bytes(written: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """The same, to be sent to another process."""
    return {name: t.contiguous().view(torch.uint8).numpy().tobytes() for name, t in written.items()}


@pytest.mark.parametrize("function", ["silu", "layernorm"])
def test_without_a_mistake_nothing_is_seen(function: str) -> None:
    """An edit that changes nothing passes, so what the other tests see is the mistake."""
    assert not is_caught(function, TILE, "zerocast {", "zerocast {")


@pytest.mark.parametrize("nth", BARRIERS)
def test_a_missing_barrier(nth: int) -> None:
    """Each barrier of a tile is needed, and its absence shows in some order of threads."""
    assert is_caught("silu", PLANE, BARRIER, "", nth)


@pytest.mark.parametrize(
    ("function", "file", "right", "wrong"),
    [
        ("silu", TILE, "count >= 4 ? 4", "count >= 3 ? 4"),
        ("silu", PLANE, "tile_.has_row(i) ? existing", "tile_.row(i) <= 0 ? existing"),
        ("silu", PLANE, "largest >= INFINITY_BITS", "largest > 0"),
        ("silu", PLANE, "r < scales.rows", "r + 1 < scales.rows"),
        ("silu", PLANE, "log2_w == 0 ? j : 0", "log2_w == 0 ? 0 : 0"),
        ("silu", ARITHMETIC, "x * e.mantissa, x)", "x, x)"),
        ("layernorm", ARITHMETIC, "+ eps * power * power", "+ eps * 2.0f"),
        ("layernorm", KERNEL, "if (j < left) part", "part"),
        ("layernorm", KERNEL, "part[1].add(part[3]", "part[1].add(part[2]"),
    ],
)
def test_a_wrong_line(function: str, file: str, right: str, wrong: str) -> None:
    """Wrong edges, indices and arithmetic show as other bytes."""
    assert is_caught(function, file, right, wrong)


def test_a_missing_barrier_of_a_warp() -> None:
    """So does a missing barrier between the statistics of a warp's rows and their use."""
    assert is_caught("layernorm", KERNEL, "__syncwarp();", "", 1)


# --- under the address sanitizer, in a process of its own ---

PROGRAM = """
import sys
from tests.cuda_emulation.emulator import Emulator, Mistake
from tests.kernels.test_fused_mistakes import run
from zerocast.backends.cuda import CudaBackend
mistake = Mistake(*sys.argv[1:]) if len(sys.argv) > 1 else None
flags = ("-fsanitize=address,alignment,bounds,shift", "-fno-sanitize-recover=all")
backend = CudaBackend(Emulator("random", max_grid=7, mistake=mistake, flags=flags))
run(backend, "silu", alone=True)
run(backend, "layernorm", alone=True)
print("clean")
"""


def under_the_sanitizer(*mistake: str) -> subprocess.CompletedProcess[str]:
    """All recipes, with a mistake planted or without."""
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


@pytest.mark.nightly
def test_kernels_stay_inside_of_their_tensors() -> None:
    """No kernel reads or writes past the end of a tensor that it was given."""
    done = under_the_sanitizer()
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "clean\n"


@pytest.mark.nightly
def test_a_write_past_the_end_is_seen() -> None:
    """A tile that writes rows past the last one is found by the sanitizer itself."""
    done = under_the_sanitizer("fused_op", PLANE, "if (!tile_.has_row(i)) continue;", "")
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr[-3000:]
