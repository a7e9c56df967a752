"""The names that TransformerEngine's frameworks share: the recipes."""

from zerocast.adapters.transformer_engine.common import recipe

__all__ = ["recipe"]
