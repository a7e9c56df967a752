"""A checkpoint in files becomes what save_pretrained writes of the same weights; whole, or not."""

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import zerocast
from tests.support.claims import assert_same_tensors, message_of
from tests.support.experts import MIXED, mixed_moe, moe
from tests.support.exports import configuration, contents
from tests.support.llama import HIDDEN_96, TIED_160, llama
from zerocast.cli import convert_command, main
from zerocast.comm import run_in_process
from zerocast.errors import InputError, NonFiniteError
from zerocast.export import (
    DIALECTS,
    checkpoint_conversion,
    load_pretrained,
    save_pretrained,
)
from zerocast.export.checkpoint_conversion import CheckpointConversion
from zerocast.export.dialects import EXPERTS, LINEAR
from zerocast.recipes import short_name

MODELS = {
    "dense": lambda: llama(HIDDEN_96),
    "tied": lambda: llama(TIED_160),
    "experts": lambda: moe("qwen-moe"),
    "mixtral": lambda: moe("mixtral"),
    "gpt-oss": lambda: moe("gpt-oss"),
}
SMALL = {"bucket_bytes": 20_000}  # several files


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function that gives a model of MODELS in BF16, and the folder where it was saved."""
    made = {}

    def of(name: str):
        if name not in made:
            folder = tmp_path_factory.mktemp(name) / "source"
            model = MODELS[name]().bfloat16()
            model.save_pretrained(folder, max_shard_size="60KB")
            (folder / "tokenizer.json").write_text("{}")
            (folder / "modeling_own.py").write_text("# code\n")
            made[name] = model, folder
        return made[name]

    return of


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder of safetensors."""
    return {
        k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()
    }


def weights(folder: Path) -> dict[str, bytes]:
    """The files of tensors and their index."""
    return {name: held for name, held in contents(folder).items() if "safetensors" in name}


def static_scales(source: Path, file: Path, dialect: str, but: str = " ") -> dict[str, Path]:
    """The option of dialects that want scales of inputs: a file of another tool with one of each
    layer of ``source``, whose name does not have ``but`` in it, and other tensors.
    """
    if not DIALECTS[dialect].input_scale:
        return {}
    names = [n.removesuffix(".weight") for n in tensors(source) if n.endswith("_proj.weight")]
    names = [name for name in names if but not in name]
    scales = {f"{n}.input_scale": torch.tensor((i + 1) / 64) for i, n in enumerate(names)}
    save_file({**scales, "layer.output_scale": torch.ones(())}, file)
    return {"input_scales": file}


# --- the same files ---


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", ["dense", "tied", "experts"])
def test_files_are_those_of_an_export(name, dialect, saved, tmp_path):
    """Of every dialect; experts by experts, an output layer that is tied, several files."""
    model, source = saved(name)
    if dialect == "gpt-oss/mxfp4":
        message = message_of(InputError, CheckpointConversion, source, tmp_path / "a", dialect)
        assert "no server reads codes of a linear layer from gpt-oss/mxfp4" in message
        return
    static = static_scales(source, tmp_path / "scales.safetensors", dialect)
    conversion = CheckpointConversion(source, tmp_path / "a", dialect, **static, **SMALL)
    sizes = conversion.run()
    assert sizes == {n: len(held) for n, held in contents(tmp_path / "a").items()}
    reads_experts, include = EXPERTS in DIALECTS[dialect].reads, {}
    for each, weight in model.named_parameters():
        recipe = DIALECTS[dialect].of(each).recipe
        is_even = weight.shape[-1] % max(recipe.block[1], 1) == 0 or recipe.block[0] > 1
        if is_even and (each.endswith("_proj.weight") or (weight.dim() > 2 and reads_experts)):
            include[each] = recipe
    options = {"include": include, "from_masters": True, "dialect": dialect, **static}
    save_pretrained(model, tmp_path / "b", **options, **SMALL)
    if name == "experts" and not reads_experts:  # a stack in high precision is in one file
        assert_same_tensors(tensors(tmp_path / "a"), tensors(tmp_path / "b"), dialect)
    else:
        assert weights(tmp_path / "a") == weights(tmp_path / "b")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1
    mine, theirs = (configuration(tmp_path / each)["quantization_config"] for each in "ab")
    key = DIALECTS[dialect].unquantized_key
    if key:
        assert set(mine.pop(key)) == set(theirs.pop(key))
    assert mine == theirs
    assert (tmp_path / "a" / "modeling_own.py").exists()
    assert (tmp_path / "a" / "tokenizer.json").exists()
    assert not list(tmp_path.glob(".*"))


