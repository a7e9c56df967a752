"""TransformerEngine's names for primary weights, on zerocast.

Code that was written for TransformerEngine imports this package instead, by the same paths below
it::

    import zerocast.adapters.transformer_engine.pytorch as te
    from zerocast.adapters.transformer_engine.common import recipe
    from zerocast.adapters.transformer_engine.pytorch.tensor.utils import quantize_master_weights

It has what trains weights that hold codes: recipes, quantizers, tensor classes by scheme with their
attributes, the cast of sharded masters, linear layers. Defaults are TransformerEngine's where they
differ from zerocast's. What it lacks says what to use instead
(:mod:`zerocast.adapters.transformer_engine.missing`). docs/TRANSFORMER_ENGINE.md has the table.

Importing it gives :class:`zerocast.QuantizedTensor` the attributes of TransformerEngine's tensors
(:mod:`zerocast.adapters.transformer_engine.pytorch.quantized_tensor`) and changes nothing else.
"""

from zerocast.adapters.transformer_engine import common, pytorch
from zerocast.adapters.transformer_engine.missing import raise_missing

__getattr__ = raise_missing(__name__)

__all__ = ["common", "pytorch"]
