"""Directories and files of safetensors that fuzz.py damages: exports, sources of conversions, and
both sides of a comparison.
"""

import argparse
import contextlib
import json
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from fuzz_mutations import (
    JSON,
    ODD_NAMES,
    changed,
    changed_bytes,
    has_memory,
    odd_file,
    times,
)
from safetensors import safe_open
from safetensors.torch import save as as_safetensors

import zerocast
from zerocast.cli import comparison
from zerocast.errors import ZerocastError
from zerocast.export import DIALECTS, CheckpointConversion, load_pretrained, save_pretrained
from zerocast.export.dialects import LINEAR
from zerocast.export.entries import whole
from zerocast.lab.conformance.stored_values import check_stored
from zerocast.tensors import QuantizedTensor
from zerocast.tensors.quantize import quantize_into


def use(weight: QuantizedTensor) -> None:
    """Do with a weight that was accepted what a program does."""
    storage = weight.quantized_storage
    repr(weight)
    weight.dequantize()
    if storage.device.type == "cpu" and storage.tp_shard is None:
        quantize_into(storage, torch.ones(storage.shape))
        zerocast.post_all_gather_processing([weight])
        weight.dequantize()


def with_header(data: bytes, draw: random.Random) -> bytes:
    """Return a file of safetensors with something else in its header."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    fault = header.get("__metadata__", {}).get("fault")
    for _ in times(draw):
        if fault is not None and draw.random() < 0.6:
            fault = json.dumps(changed(json.loads(fault), draw, JSON))
            header["__metadata__"]["fault"] = fault
            continue
        made = changed(header, draw, JSON)
        if not isinstance(made, dict) or made.get("__metadata__") != header.get("__metadata__"):
            break
        header = made
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """By name: what a whole file of safetensors holds."""
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


@contextlib.contextmanager
def damaged(files: Mapping[Path, bytes], draw: random.Random) -> Iterator[None]:
    """Change one file of a directory, and put it back at the end."""
    file = draw.choice(list(files))
    data, action = files[file], draw.random()
    if action < 0.2:
        odd_file(file, list(files), draw)
    elif action < 0.4:
        file.write_bytes(changed_bytes(data, draw))
    elif file.suffix != ".safetensors":
        given = json.loads(data)
        for _ in times(draw):
            given = changed(given, draw, JSON)
        file.write_bytes(json.dumps(given).encode())
    elif action < 0.5:
        file.write_bytes(with_header(data, draw))
    else:
        file.write_bytes(as_safetensors(odd_tensors(read_tensors(file), draw)))
    try:
        yield
    finally:
        if file.is_dir() and not file.is_symlink():
            file.rmdir()
        file.unlink(missing_ok=True)
        file.write_bytes(files[file])


def odd_tensors(stored: dict[str, Any], draw: random.Random) -> dict[str, torch.Tensor]:
    """Return the tensors of a file with some changed, renamed or left out."""
    for _ in times(draw):
        name = draw.choice(list(stored))
        made = changed(stored[name], draw)
        stored.pop(name)
        if has_memory(made) and not made.is_complex() and not made.is_neg():
            odd = draw.choice(ODD_NAMES)
            name = draw.choice((name, name, name, name.replace("scale", "x"), odd))
            stored[name] = made.detach().contiguous().clone()
        if not stored:
            stored["x"] = torch.ones(1)
    return stored


class Exports:
    """Directories that save_pretrained writes, for each dialect."""

    def __init__(self, folder: Path) -> None:
        self._folders = {}
        for name, dialect in DIALECTS.items():
            layers = [torch.nn.Linear(64, 32, bias=False) for _ in range(2)]
            model = torch.nn.ModuleDict({"coded": layers[0], "other": layers[1]}).bfloat16()
            value, kind = layers[0].weight.detach(), "weight"
            if LINEAR not in dialect.reads:
                value, kind = value.view(1, 32, 64), "down_proj"
            weight = zerocast.quantize(value, dialect.recipe, columnwise=False)
            del layers[0].weight
            layers[0].register_parameter(kind, torch.nn.Parameter(weight))
            scales = {"coded": 0.5} if dialect.input_scale else None
            path = folder / name.replace("/", "_")
            save_pretrained(model, path, dialect=name, input_scales=scales, bucket_bytes=1000)
            self._folders[path] = {file: file.read_bytes() for file in path.iterdir()}

    def __call__(self, draw: random.Random) -> None:
        path = draw.choice(list(self._folders))
        with damaged(self._folders[path], draw):
            self._read(path, draw)

    def _read(self, path: Path, draw: random.Random) -> None:
        for tensor in load_pretrained(path).values():
            if isinstance(tensor, QuantizedTensor):
                use(tensor)


class Conversions(Exports):
    """The same, and one of plain weights, as sources of ``convert``; with what an earlier run left.
    A source that is refused leaves no target, and what is written is what a second cast gives.
    """

    TARGETS = ("bf16", "modelopt/nvfp4", "compressed-tensors/fp8-channel", "deepseek/fp8")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        plain, self._out = folder / "plain", folder / "out"
        plain.mkdir()
        self._out.mkdir()
        shapes = {"a.q_proj.weight": (32, 64), "a.k_proj.weight": (32, 64), "norm.weight": (64,),
                  "a.experts.down_proj": (2, 32, 64), "lm_head.weight": (64, 64)}  # fmt: skip
        places = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(shapes)}
        for file in set(places.values()):
            held = {name: torch.ones(s) for name, s in shapes.items() if places[name] == file}
            (plain / file).write_bytes(as_safetensors(held))
        (plain / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        (plain / "config.json").write_text(json.dumps({"dtype": "float32"}))
        (plain / "tokenizer.json").write_text("{}")
        self._folders[plain] = {file: file.read_bytes() for file in plain.iterdir()}

    def _read(self, path: Path, draw: random.Random) -> None:
        target, drafts = self._out / "target", self._out / ".target.zerocast-convert"
        try:
            made = CheckpointConversion(path, target, draw.choice(self.TARGETS))
            if draw.random() < 0.1:
                drafts.mkdir()
                note = json.dumps(made._fingerprint()).encode()
                (drafts / "conversion.json").write_bytes(changed_bytes(note, draw))
            sizes = made.run()
        except ZerocastError as error:
            left = {each.name for each in self._out.iterdir()}
            assert left <= {drafts.name}, f"a refused source left {left}"
            said = str(error)
            assert path.name in said or drafts.name in said or "weight" in said, said
            raise
        else:
            assert {each.name for each in self._out.iterdir()} == {target.name}
            files = [each for each in target.rglob("*") if not each.is_dir()]
            assert {str(each.relative_to(target)) for each in files} == sizes.keys()
            assert not any(each.is_symlink() for each in files), "a link was copied as one"
            # Of an amax above 2^119 the product of code, scale and amax overflows in FP32.
            held = [whole(e.tensor, torch.float32) for e in made.entries if e.recipe is not None]
            if all(not each.numel() or each.abs().max() < 2.0**119 for each in held):
                assert check_stored(made, lambda _: None) == []
        finally:
            for each in self._out.iterdir():
                shutil.rmtree(each)


class Comparisons(Exports):
    """The same, beside what they were, as ``compare`` reads both."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._whole = folder / "whole"
        for path in self._folders:
            shutil.copytree(path, self._whole / path.name)

    def _read(self, path: Path, draw: random.Random) -> None:
        folders = [path, self._whole / path.name, None]
        a, b = draw.sample(folders[:2], 2)
        source = draw.choice([*folders, self._whole / draw.choice(list(self._folders)).name])
        given = argparse.Namespace(a=a, b=b, source=source, json=draw.random() < 0.5, draft=None)
        comparison.run(given)
