"""The choice of what computes a product of quantized matrices, with its reason.

A product is ``a @ b.T`` of two quantized matrices, both [rows, contraction] and both as stored: the
rowwise codes, or the columnwise ones, which are the transpose. torch reads five kinds:

    tensorwise   FP8, one FP32 scale a matrix                           Ada (8.9) and newer
    rowwise      FP8, one FP32 scale a row                              Ada (8.9) and newer
    blockwise    FP8, FP32 scales of 1x128, one side may be 128x128     Hopper (9.0) only
    mxfp8        FP8, E8M0 scales of 1x32 in the 128x4 layout           Blackwell (10.0) and newer
    nvfp4        E2M1, E4M3 scales of 1x16 in the 128x4 layout, and an
                 FP32 scale a matrix                                    Blackwell (10.0) and newer

Where the library or the hardware cannot multiply codes, both operands are decoded and multiplied in
the result's dtype: the same mathematics, at the speed of that dtype. :func:`engine` decides from
shapes, recipes and the device, and gives the reason; it tries no call.
:mod:`zerocast.nn.scaled_mm` multiplies.

Sources: the checks in torch's ``_scaled_mm`` and ``torch.nn.functional.scaled_mm`` (which the block
kinds need), and cuBLAS's documentation, "Scaling Factors Layouts".
"""

from dataclasses import dataclass
from enum import Enum

import torch

from zerocast.layout import BlockGrid, Plane
from zerocast.numerics import (
    E5M2,
    ElementFormat,
    Float8DelayedNumerics,
    Float8Numerics,
    MXNumerics,
    NVFP4Numerics,
)
from zerocast.recipes import Recipe


class Product(Enum):
    """One of a linear layer's three products; its value says which operands are columnwise.

    GEMMs on codes sum along rows of codes, so the two gradients read columnwise codes::

        output            y  = Q(x) Q(w)^T        rowwise, rowwise
        input gradient    dx = Q(dy) Q(w)         rowwise, columnwise
        weight gradient   dw = Q(dy)^T Q(x)       columnwise, columnwise
    """

    OUTPUT = (False, False)
    INPUT_GRADIENT = (False, True)
    WEIGHT_GRADIENT = (True, True)

    @property
    def title(self) -> str:
        """The name of the product, for sentences."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class Side:
    """The description of one operand of a product, without its bytes.

    Attributes:
        recipe: the recipe of the quantized tensor.
        shape: the shape of its matrix, [M, K].
        columnwise: whether the product reads the columnwise copy, so that the contraction runs
            over M.
    """

    recipe: Recipe
    shape: tuple[int, int]
    columnwise: bool

    @property
    def rows(self) -> int:
        """The rows of ``a``, or of ``b``, in ``a @ b.T``."""
        return self.shape[1] if self.columnwise else self.shape[0]

    @property
    def contraction(self) -> int:
        """The number of elements that are summed over."""
        return self.shape[0] if self.columnwise else self.shape[1]

    @property
    def plane(self) -> Plane:
        """The plane that the product reads."""
        return self.recipe.planes(self.shape)[self.columnwise]

    @property
    def stored_transposed(self) -> bool:
        """Whether the codes are stored as [contraction, rows]: columnwise ones that are quantized
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
        """The format of the codes."""
        return self.recipe.numerics.fmt


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of scaled GEMM.

    Attributes:
        name: as the module's documentation lists it.
        oldest, newest: the compute capabilities that have it.
        multiple: the number that the contraction must be a multiple of: 16 bytes of codes.
        dtypes: the dtypes of the result.
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
    """Return the kind of GEMM whose operands these are, or why there is none."""
    numerics_types = (a.recipe.numerics, b.recipe.numerics)
    if all(isinstance(numerics, NVFP4Numerics) for numerics in numerics_types):
        return NVFP4
    if all(isinstance(numerics, MXNumerics) for numerics in numerics_types):
        if all(numerics.fmt.bits == 8 for numerics in numerics_types):
            return MXFP8
        return "no GEMM that all builds of torch have multiplies MXFP4"
    if not all(
        isinstance(numerics, (Float8Numerics, Float8DelayedNumerics)) for numerics in numerics_types
    ):
        return "its operands are quantized by schemes that no GEMM multiplies with each other"
    if all(side.grid.num_blocks == 1 for side in (a, b)):
        return TENSORWISE
    grids = a.grid, b.grid
    if all(g.block_w == g.cols and 1 in (g.block_h, g.num_blocks) for g in grids):  # a scale a row
        return ROWWISE
    shapes = [(g.block_h, g.block_w) for g in grids]
    if shapes in ([(1, 128), (1, 128)], [(1, 128), (128, 128)], [(128, 128), (1, 128)]):
        return BLOCKWISE
    one, other = (f"{h}x{w}" for h, w in shapes)
    return f"no GEMM multiplies FP8 in blocks of {one} by FP8 in blocks of {other}"


def _unavailable(kind: Kind, device: torch.device) -> str | None:
    """Say why ``device`` has no GEMM of this kind; None where it has."""
    if device.type != "cuda" and kind not in (TENSORWISE, ROWWISE):
        return f"torch has no {kind.name} GEMM for {device.type}"
    if device.type != "cuda":
        return (
            f"the library's FP8 GEMM for {device.type} decodes, too, and is slower than decoding "
            f"once and multiplying in high precision"
        )
    if torch.version.hip is not None:
        return "this torch is built for ROCm, whose scaled GEMMs read other formats"
    capability = torch.cuda.get_device_capability(device)
    if not kind.oldest <= capability <= kind.newest:
        return (
            f"{kind.name} GEMMs need compute capability {_span(kind)}, and "
            f"{torch.cuda.get_device_name(device)} has {_dotted(capability)}"
        )
    return None


def _unfit(kind: Kind, a: Side, b: Side, dtype: torch.dtype) -> str | None:
    """Say why a GEMM that the device has does not take these operands."""
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
class Engine:
    """The engine of one product, and why the library does not compute it.

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
    """Choose what computes ``a @ b.T`` in ``dtype`` on ``device``."""
    kind = kind_of(a, b)
    if isinstance(kind, str):
        return Engine(None, kind)
    reason = _unavailable(kind, device) or _unfit(kind, a, b, dtype)
    return Engine(kind if reason is None else None, reason or "")


def _span(kind: Kind) -> str:
    oldest, newest = _dotted(kind.oldest), _dotted(kind.newest)
    return f"{oldest} or newer" if kind.newest == _ANY else f"{oldest} to {newest}"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
