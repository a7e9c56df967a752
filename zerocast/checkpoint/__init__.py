"""zerocast.checkpoint: saves a training and continues it, bit for bit, on any number of ranks.

    zerocast.checkpoint.save("run", optimizer, model, extra={"schedule": schedule.state_dict()})
    ...
    loaded = zerocast.checkpoint.load("run", optimizer, model)
    schedule.load_state_dict(loaded.extra["schedule"])

A checkpoint is files of safetensors and a manifest in JSON, which is put in place last. So nothing
is pickled, a save that is killed leaves the checkpoint before it whole, and what is damaged is
refused. What is saved of an optimizer is in :mod:`zerocast.optim.training_state`.

    saving, loading     save and load
    runs                whose a checkpoint is, and what a save may replace
    masters             the masters in a model, and its torch optimizer
    master_holders      which optimizers are saved together
    model_part          what else a model holds
    pending             saves that go on beside the training
    writing             who writes what, at once or beside the training
    parts               a file of each rank in a directory
    one_file            a checkpoint in one file
    manifest, files     what a checkpoint says of itself; its bytes, and their digests
    python_values       values of Python in JSON
    dcp_storage         the same files for ``torch.distributed.checkpoint``
"""

from zerocast.checkpoint.loading import Loaded, load
from zerocast.checkpoint.pending import PendingSave
from zerocast.checkpoint.saving import save

__all__ = ["Loaded", "PendingSave", "load", "save"]
