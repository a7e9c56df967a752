"""save_pretrained: the same files on any number of ranks, equal to casts of the whole weights."""

import contextlib
import copy
import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import zerocast
from tests.refit.planned import cuts, expected, masters, plan
from tests.support.claims import assert_same_tensors
from tests.support.experts import EXPERTS, moe
from tests.support.exports import contents, of_masters, section_of, tensors_of
from tests.support.live_memory import LiveMemory
from tests.support.llama import TIED_160, llama, tokens
from tests.support.models import Attention, Bank
from tests.support.ranks import run_ranks, shared_folder
from tests.support.same_bytes import assert_same_bytes
from tests.support.serving import LINEAR_ALONE
from zerocast.export import (
    DIALECTS,
    CheckpointConversion,
    Export,
    load_pretrained,
    save_pretrained,
)
from zerocast.optim import ZeroOptimizer

NVFP4, BLOCKS = zerocast.NVFP4BlockScaling(), zerocast.Float8BlockScaling()
overrides = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
FUSED = [["*.q_proj", "*.k_proj", "*.v_proj"], ["*.gate_proj", "*.up_proj"]]


def rounded(model: torch.nn.Module) -> torch.nn.Module:
    """Its parameters in BF16, its buffers as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def decoded_as_served(masters, key, recipe, dtype=torch.bfloat16) -> torch.Tensor:
    """The cast of a whole weight: under a scale of the tensor, of the rows of the one matrix that
    servers make of it and others.
    """
    module, _, name = key.removesuffix(".weight").rpartition(".")
    fused = [[pattern[2:] for pattern in group] for group in FUSED if recipe.scales_tensor]
    names = next((each for each in fused if name in each), [name])
    rows = [masters[f"{module}.{each}.weight".lstrip(".")] for each in names]
    values = zerocast.quantize(torch.cat(rows), recipe, dtype=dtype).dequantize()
    return values.split([len(each) for each in rows])[names.index(name)].contiguous()


def trained(model, recipe, comm) -> ZeroOptimizer:
    """``model`` converted, and its optimizer after a step with given gradients. Layers whose K is
    no multiple of 32 stay as they are.
    """
    zerocast.nn.convert(model, recipe, filter_fqns=["down_proj"])
    optimizer = ZeroOptimizer(model.named_parameters(), lr=1e-2, group=comm)
    for p in model.parameters():
        generator = torch.Generator().manual_seed(p.numel())
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    optimizer.step()
    return optimizer


def exported(folder: Path, base, recipe, world_size, **options) -> dict[str, torch.Tensor]:
    """The whole masters of a copy of ``base`` that was trained and saved on so many ranks."""

    def run(comm):
        model = copy.deepcopy(base)
        optimizer = trained(model, recipe, comm)
        save_pretrained(model, folder, optimizer=optimizer, bucket_bytes=20_000, **options)
        return {name: optimizer.gather_master(p) for name, p in model.named_parameters()}

    return run_ranks("in_process" if world_size > 1 else "single_rank", world_size, run)[0]


def assert_loaded(folder, masters, recipe, dtype=torch.bfloat16) -> list[str]:
    """Each weight in codes is the cast of the whole master, or of those that servers fuse with it;
    return the names of these weights.
    """
    loaded = load_pretrained(folder)
    assert loaded.keys() == masters.keys()  # a tied head is stored once
    in_codes = [n for n, each in loaded.items() if isinstance(each, zerocast.QuantizedTensor)]
    for key, tensor in loaded.items():
        if key in in_codes:
            expected = decoded_as_served(masters, key, recipe, dtype)
            assert_same_bytes(tensor.dequantize(), expected, key)
        else:
            assert_same_bytes(tensor, masters[key].bfloat16().to(tensor.dtype), key)
    return in_codes


@pytest.mark.parametrize(
    ("name", "ranks"), [(name, (2, 4)[i % 2]) for i, name in enumerate(LINEAR_ALONE)]
)
def test_files_are_the_same_on_any_number_of_ranks(tmp_path, name, ranks):
    """Cast from the masters of a Llama, on 1 and on 2 or 4 ranks that cut inside of rows and
    blocks: every file, and every weight in it is ``quantize`` of the whole master, or of those that
    servers fuse with it.
    """
    base = rounded(llama(TIED_160))
    found = []
    for world_size in (1, ranks):
        folder = tmp_path / str(world_size)
        masters = exported(folder, base, NVFP4, world_size, dialect=name, from_masters=True)
        found.append(contents(folder))
    assert found[0] == found[1]
    assert len(found[0]) > 5
    assert len(assert_loaded(folder, masters, DIALECTS[name].recipe)) == 12


@pytest.mark.parametrize(
    ("name", "trained_by", "read_as", "options"),
    [
        ("compressed-tensors/nvfp4", NVFP4, NVFP4, {}),
        ("deepseek/fp8-ue8m0", BLOCKS, BLOCKS, {}),
        ("compressed-tensors/fp8-channel", NVFP4, DIALECTS["compressed-tensors/fp8-channel"].recipe,
         {"from_masters": True, "dtype": torch.float32}),
    ],
)  # fmt: skip
def test_trained_bytes_and_masters_of_a_dtype_are_saved(
    tmp_path, name, trained_by, read_as, options
):
    """On 3 ranks: weights in square blocks as they were trained; and masters rounded to the dtype
    that is given, FP32 of which gives other codes than BF16.
    """
    base = rounded(llama(TIED_160))
    masters = exported(tmp_path, base, trained_by, 3, dialect=name, **options)
    assert assert_loaded(tmp_path, masters, read_as, options.get("dtype", torch.bfloat16))


@pytest.mark.parametrize("name", ["deepseek/fp8", "modelopt/nvfp4"])
@pytest.mark.parametrize("a_file", [1, 2, 8])
def test_a_rank_holds_two_buckets(tmp_path, name, a_file):
    """And that does not grow with the model, of three files or more and of twice as many, beside
    the model and its masters, of which a ZeroOptimizer's rank has whole layers, one, two or eight a
    file. No copy is made for the file.
    """
    shape, few, peaks, recipe = (512, 512), max(8, 3 * a_file), {}, DIALECTS[name].recipe
    codes = a_file * shape[0] * shape[1] * recipe.numerics.fmt.bits // 8
    for layers in (few, 2 * few):
        folder = tmp_path / str(layers)

        def run(comm, layers=layers, folder=folder):
            model = rounded(Bank(shape[:1] * layers, shape[1]))
            zerocast.nn.convert(model, NVFP4)
            options = {"dialect": name, **of_masters(model, comm, lr=1e-2)}
            with LiveMemory() as memory:
                save_pretrained(model, folder, bucket_bytes=codes, **options)
            return memory.peak

        peaks[layers] = max(run_ranks("in_process", 4, run))
        files = [file.stat().st_size for file in folder.glob("*.safetensors")]
        assert len(files) == layers // a_file
    shared = max(files) - codes  # scales that threads gather are one's until all have copied them
    assert peaks[2 * few] <= 1.05 * peaks[few] + shared
    assert max(peaks.values()) <= 2 * max(files)


def test_weights_that_a_server_fuses_share_a_tensor_scale(tmp_path):
    """Those that are named, and those that were trained so; others have their own."""
    base = rounded(llama(TIED_160))
    exported(
        tmp_path, base, NVFP4, 2, dialect="modelopt/nvfp4", from_masters=True, amax_groups=FUSED
    )
    scales = {
        key: tensor.item()
        for file in tmp_path.glob("*.safetensors")
        for key, tensor in load_file(file).items()
        if key.endswith("weight_scale_2")
    }
    layer = "model.layers.1"
    fused = [scales[f"{layer}.self_attn.{p}_proj.weight_scale_2"] for p in "qkv"]
    assert len(set(fused)) == 1
    assert scales[f"{layer}.self_attn.o_proj.weight_scale_2"] not in fused

    model = Attention(output=True).bfloat16()
    with torch.no_grad():
        model.wk.weight.mul_(2)
        model.wv.weight.mul_(3)
    zerocast.nn.convert(model, NVFP4, amax_groups=[["wq", "wk"]])
    tensors = tensors_of(model, "modelopt/nvfp4", **of_masters(model))
    shared = tensors["wq.weight_scale_2"]
    assert_same_bytes(tensors["wk.weight_scale_2"], shared, "wk")
    assert tensors["wv.weight_scale_2"] != shared


def assert_transformers_evaluates(folder, ours, config=None) -> None:
    """``from_pretrained`` gives the parameters of ``ours``, and its logits."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    config = config or CompressedTensorsConfig(dequantize=True)
    found = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=config
    )
    for name, parameter in found.named_parameters():
        assert_same_bytes(parameter, ours.get_parameter(name), name)
    with torch.no_grad():
        logits = [model(input_ids=tokens(0) % 64).logits for model in (found, ours.eval())]
    assert_same_bytes(*logits, "logits")


