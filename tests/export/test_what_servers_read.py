"""What no server reads is refused by name before anything is written; the rest is written for whom
it is for.
"""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zerocast
from tests.support.claims import message_of
from tests.support.experts import moe
from tests.support.exports import configuration, of_masters, section_of, update
from tests.support.llama import HIDDEN_96, llama
from tests.support.ranks import on_gloo
from tests.support.same_bytes import assert_same_bytes
from zerocast.comm import run_in_process
from zerocast.errors import InputError
from zerocast.export import DIALECTS, W4A4_DIALECTS, Export, load_pretrained, save_pretrained
from zerocast.export.dialects import EXPERTS, HEADS, LINEAR
from zerocast.export.known_dialects import as_dialect
from zerocast.refit import Receiver, Refit

STATIC = {
    "modelopt/fp8": ("input_scale", ()),
    "modelopt/nvfp4-w4a4": ("input_scale", ()),
    "compressed-tensors/nvfp4-w4a4": ("input_global_scale", (1,)),
}
"""The dialects that have static scales of inputs: their names and shapes."""


def pair(**convert) -> torch.nn.ModuleDict:
    """Two layers in codes, of which one is an output layer; the same at every call."""
    torch.manual_seed(0)
    layers = {"up": torch.nn.Linear(64, 96, bias=False), "lm_head": torch.nn.Linear(96, 64)}
    model = torch.nn.ModuleDict(layers).bfloat16()
    zerocast.nn.convert(model, "current", **convert)
    return model


# --- kinds of layers ---


def test_each_dialect_says_what_servers_read_of_it():
    """vLLM has no reader of output layers for FP8 in blocks, of linear layers for gpt-oss, and of
    experts for FP8 by rows of ModelOpt; MLX has experts under other names.
    """
    kinds = {name: each.reads for name, each in DIALECTS.items()}
    assert kinds.pop("gpt-oss/mxfp4") == (EXPERTS,)
    assert kinds.pop("modelopt/fp8-channel") == kinds.pop("mlx/nvfp4") == (LINEAR, HEADS)
    for name, own in kinds.items():
        is_in_blocks = name.startswith(("deepseek/", "sglang/")) or "fp8-block" in name
        assert own == ((LINEAR, EXPERTS) if is_in_blocks else (LINEAR, EXPERTS, HEADS)), name


@pytest.mark.parametrize("name", [n for n, each in DIALECTS.items() if HEADS not in each.reads])
def test_an_output_layer_that_no_server_reads_is_refused(name, tmp_path):
    """By transformers' word, and by its name; of an optimizer, too."""
    dense = llama(HIDDEN_96).bfloat16()
    zerocast.nn.convert(dense, "current", filter_fqns=["layers"])
    for model in (dense, pair(filter_fqns=["up"])):
        own = of_masters(model)
        for source in (model, own["optimizer"]):
            message = message_of(InputError, save_pretrained, source, tmp_path, dialect=name, **own)
            assert "lm_head.weight is the weight of an output layer" in message, message
            assert "(filter_fqns of zerocast.nn.convert, include)" in message
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", [n for n in DIALECTS if n.startswith("compressed-tensors/")])
def test_an_output_layer_in_codes_is_a_target_of_compressed_tensors(name, tmp_path):
    """vLLM matches it by its name, for its class is not Linear; what is read back is the same
    dialect. Without one the target is Linear alone.
    """
    if HEADS not in DIALECTS[name].reads:
        return
    for head, targets in ((True, ["Linear", "lm_head"]), (False, ["Linear"])):
        model = pair(filter_fqns=[] if head else ["lm_head"])
        folder = tmp_path / str(head)
        save = of_masters(model)
        save_pretrained(model, folder, dialect=name, **save)
        section = section_of(folder)
        assert section["config_groups"]["group_0"]["targets"] == targets
        assert section["ignore"] == ([] if head else ["lm_head"])
        loaded = load_pretrained(folder)
        assert isinstance(loaded["lm_head.weight"], zerocast.QuantizedTensor) == head
        refit = Refit(model, name, **save)
        assert refit.audit(section)
        if head:
            section["config_groups"]["group_0"]["targets"] = ["Linear"]
            assert "config_groups is" in message_of(InputError, refit.audit, section)


def test_linear_layers_are_refused_of_gpt_oss_and_experts_of_rows(tmp_path):
    """No reader looks for them; and experts of gpt-oss that stay as they are would be read as
    codes.
    """
    linear, experts = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts"
    every, some = ["model.layers.*.mlp.experts"], ["model.layers.1.mlp.experts"]
    for kind, dialect, recipe, options, words in (
        ("gpt-oss", "gpt-oss/mxfp4", "mxfp4", {"include": every},
         f"{linear}.weight is the weight of a linear layer, whose codes no server reads from "
         f"gpt-oss/mxfp4; leave {linear} as it is (filter_fqns of zerocast.nn.convert, include), "
         "or choose another dialect."),
        ("gpt-oss", "gpt-oss/mxfp4", "mxfp4",
         {"include": some, "filter_fqns": ["self_attn", "lm_head"]},
         f"{experts}.gate_up_proj is not quantized"),
        ("qwen-moe", "modelopt/fp8-channel", "rowwise", {"include": every},
         f"{experts}.0.gate_proj.weight is the weight of experts"),
    ):  # fmt: skip
        model = moe(kind).bfloat16()
        zerocast.nn.convert(model, recipe, **{"filter_fqns": ["lm_head"], **options})
        save = {"dialect": dialect, **of_masters(model)}
        assert message_of(InputError, save_pretrained, model, tmp_path, **save).startswith(words)
    assert not any(tmp_path.iterdir())


