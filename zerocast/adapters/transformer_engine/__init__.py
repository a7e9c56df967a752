"""TransformerEngine's names for primary weights, implemented with zerocast.

Supports code written for TransformerEngine 2.20. tests/adapters/transformer_engine tests the names;
TransformerEngine itself needs a GPU, where scripts/bench_transformer_engine.py compares bytes. This
adapter can be removed when its users call zerocast's names, listed in docs/transformer_engine.md.

Code written for TransformerEngine imports this package instead, with the same submodules::

    import zerocast.adapters.transformer_engine.pytorch as te
    from zerocast.adapters.transformer_engine.common import recipe
    from zerocast.adapters.transformer_engine.pytorch.tensor.utils import quantize_master_weights

It has the names that train quantized weights: recipes, quantizers, tensor classes by recipe with
their attributes, the cast of sharded masters, linear layers. Defaults that differ from zerocast's
are those of TransformerEngine. A missing name raises an error
(:mod:`zerocast.adapters.transformer_engine.missing`).

Importing it adds the attributes of TransformerEngine's tensors to :class:`zerocast.QuantizedTensor`
(:mod:`zerocast.adapters.transformer_engine.pytorch.quantized_tensor`), and methods such as
``nvfp4()`` to recipes; it changes nothing else.
"""

from zerocast.adapters.transformer_engine import common, pytorch
from zerocast.adapters.transformer_engine.missing import refuse_missing

refuse_missing(__name__)

__all__ = ["common", "pytorch"]
