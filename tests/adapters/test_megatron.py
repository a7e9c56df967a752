"""zerocast.adapters.megatron with functions of Megatron-Core's names and parameters: what it
replaces them by. tests/integration runs Megatron-Core itself.
"""

import sys
import types
from importlib.util import find_spec

import pytest
import torch

import zerocast
import zerocast.adapters.megatron
from zerocast.cast import CastPlan
from zerocast.errors import InputError, UnsupportedError
from zerocast.tensors import empty


@pytest.mark.skipif(find_spec("megatron") is not None, reason="Megatron-Core is installed")
def test_its_absence_is_said():
    """The error names the package that is to be installed."""
    with pytest.raises(UnsupportedError, match="pip install megatron-core"):
        zerocast.adapters.megatron.install()


STAND_IN = """
import torch
class ColumnParallelLinear(torch.nn.Module):
    def __init__(self, skip=False):
        super().__init__()
        self.weight = None if skip else torch.nn.Parameter(torch.randn(32, 64).bfloat16())
class RowParallelLinear(ColumnParallelLinear): pass
class _ParamAndGradBuffer:
    def __init__(self, ddp_config, params=()): self.ddp_config, self.params = ddp_config, params
    def _compute_nvfp4_packed_layout(self, params_with_names): pass
class DistributedOptimizer:
    def __init__(self, optimizer, config): pass
    def load_state_dict(self, state_dict): pass
    def sharded_state_dict(self, model_sharded_state_dict={}, is_loading=False, sharding_type=None,
                           metadata=None): pass
class LayerWiseDistributedOptimizer:
    def __init__(self, optimizers): pass
class MegatronFSDP:
    def __init__(self, module): pass
def is_float8tensor(tensor): return False
is_nvfp4tensor = is_float8tensor
def dequantize_fp8_tensor(fp8_tensor): pass
def dequantize_fp4_tensor(fp4_tensor): pass
def modify_underlying_storage(tensor, new_raw_data): pass
def modify_nvfp4_rowwise_storage(fp4_tensor, new_rowwise_data): pass
def quantize_param_shard(model_params, main_params, start_offsets, data_parallel_group,
                         fsdp_shard_model_params=None): pass
quantize_nvfp4_param_shard = quantize_param_shard
def post_all_gather_processing(model_params): pass
def dist_all_gather_func(output_tensor, input_tensor, group, async_op): pass
"""
PLACES = (
    "fp8_utils", "fp4_utils", "tensor_parallel", "distributed.param_and_grad_buffer",
    "optimizer.distrib_optimizer", "optimizer.layer_wise_optimizer",
    "distributed.fsdp.src.megatron_fsdp.megatron_fsdp",
)  # fmt: skip


@pytest.fixture
def core(monkeypatch):
    """megatron.core, of what install looks for alone, each function in all places."""
    for place in PLACES:
        name, whole = "megatron", f"megatron.core.{place}"
        for part in ["", *whole.split(".")[1:]]:
            parent, name = name, f"{name}.{part}" if part else name
            if name not in sys.modules or not hasattr(sys.modules[name], "stands_in"):
                module = types.ModuleType(name)
                module.stands_in = True
                monkeypatch.setitem(sys.modules, name, module)
                if part:
                    setattr(sys.modules[parent], part, module)
        exec(STAND_IN, vars(sys.modules[whole]))
    yield sys.modules["megatron.core"]
    zerocast.adapters.megatron.uninstall()


def test_unknown_functions_are_refused_with_nothing_replaced(core):
    """One function with another parameter: it is named, and the others stay what they were."""
    core.fp8_utils.post_all_gather_processing = lambda model_params, strictly: None
    before = [dict(vars(module)) for module in (core.fp8_utils, core.fp4_utils)]
    with pytest.raises(UnsupportedError, match=r"_processing\(model_params\), got .*strictly"):
        zerocast.adapters.megatron.install()
    assert [dict(vars(module)) for module in (core.fp8_utils, core.fp4_utils)] == before


def test_uninstalling_puts_everything_back(core, monkeypatch):
    """Also where a module has imported a function by its name, before or after."""
    before, after = (types.ModuleType(f"megatron.{name}") for name in ("training", "post_training"))
    before.is_float8tensor = core.fp8_utils.is_float8tensor
    monkeypatch.setitem(sys.modules, "megatron.training", before)
    was = dict(vars(core.fp8_utils))
    zerocast.adapters.megatron.install()
    after.is_float8tensor = core.fp8_utils.is_float8tensor
    monkeypatch.setitem(sys.modules, "megatron.post_training", after)
    weight = zerocast.quantize(torch.ones(16, 16), "block")
    assert before.is_float8tensor(weight)
    zerocast.adapters.megatron.uninstall()
    assert before.is_float8tensor is after.is_float8tensor is was["is_float8tensor"]
    assert dict(vars(core.fp8_utils)) == was