def test_a_tied_head_is_not_included(tmp_path):
    """Its weight is stored as the embedding's, so naming it alone would do nothing; a pattern that
    matches another layer, too, casts that one.
    """
    layers = {"up": torch.nn.Linear(64, 64), "lm_head": torch.nn.Linear(64, 8, bias=False)}
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(8, 64), **layers}).bfloat16()
    model["lm_head"].weight = model["embed"].weight
    options = {"dialect": "modelopt/mxfp8"}
    for names in (["lm_head"], ["up", "lm*"]):
        message = message_of(InputError, save_pretrained, model, tmp_path, include=names, **options)
        assert message.startswith(f"include names {names[-1]!r}, whose weight is tied with another")
    save_pretrained(model, tmp_path, include=["*"], **options)
    assert section_of(tmp_path)["ignore"] == ["lm_head"]


# --- scales of inputs ---


def sections_values(section, *path):
    """Every value of a section with the keys that lead to it."""
    for key, value in section.items():
        yield from (
            sections_values(value, *path, key)
            if isinstance(value, dict)
            else [((*path, key), value)]
        )


@pytest.mark.parametrize("name", [*DIALECTS, *W4A4_DIALECTS])
def test_static_scales_of_inputs_are_declared_where_they_are_stored(name):
    """By no dialects but modelopt/fp8 and those of NVFP4 that have servers quantize inputs."""
    dialect = as_dialect(name)
    section = dialect.section
    static = [
        path
        for path, value in sections_values(section)
        if ("input_activations" in path and path[-1] == "dynamic" and value is not True)
        or (path[-1] == "activation_scheme" and value != "dynamic")
    ]
    assert bool(static) == (dialect.input_scale is not None) == (name in STATIC)


@pytest.mark.parametrize("dialect", STATIC)
@pytest.mark.parametrize("size", [1, 3])
def test_scales_of_inputs_are_stored_beside_the_codes(size, dialect, tmp_path):
    """Of a mapping and of a file with more in it, the same on all ranks, as FP32 numbers by the
    names of the checkpoint; a refit sends them, too.
    """
    part, shape = STATIC[dialect]
    given = {"model.up": 0.1, "model.lm_head": torch.tensor([3.0], dtype=torch.bfloat16)}
    stored = {f"{n}.{part}": torch.tensor(float(v)).reshape(shape) for n, v in given.items()}
    save_file(stored | {"model.up.weight": torch.zeros(3)}, tmp_path / "scales.safetensors")

    def run(comm):
        model = pair()
        options = {"dialect": dialect, **of_masters(model, comm)}
        options["names"] = lambda name: f"model.{name}"
        for number, scales in enumerate((given, tmp_path / "scales.safetensors")):
            save_pretrained(model, tmp_path / str(number), input_scales=scales, **options)
        refit, receiver = Refit(model, input_scales=given, **options), Receiver()
        update(refit, receiver)
        return {name: tensor.clone() for name, tensor in receiver.tensors.items()}

    for received in run_in_process(size, run):
        for number in range(2):
            found = load_file(tmp_path / str(number) / "model.safetensors")
            assert found.keys() == received.keys()
            assert sum(name.endswith(part) for name in found) == 2
            for name, value in stored.items():
                assert (found[name].dtype, found[name].shape) == (torch.float32, shape)
                assert_same_bytes(found[name], value, name)
                assert_same_bytes(received[name], value, name)
    assert load_pretrained(tmp_path / "0").keys() >= stored.keys()


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (None, "which servers need"),
        ({"up": 1.0}, "got 1 for 2 modules; wrong are lm_head."),
        ({"up": 1.0, "lm_head": 1.0, "other": 1.0}, "got 3 for 2 modules; wrong are other."),
        ({"up": 0.0, "lm_head": 1.0}, "must be positive finite numbers, got 0.0 for up"),
        ({"up": float("inf"), "lm_head": 1.0}, "must be positive finite numbers"),
        ({"up": float("nan"), "lm_head": 1.0}, "must be positive finite numbers"),
        ({"up": torch.ones(2), "lm_head": 1.0}, "must be positive finite numbers"),
        ({"up": "much", "lm_head": 1.0}, "must be positive finite numbers"),
        ("nowhere.safetensors", "must be a mapping or a safetensors file"),
        (3, "must be a mapping or a safetensors file"),
    ],
)
def test_scales_of_inputs_that_are_none_are_refused(scales, message, tmp_path):
    """Missing, left over, not positive, not finite, no numbers; nothing is written."""
    options = {"dialect": "modelopt/fp8", "input_scales": scales}
    assert message in message_of(InputError, save_pretrained, pair(), tmp_path, **options)
    assert not any(tmp_path.iterdir())


