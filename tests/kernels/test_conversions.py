"""What the kernels convert by other means than the shared text gives the bits of that text, and can
be switched off.
"""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.cuda_emulation.emulator import HEADER, needs_emulation
from tests.kernels.test_compile import CASTS, CONVERSIONS, needs_nvrtc, ptx
from zerocast.backends.cuda.kernel_sources import cuda_sources

PROGRAM = Path(__file__).with_name("conversions.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-w", "-include", str(HEADER))


def differing(folder: Path, mistakes: Mapping[str, str] = MappingProxyType({})) -> str:
    """What the program says, of a text with these mistakes: wrong lines by right ones."""
    (folder / "cuda").mkdir()
    text = (cuda_sources() / "cuda/conversions.h").read_text()
    for right, wrong in mistakes.items():
        assert right in text
        text = text.replace(right, wrong, 1)
    (folder / "cuda/conversions.h").write_text(text)
    include = (f"-I{folder}", f"-I{cuda_sources()}")
    made = folder / "conversions"
    subprocess.run(["g++", *FLAGS, *include, str(PROGRAM), "-o", str(made)], check=True)
    command = [made, *["until something differs"][: len(mistakes)]]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@needs_emulation
def test_every_magnitude_by_three_lines(tmp_path):
    """All 2^31 magnitudes of FP32 have the code of E2M1 that rounding to nearest gives, and so do
    words of four, signs included. By stochastic rounding, each changes its code between the same
    two draws. No block of 4-over-6 is out of reach of codes without a limit,
    subnormal or not; some lie beyond 6.
    """
    differ, drawn, reach = differing(tmp_path).splitlines()
    assert differ == "0 of 2147483648 magnitudes differ"
    assert drawn == "0 pairs of magnitudes differ by stochastic rounding"
    largest = reach.removeprefix("0 amaxes are too large, of some: 1, largest ")
    assert 6.5 < float(largest) < 13, reach


@needs_emulation
def test_a_wrong_line_is_seen(tmp_path):
    """A line that is one float too steep shows, and a draw that is half of one too small."""
    steep = {"magnitude, 0.5f,": "magnitude, 0.50000006f,"}
    nearest, drawn = differing(
        tmp_path, steep | {"(draw & MASK) | HALF": "(draw & MASK)"}
    ).splitlines()
    assert not nearest.startswith("0 of"), nearest
    assert not drawn.startswith("0 pairs"), drawn


@needs_nvrtc
@pytest.mark.parametrize("arch", ["compute_90", "compute_100a"])
def test_one_switch_leaves_the_shared_text(arch):
    """ZEROCAST_PORTABLE_CONVERSIONS compiles kernels without any of them."""
    portable = ptx(CASTS, arch, "--define-macro=ZEROCAST_PORTABLE_CONVERSIONS")
    assert not [each for each in CONVERSIONS if each in portable]
