"""The unsharded cast, unfilled weights, moved codes, rebuilt copies."""

import pytest
import torch

from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from zerocast import Quantizer
from zerocast.backends import backend_for
from zerocast.errors import InputError
from zerocast.numerics import E2M1, E4M3, pack_nibbles, unpack_nibbles
from zerocast.numerics import decode as decode_codes
from zerocast.recipes import Float8CurrentScaling, NVFP4BlockScaling
from zerocast.tensors import QuantizedTensor, empty, quantize, rebuild_derived, replace_raw_data
from zerocast.tensors.ledger import announced

NVFP4, FP8 = NVFP4BlockScaling(), Float8CurrentScaling()
RECIPES = [
    pytest.param(NVFP4, id="nvfp4"),
    pytest.param(FP8, id="fp8"),
    pytest.param(Float8CurrentScaling(fp8_format="e5m2", use_power_2_scales=True), id="fp8-e5m2"),
]
SHAPES = [(1, 16), (3, 48), (17, 80), (16, 96), (33, 112), (5, 256)]


def codes_of(weight: QuantizedTensor) -> torch.Tensor:
    """[M, K] uint8, one code an element."""
    if weight.recipe.numerics.fmt.bits == 4:
        return unpack_nibbles(weight.rowwise_data, weight.shape[-1])
    return weight.rowwise_data


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_columnwise_codes_are_the_transposed_rowwise_codes(shape, recipe):
    """columnwise_data decodes to the transpose, a missing last nibble being 0."""
    weight = quantize(torch.randn(shape), recipe)
    transposed = codes_of(weight).t().contiguous()
    if recipe.numerics.fmt.bits == 4:
        transposed = pack_nibbles(transposed)
    assert_same_bytes(weight.columnwise_data, transposed, "columnwise_data")


def test_fp8_serves_any_number_of_dimensions():
    """A 3-D weight is cast like the matrix [product of leading dimensions, last]."""
    x = torch.randn(3, 5, 7)
    weight, matrix = quantize(x, FP8), quantize(x.view(15, 7), FP8)
    assert weight.rowwise_data.shape == (3, 5, 7)
    assert_same_bytes(weight.rowwise_data.view(15, 7), matrix.rowwise_data, "rowwise_data")
    assert_same_bytes(weight.columnwise_data, matrix.columnwise_data, "columnwise_data")
    assert weight.columnwise_scale_inv.data_ptr() == weight.rowwise_scale_inv.data_ptr()
    assert_same_bytes(quantize(x[0, 0], FP8).rowwise_data[None],
                      quantize(x[0, :1], FP8).rowwise_data, "a vector")  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nominal_dtype_rounds_the_elements_first(dtype, recipe):
    """quantize(x, dtype=d) is quantize of x rounded to d, and the default dtype is the tensor's."""
    x = torch.randn(20, 48)
    weight = quantize(x, recipe, dtype=dtype)
    assert weight.dtype == dtype
    assert_same_storage(weight, quantize(x.to(dtype), recipe), str(dtype))
    assert_same_storage(weight, quantize(x.to(dtype).float(), recipe), "already rounded")


def test_round_master_false_quantizes_from_fp32():
    """With round_master=False the nominal dtype does not change the bytes."""
    x = torch.randn(64, 64) * 3
    exact = NVFP4BlockScaling(round_master=False)
    assert_same_storage(quantize(x, exact, dtype=torch.bfloat16), quantize(x, exact), "bytes")
    rounded = quantize(x, NVFP4, dtype=torch.bfloat16)
    assert not torch.equal(rounded.rowwise_data, quantize(x, exact).rowwise_data)


