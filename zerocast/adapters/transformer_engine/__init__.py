"""TransformerEngine's names for primary weights, on zerocast.

Serves code that was written for TransformerEngine 2.20. tests/adapters/transformer_engine tests the
names; TransformerEngine itself needs a GPU, where scripts/bench_transformer_engine.py compares
bytes. It may go when its users call zerocast's own names, which docs/TRANSFORMER_ENGINE.md has.

Code that was written for TransformerEngine imports this package instead, by the same paths below
it::

    import zerocast.adapters.transformer_engine.pytorch as te
    from zerocast.adapters.transformer_engine.common import recipe
    from zerocast.adapters.transformer_engine.pytorch.tensor.utils import quantize_master_weights

It has what trains weights that hold codes: recipes, quantizers, tensor classes by scheme with their
attributes, the cast of sharded masters, linear layers. Defaults are TransformerEngine's where they
differ from zerocast's. A name that it lacks is refused
(:mod:`zerocast.adapters.transformer_engine.missing`); the page says what to use instead.

Importing it gives :class:`zerocast.QuantizedTensor` the attributes of TransformerEngine's tensors
(:mod:`zerocast.adapters.transformer_engine.pytorch.quantized_tensor`), and recipes the methods that
say which scheme they are of; it changes nothing else.
"""

from zerocast.adapters.transformer_engine import common, pytorch
from zerocast.adapters.transformer_engine.missing import refuse_missing

refuse_missing(__name__)

__all__ = ["common", "pytorch"]