def test_mixed_recipes_are_those_of_an_export(tmp_path):
    """Each weight by the first pattern that fits; modules in the section of their formats."""
    model = mixed_moe().bfloat16()
    model.save_pretrained(tmp_path / "source")
    recipes, to = MIXED["experts"], "compressed-tensors/mixed"
    include = ["*", "lm_head"]
    CheckpointConversion(
        tmp_path / "source", tmp_path / "a", to, recipe=recipes, include=include, **SMALL
    ).run()
    report = zerocast.nn.convert(mixed_moe().bfloat16(), recipes)
    names = set(dict(model.named_parameters()))
    include = {
        name if name in names else f"{name}.weight": recipe
        for name, recipe in report.recipes.items()
    }
    options = {"include": include, "from_masters": True, "dialect": to}
    save_pretrained(model, tmp_path / "b", **options, **SMALL)
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


@pytest.mark.parametrize("dialect", [n for n, d in DIALECTS.items() if d.input_scale])
def test_input_scales_of_a_file_are_stored(dialect, saved, tmp_path, capsys):
    """By the command, beside the codes of their layers: of a dialect that wants them, and of those
    layers of a mixed checkpoint that have it; a layer without one is named.
    """
    source, file = saved("dense")[1], tmp_path / "scales.safetensors"
    given = ["convert", str(source), str(tmp_path / "t"), "--input-scales", str(file), "--to"]
    family = dialect.partition("/")[0]
    own = short_name(DIALECTS[dialect].recipe)
    mixed = [f"{family}/mixed", "--recipe", "*.mlp.*=mxfp8", "--recipe", f"*={own}"]
    for options, but in (([dialect], " "), (mixed, ".mlp.")):
        static_scales(source, file, dialect, but)
        assert main([*given, *options, "--verify"]) == 0
        held = load_file(file)
        assert held.pop("layer.output_scale") == 1
        found = {n: t for n, t in tensors(tmp_path / "t").items() if n.endswith("input_scale")}
        assert_same_tensors(found, held, str(options))
        shutil.rmtree(tmp_path / "t")
    static_scales(source, file, dialect, "layers.1.mlp.up_proj")
    assert main([*given, dialect]) == 2
    assert "wrong are model.layers.1.mlp.up_proj" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_files_are_the_same_on_any_number_of_ranks(ranks, saved, tmp_path):
    """Each rank writes every n-th file, and none waits for another's tensors."""
    _, source = saved("experts")
    CheckpointConversion(source, tmp_path / "one", "compressed-tensors/nvfp4", **SMALL).run()

    def convert(comm):
        made = CheckpointConversion(
            source, tmp_path / "many", "compressed-tensors/nvfp4", group=comm, **SMALL
        )
        return made.run()

    assert len({json.dumps(each) for each in run_in_process(ranks, convert)}) == 1
    assert contents(tmp_path / "one") == contents(tmp_path / "many")


# --- sources in codes ---


