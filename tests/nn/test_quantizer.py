"""Quantizers: the same bytes as quantize, in the copies that are asked for, and nothing kept."""

import copy
import gc
import weakref

import pytest
import torch

import zerocast
from tests.support.fused_ops import state_of
from tests.support.layers import RECIPES, to_nearest
from tests.support.same_bytes import assert_same_bytes
from zerocast.errors import InputError, MissingDataError
from zerocast.nn.quantizer import Quantizer
from zerocast.nn.recipe_state import RecipeState
from zerocast.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)
from zerocast.tensors import QuantizedTensor, dequantize

FORWARD = ("input", "weight", "output")
BACKWARD = ("grad_output", "grad_input")
EVERY_RECIPE = {name: to_nearest(recipe) for name, recipe in RECIPES.items()}
EVERY_RECIPE["nvfp4-drawn"] = NVFP4BlockScaling()  # of gradients
WITHOUT_STATE = [name for name in EVERY_RECIPE if name not in ("delayed", "nvfp4-drawn")]

pytestmark = pytest.mark.usefixtures("backend")

every_recipe = pytest.mark.parametrize("recipe", EVERY_RECIPE.values(), ids=EVERY_RECIPE)
each_role = pytest.mark.parametrize("role", FORWARD + BACKWARD)


def values(rows: int = 34, cols: int = 64, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """[rows, cols] normal random values, always the same ones."""
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows)).to(dtype)


def quantizer_for(recipe: Recipe, role: str) -> Quantizer:
    """A fresh quantizer, with a fresh state behind it."""
    mode, roles = ("forward", FORWARD) if role in FORWARD else ("backward", BACKWARD)
    return RecipeState.create(recipe, mode, len(roles)).make_quantizers()[roles.index(role)]


def assert_same_buffers(actual: QuantizedTensor, expected: QuantizedTensor, what: str) -> None:
    """All that ``actual`` holds is what ``expected`` holds under that name."""
    for name, buffer in actual.quantized_storage.buffers.items():
        assert_same_bytes(buffer, expected.quantized_storage.buffers[name], f"{what}.{name}")


# --- what it makes ---


@each_role
@pytest.mark.parametrize("name", WITHOUT_STATE)
def test_a_quantizer_makes_the_bytes_of_quantize(name, role):
    """For every role: those of the recipe for that role, in every buffer, padding included."""
    recipe = EVERY_RECIPE[name]
    made = quantizer_for(recipe, role).quantize(values())
    expected = zerocast.quantize(values(), recipe.for_role(role))
    assert made.quantized_storage.buffers.keys() == expected.quantized_storage.buffers.keys()
    assert_same_buffers(made, expected, name)
    assert (made.shape, made.dtype) == (values().shape, torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 17, 33])
@every_recipe
def test_any_number_of_rows_is_served(recipe, rows):
    """Odd ones, of which packed columns end in half a byte, and less than a block: either copy lies
    as near to the values as the format allows.
    """
    for role in ("input", "grad_output"):
        x = values(rows, dtype=torch.float32)
        quantizer = quantizer_for(recipe, role)
        made = quantizer.quantize(x)
        step = {"e4m3": 2.0**-4, "e5m2": 2.0**-3, "e2m1": 2.0**-1}[quantizer.dtype.name]
        for copied in (made.dequantize(), dequantize(made.quantized_storage, columnwise=True)):
            assert (copied - x).abs().max() <= step * x.abs().max(), role


