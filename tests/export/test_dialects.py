"""Dialects: names, shapes and bytes are those that the servers' own packages read and write."""

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import zerocast
from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from zerocast.export import DIALECTS, W4A4_DIALECTS
from zerocast.export.dialects import stored_name

SHAPES = ((48, 160), (130, 288), (1, 32), (128, 256))
COMPRESSED_TENSORS = [name for name in DIALECTS if name.startswith("compressed-tensors/")]
EXACT_2D = zerocast.NVFP4BlockScaling()
FOUR_OVER_SIX = zerocast.NVFP4BlockScaling(nvfp4_4over6="weights")
SQUARE_MXFP4 = zerocast.MXFP4BlockScaling(enable_2d_quantization=True)
SQUARE_MXFP8 = zerocast.MXFP8BlockScaling(enable_2d_quantization=True)


def awkward(shape) -> torch.Tensor:
    """BF16, rows from 1e-30 to 1e4, with zeros of both signs, a subnormal and rows of zeros."""
    generator = torch.Generator().manual_seed(shape[0])
    values = torch.randn(shape, generator=generator) * torch.logspace(-30, 4, shape[0])[:, None]
    values[0, :3] = torch.tensor([0.0, -0.0, 1e-40])
    values[shape[0] // 2] = 0
    return values.bfloat16()


def quantized(recipe, shape) -> zerocast.QuantizedTensor:
    """:func:`awkward` values."""
    return zerocast.quantize(awkward(shape), recipe, dtype=torch.bfloat16)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", DIALECTS)
def test_a_weight_that_is_stored_comes_back(name, shape):
    """Every buffer of the rowwise plane, its padding included; stored again it has the same bytes,
    the tensor scale of NVFP4 included.
    """
    dialect = DIALECTS[name]
    weight = zerocast.quantize(awkward(shape), dialect.recipe, columnwise=False)
    stored = dialect.encode(weight.quantized_storage)
    assert tuple(stored) == dialect.names
    loaded = dialect.decode(stored)
    assert_same_storage(loaded, weight, name)
    for part, again in dialect.encode(loaded.quantized_storage).items():
        assert_same_bytes(again, stored[part], f"{name}: {part}")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", COMPRESSED_TENSORS)
def test_compressed_tensors_decodes_what_is_stored(name, shape):
    """To exactly ``dequantize()`` in the dtype that it decodes to, from tensors that have the
    names, shapes and dtypes of those that it writes itself.
    """
    dialect = DIALECTS[name]
    config = QuantizationConfig.model_validate(dialect.quantization_config(["lm_head"]))
    assert config.ignore == ["lm_head"]
    scheme = config.config_groups["group_0"]
    package = BaseCompressor.get_value_from_registry(scheme.format)
    weight = quantized(dialect.recipe, shape)
    stored = dialect.encode(weight.quantized_storage)

    decoded = package.decompress(dict(stored), scheme)["weight"]
    expected = weight.dequantize(torch.float32).to(decoded.dtype)
    assert_same_bytes(decoded, expected, f"{name} of {list(shape)}")

    dense = {
        "weight": weight.dequantize(torch.bfloat16),
        "weight_scale": package.decompress(dict(stored), scheme)["weight_scale"].detach(),
    }
    if "weight_global_scale" in stored:
        dense["weight_global_scale"] = stored["weight_global_scale"]
    written = package.compress(dense, scheme)
    described = {part: (t.shape, t.dtype) for part, t in written.items()}
    assert {part: (t.shape, t.dtype) for part, t in stored.items()} == described
    # It writes the code of -0 for some zeros.
    again = package.decompress(written, scheme)["weight"]
    assert_same_bytes(
        again + 0.0, decoded + 0.0, f"{name} of {list(shape)}, written by the package"
    )


def test_inputs_in_nvfp4_are_declared_as_compressed_tensors_does():
    """Its preset says which minima and maxima it observes, too, and leaves the dtype of zero points
    open, which symmetric codes lack; other dialects of NVFP4 have no such inputs.
    """
    section = W4A4_DIALECTS["compressed-tensors/nvfp4-w4a4"].quantization_config(["lm_head"])
    config = QuantizationConfig.model_validate(section)
    (own,) = config.config_groups.values()
    preset = preset_name_to_scheme("NVFP4", ["Linear"])
    for part in ("weights", "input_activations"):
        ours, theirs = (getattr(each, part).model_dump() for each in (own, preset))
        left = {"observer", "zp_dtype"}
        assert {k: v for k, v in ours.items() if k not in left} == {
            k: v for k, v in theirs.items() if k not in left
        }
    weights_alone = preset_name_to_scheme("NVFP4A16", ["Linear"])
    assert weights_alone.input_activations is None


def test_inputs_beside_one_scale_a_tensor_have_one_a_tensor():
    """vLLM and SGLang build no experts of compressed-tensors with another pair of strategies."""
    (group,) = DIALECTS["compressed-tensors/fp8-tensor"].section["config_groups"].values()
    weights, inputs = group["weights"], group["input_activations"]
    assert weights["strategy"] == inputs["strategy"] == "tensor"
    assert inputs["dynamic"] is True


@pytest.mark.parametrize(
    "name",
    ["deepseek/fp8", "deepseek/fp8-ue8m0", "deepseek/v4-fp8", "deepseek/v4-mxfp4", "sglang/mxfp8",
     "modelopt/mxfp8"],
)  # fmt: skip
def test_transformers_decodes_what_is_stored(name):
    """By its reader of checkpoints of FP8 and of experts in 4 bits, which tells them by their
    dtypes: to exactly ``dequantize()``.
    """
    dialect, weight = DIALECTS[name], quantized(DIALECTS[name].recipe, (128, 256))
    stored = dialect.encode(weight.quantized_storage)
    read = Fp8Dequantize(None)._dequantize_one
    decoded = read(stored[dialect.codes], stored[dialect.scales], torch.float32)
    assert_same_bytes(decoded, weight.dequantize(torch.float32), name)


def test_transformers_decodes_the_blocks_of_gpt_oss():
    """A matrix as its reader takes one of each expert, which it transposes."""
    dialect = DIALECTS["gpt-oss/mxfp4"]
    weight = quantized(dialect.recipe, (130, 288))
    stored = dialect.encode(weight.quantized_storage)
    assert stored["_blocks"].shape == (130, 9, 16)
    assert stored["_scales"].shape == (130, 9)
    decoded = convert_moe_packed_tensors(stored["_blocks"][None], stored["_scales"][None])
    assert_same_bytes(decoded[0].t(), weight.dequantize(), "gpt-oss")


@pytest.mark.parametrize(
    ("name", "parameter", "tensors"),
    [
        ("gpt-oss/mxfp4", "a.experts.down_proj",
         ["a.experts.down_proj_blocks", "a.experts.down_proj_scales"]),
        ("deepseek/v4-mxfp4", "a.experts.3.w1.weight",
         ["a.experts.3.w1.weight", "a.experts.3.w1.scale"]),
        ("modelopt/fp8", "weight", ["weight", "weight_scale"]),
    ],
)  # fmt: skip
def test_the_names_of_a_weight(name, parameter, tensors):
    """Behind the name of the parameter, or in its place; back again; and other names are none."""
    dialect = DIALECTS[name]
    assert [stored_name(parameter, part) for part in dialect.names] == tensors
    found = [dialect.parameter_of(each) for each in tensors]
    assert found == [(parameter, part) for part in dialect.names]
    assert dialect.parameter_of("a.norm.bias") is None


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("compressed-tensors/nvfp4", EXACT_2D),
        ("compressed-tensors/nvfp4", FOUR_OVER_SIX),
        ("modelopt/nvfp4", EXACT_2D),
        ("compressed-tensors/mxfp8", SQUARE_MXFP8),
        ("deepseek/v4-mxfp4", SQUARE_MXFP4),
        ("compressed-tensors/mxfp4", zerocast.MXFP4BlockScaling()),
        ("deepseek/fp8", zerocast.Float8BlockScaling()),
    ],
)
def test_trained_bytes_are_held_where_a_server_reads_them_alike(name, recipe):
    """Square blocks, whose scales are repeated for every row; 4-over-6; powers of two among any
    scales: what is decoded is what the weight means.
    """
    dialect, weight = DIALECTS[name], quantized(recipe, (130, 288))
    assert dialect.holds(recipe, weight.shape)
    loaded = dialect.decode(dialect.encode(weight.quantized_storage))
    assert_same_bytes(loaded.dequantize(), weight.dequantize(), name)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("compressed-tensors/nvfp4", zerocast.MXFP8BlockScaling()),
        ("compressed-tensors/fp8-block", zerocast.Float8CurrentScaling()),
        ("compressed-tensors/fp8-tensor", zerocast.Float8CurrentScaling(fp8_format="e5m2")),
        ("compressed-tensors/fp8-channel", zerocast.Float8CurrentScaling()),
        ("deepseek/fp8-ue8m0", zerocast.Float8BlockScaling(use_f32_scales=True)),
        ("deepseek/fp8", zerocast.Float8BlockScaling(w_block_scaling_dim=1)),
        ("compressed-tensors/mxfp8", zerocast.NVFP4BlockScaling()),
        ("compressed-tensors/mxfp4", zerocast.NVFP4BlockScaling()),
        ("compressed-tensors/nvfp4", SQUARE_MXFP4),
        ("deepseek/v4-fp8", zerocast.Float8BlockScaling(use_f32_scales=True)),
    ],
)
def test_other_bytes_are_not_held(name, recipe):
    """Another element format, other blocks, or scales that are no powers of two."""
    assert not DIALECTS[name].holds(recipe, (256, 256))


