"""TensorDescription: the ranges of a tensor's values, codes and scales, and the shares of zeros and
of saturated codes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from zerocast.arguments import why_no_memory
from zerocast.backends.reference.planes import read_plane
from zerocast.layout import Plane
from zerocast.numerics import (
    E2M1,
    E4M3,
    E5M2,
    ElementFormat,
    MXNumerics,
    NVFP4Numerics,
    decode,
    decode_e8m0,
)
from zerocast.tensors import QuantizedStorage, QuantizedTensor

PIECE = 2**22
"""The number of elements that are counted at once, to bound the memory for counting."""

FLOAT8 = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
"""torch's FP8 dtypes, and the formats of their codes."""


@dataclass
class TensorDescription:
    """A description of one tensor of a checkpoint; None where an attribute does not apply.

    Attributes:
        name, shape, dtype: those of the torch tensor; nominal ones for a quantized weight.
        recipe: the recipe of a quantized weight; else empty.
        nbytes: the stored bytes.
        amax: the largest finite magnitude of the values.
        codes: the smallest and largest value of codes, without scales.
        scales: the smallest and largest stored scale, ``scale_inv``, without padding.
        saturated: the share of codes with the largest magnitude of their format. It is not zero,
            since a cast maps the amax of each block to or near that magnitude.
        zeros: the share of elements that are zero.
        not_finite: the number of values, codes or scales that are NaN or infinite.
        bars: a histogram of magnitudes, as shares: of codes by value (4 bits) or by exponent
            (8 bits), of unquantized values by power of two.
        labels: the texts of the bars.
    """

    name: str
    shape: list[int]
    dtype: str
    recipe: str = ""
    nbytes: int = 0
    amax: float | None = None
    codes: tuple[float, float] | None = None
    scales: tuple[float, float] | None = None
    saturated: float | None = None
    zeros: float | None = None
    not_finite: int = 0
    bars: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)


def describe(name: str, tensor: torch.Tensor) -> TensorDescription:
    """Return the description of ``tensor``, after reading every element."""
    shape, dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    about = TensorDescription(name, shape, dtype, nbytes=tensor.nbytes)
    if isinstance(tensor, QuantizedTensor):
        _describe_quantized(about, tensor)
    elif why_no_memory(tensor):
        return about
    elif tensor.dtype == torch.float4_e2m1fn_x2:
        counts = _counts(tensor.contiguous().view(torch.uint8)).view(16, 16)
        _describe_codes(about, counts.sum(0) + counts.sum(1), E2M1)
        about.amax = max(map(abs, about.codes)) if about.codes else None
    elif tensor.dtype in FLOAT8:
        fmt = FLOAT8[tensor.dtype]
        _describe_codes(about, _counts(tensor.contiguous().view(torch.uint8)), fmt)
        about.amax = max(map(abs, about.codes)) if about.codes else None
    elif tensor.dtype.is_floating_point and tensor.layout == torch.strided:
        _describe_values(about, tensor)
    return about


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    return iter(tensor.detach().reshape(-1).split(PIECE))


def _counts(codes: torch.Tensor) -> torch.Tensor:
    """Return how often each byte value occurs in ``codes``, int64 [256]."""
    counts = torch.zeros(256, dtype=torch.int64, device="cpu")
    for piece in _pieces(codes):
        counts += torch.bincount(piece, minlength=256)
    return counts


def _describe_quantized(about: TensorDescription, tensor: QuantizedTensor) -> None:
    storage = tensor.quantized_storage
    plane = storage.planes[0 if storage.has_rowwise else -1]
    codes, fmt = storage.buffers[plane.codes_name], storage.recipe.numerics.fmt
    about.recipe = str(storage.recipe)
    about.nbytes = sum(buffer.nbytes for buffer in storage.buffers.values())
    counts = _counts(codes)
    if fmt.bits == 4:  # two codes per byte; the last byte of an odd row has one code, and 0
        counts = counts.view(16, 16)
        counts = counts.sum(0) + counts.sum(1)
        counts[0] -= storage.stack.numel() * plane.grid.rows * (plane.grid.cols % 2)
    _describe_codes(about, counts, fmt)
    scales = torch.cat([scales_of(each, plane).flatten() for each in storage.matrices])
    finite = scales[scales.isfinite()]
    about.not_finite += scales.numel() - finite.numel()
    if finite.numel():
        about.scales = finite.min().item(), finite.max().item()
    if tensor.numel():
        values = tensor.dequantize(torch.float32).abs()
        about.amax = values.nan_to_num(nan=0.0, posinf=0.0).max().item()


def scales_of(storage: QuantizedStorage, plane: Plane) -> torch.Tensor:
    """Return the stored scales of all blocks without padding and repeats: FP32 [blocks_h,
    blocks_w].
    """
    name = plane.scales_name if plane.stores_scales else "rowwise_scale_inv"
    stored, numerics = storage.buffers[name], storage.recipe.numerics
    if isinstance(numerics, NVFP4Numerics):
        stored = decode(stored, numerics.scale_fmt)
    elif isinstance(numerics, MXNumerics):
        stored = decode_e8m0(stored)
    return read_plane(stored, plane.scales)


def _describe_codes(about: TensorDescription, counts: torch.Tensor, fmt: ElementFormat) -> None:
    """Add the description of codes, whose numbers of occurrences are ``counts``, int64 [2^bits]."""
    total = int(counts.sum())
    if not total:
        return
    values = decode(torch.arange(2**fmt.bits, dtype=torch.uint8, device="cpu"), fmt)
    seen = values[(counts > 0) & values.isfinite()]
    about.not_finite += int(counts[~values.isfinite()].sum())
    if seen.numel():
        about.codes = seen.min().item(), seen.max().item()
    half = 2 ** (fmt.bits - 1)
    magnitudes = counts[:half] + counts[half:]
    about.saturated = int(magnitudes[fmt.max_code]) / total
    about.zeros = int(magnitudes[0]) / total
    # 4 bits: a bar for each of 8 magnitudes; 8 bits: one for each exponent.
    grouped = magnitudes if fmt.bits == 4 else magnitudes.view(-1, 2**fmt.mantissa_bits).sum(1)
    firsts = values[:half] if fmt.bits == 4 else values[: half : 2**fmt.mantissa_bits]
    about.bars = [count / total for count in grouped.tolist()]
    about.labels = [f"{value:g}" for value in firsts.tolist()]


def _describe_values(about: TensorDescription, tensor: torch.Tensor) -> None:
    amax, zeros, not_finite = 0.0, 0, 0
    # By the exponent field of FP32: 0 for 2^-127 and less.
    exponents = torch.zeros(256, dtype=torch.int64, device="cpu")
    for stored in _pieces(tensor):
        piece = stored.float() if stored.itemsize == 1 else stored  # torch can count wider ones
        finite = piece if bool(piece.isfinite().all()) else piece[piece.isfinite()]
        not_finite += piece.numel() - finite.numel()
        if finite.numel():
            amax = max(amax, finite.abs().max().item())
            zeros += finite.numel() - int(finite.count_nonzero())
            bits = finite.to(torch.float32).view(torch.int32)
            exponents += torch.bincount(((bits >> 23) & 0xFF).to(torch.uint8), minlength=256)
    total = tensor.numel()
    about.not_finite = not_finite
    if total:
        about.amax, about.zeros = amax, zeros / total
    exponents[0] -= zeros
    powers = exponents.nonzero().view(-1).tolist()
    if powers:
        every = list(range(powers[0], powers[-1] + 1))[-24:]
        about.bars = [count / total for count in exponents[every].tolist()]
        about.labels = [f"2^{power - 127}" for power in every]
