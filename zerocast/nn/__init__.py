"""Layers with quantized products, drop-in for torch's, and the conversion of a model to them.

Linear, LayerNorm, RMSNorm          torch's, and more
LayerNormLinear, LayerNormMLP       a norm and what follows it, as TransformerEngine names them
convert, coverage, explain          a model's layers to these; what is in codes; who computes
checkpoint, statistics              recomputed activations; what quantization loses
swizzle, unswizzle                  scales in the order that block-scaled GEMMs read
"""

from zerocast.nn import functional
from zerocast.nn.convert import ConversionReport, convert
from zerocast.nn.layernorm_linear import LayerNormLinear
from zerocast.nn.layernorm_mlp import LayerNormMLP
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
from zerocast.nn.statistics import Counts, Statistics, statistics
from zerocast.nn.swizzle import swizzle, unswizzle

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