@pytest.mark.parametrize("form", ["nvfp4", "fp8-channel", "mxfp8"])
@overrides
def test_transformers_loads_and_evaluates_what_is_saved(tmp_path, form):
    """By ``from_pretrained``, through compressed-tensors: every parameter is what was saved, and
    the logits are those of the model with the decoded weights.
    """
    base = rounded(llama(TIED_160))
    exported(tmp_path, base, NVFP4, 2, dialect=f"compressed-tensors/{form}", from_masters=True)
    ours = rounded(llama(TIED_160))
    state = {name: tensor.to(torch.bfloat16) for name, tensor in load_pretrained(tmp_path).items()}
    assert not ours.load_state_dict(state, strict=False).unexpected_keys
    assert_transformers_evaluates(tmp_path, ours)


@pytest.mark.parametrize("kind", ["mixtral", "qwen-moe"])
@overrides
def test_transformers_loads_and_evaluates_experts_that_are_saved(tmp_path, kind):
    """Fused in the model, one by one in the checkpoint, under the names and with the shapes that
    the package itself writes; logits are those of the model with the decoded weights.
    """
    given = rounded(moe(kind))
    given.save_pretrained(tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    zerocast.nn.convert(given, "rowwise", include=["model.layers.*.mlp.experts"], strict=True)
    folder = tmp_path / "codes"
    save_pretrained(given, folder, dialect="compressed-tensors/fp8-channel")
    loaded = load_pretrained(folder)
    assert {name: t.shape for name, t in loaded.items()} == {n: t.shape for n, t in plain.items()}
    experts = [name for name in loaded if ".experts." in name]
    assert len(experts) == 2 * 3 * EXPERTS
    assert all(isinstance(loaded[name], zerocast.QuantizedTensor) for name in experts)

    ours = rounded(moe(kind))
    decoded = {n: p.to(torch.bfloat16).detach() for n, p in given.state_dict().items()}
    ours.load_state_dict(decoded)
    assert_transformers_evaluates(folder, ours)


@overrides
def test_transformers_loads_and_evaluates_a_gpt_oss_that_is_saved(tmp_path):
    """Experts that the model keeps as [in, out], in blocks along `in`, cast from what two ranks of
    an optimizer hold of them; logits are those of the model with the decoded weights.
    """
    from transformers import Mxfp4Config

    ours, include = rounded(moe("gpt-oss")), ["model.layers.*.mlp.experts"]

    def save(comm):
        given, others = copy.deepcopy(ours), ["self_attn", "router", "lm_head"]
        zerocast.nn.convert(given, "mxfp4", include=include, filter_fqns=others, strict=True)
        save_pretrained(given, tmp_path, dialect="gpt-oss/mxfp4", **of_masters(given, comm))

    run_ranks("in_process", 2, save)
    loaded = load_pretrained(tmp_path)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                turned = parameter.mT.contiguous()
                whole = zerocast.quantize(turned, zerocast.MXFP4BlockScaling(), columnwise=False)
                assert_same_bytes(loaded[name].dequantize(), whole.dequantize(), name)
                parameter.copy_(whole.dequantize().mT)
    assert_transformers_evaluates(tmp_path, ours, Mxfp4Config(dequantize=True))


@pytest.mark.parametrize(
    ("kind", "dialect"),
    [
        ("llama", "compressed-tensors/nvfp4"),
        ("llama", "compressed-tensors/mxfp8"),
        pytest.param("llama", "deepseek/fp8", marks=pytest.mark.integration),  # by accelerate
        ("mixtral", "compressed-tensors/fp8-channel"),
        ("qwen-moe", "compressed-tensors/fp8-tensor"),
        ("gpt-oss", "gpt-oss/mxfp4"),
    ],
)
@overrides
def test_transformers_loads_and_evaluates_what_is_converted(tmp_path, kind, dialect):
    """From files to files, without a model: the parameters and logits are those of a checkpoint
    that holds what ``dequantize()`` gives.
    """
    import transformers

    options = {"bucket_bytes": 20_000}
    if dialect == "deepseek/fp8":
        pytest.importorskip("accelerate")
        options["exclude"] = ["*.mlp.*"]  # it reads no blocks that are cut off
    source, target, plain = (tmp_path / name for name in ("source", "target", "plain"))
    widths = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = llama({**widths, "tie_word_embeddings": True}) if kind == "llama" else moe(kind)
    rounded(model).save_pretrained(source)
    CheckpointConversion(source, target, dialect, **options).run()
    decoded, codes = load_pretrained(target), 0
    for name, value in decoded.items():
        if isinstance(value, zerocast.QuantizedTensor):
            whole = value.dequantize(torch.bfloat16)
            decoded[name] = whole.mT.contiguous() if kind == "gpt-oss" else whole
            codes += 1
    assert codes >= 4
    plain.mkdir()
    save_file(decoded, plain / "model.safetensors", {"format": "pt"})
    shutil.copy(source / "config.json", plain)
    ours = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    kinds = {"deepseek": "FineGrainedFP8Config", "gpt-oss": "Mxfp4Config"}
    read = kinds.get(dialect.partition("/")[0], "CompressedTensorsConfig")
    assert_transformers_evaluates(target, ours, getattr(transformers, read)(dequantize=True))


def test_weights_of_an_optimizer_or_a_plan_are_exported_without_a_model():
    """From any cut of their masters, as ``quantize`` of the whole; under other names where a
    mapping or a function gives some.
    """
    dialect, values, parts = DIALECTS["modelopt/nvfp4"], masters(), cuts(3, 0, step=1)

    def run(comm):
        options = {"from_masters": True, "bucket_bytes": 5000, "group": comm}
        renamed, upper = {"b.weight": "model.b.weight"}, lambda n: n[0].upper() + n[1:]
        found = tensors_of(plan(comm, values, parts), dialect, names=renamed, **options)
        cast = {n: zerocast.quantize(m, NVFP4, dtype=torch.bfloat16) for n, m in values.items()}
        weights = {name: torch.nn.Parameter(weight) for name, weight in cast.items()}
        optimizer = ZeroOptimizer(weights.items(), lr=0, group=comm)
        started = {name: optimizer.gather_master(weight) for name, weight in weights.items()}
        return found, tensors_of(optimizer, dialect, names=upper, **options), started

    for from_plan, from_optimizer, started in run_ranks("in_process", 3, run):
        stored = expected(dialect, values)
        renamed = {"model." * name.startswith("b.") + name: t for name, t in stored.items()}
        assert_same_tensors(from_plan, renamed)
        renamed = {f"{n[0].upper()}{n[1:]}": t for n, t in expected(dialect, started).items()}
        assert_same_tensors(from_optimizer, renamed)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (3, "names must be a mapping"),
        ({"layers.0.weight": "layers.1.weight"}, "both layers.0.weight and layers.1.weight"),
        (lambda name: None, "got None for layers.0.weight"),
        (lambda name: name.replace(".weight", ""), "'layers.weight_packed' for both"),
    ],
)
def test_names_that_are_no_names_are_refused(names, message):
    """Of another type, or one for two tensors."""
    model = Bank((48, 16))
    zerocast.nn.convert(model, NVFP4)
    with pytest.raises(zerocast.InputError, match=message):
        Export(model, "compressed-tensors/nvfp4", names=names)