@pytest.mark.parametrize(("recipe", "flag"), [("block", "fp8"), ("nvfp4", "fp4")])
def test_flags_without_which_masters_are_not_cast_are_asked_for(core, recipe, flag):
    """Each one that is missing, by name."""
    zerocast.adapters.megatron.install()
    make_buffer = core.distributed.param_and_grad_buffer._ParamAndGradBuffer
    weights = [zerocast.quantize(torch.ones(32, 32), recipe)]
    flags = {
        "use_distributed_optimizer": True,
        "fp8_param_gather": False,
        "fp4_param_gather": False,
    }
    flags[f"{flag}_param_gather"] = True
    make_buffer(types.SimpleNamespace(**flags), weights)
    for name in ("use_distributed_optimizer", f"{flag}_param_gather"):
        with pytest.raises(InputError, match=rf"\({name}=True\), got False"):
            make_buffer(types.SimpleNamespace(**flags | {name: False}), weights)


def test_buffers_of_values_are_refused(core):
    """MXFP8 gathered as BF16 in the buffer of gradients: whoever's configuration says so. A model
    without weights of zerocast may, and a rank whose weights are all frozen has no optimizer.
    """
    zerocast.adapters.megatron.install()
    config = types.SimpleNamespace(
        use_distributed_optimizer=True, fp8_param_gather=True,
        reuse_grad_buf_for_mxfp8_param_ag=True,
        use_precision_aware_optimizer_no_fp8_or_ds_fp8=False,
    )  # fmt: skip
    make_buffer = core.distributed.param_and_grad_buffer._ParamAndGradBuffer
    make_optimizer = core.optimizer.distrib_optimizer.DistributedOptimizer
    for weight in (zerocast.quantize(torch.ones(32, 32), "block"), torch.ones(32, 32)):
        optimizer = types.SimpleNamespace(param_groups=[{"params": [weight]}])
        for make, given in (
            (make_buffer, (config, [weight])),
            (make_optimizer, (optimizer, config)),
        ):
            if isinstance(weight, zerocast.QuantizedTensor):
                with pytest.raises(UnsupportedError, match="BF16 values; leave it False"):
                    make(*given)
            else:
                make(*given)
    make_optimizer(None, config)


@pytest.mark.parametrize("recipe", ["block", "mxfp8", "nvfp4"])
def test_masters_are_cast_by_one_plan(core, recipe, monkeypatch):
    """Two steps, masters at other addresses: each gives the bytes of the unsharded cast, and the
    plan of the first serves the second.
    """
    made = []
    monkeypatch.setattr(
        zerocast.adapters.megatron.megatron_hooks,
        "CastPlan",
        lambda *a, **k: made.append(1) or CastPlan(*a, **k),
    )
    zerocast.adapters.megatron.install()
    weight = empty((32, 96), recipe, columnwise=False)
    for _ in range(2):
        master = torch.randn(32, 96, dtype=torch.float32, device="cpu")
        core.fp8_utils.quantize_param_shard([weight], [master.view(-1)], [0], None)
        core.fp8_utils.post_all_gather_processing([weight])
        cast = zerocast.quantize(master.to(weight.dtype), recipe, columnwise=False)
        for name, expected in cast.quantized_storage.buffers.items():
            held = weight.quantized_storage.buffers[name]
            assert torch.equal(held.view(torch.uint8), expected.view(torch.uint8)), name
    assert made == [1]


def test_two_planes_are_refused_in_a_buffer_of_one(core):
    """1-D MXFP8 with columnwise codes of its own: the error offers blocks of 32 x 32."""
    zerocast.adapters.megatron.install()
    weight = zerocast.quantize(torch.ones(32, 64), "mxfp8")
    buffer = torch.zeros(32, 64, dtype=torch.uint8, device="cpu")
    with pytest.raises(UnsupportedError, match="enable_2d_quantization=True"):
        core.fp8_utils.modify_underlying_storage(weight, buffer)