@each_role
@every_recipe
def test_one_copy_holds_the_bytes_it_has_beside_the_other(recipe, role):
    """Rowwise only and columnwise only; each decodes to what its codes mean, the other is not
    there.
    """
    both = quantizer_for(recipe, role).quantize(values())

    quantizer = quantizer_for(recipe, role)
    quantizer.set_usage(columnwise=False)
    rowwise = quantizer.quantize(values())
    assert not [name for name in rowwise.quantized_storage.buffers if name.startswith("columnwise")]
    assert_same_buffers(rowwise, both, "rowwise")
    assert_same_bytes(rowwise.dequantize(), both.dequantize(), "rowwise value")
    with pytest.raises(MissingDataError):
        _ = rowwise.columnwise_data

    quantizer = quantizer_for(recipe, role)
    quantizer.set_usage(rowwise=False)
    columnwise = quantizer.quantize(values())
    assert_same_buffers(columnwise, both, "columnwise")
    expected = dequantize(both.quantized_storage, columnwise=True).to(torch.bfloat16)
    assert_same_bytes(columnwise.dequantize(), expected, "columnwise value")
    with pytest.raises(MissingDataError, match="rowwise=True"):
        _ = columnwise.rowwise_scale_inv, columnwise.rowwise_data


@every_recipe
def test_a_copy_can_be_given_back_later(recipe):
    """update_usage leaves what a quantizer of that usage would have made, and never nothing."""
    made = quantizer_for(recipe, "weight").quantize(values())
    expected = dequantize(made.quantized_storage, columnwise=True).to(torch.bfloat16)
    kept = copy.deepcopy(made)
    kept.update_usage(rowwise_usage=False)
    assert_same_bytes(kept.dequantize(), expected, "columnwise value")
    assert kept.quantized_storage.buffers.keys() < made.quantized_storage.buffers.keys()
    with pytest.raises(MissingDataError):
        kept.update_usage(rowwise_usage=True)
    with pytest.raises(InputError, match="must keep its"):
        kept.update_usage(columnwise_usage=False)
    made.update_usage(columnwise_usage=False)
    assert not made.quantized_storage.has_columnwise


@every_recipe
def test_out_is_overwritten_in_place(recipe):
    """In every usage: the bytes of a fresh result, at the old addresses."""
    for usage in ({}, {"columnwise": False}, {"rowwise": False}):
        expected, out = (quantizer_for(recipe, "weight") for _ in range(2))
        expected.set_usage(**usage)
        out.set_usage(**usage)
        made = out.make_empty((34, 64))
        addresses = {name: b.data_ptr() for name, b in made.quantized_storage.buffers.items()}
        version = made.quantized_storage.version
        assert out.quantize(values(), out=made) is made
        assert {
            name: b.data_ptr() for name, b in made.quantized_storage.buffers.items()
        } == addresses
        assert made.quantized_storage.version != version
        assert_same_buffers(made, expected.quantize(values()), f"out {usage}")


def test_an_out_that_does_not_fit_is_refused():
    """Each wrong property is named, with both values, and nothing is written."""
    quantizer = Quantizer(Float8CurrentScaling())
    made = quantizer.quantize(values())
    before = made.rowwise_data.clone()
    wrong = {
        "shape": (quantizer, values(2)),
        "dtype": (quantizer, values(dtype=torch.float32)),
        "recipe": (Quantizer(Float8RowwiseScaling()), values()),
        "columnwise": (Quantizer(Float8CurrentScaling(), columnwise=False), values()),
        "rowwise": (Quantizer(Float8CurrentScaling(), rowwise=False), values()),
    }
    for name, (other, tensor) in wrong.items():
        with pytest.raises(InputError, match=f"out must have {name}"):
            other.quantize(tensor, out=made)
    with pytest.raises(InputError, match="QuantizedTensor, got Tensor"):
        quantizer.quantize(values(), out=values())  # type: ignore[arg-type]
    assert_same_bytes(made.rowwise_data, before, "codes")


def test_amax_epsilon_and_powers_of_two_are_those_of_the_role():
    """An epsilon for inputs leaves weights alone; a forced power of two for gradients, too."""
    recipe = Float8CurrentScaling(
        fp8_quant_fwd_inp=QParams(amax_epsilon=7.0), fp8_quant_bwd_grad=QParams(power_2_scale=True)
    )
    small = torch.full((2, 16), 0.75)
    inverse = {
        role: quantizer_for(recipe, role).quantize(small).rowwise_scale_inv.item()
        for role in FORWARD + BACKWARD
    }
    assert inverse["input"] == inverse["output"] == 7 / 448
    assert inverse["weight"] == pytest.approx(0.75 / 448)
    assert inverse["grad_output"] == inverse["grad_input"] == 2.0**-16  # 57344 / 0.75 rounded down