def test_buffers_and_unquantized_modules_are_saved(tmp_path):
    """Persistent buffers, biases, a norm; the configuration names the linear layers that stay."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.BatchNorm1d(48))
    model.append(torch.nn.Linear(48, 7))
    zerocast.nn.convert(model, zerocast.Float8CurrentScaling(), filter_fqns=["2"])
    save_pretrained(model, tmp_path, dialect="compressed-tensors/fp8-tensor")
    loaded = load_pretrained(tmp_path)
    assert loaded.keys() == model.state_dict().keys() - {"0._extra_state"}
    for name, tensor in loaded.items():
        kept = model.state_dict()[name]
        assert_same_bytes(tensor.to(kept.dtype), kept.to(kept.dtype), name)
    assert section_of(tmp_path)["ignore"] == ["2"]


@pytest.mark.parametrize("world_size", [1, 3])
def test_layers_that_are_not_quantized_are_cast_where_they_are_named(tmp_path, world_size):
    """Of a plain model, and of one that a ZeroOptimizer trains, whose masters are cast; others stay
    as they are.
    """
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(64, 33), torch.nn.Linear(33, 64)).bfloat16()
    dialect = DIALECTS["compressed-tensors/nvfp4"]

    def run(comm):
        model = copy.deepcopy(base)
        save_pretrained(model, tmp_path / "plain", dialect=dialect, include=["0"], group=comm)
        optimizer = ZeroOptimizer(model.named_parameters(), lr=1e-3, group=comm)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        options = {"dialect": dialect, "include": ["[0]"], "optimizer": optimizer}
        save_pretrained(model, tmp_path / "trained", **options, dtype=torch.float32)
        return optimizer.gather_master(model[0].weight)

    master = run_ranks("in_process", world_size, run)[0]
    plain, trained = load_pretrained(tmp_path / "plain"), load_pretrained(tmp_path / "trained")
    for loaded, values in ((plain, base[0].weight), (trained, master)):
        whole = zerocast.quantize(values, dialect.recipe, dtype=values.dtype)
        weight = loaded["0.weight"].dequantize(torch.float32)
        assert_same_bytes(weight, whole.dequantize(torch.float32), "0.weight")
    assert_same_bytes(plain["1.weight"], base[1].weight, "1.weight")


def bank(recipe=NVFP4) -> Bank:
    """Two quantized weights."""
    torch.manual_seed(0)
    model = Bank((48, 33)).bfloat16()
    zerocast.nn.convert(model, recipe)
    return model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dialect": "gguf"}, "dialect must be one of compressed-tensors/"),
        ({"dialect": "deepseek/fp8"}, "cannot hold; give from_masters=True"),
        ({"from_masters": True}, "needs optimizer=, the ZeroOptimizer"),
        ({"from_masters": "no"}, "from_masters must be True or False"),
        ({"bucket_bytes": 0}, "bucket_bytes must be an integer"),
        ({"dtype": torch.int8}, "dtype must be one of"),
        ({"optimizer": 3}, "must be the zerocast.optim.ZeroOptimizer"),
        ({"tokenizer": "nowhere"}, "tokenizer must have a method"),
        ({"model": torch.nn.Linear(2, 2)}, "got one with none; call"),
        ({"include": ["layers.7"]}, "got 'layers.7', which matches none of"),
        ({"include": "layers.0"}, "include must be a list of names"),
        ({"model": 3}, "model must be a torch.nn.Module, got 3"),
    ],
)
def test_what_cannot_be_saved_is_refused_on_all_ranks(tmp_path, options, message):
    """By its name, with nothing written that looks complete; here on the second of two ranks."""

    def run(comm):
        wrong = options if comm.rank == 1 or "tokenizer" in options else {}
        given = {"model": bank(), "dialect": "compressed-tensors/nvfp4"} | wrong
        with pytest.raises(zerocast.ZerocastError, match=message if wrong else None):
            save_pretrained(directory=tmp_path, group=comm, **given)

    run_ranks("in_process", 2, run)
    assert not (tmp_path / "config.json").exists()


def test_a_weight_that_is_not_finite_is_refused(tmp_path):
    """By its name, on every rank, for each kind of scale."""
    for name in LINEAR_ALONE:
        dialect = DIALECTS[name]
        model = Bank((48, 33)).bfloat16()
        with torch.no_grad():
            model.layers[1].weight[3, 5] = torch.nan
        zerocast.nn.convert(model, dialect.recipe)
        with pytest.raises(zerocast.NonFiniteError, match=r"layers\.1\.weight holds a NaN"):
            save_pretrained(model, tmp_path / name, dialect=dialect)


def test_a_weight_without_a_finite_tensor_scale_is_refused(tmp_path):
    """2688 / 7e-36 is 3.8e38, which FP32 does not hold; 8e-36 has an inverse, and 0 needs none."""
    for value, is_held in ((7e-36, False), (8e-36, True), (0.0, True)):
        model = Bank((48, 33)).bfloat16()
        torch.nn.init.constant_(model.layers[1].weight, value)
        zerocast.nn.convert(model, "nvfp4")
        save = functools.partial(save_pretrained, model, tmp_path / str(value))
        if is_held:
            save(dialect="compressed-tensors/nvfp4")
            continue
        with pytest.raises(
            zerocast.UnsupportedError, match=r"layers\.1\.weight has no element above"
        ):
            save(dialect="compressed-tensors/nvfp4")


def test_masters_of_an_unfinished_step_are_refused():
    """Some ranks may have stepped and others not."""
    model = bank()
    optimizer = ZeroOptimizer(model.named_parameters())
    for p in model.parameters():
        p.grad = torch.ones(p.shape, dtype=p.dtype)

    def on_phase(name):
        if name == "partial_cast":
            raise KeyboardInterrupt
        return contextlib.nullcontext()

    optimizer.on_phase = on_phase
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    with pytest.raises(zerocast.UnfinishedStepError):
        Export(model, "modelopt/nvfp4", optimizer=optimizer, from_masters=True)


def test_a_directory_that_is_in_use_or_unfinished_is_refused(tmp_path):
    """Saving into one with safetensors; loading one without a configuration, without a file that
    the index names, with a damaged file, or of an unknown dialect.
    """
    full, model = tmp_path / "full", bank()
    save_pretrained(model, full, dialect="modelopt/nvfp4", bucket_bytes=1000)
    with pytest.raises(zerocast.InputError, match="needs a directory without files of a model"):
        save_pretrained(model, full, dialect="modelopt/nvfp4")
    files = sorted(full.glob("*.safetensors"))
    assert len(files) == 2

    def refused(change, message) -> None:
        changed = tmp_path / "changed"
        changed.mkdir()
        for file in full.iterdir():
            (changed / file.name).write_bytes(file.read_bytes())
        change(changed)
        with pytest.raises(zerocast.InputError, match=message):
            load_pretrained(changed)
        for file in changed.iterdir():
            file.unlink()
        changed.rmdir()

    refused(lambda folder: (folder / "config.json").unlink(), "has none")
    refused(lambda folder: (folder / "config.json").write_text("{"), "cannot be read")
    refused(lambda folder: (folder / "config.json").write_text("{}"), "needs dialect=")
    refused(lambda folder: (folder / files[0].name).unlink(), "cannot be read")
    refused(lambda folder: (folder / files[1].name).write_bytes(b"abc"), "cannot be read")
    refused(lambda folder: save_file({}, folder / files[1].name), "lacks .*, which its index names")


def test_a_foreign_checkpoint_is_loaded(tmp_path):
    """Of DeepSeek's own configuration, which names no modules: scales of any FP32 values."""
    shape, generator = (130, 200), torch.Generator().manual_seed(0)
    codes = torch.randint(0, 0x7F, shape, dtype=torch.uint8, generator=generator)
    scales = torch.rand((2, 2), generator=generator)
    stored = {
        "model.q.weight": codes.view(torch.float8_e4m3fn),
        "model.q.weight_scale_inv": scales,
        "model.norm.weight": torch.ones(8),
    }
    save_file(stored, tmp_path / "model.safetensors")
    section = DIALECTS["deepseek/fp8"].section
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": section}))
    loaded = load_pretrained(tmp_path)
    assert loaded.keys() == {"model.q.weight", "model.norm.weight"}
    expanded = scales.repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)[:, :200]
    expected = stored["model.q.weight"].float() * expanded
    assert_same_bytes(loaded["model.q.weight"].dequantize(torch.float32), expected, "q")


