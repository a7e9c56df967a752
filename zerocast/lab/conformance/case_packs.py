"""Packs: inputs and required bytes, with which any implementation is compared.

A pack is made from docs/numerics.md alone, by zerocast's reference backend. It does not depend on
other packages, the machine or a library's random numbers: the same code writes the same bytes.
There is one for each level and format or dialect:

    values      every BF16 value, and every tie and its neighbours in FP32, as codes; codes decoded
    blocks      weights of a few blocks, whose amaxes are at the edges of the scale's formula
    tensors     weights of awkward shapes, with zeros of both signs, as a checkpoint holds them
    partitions  such a weight, sharded over ranks: the gathered bytes must be those of the whole
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from zerocast import quantize, use_backend
from zerocast.backends.reference.philox import element_draws
from zerocast.export import DIALECTS, Dialect
from zerocast.layout import BlockGrid
from zerocast.numerics import (
    ELEMENT_FORMATS,
    Float8Numerics,
    MXNumerics,
    NVFP4Numerics,
    decode,
    decode_e8m0,
    encode,
    encode_e8m0,
)

VERSION = 1
"""The version of the packs, which rises with every change of their bytes."""

SECTIONS = {Float8Numerics: 4, MXNumerics: 6, NVFP4Numerics: 7}
DECODED = "decoded"
"""The name of the case of level values whose input is codes."""

# Amaxes of the blocks of one weight, as BF16 bits. Scales change at the mantissas of 448 = 1.75 *
# 2^8 and 6 = 1.5 * 2^2, so these and their neighbours occur. 0x40 is 2^-127, 0x7F7F the largest.
AMAXES = {
    "near": (0x3F80, 0x3F81, 0x3FBF, 0x3FC0, 0x3FC1, 0x3FDF, 0x3FE0, 0x3FE1, 0x3FFF, 0x4000),
    "far": (0x0000, 0x3F80, 0x3C80, 0x3B92, 0x3A33, 0x3851, 0x3500, 0x2F13, 0x40A4, 0x4300),
    "smallest": (0x0000, 0x0001, 0x0003, 0x0020, 0x0040, 0x0041, 0x0080, 0x00E0, 0x0110, 0x0480),
    "largest": (0x7F7F, 0x7F61, 0x7F60, 0x7F5F, 0x7F40, 0x7F00, 0x7E80, 0x7E40, 0x7B12, 0x0000),
}


def _bits(*values: float) -> tuple[int, ...]:
    in_bf16 = torch.tensor(values, dtype=torch.bfloat16, device="cpu")
    return tuple(in_bf16.view(torch.int16).tolist())


# For NVFP4, with the first amax as tensor amax: the other scales are half-way between two values of
# E4M3, 17/16 to 31/16 of a power of two; or are 8/8 to 15/8 by any formula, and codes have ties.
AMAXES_OF_NVFP4 = {
    f"ties of scales, {m}": _bits(
        448 * m, *(m * tie * power for power in (2, 0.125) for tie in range(17, 32, 2))
    )
    for m in (1, 3, 5, 7)
} | {"ties of codes": _bits(2688, *(6 * eighths / 8 for eighths in range(8, 16)))}

SHAPES = ((1, 32), (33, 160), (130, 96), (128, 256))
# Cuts of the second shape: inside of rows, blocks and bytes, one rank owning nothing; by rows.
CUTS = {
    "3 ranks": (0, 1767, 3527, 5280),
    "7 ranks": (0, 761, 1515, 2269, 3024, 3778, 3778, 5280),
    "3 ranks, by rows": (0, 1760, 3520, 5280),
}


@dataclass(frozen=True)
class Case:
    """One input, and its required result.

    Attributes:
        name: the name of the case within its pack.
        input: for values, FP32 or BF16 [n], or uint8 codes [n] to decode; else BF16 [M, K].
        expected: by name, uint8 codes [n] or FP32 values [n]; else the tensors of the dialect.
        cuts: for partitions, the flat indices where the shards of ranks begin, and the end.
    """

    name: str
    input: torch.Tensor
    expected: Mapping[str, torch.Tensor]
    cuts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Pack:
    """The cases of one level and subject.

    Attributes:
        level: values, blocks, tensors or partitions.
        subject: the name of an element format, or of a dialect of :mod:`zerocast.export`.
        formula: the section of docs/numerics.md with the formula, in words.
        cases: the cases.
    """

    level: str
    subject: str
    formula: str
    cases: list[Case] = field(repr=False)

    @property
    def file(self) -> str:
        """The name of the pack's file."""
        return f"{self.level}-{self.subject.replace('/', '-')}.json"

    def text(self) -> str:
        """Return the pack as JSON in a canonical form; bytes are hexadecimal, row-major and
        little-endian.
        """
        cases = [{key: value for key, value in vars(case).items() if key != "cuts" or value}
                 for case in self.cases]  # fmt: skip
        document = {**vars(self), "cases": cases}
        return json.dumps(document, default=_described, sort_keys=True, indent=1) + "\n"


