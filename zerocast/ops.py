"""The operations that a cast is made of: what each computes, and the contract that every backend
fulfils.

An operation serves *many weights at once*. It is given everything that stays the same between steps
(shapes, owners, buffers) when it is prepared, and returns a :data:`Launch`: a callable without
arguments that a step calls. So a step is a constant number of launches, whatever the number of
weights, and allocates nothing.

    partial_amax    master shards           -> block and tensor amaxes (then one all-reduce MAX)
    partial_select  master shards, amaxes   -> 4-over-6: errors of both candidates (then one SUM)
    select          reduced errors          -> 4-over-6: the choice of every block
    compute_scale   amaxes, choices         -> stored scales, tensor amax, recipe state
    partial_cast    master shards, amaxes   -> this rank's codes, to the nibble
    transpose       gathered codes, scales  -> columnwise codes and scales
    dequantize      codes, scales           -> values
    activate        a layer's tensor        -> its rounded result, codes and scales, in one pass

A weight has a rowwise plane of codes, and where a scheme quantizes its columnwise copy
independently of the rowwise one (MXFP8, row-wise FP8) a second plane, cast in the same pass over
the master.

The laws are those of the package's documentation, "Numerics": every backend gives the same bytes
for every input. Amaxes are the int32 bit patterns of non-negative FP32 values: those order like
integers, so an integer maximum is exact and the same in every communicator, and NaN (canonical,
``0x7FC00000``) is the largest and wins.

NOT here: which operations a recipe needs (:mod:`zerocast.recipes`) and when they run
(:mod:`zerocast.cast`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from zerocast.formats import E2M1, E4M3, ElementFormat
from zerocast.layout import BlockGrid, Cuts, Extent, ScaleLayout, ceil_div

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
class Float8DelayedLaw:
    """FP8 with one FP32 scale a tensor, made from the amaxes of *earlier* casts.

    The cast multiplies by ``state.scale`` and takes the amax of what it casts in the same pass.
    When the amax ``a`` has been reduced, :meth:`Backend.compute_scale` closes the cast::

        cast_scale = scale;  scale_inv = 1 / scale      # NaN where a is not finite
        if a is finite and not 0:
            the history takes a as its newest entry and drops its oldest; entries stay in order,
            newest first, 0 where there is none yet
            m = max(history), or a itself ("most_recent"), or what the callable makes of the history
            if m is finite and positive:
                scale = min((max * 2^-margin) / m, FLT_MAX)

    Attributes:
        fmt: of the codes.
        margin: how many powers of two the scale keeps below the largest.
        amax_compute_algo: ``"max"``, ``"most_recent"``, or a function from the history, FP32
            [history length], to an FP32 tensor of one element.
    """

    fmt: ElementFormat
    margin: int = 0
    amax_compute_algo: str | Callable[[torch.Tensor], torch.Tensor] = "max"

    scale_dtype = torch.float32


@dataclass(frozen=True, slots=True)
class MXFP8Law:
    """FP8 codes under one E8M0 scale a block, a power of two rounded up.

    With ``a`` the block's amax, every operation in FP32::

        S    = E8M0(a * fl(1/max))             # stored; NaN's code 0xFF where a is not finite
        code = FP8(x * reciprocal(S))          # NaN's code under a NaN scale

    The tensor amax is not used.
    """

    fmt: ElementFormat = E4M3

    scale_dtype = torch.uint8


@dataclass(frozen=True, slots=True)
class NVFP4Law:
    """E2M1 codes under one E4M3 scale a block, under one amax a tensor.

    With ``g`` the tensor amax and ``a`` the block's, every operation in FP32 and ``fl`` rounding to
    FP32::

        S_enc = min(6 * scale_max / g, FLT_MAX), or 1 where g == 0
        S_dec = E4M3(min(a * (S_enc * fl(1/6)), FLT_MAX))          # stored
        enc   = min(1 / (float(S_dec) * (1 / S_enc)), FLT_MAX)     # S_dec == 0 gives FLT_MAX
        code  = E2M1(x * enc)
        x     = E2M1(code) * ((float(S_dec) * g) * fl(1 / (6 * scale_max)))     # decoded

    A ``g`` that is not finite makes every stored scale E4M3's NaN and every code 7.

    *4-over-6* gives each block the better one of two scales::

        base = (a / 6) * S_enc
        map4 = E4M3(min(base * 1.5, 448));  map6 = E4M3(min(base, 448))
        enc of each as above;  decoded of each = ((E2M1(code) * float(map)) * g) / (6 * scale_max)

    An element's error is ``|decoded - x|`` ("mae") or its square ("mse"), with codes rounded to
    nearest. The elements of a row inside the block are summed from left to right, then the rows
    (missing ones count 0) by the tree 8, 4, 2, 1: row r takes row r + 8, then r + 4, ... Map4 is
    taken only where its sum is strictly smaller.

    *Stochastic rounding* draws the code from the two neighbours of ``y = min(|x * enc|, 6)``, lower
    one ``lo`` and distance ``step`` between them: the upper one where
    ``(word >> 8) * 2^-24 < (y - lo) / step``, both sides exact; the sign stays. The word of an
    element is number ``index % 4`` of Philox 4x32-10 with the key (low, high half of ``seed``) and
    the counter (low, high half of ``index / 4``, the hash of the weight's name, the step), where
    ``index`` is the element's flat index in the whole weight, also where this one is a part of it;
    see :class:`Rounding`.

    Attributes:
        scale_max: the largest E4M3 scale in use: 448, or 256.
        four_over_six: None, ``"mae"`` or ``"mse"``.
        stochastic_rounding: whether codes are drawn.
        seed: 64 bits.
    """

    fmt: ElementFormat = E2M1
    scale_fmt: ElementFormat = E4M3
    scale_max: int = 448
    four_over_six: str | None = None
    stochastic_rounding: bool = False
    seed: int = 0

    scale_dtype = torch.uint8


Law = Float8Law | Float8DelayedLaw | MXFP8Law | NVFP4Law


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
class ColumnwiseShard:
    """The second plane of a weight whose columnwise codes are quantized independently.

    Its codes are stored as the rowwise ones are, [M, K]: element ``i`` of the weight has its code
    at ``i - CastShard.codes_start``.

    Attributes:
        grid: the blocks of this plane, over the same matrix.
        block_amax: int32 [grid.num_blocks].
        codes: uint8, flat and contiguous.
    """

    grid: BlockGrid
    block_amax: torch.Tensor
    codes: torch.Tensor


@dataclass(frozen=True, slots=True)
class DelayedState:
    """What :class:`Float8DelayedLaw` remembers of one tensor; the tensor's own memory.

    Attributes:
        scale: FP32 [1], what the next cast multiplies by; 1 at first.
        cast_scale: FP32 [1], what the latest cast multiplied by.
        amax_history: FP32 [history length], newest first; 0 at first.
    """

    scale: torch.Tensor
    cast_scale: torch.Tensor
    amax_history: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rounding:
    """Where the random words of a weight come from, beside the seed.

    Attributes:
        counter: int64 [2], the weight's own memory: the 32-bit hash of its name, and the step,
            which counts its casts: :meth:`Backend.compute_scale` adds one, and the cast that
            follows uses the sum (of which 32 bits enter the counter).
        origin, skip: of a part of a weight: the place of its first element in the flattened whole,
            and the elements of the whole between a row of the part and the next. So element ``i``
            of a part with ``cols`` columns is ``index = i + origin + i // cols * skip`` of the
            whole. Both are even: no byte of codes is cut.
    """

    counter: torch.Tensor
    origin: int = 0
    skip: int = 0


@dataclass(frozen=True, slots=True)
class Candidates:
    """What 4-over-6 decides by, and what ranks exchange of it, for one weight.

    A row of blocks is *cut* where more than one rank owns elements of it. Every block of the others
    belongs to one rank, which chooses and writes ``choices``. In a cut row of blocks the rank that
    owns all elements of a block's row writes that row's errors; a block's row that ranks share is a
    *segment*, and each rank writes its own elements of it. All else is 0 before the exchange, so
    a SUM of int32 bit patterns puts everything together, exactly.

    Attributes:
        choices: uint8 [num_blocks rounded up to a multiple of 4]: 1 for map4, 0 for map6.
        cut: int64 [cuts] on the CPU, ascending: the rows of blocks that are cut.
        row_errors: FP32 [cuts, block_h, blocks_w, 2]: of each row of each block the summed errors
            of map4 and map6.
        segments: int64 [segments] on the CPU, ascending: the flat index of each segment's first
            element.
        elements: FP32 [segments, block_w], rounded; 0 where the matrix has no element.
    """

    choices: torch.Tensor
    cut: torch.Tensor
    row_errors: torch.Tensor
    segments: torch.Tensor
    elements: torch.Tensor

    @staticmethod
    def words(grid: BlockGrid, cuts: Cuts) -> int:
        """int32 entries that all exchanged tensors of one weight take."""
        return sum(Candidates._sizes(grid, cuts))

    @classmethod
    def carve(cls, buffer: torch.Tensor, grid: BlockGrid, cuts: Cuts) -> Candidates:
        """The candidates of one weight in ``buffer``, int32 [words]."""
        choices, row_errors, elements = buffer.split(cls._sizes(grid, cuts))
        return cls(
            choices.view(torch.uint8),
            torch.tensor(cuts.rows, dtype=torch.int64, device="cpu"),
            row_errors.view(torch.float32).view(len(cuts.rows), grid.block_h, grid.blocks_w, 2),
            torch.tensor(cuts.segments, dtype=torch.int64, device="cpu"),
            elements.view(torch.float32).view(len(cuts.segments), grid.block_w),
        )

    @staticmethod
    def _sizes(grid: BlockGrid, cuts: Cuts) -> list[int]:
        """int32 entries of the choices, the row errors and the elements."""
        return [
            ceil_div(grid.num_blocks, 4),
            len(cuts.rows) * grid.block_h * grid.blocks_w * 2,
            len(cuts.segments) * grid.block_w,
        ]


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
        columnwise: the second plane, where it is quantized independently.
        delayed: of a weight under :class:`Float8DelayedLaw`.
        candidates: of a weight under 4-over-6.
        rounding: of a weight under stochastic rounding.
    """

    slot: int
    extent: Extent
    grid: BlockGrid
    round_to: torch.dtype
    block_amax: torch.Tensor
    tensor_amax: torch.Tensor
    codes: torch.Tensor
    codes_start: int = 0
    columnwise: ColumnwiseShard | None = None
    delayed: DelayedState | None = None
    candidates: Candidates | None = None
    rounding: Rounding | None = None


@dataclass(frozen=True, slots=True)
class ColumnwiseScales:
    """The scales of a second plane that is quantized independently.

    Attributes:
        layout, block_amax, scale_inv: as in :class:`ScaleTarget`; ``layout.grid`` is that of
            :class:`ColumnwiseShard`, or the rowwise one where one block amax serves both planes.
    """

    layout: ScaleLayout
    block_amax: torch.Tensor
    scale_inv: torch.Tensor


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
        columnwise: the second plane's scales, where it is quantized independently.
        delayed, candidates, rounding: as in :class:`CastShard`.
    """

    layout: ScaleLayout
    block_amax: torch.Tensor
    tensor_amax: torch.Tensor
    scale_inv: torch.Tensor
    amax: torch.Tensor | None = None
    columnwise: ColumnwiseScales | None = None
    delayed: DelayedState | None = None
    candidates: Candidates | None = None
    rounding: Rounding | None = None


@dataclass(frozen=True, slots=True)
class SelectTarget:
    """One weight's exchanged errors: what :meth:`Backend.select` works on.

    Attributes:
        grid, block_amax, tensor_amax: as in :class:`CastShard`, amaxes reduced.
        candidates: reduced; ``choices`` of cut rows of blocks are written.
    """

    grid: BlockGrid
    block_amax: torch.Tensor
    tensor_amax: torch.Tensor
    candidates: Candidates


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


# --- activations: an operation of a layer, and the cast of what it makes ---

Function = Literal[
    "identity", "relu", "gelu", "gelu_tanh", "silu", "swiglu", "layernorm", "rmsnorm"
]
"""What is done to a tensor before it is cast; the formulas stand at :class:`Activation`."""


@dataclass(frozen=True, slots=True)
class Activation:
    """A function of a matrix [M, S], of rows of K elements each.

    With ``x`` an element of the source and, of a row, ``mean`` and ``variance`` over its K
    elements (divided by K)::

        identity      x
        relu          max(x, 0)
        gelu          x * Phi(x), Phi the distribution function of the normal distribution
        gelu_tanh     x / (1 + exp(-2 u)),   u = sqrt(2 / pi) * (x + 0.044715 * x^3)
        silu          x / (1 + exp(-x))
        swiglu        silu(x[:, :K]) * x[:, K:],   S = 2 K;  S = K for all others
        layernorm     (x - mean) / sqrt(variance + eps) * gamma + bias
        rmsnorm       x / sqrt(mean of squares + eps) * gamma

    where ``gamma`` is the weight, or 1 + weight, or 1 where there is none. What is computed lies
    within 2 units in the last place of BF16 of the same in float64; of a sum with a bias, within
    2 units of its larger term. A result is then rounded, once, to ``round_to``.

    Attributes:
        function: which.
        eps: of the last two.
        zero_centered_gamma: whether the weight is stored less 1.
    """

    function: Function
    eps: float = 1e-5
    zero_centered_gamma: bool = False

    @property
    def is_norm(self) -> bool:
        """Whether an element depends on its whole row."""
        return self.function in ("layernorm", "rmsnorm")


@dataclass(frozen=True, slots=True)
class CastPlane:
    """One copy of the codes of a tensor that is cast whole.

    Attributes:
        layout: how its scales are stored; ``layout.grid`` is the matrix [M, K], or its transpose
            [K, M] where ``transposed``.
        codes: uint8, [rows, cols * bits / 8 rounded up] of ``layout.grid``, contiguous; wholly
            written, a missing last nibble is 0. None where only the scales are wanted.
        scale_inv: ``layout.shape``, contiguous; what belongs to a block is written, and padding is
            left as whoever made the buffer filled it. None where another plane has it.
        transposed: whether the matrix is stored the other way round.
    """

    layout: ScaleLayout
    codes: torch.Tensor | None
    scale_inv: torch.Tensor | None
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class ActivationTarget:
    """One tensor and what becomes of it: what :meth:`Backend.activate` works on.

    Attributes:
        activation: the function.
        source: [M, S], FP32, BF16 or FP16, contiguous.
        weight, bias: [K], FP32, BF16 or FP16, contiguous; of the norms, or None.
        round_to: what the function's result is rounded to before anything else is done.
        output: [M, K] of ``round_to``, contiguous: receives the rounded result; or None.
        planes: the copies of its codes.
        scale: FP32 [1]: what to multiply by, under :class:`Float8DelayedLaw`.
        amax: FP32 [1] that receives the tensor amax, or None for a law that stores none.
        tensor_amax: int32 [1], raised to the largest magnitude of the rounded result; or None.
        mean, rstd: FP32 [M] that receive what the norms made of each row: the mean (layernorm) and
            1 / sqrt(... + eps); or None.
    """

    activation: Activation
    source: torch.Tensor
    round_to: torch.dtype
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    output: torch.Tensor | None = None
    planes: tuple[CastPlane, ...] = ()
    scale: torch.Tensor | None = None
    amax: torch.Tensor | None = None
    tensor_amax: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    rstd: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        """M."""
        return self.source.shape[0]

    @property
    def cols(self) -> int:
        """K."""
        return self.source.shape[1] // (2 if self.activation.function == "swiglu" else 1)


def can_activate(law: Law) -> bool:
    """Whether :meth:`Backend.activate` casts under ``law``: under any whose codes follow from the
    rounded values and their amaxes alone. (4-over-6 decides by errors, and stochastic rounding
    draws: there the rounded output is cast by the operations above.)
    """
    return not (isinstance(law, NVFP4Law) and (law.four_over_six or law.stochastic_rounding))


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

    def partial_select(
        self, law: NVFP4Law, shards: Sequence[CastShard], masters: Masters
    ) -> Launch:
        """4-over-6, this rank's part of the decision, from reduced amaxes: choices of its own
        blocks, errors and elements of the shared ones, in ``candidates``, whose exchanged tensors
        hold 0.
        """
        ...

    def select(self, law: NVFP4Law, targets: Sequence[SelectTarget]) -> Launch:
        """4-over-6: the choices in cut rows of blocks, from the exchanged ``candidates``. Segments'
        errors are made from their elements, into ``row_errors``.
        """
        ...

    def compute_scale(self, law: Law, targets: Sequence[ScaleTarget]) -> Launch:
        """Make the stored scales of whole weights from reduced amaxes; padding included, repeats
        included. What the law remembers of a weight is brought up to date.
        """
        ...

    def partial_cast(self, law: Law, shards: Sequence[CastShard], masters: Masters) -> Launch:
        """Round, scale and encode this rank's elements into ``codes``; every other nibble keeps its
        value.

        Under :class:`Float8DelayedLaw` it raises the amaxes, too, as :meth:`partial_amax` does, in
        the same pass over the masters.
        """
        ...

    def transpose(self, targets: Sequence[TransposeTarget]) -> Launch:
        """Make the columnwise codes and scales from the gathered rowwise ones; padding included."""
        ...

    def dequantize(self, law: Law, targets: Sequence[DequantizeTarget]) -> Launch:
        """Decode whole weights to FP32. A NaN scale decodes to NaN."""
        ...

    def activate(self, law: Law | None, target: ActivationTarget) -> Launch:
        """Compute, round and cast one tensor: its output, its codes and their scales at once.

        Codes are exact with respect to the rounded result. Without a law there are no planes, and
        the launch writes the output alone. Under :class:`Float8DelayedLaw` the stored scale is
        ``1 / scale``, NaN where the tensor amax is not finite, and nothing remembers anything.
        ``law`` must be one that :func:`can_activate`.
        """
        ...
