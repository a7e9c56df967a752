"""Exports of wrapped models: under the names of the model inside, or refused."""

import copy

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import zerocast
from tests.support.claims import assert_same_tensors
from tests.support.experts import moe
from tests.support.exports import contents
from tests.support.llama import TIED_160, llama
from tests.support.models import Bank
from tests.support.ranks import on_ranks
from tests.support.same_bytes import assert_same_bytes
from zerocast.export import DIALECTS, Export, save_pretrained
from zerocast.refit import Refit

DIALECT = "compressed-tensors/fp8-channel"


class DeepSpeedEngine(torch.nn.Module):
    """What DeepSpeed calls its wrapper, and where it has the model."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    """Wrapped for a backend that is never called."""
    return torch.compile(model, backend="eager")


def layers(wrap):
    """Wrap every layer of the model by ``wrap``, and leave the model as it is."""

    def wrapped(model):
        model.model.layers = torch.nn.ModuleList(map(wrap, model.model.layers))
        return model

    return wrapped


WRAPS = {
    "compile": compiled,
    "DataParallel": torch.nn.DataParallel,
    "DeepSpeed": DeepSpeedEngine,
    "checkpoint_wrapper": checkpoint_wrapper,
    "compiled and checkpointed layers in DataParallel": lambda model: torch.nn.DataParallel(
        layers(lambda layer: compiled(checkpoint_wrapper(layer)))(model)
    ),
    "checkpointed layers": layers(checkpoint_wrapper),
}


def converted(kind: str) -> torch.nn.Module:
    """A Llama, or a Mixtral whose experts transformers renames."""
    if kind == "llama":
        model = llama(TIED_160).bfloat16()
        zerocast.nn.convert(model, "rowwise", filter_fqns=["down_proj"])
        return model
    model = moe(kind).bfloat16()
    zerocast.nn.convert(model, "rowwise", include=["model.layers.*.mlp.experts"])
    return model


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_wrapper_is_not_in_the_files(tmp_path, kind, wrap):
    """Every file is that of the model inside: names, tied weights, layers named in the section,
    architectures, the generation configuration; and the wrapped model stays as it was.
    """
    save_pretrained(converted(kind), tmp_path / "plain", dialect=DIALECT)
    wrapped = WRAPS[wrap](converted(kind))
    before = {name: id(module) for name, module in wrapped.named_modules()}
    save_pretrained(wrapped, tmp_path / "wrapped", dialect=DIALECT)
    assert {name: id(module) for name, module in wrapped.named_modules()} == before
    assert contents(tmp_path / "wrapped") == contents(tmp_path / "plain")


def test_an_average_is_exported_as_its_model(tmp_path):
    """Of torch, which averages weights in high precision, and counts."""
    model, found = llama(TIED_160).bfloat16(), []
    for each in (model, torch.optim.swa_utils.AveragedModel(model)):
        folder = tmp_path / type(each).__name__
        save_pretrained(each, folder, dialect=DIALECT, include=["*.o_proj"])
        found.append(contents(folder))
    assert found[0] == found[1]


def test_a_module_that_occurs_twice_is_one_without_its_wrappers():
    """A block that holds a wrapped layer, in two places: its weights are exported once, and are
    those of a refit.
    """
    block = torch.nn.Sequential(checkpoint_wrapper(torch.nn.Linear(32, 32, bias=False)))
    model = torch.nn.Sequential(block, block)
    zerocast.nn.convert(model, "mxfp8")
    export = Export(model, "compressed-tensors/mxfp8")
    (tensors,) = export.buckets()
    assert {*tensors} == {"0.0.weight", "0.0.weight_scale"}
    assert not export.config.unquantized
    assert_same_tensors(dict(Refit(model, "compressed-tensors/mxfp8").named_tensors()), tensors)


def of_peft(model: torch.nn.Module) -> None:
    """Let a layer be of a class of peft's, as its tuners put them into a model."""
    layer = model.model.layers[1].self_attn
    kind = type("Linear", (torch.nn.Module,), {"__module__": "peft.tuners.lora.layer"})()
    kind.base_layer, layer.q_proj = layer.q_proj, kind


