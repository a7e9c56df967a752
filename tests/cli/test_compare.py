"""``python -m zerocast compare``: what it counts, which causes it finds, and what it refuses."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zerocast
from zerocast.cli import main
from zerocast.export import DIALECTS
from zerocast.lab.conformance.causes import FormulaChanges, restated
from zerocast.recipes import Recipe

library = pytest.importorskip("safetensors.torch")
Tensors = Mapping[str, torch.Tensor]


def saved(folder: Path, tensors: Tensors, files: int = 1, **section) -> Path:
    """A directory of these tensors, dealt over so many files."""
    folder.mkdir()
    configuration = {"quantization_config": section} if section else {}
    (folder / "config.json").write_text(json.dumps(configuration))
    places = {name: f"model-{i % files}.safetensors" for i, name in enumerate(tensors)}
    for file in set(places.values()):
        held = {
            name: t.clone(memory_format=torch.contiguous_format)
            for name, t in tensors.items()
            if places[name] == file
        }
        library.save_file(held, folder / (file if files > 1 else "model.safetensors"))
    if files > 1:
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": places}))
    return folder


def stored(name: str, dialect: str, weight: torch.Tensor, recipe: Recipe | None = None) -> Tensors:
    """The tensors of a weight of the module ``name``, as the dialect stores it."""
    own = DIALECTS[dialect]
    whole = zerocast.quantize(weight, recipe or own.recipe, dtype=torch.bfloat16, columnwise=False)
    parts = own.encode(whole.quantized_storage)
    return {
        (f"{name}{part}" if part[0] == "_" else f"{name}.{part}"): t for part, t in parts.items()
    }


def compared(capsys, *arguments) -> dict[str, dict]:
    """What the command says as JSON, by name; the exit code says whether it is anything."""
    code = main(["compare", "--json", *map(str, arguments)])
    found = json.loads(capsys.readouterr().out)["differences"]
    assert code == bool(found)
    return {each["name"]: each for each in found}


def weight(*shape: int, seed: int = 0) -> torch.Tensor:
    """FP32 with the values of BF16."""
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draws).bfloat16().float()


@pytest.mark.parametrize("dialect", [*DIALECTS, None])
def test_a_checkpoint_equals_itself(dialect, tmp_path, capsys):
    """In every dialect and in BF16, in one file and in several, and without a config.json."""
    w = weight(160, 256) if dialect != "gpt-oss/mxfp4" else weight(3, 160, 256)
    tensors = stored("a.b", dialect, w) if dialect else {"a.b.weight": w.bfloat16()}
    tensors = {**tensors, "norm.weight": torch.ones(5), "empty": torch.ones(0, 3)}
    a, b = saved(tmp_path / "a", tensors), saved(tmp_path / "b", tensors, files=2)
    (b / "config.json").unlink()
    assert compared(capsys, a, b) == {}
    assert main(["compare", str(a), str(b)]) == 0
    assert capsys.readouterr().out == f"0 of 3 weights differ: A = {a}, B = {b}\n"


@pytest.mark.parametrize(
    ("dialect", "other"),
    [
        ("modelopt/nvfp4", "compressed-tensors/nvfp4"),
        ("deepseek/fp8", "compressed-tensors/fp8-block"),
        ("sglang/mxfp8", "modelopt/mxfp8"),
        ("modelopt/fp8", "compressed-tensors/fp8-tensor"),
        ("deepseek/v4-mxfp4", "gpt-oss/mxfp4"),
    ],
)
def test_weights_are_matched_whatever_their_parts_are_called(dialect, other, tmp_path, capsys):
    """The same codes and scales are no difference, and one code of one weight is."""
    tensors = [stored("x", each, weight(160, 256)) for each in (dialect, other)]
    if other == "gpt-oss/mxfp4":  # whose experts are parameters of their own
        tensors[1] = {f"x.weight{name[1:]}": tensor for name, tensor in tensors[1].items()}
    sections = [DIALECTS[each].section for each in (dialect, other)]
    a = saved(tmp_path / "a", tensors[0], **sections[0])
    assert compared(capsys, a, saved(tmp_path / "b", tensors[1], **sections[1])) == {}
    codes = next(iter(tensors[1].values())).view(torch.uint8)
    codes.view(-1)[77] ^= 0x08
    c = saved(tmp_path / "c", tensors[1], **sections[1])
    (found,) = compared(capsys, a, c).values()
    assert (found["name"], found["codes"], found["scales"]) == ("x.weight", 1, 0)
    assert (found["a"], found["b"]) == (dialect, other)


def test_the_numbers_are_right(tmp_path, capsys):
    """Of weights whose differences are known: one code two steps away, plain values, NaNs, dtypes,
    shapes, formats, and what one of them lacks.
    """
    w = torch.zeros(1, 32)
    w[0, 0], w[0, 16] = 6.0, 3.0
    tensors = stored("q", "modelopt/nvfp4", w)
    assert tensors["q.weight"].view(-1)[0] == 7  # 6
    other = {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    other["q.weight"].view(-1)[0] = 5  # 3
    plain = torch.tensor([4.0, torch.nan, 0.0, 1.0])
    same = dict.fromkeys(("plain", "nan", "zero", "dtype", "shape", "mine"), plain)
    a = saved(tmp_path / "a", {**tensors, **same, **stored("f", "sglang/mxfp8", weight(4, 32))})
    changed = {
        "plain": torch.tensor([4.0, torch.nan, 0.0, 3.0]),
        "nan": torch.full((4,), torch.nan),
        "zero": plain * torch.tensor([1, 1, -1, 1]),
        "dtype": plain.bfloat16(),
        "shape": plain[:3],
        "f.weight": weight(4, 32),
        "others": plain,
    }
    found = compared(capsys, a, saved(tmp_path / "b", {**other, **changed}))
    none = (None, None, None, None)
    error = found["f.weight"]["largest"]
    assert {name: tuple(each.values())[3:7] for name, each in found.items()} == {
        "q.weight": (1, 0, 3, 0.5), "plain": (1, None, 2, 0.5), "nan": (3, None, None, None),
        "zero": (0, None, 0, 0), "dtype": (None, None, 0, 0), "shape": none, "mine": none,
        "others": none, "f.weight": (None, None, error, found["f.weight"]["relative"]),
    }  # fmt: skip
    assert 0 < found["f.weight"]["relative"] < 2**-4 < 10 * error
    assert {name: each["cause"] for name, each in found.items()} == {
        "q.weight": "equal scales, and codes up to 2 steps apart: other weights, or damage",
        "plain": "other values", "nan": "other values", "zero": "other bits of zeros or NaNs",
        "dtype": "other precision", "shape": "other shapes, [4] and [3]", "mine": "only in A",
        "others": "only in B", "f.weight": "other precision",
    }  # fmt: skip
    assert (found["f.weight"]["a"], found["f.weight"]["b"]) == ("sglang/mxfp8", "float32")


def test_experts_in_other_layouts_are_named(tmp_path, capsys):
    """Once for each module, which is not compared: one tensor of all experts in one checkpoint, one
    of each in the other. Others are compared, and one that is missing among others is named.
    """
    norm, stack = {"norm.weight": torch.ones(5)}, weight(2, 64, 32)
    one = {"a.experts.gate_up_proj": stack, "b.experts.gate_up_proj": stack}
    each = {f"a.experts.{e}.{p}_proj.weight": stack[e] for e in range(2) for p in ("gate", "up")}
    lacking = {f"c.experts.{e}.up_proj.weight": stack[e] for e in range(2)}
    same = {**norm, "b.experts.gate_up_proj": stack, "c.experts.1.up_proj.weight": stack[1]}
    a = saved(tmp_path / "a", {**norm, **one, **lacking})
    b = saved(tmp_path / "b", {**same, **each})
    for pair in ((a, b), (b, a)):
        found = compared(capsys, *pair)
        assert found.keys() == {"a.experts", "c.experts.0.up_proj.weight"}
        cause = "not compared: experts in other layouts"
        layouts = [found["a.experts"][key] for key in "ab"]
        assert layouts == ["in one tensor", "each apart"][:: 1 if pair == (a, b) else -1]
        assert found["a.experts"]["cause"] == cause
    main(["compare", str(a), str(b)])
    assert "2 of 5 weights differ" in capsys.readouterr().out


# --- causes ---

NVFP4, MXFP4 = DIALECTS["modelopt/nvfp4"].recipe, DIALECTS["gpt-oss/mxfp4"].recipe
# The dialect, the weight's last change or the recipe in B, and what is said.
IN_THE_BYTES = {
    "another group": ("modelopt/nvfp4", {(0, 0): 64.0}, "tensor scales of other amaxes, "),
    "another group of FP8": ("modelopt/fp8", {(0, 0): 64.0}, "tensor scales of other amaxes, "),
    "4-over-6": (
        "modelopt/nvfp4",
        replace(NVFP4, nvfp4_4over6="weights", nvfp4_4over6_e4m3_use_256="none"),
        "block scales 1.5 times those of the other: 4-over-6 in one of them",
    ),
    "rounding of scales": (
        "gpt-oss/mxfp4",
        replace(MXFP4, scale_rounding="even"),
        "block scales a step apart: another formula or rounding of scales",
    ),
    "other weights": ("modelopt/mxfp8", {(1, 5): 1000.0}, "block scales up to "),
    "powers of two": (
        "deepseek/fp8",
        DIALECTS["deepseek/fp8-ue8m0"].recipe,
        "the scales of B alone are powers of two",
    ),
    "sign of zero": ("modelopt/nvfp4", {(3, 4): -0.0}, "the signs of zeros"),
}


@pytest.mark.parametrize("case", IN_THE_BYTES)
def test_causes_in_the_bytes(case, tmp_path, capsys):
    """What can be told without the weights from which both were cast."""
    dialect, change, cause = IN_THE_BYTES[case]
    w = weight(160, 256)
    w[3, 4] = 0.0
    a = saved(tmp_path / "a", stored("x", dialect, w))
    recipe = change if isinstance(change, Recipe) else None
    for index, value in {} if recipe else change.items():
        w[index] = value
    b = saved(tmp_path / "b", stored("x", dialect, w, recipe))
    (found,) = compared(capsys, a, b).values()
    assert found["cause"].startswith(cause)


AMAX = 5.5  # 448 / AMAX and AMAX / 448 are rounded in other directions
FORMULAS = [
    ("modelopt/nvfp4", "its block scale of zeros is 1"),
    ("compressed-tensors/nvfp4", "it stores 1/8 for block scales that round to 0"),
    ("compressed-tensors/fp8-tensor", "it stores 1 / (448 / amax)"),
    ("compressed-tensors/fp8-channel", "its scale of zeros is 0, and their codes are 0 / 0, NaN"),
    ("deepseek/fp8", "it stores 1 / (448 / amax)"),
    ("sglang/mxfp8", "it rounds a scale by adding 2^21 to the bits of the amax"),
    ("gpt-oss/mxfp4", "it rounds ties towards zero"),
]


@pytest.mark.parametrize(("dialect", "change"), FORMULAS)
def test_the_source_names_the_formula(dialect, change, tmp_path, capsys):
    """B is cast by a changed formula, which is found from the blocks that differ."""
    w = weight(300, 512)
    w[7], w[8, 0] = 0.0, AMAX
    tensors = stored("x", dialect, w)
    made = restated(dialect, w, FormulaChanges(change))
    other = {
        name: own.view(t.dtype).reshape(t.shape) if own.dtype != t.dtype else own.reshape(t.shape)
        for (name, t), own in zip(tensors.items(), made, strict=True)
    }
    a, b = saved(tmp_path / "a", tensors), saved(tmp_path / "b", other)
    name = "x" if dialect == "gpt-oss/mxfp4" else "x.weight"
    source = saved(tmp_path / "source", {name: w.bfloat16()})
    (found,) = compared(capsys, a, b, "--source", source).values()
    _, ours, theirs = found["cause"].rsplit("; ", 2)
    assert ours.startswith("A has the formula of ")
    assert ", but" not in ours
    assert theirs.endswith(f", but {change}")


def test_the_source_names_groups_and_what_is_not_known(tmp_path, capsys):
    """A scale of a group's amax; weights of which no known formula gives the bytes; a weight that
    the source lacks; experts that it keeps transposed.
    """
    w, experts = weight(64, 256), weight(2, 64, 96, seed=1)
    group = torch.cat((w, torch.full((1, 256), 7.0)))
    with_group = stored("x", "modelopt/nvfp4", group)
    with_group = {n: t[:-1] if t.dim() else t for n, t in with_group.items()}
    a = saved(tmp_path / "a", {
        **stored("x", "modelopt/nvfp4", w), **stored("y", "sglang/mxfp8", w),
        **stored("z", "sglang/mxfp8", w), **stored("e", "gpt-oss/mxfp4", experts),
    })  # fmt: skip
    b = saved(tmp_path / "b", {
        **with_group, **stored("y", "sglang/mxfp8", -w), **stored("z", "sglang/mxfp8", -w),
        **stored("e", "gpt-oss/mxfp4", -experts),
    })  # fmt: skip
    source = saved(tmp_path / "c", {"x.weight": w, "y.weight": w, "e": experts.mT})
    found = compared(capsys, a, b, "--source", source)
    causes = {name: each["cause"].rsplit("; ", 2)[1:] for name, each in found.items()}
    of = "A has the formula of sglang/mxfp8"
    assert causes == {
        "x.weight": [
            "A has the formula of modelopt/nvfp4",
            "B has the formula of modelopt/nvfp4 with the amax 7 of its group",
        ],
        "y.weight": [of, "B has no known formula"],
        "z.weight": [],
        "e": [of.replace("sglang/mxfp8", "gpt-oss/mxfp4"), "B has no known formula"],
    }


# --- what is written and refused ---


def test_the_table_and_the_page(tmp_path, capsys):
    """A row for each weight that differs; names cannot add to the page; no file that is read is
    replaced.
    """
    a = saved(tmp_path / "a", {"<script>\n": torch.ones(2), "same": torch.ones(2)})
    b = saved(tmp_path / "b", {"<script>\n": torch.zeros(2), "same": torch.ones(2)})
    page = tmp_path / "page.html"
    assert main(["compare", str(a), str(b), "--html", str(page)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["<script>\\n", "float32", "float32", *"211", "other", "values"]
    assert lines[4] == f"1 of 2 weights differ: A = {a}, B = {b}"
    text = page.read_text()
    assert "&lt;script&gt;" in text
    assert "<script>" not in text
    model = str(b / "model.safetensors")
    assert main(["compare", str(a), str(b), "--html", model, "--overwrite"]) == 2
    assert "is read by the command" in capsys.readouterr().err


def truncated(folder: Path) -> None:
    """Take the last byte of a file."""
    file = folder / "model-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def huge(folder: Path) -> None:
    """Let a header have 2^62 bytes."""
    data = (folder / "model-0.safetensors").read_bytes()
    (folder / "model-0.safetensors").write_bytes((2**62).to_bytes(8, "little") + data[8:])


def indexed(folder: Path, **places: Any) -> None:
    """Add to the index."""
    index = folder / "model.safetensors.index.json"
    given = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": given | places}))


def twice(folder: Path) -> None:
    """Let both files have the same tensors."""
    data = (folder / "model-0.safetensors").read_bytes()
    (folder / "model-1.safetensors").write_bytes(data)


HOSTILE = {
    "a truncated shard": (truncated, "a file that cannot be read"),
    "a huge header": (huge, "a file that cannot be read"),
    "a missing shard": (lambda f: (f / "model-1.safetensors").unlink(), "a file that cannot be"),
    "a path in the index": (lambda f: indexed(f, x="../a/model-0.safetensors"), "'../a/model-0"),
    "a missing tensor": (lambda f: indexed(f, x="model-0.safetensors"), "lacks x"),
    "a tensor in two shards": (twice, "two of its files have a tensor w"),
    "an index of numbers": (lambda f: indexed(f, x=3), "a file that cannot be read"),
    "a config.json of text": (
        lambda f: (f / "config.json").write_text("[]"),
        "must hold an object",
    ),
    "no directory": (lambda f: f.rename(f.with_name("c")), "a file that cannot be read"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_directories_are_refused(case, tmp_path, capsys):
    """By an error that names the directory, whichever of the two it is."""
    tensors = {"w": torch.ones(4), "v": torch.ones(4)}
    a, b = (saved(tmp_path / name, tensors, files=2) for name in "ab")
    damage, message = HOSTILE[case]
    damage(b)
    for arguments in ((a, b), (b, a), (a, a, "--source", b)):
        assert main(["compare", *map(str, arguments)]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert str(b) in said


def test_a_pipe_is_not_read(tmp_path, capsys):
    """It could block for ever."""
    a = saved(tmp_path / "a", {"w": torch.ones(4)})
    (a / "model.safetensors").unlink()
    os.mkfifo(a / "model.safetensors")
    assert main(["compare", str(a), str(a)]) == 2
    assert "not a regular file" in capsys.readouterr().err
