"""Casts from any cuts of the masters have the bytes of the formulas by which others quantize the
whole BF16 tensor, restated here in plain torch, or made by their own code.
"""

import random

import pytest
import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams

import zerocast
from tests.support.planned import Planned
from tests.support.same_bytes import assert_same_bytes
from tests.support.values import draw_values
from zerocast.comm import Communicator, run_in_process
from zerocast.export import DIALECTS

Stored = tuple[torch.Tensor, torch.Tensor]
"""Codes, and scales."""


def in_blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """[M, K], multiples of ``size`` -> [M / size, K / size, size, size], FP32."""
    rows, cols = x.shape[0] // size, x.shape[1] // size
    return x.float().view(rows, size, cols, size).permute(0, 2, 1, 3)


def float8(x: torch.Tensor, scales: torch.Tensor, multipliers: torch.Tensor) -> Stored:
    """The codes of 128x128 blocks under ``multipliers``, beside the stored ``scales``."""
    scaled = (in_blocks(x, 128) * multipliers[..., None, None]).clamp(-448, 448)
    codes = scaled.permute(0, 2, 1, 3).reshape(x.shape).to(torch.float8_e4m3fn)
    return codes, scales


def amaxes(x: torch.Tensor, floor: float) -> torch.Tensor:
    """Of blocks of 128x128."""
    return in_blocks(x, 128).abs().amax((2, 3)).clamp(min=floor)


def deepgemm(x: torch.Tensor) -> Stored:
    """DeepGEMM's cast of blocks, with FP32 scales."""
    amax = amaxes(x, 1e-4)
    return float8(x, amax / 448.0, torch.full_like(amax, 448.0) / amax)


def triton(x: torch.Tensor) -> Stored:
    """The Triton kernels of slime and verl."""
    scale = amaxes(x, 1e-10) / 448.0
    return float8(x, scale, torch.ones_like(scale) / scale)


def vllm(x: torch.Tensor) -> Stored:
    """vLLM's cast of blocks while it loads."""
    scale = amaxes(x, 1e-4) / 448.0
    return float8(x, scale, torch.ones_like(scale) / scale)


def ue8m0(x: torch.Tensor) -> torch.Tensor:
    """The amax over 448, rounded up to a power of two: FP32, of blocks."""
    bits = (amaxes(x, 1e-4) / 448.0).view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def deepgemm_ue8m0(x: torch.Tensor) -> Stored:
    """DeepGEMM's scales that are powers of two."""
    return float8(x, ue8m0(x), 1 / ue8m0(x))


def deepseek_v4(x: torch.Tensor) -> Stored:
    """The same scales, stored as their exponents."""
    codes, scales = deepgemm_ue8m0(x)
    return codes, (scales.view(torch.int32) >> 23).byte().view(torch.float8_e8m0fnu)


def e2m1(x: torch.Tensor) -> torch.Tensor:
    """The bytes of [M, K] values under their scales: nearest, ties to even codes."""
    thresholds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = torch.bucketize(x.abs(), thresholds)  # at a tie the lower code
    tie = (x.abs()[..., None] == thresholds).any(-1)
    codes = torch.where(tie & (codes % 2 == 1), codes + 1, codes) | (x.signbit().long() << 3)
    return (codes[:, ::2] | codes[:, 1::2] << 4).byte()


def mxfp4_up(x: torch.Tensor) -> Stored:
    """The least power of two that maps the amax of 32 elements to 6 or below."""
    groups = x.float().view(x.shape[0], -1, 32)
    exponent = torch.ceil(torch.log2(groups.abs().amax(-1).double() / 6)).clamp(min=-127)
    scaled = groups.double() / torch.exp2(exponent)[..., None]
    return e2m1(scaled.view(x.shape)), (exponent + 127).byte()


def gpt_oss(x: torch.Tensor) -> Stored:
    """In blocks of 16 bytes."""
    codes, scales = mxfp4_up(x)
    return codes.unflatten(-1, (-1, 16)), scales


def deepseek_v4_experts(x: torch.Tensor) -> Stored:
    """The same, as int8 and E8M0."""
    codes, scales = mxfp4_up(x)
    return codes.view(torch.int8), scales.view(torch.float8_e8m0fnu)


