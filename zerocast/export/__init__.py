"""zerocast.export: from sharded masters to the checkpoints that servers load.

    zerocast.export.save_pretrained(model, "served", dialect="compressed-tensors/fp8-block")

A dialect says how a server names, shapes and encodes a weight; ``DIALECTS`` maps names to them.
Weights are cast before they are gathered, so ranks exchange codes. The result is the same on any
number of ranks, byte for byte.

    dialects      names, shapes and formulas; known_dialects: the table of them
    mixed         several of them in one checkpoint
    entries       what is exported of a model, and what a rank has of it
    weights       how it is cast and becomes whole
    pretrained    directories of safetensors; folder: how they are filled, report: with what
    stored        checkpoints in files, as models and their tensors; conversion: to another dialect
    wrappers      the model inside of what wraps it
"""

from zerocast.export.checkpoint_conversion import CheckpointConversion
from zerocast.export.dialects import Dialect
from zerocast.export.export_report import ExportReport
from zerocast.export.exported_weights import Export
from zerocast.export.known_dialects import DIALECTS, MIXED_DIALECTS, W4A4_DIALECTS
from zerocast.export.mixed import MixedDialect
from zerocast.export.pretrained import save_pretrained
from zerocast.export.pretrained_loading import decode_tensors, load_pretrained
from zerocast.export.tensor_scale import TensorScale

__all__ = [
    "DIALECTS",
    "MIXED_DIALECTS",
    "W4A4_DIALECTS",
    "CheckpointConversion",
    "Dialect",
    "Export",
    "ExportReport",
    "MixedDialect",
    "TensorScale",
    "decode_tensors",
    "load_pretrained",
    "save_pretrained",
]
