"""vLLM, as it is, reads what is exported: its own loaders fill its own modules, on a CPU, where it
has no kernels for most formats; so weights are compared, and nothing is served.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zerocast
from tests.support import vllm_on_cpu
from tests.support.same_bytes import assert_same_bytes
from zerocast.export import (
    DIALECTS,
    MIXED_DIALECTS,
    W4A4_DIALECTS,
    CheckpointConversion,
    load_pretrained,
    save_pretrained,
)  # fmt: skip
from zerocast.export.dialects import EXPERTS, HEADS

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: scripts/serving.sh"),
]

SIZES = {
    "vocab_size": 256,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "max_position_embeddings": 64,
}
TWO = {"num_experts_per_tok": 2}
MODELS = {
    "llama": ("Llama", {"intermediate_size": 384}),
    "qwen3": ("Qwen3", {"intermediate_size": 384, "tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3Moe", {"moe_intermediate_size": 128, "num_experts": 3, **TWO}),
    "mixtral": ("Mixtral", {"intermediate_size": 128, "num_local_experts": 3, **TWO}),
    "gpt-oss": ("GptOss", {"intermediate_size": 128, "num_local_experts": 3, **TWO}),
}
MIXTURES = ["qwen3-moe", "mixtral"]

MIXES = [
    {"*.o_proj": "mxfp8", "*.self_attn.*": "rowwise", "*.mlp.*_proj": "nvfp4", "lm_head": None},
    {"*.self_attn.*": "nvfp4", "*.mlp.*_proj": "mxfp8", "lm_head": "rowwise"},
]
"""Recipes by patterns of names: three formats in one checkpoint."""

OF_OTHERS = ("sglang/", "gpt-oss/", "deepseek/v4", "mlx/")
READ = [n for n in DIALECTS if not n.startswith(OF_OTHERS) and n != "modelopt/fp8"]
"""Of vLLM's own dialects those of any model, without static scales of inputs."""


def model(kind: str) -> torch.nn.Module:
    """One of transformers', small, BF16, with random weights."""
    import transformers

    name, own = MODELS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **own)
    return getattr(transformers, f"{name}ForCausalLM")(config).bfloat16()


def is_codes(tensor: torch.Tensor) -> bool:
    """Whether it is a quantized weight."""
    return isinstance(tensor, zerocast.QuantizedTensor)


def include_of(kind: str) -> list[str]:
    """Its experts."""
    return [] if kind in ("llama", "qwen3") else ["model.layers.*.mlp.experts"]


def export(folder: Path, kind: str, dialect: str, *, experts: bool = True, head: bool = False):
    """The masters of a model cast anew, with its experts or without, and with its head or not."""
    converted = model(kind)
    include = include_of(kind) if experts else []
    kept = [] if head else ["lm_head"]
    if kind == "gpt-oss":
        kept.append("self_attn")
    recipe = "mxfp4" if kind == "gpt-oss" else "nvfp4"
    zerocast.nn.convert(converted, recipe, filter_fqns=kept, include=include)
    optimizer = zerocast.optim.ZeroOptimizer(converted.named_parameters(), lr=1e-3)
    save_pretrained(converted, folder, dialect=dialect, optimizer=optimizer, from_masters=True)


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory):
    with vllm_on_cpu.without_kernels(tmp_path_factory.mktemp("vllm")):
        yield


def assert_read(folder: Path, dialect: str) -> torch.nn.Module:
    """Every tensor of the checkpoint is in vLLM's model, byte for byte, and no other; what is in
    codes is decoded to ``dequantize()``, of compressed-tensors' NVFP4 to 0.3 % of the largest.
    Returns that model, whose layers are of no other use.
    """
    read = vllm_on_cpu.load(folder)
    has_inputs = dialect in W4A4_DIALECTS

    def in_model(tensors):
        is_renamed = dialect.startswith("gpt-oss/")
        return dict(read.hf_to_vllm_mapper.apply(tensors.items())) if is_renamed else tensors

    stored = in_model(load_file(folder / "model.safetensors"))
    held = vllm_on_cpu.as_stored(read)
    # Both register input scales for weights alone, and let go of them.
    held = {
        name: value
        for name, value in held.items()
        if has_inputs
        or not ("nvfp4" in dialect or dialect.endswith("/mixed"))
        or not name.endswith(("input_scale", "input_global_scale"))
    }
    assert held.keys() == stored.keys()
    for name, value in held.items():
        assert value.dtype == stored[name].dtype, name
        assert_same_bytes(value.reshape(stored[name].shape), stored[name], name)

    loaded = load_pretrained(folder).items()
    expected = in_model({name: weight for name, weight in loaded if is_codes(weight)})
    values = vllm_on_cpu.served(read)
    assert values.keys() == expected.keys()
    for name, weight in expected.items():
        own = weight.dequantize(torch.float32)
        is_nvfp4 = isinstance(weight.recipe, zerocast.NVFP4BlockScaling)
        if is_nvfp4 and dialect.startswith("compressed-tensors/"):
            assert (values[name] - own).abs().max() <= 3e-3 * own.abs().max(), name
        else:
            assert_same_bytes(values[name].bfloat16(), weight.dequantize(), name)
    return read