def test_the_block_dimension_is_that_of_the_role():
    """Blockwise FP8: 1x128 for inputs, 128x128 for weights, unless the recipe says otherwise."""
    shape = (256, 384)
    for recipe, role, grid in (
        (Float8BlockScaling(), "input", (1, 128)),
        (Float8BlockScaling(), "weight", (128, 128)),
        (Float8BlockScaling(), "grad_output", (1, 128)),
        (Float8BlockScaling(grad_block_scaling_dim=2), "grad_output", (128, 128)),
    ):
        blocks = quantizer_for(recipe, role).recipe.planes(shape)[0].grid
        assert (blocks.block_h, blocks.block_w) == grid, (recipe, role)


# --- what it remembers, and what it does not keep ---


@every_recipe
def test_what_was_quantized_outlives_the_quantizer(recipe):
    """A result refers neither to its quantizer nor to the state behind it."""
    quantizer = quantizer_for(recipe, "grad_output")
    gone = weakref.ref(quantizer), weakref.ref(state_of(quantizer) or quantizer)
    made = quantizer.quantize(values())
    del quantizer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert made.dequantize().isfinite().all()


@every_recipe
def test_a_state_that_moves_on_changes_nothing_that_was_quantized(recipe):
    """scale_inv belongs to the data: whatever the recipe's state does next."""
    state = RecipeState.create(recipe, "backward", 2)
    quantizer, _ = state.make_quantizers()
    made = quantizer.quantize(values())
    before, columnwise = made.dequantize(), dequantize(made.quantized_storage, columnwise=True)
    for tensor in state.tensors.values():
        tensor.fill_(3)
    quantizer.quantize(values() * 100)
    assert_same_bytes(made.dequantize(), before, "rowwise value")
    assert_same_bytes(
        dequantize(made.quantized_storage, columnwise=True), columnwise, "columnwise value"
    )


def test_a_delayed_cast_takes_the_scale_of_before_and_notes_the_amax():
    """scale_inv is 1 / scale; codes are x * scale; scale and history wait for the reduction."""
    state = RecipeState.create(DelayedScaling(amax_history_len=4), "forward", 3)
    state.scale.copy_(torch.tensor([1.0, 2.0, 3.0]))
    history = state.amax_history.clone()
    for i, quantizer in enumerate(state.make_quantizers()):
        made = quantizer.quantize(torch.tensor([[0.5, -2.0]]))
        assert made.rowwise_scale_inv.item() == (torch.tensor(1.0) / (i + 1)).item()
        expected = (torch.tensor([[0.5, -2.0]]) * (i + 1)).to(torch.float8_e4m3fn)
        assert_same_bytes(made.rowwise_data, expected.view(torch.uint8), f"codes {i}")
    assert state.amaxes.view(torch.float32).tolist() == [2.0] * 3
    assert state.scale.tolist() == [1.0, 2.0, 3.0]
    assert_same_bytes(state.amax_history, history, "history")


