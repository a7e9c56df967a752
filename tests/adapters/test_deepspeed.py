"""zerocast.adapters.deepspeed where DeepSpeed is missing, or is one that it does not know."""

import sys
import types
from importlib.util import find_spec

import pytest

import zerocast.adapters.deepspeed
from zerocast.errors import UnsupportedError


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_its_absence_is_said():
    """The error names the package that is to be installed."""
    with pytest.raises(UnsupportedError, match="pip install deepspeed"):
        zerocast.adapters.deepspeed.install()


class Engine:
    """The functions of DeepSpeedEngine of 0.19.8 that are replaced."""

    def _configure_expert_parallel(self, model, collect_sources=None):
        return "theirs"

    def _cast_module_mixed_precision(
        self, param_dtype, buffer_dtype, is_zero_init_model, keep_pattern=None
    ):
        return "theirs"

    def _broadcast_model(self):
        return "theirs"

    def _get_shared_params(self):
        return {}


class Optimizer:
    """The functions of DeepSpeedZeroOptimizer of 0.19.8 that are replaced."""

    def flatten_dense_tensors_aligned(
        self, tensor_list, alignment, use_cpu_data=False, param_padding=None
    ):
        return tensor_list

    def _update_model_bit16_weights(self, group_index):
        return "theirs"

    def _link_all_hp_params(self):
        return "theirs"

    def _restore_from_bit16_weights(self):
        return "theirs"

    def offload_states(self, include=None, device=None, pin_memory=True, non_blocking=False):
        return "theirs"


def gather(
    groups_flat,
    partitioned_param_groups,
    dp_process_group,
    start_alignment_factor,
    allgather_bucket_size,
):
    """The function of stage_1_and_2 of 0.19.8 that is replaced."""
    return "theirs"


@pytest.fixture
def zero(monkeypatch):
    """A DeepSpeed that has the functions above, and nothing else."""
    zero = types.ModuleType("deepspeed.runtime.zero.stage_1_and_2")
    zero.DeepSpeedZeroOptimizer, zero.all_gather_dp_groups = Optimizer, gather
    engine = types.ModuleType("deepspeed.runtime.engine")
    engine.DeepSpeedEngine = Engine
    package = types.ModuleType("deepspeed.runtime.zero")
    package.stage_1_and_2 = zero
    modules = {each.__name__: each for each in (zero, engine, package)}
    for name in ("deepspeed", "deepspeed.runtime"):
        modules[name] = types.ModuleType(name)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield zero
    zerocast.adapters.deepspeed.uninstall()


def test_everything_is_replaced_and_put_back(zero):
    """Installed twice and undone once, every function is the former one again."""
    before = dict(vars(Optimizer)), dict(vars(Engine))
    zerocast.adapters.deepspeed.install()
    zerocast.adapters.deepspeed.install()
    assert zero.all_gather_dp_groups is not gather
    assert Optimizer._link_all_hp_params is not before[0]["_link_all_hp_params"]
    zerocast.adapters.deepspeed.uninstall()
    assert zero.all_gather_dp_groups is gather
    assert (dict(vars(Optimizer)), dict(vars(Engine))) == before


def test_unknown_functions_are_refused_with_nothing_replaced(zero, monkeypatch):
    """One function with another parameter: it is named, and the others stay what they were."""
    before = dict(vars(Optimizer))
    monkeypatch.setattr(zero, "all_gather_dp_groups", lambda groups_flat, codec: None)
    with pytest.raises(UnsupportedError, match=r"all_gather_dp_groups\(groups_flat, .*'codec'"):
        zerocast.adapters.deepspeed.install()
    assert dict(vars(Optimizer)) == before
