"""zerocast.checkpoint: saves a training run and resumes it, bit for bit, on any number of ranks.

    zerocast.checkpoint.save("run", optimizer, model, extra={"schedule": schedule.state_dict()})
    ...
    loaded = zerocast.checkpoint.load("run", optimizer, model)
    schedule.load_state_dict(loaded.extra["schedule"])

A checkpoint consists of safetensors files and a JSON manifest, which is put in place last. So
nothing is pickled, a killed save leaves the previous checkpoint whole, and damaged files are
refused. :mod:`zerocast.optim.training_state` describes what is saved of an optimizer.

    saving, loading     save and load
    runs                which run owns a checkpoint, and what a save may replace
    masters             the masters in a model, and its torch optimizer
    master_holders      which optimizers are saved together
    model_part          the other tensors of a model
    pending             asynchronous saves
    writing             which rank writes what, synchronously or in a thread
    parts               a file of each rank in a directory
    one_file            a checkpoint in one file
    manifest, files     the contents of a checkpoint; its bytes, and their digests
    python_values       Python values in JSON
    dcp_storage         the same files for ``torch.distributed.checkpoint``
"""

from zerocast.checkpoint.loading import Loaded, load
from zerocast.checkpoint.pending import PendingSave
from zerocast.checkpoint.saving import save

__all__ = ["Loaded", "PendingSave", "load", "save"]