def packs() -> list[Pack]:
    """Make every pack."""
    with use_backend("reference"), torch.device("cpu"):
        made = [Pack("values", name, "docs/numerics.md, section 2", _value_cases(name))
                for name in (*ELEMENT_FORMATS, "e8m0")]  # fmt: skip
        for name, dialect in DIALECTS.items():
            section = SECTIONS[type(dialect.recipe.numerics)]
            formula = f"docs/numerics.md, section {section}, of {dialect.recipe}"
            tensors = _tensor_cases(dialect)
            cut = [replace(tensors[1], name=f"{tensors[1].name} on {ranks}", cuts=cuts)
                   for ranks, cuts in CUTS.items()]  # fmt: skip
            levels = {"blocks": _block_cases(dialect), "tensors": tensors, "partitions": cut}
            made += [Pack(level, name, formula, cases) for level, cases in levels.items()]
    return made


def write_packs(directory: Path, made: Iterable[Pack]) -> int:
    """Write packs, and SHA256SUMS for ``sha256sum -c``, to a directory; return the number of packs.

    Raises:
        FileExistsError: if a file already exists.
    """
    directory.mkdir(parents=True, exist_ok=True)
    sums = []
    for pack in sorted(made, key=lambda pack: pack.file):
        document = pack.text().encode()
        with (directory / pack.file).open("xb") as file:
            file.write(document)
        sums.append(f"{hashlib.sha256(document).hexdigest()}  {pack.file}\n")
    with (directory / "SHA256SUMS").open("x") as listed:
        listed.write("".join(sums))
    return len(sums)


def _described(tensor: torch.Tensor) -> dict[str, Any]:
    dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    return {"dtype": dtype, "shape": shape, "bytes": raw(tensor).numpy().tobytes().hex()}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of ``tensor``, row-major: uint8 [n]."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def blocks_of(subject: str, shape: Sequence[int]) -> BlockGrid:
    """Return the blocks of a weight of ``shape``, [M, K], in the dialect ``subject``."""
    return DIALECTS[subject].recipe.planes(shape, columnwise=False)[0].grid


