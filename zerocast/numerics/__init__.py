"""Defines element formats, the operations of a cast, and the contract of every backend.

Element formats: their rounding in plain torch, and where an element's code is stored.

An operation handles *many weights at once*. Its preparation takes everything that is constant
between steps (shapes, owners, buffers), and returns a :data:`Launch`: a callable without arguments
that a step calls. So a step is a constant number of launches, whatever the number of
weights, and allocates nothing.

    partial_amax    master shards           -> block and tensor amaxes (then one all-reduce MAX),
                                               and the codes of blocks that a shard holds whole
    partial_select  master shards, amaxes   -> 4-over-6: errors of both candidates (then one SUM),
                                               and the codes of blocks that a shard holds whole
    select          reduced errors          -> 4-over-6: the choice of every block
    compute_scale   amaxes, choices         -> stored scales, tensor amax, recipe state
    partial_cast    master shards, amaxes   -> this rank's codes, to the nibble
    stage_codes     this rank's codes       -> the buffer in which they travel (all-gather)
    store_codes     the gathered buffer     -> all ranks' codes, to the nibble
    transpose       gathered codes, scales  -> columnwise codes and scales
    dequantize      codes, scales           -> values
    digest          bytes                   -> a number that changes with them
    changed_runs    elements, held ones     -> the elements that changed, as they travel, and their
                                               digest; the elements are held from then on
    adamw           masters, gradients      -> masters, updated, and the optimizer's state
    adamw_cast      the same, and what partial_amax does of the updated masters
    fused_op        a layer's tensor        -> its function or norm, rounded

A weight is one operand with its planes. It has a rowwise plane of codes, and where a scheme
quantizes its columnwise copy independently of the rowwise one (MX, row-wise FP8) a second one,
cast in the same pass over the master.

The numerics are those of the package's documentation, "Numerics": every backend gives the same
bytes for every input.

NOT here: which operations a recipe needs (:mod:`zerocast.recipes`) and when they run
(:mod:`zerocast.cast`).
"""

from zerocast.numerics.adamw_numbers import AdamWNumbers, AdamWUpdate
from zerocast.numerics.backend import Backend, ChangedRuns, Launch, LaunchOn, LaunchUpdates
from zerocast.numerics.codec import decode, decode_e8m0, encode, encode_e8m0, reciprocal_e8m0
from zerocast.numerics.element import E2M1, E4M3, E5M2, ELEMENT_FORMATS, FLT_MAX, ElementFormat
from zerocast.numerics.fused_ops import Function, FusedOp, FusedOperand
from zerocast.numerics.numerics import (
    INFINITY_BITS,
    NAN_BITS,
    NUMERICS_VERSION,
    Float8DelayedNumerics,
    Float8Numerics,
    MXNumerics,
    Numerics,
    NVFP4Numerics,
    ScaleFormula,
    ScaleRounding,
)
from zerocast.numerics.operands import (
    NOMINALS,
    CodeCopy,
    Comparison,
    DelayedState,
    DigestedBytes,
    FourOverSixErrors,
    Masters,
    Operands,
    PlaneBuffers,
    Rounding,
    SharedByte,
    TensorOperand,
)
from zerocast.numerics.packing import (
    byte_span,
    pack_nibbles,
    packed_columns,
    unpack_nibbles,
)