@pytest.mark.parametrize("recipe", RECIPES)
def test_strides_and_gradients_of_the_source_do_not_matter(recipe):
    """A transposed, expanded or gradient-requiring source is cast by its values."""
    x = torch.randn(48, 32)
    expected = quantize(x.t().contiguous(), recipe)
    assert_same_storage(quantize(x.t(), recipe), expected, "transposed")
    weight = quantize(x.t().clone().requires_grad_(), recipe)
    assert not weight.requires_grad
    assert weight.is_leaf
    row = torch.randn(1, 32)
    assert_same_storage(
        quantize(row.expand(9, 32), recipe), quantize(row.repeat(9, 1), recipe), "expanded"
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantized_weights_and_their_views_can_be_sources(recipe):
    """A source without memory of its own is read by its value."""
    weight = quantize(torch.randn(32, 48), NVFP4)
    assert_same_storage(quantize(weight, recipe), quantize(weight.dequantize(), recipe), "weight")
    view = weight[3:19]
    assert_same_storage(quantize(view, recipe), quantize(weight.dequantize()[3:19], recipe), "view")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_not_finite_makes_all_under_its_scale_nan(bad):
    """One tensor amax is over the whole weight in both recipes, so every element decodes to NaN."""
    x = torch.randn(20, 48)
    x[7, 13] = bad
    for recipe in (NVFP4, FP8):
        weight = quantize(x, recipe)
        assert (codes_of(weight) == recipe.numerics.fmt.nan_code).all()
        assert weight.dequantize().isnan().all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_empty_weight_decodes_to_zeros(recipe):
    """empty() has the buffers of quantize(), and a value."""
    weight = empty((17, 48), recipe, dtype=torch.float16)
    assert (weight.dtype, weight.shape, weight.device.type) == (torch.float16, (17, 48), "cpu")
    assert_same_bytes(weight.dequantize(), torch.zeros(17, 48, dtype=torch.float16), "value")
    filled = quantize(torch.randn(17, 48), recipe)
    assert {n: (b.shape, b.dtype) for n, b in weight.quantized_storage.buffers.items()} == {
        n: (b.shape, b.dtype) for n, b in filled.quantized_storage.buffers.items()
    }
    assert empty((17, 48), recipe).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize(torch.ones(2, 16).double(), FP8), "got torch.float64; convert it"),
        (lambda: quantize(torch.ones(2, 16).int(), FP8), "got torch.int32"),
        (lambda: quantize([[1.0]], FP8), "got list"),
        (lambda: quantize(torch.ones(2, 16), FP8, dtype=torch.float8_e4m3fn), "nominal dtype"),
        (lambda: quantize(torch.ones(2, 10), NVFP4), "multiple of 16 .* got K = 10"),
        (lambda: quantize(torch.ones(4, 24), NVFP4), "multiple of 16 .* got K = 24"),
        (lambda: empty((4, 10), NVFP4), "multiple of 16 .* got K = 10"),
        (lambda: quantize(torch.ones(2, 2, 10), NVFP4), "multiple of 16 .* got K = 10"),
        (lambda: empty((16,), NVFP4), "2-D weight"),
        (lambda: empty((16, 0), NVFP4), "at least one element"),
        (lambda: quantize(torch.ones(0, 16), FP8), "at least one element"),
        (lambda: quantize(torch.tensor(1.0), FP8), "at least one element"),
        (lambda: quantize(torch.ones(2, 16), NVFP4BlockScaling), "such as NVFP4BlockScaling"),
        (lambda: quantize(torch.ones(2, 16), Quantizer(FP8)), r"call quantizer\(tensor\)"),
        (lambda: empty((2, 16), "nvfp5"), "or the name of one"),
        (lambda: empty((2, 16), FP8, dtype=torch.float64), "got torch.float64"),
    ],
)
def test_bad_input_is_refused_with_what_is_required(call, message):
    """The error names what was given."""
    with pytest.raises(InputError, match=message):
        call()  # type: ignore[operator]


def test_a_tensor_whose_memory_was_cut_is_refused() -> None:
    """By whatever strides it would be read: of a tensor, of a quantizer, and by a copy."""
    cut, part, turned = torch.ones(32, 64), torch.ones(32, 64), torch.ones(64, 32).t()
    for each in (cut, turned):
        each.untyped_storage().resize_(0)
    part.untyped_storage().resize_(part.nbytes - 1)
    weight, quantizer = quantize(torch.ones(32, 64), NVFP4), Quantizer(NVFP4)
    held = weight.clone()
    for source in (cut, part, turned):
        for call in (lambda x: quantize(x, NVFP4), quantizer, weight.copy_):
            with pytest.raises(InputError, match="was freed or resized"):
                call(source)
    assert_same_storage(weight, held, "refused")
    with pytest.raises(InputError, match=r"torch\.func transform"):
        quantize(torch._to_functional_tensor(torch.ones(32, 64)), NVFP4)
    cut.untyped_storage().resize_(1024)
    assert_same_storage(quantize(cut[:4], NVFP4), quantize(cut[:4].clone(), NVFP4), "what is left")


# --- moving the codes ---


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("flat", [True, False])
def test_replace_raw_data_moves_the_codes_and_keeps_the_value(recipe, flat):
    """All aliases see the new buffer, derived copies stay valid, and a plan can tell it moved."""
    weight = quantize(torch.randn(9, 48), recipe)
    alias, expected, before = weight.detach(), weight.clone(), announced("storage")
    size = weight.rowwise_data.numel()
    gather = torch.full((size + 13,), 0xA5, dtype=torch.uint8)
    place = gather[7 : 7 + size]
    replace_raw_data(weight, place if flat else place.view(weight.rowwise_data.shape))
    assert_same_storage(weight, expected, "moved")
    assert alias.rowwise_data.data_ptr() == place.data_ptr()
    assert (gather[:7] == 0xA5).all()
    assert (gather[7 + size :] == 0xA5).all()
    assert announced("storage") != before
    weight.copy_(torch.zeros(9, 48))
    assert not place.any()


