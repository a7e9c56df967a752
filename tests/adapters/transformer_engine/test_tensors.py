"""TransformerEngine's tensor classes, attributes and quantizers, on zerocast's bytes."""

import copy
import pickle

import pytest
import torch

import zerocast
import zerocast.adapters.transformer_engine.pytorch as te
from zerocast.adapters.transformer_engine.pytorch.tensor.utils import post_all_gather_processing
from zerocast.errors import InputError, MissingDataError, StaleCopyError, UnsupportedError
from zerocast.recipes import QParams

FLAT = zerocast.NVFP4BlockScaling(disable_2d_quantization=True)
CLASSES = {
    "delayed": te.Float8Tensor,
    "current": te.Float8Tensor,
    "block": te.Float8BlockwiseQTensor,
    "mxfp8": te.MXFP8Tensor,
    "nvfp4": te.NVFP4Tensor,
}
FIELDS = {
    te.Float8Tensor: {
        "_data": "rowwise_data", "_transpose": "columnwise_data", "_scale_inv": "rowwise_scale_inv",
    },
}  # fmt: skip
BLOCKS = {
    f"_{copy}_{what}": f"{copy}_{what}"
    for copy in ("rowwise", "columnwise")
    for what in ("data", "scale_inv")
}


QUANTIZERS = {
    "delayed": "Float8Quantizer",
    "current": "Float8CurrentScalingQuantizer",
    "block": "Float8BlockQuantizer",
    "mxfp8": "MXFP8Quantizer",
    "nvfp4": "NVFP4Quantizer",
}


def weight_of(scheme: str, seed: int = 0) -> zerocast.QuantizedTensor:
    """[64, 96], BF16."""
    value = torch.randn(64, 96, generator=torch.Generator().manual_seed(seed))
    return zerocast.quantize(value.bfloat16(), scheme)


def fields_of(scheme: str) -> dict[str, str]:
    """The attributes of a tensor, and the public names of the same buffers."""
    amaxes = {"_amax_rowwise": "amax", "_amax_columnwise": "amax"} if scheme == "nvfp4" else {}
    return FIELDS.get(CLASSES[scheme], BLOCKS | amaxes)


@pytest.mark.parametrize("scheme", CLASSES)
def test_a_tensor_is_of_its_schemes_class(scheme):
    """Of that one only, parameters and aliases too; a plain tensor is of none."""
    weight = weight_of(scheme)
    for each in (weight, torch.nn.Parameter(weight), weight.detach()):
        found = {kind for kind in CLASSES.values() if isinstance(each, kind)}
        assert found == {CLASSES[scheme]}
    assert not isinstance(torch.zeros(2), te.Float8Tensor)
    assert issubclass(CLASSES[scheme], te.QuantizedTensor)
    with pytest.raises(UnsupportedError, match="quantized_model_init"):
        CLASSES[scheme](shape=(2, 2), dtype=torch.float32, data=torch.zeros(2, 2))


@pytest.mark.parametrize("scheme", CLASSES)
def test_attributes_are_the_live_buffers(scheme):
    """Those of the scheme; the others are no attributes of this tensor."""
    weight, fields = weight_of(scheme), fields_of(scheme)
    for field, name in fields.items():
        assert getattr(weight, field).data_ptr() == getattr(weight, name).data_ptr()
    for other in {*BLOCKS, "_data", "_transpose", "_scale_inv", "_amax_rowwise"} - set(fields):
        assert not hasattr(weight, other)
        with pytest.raises(MissingDataError, match="attribute of tensors of other recipes"):
            setattr(weight, other, torch.zeros(1))


@pytest.mark.parametrize("scheme", CLASSES)
def test_a_tensor_that_is_assigned_becomes_the_buffer(scheme):
    """With the same bytes nothing else changes, the initial value included."""
    weight = weight_of(scheme)
    storage = weight.quantized_storage
    storage.high_precision_init_val = torch.zeros(64, 96)
    version, value = storage.version, weight.dequantize()
    for field in fields_of(scheme):
        new = getattr(weight, field).clone()
        setattr(weight, field, new)
        assert getattr(weight, field).data_ptr() == new.data_ptr()
    assert torch.equal(weight.dequantize(), value)
    assert (storage.version, storage.is_stale) == (version, False)
    assert hasattr(weight, "get_high_precision_init_val")