def compressed_tensors_mxfp4(x: torch.Tensor) -> Stored:
    """By the package itself."""
    scheme = preset_name_to_scheme("MXFP4A16", targets=["Linear"])
    groups = x.float().view(x.shape[0], -1, 32)
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    state = {"weight": x.float(), "weight_scale": scale.float()}
    made = MXFP4PackedCompressor.compress(state, scheme)
    return made["weight_packed"], made["weight_scale"]


def positive_zeros(packed: torch.Tensor) -> torch.Tensor:
    """With 0 in the place of every nibble that is -0."""
    low, high = packed & 0xF, packed >> 4
    return torch.where(low == 8, 0, low) | torch.where(high == 8, 0, high) << 4


FORMULAS = {
    "deepseek/fp8-deepgemm": deepgemm,
    "deepseek/fp8-triton": triton,
    "deepseek/fp8-vllm": vllm,
    "deepseek/fp8-ue8m0": deepgemm_ue8m0,
    "deepseek/v4-fp8": deepgemm_ue8m0,
    "deepseek/v4": deepseek_v4,
    "deepseek/v4-mxfp4": deepseek_v4_experts,
    "gpt-oss/mxfp4": gpt_oss,
    "compressed-tensors/mxfp4": compressed_tensors_mxfp4,
}
SHAPE = torch.Size((256, 384))


def awkward(name: str, seed: int) -> torch.Tensor:
    """FP32 whose BF16 have zeros of both signs, ties, and blocks as small as the formula agrees on:
    DeepGEMM's powers of two have a floor, ours none; the package divides by no scale below 2^-126.
    """
    smallest = 1e-3 if FORMULAS[name] in (deepgemm_ue8m0, deepseek_v4) else 1e-30
    x = draw_values("normal", SHAPE.numel(), seed).view(SHAPE)
    x = x * torch.logspace(0, 1, SHAPE[0])[:, None] * torch.linspace(smallest, 2, SHAPE[1])
    x[:128, 128:256] *= max(smallest, 1e-7)
    x[3, :40:2], x[5, 1] = 0.0, -0.0
    x[7] = (torch.arange(SHAPE[1]) % 33 - 16) / 4.0
    return x


def check(name: str, seed: int) -> None:
    """One tensor, one way of cutting it."""
    rng = random.Random(seed)
    dialect, masters = DIALECTS[name], awkward(name, seed)
    formula = FORMULAS[name]
    codes, scales = formula(masters.bfloat16())
    ranks = rng.choice((1, 2, 3, 5, 7))
    cuts = (0, *sorted(rng.randint(0, SHAPE.numel()) for _ in range(ranks - 1)), SHAPE.numel())
    options = {"cuts": cuts, "empty": {"columnwise": False, "dtype": torch.bfloat16}}

    def on_rank(comm: Communicator) -> zerocast.QuantizedTensor:
        return Planned(comm, dialect.recipe, masters, **options).cast()

    for rank, weight in enumerate(run_in_process(ranks, on_rank)):
        stored = dialect.encode(weight.quantized_storage)
        where = f"{name}, seed {seed}, cuts {cuts}, rank {rank}"
        own, theirs = stored[dialect.codes].view(torch.uint8), codes.view(torch.uint8)
        if formula is compressed_tensors_mxfp4:  # which writes 0 for some values that become -0
            own, theirs = positive_zeros(own), positive_zeros(theirs)
        assert_same_bytes(own, theirs, f"codes, {where}")
        own, theirs = stored[dialect.scales].contiguous(), scales.contiguous()
        assert own.dtype == theirs.dtype, where
        assert_same_bytes(own.view(torch.uint8), theirs.view(torch.uint8), f"scales, {where}")


@pytest.mark.parametrize("name", FORMULAS)
def test_any_cuts_have_the_bytes_of_the_formula(name):
    """Of codes and scales, cut inside of blocks and of bytes."""
    for seed in range(3):
        check(name, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 1000, 100))
@pytest.mark.parametrize("name", FORMULAS)
def test_a_thousand_cuts_have_the_bytes_of_the_formula(name, first):
    """The same, a thousand times."""
    for seed in range(first, first + 100):
        check(name, seed)
