"""The operations that a cast is made of: what each computes, and the contract that every backend
fulfils.

An operation serves *many weights at once*. It is given everything that stays the same between steps
(shapes, owners, buffers) when it is prepared, and returns a :data:`Launch`: a callable without
arguments that a step calls. So a step is a constant number of launches, whatever the number of
weights, and allocates nothing.

    partial_amax    master shards           -> block and tensor amaxes (then one all-reduce MAX)
    compute_scale   amaxes                  -> stored scales and tensor amax
    partial_cast    master shards, amaxes   -> this rank's codes, to the nibble
    transpose       gathered codes, scales  -> columnwise codes and scales
    dequantize      codes, scales           -> values

The laws are those of the package's documentation, "Numerics": every backend gives the same bytes
for every input. Amaxes are the int32 bit patterns of non-negative FP32 values: those order like
integers, so an integer maximum is exact and the same in every communicator, and NaN (canonical,
``0x7FC00000``) is the largest and wins.

NOT here: which operations a recipe needs (:mod:`zerocast.recipes`) and when they run
(:mod:`zerocast.cast`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from zerocast.formats import E2M1, E4M3, ElementFormat
from zerocast.layout import BlockGrid, Extent, ScaleLayout

Launch = Callable[[], None]
"""A prepared operation: runs it once on the buffers that it was prepared for."""

NUMERICS_VERSION = 1
"""Changes with any change of the bytes that some input gives; ranks of one cast must agree on
it."""

INFINITY_BITS = 0x7F800000
"""The int32 bit pattern of +infinity: an amax that is not smaller is not finite."""

NAN_BITS = 0x7FC00000
"""The canonical NaN, which every NaN becomes before it enters an amax buffer."""


# --- scaling laws: how an amax becomes a scale ---


@dataclass(frozen=True, slots=True)
class Float8Law:
    """FP8 with one FP32 scale a block: ``scale = max / amax``, ``code = FP8(x * scale)``, stored
    ``1 / scale``.

    The order of the cases is: an amax that is not finite gives a NaN ``scale_inv`` and NaN codes;
    an amax below ``amax_epsilon`` is replaced by it; amax 0 gives scale 1; an infinite scale
    becomes FLT_MAX; ``power_2_scale`` clears the 23 mantissa bits of the scale. The tensor amax is
    not used.
    """

    fmt: ElementFormat
    power_2_scale: bool = False
    amax_epsilon: float = 0.0

    scale_dtype = torch.float32


@dataclass(frozen=True, slots=True)
class NVFP4Law:
    """E2M1 codes under one E4M3 scale a block, under one amax a tensor.

    With ``g`` the tensor amax and ``a`` the block's, every operation in FP32 and ``fl`` rounding to
    FP32::

        S_enc = min(2688 / g, FLT_MAX), or 1 where g == 0          # 2688 = 448 * 6
        S_dec = E4M3(min(a * (S_enc * fl(1/6)), FLT_MAX))          # stored
        enc   = min(1 / (float(S_dec) * (1 / S_enc)), FLT_MAX)     # S_dec == 0 gives FLT_MAX
        code  = E2M1(x * enc)
        x     = E2M1(code) * ((float(S_dec) * g) * fl(1/2688))     # decoded

    A ``g`` that is not finite makes every stored scale E4M3's NaN and every code 7.
    """

    fmt: ElementFormat = E2M1
    scale_fmt: ElementFormat = E4M3

    scale_dtype = torch.uint8


Law = Float8Law | NVFP4Law


# --- operands ---


class Masters:
    """The FP32 shards that a step reads: one slot a weight, re-bound to other tensors without
    preparing anew.

    An optimizer that keeps its masters in place binds once. ``version`` counts the bindings, for a
    backend that keeps a copy of the addresses on its device.
    """

    def __init__(self, slots: int) -> None:
        self.tensors: list[torch.Tensor | None] = [None] * slots
        # Host addresses of the tensors, 0 for an empty shard; on the host whatever the default
        # device is.
        self.pointers = torch.zeros(slots, dtype=torch.int64, device="cpu")
        self.version = 0

    def bind(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Let the next step read ``tensors``: FP32, contiguous, one a slot, of the shard's size;
        None where empty.
        """
        assert len(tensors) == len(self.tensors)
        self.tensors = list(tensors)
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        self.pointers.copy_(torch.tensor(addresses, dtype=torch.int64, device="cpu"))
        self.version += 1


