"""The shared headers stay compilable by NVRTC and by any host compiler, each on its own."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

HEADERS = sorted((Path(__file__).parents[2] / "cuda_src/include/zerocast").glob("*.h"))


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_a_shared_header_includes_only_its_neighbours(header):
    """NVRTC has no standard headers, <cstdint> included."""
    names = re.findall(r"^\s*#\s*include\s+(.*)$", header.read_text(), re.MULTILINE)
    neighbours = {f'"{path.name}"' for path in HEADERS}
    assert set(names) <= neighbours, f"{header.name} includes {names}"


SHARED_BY_ALL = ("formats.h", "lanes.h", "scaling.h", "tables.h")
"""Those that the CPU library compiles too."""


@pytest.mark.parametrize("name", SHARED_BY_ALL)
def test_a_shared_header_compiles_alone(name):
    """With the host compiler, as C++17, without a warning."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = f'#include "{HEADERS[0].parent / name}"\n'
    command = [
        compiler,
        "-std=gnu++17",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fsyntax-only",
        "-x",
        "c++",
        "-",
    ]
    result = subprocess.run(command, input=source, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
