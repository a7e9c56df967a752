"""NVIDIA's ModelOpt, as it is, beside the dialects that are named after it."""

import copy
import json

import pytest
import torch

import zerocast
from tests.support.exports import section_of
from tests.support.same_bytes import assert_same_bytes
from zerocast.export import DIALECTS

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]

SHAPE = (130, 256)


def weight() -> torch.Tensor:
    """BF16, rows of magnitudes from 1e-3 to 10, one of them and parts of another 0."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SHAPE, generator=generator) * torch.logspace(-3, 1, SHAPE[0])[:, None]
    x[3, :40:2], x[5] = 0.0, 0.0
    return x.bfloat16()


def stored(name: str) -> tuple[dict[str, torch.Tensor], zerocast.QuantizedTensor]:
    """What the dialect has of the weight, and the weight in codes."""
    whole = zerocast.quantize(weight(), DIALECTS[name].recipe, columnwise=False)
    return DIALECTS[name].encode(whole.quantized_storage), whole


@pytest.mark.parametrize(
    ("dialect", "reader"), [("modelopt/fp8", "FP8QTensor"), ("modelopt/mxfp8", "MXFP8QTensor")]
)
def test_modelopt_decodes_what_is_stored(dialect, reader):
    """To exactly ``dequantize()``."""
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    parts, whole = stored(dialect)
    read = getattr(qtensor, reader)(torch.Size(SHAPE), torch.float32, parts["weight"])
    decoded = read.dequantize(dtype=torch.float32, scale=parts["weight_scale"])
    assert_same_bytes(decoded, whole.dequantize(torch.float32), dialect)


def test_modelopt_quantizes_alike():
    """Its own cast to NVFP4 has the same scale of the tensor, and scales of blocks that are not 0.
    It divides by them where ours multiplies, so codes of values beside a tie may differ by one; and
    it decodes by products in another order, which is the last bit of FP32.
    """
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    parts, whole = stored("modelopt/nvfp4")
    made, scales, tensor_scale = qtensor.NVFP4QTensor.quantize(weight(), 16, try_tensorrt=False)
    assert_same_bytes(tensor_scale, parts["weight_scale_2"], "scale of the tensor")
    is_zero = weight().view(SHAPE[0], -1, 16).eq(0).all(-1)
    assert is_zero.sum() >= 16
    own_scales, their_scales = (each.view(torch.uint8) for each in (parts["weight_scale"], scales))
    assert_same_bytes(their_scales[~is_zero], own_scales[~is_zero], "scales")
    difference = (made._quantized_data != parts["weight"]).float().mean()
    assert difference < 1e-3, f"{difference:.1e} of the bytes of codes differ"

    ours = qtensor.NVFP4QTensor(torch.Size(SHAPE), torch.float32, parts["weight"])
    decoded = ours.dequantize(
        dtype=torch.float32,
        scale=parts["weight_scale"],
        double_scale=parts["weight_scale_2"],
        block_sizes={-1: 16},
    )
    torch.testing.assert_close(decoded, whole.dequantize(torch.float32), rtol=2**-22, atol=0)


@pytest.mark.parametrize(
    "dialect", ["modelopt/mixed", "modelopt/nvfp4", "modelopt/nvfp4-w4a4", "modelopt/mxfp8"]
)
def test_modelopt_writes_such_configurations(dialect, tmp_path):
    """Both files from what it knows of each layer: equal keys at every level. Values differ in who
    wrote them, in modules that are left out, which it summarizes or does not list, in inputs, which
    it takes for static ones, and in the numbers of groups, which go by the order of layers.
    """
    utils = pytest.importorskip("modelopt.torch.export.quant_utils")
    writer = pytest.importorskip("modelopt.torch.export.convert_hf_config")
    model = torch.nn.ModuleDict({n: torch.nn.Linear(64, 64) for n in ("up", "down", "head")})
    recipes = {"modelopt/mxfp8": "mxfp8"}.get(dialect, "nvfp4")
    others = ["head", "down"] if dialect == "modelopt/mixed" else ["head"]
    zerocast.nn.convert(model.bfloat16(), recipes, filter_fqns=others)
    zerocast.nn.convert(model, "mxfp8", filter_fqns=["head"])
    inputs = {"up": 1.0, "down": 1.0} if dialect == "modelopt/nvfp4-w4a4" else None
    zerocast.export.save_pretrained(model, tmp_path, dialect=dialect, input_scales=inputs)
    ours, beside = section_of(tmp_path), json.loads((tmp_path / "hf_quant_config.json").read_text())

    forms = {"modelopt/mxfp8": ["mxfp8"] * 2, "modelopt/nvfp4": ["w4a16_nvfp4"] * 2,
             "modelopt/nvfp4-w4a4": ["nvfp4"] * 2}  # fmt: skip
    of_layers = [*forms.get(dialect, ["w4a16_nvfp4", "mxfp8"]), None]
    given = {}
    for layer, form in zip(("up", "down", "head"), of_layers, strict=True):
        given[f"{layer}.quantization"] = form
        given[f"{layer}.awq_block_size"] = {"mxfp8": 32, None: 0}.get(form, 16)
    theirs = {
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quantization": utils.process_layer_quant_config(given),
    }
    excluded = theirs["quantization"].setdefault("exclude_modules", ["head"])
    assert excluded == beside["quantization"]["exclude_modules"] == ["head"]
    theirs["producer"]["version"] = beside["producer"]["version"]
    assert theirs == beside
    section = writer.convert_hf_quant_config_format(theirs)
    if dialect == "modelopt/mxfp8":  # it writes none for this algorithm alone
        section["config_groups"] = copy.deepcopy(ours["config_groups"])
    for each in (section, ours):
        for group in each["config_groups"].values():
            group.get("input_activations", {}).pop("dynamic", None)
        groups = sorted(each["config_groups"].values(), key=lambda group: group["targets"])
        each["config_groups"] = groups
    assert section == ours
