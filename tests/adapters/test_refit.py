"""Adapters: they give what the recorded interfaces of other projects take.

``interfaces.json`` holds, by project, signatures and the fields of data classes with their
defaults, as they stand in the sources of the commits that it names. They are facts about what is
called and given, no code. Data classes made of these fields stand in for the projects' own.
"""

import dataclasses
import inspect
import json
import sys
import types
from pathlib import Path

import pytest
import torch

import zerocast
from tests.support.models import Pair
from tests.support.ranks import on_gloo
from tests.support.same_bytes import assert_same_bytes
from zerocast.adapters.refit import nemo_rl, slime, verl, vllm
from zerocast.export import DIALECTS
from zerocast.refit import Refit

RECORD = json.loads(Path(__file__).with_name("interfaces.json").read_text())
DIALECT = DIALECTS["deepseek/fp8-ue8m0"]


def signature(function) -> str:
    """Names, kinds and defaults of the parameters."""
    found = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=found.empty))


@pytest.fixture
def stand_ins(monkeypatch):
    """The data classes of all projects, in modules of their names."""
    for facts in RECORD.values():
        for name, fields in facts.items():
            if isinstance(fields, dict):
                stand_in(monkeypatch, name, fields)


def stand_in(monkeypatch, name: str, fields: dict) -> None:
    """Let importing ``name``, ``module:class``, find a data class of ``fields``."""
    module, _, cls = name.partition(":")
    made = []
    for field, default in fields.items():
        if default == "required":
            made.append((field, object))
        elif default == "{}":
            made.append((field, dict, dataclasses.field(default_factory=dict)))
        else:
            known = {"None": None, "True": True}[default]
            made.append((field, object, dataclasses.field(default=known)))
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if path not in sys.modules:
            monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
    setattr(sys.modules[module], cls, dataclasses.make_dataclass(cls, made))


def refit(**options) -> Refit:
    """Of a model of two layers with biases and a norm."""
    torch.manual_seed(0)
    model = Pair(norm=True).bfloat16()
    zerocast.nn.convert(model, zerocast.Float8BlockScaling())
    return Refit(model, DIALECT, bucket_bytes=1, **options)


def assert_same_tensors(found, expected) -> None:
    """In name, order and bytes."""
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, tensor), (_, other) in zip(found, expected, strict=True):
        assert_same_bytes(tensor, other, name)


@pytest.mark.parametrize(
    ("function", "project", "name"),
    [
        (nemo_rl.LocalShards.build_hf_to_local_param_map, "nemo_rl",
         "nemo_rl.weight_sync.nccl_reshard_utils:RefitBuilderInterface.build_hf_to_local_param_map"),
        (verl.EngineWeights.get_per_tensor_param_shard, "verl",
         "verl.workers.engine.base:BaseEngine.get_per_tensor_param_shard"),
        (slime.quantize_params(DIALECT), "slime", "quantize_params_fp8"),
    ],
)  # fmt: skip
def test_methods_have_the_recorded_signatures(function, project, name):
    """Names, kinds and defaults of all parameters."""
    assert signature(function) == RECORD[project][name]


def test_no_adapter_is_longer_than_40_lines():
    """So that it can be read, and copied, where an interface moves on."""
    folder = Path(zerocast.__file__).parent / "adapters" / "refit"
    lengths = {file.name: len(file.read_text().splitlines()) for file in folder.glob("*.py")}
    assert len(lengths) == 5
    assert max(lengths.values()) <= 40, lengths


def test_verl_sends_whole_tensors():
    """From the generator that an engine returns."""
    found, adapter = refit(), verl.EngineWeights(refit())
    weights, peft_config = adapter.get_per_tensor_param(layered_summon=False)
    assert peft_config is None
    assert_same_tensors(list(weights), list(found.named_tensors()))