# --- FSDP2 ---


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_masters_of_fsdp2_make_the_same_files(world_size):
    """Rows over 1, 3 and 4 ranks, some of them without any: the bytes that a forward gathers, and a
    cast by another recipe; every weight is ``quantize`` of the whole master.
    """
    from tests.sharded.sharded import bank as sharded_bank
    from tests.sharded.sharded import batch, whole_masters

    for recipe, dialect, options in (
        (NVFP4, "compressed-tensors/nvfp4", {}),
        ("nvfp4-4over6-1x16", "modelopt/nvfp4", {}),
        (NVFP4, "compressed-tensors/fp8-block", {"from_masters": True}),
        (zerocast.DelayedScaling(), "deepseek/fp8-ue8m0", {"from_masters": True}),
    ):

        def run(comm, recipe=recipe, dialect=dialect, options=options):
            model = sharded_bank(recipe)
            model(batch())
            folder = shared_folder(comm)
            save_pretrained(model, folder, dialect=dialect, bucket_bytes=4000, **options)
            loaded, masters = load_pretrained(folder), whole_masters(model)
            assert loaded.keys() == masters.keys()
            cast_by = DIALECTS[dialect].recipe if options else recipe
            for name, weight in loaded.items():
                whole = zerocast.quantize(masters[name], cast_by, dtype=torch.bfloat16)
                assert_same_bytes(weight.dequantize(), whole.dequantize(), f"{dialect}: {name}")
            comm.barrier()
            return contents(folder)

        found = run_ranks("torch_distributed", world_size, run)
        alone = run_ranks("torch_distributed", 1, run)
        assert found[0] == alone[0]


