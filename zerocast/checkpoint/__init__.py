"""zerocast.checkpoint: saves a training and continues it, bit for bit, on any number of ranks.

    zerocast.checkpoint.save("run", optimizer, model, extra={"schedule": schedule.state_dict()})
    ...
    loaded = zerocast.checkpoint.load("run", optimizer, model)
    schedule.load_state_dict(loaded.extra["schedule"])

It goes through ``torch.distributed.checkpoint``, with its own storage classes: files of safetensors
and a manifest in JSON, which is put in place last. So nothing is pickled, a save that is killed
leaves the checkpoint before it whole, and what is damaged is refused. ``Writer`` and ``Reader`` in
:mod:`zerocast.checkpoint.dcp_storage` are that storage.

    saving, loading     save and load
    runs                whose a checkpoint is, and what a save may replace
    training            what is saved of a training, by names; zero, masters: who has it;
                        model_part: what else a model holds
    pending             saves that go on beside the training
    writing             who writes what, at once or beside the training
    boxes               which elements of a tensor a rank has
    planners, storage   DCP's planners and storage
    one_file            a checkpoint in one file
    manifest, files     what a checkpoint says of itself; its bytes, and their digests
    values              values of Python in JSON
"""

from zerocast.checkpoint.loading import Loaded, load
from zerocast.checkpoint.pending import PendingSave
from zerocast.checkpoint.saving import save

__all__ = ["Loaded", "PendingSave", "load", "save"]
