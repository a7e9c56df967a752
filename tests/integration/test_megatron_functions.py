"""What zerocast.adapters.megatron replaces in Megatron-Core as it is installed, and which of its
layers get codes; in one process.
"""

import sys
import types

import pytest
import torch
import torch.distributed as dist

import zerocast
import zerocast.adapters.megatron
from zerocast.cast import CastPlan
from zerocast.errors import InputError, UnsupportedError
from zerocast.tensors import empty

REASON = "needs pip install '.[megatron]'"
core = pytest.importorskip("megatron.core", reason=REASON)
cpu = pytest.importorskip("tests.support.megatron_on_cpu", reason=REASON)
specs = pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs", reason=REASON)
optimizers = pytest.importorskip("megatron.core.optimizer.distrib_optimizer", reason=REASON)
fp4 = pytest.importorskip("megatron.core.fp4_utils", reason=REASON)
fp8 = pytest.importorskip("megatron.core.fp8_utils", reason=REASON)
pytestmark = [
    pytest.mark.integration,
    # Of Megatron-Core about what else could be installed, and about itself.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture
def installed():
    """zerocast in Megatron-Core's functions."""
    zerocast.adapters.megatron.install()
    yield
    zerocast.adapters.megatron.uninstall()


def test_unknown_functions_are_refused_with_nothing_replaced(monkeypatch):
    """One function with another parameter: it is named, and the others stay what they were."""
    monkeypatch.setattr(fp8, "post_all_gather_processing", lambda model_params, strictly: None)
    before = [dict(vars(module)) for module in (fp8, fp4, optimizers)]
    said = r"_processing\(model_params\), got .*strictly.*such as 0.16 or 0.19"
    with pytest.raises(UnsupportedError, match=said):
        zerocast.adapters.megatron.install()
    assert [dict(vars(module)) for module in (fp8, fp4, optimizers)] == before


def test_uninstalling_puts_everything_back(monkeypatch):
    """Also where a module has imported a function by its name, before or after."""
    modules = (fp8, fp4, optimizers, core.distributed.param_and_grad_buffer)
    before = [dict(vars(module)) for module in modules]
    zerocast.adapters.megatron.install()
    later = types.ModuleType("megatron.later")
    later.is_float8tensor = fp8.is_float8tensor
    monkeypatch.setitem(sys.modules, later.__name__, later)
    weight = zerocast.quantize(torch.ones(16, 16), "block")
    assert optimizers.is_float8tensor(weight)
    zerocast.adapters.megatron.uninstall()
    assert [dict(vars(module)) for module in modules] == before
    assert later.is_float8tensor is optimizers.is_float8tensor is fp8.is_float8tensor
    assert not fp8.is_float8tensor(weight)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("recipe", ["block", "mxfp8", "nvfp4"])
def test_masters_are_cast_by_one_plan(recipe, monkeypatch):
    """Two steps, masters at other addresses: each gives the bytes of the unsharded cast, and the
    plan of the first serves the second.
    """
    made = []
    monkeypatch.setattr(
        zerocast.adapters.megatron.megatron_hooks,
        "CastPlan",
        lambda *a, **k: made.append(1) or CastPlan(*a, **k),
    )
    weight = empty((32, 96), recipe, columnwise=False)
    for _ in range(2):
        master = torch.randn(32, 96, dtype=torch.float32, device="cpu")
        fp8.quantize_param_shard([weight], [master.view(-1)], [0], None)
        fp8.post_all_gather_processing([weight])
        cast = zerocast.quantize(master.to(weight.dtype), recipe, columnwise=False)
        for name, expected in cast.quantized_storage.buffers.items():
            held = weight.quantized_storage.buffers[name]
            assert torch.equal(held.view(torch.uint8), expected.view(torch.uint8)), name
    assert made == [1]


@pytest.mark.usefixtures("installed")
def test_packed_codes_lie_where_their_elements_do():
    """3 ranks, 80 x 208, padded to 16,704 elements: each rank's third of the bytes is the codes of
    its third of the elements; a bucket whose thirds are odd is refused.
    """
    kind = core.distributed.param_and_grad_buffer._ParamAndGradBuffer
    if not hasattr(kind, "_compute_nvfp4_packed_layout"):
        pytest.skip(f"megatron-core {core.__version__} has no buffers of two codes a byte")
    weight = zerocast.quantize(torch.ones(80, 208), "nvfp4")
    buffer = kind.__new__(kind)
    buffer.data_parallel_world_size = 3
    buffer.bucket_indices = [(0, 16_704)]
    buffer.param_index_map = {weight: (64, 64 + 80 * 208, 0)}
    buffer._compute_nvfp4_packed_layout([(weight, "weight")])
    assert buffer.nvfp4_packed_param_index_map == {weight: (32, 32 + 40 * 208, 0)}
    assert buffer.nvfp4_packed_bucket_indices == [(0, 8_352)]
    buffer.bucket_indices = [(0, 16_707)]
    with pytest.raises(UnsupportedError, match="even number of elements"):
        buffer._compute_nvfp4_packed_layout([(weight, "weight")])


# --- layers ---


@pytest.fixture
def alone(tmp_path):
    """A group of one rank."""
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    core.parallel_state.initialize_model_parallel()
    with cpu.on_cpu():
        yield
    core.parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture
def gpt(alone):
    """A GPTModel of four layers, the first and the last two of which may stay in BF16, whose output
    layer has the weight of its embedding.
    """
    config = core.transformer.TransformerConfig(
        num_layers=4, hidden_size=32, num_attention_heads=4, bf16=True,
        params_dtype=torch.bfloat16, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, num_layers_at_start_in_bf16=1,
        num_layers_at_end_in_bf16=2,
    )  # fmt: skip
    return core.models.gpt.GPTModel(
        config, specs.get_gpt_layer_local_spec(), 64, 16, share_embeddings_and_output_weights=True
    ).bfloat16()


def in_codes(model):
    """The names of the layers whose weights hold codes."""
    weights = dict(model.named_parameters())
    quantized = [name for name in weights if isinstance(weights[name], zerocast.QuantizedTensor)]
    return sorted(name.removesuffix(".weight") for name in quantized)


ATTENTION, MLP = (
    [f"decoder.layers.{{}}.{part}" for part in parts]
    for parts in (
        ("self_attention.linear_proj", "self_attention.linear_qkv"),
        ("mlp.linear_fc1", "mlp.linear_fc2"),
    )
)


def layers(*numbers, parts=(*ATTENTION, *MLP)):
    """The names of linear layers in these transformer layers."""
    return sorted(part.format(number) for number in numbers for part in parts)


def test_parallel_linears_get_codes_of_one_plane(gpt):
    """Those alone, with the attributes of their weights; a masters' optimizer finds the values."""
    old = gpt.decoder.layers[0].mlp.linear_fc1.weight
    assert (old.tensor_model_parallel, old.partition_dim) == (True, 0)
    report = zerocast.adapters.megatron.quantize_linears(gpt, "mxfp8")
    assert in_codes(gpt) == layers(*range(4))
    assert sorted(name.removesuffix(".weight") for name in report.included) == in_codes(gpt)
    new = gpt.decoder.layers[0].mlp.linear_fc1.weight
    assert (new.tensor_model_parallel, new.partition_dim) == (True, 0)
    assert len(new.quantized_storage.gathered) == 1
    assert torch.equal(new.get_high_precision_init_val(), old)


def test_layers_that_are_named_stay(gpt):
    """By names and by patterns; a name that fits no layer is refused with nothing changed."""
    fc1 = "decoder.layers.0.mlp.linear_fc1"
    with pytest.raises(InputError, match="'haed', which matches none of"):
        zerocast.adapters.megatron.quantize_linears(gpt, "block", skip=[fc1, "haed"])
    assert in_codes(gpt) == []
    zerocast.adapters.megatron.quantize_linears(gpt, "block", skip=[fc1, "*.self_attention.*"])
    assert in_codes(gpt) == [name for name in layers(*range(4), parts=MLP) if name != fc1]


@pytest.mark.parametrize(
    ("asked", "configured", "expected"),
    [(True, False, [1]), (None, True, [1]), (False, True, [0, 1, 2, 3])],
)
def test_layers_at_both_ends_stay(gpt, asked, configured, expected):
    """Where the argument says so, or else the configuration: one of four, and two."""
    gpt.config.first_last_layers_bf16 = configured
    zerocast.adapters.megatron.quantize_linears(gpt, "block", first_last_layers_bf16=asked)
    assert in_codes(gpt) == layers(*expected)


def test_layers_of_mamba_have_ends(gpt):
    """A layer of Mamba has a mixer where others have attention: at the ends it stays in BF16."""
    mamba = pytest.importorskip("megatron.core.ssm.mamba_layer", reason=REASON)
    spec = core.transformer.ModuleSpec(Mixer)
    parts = mamba.MambaLayerSubmodules(mixer=spec)
    groups = core.process_groups_config.ProcessGroupCollection.use_mpu_process_groups()
    gpt.decoder.layers = torch.nn.ModuleList(
        mamba.MambaLayer(gpt.config, parts, number, pg_collection=groups) for number in range(1, 5)
    )
    zerocast.adapters.megatron.quantize_linears(gpt, "block", first_last_layers_bf16=True)
    assert in_codes(gpt) == ["decoder.layers.1.mixer.in_proj"]


class Mixer(torch.nn.Module):
    """The first product of Mamba's mixer, whose kernels need a GPU."""

    def __init__(self, config, **_):
        super().__init__()
        self.in_proj = core.tensor_parallel.ColumnParallelLinear(
            32, 64, config=config, init_method=torch.nn.init.normal_, bias=False
        )
