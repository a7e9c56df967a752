"""The kernels compile for every architecture that is served, without a driver, keep to registers,
and cost as few instructions as scripts/sass_report.py demands.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.sass_report import (
    INSTANCES,
    KERNELS,
    REPEATED,
    has_bars,
    missed,
    nvdisasm,
    report_of,
)
from tests.support.nightly import nightly
from zerocast.backends.cuda.compiler import FLAGS, architecture, compile_text, import_nvrtc
from zerocast.backends.cuda.kernel_sources import cuda_sources
from zerocast.errors import BackendError

try:
    import_nvrtc()
    MISSING = ""
except BackendError as error:
    MISSING = str(error)
ROOT = Path(__file__).parents[2]
needs_nvrtc = pytest.mark.skipif(bool(MISSING), reason=MISSING)
pytestmark = needs_nvrtc

# sm_90 converts FP8 in hardware, sm_100a FP4 too. The others compile the same texts.
ARCHITECTURES = ("sm_80", "sm_90", "sm_100a", "sm_120a")


def is_telling(kernel: str, arch: str) -> bool:
    """Whether no other kernel or architecture shows the same: one that is not REPEATED, for sm_90,
    and for sm_100a where it has bars there or encodes FP4, whose text differs.
    """
    encodes = re.match(r"partial_cast.*(E2M1|NVFP4)", kernel)
    elsewhere = arch == "sm_100a" and (has_bars(kernel, arch) or encodes)
    return not REPEATED.search(kernel) and (arch == "sm_90" or bool(elsewhere))


COMPILED = [
    pytest.param(kernel, arch, marks=() if is_telling(kernel, arch) else pytest.mark.nightly)
    for kernel in KERNELS
    for arch in ARCHITECTURES
]


def source(kernel: str) -> str:
    """The text of a kernel's file."""
    return (cuda_sources() / "cuda" / f"{kernel.partition('<')[0]}.cu").read_text()


def test_every_source_is_listed() -> None:
    """INSTANCES names every file of kernels."""
    assert {file.stem for file in (cuda_sources() / "cuda").glob("*.cu")} == set(INSTANCES)


@pytest.mark.parametrize(("kernel", "arch"), COMPILED)
def test_kernels_keep_to_their_bars(kernel: str, arch: str) -> None:
    """Every kernel becomes a cubin without a stack frame and without a spilled register, as many
    blocks of which share a multiprocessor as are meant to; where there is a disassembler, its hot
    loops have the instructions, and the bytes under way, that scripts/sass_report.py demands.
    """
    options = ("--ptxas-options=-v",)
    name, cubin, log = compile_text(source(kernel), kernel, arch, cuda_sources(), options)
    assert cubin.startswith(b"\x7fELF")
    assert re.findall(r"Compiling entry function '(\w+)'", log) == [name]
    loops = nvdisasm() is not None and has_bars(kernel, arch)
    found = missed(report_of(kernel, arch, cubin if loops else None, log), loops=loops)
    assert not found, f"{kernel} for {arch}: {found}\n{log}"


BY_THE_OLDEST = """
import ctypes, sys
from concurrent.futures import ThreadPoolExecutor
library, arch, *kernels = sys.argv[1:]
ctypes.CDLL(library)  # before CuPy looks for one
from cupy.cuda import nvrtc
assert nvrtc.getVersion() == (13, 0), nvrtc.getVersion()
from zerocast.backends.cuda.compiler import compile_text
from zerocast.backends.cuda.kernel_sources import cuda_sources
def compile(kernel):
    text = (cuda_sources() / "cuda" / f"{kernel.partition('<')[0]}.cu").read_text()
    try:
        compile_text(text, kernel, arch, cuda_sources())
    except Exception as error:
        print(kernel, error)
with ThreadPoolExecutor() as pool:
    list(pool.map(compile, kernels))
"""