@pytest.mark.parametrize("scheme", CLASSES)
def test_bytes_of_another_weight_make_it_that_weight(scheme):
    """All buffers of one assigned to the other; what is derived is made anew before it is read."""
    weight, other = weight_of(scheme), weight_of(scheme, seed=1)
    fields = fields_of(scheme)
    rowwise = [f for f in fields if f in ("_data", "_scale_inv") or "rowwise" in f]
    gathered = rowwise if scheme != "mxfp8" else list(fields)
    for field in gathered:
        setattr(weight, field, getattr(other, field).clone())
    assert torch.equal(weight.dequantize(), other.dequantize())
    if scheme != "mxfp8":
        with pytest.raises(StaleCopyError):
            weight.columnwise_data  # noqa: B018
        assert weight.get_usages() == {"rowwise": True, "columnwise": False}
    post_all_gather_processing(weight)
    for field in fields:
        assert torch.equal(getattr(weight, field), getattr(other, field)), field


@pytest.mark.parametrize("scheme", CLASSES)
def test_none_gives_a_copy_back(scheme):
    """Its attributes read None, and update_usage brings what can be derived back."""
    weight = weight_of(scheme)
    field = "_transpose" if scheme in ("delayed", "current") else "_columnwise_data"
    before = getattr(weight, field).clone()
    setattr(weight, field, None)
    setattr(weight, field, None)
    assert getattr(weight, field) is None
    assert weight.get_usages() == {"rowwise": True, "columnwise": False}
    with pytest.raises(MissingDataError):
        setattr(weight, field, before)
    if scheme != "mxfp8":
        weight.update_usage(rowwise_usage=True, columnwise_usage=True)
        assert torch.equal(getattr(weight, field), before)


@pytest.mark.parametrize("given", [
    torch.zeros(64, 96), torch.zeros(64, 95, dtype=torch.uint8),
    torch.zeros(96, 64, dtype=torch.uint8).t(), torch.zeros(64, 96, dtype=torch.uint8).tolist(),
])  # fmt: skip
def test_what_cannot_be_a_buffer_is_refused(given):
    """Another dtype, shape, order or kind; the buffer stays."""
    weight = weight_of("current")
    before = weight._data
    with pytest.raises(InputError, match="_data must be a contiguous torch.uint8 tensor of shape"):
        weight._data = given
    assert weight._data.data_ptr() == before.data_ptr()


# --- quantizers ---

E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2
MADE = [
    (te.Float8CurrentScalingQuantizer(E4M3, "cpu"), zerocast.Float8CurrentScaling()),
    (te.Float8CurrentScalingQuantizer(E5M2), zerocast.Float8CurrentScaling(fp8_format="e5m2")),
    (te.Float8CurrentScalingQuantizer(E4M3, force_pow_2_scales=True, amax_epsilon=8.0),
     zerocast.Float8CurrentScaling(
         fp8_quant_fwd_weight=QParams(power_2_scale=True, amax_epsilon=8.0))),
    (te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True), zerocast.Float8BlockScaling()),
    (te.Float8BlockQuantizer(
        E4M3, rowwise=True, columnwise=True, block_scaling_dim=1, force_pow_2_scales=False),
     zerocast.Float8BlockScaling(w_block_scaling_dim=1, use_f32_scales=True)),
    (te.MXFP8Quantizer(E4M3), zerocast.MXFP8BlockScaling()),
    (te.MXFP8Quantizer(7, with_2d_quantization=True),
     zerocast.MXFP8BlockScaling(enable_2d_quantization=True)),
    (te.NVFP4Quantizer(), FLAT),
    (te.NVFP4Quantizer(with_2d_quantization=True), zerocast.NVFP4BlockScaling()),
    (te.NVFP4Quantizer(with_2d_quantization=True, nvfp4_use_4over6=True, nvfp4_e4m3_max=256,
                       nvfp4_4over6_err_mode="MSE"),
     zerocast.NVFP4BlockScaling(nvfp4_4over6="weights", nvfp4_4over6_err_mode="MSE")),
]  # fmt: skip


@pytest.mark.parametrize(("quantizer", "recipe"), MADE, ids=lambda each: type(each).__name__)
def test_a_quantizer_makes_the_bytes_of_its_recipe(quantizer, recipe):
    """By a call, into an empty tensor, and into a weight that holds something else."""
    value = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = zerocast.quantize(value, recipe).quantized_storage.buffers
    empty = quantizer.make_empty(value.shape, dtype=torch.bfloat16)
    other = zerocast.quantize(torch.ones(64, 96).bfloat16(), recipe)
    for made in (
        quantizer(value),
        quantizer.update_quantized(value, empty),
        quantizer.quantize(value, out=other),
        other._get_quantizer()(value),
        zerocast.quantize(torch.ones(64, 96).bfloat16(), recipe).quantize_(value),
    ):
        for name, buffer in expected.items():
            assert torch.equal(made.quantized_storage.buffers[name], buffer), name


