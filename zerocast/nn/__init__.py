"""Layers with quantized products, drop-in for torch's, and the conversion of a model to them.

Linear, LayerNorm, RMSNorm          torch's, and more
LayerNormLinear, LayerNormMLP       a norm and what follows it, as TransformerEngine names them
convert, explain                    a model's layers to these; who computes their products
checkpoint, statistics              recomputed activations; what quantization loses
swizzle, unswizzle                  scales in the order that block-scaled GEMMs read
"""

from zerocast.nn.checkpoint import checkpoint
from zerocast.nn.convert import ConversionReport, convert
from zerocast.nn.explanation import Explanation, ProductExplanation, explain
from zerocast.nn.layernorm_linear import LayerNormLinear
from zerocast.nn.layernorm_mlp import LayerNormMLP
from zerocast.nn.linear import Linear
from zerocast.nn.normalization import LayerNorm, RMSNorm
from zerocast.nn.statistics import Counts, Statistics, statistics
from zerocast.nn.swizzle import swizzle, unswizzle

__all__ = [
    "ConversionReport",
    "Counts",
    "Explanation",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "ProductExplanation",
    "RMSNorm",
    "Statistics",
    "checkpoint",
    "convert",
    "explain",
    "statistics",
    "swizzle",
    "unswizzle",
]
