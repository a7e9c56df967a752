"""Layers with quantized products, drop-in for torch's, and the conversion of a model to them.

How a quantized linear layer works
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A linear layer multiplies three times in a step of training: once forward, twice backward. With an
input x [T, K], a weight w [M, K] and the gradient dy [T, M] of the output y [T, M]:

    y  = x  @ w.T      sums over K
    dx = dy @ w        sums over M
    dw = dy.T @ x      sums over T

Under :class:`zerocast.autocast` both operands of each product are quantized first. Elements that
share a scale must be adjacent along the dimension that the product sums over, because a GEMM
multiplies a partial sum by the scales once. Each of the three tensors enters two products that sum
over different dimensions, so it may need two sets of codes:

            forward reads        backward reads
    x       rowwise (K) for y    columnwise (T) for dw
    w       rowwise (K) for y    columnwise (M) for dx
    dy                           rowwise (M) for dx, columnwise (T) for dw

Where one scale serves the whole tensor, or a square block, the columnwise codes are the transposed
rowwise ones; where scales belong to pieces of rows, they are a second cast with other values. The
layer keeps the codes that its backward will read, and nothing in high precision.

A scale follows from an amax, the largest magnitude under it. Most recipes take it from the tensor
that they quantize. Delayed scaling takes it from earlier steps: a layer has a RecipeState for its
forward (input, weight, output) and one for its backward (gradients), each a history of amaxes for
every tensor. A cast records its amax there; leaving the outermost autocast reduces all recorded
amaxes over the ranks by one all-reduce, and only then do histories and scales advance.

A weight may hold codes itself (:func:`zerocast.model_init`, :func:`convert`). Then nothing of it is
quantized in the forward, and outside of autocast it is decoded. To follow one forward, read
linear.py, quantized_module.py (how a product is computed), layer_product.py (the three products)
and scaled_mm.py (the GEMMs).

What is here
~~~~~~~~~~~~
Linear, LayerNorm, RMSNorm          torch's, and more
LayerNormLinear, LayerNormMLP       a norm and what follows it, as TransformerEngine names them
convert, coverage, explain          a model's layers to these; what is in codes; what computes
checkpoint, statistics              recomputed activations; what quantization loses
swizzle, unswizzle                  scales in the order that block-scaled GEMMs read
"""

from zerocast.nn import functional
from zerocast.nn.convert import ConversionReport, convert
from zerocast.nn.layernorm_layers import LayerNormLinear, LayerNormMLP
from zerocast.nn.linear import Linear
from zerocast.nn.norm import LayerNorm, RMSNorm
from zerocast.nn.recompute import checkpoint
from zerocast.nn.reports import (
    Coverage,
    Explanation,
    ParameterCoverage,
    ProductExplanation,
    coverage,
    explain,
)
from zerocast.nn.scaled_mm import swizzle, unswizzle
from zerocast.nn.statistics import Counts, Statistics, statistics

__all__ = [
    "ConversionReport",
    "Counts",
    "Coverage",
    "Explanation",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "ParameterCoverage",
    "ProductExplanation",
    "RMSNorm",
    "Statistics",
    "checkpoint",
    "convert",
    "coverage",
    "explain",
    "functional",
    "statistics",
    "swizzle",
    "unswizzle",
]
