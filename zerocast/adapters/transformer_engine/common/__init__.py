"""What TransformerEngine's frameworks share: the recipes."""

from zerocast.adapters.transformer_engine.common import recipe
from zerocast.adapters.transformer_engine.missing import raise_missing

__getattr__ = raise_missing(__name__)

__all__ = ["recipe"]