@pytest.mark.parametrize("dialect", [n for n, d in DIALECTS.items() if LINEAR in d.reads])
def test_codes_are_decoded_first(dialect, saved, tmp_path):
    """To high precision, and from there to another format: a cast of the decoded values."""
    _, source = saved("dense")
    static = static_scales(source, tmp_path / "scales.safetensors", dialect)
    CheckpointConversion(source, tmp_path / "codes", dialect, **static).run()
    found = load_pretrained(tmp_path / "codes", dialect=dialect)
    expected = {
        n: p.dequantize() if isinstance(p, zerocast.QuantizedTensor) else p
        for n, p in found.items()
    }
    expected = {n: p for n, p in expected.items() if not n.endswith("input_scale")}
    CheckpointConversion(tmp_path / "codes", tmp_path / "plain", "bf16", dialect=dialect).run()
    plain = {n: p for n, p in tensors(tmp_path / "plain").items() if "input_scale" not in n}
    assert_same_tensors(plain, expected, dialect)
    assert "quantization_config" not in configuration(tmp_path / "plain")
    CheckpointConversion(
        tmp_path / "codes", tmp_path / "x", "modelopt/mxfp8", dialect=dialect
    ).run()
    CheckpointConversion(tmp_path / "plain", tmp_path / "y", "modelopt/mxfp8").run()
    assert weights(tmp_path / "x") == weights(tmp_path / "y")


def test_gpt_oss_keeps_its_layout(saved, tmp_path):
    """Experts [E, in, out] become codes [E, out, in], whose values are [E, in, out] again; other
    dialects have no place for them, and say so.
    """
    model, source = saved("gpt-oss")
    CheckpointConversion(source, tmp_path / "codes", "gpt-oss/mxfp4", **SMALL).run()
    CheckpointConversion(tmp_path / "codes", tmp_path / "plain", "bf16").run()
    state, plain = model.state_dict(), tensors(tmp_path / "plain")
    assert {n: p.shape for n, p in plain.items()} == {n: p.shape for n, p in state.items()}
    name = "model.layers.0.mlp.experts.down_proj"
    codes = zerocast.quantize(state[name].mT.contiguous(), zerocast.MXFP4BlockScaling())
    assert_same_tensors(
        {"": plain[name]}, {"": codes.dequantize(torch.bfloat16).mT.contiguous()}, name
    )
    again = CheckpointConversion(tmp_path / "codes", tmp_path / "x", "compressed-tensors/nvfp4")
    assert "has no place for matrices [in, out]" in again.left[name]


# --- what is chosen ---