@pytest.mark.parametrize("scheme", CLASSES)
def test_the_quantizer_of_a_weight(scheme):
    """Is of its scheme, for the copies that it holds, and updates it as ``copy_`` does."""
    weight, other = weight_of(scheme), weight_of(scheme)
    quantizer = weight._quantizer
    assert type(quantizer).__name__ == QUANTIZERS[scheme]
    assert quantizer.dtype == (te.DType.kFloat4E2M1 if scheme == "nvfp4" else E4M3)
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": True}
    value = torch.randn(64, 96)
    weight.requires_grad_(True)
    assert quantizer.update_quantized(value, weight) is weight
    other.copy_(value)
    for name, buffer in other.quantized_storage.buffers.items():
        assert torch.equal(weight.quantized_storage.buffers[name], buffer), name
    alone = quantizer.copy()
    alone.columnwise_usage = False
    assert quantizer.columnwise_usage


def test_a_delayed_quantizer_reads_its_scale_and_raises_its_amax():
    """Codes are those of value * scale; a weight's own scale is not asked."""
    scale, amax = torch.tensor([4.0]), torch.zeros(1)
    quantizer = te.Float8Quantizer(scale, amax, E4M3)
    value = torch.tensor([[0.5, -3.0], [1.25, 0.0]])
    made = quantizer(value)
    expected = (value * 4).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(made._data, expected)
    assert (made._scale_inv, amax) == (0.25, 3.0)
    scale.fill_(2.0)
    weight = zerocast.quantize(torch.ones(2, 2), "delayed")
    own = weight.scale.clone()
    quantizer.update_quantized(value / 2, weight)
    assert torch.equal(weight._data, value.to(torch.float8_e4m3fn).view(torch.uint8))
    assert (weight._scale_inv, amax, weight.scale) == (0.5, 3.0, own)
    with pytest.raises(MissingDataError, match="update_quantized"):
        made._get_quantizer()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q))])
def test_a_copied_quantizer_has_its_own_state(copied):
    """A deep or pickled copy reads its own scale and raises its own amax."""
    first = te.Float8Quantizer(torch.ones(1), torch.zeros(1), te.DType.kFloat8E4M3)
    second = copied(first)
    second.scale.fill_(2)
    assert (
        second(torch.full((16, 16), 3.0))._data[0, 0]
        == first(torch.full((16, 16), 6.0))._data[0, 0]
    )
    assert (first.amax, second.amax) == (6, 3)


def test_stochastic_rounding_draws_anew():
    """Two casts by one quantizer differ, and both copies are there."""
    quantizer = te.NVFP4Quantizer(stochastic_rounding=True)
    value = torch.randn(32, 32)
    assert not torch.equal(quantizer(value)._rowwise_data, quantizer(value)._rowwise_data)


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda: te.MXFP8Quantizer(te.DType.kFloat4E2M1), InputError, "kFloat8E4M3 or kFloat8E5M2"),
    (lambda: te.NVFP4Quantizer(E4M3), InputError, "kFloat4E2M1"),
    (lambda: te.NVFP4Quantizer(with_rht=True), UnsupportedError, "Hadamard"),
    (lambda: te.NVFP4Quantizer(row_scaled_nvfp4=True), UnsupportedError, "row_scaled_nvfp4"),
    (lambda: te.NVFP4Quantizer(nvfp4_e4m3_max=256), InputError, "nvfp4_use_4over6"),
    (lambda: te.NVFP4Quantizer(with_amax_reduction=True), UnsupportedError, "with_amax_reduction"),
    (lambda: te.Float8Quantizer(torch.ones(2), torch.ones(1), E4M3), InputError, "scale must be"),
    (lambda: te.NVFP4Quantizer().update_quantized(torch.ones(64, 96), weight_of("nvfp4")),
     InputError, "dst must be"),
    (lambda: te.NVFP4Quantizer().update_quantized(torch.ones(2, 16), torch.ones(2, 16)),
     InputError, "got Tensor"),
    (lambda: weight_of("block").quantize_(torch.ones(64, 96), noop_flag=torch.ones(1)),
     UnsupportedError, "noop_flag"),
])  # fmt: skip
def test_what_a_quantizer_cannot_do_is_refused(call, error, text):
    """With what is required."""
    with pytest.raises(error, match=text):
        call()


def test_whether_a_tensor_can_be_quantized():
    """K must be whole blocks; M is free."""
    quantizer = te.NVFP4Quantizer()
    assert quantizer.is_quantizable(torch.ones(3, 32))
    assert not quantizer.is_quantizable(torch.ones(32, 3))
    assert [each.shape for each in quantizer.multi_quantize([torch.ones(3, 32)])] == [(3, 32)]
