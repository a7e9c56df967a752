"""zerocast.refit: a trainer's weights, sent to servers while it trains.

    refit = zerocast.refit.Refit(model, "deepseek/fp8", dtype=torch.bfloat16)
    for name, tensor in refit.named_tensors(): ...        # whole tensors, in codes
    for name, delta in refit.deltas(refit.version): ...   # what changed since the latest version

Weights are cast from the shards, in the layout that the server loads, before anything travels.

    refit         Refit: named tensors, shards, deltas
    pieces        what a rank holds of a checkpoint's tensors
    delta         what travels of a tensor that changed, with a digest of its bytes
    receiver      where deltas are applied
    audit         what every tensor travels as, against what a server was told
"""

from zerocast.refit.audit import Travels
from zerocast.refit.pieces import Piece
from zerocast.refit.receiver import Receiver
from zerocast.refit.refit import Refit

__all__ = ["Piece", "Receiver", "Refit", "Travels"]