@pytest.mark.mpi(min_size=4)
def test_bytes_of_fsdp2_that_depend_on_earlier_casts_are_refused():
    """Of delayed scaling, without from_masters; and masters whose dtype nothing tells yet."""
    from tests.sharded.sharded import bank as sharded_bank

    def run(comm):
        del comm
        delayed = zerocast.DelayedScaling(fp8_format="e4m3")
        with pytest.raises(zerocast.UnsupportedError, match="depend on earlier casts"):
            Export(sharded_bank(delayed), "compressed-tensors/fp8-tensor", dtype=torch.bfloat16)
        with pytest.raises(zerocast.InputError, match=r"has not been gathered yet.*give dtype="):
            Export(sharded_bank(), "compressed-tensors/nvfp4")

    run_ranks("torch_distributed", 2, run)


def test_a_module_above_quantized_weights_is_not_named_as_unquantized():
    """A plain parameter of a module beside them is stored under a name of the module above all."""
    block = torch.nn.ModuleDict({"up": torch.nn.Linear(64, 128), "mix": torch.nn.Module()})
    block["mix"].fn = torch.nn.Parameter(torch.randn(4, 64))
    model = torch.nn.ModuleDict({"block": block, "out": torch.nn.Linear(128, 4)}).bfloat16()
    zerocast.nn.convert(model, BLOCKS, filter_fqns=["out"])
    for names, left in ((None, {"block.mix", "out"}), ({"block.mix.fn": "block.fn"}, {"out"})):
        export = Export(model, "deepseek/fp8-ue8m0", names=names)
        assert set(export.config.section()["modules_to_not_convert"]) == left
