"""The kernels compile for every architecture that is served, without a driver, and keep to
registers.
"""

import re
from functools import cache

import pytest

from zerocast.backends.cuda.compiler import FLAGS, architecture, compile_text, import_nvrtc
from zerocast.backends.cuda.sources import cuda_sources
from zerocast.errors import BackendError

try:
    import_nvrtc()
    MISSING = ""
except BackendError as error:
    MISSING = str(error)
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

# sm_90 converts FP8 in hardware, sm_100a FP4 too. The others compile the same texts.
ARCHITECTURES = (
    pytest.param("sm_80", marks=pytest.mark.nightly),
    "sm_90",
    "sm_100a",
    pytest.param("sm_120a", marks=pytest.mark.nightly),
)
KINDS = [f"{kind}_{fmt}" for kind in ("float8", "mxfp8") for fmt in ("e4m3", "e5m2")]
DRAWS = ["nvfp4", "nvfp4_drawn"]
ACTIVATIONS = [
    "values", *KINDS, "tall_e4m3", "tall_e5m2", "delayed_e4m3", "delayed_e5m2", "nvfp4_e2m1",
]  # fmt: skip
KERNELS = {
    "partial_amax": {"partial_amax"},
    "partial_amax_fine": {"partial_amax_fine"},
    "partial_select": {"partial_select_mae", "partial_select_mse"},
    "select": {"select_mae", "select_mse"},
    "compute_scale": {f"compute_scale_{numerics}" for numerics in [*KINDS, "nvfp4"]},
    "compute_scale_delayed": {"compute_scale_delayed"},
    "partial_cast": {
        f"partial_cast_{numerics}" for numerics in [*KINDS, "delayed_e4m3", "delayed_e5m2", *DRAWS]
    },
    "partial_cast_fine": {f"partial_cast_fine_{numerics}" for numerics in [*KINDS, *DRAWS]},
    "transpose": {"transpose_4_bit", "transpose_8_bit"},
    "dequantize": {
        f"dequantize_{shape}{numerics}" for numerics in [*KINDS, "nvfp4"] for shape in ("", "fine_")
    },
    "activation": {f"activation_{ending}" for ending in ACTIVATIONS},
    "normalization": {f"normalization_{ending}" for ending in ACTIVATIONS},
    "write_words": {"write_words"},
    "probe": {"probe_read"},
}
# Threads of a block, and the blocks that share a multiprocessor's 65,536 registers.
RESIDENT = {
    "partial_amax": (128, 6), "partial_amax_fine": (128, 5), "partial_select": (128, 6),
    "partial_cast": (128, 6), "partial_cast_nvfp4_drawn": (128, 5), "partial_cast_fine": (128, 4),
    "transpose": (256, 3), "activation": (256, 3), "normalization": (256, 2),
    **{f"{name}_tall_{fmt}": (512, 1) for name in ("activation", "normalization")
       for fmt in ("e4m3", "e5m2")},
}  # fmt: skip

USAGE = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads.*?Used (\d+) registers",
    re.DOTALL,
)


def source(name: str) -> str:
    """The text of a kernel file."""
    return (cuda_sources() / "cuda" / f"{name}.cu").read_text()


def test_every_source_is_listed() -> None:
    """KERNELS names every file of kernels."""
    assert {file.stem for file in (cuda_sources() / "cuda").glob("*.cu")} == set(KERNELS)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_stay_in_registers(name: str, arch: str) -> None:
    """Every kernel becomes a cubin without a stack frame and without a spilled register."""
    include = cuda_sources()
    cubin, log = compile_text(source(name), name, arch, include, ("--ptxas-options=-v",))
    assert cubin.startswith(b"\x7fELF")
    used = {kernel: tuple(map(int, numbers)) for kernel, *numbers in USAGE.findall(log)}
    assert used.keys() == KERNELS[name], log
    for kernel, (stack, stores, loads, registers) in used.items():
        assert (stack, stores, loads) == (0, 0, 0), f"{kernel} for {arch}:\n{log}"
        threads, blocks = RESIDENT.get(kernel, RESIDENT.get(name, (128, 8)))
        assert registers * threads * blocks <= 65536, f"{kernel} for {arch}: {registers} registers"


@cache
def ptx(name: str, arch: str) -> str:
    """What the front end makes of a kernel file."""
    nvrtc = import_nvrtc()
    program = nvrtc.createProgram(source(name), f"{name}.cu", (), ())
    include = f"--include-path={cuda_sources()}"
    try:
        nvrtc.compileProgram(program, (f"--gpu-architecture={arch}", *FLAGS, include))
        return nvrtc.getPTX(program).decode()
    finally:
        nvrtc.destroyProgram(program)


@pytest.mark.parametrize("name", KERNELS)
def test_arithmetic_is_ieee(name: str) -> None:
    """No instruction flushes subnormals, contracts a product and a sum, or divides
    approximately.
    """
    found = re.findall(r"\S*\.ftz\S*|fma\.\S+f32|div\.(?:approx|full)\S*", ptx(name, "compute_90"))
    assert not found, found


@pytest.mark.parametrize(
    ("arch", "fp8", "e2m1"),
    [
        ("compute_80", False, False),
        ("compute_89", True, False),
        ("compute_90", True, False),
        ("compute_100a", True, True),
        ("compute_103a", True, True),
        ("compute_120a", True, True),
    ],
)
def test_conversions_of_the_hardware(arch: str, fp8: bool, e2m1: bool) -> None:
    """Codes are made by the device's own conversion exactly where it has one."""
    text = ptx("partial_cast", arch)
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
    with pytest.raises(BackendError, match=r"(?s)kernels of broken for sm_90.*nowhere.*pip inst"):
        compile_text("__global__ void f() { nowhere(); }", "broken", "sm_90", cuda_sources())


def test_an_unknown_architecture_is_explained() -> None:
    """An NVRTC older than the GPU says so."""
    with pytest.raises(BackendError, match=r"(?s)for sm_999.*too old: pip install"):
        compile_text("", "future", "sm_999", cuda_sources())