@dataclass(frozen=True, slots=True)
class CastShard:
    """One weight as one rank sees it: what :meth:`Backend.partial_amax` and
    :meth:`Backend.partial_cast` work on.

    Attributes:
        slot: the place of its master in :class:`Masters`.
        extent: the elements of the whole weight that this rank owns; may be empty, start and end
            anywhere.
        grid: the blocks of the whole weight.
        round_to: float32, bfloat16 or float16; a master element is rounded to it before anything
            else is done.
        block_amax: int32 [grid.num_blocks], the weight's part of the buffer that is reduced.
        tensor_amax: int32 [1]; may be the same memory as ``block_amax`` where the grid is one
            block.
        codes: uint8, flat and contiguous: the weight's codes, or a buffer for this shard's only.
        codes_start: the element whose code is in the low bits of ``codes[0]``: 0 for the whole
            weight, the extent's start rounded down to a whole byte for a shard's own buffer.
    """

    slot: int
    extent: Extent
    grid: BlockGrid
    round_to: torch.dtype
    block_amax: torch.Tensor
    tensor_amax: torch.Tensor
    codes: torch.Tensor
    codes_start: int = 0


@dataclass(frozen=True, slots=True)
class ScaleTarget:
    """Where one weight's scales go: what :meth:`Backend.compute_scale` works on.

    Attributes:
        layout: how block scales are stored, padding included.
        block_amax: int32 [layout.grid.num_blocks], reduced.
        tensor_amax: int32 [1], reduced.
        scale_inv: the law's ``scale_dtype``, ``layout.shape`` (or [1] for one block), contiguous.
            Wholly written.
        amax: FP32 [1] that receives the tensor amax, or None for a law that stores none.
    """

    layout: ScaleLayout
    block_amax: torch.Tensor
    tensor_amax: torch.Tensor
    scale_inv: torch.Tensor
    amax: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class TransposeTarget:
    """One weight's gathered codes and the columnwise copy: what :meth:`Backend.transpose` works on.

    Attributes:
        fmt: the codes' format.
        layout: how the rowwise scales are stored; ``layout.grid`` is the matrix [M, K].
        codes: uint8 [M, K * bits / 8], contiguous.
        scale_inv: the rowwise scales, ``layout.shape``.
        columnwise_layout: how the columnwise scales are stored; its grid is
            ``layout.grid.transposed()``.
        columnwise_codes: uint8 [K, ceil(M * bits / 8)], wholly written; a missing last nibble is 0.
        columnwise_scale_inv: ``columnwise_layout.shape``, wholly written. None where one plane of
            scales serves both.
    """

    fmt: ElementFormat
    layout: ScaleLayout
    codes: torch.Tensor
    scale_inv: torch.Tensor
    columnwise_layout: ScaleLayout
    columnwise_codes: torch.Tensor
    columnwise_scale_inv: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DequantizeTarget:
    """One weight's codes and the values they mean: what :meth:`Backend.dequantize` works on.

    Attributes:
        layout, codes, scale_inv: as in :class:`TransposeTarget`.
        amax: FP32 [1], or None for a law that stores none.
        out: FP32 [M, K], contiguous, wholly written.
    """

    layout: ScaleLayout
    codes: torch.Tensor
    scale_inv: torch.Tensor
    amax: torch.Tensor | None
    out: torch.Tensor


# --- the contract ---


class Backend(Protocol):
    """Who does the arithmetic. Each method prepares one operation for many weights and returns its
    launch.

    All tensors of one call lie on one device. Nothing is read or written before the launch. A
    launch with nothing to do (no weights, only empty shards) is a launch that does nothing. A
    backend says here, before the first launch, what it cannot do: by
    :class:`zerocast.errors.BackendError`.
    """

    name: str

    def partial_amax(self, shards: Sequence[CastShard], masters: Masters) -> Launch:
        """Raise ``block_amax`` and ``tensor_amax`` to the largest magnitudes of this rank's rounded
        elements.

        The buffers must be zero, or hold what earlier shards left: the launch takes maxima, it does
        not clear. Infinities are kept as ``INFINITY_BITS``, every NaN becomes ``NAN_BITS``. Work
        follows the shard.
        """
        ...

    def compute_scale(self, law: Law, targets: Sequence[ScaleTarget]) -> Launch:
        """Make the stored scales of whole weights from reduced amaxes; padding included, repeats
        included.
        """
        ...

    def partial_cast(self, law: Law, shards: Sequence[CastShard], masters: Masters) -> Launch:
        """Round, scale and encode this rank's elements into ``codes``; every other nibble keeps its
        value.
        """
        ...

    def transpose(self, targets: Sequence[TransposeTarget]) -> Launch:
        """Make the columnwise codes and scales from the gathered rowwise ones; padding included."""
        ...

    def dequantize(self, law: Law, targets: Sequence[DequantizeTarget]) -> Launch:
        """Decode whole weights to FP32. A NaN scale decodes to NaN."""
        ...
