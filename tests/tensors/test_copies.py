"""Copies, files, state_dicts: the bytes of a quantized weight go where a tensor's value goes."""

import copy
import io
import pickle

import pytest
import torch

from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from tests.support.weights import FP8, NVFP4, both_recipes, every_recipe, make, through_a_file
from zerocast.errors import InputError
from zerocast.tensors import QuantizedTensor, empty, quantize, replace_raw_data


@both_recipes
def test_copy_of_high_precision_values_quantizes(recipe):
    """The bytes are those of quantize(); the buffers stay where they are."""
    weight, x = make(recipe, dtype=torch.bfloat16), torch.randn(17, 48)
    addresses = {name: b.data_ptr() for name, b in weight.quantized_storage.buffers.items()}
    for source in (x, x.double(), x.t().contiguous().t(), torch.nn.Parameter(x)):
        weight.zero_()
        assert not weight.dequantize().any()
        returned = weight.copy_(source) if not source.requires_grad else _copy(weight, source)
        assert returned is weight
        assert_same_storage(weight, quantize(x, recipe, dtype=torch.bfloat16), "copied")
    assert addresses == {name: b.data_ptr() for name, b in weight.quantized_storage.buffers.items()}
    weight.copy_(torch.arange(48))
    assert_same_storage(
        weight,
        quantize(torch.arange(48.0).expand(17, 48), recipe, dtype=torch.bfloat16),
        "expanded",
    )


