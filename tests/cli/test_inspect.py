"""``python -m zerocast inspect``: what it counts, what it reads, and what it refuses to execute."""

import json
import os
import pickle
from html.parser import HTMLParser

import pytest
import torch
import torch.distributed.checkpoint as dcp

import zerocast
from zerocast.cli import checkpoint_files, main
from zerocast.recipes import RECIPES


def values() -> torch.Tensor:
    """[4, 4] whose scale is 1 in FP8 with one scale a tensor: ends of the range, zeros, ones."""
    return torch.tensor([448.0, -448.0] + 8 * [0.0] + 6 * [1.0]).view(4, 4)


def saved(kind: str, state: dict, folder):
    """The path of ``state``, saved."""
    if kind == "torch.save":
        torch.save(state, folder / "state.pt")
        return folder / "state.pt"
    dcp.save(state, checkpoint_id=folder / "dcp")
    return folder / "dcp"


def inspected(capsys, *arguments) -> list[dict]:
    """What the command says as JSON, by name."""
    assert main(["inspect", "--json", *map(str, arguments)]) == 0
    return {each["name"]: each for each in json.loads(capsys.readouterr().out)}


@pytest.mark.filterwarnings("ignore:torch.distributed is")  # no process group
@pytest.mark.parametrize("kind", ["torch.save", "torch.distributed.checkpoint"])
def test_the_numbers_are_right(kind, tmp_path, capsys):
    """Ranges and shares of a tensor whose codes are known, under FP8, in a file and a directory;
    under NVFP4 with an amax of 6 in one block of four, and MXFP4; of a plain tensor with a NaN.
    """
    blocks = torch.zeros(32, 32)
    blocks[3, 5] = -6.0
    blocks[20, 20] = 1.5  # a quarter of the tensor's amax: its block's scale is 448 / 4
    state = {
        "model": {
            "fp8": zerocast.quantize(values(), zerocast.Float8CurrentScaling()),
            "nvfp4": zerocast.quantize(blocks, zerocast.NVFP4BlockScaling()),
            "mxfp4": zerocast.quantize(blocks, zerocast.MXFP4BlockScaling()),
            "bias": torch.tensor([0.0, -3.0, torch.nan, 0.5]),
        },
        "step": 3,
    }
    found = inspected(capsys, saved(kind, state, tmp_path))
    assert list(found) == ["model.fp8", "model.nvfp4", "model.mxfp4", "model.bias"]
    fp8, nvfp4, mxfp4, bias = found.values()
    assert (fp8["amax"], fp8["codes"], fp8["scales"]) == (448, [-448, 448], [1, 1])
    assert (fp8["saturated"], fp8["zeros"], fp8["not_finite"]) == (2 / 16, 8 / 16, 0)
    assert fp8["recipe"] == "Float8CurrentScaling()"
    assert (nvfp4["amax"], nvfp4["codes"], nvfp4["scales"]) == (6, [-6, 6], [0, 448])
    assert (nvfp4["saturated"], nvfp4["zeros"]) == (2 / 1024, 1022 / 1024)
    assert (bias["amax"], bias["zeros"], bias["not_finite"], bias["recipe"]) == (3, 1 / 4, 1, "")
    assert (bias["labels"], bias["bars"]) == (["2^-1", "2^0", "2^1"], [1 / 4, 0, 1 / 4])
    assert (mxfp4["amax"], mxfp4["codes"], mxfp4["scales"]) == (6, [-6, 6], [2**-127, 1])
    assert mxfp4["bars"] == nvfp4["bars"] == [1022 / 1024, 0, 0, 0, 0, 0, 0, 2 / 1024]


@pytest.mark.parametrize("shape", [(48, 96), (33, 64), (3, 33, 64)])
def test_codes_and_scales_of_every_recipe(shape, tmp_path, capsys):
    """Every element has its code in the histogram, and a scale is one that the weight decodes by:
    the largest code times its scale is the amax, where one scale serves the tensor.
    """
    weights = {
        name: zerocast.quantize(torch.randn(shape), scheme()) for name, scheme in RECIPES.items()
    }
    found = inspected(capsys, saved("torch.save", weights, tmp_path))
    for name, weight in weights.items():
        about = found[name]
        assert sum(about["bars"]) == pytest.approx(1), name
        assert about["amax"] == weight.dequantize(torch.float32).abs().max().item(), name
        assert about["nbytes"] == sum(b.nbytes for b in weight.quantized_storage.buffers.values())
        if name in ("current", "delayed"):
            largest = max(map(abs, about["codes"])) * about["scales"][0]
            assert largest == pytest.approx(about["amax"], rel=1e-6)


def test_columnwise_codes_alone(tmp_path, capsys):
    """A tensor of which only the columnwise codes are kept, whose rows have an odd length."""
    recipe = zerocast.NVFP4BlockScaling()
    weight = zerocast.quantize(torch.full((33, 64), 2.0), recipe)
    weight.quantized_storage.drop(rowwise=True)
    about = inspected(capsys, saved("torch.save", {"w": weight}, tmp_path))["w"]
    assert (about["codes"], about["saturated"], about["zeros"]) == ([6, 6], 1, 0)


def test_safetensors(tmp_path, capsys, monkeypatch):
    """Read where the package is installed; else refused with what to install."""
    library = pytest.importorskip("safetensors.torch")
    library.save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    assert inspected(capsys, tmp_path)["a"]["amax"] == 1
    monkeypatch.setattr(checkpoint_files, "find_spec", lambda name: None)
    assert main(["inspect", str(tmp_path)]) == 2
    assert "pip install safetensors" in capsys.readouterr().err


class Trap:
    """Unpickled, it makes a directory."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["torch.save", "metadata"])
def test_nothing_in_a_file_is_executed(kind, tmp_path, capsys):
    """A pickle that would call a function is refused, in a file and in a directory's metadata."""
    sprung, file = tmp_path / "sprung", tmp_path / "trap.pt"
    if kind == "metadata":
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Trap(sprung)))
        file = tmp_path
    else:
        torch.save({"a": Trap(sprung)}, file)
    assert main(["inspect", str(file)]) == 2
    assert not sprung.exists()
    assert str(tmp_path) in capsys.readouterr().err


def test_what_is_no_checkpoint(tmp_path, capsys):
    """A path that is not there, a directory without tensors, and a damaged file are told so."""
    damaged = tmp_path / "damaged.pt"
    damaged.write_bytes(b"PK\x03\x04 and no more")
    (tmp_path / "empty").mkdir()
    for path, told in (
        ("nothing.pt", "there is no"),
        ("empty", "neither"),
        (damaged, "zip archive"),
    ):
        assert main(["inspect", str(tmp_path / path)]) == 2
        assert told in capsys.readouterr().err


def test_the_page_needs_nothing_beside_itself(tmp_path, capsys):
    """The HTML is closed, escapes names, draws every tensor with values and refers to no file."""
    name = "<script>&"
    torch.save({name: torch.randn(9), "ids": torch.arange(3)}, tmp_path / "a.pt")
    page = tmp_path / "page.html"
    assert main(["inspect", str(tmp_path / "a.pt"), "--html", str(page)]) == 0
    text, tags = page.read_text(), []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append((tag, dict(attributes)))
    parser.feed(text)
    assert not any({"src", "href"} & set(attributes) for _, attributes in tags)
    names = [tag for tag, _ in tags]
    assert "script" not in names
    assert names.count("svg") == 1
    assert name in capsys.readouterr().out
