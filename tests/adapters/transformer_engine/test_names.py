"""TransformerEngine's names: each is here, or refused, and the page says what to use instead."""

import copy
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

import zerocast
import zerocast.adapters.transformer_engine.pytorch as te
from zerocast.adapters.transformer_engine.common import recipe
from zerocast.adapters.transformer_engine.pytorch.tensor import utils
from zerocast.errors import InputError, UnsupportedError

ROOT = "zerocast.adapters.transformer_engine"

PUBLIC = """
    DType LayerNormLinear Linear LayerNormMLP LayerNorm RMSNorm GroupedLinear Fp8Padding
    Fp8Unpadding initialize_ub destroy_ub UserBufferQuantizationMode DotProductAttention
    FusedMLAQUpProjRopeQuant MultiheadAttention InferenceParams RotaryPositionEmbedding
    TransformerLayer moe_permute moe_permute_with_probs moe_permute_and_pad_with_probs moe_unpermute
    moe_sort_chunks_by_index moe_sort_chunks_by_index_with_probs fp8_autocast fp8_model_init
    autocast quantized_model_init is_fp8_available is_mxfp8_available is_fp8_block_scaling_available
    is_nvfp4_available get_default_recipe QuantizerRole QuantizerRequest DelayedScalingRequest
    get_cudnn_version get_device_compute_capability is_bf16_available deinterleave_glu_tensor
    interleave_glu_tensor make_graphed_callables checkpoint CudaRNGStatesTracker
    get_cpu_offload_context mark_not_offload ManualOffloadSynchronizer ops optimizers onnx_export
    parallel_cross_entropy CusolverMpCtx newton_schulz QuantizedTensorStorage QuantizedTensor
    Quantizer prepare_for_saving restore_from_saved restore_from_func_ctx Float8Quantizer
    Float8CurrentScalingQuantizer MXFP8Quantizer Float8BlockQuantizer NVFP4Quantizer
    Float8TensorStorage MXFP8TensorStorage Float8BlockwiseQTensorStorage NVFP4TensorStorage
    Float8Tensor MXFP8Tensor Float8BlockwiseQTensor NVFP4Tensor HybridQuantizer
    HybridQuantizedTensorStorage IdentityQuantizer IdentityTensorStorage HybridQuantizedTensor
    IdentityTensor
"""
"""The public names of transformer_engine.pytorch 2.20."""

PAGE = (Path(__file__).parents[3] / "docs" / "transformer_engine.md").read_text()
ROWS = PAGE.split("## Names that are not here\n")[1].split("\n## ")[0].splitlines()
ADVISED = re.findall(r"`([\w.]+)`", " ".join(row.split("|")[1] for row in ROWS if row))


@pytest.mark.parametrize("name", PUBLIC.split())
def test_every_public_name_is_here_or_refused(name):
    """As an attribute and as an import; ``hasattr`` and ``except ImportError`` see what is so. The
    page says what to use instead.
    """
    if hasattr(te, name):
        assert name in te.__all__
        return
    with pytest.raises(AttributeError) as attribute:
        getattr(te, name)
    with pytest.raises(ImportError) as imported:
        exec(f"from {ROOT}.pytorch import {name}")
    for error in (attribute.value, imported.value):
        assert isinstance(error, UnsupportedError)
        assert f"pytorch.{name}; " in str(error)
    assert name in ADVISED


@pytest.mark.parametrize("statement", [
    "import {}.pytorch.attention",
    "from {}.pytorch.optimizers import FusedAdam",
    "from {}.pytorch.fp8 import fp8_autocast",
    "from {}.pytorch.float8_tensor import Float8Tensor",
    "from {}.pytorch.quantization import FP8GlobalStateManager",
    "from {}.common.recipe import CustomRecipe",
    "from {}.common.recipe import MMParams",
    "import {}.jax",
    "import {}_torch as tex",
])  # fmt: skip
def test_modules_that_are_missing_are_refused(statement):
    """By the page's name."""
    with pytest.raises(ImportError, match=r"in docs/transformer_engine\.md says"):
        exec(statement.format(ROOT))


def test_advice_is_of_names_that_are_missing():
    """No name of the page is here, and none is twice in its table."""
    assert len(ADVISED) == len(set(ADVISED)) > 80
    modules = (te, te.tensor, te.quantization, te.quantized_tensor, te.constants, utils, recipe)
    assert not [name for name in ADVISED if any(hasattr(each, name) for each in modules)]


@pytest.mark.parametrize("path", [
    "common", "common.recipe", "pytorch", "pytorch.constants", "pytorch.module",
    "pytorch.quantization", "pytorch.quantized_tensor", "pytorch.tensor",
    "pytorch.tensor.float8_blockwise_tensor", "pytorch.tensor.float8_tensor",
    "pytorch.tensor.mxfp8_tensor", "pytorch.tensor.nvfp4_tensor", "pytorch.tensor.utils",
])  # fmt: skip
def test_what_a_module_lists_is_there_and_documented(path):
    """All names of ``__all__`` exist; classes and functions have a docstring."""
    part = importlib.import_module(f"{ROOT}.{path}")
    for name in part.__all__:
        value = getattr(part, name)
        assert not (inspect.isclass(value) or inspect.isroutine(value)) or value.__doc__, name
    with pytest.raises(AttributeError, match=r"transformer_engine\.md"):
        part.no_such_name  # noqa: B018


