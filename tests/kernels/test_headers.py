"""The headers stay compilable by NVRTC, and those of ``arithmetic`` by any host compiler."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "cuda_src"
ARITHMETIC = sorted(SOURCES.glob("arithmetic/*.h"))
CUDA = sorted([*SOURCES.glob("cuda/*.h"), *SOURCES.glob("cuda/*.cu")])


@pytest.mark.parametrize("file", [*ARITHMETIC, *CUDA], ids=lambda path: path.name)
def test_only_our_own_headers_are_included(file: Path) -> None:
    """NVRTC has no standard headers, <cstdint> included; the arithmetic knows no CUDA header."""
    names = re.findall(r"^\s*#\s*include\s+(.*)$", file.read_text(), re.MULTILINE)
    known = ARITHMETIC if file in ARITHMETIC else [*ARITHMETIC, *CUDA]
    assert set(names) <= {f'"{path.relative_to(SOURCES).as_posix()}"' for path in known}


@pytest.mark.parametrize("header", ARITHMETIC, ids=lambda path: path.name)
def test_a_header_of_the_arithmetic_compiles_alone(header: Path) -> None:
    """With the host compiler, as C++17, without a warning."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    flags = f"-I{SOURCES} -std=gnu++17 -Wall -Wextra -Werror -fsyntax-only -x c++ -".split()
    result = subprocess.run(
        [compiler, *flags], input=f'#include "{header}"\n', capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