def test_patterns_choose_the_layers(saved, tmp_path):
    """Output layers and routers by their names alone; a reason for each that is left."""
    _, source = saved("experts")
    made = CheckpointConversion(source, tmp_path / "a", "compressed-tensors/nvfp4")
    reason = "an output layer or a router; include '*' and '*{}' to cast it"
    routers = {f"model.layers.{i}.mlp.gate.weight" for i in range(2)}
    assert made.left == {"lm_head.weight": reason.format("lm_head")} | dict.fromkeys(
        routers, reason.format("gate")
    )
    options = {"include": ["*", "lm_head"], "exclude": ["*.q_proj", "*.k_proj", "*.v_proj"]}
    made = CheckpointConversion(source, tmp_path / "a", "compressed-tensors/nvfp4", **options)
    assert "lm_head.weight" not in made.left
    assert made.left["model.layers.0.self_attn.q_proj.weight"] == "excluded by '*.q_proj'"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": ["*.nothing"]}, "got '*.nothing', which fits none of"),
        ({"exclude": ["*.nothing"]}, "got '*.nothing', which fits none of"),
        ({"exclude": ["*"]}, "would be converted: excluded by '*'"),
        ({"recipe": {"*": "fp8-block"}}, "cannot hold"),
        ({"recipe": {"*.nothing": "nvfp4", "*": "nvfp4"}}, "which fits none"),
        ({"to": "compressed-tensors/mixed"}, "give patterns of names with recipes"),
        ({"amax_groups": [["*.q_proj"], ["*.k_proj"]]}, "each would have a separate one"),
        *(({"to": n}, "give input_scales=") for n, d in DIALECTS.items() if d.input_scale),
        ({"input_scales": {"a": 1.0}}, "leave input_scales out"),
        ({"dialect": "compressed-tensors/nvfp4", "include": ["model.embed_tokens"]}, "fits none"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(options, message, saved, tmp_path):
    """By what is required and what was given."""
    _, source = saved("dense")
    given = {"to": "compressed-tensors/nvfp4", **options}
    assert message in message_of(
        InputError, lambda: CheckpointConversion(source, tmp_path / "a", **given)
    )
    assert not list(tmp_path.iterdir())


# --- whole or not at all ---


def test_an_interrupted_conversion_goes_on(saved, tmp_path, monkeypatch):
    """At every stage: the target does not exist before the end, and no file is written twice."""
    _, source = saved("dense")
    make = lambda name: CheckpointConversion(source, tmp_path / name, "modelopt/nvfp4", **SMALL)  # noqa: E731
    make("whole").run()
    written, write = list[str](), checkpoint_conversion.write_tensors

    def noted(held, path):
        written.append(path.name)
        write(held, path)

    monkeypatch.setattr(checkpoint_conversion, "write_tensors", noted)
    stops = 0
    for _ in range(len(make("whole2").buckets) + 1):
        calls = 0

        def stop(count, last=stops + 1):
            nonlocal calls
            calls += count > 0
            if calls > last:
                raise KeyboardInterrupt

        try:
            make("target").run(stop)
            break
        except KeyboardInterrupt:
            stops += 1
            assert not (tmp_path / "target").exists()
    assert contents(tmp_path / "target") == contents(tmp_path / "whole")
    assert len(written) == len(set(written)) == len(make("whole2").buckets)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.nightly
def test_a_killed_conversion_goes_on(tmp_path):
    """Killed at 20 random moments; then run to its end, it gives the files of one run."""
    source, target = tmp_path / "source", tmp_path / "target"
    torch.manual_seed(0)
    made = {f"model.layers.{i}.mlp.down_proj.weight": torch.randn(1024, 4096) for i in range(24)}
    source.mkdir()
    save_file({name: each.bfloat16() for name, each in made.items()}, source / "model.safetensors")
    (source / "config.json").write_text("{}")
    program = (
        "import sys; from zerocast.export.checkpoint_conversion import CheckpointConversion as C\n"
        "c = C(*sys.argv[1:3], 'modelopt/nvfp4', bucket_bytes=1 << 21); print('made', flush=True)\n"
        "c.run()"
    )

    def start(folder: Path) -> subprocess.Popen:
        command = [sys.executable, "-c", program, source, folder]
        running = subprocess.Popen(command, stdout=subprocess.PIPE)
        with running.stdout:
            assert running.stdout.readline() == b"made\n"
        return running

    began = time.monotonic()
    assert start(tmp_path / "whole").wait() == 0
    takes, draw = time.monotonic() - began, torch.Generator().manual_seed(1)
    for _ in range(20):
        if target.exists():
            assert contents(target) == contents(tmp_path / "whole")
            shutil.rmtree(target)
        running = start(target)
        time.sleep(takes * torch.rand((), generator=draw).item() / 3)
        running.send_signal(signal.SIGKILL)
        running.wait()
    if not target.exists():
        assert start(target).wait() == 0
    assert contents(target) == contents(tmp_path / "whole")
    assert not list(tmp_path.glob(".*"))


def test_what_stands_in_the_way_is_refused_by_name(saved, tmp_path, monkeypatch):
    """A target that exists, drafts of another conversion, another process, a full disk."""
    _, source = saved("dense")

    def make(to="modelopt/nvfp4", target="target"):
        return CheckpointConversion(source, tmp_path / target, to, **SMALL)

    full = lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device"))  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_conversion, "write_tensors", full)
        message = message_of(InputError, make().run)
    assert f"{tmp_path / 'target'} cannot be written" in message
    assert "No space left on device" in message
    message = message_of(InputError, make("modelopt/mxfp8").run)
    assert "has files of another conversion to target, of other to" in message
    drafts = tmp_path / ".target.zerocast-convert"
    whole = (drafts / "conversion.json").read_bytes()
    (drafts / "conversion.json").write_bytes(whole[:9])  # of a machine that lost its power
    assert "conversion.json cannot be read" in message_of(InputError, make().run)
    (drafts / "conversion.json").write_bytes(whole)
    (tmp_path / ".other.zerocast-convert").symlink_to(drafts)
    message = message_of(InputError, make(target="other").run)
    assert ".other.zerocast-convert is a link; remove it" in message
    with checkpoint_conversion._locked(tmp_path / ".target.zerocast-convert" / "lock"):
        assert "another process converts to the target" in message_of(InputError, make().run)
    make().run()
    assert "exists; choose another target" in message_of(InputError, make)
    assert "in a directory that exists" in message_of(InputError, make, target="no/where")
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(tmp_path)
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        assert "has 1,000 bytes free" in message_of(InputError, make, target="other")


def test_damaged_directories_are_refused(tmp_path):
    """Before anything is written: shards that are short, missing, elsewhere or too large."""
    source = tmp_path / "source"

    def refused(message: str, index: object = None, data: bytes | None = None, **config):
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir()
        save_file({"a.weight": torch.ones(32, 32)}, source / "model.safetensors")
        (source / "config.json").write_text(json.dumps(config))
        if data is not None:
            (source / "model.safetensors").write_bytes(data)
        if index is not None:
            (source / "model.safetensors.index.json").write_text(json.dumps(index))
        found = message_of(
            InputError, CheckpointConversion, source, tmp_path / "t", "modelopt/mxfp8"
        )
        assert message in found
        assert sorted(each.name for each in tmp_path.iterdir()) == ["source"]

    def file(header: object, data: bytes = b"") -> bytes:
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data

    entry = {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]}
    refused("a.weight has other bytes than its shape", data=file({"a.weight": entry}, b"abcd"))
    entry = {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}
    refused("the dtype F4, which is not known", data=file({"a.weight": entry}, b"abcd"))
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    refused("other bytes than the file", data=file({"a.weight": entry}, b"abcd"))
    refused("its header would have", data=b"\xff" * 16)
    refused("which is not one of its files", {"weight_map": {"a.weight": "../x.safetensors"}})
    refused("cannot be read", {"weight_map": {"a.weight": "x.safetensors"}})
    refused("lacks b.weight", {"weight_map": {"b.weight": "model.safetensors"}})
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    for odd in ("a..weight", "a.forward.weight", "configuration.weight"):  # of a module itself
        refused("which is no parameter's name", data=file({odd: entry}, b"abcd"))
    both = {name: {**entry, "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate("ab")}
    both = {"x": both["a"], "x.weight": both["b"]}
    refused("has 'x.weight', which is no parameter's name", data=file(both, b"abcdabcd"))
    refused("it has no linear layer", data=file({"a": entry}, b"abcd"))
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, math.inf]}
    refused("cannot be read", data=file({"a": entry}, b"abcd"))
    refused("matches none of", quantization_config={"quant_method": "gptq"})
    (source / "config.json").unlink()
    os.mkfifo(source / "config.json")
    message = message_of(InputError, CheckpointConversion, source, tmp_path / "t", "bf16")
    assert "none" in message


