"""Refuses the names of TransformerEngine that are not here, and says what to use instead.

An attribute that is missing is an AttributeError, so that ``hasattr`` says False, and an import
that fails an ImportError, so that code which looks whether something is there goes on without it.
Both carry the advice. Python makes its own text for ``from module import name``, but first looks
for a module of that name: :class:`_LastFinder` stands behind all finders and answers then.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from zerocast import UnsupportedError

_PARALLEL = (
    "layers are split by torch's parallelize_module, with the styles of "
    "zerocast.nn.tensor_parallel where inputs travel in codes"
)
_ATTENTION = (
    "zerocast has no attention: call torch.nn.functional.scaled_dot_product_attention between its "
    "linear layers"
)
_EXPERTS = (
    "experts are one weight [E, M, K], a stack of matrices that are quantized one by one: "
    "zerocast.nn.convert(model, recipe, include=[...])"
)
_ONE_RECIPE = "a weight has one recipe for both directions; different weights may have different"
_SAVED = "a quantized tensor is saved for a backward as it is, by ctx.save_for_backward(tensor)"
_STATE = (
    "what is active belongs to the region: enter autocast, and see zerocast.reduce_amaxes for the "
    "reduction of amaxes"
)
_RECIPES = "a scheme is a recipe, whose fields say how each tensor is quantized (zerocast.Recipe)"
_CUDA = "this is about TransformerEngine's own kernels; `python -m zerocast doctor` says what runs"

ADVICE: dict[str, tuple[str, ...]] = {
    _ATTENTION: (
        "attention", "transformer", "DotProductAttention", "FusedMLAQUpProjRopeQuant",
        "InferenceParams", "MultiheadAttention", "RotaryPositionEmbedding", "TransformerLayer",
    ),
    _EXPERTS: (
        "GroupedLinear", "GroupedTensor", "GroupedTensorStorage", "Fp8Padding", "Fp8Unpadding",
    ),
    "experts are routed by torch's index_select, or by the model that brings them": (
        "permutation", "moe_permute", "moe_permute_with_probs", "moe_permute_and_pad_with_probs",
        "moe_unpermute", "moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs",
        "router", "ep",
    ),
    _PARALLEL: (
        "distributed", "CudaRNGStatesTracker", "initialize_ub", "destroy_ub",
        "UserBufferQuantizationMode", "set_tensor_model_parallel_attributes",
    ),
    _ONE_RECIPE: (
        "HybridQuantizer", "HybridQuantizedTensor", "HybridQuantizedTensorStorage",
        "IdentityQuantizer", "IdentityTensor", "IdentityTensorStorage",
    ),
    _SAVED: ("prepare_for_saving", "restore_from_saved", "restore_from_func_ctx"),
    _STATE: (
        "FP8GlobalStateManager", "RecipeState", "DelayedScalingRecipeState",
        "Float8CurrentScalingRecipeState", "Float8BlockScalingRecipeState",
        "MXFP8BlockScalingRecipeState", "NVFP4BlockScalingRecipeState",
    ),
    _RECIPES: (
        "CustomRecipe", "QuantizerRole", "QuantizerRequest", "DelayedScalingRequest",
        "custom_recipes",
    ),
    "products accumulate in FP32; leave fp8_gemm_fprop, fp8_gemm_dgrad and fp8_gemm_wgrad out": (
        "MMParams",
    ),
    "zerocast.optim.ZeroOptimizer shards torch's optimizers and zerocast.optim.FusedAdamW": (
        "optimizers", "FusedAdam", "FusedSGD",
    ),
    "every recipe works on every device, as is_fp8_available(return_reason=True) says": (
        "check_fp8_support", "check_mxfp8_support", "check_nvfp4_support",
        "check_fp8_block_scaling_support", "check_recipe_support",
    ),
    "torch.cuda.make_graphed_callables captures layers, and CastPlan.cast can be captured": (
        "graph", "make_graphed_callables",
    ),
    "torch.autograd.graph.save_on_cpu moves what a backward reads to the CPU": (
        "cpu_offload", "get_cpu_offload_context", "mark_not_offload", "ManualOffloadSynchronizer",
    ),
    "torch.export takes models outside of autocast; zerocast.export writes servers' checkpoints": (
        "export", "onnx_export", "onnx_extensions",
    ),
    "use torch.nn.functional.cross_entropy": ("cross_entropy", "parallel_cross_entropy"),
    "zerocast.nn.convert turns a model's own layers into quantized ones": ("ops",),
    "weights are FP32, BF16 or FP16 on every device": ("is_bf16_available",),
    "LayerNormMLP(activation='swiglu') has the gate in the first half of fc1, for torch.chunk": (
        "deinterleave_glu_tensor", "interleave_glu_tensor",
    ),
    "zerocast.optim.ZeroOptimizer(shard='matrix') keeps matrices whole for such optimizers": (
        "newton_schulz", "CusolverMpCtx",
    ),
    _CUDA: (
        "transformer_engine_torch", "tex", "cpp_extensions", "get_cudnn_version",
        "get_device_compute_capability", "load_framework_extension",
    ),
    "weight.update_usage(columnwise_usage=False) gives its memory back": (
        "clear_columnwise_cache",
    ),
    "its place is transformer_engine.pytorch.quantization": ("fp8",),
    "its place is transformer_engine.pytorch.tensor.float8_tensor": ("pytorch.float8_tensor",),
    "zerocast runs on torch": ("jax",),
}  # fmt: skip
"""The advice what to use instead, and the names that it is for: names of objects, or of modules
with as much of their path as makes them differ from a module that is here."""

_GENERAL = (
    "docs/TRANSFORMER_ENGINE.md lists the names that are here and what takes the place of others"
)
_PREFIX = "zerocast.adapters."


class MissingNameError(UnsupportedError, AttributeError):
    """A name of TransformerEngine's that zerocast does not have; the text says what to use."""


class MissingImportError(UnsupportedError, ImportError):
    """:class:`MissingNameError` for a name that was imported."""


def _text(path: str) -> str:
    """Return what is said of the dotted ``path``."""
    path = path.removeprefix(_PREFIX)
    for advice, names in ADVICE.items():
        if any(f".{path}".endswith(f".{name}") for name in names):
            return f"zerocast.adapters.transformer_engine has no {path}: {advice}."
    return f"zerocast.adapters.transformer_engine has no {path}: {_GENERAL}."


def raise_missing(module: str) -> Callable[[str], NoReturn]:
    """Make the ``__getattr__`` of ``module``, and let Python ask finders for what it lacks."""
    vars(sys.modules[module]).setdefault("__path__", [])

    def get(name: str) -> NoReturn:
        raise MissingNameError(_text(f"{module}.{name}"))

    return get


class _LastFinder:
    """The finder of modules that no other finder found; it refuses them."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        """Raise :class:`MissingImportError` for a module of this package."""
        if name.startswith(_PREFIX):
            raise MissingImportError(_text(name))


sys.meta_path.append(_LastFinder)
