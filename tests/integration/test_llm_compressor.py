"""llm-compressor, as it is, beside the dialects of compressed-tensors: one model, cast by both. It
pins packages that others pin otherwise, so only ``scripts/newest.sh llmcompressor`` runs this.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.exports import section_of
from tests.support.same_bytes import assert_same_bytes
from zerocast.export import DIALECTS, save_pretrained

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("llmcompressor") is None, reason="needs llm-compressor"),
]

PRESETS = {
    "nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16", "mxfp8": "MXFP8",
    "fp8-channel": "FP8_DYNAMIC", "fp8-block": "FP8_BLOCK", "fp8-tensor": None,
}  # fmt: skip
"""Its scheme for each dialect; None where no preset has dynamic scales of inputs."""

FUSED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")

Tensors = dict[str, torch.Tensor]


def both(folder: Path, name: str, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    """The tensors of ours and of theirs, of a Llama whose output layer stays as it is."""
    from compressed_tensors.quantization import QuantizationScheme
    from llmcompressor import model_free_ptq
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(dtype)
    model.save_pretrained(folder / "source")
    dialect = DIALECTS[f"compressed-tensors/{name}"]
    save_pretrained(model, folder / "ours", dialect=dialect, include=["model.layers.*"])
    group = dialect.section["config_groups"]["group_0"]
    model_free_ptq(
        folder / "source", folder / "theirs",
        scheme=PRESETS[name] or QuantizationScheme.model_validate(group),
        ignore=["lm_head", "re:.*embed.*"], max_workers=1, device="cpu",
    )  # fmt: skip
    ours, theirs = (load_file(folder / each / "model.safetensors") for each in ("ours", "theirs"))
    return ours, theirs


def given(section: object) -> object:
    """A section without what it leaves open, and without what means nothing: the dtype of zero
    points, which symmetric codes lack, and the name of its one group.
    """
    if isinstance(section, dict):
        if "config_groups" in section:
            section = {**section, "config_groups": [*section["config_groups"].values()]}
        parts = {name: given(value) for name, value in section.items() if name != "zp_dtype"}
        return {name: value for name, value in parts.items() if value not in (None, {})}
    return [given(each) for each in section] if isinstance(section, list) else section


@pytest.mark.parametrize("name", PRESETS)
def test_llm_compressor_writes_alike(name, tmp_path):
    """Of FP32 weights: names, dtypes, shapes, the section, and the bytes, but for three. It
    divides by scales where ours multiplies, so codes of FP8 beside a tie may differ by one; the
    tensor scale of NVFP4, which it computes in another order, may in its last bit; and of FP8 with
    one scale a tensor, what servers fuse has the largest scale in ours, and each its own in theirs.
    """
    ours, theirs = both(tmp_path, name, torch.float32)
    assert ours.keys() == theirs.keys()
    for fused in FUSED if name == "fp8-tensor" else ():
        scales = [k for k in theirs if k.endswith(tuple(f"{n}.weight_scale" for n in fused))]
        largest = max(theirs[key] for key in scales)
        for key in scales:
            assert_same_bytes(ours[key], largest, key)
            if theirs[key] != largest:
                del theirs[key], theirs[key.removesuffix("_scale")]
    for key, tensor in theirs.items():
        assert (ours[key].dtype, ours[key].shape) == (tensor.dtype, tensor.shape), key
        if key.endswith("weight_global_scale"):
            torch.testing.assert_close(ours[key], tensor, rtol=2**-23, atol=0)
        elif name in ("fp8-channel", "fp8-tensor") and tensor.dtype == torch.float8_e4m3fn:
            codes = ours[key].view(torch.int8).int(), tensor.view(torch.int8).int()
            wrong = (codes[0] - codes[1]).abs()
            assert wrong.max() <= 1, key
            assert wrong.sum() <= 1e-3 * tensor.numel(), key
        else:
            assert_same_bytes(ours[key], tensor, key)

    written = json.loads((tmp_path / "theirs" / "config.json").read_text())["quantization_config"]
    # Theirs has patterns; ours names modules, without the embeddings, which are never quantized.
    assert (written.pop("ignore"), section_of(tmp_path / "ours")["ignore"]) == (
        ["lm_head", "re:.*embed.*"], ["lm_head"],
    )  # fmt: skip
    del written["version"]
    assert given(written) == given({**section_of(tmp_path / "ours"), "ignore": None})


@pytest.mark.parametrize("name", PRESETS)
def test_llm_compressor_computes_in_the_dtype_of_weights(name, tmp_path):
    """Of BF16 weights its scales of FP8 are BF16, where ours are FP32, and the amaxes of NVFP4 and
    MXFP8 are divided in BF16; MXFP4's scales follow from bits, and so has the same bytes.
    """
    ours, theirs = both(tmp_path, name, torch.bfloat16)
    assert ours.keys() == theirs.keys()
    differ = 0
    for key, tensor in theirs.items():
        assert ours[key].shape == tensor.shape, key
        if key.endswith("weight_scale") and name.startswith("fp8"):
            assert (ours[key].dtype, tensor.dtype) == (torch.float32, torch.bfloat16), key
        else:
            assert ours[key].dtype == tensor.dtype, key
            differ += int((ours[key].view(torch.uint8) != tensor.view(torch.uint8)).sum())
    assert (differ == 0) == (name == "mxfp4")
