"""The products of quantized matrices, and the order of codes and scales that torch's scaled GEMMs
read.

:func:`gemm` multiplies by the library where :func:`zerocast.nn.engines.engine` says that it can,
and decodes both operands elsewhere.

Note: the 128x4 layout
~~~~~~~~~~~~~~~~~~~~~~
cuBLAS reads the scales of MXFP8 and NVFP4 operands in tiles of 128 rows by 4 columns. The tiles of
a plane are in row-major order; inside a tile of 512 bytes the scale of row ``r`` and column ``c``
is at::

    (r % 32) * 16 + (r // 32) * 4 + c

so 32 rows of 16 bytes, each of 4 groups of 4 scales (torch calls it ``SWIZZLE_32_4_4``). Stored
planes are compact, row by row, because they are also what checkpoints, transposes and decoding
read; a GEMM's copy of them is a 16th or a 32nd of the codes it multiplies.

Source: NVIDIA's cuBLAS documentation, "1D Block Scaling Factors Layout".
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from zerocast.arguments import check_shape, check_tensor
from zerocast.errors import InputError
from zerocast.nn.engines import (
    BLOCKWISE,
    MXFP8,
    NVFP4,
    ROWWISE,
    TENSORWISE,
    Kind,
    Product,
    Side,
    engine,
)
from zerocast.numerics import E4M3, E5M2, ElementFormat, NVFP4Numerics
from zerocast.tensors import QuantizedStorage, dequantize


def gemm(
    product: Product,
    a: QuantizedStorage,
    b: QuantizedStorage,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute one product of two quantized matrices.

    Args:
        product: the product of the layer.
        a: x [T, K] for the output, dy [T, M] for the gradients.
        b: w [M, K] for the output and the input gradient, x [T, K] for the weight gradient.
        dtype: the dtype of the result.
        bias: [columns of the result], in ``dtype``; added before rounding where the library can.

    Returns:
        [T, M], [T, K] or [M, K].

    A tensor without the columnwise copy that a product reads is decoded, rowwise.

    Raises:
        StaleCopyError: where a columnwise copy is needed and stale.
    """
    operands = [(a, product.value[0]), (b, product.value[1])]
    if all(storage.has_columnwise or not columnwise for storage, columnwise in operands):
        sides = [
            Side(s.recipe, (s.grid.rows, s.grid.cols), columnwise) for s, columnwise in operands
        ]
        kind = engine(sides[0], sides[1], dtype, a.device).kind
        if kind is not None:
            given = (arguments(kind, sides[0], a), arguments(kind, sides[1], b))
            in_epilogue = bias is not None and dtype in (torch.bfloat16, torch.float16)
            added = bias if in_epilogue else None
            # Gradients sum more terms, of both signs: there Hopper's shorter accumulator loses
            # bits.
            fast = product is Product.OUTPUT
            out = multiply(kind, *given, dtype, added, fast_accumulation=fast)
            return out if bias is None or in_epilogue else out.add_(bias)
    left, right = (_values(*operand).to(dtype) for operand in operands)
    with torch._C._DisableAutocast():
        if product is Product.OUTPUT:
            return torch.nn.functional.linear(left, right, bias)
        assert bias is None
        return left @ right if product is Product.INPUT_GRADIENT else left.t() @ right


def _values(storage: QuantizedStorage, columnwise: bool) -> torch.Tensor:
    """Decode to [M, K] FP32; the rowwise codes where there are no columnwise ones."""
    values = dequantize(storage, columnwise=columnwise and storage.has_columnwise)
    return values.view(-1, values.shape[-1])


# --- the operands of a scaled GEMM ---


@dataclass(frozen=True, slots=True)
class GemmOperand:
    """One operand as a scaled GEMM takes it.

    Attributes:
        codes: [rows, contraction] (contraction / 2 for E2M1), contiguous, of torch's dtype.
        scales: one or two tensors, in the kind's layout.
        scalings: the names of :class:`torch.nn.functional.ScalingType` that they have.
    """

    codes: torch.Tensor
    scales: tuple[torch.Tensor, ...]
    scalings: tuple[str, ...]


def arguments(kind: Kind, side: Side, storage: QuantizedStorage) -> GemmOperand:
    """Return the operand ``side`` of ``storage`` for a GEMM of ``kind``.

    Bytes are copied where the library reads another order than the stored one: columnwise codes
    that are stored as [M, K], and swizzled scales.
    """
    codes, scale_inv = _stored(side, storage)
    if side.stored_transposed:
        codes = codes.t().contiguous()
    codes = codes.view(_torch_dtype(side.fmt))
    if kind is TENSORWISE:
        return GemmOperand(codes, (_by_row(side, scale_inv).view(()),), ("TensorWise",))
    if kind is ROWWISE:
        scales = _by_row(side, scale_inv).expand(side.rows).view(side.rows, 1)
        return GemmOperand(codes, (scales.contiguous(),), ("RowWise",))
    if kind is BLOCKWISE:
        # Stored with the blocks along the contraction in one column (1x128: [contraction / 128,
        # rows]; 128x128: [rows / 128, contraction / 128 up to a multiple of 4]); either way the
        # transposed view has the shape and the strides that cuBLAS needs.
        scaling = "BlockWise128x128" if side.grid.block_h == 128 else "BlockWise1x128"
        return GemmOperand(codes, (scale_inv.t(),), (scaling,))
    plane = swizzle(scale_inv.t() if side.stored_transposed else scale_inv)
    if kind is MXFP8:
        return GemmOperand(codes, (plane.view(torch.float8_e8m0fnu),), ("BlockWise1x32",))
    assert kind is NVFP4
    numerics = side.recipe.numerics
    assert isinstance(numerics, NVFP4Numerics)
    # The decoding factor of a matrix: an element is E2M1 * E4M3 * amax / (6 * scale_max).
    matrix_scale = storage.buffers["amax"].view(()) / (numerics.fmt.max * numerics.scale_max)
    block_scales = plane.view(torch.float8_e4m3fn)
    return GemmOperand(codes, (block_scales, matrix_scale), ("BlockWise1x16", "TensorWise"))


