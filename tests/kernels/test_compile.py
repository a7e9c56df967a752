"""The kernels compile for every architecture that is served, without a driver, and keep to
registers.
"""

import re

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
FP8 = [f"{kind}<{fmt}>" for kind in ("Float8Numerics", "MXNumerics") for fmt in ("E4M3", "E5M2")]
MXFP4 = ["MXNumerics<E2M1>"]
DELAYED = ["DelayedNumerics<E4M3>", "DelayedNumerics<E5M2>"]
NVFP4 = ["NVFP4Numerics", "FourOverSixNumerics"]
SHAPES = ("Tile", "Tile32x256")
# The arguments of the templates that are asked for.
INSTANCES = {
    "partial_amax": SHAPES,
    "partial_select": ("false", "true"),
    "select": ("false", "true"),
    "compute_scale": [*FP8, *MXFP4, *NVFP4],
    "compute_scale_delayed": ("false", "true"),
    "expand_scales": ("u8", "float"),
    "partial_cast": [
        *(f"{kind}, NearestVec4<{kind[-5:-1]}>, {shape}" for kind in [*FP8, *MXFP4]
          for shape in SHAPES),
        *(f"{kind}, NearestVec4<{kind[-5:-1]}>, Tile" for kind in DELAYED),
        *(f"NVFP4Numerics, {encoder}, {shape}"
          for encoder in ("NearestVec4<E2M1>", "StochasticVec4") for shape in SHAPES),
        *(f"FourOverSixNumerics, {encoder}, Tile"
          for encoder in ("NearestVec4<E2M1>", "StochasticVec4")),
    ],
    "transpose": ("4", "8"),
    "dequantize": [
        f"{kind}, {shape}" for kind in [*FP8, *DELAYED, *MXFP4, *NVFP4] for shape in SHAPES
    ],
    "fused_op": [f"{function}, {tile}" for function in ("ElementWise", "Norm") for tile in (
        *(f"{kind}, LOW" for kind in ["NoNumerics", *FP8, *DELAYED, *MXFP4, "NVFP4Numerics"]),
        "Float8Numerics<E4M3>, TALL", "Float8Numerics<E5M2>, TALL")],
    "copy_codes": ("false", "true"),
    "write_words": [""],
    "probe_read": [""],
}  # fmt: skip
KERNELS = [
    f"{name}<{template}>" if template else name
    for name, templates in INSTANCES.items()
    for template in templates
]
# Threads of a block, and the blocks that share a multiprocessor's 65,536 registers: of the first
# row whose pattern is found.
RESIDENT = {
    "partial_amax<Tile32x256": (128, 5), "partial_amax": (128, 6), "partial_select": (128, 6),
    "partial_cast.*Tile32x256": (128, 5), "partial_cast<Delayed": (128, 9),
    "partial_cast.*Stochastic": (128, 5), "partial_cast": (128, 6),
    "transpose": (256, 3), "TALL": (512, 1), "fused_op<ElementWise": (256, 3),
    "fused_op<Norm": (256, 2), "": (128, 8),
}  # fmt: skip

USAGE = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads.*?Used (\d+) registers",
    re.DOTALL,
)


def source(kernel: str) -> str:
    """The text of a kernel's file."""
    return (cuda_sources() / "cuda" / f"{kernel.partition('<')[0]}.cu").read_text()


def test_every_source_is_listed() -> None:
    """INSTANCES names every file of kernels."""
    assert {file.stem for file in (cuda_sources() / "cuda").glob("*.cu")} == set(INSTANCES)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_stay_in_registers(kernel: str, arch: str) -> None:
    """Every kernel becomes a cubin without a stack frame and without a spilled register."""
    options = ("--ptxas-options=-v",)
    name, cubin, log = compile_text(source(kernel), kernel, arch, cuda_sources(), options)
    assert cubin.startswith(b"\x7fELF")
    ((compiled, stack, stores, loads, registers),) = USAGE.findall(log)
    assert compiled == name
    assert (stack, stores, loads) == ("0", "0", "0"), f"{kernel} for {arch}:\n{log}"
    threads, blocks = next(size for pattern, size in RESIDENT.items() if re.search(pattern, kernel))
    used = int(registers) * threads * blocks
    assert used <= 65536, f"{kernel} for {arch}: {registers} registers"


def ptx(kernels: list[str], arch: str) -> str:
    """What the front end makes of kernels of one file."""
    nvrtc = import_nvrtc()
    program = nvrtc.createProgram(source(kernels[0]), "kernels.cu", (), ())
    for kernel in kernels:
        nvrtc.addNameExpression(program, kernel)
    include = f"--include-path={cuda_sources()}"
    try:
        nvrtc.compileProgram(program, (f"--gpu-architecture={arch}", *FLAGS, include))
        return nvrtc.getPTX(program).decode()
    finally:
        nvrtc.destroyProgram(program)


@pytest.mark.parametrize("name", INSTANCES)
def test_arithmetic_is_ieee(name: str) -> None:
    """No instruction flushes subnormals, contracts a product and a sum, or divides
    approximately.
    """
    text = ptx([k for k in KERNELS if k.partition("<")[0] == name], "compute_90")
    found = re.findall(r"\S*\.ftz\S*|fma\.\S+f32|div\.(?:approx|full)\S*", text)
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
    """Codes are made by the device's own conversion exactly where it has one: of a kernel for each
    element format, as all kernels convert through the encoder of that format.
    """
    kernels = ("Float8Numerics<E4M3>, NearestVec4<E4M3>, Tile", "Float8Numerics<E5M2>, "
               "NearestVec4<E5M2>, Tile", "NVFP4Numerics, NearestVec4<E2M1>, Tile")  # fmt: skip
    text = ptx([f"partial_cast<{instance}>" for instance in kernels], arch)
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
