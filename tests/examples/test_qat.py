"""The example of quantization-aware training exports what it trained with, and would say so if it
did not.
"""

import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.examples.test_examples import EXAMPLES
from tests.support.programs import on_torchrun_ranks, output_of, run

QAT = EXAMPLES / "qat.py"
SHORT = ("--check", "--pretrain", 2, "--steps", 2, "--modes", "weights", "--recipes")

pytest.importorskip("transformers", reason="the example's models are those of transformers")

SPOILT = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import qat
def spoilt(*given, load=qat.load_pretrained, **options):
    tensors = load(*given, **options)
    tensors["model.layers.1.mlp.up_proj.weight"].rowwise_data[3, 5] ^= 1
    return tensors
qat.load_pretrained, qat.VALIDATION_BATCHES = spoilt, 1
qat.main()
"""
"""One bit of what the example reads is wrong."""


def test_what_was_trained_is_exported_to_the_bit(tmp_path: Path) -> None:
    """Two steps of each method: the values of both exports are those of the last forward, and
    transformers has their loss; record and picture are there.
    """
    command = [sys.executable, QAT, *SHORT, "nvfp4", "--out", tmp_path]
    said = output_of(command)
    assert "The exports hold what was trained with: 1,837,568 bytes compared." in said
    record = json.loads((tmp_path / "record.json").read_text())["runs"]
    scores = {each["job"]["method"]: each["score"] for each in record}
    assert list(scores) == ["start", "BF16", "PTC", "QAD", "PTC of BF16", "QAT"]
    assert scores["BF16"]["loss"] < scores["start"]["loss"] < 5.4
    assert 0 < scores["QAD"]["kl"] < scores["PTC"]["kl"]
    assert (tmp_path / "qat.png").read_bytes().startswith(b"\x89PNG")
    for method in ("QAD", "QAT"):
        assert (tmp_path / f"llama-0-{method}-nvfp4-weights" / "config.json").exists()


def test_quantized_activations_are_exported_with_their_scales(tmp_path: Path) -> None:
    """Of NVFP4 in blocks of 1x16: servers quantize the inputs of all 14 linear layers, too."""
    options = (*SHORT, "nvfp4-1x16", "--modes", "activations", "--out", tmp_path)
    assert "1,837,568 bytes compared" in output_of([sys.executable, QAT, *options])
    folder = tmp_path / "llama-0-QAT-nvfp4-1x16-activations"
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert section["config_groups"]["group_0"]["input_activations"]["dynamic"] == "local"
    stored = load_file(folder / "model.safetensors")
    assert sum(name.endswith(".input_global_scale") for name in stored) == 14


def test_a_wrong_value_of_an_export_is_found(tmp_path: Path) -> None:
    """One bit of one code: the program names the weight, with exit code 1."""
    options = ("--check", "--pretrain", 1, "--steps", 1, "--modes", "weights", "--recipes", "mxfp4")
    finished = run([sys.executable, "-c", SPOILT, *options, "--out", tmp_path])
    assert finished.returncode == 1
    assert "WRONG: " in finished.stderr
    assert "model.layers.1.mlp.up_proj.weight is not what the last forward" in finished.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4", "fp8"])
def test_experts_are_exported_to_the_bit_from_ranks(tmp_path: Path, recipe: str) -> None:
    """Of a mixture of experts on two ranks of FSDP2, with quantized activations, too."""
    options = [*SHORT, recipe, "--modes", "weights", "activations", "--model", "qwen3-moe"]
    said = output_of(on_torchrun_ranks(2, QAT, *options, "--out", tmp_path))
    compared = said.split("The exports hold what was trained with: ")[1].split()[0]
    assert int(compared.replace(",", "")) > 7_000_000