def multiply(
    kind: Kind,
    a: GemmOperand,
    b: GemmOperand,
    dtype: torch.dtype,
    bias: torch.Tensor | None,
    *,
    fast_accumulation: bool,
) -> torch.Tensor:
    """Return ``a @ b.T + bias`` by the library, [rows of a, rows of b] in ``dtype``."""
    options: dict[str, Any]
    if not kind.needs_functional:
        scale_b = b.scales[0] if kind is TENSORWISE else b.scales[0].t()
        options = {"bias": bias, "out_dtype": dtype, "use_fast_accum": fast_accumulation}
        return torch._scaled_mm(a.codes, b.codes.t(), a.scales[0], scale_b, **options)
    options = {"bias": bias, "output_dtype": dtype}
    for name, operand in (("a", a), ("b", b)):
        scalings = [getattr(torch.nn.functional.ScalingType, s) for s in operand.scalings]
        options[f"scale_{name}"] = list(operand.scales)
        options[f"scale_recipe_{name}"] = scalings
        if kind is not BLOCKWISE:
            kinds = torch.nn.functional.SwizzleType
            swizzles = [kinds.SWIZZLE_32_4_4, kinds.NO_SWIZZLE][: len(scalings)]
            options[f"swizzle_{name}"] = swizzles
    return torch.nn.functional.scaled_mm(a.codes, b.codes.t(), **options)


def _stored(side: Side, storage: QuantizedStorage) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes as a matrix and the scales of an operand; raise StaleCopyError if they are
    stale.
    """
    buffers = storage.buffers
    if not side.columnwise:
        return buffers["rowwise_data"].view(side.shape[0], -1), buffers["rowwise_scale_inv"]
    # Buffers that both copies share are stored as rowwise ones; all others of a saved operand are
    # columnwise.
    codes, scale_inv = (
        f"columnwise_{name}" if f"columnwise_{name}" in buffers else f"rowwise_{name}"
        for name in ("data", "scale_inv")
    )
    data = storage.derived(codes)
    return data.view(side.shape) if side.stored_transposed else data, buffers[scale_inv]


def _by_row(side: Side, scale_inv: torch.Tensor) -> torch.Tensor:
    """Return [1] or [rows]: the scales of an operand of one block, or of one a row. Those of blocks
    of 128 are stored in a padded plane.
    """
    layout = side.plane.scales
    entries = scale_inv.view(layout.shape)
    entries = entries.t() if layout.transposed else entries
    return entries[: layout.rows, : layout.cols].reshape(-1)


@cache
def _torch_dtype(fmt: ElementFormat) -> torch.dtype:
    if fmt == E4M3:
        return torch.float8_e4m3fn
    return torch.float8_e5m2 if fmt == E5M2 else torch.float4_e2m1fn_x2


# --- the 128x4 layout ---

TILE_ROWS, TILE_COLS = 128, 4

_GROUPS, _GROUP_ROWS = 4, 32
"""A tile's 128 rows are 4 groups of 32; rows of equal index in their groups are adjacent."""


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Return a compact plane of scales in the order that a block-scaled GEMM reads.

    Args:
        scales: [R, C], whole tiles: R a multiple of 128, C of 4; any dtype and strides.

    Returns:
        [R * C], contiguous, of the same dtype.

    Raises:
        InputError: where the plane is not made of whole tiles.
    """
    rows, cols = _tiles(check_tensor("scales", scales).shape)
    tiles = scales.view(rows, _GROUPS, _GROUP_ROWS, cols, TILE_COLS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle(scales: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return the compact plane that :func:`swizzle` was given.

    Args:
        scales: [R * C], contiguous.
        shape: (R, C): R a multiple of 128, C of 4.

    Returns:
        [R, C], contiguous.

    Raises:
        InputError: where ``shape`` is not made of whole tiles, or holds another number of scales.
    """
    check_tensor("scales", scales)
    rows, cols = _tiles(check_shape("shape", shape))
    if scales.numel() != shape[0] * shape[1]:
        raise InputError(
            f"unswizzle into {tuple(shape)} needs {shape[0] * shape[1]} scales, got "
            f"{scales.numel()}; give the shape of the plane that was swizzled."
        )
    tiles = scales.reshape(rows, cols, _GROUP_ROWS, _GROUPS, TILE_COLS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(shape)


def _tiles(shape: tuple[int, ...] | torch.Size) -> tuple[int, int]:
    """Return the height and the width of a plane in tiles."""
    if len(shape) != 2 or shape[0] % TILE_ROWS or shape[1] % TILE_COLS:
        raise InputError(
            f"the 128x4 layout needs planes of whole tiles, [a multiple of {TILE_ROWS}, a multiple "
            f"of {TILE_COLS}], got shape {tuple(shape)}; pad the plane with zeros."
        )
    return shape[0] // TILE_ROWS, shape[1] // TILE_COLS