def test_amaxes_accumulate_by_maximum():
    """Of several casts and calibrations the largest amax counts, wherever it comes."""
    state = RecipeState.create(DelayedScaling(), "forward", 3)
    first, second, third = state.make_quantizers()
    for amax in (1.0, 5.0, 2.0):
        first.quantize(torch.full((2, 2), amax))
        second.calibrate(torch.full((2, 2), -amax))
    third.quantize(torch.zeros(2, 2))
    assert state.amaxes.view(torch.float32).tolist() == [5.0, 5.0, 0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_loud_and_does_not_spread(bad):
    """A delayed tensor with a NaN or an infinity decodes to NaN; the next one, before any
    reduction, does not.
    """
    state = RecipeState.create(DelayedScaling(), "forward", 1)
    (quantizer,) = state.make_quantizers()
    assert quantizer.quantize(torch.tensor([[1.0, bad]])).dequantize().isnan().all()
    assert quantizer.quantize(torch.tensor([[1.0, 2.0]])).dequantize().tolist() == [[1.0, 2.0]]
    assert not state.amaxes.view(torch.float32).isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_calibrating_notes_what_quantizing_would(dtype):
    """The same amax bits for normal values, subnormals, zeros, infinities and NaN of any shape and
    strides; a scheme without state notes nothing and keeps quiet.
    """
    tensors = [
        values(3, 5, torch.float32).to(dtype),
        values(4, 6, torch.float32).to(dtype).t(),
        torch.tensor([[2.0**-149, -(2.0**-140)]]).to(dtype),
        torch.zeros(1, 1, dtype=dtype),
        torch.tensor([[1.0, -float("inf")]], dtype=dtype),
        torch.tensor([[float("nan"), 1.0]], dtype=dtype),
        torch.randn(2, 3, 4).to(dtype),
    ]
    for tensor in tensors:
        state = RecipeState.create(DelayedScaling(), "forward", 2)
        quantizes, calibrates = state.make_quantizers()
        quantizes.quantize(tensor)
        calibrates.calibrate(tensor)
        assert state.amaxes[0] == state.amaxes[1], (tensor, state.amaxes)
    Quantizer(Float8CurrentScaling()).calibrate(tensors[0])


def test_a_users_function_sees_only_whole_histories():
    """amax_compute_algo is called when the state advances, never by a cast."""
    seen: list[list[float]] = []

    def middle(history):
        seen.append(history.tolist())
        return history.max()

    state = RecipeState.create(
        DelayedScaling(amax_history_len=3, amax_compute_algo=middle), "forward"
    )
    (quantizer,) = state.make_quantizers()
    quantizer.quantize(torch.full((2, 2), 4.0))
    assert seen == []
    reduction = zerocast.nn.recipe_state.AmaxReduction(zerocast.as_communicator(None))
    state.register_with(reduction)
    reduction.run()
    assert seen == [[4.0, 0.0, 0.0]]
    assert state.scale.item() == 448 / 4


def test_a_value_cannot_be_copied_into_a_tensor_that_lacks_its_state():
    """copy_ would have no scale to cast with; the error says how to. Bytes can be copied."""
    quantizer = quantizer_for(DelayedScaling(), "input")
    made, other = quantizer.quantize(values()), quantizer.quantize(values() * 2)
    with pytest.raises(InputError, match=r"quantizer\.quantize\(value, out=tensor\)"):
        made.copy_(values())
    made.copy_(other)
    assert_same_bytes(made.dequantize(), other.dequantize(), "copy")
    current = Quantizer(Float8CurrentScaling(), rowwise=False).quantize(values())
    current.copy_(values() * 2)
    expected = Quantizer(Float8CurrentScaling()).quantize(values() * 2)
    assert_same_bytes(current.dequantize(), expected.dequantize(), "columnwise copy")


@every_recipe
def test_bytes_can_be_copied_in_every_usage(recipe):
    """copy_ between results of like quantizers takes over what both hold, a single copy, too."""
    for usage in ({}, {"columnwise": False}, {"rowwise": False}):
        quantizer = quantizer_for(recipe, "weight")
        quantizer.set_usage(**usage)
        into, source = quantizer.quantize(values()), quantizer.quantize(values() * 3)
        into.copy_(source)
        assert_same_buffers(into, source, f"copy {usage}")


def test_every_cast_draws_anew():
    """Stochastic rounding: two casts of one quantizer differ, as do those of two layers' names and
    of two places in a layer; a state that starts alike gives the same bytes.
    """
    recipe, x = NVFP4BlockScaling(), values()

    def casts(name, place=0):
        state = RecipeState.create(recipe, "backward", 2, name=name)
        quantizer = state.make_quantizers()[place]
        return [quantizer.quantize(x).rowwise_data for _ in range(2)]

    first, second = casts("a")
    assert not torch.equal(first, second)
    for same, again in zip((first, second), casts("a"), strict=True):
        assert_same_bytes(same, again, "same name")
    assert not torch.equal(first, casts("b")[0])
    assert not torch.equal(first, casts("a", place=1)[0])