def test_scales_of_inputs_are_refused_where_servers_take_none(tmp_path):
    """Their readers would not look at them."""
    options = {"dialect": "compressed-tensors/fp8-tensor", "input_scales": {"up": 1.0}}
    message = message_of(InputError, save_pretrained, pair(), tmp_path, **options)
    assert "servers of compressed-tensors/fp8-tensor compute the scales of inputs" in message


def test_modelopt_has_a_dialect_of_scales_by_rows(tmp_path):
    """The scales of compressed-tensors/fp8-channel in one row [M], of the algorithm that vLLM reads
    without scales of inputs.
    """
    model = pair()
    save, folders = of_masters(model), [tmp_path / n for n in ("modelopt", "compressed-tensors")]
    for folder in folders:
        save_pretrained(model, folder, dialect=f"{folder.name}/fp8-channel", **save)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in folders)
    assert ours["up.weight_scale"].shape == (96,)
    for name in theirs:
        assert_same_bytes(ours[name].reshape(theirs[name].shape), theirs[name], name)
    section = section_of(folders[0])
    named = section["quant_method"], section["quant_algo"]
    assert named == ("modelopt", "FP8_PER_CHANNEL_PER_TOKEN")
    assert_same_bytes(
        *(load_pretrained(folder)["up.weight"].dequantize() for folder in folders), "up"
    )


# --- config.json ---


@pytest.mark.parametrize(
    ("name", "dtype", "scale"),
    [
        ("deepseek/v4", "fp4", torch.float8_e8m0fnu),
        ("deepseek/v4-mxfp4", "fp4", torch.float8_e8m0fnu),
        ("deepseek/v4-fp8", "fp8", torch.float32),
        ("deepseek/fp8-ue8m0", None, torch.float32),
    ],
)
def test_expert_dtype_is_written_where_each_reader_looks(name, dtype, scale, tmp_path):
    """vLLM looks at the top of config.json, and transformers in the section; where it is fp8 vLLM
    builds FP32 scales.
    """
    model = pair(filter_fqns=["lm_head"])
    save_pretrained(model, tmp_path, dialect=name, **of_masters(model))
    config = configuration(tmp_path)
    assert config.get("expert_dtype") == config["quantization_config"].get("expert_dtype") == dtype
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors[f"up.{DIALECTS[name].scales}"].dtype == scale
    assert isinstance(load_pretrained(tmp_path)["up.weight"], zerocast.QuantizedTensor)


class Router(torch.nn.Module):
    """Linear layers, a norm, and what a model of transformers says that it keeps in FP32."""

    _keep_in_fp32_modules_strict = ("gate.weight", "correction")

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 64)
        self.up = torch.nn.Linear(64, 64)
        self.norm = torch.nn.LayerNorm(64)
        self.gate = torch.nn.Linear(64, 4, bias=False)
        self.correction = torch.nn.Parameter(torch.randn(4))
        self.register_buffer("table", torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(self.norm(self.up(self.embed(x)))) + self.correction


@pytest.mark.mpi(min_size=4)
@on_gloo(2)
def test_what_is_not_quantized_is_stored_as_config_json_says(comm):
    """Under FSDP2 in BF16, whose parameters are masters in FP32, all but what transformers keeps in
    FP32, and buffers; in dtype= where it is given; in a refit the same.
    """
    torch.manual_seed(0)
    model = Router()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    zerocast.nn.convert(model, "mxfp8", weights="master", filter_fqns=["gate"])
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model(torch.arange(8))
    kept = {"gate.weight", "correction", "table"}
    for dtype in (None, torch.float32):
        refit = Refit(model, "compressed-tensors/mxfp8", dtype=dtype, group=comm)
        contents = refit.export().config.contents()
        assert contents["dtype"] == ("bfloat16" if dtype is None else "float32")
        sent = dict(refit.named_tensors())
        for name in ("embed.weight", "norm.weight", "norm.bias", "up.bias", *kept):
            is_kept = dtype is not None or name in kept
            wanted = torch.float32 if is_kept else torch.bfloat16
            assert sent[name].dtype == wanted, name
            if name in values:
                assert_same_bytes(sent[name], values[name].to(wanted), name)
        audited = {name: t.dtype for each in refit.audit() for name, t in each.tensors.items()}
        assert audited == {name: tensor.dtype for name, tensor in sent.items()}


def test_dialects_of_ones_own_keep_what_servers_read():
    """A copy with another recipe refuses what the original does."""
    mine = dataclasses.replace(DIALECTS["gpt-oss/mxfp4"], name="mine")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    assert "no server reads from mine" in message_of(InputError, Export, model, mine, include=["0"])