def test_a_file_that_shrinks_meanwhile_is_an_error(saved, tmp_path):
    """Not a signal that ends the process, as of memory that is mapped."""
    shutil.copytree(saved("dense")[1], source := tmp_path / "source")
    made = CheckpointConversion(source, tmp_path / "t", "modelopt/mxfp8")
    file = sorted(source.glob("*.safetensors"))[0]
    os.truncate(file, file.stat().st_size // 2)
    assert "ends before its tensors do" in message_of(InputError, made.run)
    assert not (tmp_path / "t").exists()


def test_a_weight_that_is_not_finite_is_refused(tmp_path):
    """By its name, and the target does not appear."""
    (tmp_path / "s").mkdir()
    bad = torch.ones(32, 32)
    bad[3, 4] = torch.nan
    save_file({"a.weight": bad, "b.weight": torch.ones(32, 32)}, tmp_path / "s/model.safetensors")
    (tmp_path / "s/config.json").write_text("{}")
    made = CheckpointConversion(tmp_path / "s", tmp_path / "t", "modelopt/mxfp8")
    assert "a.weight" in message_of(NonFiniteError, made.run)
    assert not (tmp_path / "t").exists()


# --- the command ---


def test_the_command_says_what_it_does(saved, tmp_path, capsys):
    """--dry-run writes nothing; --verify finds a byte that differs; --checksums are those of the
    other command.
    """
    source = str(saved("dense")[1])
    base = ["convert", source, str(tmp_path / "t"), "--to", "compressed-tensors/nvfp4"]
    assert main([*base, "--dry-run", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert not list(tmp_path.iterdir())
    assert said["left"] == {
        "an output layer or a router; include '*' and '*lm_head' to cast it": ["lm_head.weight"]
    }
    assert main([*base, "--4over6", "--verify", "--checksums"]) == 0
    text = capsys.readouterr().out
    assert "14 tensors as compressed-tensors/nvfp4: NVFP4, 4-over-6, one scale a 1x16 block" in text
    assert "read back: equal" in text
    sums = (tmp_path / "t" / "checksums.sha256").read_text()
    assert main(["checksums", str(tmp_path / "t")]) == 0
    assert capsys.readouterr().out == sums
    planned = sum(each.nbytes for each in tensors(tmp_path / "t").values())
    assert abs(said["bytes"]["target"] - planned) < 100 * len(said["formats"])
    assert main(base) == 2
    assert "exists; choose another target" in capsys.readouterr().err
    assert main(["convert", source, str(tmp_path / "u"), "--to", "modelopt/nvfp"]) == 2
    assert "got 'modelopt/nvfp'. Did you mean 'modelopt/nvfp4'" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--verify", "--dry-run"])
def test_rank_0_alone_prints(option, saved, tmp_path, capsys, monkeypatch):
    """The lines of one rank; others print nothing, not even the end of a line."""
    base = ["convert", str(saved("dense")[1]), str(tmp_path / "t"), "--to", "modelopt/nvfp4"]
    ranks = threading.local()
    monkeypatch.setattr(convert_command, "_group", lambda: ranks.comm)

    def convert(comm) -> int:
        ranks.comm = comm
        return main([*base, option])

    assert run_in_process(3, convert) == [0, 0, 0]
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines].count(str(tmp_path / "t")) == 1
    assert all(lines)


def test_what_a_source_says_of_itself_is_not_said_of_the_target(saved, tmp_path, capsys):
    """Its checksums are not copied; names are printed with escapes."""
    source = shutil.copytree(saved("dense")[1], tmp_path / "s")
    (source / "checksums.sha256").write_text("of other bytes")
    names = {"a.weight": torch.ones(32, 32), "\x1b[2J.gate.weight": torch.ones(32, 32)}
    save_file(names, source / "more.safetensors")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(names, "more.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert main(["convert", str(source), str(tmp_path / "t"), "--to", "modelopt/mxfp8"]) == 0
    said = capsys.readouterr().out
    assert r"\x1b[2J.gate.weight" in said
    assert "\x1b" not in said
    assert not (tmp_path / "t" / "checksums.sha256").exists()


def test_verify_finds_a_wrong_byte(saved, tmp_path, capsys, monkeypatch):
    """In a file that was written otherwise than it was cast."""
    write = checkpoint_conversion.write_tensors

    def wrong(held, path):
        name = next(name for name, each in held.items() if each.dtype == torch.uint8)
        held[name][0, 0] ^= 16
        write(held, path)

    monkeypatch.setattr(checkpoint_conversion, "write_tensors", wrong)
    source, target = str(saved("dense")[1]), str(tmp_path / "t")
    assert main(["convert", source, target, "--to", "compressed-tensors/nvfp4", "--verify"]) == 1
    assert "read back: 1 differ" in capsys.readouterr().out
