"""zerocast.refit: sends a trainer's weights to servers while it trains.

    refit = zerocast.refit.Refit(model, "deepseek/fp8", dtype=torch.bfloat16)
    for name, tensor in refit.named_tensors(): ...        # whole tensors, in codes
    for name, delta in refit.deltas(refit.version): ...   # what changed since the latest version

Weights are cast from the shards, into the layout that the server loads, before they are sent.

    refit         Refit: named tensors, shards, deltas
    pieces        the parts of a checkpoint's tensors that a rank holds
    delta         the format in which changes of a tensor are sent, with a digest of its bytes
    receiver      Receiver: applies deltas
    sha256        checksums of each tensor, as other programs compute it
    audit         the format of every sent tensor, compared with a server's configuration
"""

from zerocast.refit.audit import Travels
from zerocast.refit.pieces import Piece
from zerocast.refit.receiver import Receiver
from zerocast.refit.refit import Refit, checksums

__all__ = ["Piece", "Receiver", "Refit", "Travels", "checksums"]
