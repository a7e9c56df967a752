"""The section of config.json names every module that a server must not build quantized."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zerocast
from tests.support.claims import message_of
from tests.support.experts import moe
from tests.support.exports import of_masters, section_of
from tests.support.llama import HIDDEN_96, TIED_160, llama
from tests.support.same_bytes import assert_same_bytes
from tests.support.serving import built_layers, is_built_quantized
from zerocast.errors import InputError
from zerocast.export import DIALECTS, Export, save_pretrained
from zerocast.optim import ZeroOptimizer
from zerocast.refit import Refit

DIALECTS_READ = ("compressed-tensors/nvfp4", "compressed-tensors/mxfp8", "deepseek/fp8",
                 "modelopt/nvfp4", "modelopt/mxfp8", "sglang/mxfp8")  # fmt: skip
EXPERTS = ["model.layers.*.mlp.experts"]
PROJECTIONS = {"qwen-moe": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}
BLOCKS = {"qwen-moe": "mlp", "mixtral": "block_sparse_moe"}
"""What checkpoints call that of the experts."""


def made(kind: str) -> torch.nn.Module:
    """In BF16."""
    options = {"dense": HIDDEN_96, "tied": TIED_160}
    return (llama(options[kind]) if kind in options else moe(kind)).bfloat16()


def saved(folder: Path, model: torch.nn.Module, dialect: str, **convert) -> tuple[dict, dict]:
    """The section and the tensors of a model, converted so, whose masters are cast."""
    zerocast.nn.convert(model, "mxfp8", **convert)
    save_pretrained(model, folder, dialect=dialect, **of_masters(model))
    return section_of(folder), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kind", ["dense", "tied", "qwen-moe", "mixtral"])
@pytest.mark.parametrize("dialect", DIALECTS_READ)
def test_a_server_builds_quantized_what_is_in_codes_and_nothing_else(kind, dialect, tmp_path):
    """Routers, which are no linear layers, experts and a tied head stay as they are; then experts
    are converted, and lm_head where servers read it.
    """
    head = ["lm_head"] if "deepseek" in dialect or "sglang" in dialect else []
    for number, options in enumerate(
        ({"filter_fqns": ["lm_head"]}, {"filter_fqns": head, "include": EXPERTS})
    ):
        if kind in ("dense", "tied"):
            options.pop("include", None)
        section, tensors = saved(tmp_path / str(number), made(kind), dialect, **options)
        layers = built_layers(tensors, PROJECTIONS.get(kind, ()))
        assert len(set(layers.values())) == 2 or (number and not head)
        for module, is_in_codes in layers.items():
            assert is_built_quantized(section, module) == is_in_codes, (module, options)
        if kind == "tied":  # vLLM builds the head of a tied model, too
            assert not is_built_quantized(section, "lm_head")


@pytest.mark.parametrize("kind", ["qwen-moe", "mixtral"])
def test_routers_and_experts_have_the_names_of_the_checkpoint(kind, tmp_path):
    """compressed-tensors matches each projection, the others the module; Mixtral has both the names
    of its checkpoint and those of transformers' modules, by which that package matches.
    """
    block, each = BLOCKS[kind], PROJECTIONS[kind]
    expected = {f"model.layers.{i}.{block}.{m}" for i in range(2) for m in ("gate", "experts")}
    section, _ = saved(tmp_path / "a", made(kind), "deepseek/fp8", filter_fqns=["lm_head"])
    own = {name.replace(f".{block}.", ".mlp.") for name in expected}
    assert set(section["modules_to_not_convert"]) == expected | own | {"lm_head"}
    assert len(section["modules_to_not_convert"]) == len(expected | own) + 1

    section, tensors = saved(
        tmp_path / "b", made(kind), "compressed-tensors/mxfp8", filter_fqns=["lm_head"]
    )
    experts = {
        f"model.layers.{i}.{block}.experts.{e}.{name}"
        for i in range(2) for e in range(5) for name in each
    }  # fmt: skip
    gates = {f"model.layers.{i}.{block}.gate" for i in range(2)}
    assert sorted(section["ignore"]) == sorted({"lm_head"} | gates | experts)
    plain = made(kind)
    for i in range(2):
        fused = plain.model.layers[i].mlp.experts
        for e in range(5):
            gate, up = fused.gate_up_proj[e].chunk(2)
            for name, value in zip(each, (gate, up, fused.down_proj[e]), strict=True):
                where = f"model.layers.{i}.{block}.experts.{e}.{name}.weight"
                assert_same_bytes(tensors[where], value.detach(), where)


@pytest.mark.parametrize("kind", ["qwen-moe", "mixtral"])
def test_transformers_loads_experts_that_are_not_quantized(kind, tmp_path):
    """Beside attention in codes: every parameter of the experts and routers as it was."""
    from transformers import AutoModelForCausalLM

    saved(tmp_path, made(kind), "compressed-tensors/fp8-channel", filter_fqns=["lm_head"])
    found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    plain = made(kind)
    for name, parameter in found.named_parameters():
        if ".mlp." in name:
            assert_same_bytes(parameter.detach(), plain.get_parameter(name).detach(), name)


def test_what_is_named_is_what_compressed_tensors_names():
    """Its own exporter names, of a model whose linear layers but lm_head it quantizes, the same."""
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = made("qwen-moe")
    zerocast.nn.convert(model, "mxfp8", filter_fqns=["lm_head"], include=EXPERTS)
    section = Export(model, "compressed-tensors/mxfp8").config.section()
    theirs = made("qwen-moe")
    apply_quantization_config(theirs, QuantizationConfig.model_validate(section))
    config = QuantizationConfig.from_pretrained(theirs)
    assert sorted(config.ignore) == sorted(section["ignore"])


@pytest.mark.parametrize("dialect", ["compressed-tensors/mxfp8", "modelopt/mxfp8"])
def test_experts_of_which_a_part_is_in_codes_are_refused(dialect, tmp_path):
    """One of the two stacks of a module, and one of the linear layers of its experts: servers build
    the experts of a module alike.
    """
    model = made("qwen-moe")
    include = ["model.layers.0.mlp.experts.gate_up_proj"]
    zerocast.nn.convert(model, "mxfp8", include=include, filter_fqns=["lm_head"])
    module = "model.layers.0.mlp.experts"
    assert message_of(InputError, save_pretrained, model, tmp_path, dialect=dialect) == (
        f"{module}.down_proj is not quantized, and servers of {dialect} treat all of {module} "
        "alike; convert all of them, or none."
    )
    layers = torch.nn.ModuleList(torch.nn.ModuleDict({"up": torch.nn.Linear(64, 64)}) for _ in "ab")
    listed = torch.nn.ModuleDict({"experts": layers})
    zerocast.nn.convert(listed, "mxfp8", filter_fqns=["experts.1"])
    message = message_of(InputError, save_pretrained, listed, tmp_path, dialect=dialect)
    assert message.startswith("experts.1.up.weight is not quantized, and servers")
    assert not any(tmp_path.iterdir())


def test_a_source_without_modules_needs_their_names_for_a_section(tmp_path):
    """An optimizer and a plan do not know them: the section has those that are given, and is
    refused without; tensors need none. A model has its own.
    """
    weight = torch.nn.Parameter(zerocast.quantize(torch.randn(64, 64), "mxfp8"))
    optimizer = ZeroOptimizer([("up.weight", weight)])
    options = {"dialect": "modelopt/mxfp8"}
    assert "modules" in message_of(InputError, save_pretrained, optimizer, tmp_path, **options)
    assert not any(tmp_path.iterdir())
    refit = Refit(optimizer, **options)
    assert dict(refit.named_tensors()).keys() == {"up.weight", "up.weight_scale"}
    section = DIALECTS["modelopt/mxfp8"].quantization_config([])
    assert "give modules=" in message_of(InputError, refit.audit, section)

    for modules in ([], ["mlp.gate", "lm_head"]):
        folder = tmp_path / str(len(modules))
        save_pretrained(optimizer, folder, modules=modules, **options)
        assert section_of(folder)["ignore"] == modules
        refit = Refit(optimizer, modules=modules, **options)
        assert len(refit.audit(section | {"ignore": modules})) == 1
    for wrong in ("lm_head", [3]):
        assert "must be a list of names" in message_of(
            InputError, Export, optimizer, modules=wrong, **options
        )
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    assert "left out for a model" in message_of(
        InputError, Export, model, include=["0"], modules=["1"], **options
    )


def test_containers_of_quantized_layers_embeddings_and_biases_are_not_named():
    """A table beside quantized layers would name them all; convolutions are named."""
    model = torch.nn.ModuleDict({
        "embed": torch.nn.Embedding(8, 64),
        "block": torch.nn.ModuleDict({"up": torch.nn.Linear(64, 64)}),
        "head_of": torch.nn.Linear(64, 3),
        "conv": torch.nn.Conv1d(64, 64, 3),
        "tables": torch.nn.Module(),
    })  # fmt: skip
    model["block"].register_parameter("table", torch.nn.Parameter(torch.zeros(3, 64)))
    model["tables"].register_parameter("position", torch.nn.Parameter(torch.zeros(3, 64)))
    model["tables"].register_parameter("up_bias", torch.nn.Parameter(torch.zeros(3, 64)))
    model["tables"].register_buffer("mask", torch.zeros(3, 3))
    zerocast.nn.convert(model, "mxfp8", filter_fqns=["head_of"])
    export = Export(model, "compressed-tensors/mxfp8")
    assert export.config.unquantized == ["head_of", "conv", "tables"]
