"""What torch's scaled GEMMs multiply, when they can, and how they want codes and scales to lie.

A product is ``a @ b.T`` of two quantized matrices, both [rows, contraction] and both as stored: the
rowwise codes, or the columnwise ones, which are the transpose. torch reads five kinds:

    tensorwise   FP8, one FP32 scale a matrix                           Ada (8.9) and newer
    rowwise      FP8, one FP32 scale a row                              Ada (8.9) and newer
    blockwise    FP8, FP32 scales of 1x128, one side may be 128x128     Hopper (9.0) only
    mxfp8        FP8, E8M0 scales of 1x32 in the 128x4 layout           Blackwell (10.0) and newer
    nvfp4        E2M1, E4M3 scales of 1x16 in the 128x4 layout, and an
                 FP32 scale a matrix                                    Blackwell (10.0) and newer

Sources: the checks in torch's ``_scaled_mm`` and ``torch.nn.functional.scaled_mm`` (which the block
kinds need; torch 2.10 has it), and cuBLAS's documentation, "Scaling Factors Layouts".

NOT here: what is done where the library cannot (:mod:`zerocast.nn.gemm`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch

from zerocast.formats import E4M3, E5M2, ElementFormat
from zerocast.layout import BlockGrid, Plane
from zerocast.nn.swizzle import swizzle
from zerocast.numerics import Float8DelayedNumerics, Float8Numerics, MXFP8Numerics, NVFP4Numerics
from zerocast.recipes import Recipe
from zerocast.tensors import QuantizedStorage, dequantize


@dataclass(frozen=True, slots=True)
class Side:
    """What one operand of a product is; no bytes.

    Attributes:
        recipe: of the quantized tensor.
        shape: of its matrix, [M, K].
        columnwise: whether the product reads the columnwise copy, so that the contraction runs
            over M.
    """

    recipe: Recipe
    shape: tuple[int, int]
    columnwise: bool

    @property
    def rows(self) -> int:
        """Of the product's result that this operand gives."""
        return self.shape[1] if self.columnwise else self.shape[0]

    @property
    def contraction(self) -> int:
        """Elements that are summed over."""
        return self.shape[0] if self.columnwise else self.shape[1]

    @property
    def plane(self) -> Plane:
        """What the product reads."""
        return self.recipe.planes(self.shape)[self.columnwise]

    @property
    def stored_transposed(self) -> bool:
        """Whether the codes lie as [contraction, rows]: columnwise ones that are quantized
        independently, or that are the rowwise ones.
        """
        return self.columnwise and not self.plane.is_transposed

    @property
    def grid(self) -> BlockGrid:
        """The blocks over [rows, contraction]."""
        grid = self.plane.grid
        return grid.transposed() if self.stored_transposed else grid

    @property
    def fmt(self) -> ElementFormat:
        """Of the codes."""
        return self.recipe.numerics.fmt


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of scaled GEMM.

    Attributes:
        name: as the module's documentation lists it.
        oldest, newest: the compute capabilities that have it.
        multiple: what the contraction must be a multiple of: 16 bytes of codes.
        dtypes: of the result.
        needs_functional: whether ``torch.nn.functional.scaled_mm`` is needed.
    """

    name: str
    oldest: tuple[int, int]
    newest: tuple[int, int]
    multiple: int
    dtypes: tuple[torch.dtype, ...]
    needs_functional: bool


_ANY = (99, 9)
_BF16 = (torch.bfloat16,)
TENSORWISE = Kind(
    "tensorwise", (8, 9), _ANY, 16, (torch.bfloat16, torch.float16, torch.float32), False
)
ROWWISE = Kind("rowwise", (8, 9), _ANY, 16, _BF16, False)
BLOCKWISE = Kind("blockwise", (9, 0), (9, 9), 16, _BF16, True)
MXFP8 = Kind("mxfp8", (10, 0), _ANY, 32, _BF16, True)
NVFP4 = Kind("nvfp4", (10, 0), _ANY, 32, _BF16, True)


def kind_of(a: Side, b: Side) -> Kind | str:
    """The kind of GEMM whose operands these are, or why there is none."""
    numerics_types = (a.recipe.numerics, b.recipe.numerics)
    if all(isinstance(numerics, NVFP4Numerics) for numerics in numerics_types):
        return NVFP4
    if all(isinstance(numerics, MXFP8Numerics) for numerics in numerics_types):
        return MXFP8
    if not all(
        isinstance(numerics, (Float8Numerics, Float8DelayedNumerics)) for numerics in numerics_types
    ):
        return "its operands are quantized by schemes that no GEMM multiplies with each other"
    if all(side.grid.num_blocks == 1 for side in (a, b)):
        return TENSORWISE
    if all(side.grid.block_w == side.grid.cols and _has_row_scales(side) for side in (a, b)):
        return ROWWISE
    shapes = [(side.grid.block_h, side.grid.block_w) for side in (a, b)]
    if shapes in ([(1, 128), (1, 128)], [(1, 128), (128, 128)], [(128, 128), (1, 128)]):
        return BLOCKWISE
    one, other = (f"{h}x{w}" for h, w in shapes)
    return f"no GEMM multiplies FP8 in blocks of {one} by FP8 in blocks of {other}"


def why_not(
    a: Side, b: Side, dtype: torch.dtype, device: torch.device
) -> tuple[Kind | None, str | None]:
    """The kind of GEMM that multiplies these operands, and why ``device`` cannot run it: None where
    it can.
    """
    kind = kind_of(a, b)
    if isinstance(kind, str):
        return None, kind
    if device.type != "cuda":
        return kind, (
            f"the library's FP8 GEMM for {device.type} decodes, too, and is slower than decoding "
            f"once and multiplying in high precision"
        )
    if torch.version.hip is not None:
        return kind, "this torch is built for ROCm, whose scaled GEMMs read other formats"
    capability = torch.cuda.get_device_capability(device)
    if not kind.oldest <= capability <= kind.newest:
        return kind, (
            f"{kind.name} GEMMs need compute capability {_span(kind)}, and "
            f"{torch.cuda.get_device_name(device)} has {_dotted(capability)}"
        )
    if kind.needs_functional and not hasattr(torch.nn.functional, "scaled_mm"):
        return kind, f"torch {torch.__version__} has no torch.nn.functional.scaled_mm; 2.10 has"
    return kind, _unfit(kind, a, b, dtype)


def _unfit(kind: Kind, a: Side, b: Side, dtype: torch.dtype) -> str | None:
    """Why a GEMM that the device has does not take these operands."""
    if a.fmt == b.fmt == E5M2:
        return "no GEMM multiplies E5M2 by E5M2"
    if dtype not in kind.dtypes:
        return f"{kind.name} GEMMs do not give {dtype}"
    if a.contraction % kind.multiple or b.rows % 16:
        return (
            f"{kind.name} GEMMs need a contraction of a multiple of {kind.multiple} and columns of "
            f"a multiple of 16, got {a.contraction} and {b.rows}"
        )
    if kind is BLOCKWISE and (a.rows % 4 or b.rows % 4):
        return f"blockwise GEMMs need rows of a multiple of 4, got {a.rows} and {b.rows}"
    return None


@dataclass(frozen=True, slots=True)
class Arguments:
    """One operand as a scaled GEMM takes it.

    Attributes:
        codes: [rows, contraction] (contraction / 2 for E2M1), contiguous, of torch's dtype.
        scales: one or two tensors, in the kind's layout.
        scalings: the names of :class:`torch.nn.functional.ScalingType` that they have.
    """

    codes: torch.Tensor
    scales: tuple[torch.Tensor, ...]
    scalings: tuple[str, ...]


def arguments(kind: Kind, side: Side, storage: QuantizedStorage) -> Arguments:
    """The operand ``side`` of ``storage`` for a GEMM of ``kind``.

    Bytes are copied where the library wants another order than the stored one: columnwise codes
    that are stored as [M, K], and swizzled scales.
    """
    codes, scale_inv = _stored(side, storage)
    if side.stored_transposed:
        codes = codes.t().contiguous()
    codes = codes.view(_torch_dtype(side.fmt))
    if kind is TENSORWISE:
        return Arguments(codes, (scale_inv.view(()),), ("TensorWise",))
    if kind is ROWWISE:
        scales = scale_inv.expand(side.rows).view(side.rows, 1)
        return Arguments(codes, (scales.contiguous(),), ("RowWise",))
    if kind is BLOCKWISE:
        # Stored with the blocks along the contraction in one column (1x128: [contraction / 128,
        # rows]; 128x128: [rows / 128, contraction / 128 up to a multiple of 4]); either way the
        # transposed view has the shape and the strides that cuBLAS wants.
        square = side.grid.block_h == 128
        return Arguments(
            codes, (scale_inv.t(),), ("BlockWise128x128" if square else "BlockWise1x128",)
        )
    plane = swizzle(scale_inv.t() if side.stored_transposed else scale_inv)
    if kind is MXFP8:
        return Arguments(codes, (plane.view(torch.float8_e8m0fnu),), ("BlockWise1x32",))
    assert kind is NVFP4
    numerics = side.recipe.numerics
    assert isinstance(numerics, NVFP4Numerics)
    # The decoding factor of a matrix: an element is E2M1 * E4M3 * amax / (6 * scale_max).
    matrix_scale = storage.buffers["amax"].view(()) / (numerics.fmt.max * numerics.scale_max)
    block_scales = plane.view(torch.float8_e4m3fn)
    return Arguments(codes, (block_scales, matrix_scale), ("BlockWise1x16", "TensorWise"))


def multiply(
    kind: Kind,
    a: Arguments,
    b: Arguments,
    dtype: torch.dtype,
    bias: torch.Tensor | None,
    *,
    fast_accumulation: bool,
) -> torch.Tensor:
    """``a @ b.T + bias`` by the library, [rows of a, rows of b] in ``dtype``."""
    if not kind.needs_functional:
        return torch._scaled_mm(
            a.codes,
            b.codes.t(),
            a.scales[0],
            b.scales[0] if kind is TENSORWISE else b.scales[0].t(),
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=fast_accumulation,
        )
    options: dict[str, Any] = {"bias": bias, "output_dtype": dtype}
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
    """The codes as a matrix and the scales of an operand; refused where they are stale."""
    scale_inv = storage.buffers["rowwise_scale_inv"]
    if not side.columnwise:
        return storage.buffers["rowwise_data"].view(side.shape[0], -1), scale_inv
    codes = "columnwise_data" if "columnwise_data" in storage.buffers else "rowwise_data"
    data = storage.derived(codes)
    data = data.view(side.shape) if side.stored_transposed else data
    return data, storage.buffers.get("columnwise_scale_inv", scale_inv)


def _has_row_scales(side: Side) -> bool:
    """Whether each row has one scale: its own, or one for all rows."""
    return side.grid.block_h == 1 or side.grid.num_blocks == 1


@cache
def _torch_dtype(fmt: ElementFormat) -> torch.dtype:
    if fmt == E4M3:
        return torch.float8_e4m3fn
    return torch.float8_e5m2 if fmt == E5M2 else torch.float4_e2m1fn_x2


def _span(kind: Kind) -> str:
    oldest, newest = _dotted(kind.oldest), _dotted(kind.newest)
    return f"{oldest} or newer" if kind.newest == _ANY else f"{oldest} to {newest}"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


class Product(Enum):
    """One of a linear layer's three products; its value says which operands are columnwise."""

    OUTPUT = (False, False)
    INPUT_GRADIENT = (False, True)
    WEIGHT_GRADIENT = (True, True)

    @property
    def title(self) -> str:
        """Its name in sentences."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class Engine:
    """Who computes a product.

    Attributes:
        kind: the library's GEMM, or None for decoding.
        reason: why not the library; empty where it does.
    """

    kind: Kind | None
    reason: str

    def __str__(self) -> str:
        if self.kind is None:
            return f"decoded operands: {self.reason}"
        call = "torch.nn.functional.scaled_mm" if self.kind.needs_functional else "torch._scaled_mm"
        return f"{call}, {self.kind.name}"


def engine(a: Side, b: Side, dtype: torch.dtype, device: torch.device) -> Engine:
    """Who computes ``a @ b.T`` in ``dtype`` on ``device``."""
    kind, reason = why_not(a, b, dtype, device)
    return Engine(kind if reason is None else None, reason or "")


def gemm(
    product: Product,
    a: QuantizedStorage,
    b: QuantizedStorage,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """One product of two quantized matrices.

    Args:
        product: which one.
        a: x [T, K] for the output, dy [T, M] for the gradients.
        b: w [M, K] for the output and the input gradient, x [T, K] for the weight gradient.
        dtype: of the result.
        bias: [columns of the result], in ``dtype``; added before rounding where the library can.

    Returns:
        [T, M], [T, K] or [M, K].

    A tensor without the columnwise copy that a product reads is decoded, rowwise.

    Raises:
        StaleCopyError: where a columnwise copy is needed and stale.
    """
    operands = [(a, product.value[0]), (b, product.value[1])]
    if all(storage.has_columnwise or not columnwise for storage, columnwise in operands):
        sides = [_side(*operand) for operand in operands]
        kind = engine(sides[0], sides[1], dtype, a.device).kind
        if kind is not None:
            return _by_library(kind, product, sides, (a, b), dtype, bias)
    left, right = (_values(*operand).to(dtype) for operand in operands)
    with torch._C._DisableAutocast():
        if product is Product.OUTPUT:
            return torch.nn.functional.linear(left, right, bias)
        assert bias is None
        return left @ right if product is Product.INPUT_GRADIENT else left.t() @ right


def _side(storage: QuantizedStorage, columnwise: bool) -> Side:
    grid = storage.grid
    return Side(storage.recipe, (grid.rows, grid.cols), columnwise)


def _by_library(
    kind: Kind,
    product: Product,
    sides: list[Side],
    storages: tuple[QuantizedStorage, QuantizedStorage],
    dtype: torch.dtype,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    a, b = (arguments(kind, side, storage) for side, storage in zip(sides, storages, strict=True))
    in_epilogue = bias is not None and dtype in (torch.bfloat16, torch.float16)
    # Gradients sum over more terms and of both signs: there Hopper's shorter accumulator shows.
    out = multiply(
        kind,
        a,
        b,
        dtype,
        bias if in_epilogue else None,
        fast_accumulation=product is Product.OUTPUT,
    )
    return out if bias is None or in_epilogue else out.add_(bias)


def _values(storage: QuantizedStorage, columnwise: bool) -> torch.Tensor:
    """[M, K] FP32, decoded. A tensor made without its columnwise copy lends the rowwise one."""
    values = dequantize(storage, columnwise=columnwise and storage.has_columnwise)
    return values.view(-1, values.shape[-1])