@pytest.mark.parametrize("cut", [0, 3])
def test_vllm_reads_a_source_again_and_again(cut, stand_ins, monkeypatch):
    """Each pass casts the weights as they are then, in the order of vLLM's groups where it has
    some; names, dtypes and shapes are known before. tests/integration/test_vllm.py drives it by
    vLLM itself.
    """
    base = sys.modules["vllm.distributed.weight_transfer.base"]
    monkeypatch.setattr(base, "WeightSource", object, raising=False)
    if cut:
        groups = lambda names: [names[cut:], names[:cut]]  # noqa: E731
        monkeypatch.setattr(base, "layerwise_groups", groups, raising=False)
    found = refit()
    source = vllm.codes_source(found)
    for name in ("metadata", "__iter__"):
        assert signature(getattr(type(source), name)) == RECORD["vllm"][f"WeightSource.{name}"]
    meta = [(each.name, each.dtype, each.shape) for each in source.metadata()]
    for _ in range(2):
        tensors = list(source)
        assert meta == [(name, t.dtype, tuple(t.shape)) for name, t in tensors]
        sent = list(found.named_tensors())
        assert_same_tensors(tensors, sent[cut:] + sent[:cut])


@pytest.mark.parametrize("name", ["deepseek/fp8", "modelopt/mxfp8", "modelopt/nvfp4"])
def test_slime_and_miles_get_the_bytes_of_a_dialect(name):
    """What the configuration names stays; gate and up have one tensor scale under NVFP4; all are
    ``quantize`` of the weights, stacked.
    """
    dialect = DIALECTS[name]
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(128, 96, generator=generator).bfloat16() * k for k in (1, 3))
    params = [
        ("l.gate_proj.weight", gate), ("l.up_proj.weight", up), ("l.up_proj.bias", up[0]),
        ("l.router.weight", gate),
    ]  # fmt: skip
    config = dialect.quantization_config(["l.router"])
    args = (None, "decoder.layers.0.mlp.linear_fc1.weight", params, config)
    found = dict(slime.quantize_params(dialect)(*args))
    whole = zerocast.quantize(torch.cat([gate, up]), dialect.recipe)
    stored = dialect.encode(whole.quantized_storage)
    for part, tensor in stored.items():
        halves = tensor.chunk(2) if tensor.dim() else (tensor, tensor)
        assert_same_bytes(found.pop(f"l.gate_proj.{part}"), halves[0], part)
        assert_same_bytes(found.pop(f"l.up_proj.{part}"), halves[1], part)
    assert_same_bytes(found.pop("l.up_proj.bias"), up[0], "bias")
    assert_same_bytes(found.pop("l.router.weight"), gate, "router")
    assert not found


def test_slime_s_function_takes_miles_calls(stand_ins):
    """Which have one argument less."""
    for name in ("quantize_params_fp8", "quantize_params_mxfp8", "quantize_params_nvfp4"):
        miles = RECORD["miles"][name].removesuffix(")")
        assert RECORD["slime"]["quantize_params_fp8"].startswith(miles)


@pytest.mark.mpi(min_size=4)
@on_gloo(3)
def test_shards_of_fsdp2_fit_verl_and_nemo_rl(comm):
    """verl's specs say where in the whole a rank's elements are, and who has the others; NeMo-RL's
    local tensors are this rank's rows.
    """
    from torch.distributed.fsdp import fully_shard

    from tests.sharded.sharded import BF16

    patch = pytest.MonkeyPatch()
    for facts in (RECORD["verl"], RECORD["nemo_rl"]):
        for name, fields in facts.items():
            if isinstance(fields, dict):
                stand_in(patch, name, fields)
    torch.manual_seed(0)
    model = Pair(norm=True)
    zerocast.nn.convert(model, zerocast.Float8BlockScaling(), weights="master")
    fully_shard(model, mp_policy=BF16)
    # Of 128x128 blocks a rank's rows are no whole blocks; one scale a row is cut as its codes are.
    options = {"from_masters": True, "dtype": torch.bfloat16}
    sharded = Refit(model, "compressed-tensors/fp8-channel", **options)
    whole = dict(sharded.named_tensors())
    shards, _ = verl.EngineWeights(sharded).get_per_tensor_param_shard()
    for name, values, spec in shards:
        assert spec.full_shape == tuple(whole[name].shape)
        flat = whole[name].reshape(-1)[spec.place : spec.place + len(values)]
        assert_same_bytes(values, flat, name)
        assert torch.distributed.get_world_size(spec.gather_group) == comm.size
    local = nemo_rl.LocalShards(sharded)
    found = local.build_hf_to_local_param_map({})
    local.cast()
    for name, tensor in whole.items():
        spec = found.specs[name]
        mine = spec.pre(spec.base).buf
        assert_same_bytes(mine, tensor.chunk(comm.size)[comm.rank], name)
    patch.undo()