@pytest.fixture(scope="module")
def oldest_nvrtc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of the first version that pyproject.toml allows, in an environment of its own."""
    allowed = re.search(r"nvidia-cuda-nvrtc>=([\d.]+)", (ROOT / "pyproject.toml").read_text())
    assert allowed is not None
    assert allowed[1] == "13.0"
    folder = tmp_path_factory.mktemp("nvrtc")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    wanted = f"nvidia-cuda-nvrtc=={allowed[1]}.*"
    subprocess.run([folder / "bin" / "pip", "install", "--quiet", wanted], check=True)
    (library,) = folder.glob("lib/python*/site-packages/nvidia/**/libnvrtc.so.13")
    return library


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ["sm_90", "sm_100a"])
def test_the_oldest_nvrtc_compiles_every_kernel(oldest_nvrtc: Path, arch: str) -> None:
    """What a newer compiler accepts, the oldest one that is allowed may not."""
    command = [sys.executable, "-c", BY_THE_OLDEST, str(oldest_nvrtc), arch, *KERNELS]
    beside = {"LD_LIBRARY_PATH": str(oldest_nvrtc.parent)}  # of its builtins
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | beside)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def ptx(kernels: list[str], arch: str, *options: str) -> str:
    """What the front end makes of kernels of one file."""
    nvrtc = import_nvrtc()
    program = nvrtc.createProgram(source(kernels[0]), "kernels.cu", (), ())
    for kernel in kernels:
        nvrtc.addNameExpression(program, kernel)
    include = f"--include-path={cuda_sources()}"
    try:
        nvrtc.compileProgram(program, (f"--gpu-architecture={arch}", *FLAGS, include, *options))
        return nvrtc.getPTX(program).decode()
    finally:
        nvrtc.destroyProgram(program)


ALIKE = re.compile("Tile32x256|partial_amax_cast.*(E2M1|true)|" + REPEATED.pattern)
"""Kernels whose formulas another has, in other tiles."""


@pytest.mark.parametrize("every", [False, nightly(True)])
@pytest.mark.parametrize("name", INSTANCES)
def test_arithmetic_is_ieee(name: str, every: bool) -> None:
    """No instruction flushes subnormals, contracts a product and a sum, or divides approximately;
    the text that is not shared has fused multiply-adds of its own, and is left out.
    """
    kernels = [k for k in KERNELS if k.partition("<")[0] == name and (every or not ALIKE.search(k))]
    text = ptx(kernels, "compute_90", "--define-macro=ZEROCAST_PORTABLE_CONVERSIONS")
    found = re.findall(r"\S*\.ftz\S*|fma\.\S+f32|(?:div|sqrt)\.(?:approx|full)\S*", text)
    if name == "adamw":  # its two, of every element that is unrolled
        assert set(found) == {"fma.rn.f32"}
        assert len(found) % 2 == 0
        found = []
    assert not found, found


CASTS = [
    f"partial_cast<{instance}, Tile>"
    for instance in ("Float8Numerics<E4M3>, NearestVec4<E4M3>", "Float8Numerics<E5M2>, "
                     "NearestVec4<E5M2>", "NVFP4Numerics, NearestVec4<E2M1>")
]  # fmt: skip
"""One for each element format: all kernels convert through the encoder of that format."""

CONVERSIONS = ("cvt.rn.bf16x2.f32", "cvt.rn.f16.f32", "cvt.f32.f16", "cvt.rn.satfinite", "fma.rn")


@pytest.mark.parametrize(
    ("arch", "fp8", "e2m1"),
    [
        ("compute_80", False, False),
        nightly("compute_89", True, False),
        ("compute_90", True, False),
        ("compute_100a", True, True),
        nightly("compute_103a", True, True),
        ("compute_120a", True, True),
    ],
)
def test_conversions_of_the_hardware(arch: str, fp8: bool, e2m1: bool) -> None:
    """Codes are made by the device's own conversion exactly where it has one, and values of BF16
    and FP16 everywhere; codes of E2M1 by fused multiply-adds elsewhere.
    """
    text = ptx(CASTS, arch)
    assert all(conversion in text for conversion in CONVERSIONS[:3])
    assert ("fma.rn" in text) == (not e2m1)
    assert ("cvt.rn.satfinite.e4m3x2.f32" in text) == fp8
    assert ("cvt.rn.satfinite.e5m2x2.f32" in text) == fp8
    assert ("cvt.rn.satfinite.e2m1x2.f32" in text) == e2m1


@pytest.mark.parametrize(
    ("capability", "arch"), [((8, 0), "sm_80"), ((9, 0), "sm_90"), ((10, 0), "sm_100a")]
)
def test_architecture_of_a_capability(capability: tuple[int, int], arch: str) -> None:
    """From compute capability 10.0 on the architecture's own instructions are compiled for."""
    assert architecture(capability) == arch


def test_an_old_gpu_is_refused() -> None:
    """A GPU without the instructions that the kernels need is refused with what to do."""
    with pytest.raises(BackendError, match=r"8\.0 or newer, got 7\.5; use_backend\('reference'\)"):
        architecture((7, 5))


def test_a_compiler_error_names_the_kernel() -> None:
    """What the compiler says reaches the user, with the source's name and the remedy."""
    text = "__global__ void broken() { nowhere(); }"
    with pytest.raises(BackendError, match=r"(?s)kernel broken for sm_90.*nowhere.*pip inst"):
        compile_text(text, "broken", "sm_90", cuda_sources())


def test_an_unknown_architecture_is_explained() -> None:
    """An NVRTC older than the GPU says so."""
    with pytest.raises(BackendError, match=r"(?s)for sm_999.*too old: pip install"):
        compile_text("", "future", "sm_999", cuda_sources())
