"""zerocast: cast the sharded FP32 master weights of ZeRO and FSDP optimizers into NVFP4 and FP8
model weights.

Whatever the partition of the masters over ranks, the gathered weights are byte for byte those of
:func:`quantize` on the whole: the same on every rank, backend and communicator.

    quantize, empty                 quantized weights from values, or unfilled
    quantize_master_weights         the sharded cast as a function; CastPlan: planned once
    post_all_gather_processing      what is derived, after the all-gather of the codes
    verify                          proves that all ranks hold the same bytes
    autocast, model_init            where layers quantize, and how they are made
    zerocast.optim.ZeroOptimizer    a sharded optimizer around it
    zerocast.checkpoint             a training saved, and continued on any number of ranks
    zerocast.export                 checkpoints that servers load
    zerocast.refit                  weights sent to servers while a trainer trains
    zerocast.nn                     layers on quantized weights
    zerocast.comm                   the ranks: threads, MPI, torch.distributed
"""

import zerocast.errors  # noqa: F401  first: what follows needs a torch that it accepts
from zerocast import checkpoint, comm, export, nn, optim, refit, sharded
from zerocast.backends import use_backend
from zerocast.backends.availability import (
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from zerocast.cast import (
    CastPlan,
    cast_master_weights_to_fp8,
    cast_master_weights_to_nvfp4,
    post_all_gather_processing,
    quantize_master_weights,
)
from zerocast.comm import as_communicator
from zerocast.errors import (
    BackendError,
    ChangedWeightError,
    DeltaError,
    InputError,
    MissingDataError,
    NonFiniteError,
    PeerFailedError,
    PeerTimeoutError,
    RankMismatchError,
    StaleCopyError,
    UnfinishedStepError,
    UnsupportedError,
    VerificationError,
    ZerocastError,
)
from zerocast.nn.autocast import (
    autocast,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    model_init,
    quantized_model_init,
    reduce_amaxes,
)
from zerocast.nn.quantizer import Quantizer
from zerocast.nn.recipe_state import RecipeState
from zerocast.nn.recompute import checkpoint_contexts
from zerocast.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)
from zerocast.sharded.verification import verify
from zerocast.tensors import QuantizedTensor, TensorParallelShard, empty, quantize, replace_raw_data
from zerocast.versions import __version__ as __version__

__all__ = [
    "BackendError",
    "CastPlan",
    "ChangedWeightError",
    "DelayedScaling",
    "DeltaError",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8RowwiseScaling",
    "Format",
    "InputError",
    "MXFP4BlockScaling",
    "MXFP8BlockScaling",
    "MissingDataError",
    "NVFP4BlockScaling",
    "NonFiniteError",
    "PeerFailedError",
    "PeerTimeoutError",
    "QParams",
    "QuantizedTensor",
    "Quantizer",
    "RankMismatchError",
    "Recipe",
    "RecipeState",
    "StaleCopyError",
    "TensorParallelShard",
    "UnfinishedStepError",
    "UnsupportedError",
    "VerificationError",
    "ZerocastError",
    "as_communicator",
    "autocast",
    "cast_master_weights_to_fp8",
    "cast_master_weights_to_nvfp4",
    "checkpoint",
    "checkpoint_contexts",
    "comm",
    "empty",
    "export",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_recipe",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "model_init",
    "nn",
    "optim",
    "post_all_gather_processing",
    "quantize",
    "quantize_master_weights",
    "quantized_model_init",
    "reduce_amaxes",
    "refit",
    "replace_raw_data",
    "sharded",
    "use_backend",
    "verify",
]
