"""Layers whose weight is quantized, and the conversion of a model to them."""

from zerocast.nn.convert import ConversionReport, convert
from zerocast.nn.linear import Linear

__all__ = ["ConversionReport", "Linear", "convert"]