def differing(given: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return which bytes of ``expected`` differ in ``given``, bool [bytes]; all if sizes differ.
    All FP32 NaNs count as equal.
    """
    if given.dtype == expected.dtype == torch.float32 and given.shape == expected.shape:
        given = torch.where(given.isnan() & expected.isnan(), expected, given)
    theirs, ours = raw(given), raw(expected)
    return ours != theirs if len(ours) == len(theirs) else torch.ones_like(ours, dtype=torch.bool)


# --- values ---


def _value_cases(name: str) -> list[Case]:
    fmt = ELEMENT_FORMATS.get(name)
    codes = torch.arange(2**fmt.bits if fmt else 256, dtype=torch.uint8, device="cpu")
    values = decode(codes, fmt) if fmt else decode_e8m0(codes)
    magnitudes = values[: len(codes) // 2] if fmt else values
    ends = magnitudes[magnitudes.isfinite()].double()
    if fmt:  # the value that would follow the largest: where saturation begins
        ends = torch.cat((ends, 2 * ends[-1:] - ends[-2:-1]))
    ties = torch.cat((ends, (ends[1:] + ends[:-1]) / 2)).float()
    around = torch.cat([ties.view(torch.int32) + step for step in (-1, 0, 1)]).clamp(min=0)
    points = around.unique().view(torch.float32)
    every = _bf16(_count(2**16 if fmt else 2**15))
    points = torch.cat((points, -points)) if fmt else points  # scales are not negative
    cases = [Case(DECODED, codes, {"values": values})]
    for case, x in ("ties and neighbours", points), ("every BF16 value", every):
        made = encode(x.float(), fmt) if fmt else encode_e8m0(x.float())
        cases.insert(0, Case(case, x, {"codes": made}))
    return cases


# --- weights ---


@cache
def _draws(numel: int, seed: int) -> torch.Tensor:
    """Return int64 [numel] of 16 random bits: those of docs/numerics.md, section 7, at step 1."""
    return element_draws(_count(numel), seed, 0, 1)


def _count(end: int) -> torch.Tensor:
    """Return int64 [end] of the numbers below ``end``."""
    return torch.arange(end, dtype=torch.int64, device="cpu")


def _bf16(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).to(torch.int16).view(torch.bfloat16)


def _block(height: int, width: int, amax: int, seed: int) -> torch.Tensor:
    """Return BF16 [height, width] whose amax has the bits ``amax``, and is one of the elements.

    One in four elements is any value down to 2^-8 of the amax. The others are multiples of 1/32 of
    its power of two, or of 1/24 or 1/28 of the amax. These are half-way between two codes if the
    scale is a power of two, amax / 6 or amax / 448.
    """
    draws = _draws(height * width, seed)
    largest, power = (_bf16(_count(1)[0] + bits).double() for bits in (amax, amax & 0x7F80))
    kind, count = draws >> 5 & 3, draws & 0x1F
    steps = torch.stack((power / 32, largest / 24, largest / 28, largest))[kind]
    below = _bf16((amax - (draws & 0x3FF)).clamp(min=0)).double()
    magnitudes = torch.where(kind == 3, below, steps * count).clamp(max=largest)
    magnitudes[int(draws[0]) % len(draws)] = largest
    return torch.where(draws >= 0x8000, -magnitudes, magnitudes).bfloat16().view(height, width)


def _block_cases(dialect: Dialect) -> list[Case]:
    height = blocks_of(dialect.name, (256, 256)).block_h  # 256: one block is the tensor
    shape = {256: (4, 32), 128: (128, 128)}.get(height, (1, 32))
    has_ties = isinstance(dialect.recipe.numerics, NVFP4Numerics)
    weights: dict[str, torch.Tensor] = {}
    for name, amaxes in (AMAXES | (AMAXES_OF_NVFP4 if has_ties else {})).items():
        some = amaxes[::4] if height == 128 else amaxes
        blocks = [_block(*shape, amax, i) for i, amax in enumerate(some)]
        if height == 256:
            weights |= {f"{name}, {i}": block for i, block in enumerate(blocks)}
        else:
            weights[name] = torch.cat(blocks, dim=int(height == 128))
    zeros = torch.zeros(shape if height == 128 else (1, 32), dtype=torch.bfloat16, device="cpu")
    weights["zeros"] = torch.cat((zeros, -zeros), dim=1)
    return [_case(name, dialect, weight) for name, weight in weights.items()]


def _tensor_cases(dialect: Dialect) -> list[Case]:
    cases = []
    for seed, (rows, cols) in enumerate(SHAPES):
        draws = _draws(rows * cols, seed).view(rows, cols)
        # From 2^-19 to 2^4, ascending by rows, and spread over 2^8 within a row.
        exponents = 108 + _count(rows)[:, None] * 16 // rows + (draws >> 8) % 8
        weight = _bf16((draws & 0x807F) | exponents << 7)
        weight[rows // 2] *= int(rows == 1)  # zeros of both signs
        weight[0, 0], weight[0, 1] = 0.0, -0.0
        cases.append(_case(f"{rows}x{cols}", dialect, weight))
    return cases


def _case(name: str, dialect: Dialect, weight: torch.Tensor) -> Case:
    whole = quantize(weight, dialect.recipe, columnwise=False)
    return Case(name, weight, dialect.encode(whole.quantized_storage))