def test_replace_raw_data_may_move_within_one_buffer():
    """A new place that overlaps the old one keeps the codes."""
    weight = quantize(torch.randn(8, 32), FP8)
    buffer = torch.zeros(300, dtype=torch.uint8)
    replace_raw_data(weight, buffer[:256])
    codes = weight.rowwise_data.clone()
    replace_raw_data(weight, buffer[20:276])
    assert_same_bytes(weight.rowwise_data, codes, "codes")


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (torch.full((384,), 9, dtype=torch.int8), "torch.uint8 tensor .*got torch.int8"),
        (torch.full((383,), 9, dtype=torch.uint8), r"the 384 bytes .*got shape \(383,\)"),
        (torch.full((16, 24), 9, dtype=torch.uint8), r"got shape \(16, 24\)"),
        (torch.full((768,), 9, dtype=torch.uint8)[::2], r"contiguous .*strides \(2,\)"),
        (torch.empty(384, dtype=torch.uint8, device="meta"), "device cpu .*got one on meta"),
        ([9] * 384, "got list"),
    ],
)
def test_replace_raw_data_refuses_a_buffer_that_does_not_fit(new, message):
    """Nothing has been written: neither the buffer nor the weight."""
    weight = quantize(torch.randn(8, 48), FP8)
    expected, codes = weight.clone(), weight.rowwise_data
    with pytest.raises(InputError, match=message):
        replace_raw_data(weight, new)  # type: ignore[arg-type]
    assert weight.rowwise_data.data_ptr() == codes.data_ptr()
    assert_same_storage(weight, expected, "weight")
    if isinstance(new, torch.Tensor) and not new.is_meta:
        assert (new == 9).all()


def test_replace_raw_data_refuses_a_plain_tensor():
    """There are no codes to move."""
    with pytest.raises(InputError, match="needs a QuantizedTensor, got Tensor"):
        replace_raw_data(torch.ones(3), torch.zeros(3, dtype=torch.uint8))  # type: ignore[arg-type]


# --- derived copies ---


def test_rebuild_derived_serves_mixed_weights_in_one_launch_a_recipe(monkeypatch):
    """Copies are made from the present codes; weights without a copy are skipped."""
    sources = [torch.randn(5, 48), torch.randn(16, 16), torch.randn(3, 32), torch.randn(4, 32)]
    weights = [
        quantize(sources[0], NVFP4),
        quantize(sources[1], NVFP4),
        quantize(sources[2], FP8),
        quantize(sources[3], FP8, columnwise=False),
    ]
    expected = [weight.clone() for weight in weights]
    for weight in weights[:3]:
        weight.quantized_storage.buffers["columnwise_data"].fill_(0x77)
    launches = []
    backend = backend_for(torch.device("cpu"))
    transpose = type(backend).transpose

    def count(backend, numerics, operands):
        launches.append((numerics.fmt, len(operands)))
        return transpose(backend, numerics, operands)

    monkeypatch.setattr(type(backend), "transpose", count)
    rebuild_derived([weight.quantized_storage for weight in weights])
    assert launches == [(E2M1, 2), (E4M3, 1)]
    for i, weight in enumerate(weights):
        assert_same_storage(weight, expected[i], f"weight {i}")


def test_every_code_decodes_to_its_value():
    """All 256 E4M3 and all 16 E2M1 codes, under a scale of exactly one."""
    weight = empty((16, 16), FP8, dtype=torch.float32)
    weight.rowwise_data.copy_(torch.arange(256).view(16, 16))
    weight.rowwise_scale_inv.fill_(1)
    assert_same_bytes(weight.dequantize(), decode_codes(weight.rowwise_data, E4M3), "e4m3")
    weight = empty((1, 16), NVFP4, dtype=torch.float32)
    weight.rowwise_data.copy_(pack_nibbles(torch.arange(16, dtype=torch.uint8)[None]))
    weight.rowwise_scale_inv[0, 0] = E4M3.max_code  # 448
    weight.amax.fill_(6)  # 448 * 6 / 2688 = 1
    values = decode_codes(torch.arange(16, dtype=torch.uint8)[None], E2M1)
    assert_same_bytes(weight.dequantize(), values, "e2m1")