def of_fsdp1(model: torch.nn.Module) -> None:
    """Let a layer be wrapped as FSDP1 does."""
    kind = type("FullyShardedDataParallel", (torch.nn.Module,), {})()
    kind._fsdp_wrapped_module = model.model.layers[1]
    model.model.layers[1] = kind


@pytest.mark.parametrize(
    ("change", "message"),
    [(of_peft, r"a Linear has .*merge_and_unload"), (of_fsdp1, "by fully_shard")],
)
def test_weights_that_are_not_those_of_the_model_are_refused(tmp_path, change, message):
    """Adapters of peft, anywhere in the model, and flat parameters; nothing is written."""
    model = converted("llama")
    change(model)
    with pytest.raises(zerocast.UnsupportedError, match=message):
        save_pretrained(model, tmp_path / "folder", dialect=DIALECT)
    assert not (tmp_path / "folder").exists()


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("kind", ["lora", "injected", "prompt", "ia3"])
def test_a_model_of_peft_is_refused_until_it_is_merged(tmp_path, kind):
    """Whose adapters are layers, were put into a model of transformers, or are prompts."""
    peft = pytest.importorskip("peft")

    targets = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    model = llama(TIED_160).bfloat16()
    if kind == "injected":
        model.add_adapter(peft.LoraConfig(r=4, **targets))
    else:
        config = {
            "lora": lambda: peft.LoraConfig(r=4, **targets),
            "ia3": lambda: peft.IA3Config(**targets, feedforward_modules=[]),
            "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
        }[kind]()
        model = peft.get_peft_model(model, config)
    options = {"dialect": DIALECT, "include": ["*.o_proj"]}
    with pytest.raises(zerocast.UnsupportedError, match="merge_and_unload"):
        save_pretrained(model, tmp_path / "folder", **options)
    assert not (tmp_path / "folder").exists()
    if kind in ("lora", "ia3"):
        report = save_pretrained(model.merge_and_unload(), tmp_path / "folder", **options)
        assert report.formats["model.layers.0.self_attn.o_proj.weight"] == DIALECT
        assert not any("base_layer" in name for name in report.formats)


# --- FSDP2 and DistributedDataParallel ---


@pytest.mark.mpi(min_size=4)
@on_ranks("torch_distributed", 4)
def test_wrapped_layers_of_fsdp2_have_the_names_of_the_model(comm):
    """Each compiled, checkpointed and sharded by rows, as torchtitan does; the bytes are those of
    the whole masters. So are those of layers that are not wrapped, in a model that is sharded as a
    whole, and those of a model that DistributedDataParallel wraps.
    """
    from torch.distributed.fsdp import fully_shard

    dialect, rows = DIALECTS["compressed-tensors/mxfp8"], (48, 5, 33)
    torch.manual_seed(0)
    plain = Bank(rows)
    replicas = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    rows_alone, sharded = copy.deepcopy(plain), copy.deepcopy(plain)
    fully_shard(rows_alone)
    for i, layer in enumerate(sharded.layers):
        sharded.layers[i] = compiled(checkpoint_wrapper(layer))
        fully_shard(sharded.layers[i])
    fully_shard(sharded)
    before = [*sharded.state_dict()]
    for model in (rows_alone, sharded, replicas):
        (found,) = Export(model, dialect, include=["layers.*"], dtype=torch.bfloat16).buckets()
        assert len(found) == 2 * len(rows)
        for i, layer in enumerate(plain.layers):
            stored = {part: found[f"layers.{i}.{part}"] for part in dialect.names}
            whole = zerocast.quantize(layer.weight.detach(), dialect.recipe, dtype=torch.bfloat16)
            assert_same_bytes(dialect.decode(stored).dequantize(), whole.dequantize(), f"{i}")
    assert [*sharded.state_dict()] == before
    comm.barrier()