def test_packed_codes_lie_where_their_elements_do(core):
    """3 ranks, 80 x 208, padded to 16,704 elements: each rank's third of the bytes is the codes of
    its third of the elements; a bucket whose thirds are odd is refused.
    """
    zerocast.adapters.megatron.install()
    weight = zerocast.quantize(torch.ones(80, 208), "nvfp4")
    buffer = core.distributed.param_and_grad_buffer._ParamAndGradBuffer(None)
    buffer.data_parallel_world_size = 3
    buffer.bucket_indices = [(0, 16_704)]
    buffer.param_index_map = {weight: (64, 64 + 80 * 208, 0)}
    buffer._compute_nvfp4_packed_layout([(weight, "weight")])
    assert buffer.nvfp4_packed_param_index_map == {weight: (32, 32 + 40 * 208, 0)}
    assert buffer.nvfp4_packed_bucket_indices == [(0, 8_352)]
    buffer.bucket_indices = [(0, 16_707)]
    with pytest.raises(UnsupportedError, match="even number of elements"):
        buffer._compute_nvfp4_packed_layout([(weight, "weight")])


class Layer(torch.nn.Module):
    """A transformer layer, as far as it is looked at."""

    def __init__(self, core, number, config):
        super().__init__()
        self.layer_number, self.config = number, config
        self.self_attention = torch.nn.ModuleDict({"qkv": core.tensor_parallel.RowParallelLinear()})
        self.mlp = core.tensor_parallel.ColumnParallelLinear()


@pytest.fixture
def gpt(core):
    """Four layers, the first and the last two of which may stay in BF16, and others around them."""
    config = types.SimpleNamespace(
        num_layers=4, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2,
        first_last_layers_bf16=False,
    )  # fmt: skip
    layers = torch.nn.ModuleList(Layer(core, number, config) for number in range(1, 5))
    head = core.tensor_parallel.ColumnParallelLinear()
    tied = core.tensor_parallel.ColumnParallelLinear(skip=True)
    parts = {"layers": layers, "head": head, "tied": tied, "plain": torch.nn.Linear(64, 32)}
    return torch.nn.ModuleDict(parts).bfloat16()


def in_codes(model):
    """The names of the layers whose weights hold codes."""
    weights = dict(model.named_parameters())
    quantized = [name for name in weights if isinstance(weights[name], zerocast.QuantizedTensor)]
    return [name.removesuffix(".weight") for name in quantized]


EVERY = [f"layers.{i}.{name}" for i in range(4) for name in ("self_attention.qkv", "mlp")]


def test_parallel_linears_get_codes_of_one_plane(gpt):
    """Those alone, with the attributes of their weights; a masters' optimizer finds the values."""
    old = gpt["layers"][0].mlp.weight
    old.tensor_model_parallel, old.partition_dim = True, 0
    report = zerocast.adapters.megatron.quantize_linears(gpt, "mxfp8")
    assert in_codes(gpt) == [*EVERY, "head"] == [n.removesuffix(".weight") for n in report.included]
    new = gpt["layers"][0].mlp.weight
    assert (new.tensor_model_parallel, new.partition_dim) == (True, 0)
    assert len(new.quantized_storage.gathered) == 1
    assert torch.equal(new.get_high_precision_init_val(), old)


def test_layers_that_are_named_stay(gpt):
    """By names and by patterns; a name that fits no layer is refused with nothing changed."""
    with pytest.raises(InputError, match="'haed', which matches none of"):
        zerocast.adapters.megatron.quantize_linears(gpt, "block", skip=["head", "haed"])
    assert in_codes(gpt) == []
    zerocast.adapters.megatron.quantize_linears(gpt, "block", skip=["head", "*.mlp"])
    assert in_codes(gpt) == EVERY[::2]


@pytest.mark.parametrize(("asked", "configured"), [(True, False), (None, True)])
def test_layers_at_both_ends_stay(gpt, asked, configured):
    """Where the argument says so, or else the configuration: one of four, and two."""
    gpt["layers"][0].config.first_last_layers_bf16 = configured
    zerocast.adapters.megatron.quantize_linears(gpt, "block", first_last_layers_bf16=asked)
    assert in_codes(gpt) == [*EVERY[2:4], "head"]


def test_layers_at_both_ends_do_not_stay_where_the_argument_says_so(gpt):
    """The argument goes before the configuration."""
    gpt["layers"][0].config.first_last_layers_bf16 = True
    zerocast.adapters.megatron.quantize_linears(gpt, "block", first_last_layers_bf16=False)
    assert in_codes(gpt) == [*EVERY, "head"]