@pytest.mark.parametrize("name", ["compressed-tensors/nvfp4", "modelopt/nvfp4"])
def test_every_tensor_scale_comes_back(name):
    """Of 2,000,000 tensor amaxes over all of FP32's exponents, subnormal ones and those whose
    inverse saturates included: the amax that is loaded gives the tensor scale that was stored.
    """
    scale = DIALECTS[name].tensor_scale
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(1, 0x7F800000, (2_000_000,), generator=generator, dtype=torch.int32)
    stored = scale.of(bits.view(torch.float32), 448)
    assert_same_bytes(scale.of(scale.amax(stored, 448), 448), stored, name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("weight_scale"), "weight_scale is missing"),
        (lambda t: t.update(weight_scale=t["weight_scale"][:1]), r"must be .* \[48, 10\] beside"),
        (lambda t: t.update(weight_packed=t["weight_packed"].float()), "torch.uint8"),
        (lambda t: t.update(weight_packed=t["weight_packed"].view(-1)), "must be a matrix"),
        (lambda t: t.update(weight_packed=t["weight_packed"][:, :72]), r"must be .* \[48, 9\]"),
    ],
)
def test_what_is_no_weight_of_a_dialect_is_refused(change, message):
    """A tensor that is missing, of another shape or dtype; by its name."""
    dialect = DIALECTS["compressed-tensors/nvfp4"]
    stored = dialect.encode(quantized(dialect.recipe, (48, 160)).quantized_storage)
    change(stored)
    with pytest.raises(zerocast.InputError, match=message):
        dialect.decode(stored)


def test_codes_in_other_blocks_are_refused():
    """Of gpt-oss, cut inside a block: by their name."""
    dialect = DIALECTS["gpt-oss/mxfp4"]
    stored = dialect.encode(quantized(dialect.recipe, (32, 64)).quantized_storage)
    stored["_blocks"] = stored["_blocks"][..., :1]
    with pytest.raises(zerocast.InputError, match=r"_blocks .* blocks of 16 bytes, .*\[32, 2, 1\]"):
        dialect.decode(stored)