def _copy(weight: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return weight.copy_(source)


@both_recipes
def test_copy_between_weights_of_one_recipe_copies_the_bytes(recipe):
    """Also into another nominal dtype, and where only one side holds a columnwise copy."""
    x = torch.randn(17, 48)
    source = quantize(x, recipe)
    for columnwise in (True, False):
        bare = quantize(x, recipe, columnwise=columnwise)
        weight = quantize(torch.zeros(17, 48), recipe, dtype=torch.bfloat16)
        weight.copy_(bare)
        assert_same_storage(weight, source, "bytes")
        into_bare = quantize(torch.zeros(17, 48), recipe, columnwise=False)
        into_bare.copy_(bare)
        assert_same_bytes(into_bare.rowwise_data, source.rowwise_data, "rowwise_data")
        assert "columnwise_data" not in into_bare.quantized_storage.buffers


def test_copy_between_recipes_quantizes_the_value():
    """NVFP4 <- FP8 is NVFP4 <- dequantized FP8."""
    source, weight = make(FP8), make(NVFP4)
    weight.copy_(source)
    assert_same_storage(weight, quantize(source.dequantize(), NVFP4), "nvfp4 from fp8")
    plain = torch.zeros(17, 48, dtype=torch.bfloat16)
    plain.copy_(source)
    assert_same_bytes(plain, source.dequantize().bfloat16(), "plain from fp8")


def test_copy_of_another_shape_is_refused_and_writes_nothing():
    """The message names both shapes."""
    weight = make(NVFP4)
    expected = weight.clone()
    with pytest.raises(InputError, match=r"shape \(17, 48\) .* got \(17, 47\)"):
        weight.copy_(torch.ones(17, 47))
    with pytest.raises(InputError, match=r"got \(16, 48\)"):
        weight.copy_(make(NVFP4, rows=16))
    assert_same_storage(weight, expected, "weight")


@both_recipes
@pytest.mark.parametrize("duplicate", [torch.clone, copy.deepcopy, copy.copy])
def test_a_copy_has_bytes_of_its_own(recipe, duplicate):
    """Equal bytes, and writing one leaves the other alone; copy.copy is an alias, as in torch."""
    weight = make(recipe)
    expected = weight.clone()
    other = duplicate(weight)
    assert_same_storage(other, weight, "copy")
    with torch.no_grad():
        other.zero_()
    if duplicate is not copy.copy:
        assert_same_storage(weight, expected, "original")


@both_recipes
def test_deepcopy_keeps_what_a_parameter_carries(recipe):
    """Parameter-ness, gradient, attributes, and the sharing of one storage by aliases."""
    parameter = torch.nn.Parameter(make(recipe))
    parameter.grad = torch.randn(17, 48)
    parameter.tag = ["expert"]  # type: ignore[attr-defined]
    model = torch.nn.Module()
    model.first, model.second = parameter, parameter
    model.alias = parameter.detach()
    twin = copy.deepcopy(model)
    assert isinstance(twin.first, torch.nn.Parameter)
    assert twin.first is twin.second
    assert twin.alias.quantized_storage is twin.first.quantized_storage
    assert twin.first.quantized_storage is not parameter.quantized_storage
    assert twin.first.tag == ["expert"]
    assert twin.first.tag is not parameter.tag  # type: ignore[attr-defined]
    assert_same_bytes(twin.first.grad, parameter.grad, "grad")
    assert twin.first.grad is not parameter.grad
    frozen = copy.deepcopy(torch.nn.Parameter(make(recipe), requires_grad=False))
    assert not frozen.requires_grad


@both_recipes
def test_pickle_and_torch_save_keep_the_bytes(recipe):
    """By safe types only; parameters stay parameters; aliases still share a storage."""
    weight = make(recipe, dtype=torch.bfloat16)
    saved = {
        "p": torch.nn.Parameter(weight),
        "w": weight,
        "frozen": torch.nn.Parameter(weight, False),
    }
    for loaded in (through_a_file(saved), pickle.loads(pickle.dumps(saved))):
        assert isinstance(loaded["p"], torch.nn.Parameter)
        assert loaded["p"].requires_grad
        assert not loaded["frozen"].requires_grad
        assert loaded["p"].quantized_storage is loaded["w"].quantized_storage
        assert loaded["w"].recipe == recipe
        assert loaded["w"].dtype == torch.bfloat16
        assert_same_storage(loaded["w"], weight, "loaded")


def test_a_saved_weight_does_not_bring_its_gather_buffer():
    """A weight whose codes are a slice of a large flat buffer is saved by its own bytes."""
    weight = make(FP8)
    replace_raw_data(weight, torch.zeros(10_000_000, dtype=torch.uint8)[5 : 5 + 17 * 48])
    file = io.BytesIO()
    torch.save(weight, file)
    assert len(file.getvalue()) < 20_000
    assert_same_storage(through_a_file(weight), weight, "loaded")


@both_recipes
def test_a_module_changes_the_nominal_dtype_and_leaves_the_codes(recipe):
    """Its float() and half() stay quantized; no change is self, and other dtypes are values."""
    weight = make(recipe, dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.float16):
        holder = torch.nn.Module()
        holder.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        other = holder.to(dtype).weight
        assert isinstance(other, QuantizedTensor)
        assert isinstance(other, torch.nn.Parameter)
        assert (other.dtype, weight.dtype) == (dtype, torch.bfloat16)
        assert_same_storage(other, weight, str(dtype))
        other.zero_()
        assert weight.dequantize().any()
    assert weight.to(torch.bfloat16) is weight
    assert weight.cpu() is weight
    assert type(weight.to(torch.float64)) is torch.Tensor
    assert_same_bytes(weight.double(), weight.dequantize().double(), "float64")


@both_recipes
def test_state_dict_round_trips(recipe):
    """Quantized into quantized keeps the bytes; high precision quantizes; the way back decodes."""
    source, target, plain = (torch.nn.Module() for _ in range(3))
    source.weight = torch.nn.Parameter(make(recipe))
    target.weight = torch.nn.Parameter(quantize(torch.zeros(17, 48), recipe))
    plain.weight = torch.nn.Parameter(torch.randn(17, 48))
    target.load_state_dict(source.state_dict())
    assert_same_storage(target.weight, source.weight, "quantized from quantized")
    target.load_state_dict(plain.state_dict())
    assert_same_storage(target.weight, quantize(plain.weight, recipe), "quantized from plain")
    plain.load_state_dict(source.state_dict())
    assert type(plain.weight) is torch.nn.Parameter
    assert_same_bytes(plain.weight, source.weight.dequantize(), "plain from quantized")
    plain.load_state_dict(source.state_dict(), assign=True)
    assert plain.weight.quantized_storage is source.weight.quantized_storage


def test_share_memory_reaches_the_bytes():
    """The buffers are in shared memory afterwards, with their values."""
    weight = make(NVFP4)
    expected = weight.clone()
    assert not weight.is_shared()
    assert weight.share_memory_() is weight
    assert weight.is_shared()
    assert_same_storage(weight, expected, "shared")


@every_recipe
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_copy_of_the_present_value_writes_nothing(recipe, dtype):
    """Codes, state, version and initial value stay; of another value, all change."""
    weight = quantize(torch.randn(32, 64).bfloat16(), recipe, name="w")
    weight.copy_(torch.randn(32, 64))
    before, initial = weight.clone(), torch.randn(32, 64)
    weight.quantized_storage.high_precision_init_val = initial
    version = weight.quantized_storage.version
    weight.detach().copy_(weight.dequantize(dtype))
    weight.copy_(weight.dequantize().to(dtype))
    weight.copy_(before)
    assert_same_storage(weight, before, "weight")
    assert weight.quantized_storage.version == version
    assert weight.get_high_precision_init_val() is initial
    weight.copy_(-before.dequantize())
    assert weight.quantized_storage.version != version
    assert not torch.equal(weight.rowwise_data, before.rowwise_data)


def test_an_explicit_dtype_is_the_values():
    """float(), half() and to(dtype) of a tensor dequantize; the same dtype stays quantized."""
    weight = torch.nn.Parameter(quantize(torch.randn(32, 64).bfloat16(), FP8))
    for plain in (weight.detach().clone().float(), weight.float(), weight.to(torch.float32)):
        assert type(plain) is torch.Tensor
        assert_same_bytes(plain, weight.dequantize().float(), "value")
    assert type(weight.half()) is torch.Tensor
    assert isinstance(weight.bfloat16(), QuantizedTensor)
    assert isinstance(weight.to("cpu", torch.bfloat16, copy=True), QuantizedTensor)
    weight.float().sum().backward()
    assert weight.grad.dtype == torch.bfloat16


@every_recipe
def test_weights_on_meta_have_shapes_and_no_bytes(recipe):
    """They are made, copied, written and decoded there, and materialise unfilled."""
    weight = empty((32, 64), recipe, device="meta")
    assert quantize(torch.zeros(32, 64, device="meta"), recipe).is_meta
    weight.copy_(torch.ones(32, 64))
    assert weight.clone().is_meta
    assert weight.detach().is_meta
    assert weight.dequantize().is_meta
    made = torch.empty_like(weight, device="cpu")
    assert_same_storage(made, empty((32, 64), recipe, device="cpu"), "weight")