def test_defaults_are_those_of_transformer_engine():
    """Where zerocast's differ: who makes columnwise copies, the dtype of empty tensors."""
    parameters = inspect.signature(utils.quantize_master_weights).parameters
    assert list(parameters) == [
        "model_weights", "master_weights", "start_offsets", "group", "fsdp_shard_model_weights",
        "manual_post_all_gather_processing",
    ]  # fmt: skip
    assert parameters["manual_post_all_gather_processing"].default is False
    assert utils.cast_master_weights_to_fp8 is utils.quantize_master_weights
    quantizer = te.MXFP8Quantizer(te.DType.kFloat8E4M3)
    assert quantizer.make_empty((32, 32)).dtype == torch.float32
    for answer in (te.is_fp8_available, te.is_mxfp8_available, te.is_nvfp4_available):
        assert answer() is True
        assert answer(return_reason=True) == (True, "")


def test_both_names_of_the_cast_take_every_scheme():
    """``cast_master_weights_to_fp8`` casts NVFP4 and FP8 weights in one call, and leaves the
    columnwise copies to the next forward.
    """
    with te.quantized_model_init(recipe="nvfp4"):
        first = te.Linear(32, 16, bias=False)
    with te.quantized_model_init(recipe="block"):
        second = te.Linear(16, 32, bias=False)
    weights = [first.weight, second.weight]
    masters = [torch.randn(weight.shape) for weight in weights]
    alone = zerocast.comm.SingleRank()
    utils.cast_master_weights_to_fp8(weights, [m.view(-1) for m in masters], [0, 0], alone)
    with te.autocast(recipe="current"):
        second(first(torch.randn(16, 32)))
    for weight, master in zip(weights, masters, strict=True):
        expected = zerocast.quantize(master, weight.recipe)
        assert torch.equal(weight._columnwise_data, expected.columnwise_data)


PREDICATES = {
    "delayed": "delayed",
    "float8_current_scaling": "current",
    "float8_block_scaling": "block",
    "mxfp8": "mxfp8",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
}


@pytest.mark.parametrize("kind", zerocast.recipes.RECIPES.values())
def test_predicates_tell_schemes_apart(kind):
    """Of classes and of recipes."""
    for name, scheme in PREDICATES.items():
        assert getattr(kind, name)() is getattr(kind(), name)() is (kind.scheme == scheme), name
    assert kind().float8_per_tensor_scaling() is (kind.scheme in ("delayed", "current"))


# --- layers ---


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_layers_take_the_arguments_of_transformer_engine(kind):
    """At their defaults; weights start from ``init_method`` before they are quantized."""
    with te.quantized_model_init(recipe="delayed", preserve_high_precision_init_val=True):
        layer = getattr(te, kind)(
            32, 64, init_method=lambda weight: weight.fill_(0.7), params_dtype=torch.bfloat16,
            tp_size=1, tp_group=None, sequence_parallel=False, name=None, device="cpu",
        )  # fmt: skip
    weight = layer.fc1_weight if kind == "LayerNormMLP" else layer.weight
    assert weight.dtype == torch.bfloat16
    assert (weight.get_high_precision_init_val() == torch.tensor(0.7).bfloat16()).all()
    assert (weight.amax_history != 0).sum() == 1, "the value was cast once"
    assert isinstance(layer, getattr(zerocast.nn, kind))
    assert layer(torch.randn(4, 32, dtype=torch.bfloat16), is_first_microbatch=True).shape[0] == 4


@pytest.mark.parametrize("argument", [{"tp_size": 2}, {"return_bias": True}, {"ub_name": "qkv"}])
def test_other_values_of_arguments_that_take_one_are_refused(argument):
    """By the argument's name."""
    with pytest.raises(UnsupportedError, match=next(iter(argument))):
        te.Linear(32, 32, **argument)


@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormLinear, te.LayerNormMLP])
def test_further_arguments_by_position_are_refused(kind):
    """TransformerEngine has others there: a third one of Linear is sequence_parallel."""
    sizes = (32, 64) if kind is te.Linear else (32, 64, 1e-5)
    kind(*sizes)
    with pytest.raises(InputError, match="all others by name"):
        kind(*sizes, False)


def test_gelu_is_the_approximation_by_tanh():
    """As in TransformerEngine, and not as in torch."""
    assert te.LayerNormMLP(16, 16).activation == "gelu_tanh"
    assert te.LayerNormMLP(16, 16, activation="relu").activation == "relu"


def test_weight_gradients_are_added_into_main_grad():
    """Over several backwards, and in a copy of the layer, too; ``grad`` stays None."""
    layer = te.Linear(32, 32, bias=False, fuse_wgrad_accumulation=True)
    for each in (layer, copy.deepcopy(layer)):
        each.weight.main_grad = torch.zeros(32, 32)
        x = torch.randn(4, 32)
        for _ in range(2):
            each(x).sum().backward()
        assert each.weight.grad is None
        torch.testing.assert_close(each.weight.main_grad, 2 * x.sum(0).expand(32, 32))
    bare = te.Linear(32, 32, fuse_wgrad_accumulation=True)
    with pytest.raises(InputError, match="main_grad"):
        bare(torch.randn(4, 32)).sum().backward()