@pytest.mark.parametrize(
    ("dialect", "kind"),
    [
        (dialect, kind)
        for dialect in READ
        for kind in ("llama", "qwen3", *MIXTURES)
        if kind not in MIXTURES or EXPERTS in DIALECTS[dialect].reads
    ],
)
def test_vllm_reads_every_byte(tmp_path, dialect, kind):
    """Of all linear layers but the head, and of the experts that servers read."""
    export(tmp_path, kind, dialect)
    assert_read(tmp_path, dialect)


@pytest.mark.parametrize(
    ("dialect", "kind"),
    [
        *((dialect, "llama") for dialect in READ),
        ("modelopt/nvfp4", "qwen3"),
        ("compressed-tensors/nvfp4", "qwen3-moe"),
        ("compressed-tensors/fp8-channel", "mixtral"),
        ("deepseek/fp8", "mixtral"),
        ("gpt-oss/mxfp4", "gpt-oss"),
    ],
)
def test_vllm_reads_what_is_converted(tmp_path, dialect, kind):
    """From files that transformers writes, without a model: layers by their names alone, those that
    servers fuse in one group.
    """
    model(kind).save_pretrained(tmp_path / "source")
    CheckpointConversion(tmp_path / "source", tmp_path / "target", dialect).run()
    assert_read(tmp_path / "target", dialect)


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("dialect", READ)
def test_vllm_builds_experts_in_high_precision(tmp_path, dialect, kind):
    """Beside attention in codes; routers, too."""
    export(tmp_path, kind, dialect, experts=False)
    assert_read(tmp_path, dialect)


def test_vllm_reads_gpt_oss(tmp_path):
    """Its experts in one tensor, beside attention in high precision."""
    export(tmp_path, "gpt-oss", "gpt-oss/mxfp4")
    assert_read(tmp_path, "gpt-oss/mxfp4")


@pytest.mark.parametrize(
    ("recipe", "dialect"),
    [
        ("nvfp4", "compressed-tensors/nvfp4"),
        ("nvfp4", "modelopt/nvfp4"),
        ("current", "compressed-tensors/fp8-tensor"),
        ("rowwise", "compressed-tensors/fp8-channel"),
        ("block", "deepseek/fp8-ue8m0"),
        ("mxfp8", "modelopt/mxfp8"),
        ("mxfp4", "compressed-tensors/mxfp4"),
    ],
)
def test_vllm_reads_the_bytes_of_training(tmp_path, recipe, dialect):
    """Of layers that it fuses, which are converted in groups without being named."""
    trained = model("llama")
    zerocast.nn.convert(trained, recipe, filter_fqns=["lm_head"])
    save_pretrained(trained, tmp_path, dialect=dialect)
    assert_read(tmp_path, dialect)


@pytest.mark.parametrize("dialect", [name for name in READ if HEADS in DIALECTS[name].reads])
def test_vllm_reads_an_output_layer_in_codes(tmp_path, dialect):
    """Where the dialect says that servers do."""
    export(tmp_path, "llama", dialect, head=True)
    assert_read(tmp_path, dialect)


def test_vllm_reads_static_scales_of_inputs(tmp_path):
    """One of each layer; of layers that it fuses vLLM takes the largest."""
    trained = model("llama")
    zerocast.nn.convert(trained, "current", filter_fqns=["lm_head"])
    names = [name.removesuffix(".weight") for name, p in trained.named_parameters() if is_codes(p)]
    scales = {name: (i + 1) / 64 for i, name in enumerate(names)}
    save_pretrained(trained, tmp_path, dialect="modelopt/fp8", input_scales=scales)
    assert_read(tmp_path, "modelopt/fp8")


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("mix", MIXES, ids=["without-head", "with-head"])
@pytest.mark.parametrize("dialect", MIXED_DIALECTS)
def test_vllm_reads_every_byte_of_a_mixed_checkpoint(tmp_path, dialect, mix, kind):
    """Of experts and of an output layer, too, each in the format of its own recipe."""
    trained = model(kind)
    zerocast.nn.convert(trained, mix)
    report = save_pretrained(trained, tmp_path, dialect=dialect)
    family = dialect.removesuffix("mixed")
    assert {family + each for each in ("nvfp4", "fp8-channel", "mxfp8")} <= {
        *report.formats.values()
    }
    assert_read(tmp_path, dialect)


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("dialect", W4A4_DIALECTS)
def test_vllm_reads_nvfp4_weights_and_scales_of_inputs(tmp_path, dialect, kind):
    """Of linear layers, which it builds to quantize their inputs, too; and of experts."""
    trained = model(kind)
    zerocast.nn.convert(trained, "nvfp4", filter_fqns=["lm_head"], include=include_of(kind))
    exported = save_pretrained(trained, tmp_path / "weights", dialect="modelopt/nvfp4").formats
    inputs = {
        name.rpartition(".")[0]: 1.0 + ("down_proj" in name)
        for name, form in exported.items()
        if form == "modelopt/nvfp4"
    }
    save_pretrained(trained, tmp_path / "both", dialect=dialect, input_scales=inputs)
    for layer in assert_read(tmp_path / "both", dialect).modules():
        if vllm_on_cpu.is_experts(layer):
            assert not layer.quant_method.use_a16
        elif vllm_on_cpu.is_quantized(layer):
            assert hasattr(layer, "input_global_scale_inv")
