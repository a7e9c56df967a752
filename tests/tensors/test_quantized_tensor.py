"""QuantizedTensor is a torch.Tensor like any other, except that it refuses to be written."""

import copy
import io
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from zerocast.errors import InputError, MissingDataError, UnsupportedError
from zerocast.recipes import Float8CurrentScaling, NVFP4BlockScaling, Recipe
from zerocast.tensors import QuantizedTensor, quantize, replace_raw_data

NVFP4, FP8 = NVFP4BlockScaling(), Float8CurrentScaling()
RECIPES = [pytest.param(NVFP4, id="nvfp4"), pytest.param(FP8, id="fp8")]
both_recipes = pytest.mark.parametrize("recipe", RECIPES)


def make(recipe: Recipe, rows: int = 17, cols: int = 48, dtype=torch.float32) -> QuantizedTensor:
    """A weight of normal random values, always the same ones."""
    g = torch.Generator().manual_seed(rows * cols)
    return quantize(torch.randn(rows, cols, generator=g).to(dtype), recipe)


# --- what it presents ---


@both_recipes
def test_it_presents_the_nominal_shape_and_dtype(recipe: Recipe) -> None:
    """Shape, dtype, strides and device are those of a plain tensor; its repr prints no bytes."""
    weight = make(recipe, dtype=torch.bfloat16)
    assert isinstance(weight, torch.Tensor)
    assert (weight.shape, weight.stride(), weight.dtype) == ((17, 48), (48, 1), torch.bfloat16)
    assert weight.is_contiguous()
    assert weight.recipe is recipe
    assert repr(weight) == (
        f"QuantizedTensor(shape=(17, 48), dtype=torch.bfloat16, recipe={recipe!r})"
    )
    assert "requires_grad=True" in repr(torch.nn.Parameter(weight))
    assert "tensor(" not in str(weight)


def test_data_that_a_weight_lacks_is_named() -> None:
    """The amax of FP8 and the columnwise copy of columnwise=False raise, and hasattr says False."""
    weight = quantize(torch.randn(4, 16), FP8, columnwise=False)
    with pytest.raises(MissingDataError, match="Float8CurrentScaling does not"):
        _ = weight.amax
    for name in ("columnwise_data", "columnwise_scale_inv"):
        with pytest.raises(MissingDataError, match=f"{name} is not there: .*columnwise=False"):
            getattr(weight, name)
        assert not hasattr(weight, name)
    assert hasattr(make(NVFP4), "amax")


@both_recipes
def test_dequantize_gives_a_plain_tensor_of_any_dtype(recipe: Recipe) -> None:
    """By default of the nominal dtype; other dtypes are the FP32 value rounded once."""
    weight = make(recipe, dtype=torch.bfloat16)
    value = weight.dequantize()
    assert type(value) is torch.Tensor
    assert value.dtype == torch.bfloat16
    exact = weight.dequantize(torch.float32)
    assert_same_bytes(value, exact.bfloat16(), "bfloat16")
    assert_same_bytes(weight.dequantize(torch.float64), exact.double(), "float64")


# --- aliases and views ---


@both_recipes
@pytest.mark.parametrize(
    "alias",
    [
        lambda w: w.detach(),
        lambda w: w.data,
        lambda w: w.view_as(w),
        lambda w: w.view(17, 48),
        lambda w: w.reshape(-1, 48),
        lambda w: w[:],
        lambda w: w.narrow(0, 0, 17),
        lambda w: w.split(17)[0],
        lambda w: w.chunk(1)[0],
        lambda w: w.expand(17, 48),
        lambda w: w.as_strided((17, 48), (48, 1)),
        lambda w: torch.ops.aten.alias(w),
        lambda w: torch.nn.Parameter(w),
    ],
)
def test_a_view_of_the_whole_weight_is_an_alias(recipe: Recipe, alias: Callable) -> None:
    """It shares the storage: a copy into one and a moved buffer are seen by the other."""
    weight = make(recipe)
    other = alias(weight)
    assert isinstance(other, QuantizedTensor)
    assert other.storage is weight.storage
    with torch.no_grad():
        other.copy_(torch.ones(17, 48))
    assert (weight.dequantize() == 1).all()
    replace_raw_data(weight, torch.zeros_like(weight.rowwise_data).view(-1))
    assert other.rowwise_data is weight.rowwise_data


VIEWS = [
    lambda w: w.t(),
    lambda w: w[3],
    lambda w: w[2:9],
    lambda w: w[:, 1:],
    lambda w: w.view(-1),
    lambda w: w.unsqueeze(0),
    lambda w: w.split(5)[1],
    lambda w: w.split([3, 14])[1],
    lambda w: w.chunk(4)[2],
    lambda w: w.unbind(0)[1],
    lambda w: w.as_strided((4, 4), (48, 1), 5),
    lambda w: w.expand(2, 17, 48),
    lambda w: w.diagonal(),
    lambda w: w.t()[3:5].t(),
]


@both_recipes
@pytest.mark.parametrize("view", VIEWS)
def test_any_other_view_has_the_values(recipe: Recipe, view: Callable) -> None:
    """Values, shape and strides are those of the same view of the dequantized value."""
    weight = make(recipe)
    expected = view(weight.dequantize())
    actual = view(weight)
    assert actual.stride() == expected.stride()
    assert actual.tolist() == expected.tolist()
    assert_same_bytes(actual + 0, expected + 0, "values")
    assert np.array_equal(actual.numpy(), expected.numpy())


@both_recipes
@pytest.mark.parametrize("view", VIEWS)
def test_nothing_can_be_written_through_a_view(recipe: Recipe, view: Callable) -> None:
    """A write would reach a value decoded for the occasion, so it is refused, not lost."""
    weight = make(recipe)
    expected = weight.clone()
    for write in (
        lambda v: v.zero_(),
        lambda v: v.copy_(torch.ones(())),
        lambda v: v.add_(1),
        lambda v: v.__setitem__(0, 1.0),
        lambda v: torch.add(torch.ones(v.shape), 1, out=v),
    ):
        with pytest.raises(UnsupportedError, match="would write a quantized weight in place"):
            write(view(weight))
    with pytest.raises(ValueError, match="read-only"):
        view(weight).numpy().fill(0)
    assert_same_storage(weight, expected, "weight")


# --- operations ---


@both_recipes
@pytest.mark.parametrize(
    "operation",
    [
        lambda w: w + 1,
        lambda w: w.sum(0),
        lambda w: w @ w.t(),
        lambda w: torch.cat([w, w]),
        lambda w: torch.stack([w, w.t().t()]),
        lambda w: F.linear(torch.ones(2, 48), w),
        lambda w: F.embedding(torch.tensor([0, 16]), w),
        lambda w: torch.where(w > 0, w, -w),
        lambda w: w.double(),
        lambda w: w.norm(),
        lambda w: torch._foreach_add([w, w], 1)[1],
        lambda w: torch.nn.utils.parameters_to_vector([w]),
        lambda w: w.index_select(0, torch.tensor([3, 1])),
    ],
)
def test_an_unknown_operation_works_on_the_dequantized_value(
    recipe: Recipe, operation: Callable
) -> None:
    """The result is plain and bit for bit that of the dequantized tensor."""
    weight = make(recipe)
    actual = operation(weight)
    assert type(actual) is torch.Tensor
    assert_same_bytes(actual, operation(weight.dequantize()), "result")


@both_recipes
@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.add_(1),
        lambda w: w.mul_(2),
        lambda w: w.fill_(1),
        lambda w: w.normal_(),
        lambda w: w.clamp_(min=0),
        lambda w: w.__setitem__(0, 1.0),
        lambda w: w.__setitem__((0, 0), 1.0),
        lambda w: torch.add(torch.ones(17, 48), 1, out=w),
        lambda w: torch._foreach_add_([w], 1),
        lambda w: torch._foreach_mul_([torch.ones(2), w], [1, 2]),
        lambda w: w.t_(),
        lambda w: w.resize_(3),
        lambda w: torch.nn.init.xavier_uniform_(w),
    ],
)
def test_writing_in_place_is_refused_with_the_reason(recipe: Recipe, write: Callable) -> None:
    """The error says what to do instead, and the weight is what it was."""
    weight = make(recipe)
    expected = weight.clone()
    with pytest.raises(UnsupportedError, match=r"aten\..* in place.*FP32 master"):
        write(weight)
    assert_same_storage(weight, expected, "weight")


def test_torch_optimizers_are_refused_rather_than_wrong() -> None:
    """SGD on a quantized parameter raises; it does not train a temporary."""
    weight = torch.nn.Parameter(make(FP8))
    weight.grad = torch.ones(17, 48)
    with pytest.raises(UnsupportedError, match="ZeroOptimizer"):
        torch.optim.SGD([weight], lr=1.0).step()


def test_what_needs_memory_of_the_nominal_dtype_is_refused() -> None:
    """Assigning .data and handing out a pointer would bypass the codes."""
    weight = make(FP8)
    with pytest.raises(UnsupportedError, match=r"use weight.copy_\(value\)"):
        weight.data = torch.ones(17, 48)
    with pytest.raises(UnsupportedError, match="no memory of its nominal dtype"):
        torch.from_dlpack(weight)


@both_recipes
def test_numpy_and_lists_are_of_the_value(recipe: Recipe) -> None:
    """As for any tensor, numpy() needs a detach() where a gradient is required."""
    weight = make(recipe)
    expected = weight.dequantize()
    assert np.array_equal(weight.numpy(), expected.numpy())
    assert np.array_equal(np.asarray(weight), expected.numpy())
    assert weight.tolist() == expected.tolist()
    with pytest.raises(RuntimeError, match="requires grad"):
        torch.nn.Parameter(weight).numpy()
    assert np.array_equal(torch.nn.Parameter(weight).numpy(force=True), expected.numpy())


@both_recipes
def test_factories_make_plain_tensors(recipe: Recipe) -> None:
    """zeros_like and its kind take shape, dtype and device, and new_* dtype and device."""
    weight = make(recipe, dtype=torch.bfloat16)
    for made in (
        torch.zeros_like(weight),
        torch.empty_like(weight),
        torch.ones_like(weight),
        torch.full_like(weight, 2),
        torch.randn_like(weight),
        weight.new_zeros(17, 48),
        weight.new_empty((17, 48)),
        weight.new_full((17, 48), 3.0),
    ):
        assert type(made) is torch.Tensor
        assert (made.shape, made.dtype) == ((17, 48), torch.bfloat16)
    assert torch.zeros_like(weight, dtype=torch.float64).dtype == torch.float64
    assert not torch.zeros_like(weight).any()


# --- copies ---


@both_recipes
def test_copy_of_high_precision_values_quantizes(recipe: Recipe) -> None:
    """The bytes are those of quantize(); the buffers stay where they are."""
    weight, x = make(recipe, dtype=torch.bfloat16), torch.randn(17, 48)
    addresses = {name: b.data_ptr() for name, b in weight.storage.buffers.items()}
    for source in (x, x.double(), x.t().contiguous().t(), torch.nn.Parameter(x)):
        weight.zero_()
        assert not weight.dequantize().any()
        returned = weight.copy_(source) if not source.requires_grad else _copy(weight, source)
        assert returned is weight
        assert_same_storage(weight, quantize(x, recipe, dtype=torch.bfloat16), "copied")
    assert addresses == {name: b.data_ptr() for name, b in weight.storage.buffers.items()}
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
def test_copy_between_weights_of_one_recipe_copies_the_bytes(recipe: Recipe) -> None:
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
        assert "columnwise_data" not in into_bare.storage.buffers


def test_copy_between_recipes_quantizes_the_value() -> None:
    """NVFP4 <- FP8 is NVFP4 <- dequantized FP8."""
    source, weight = make(FP8), make(NVFP4)
    weight.copy_(source)
    assert_same_storage(weight, quantize(source.dequantize(), NVFP4), "nvfp4 from fp8")
    plain = torch.zeros(17, 48, dtype=torch.bfloat16)
    plain.copy_(source)
    assert_same_bytes(plain, source.dequantize().bfloat16(), "plain from fp8")


def test_copy_of_another_shape_is_refused_and_writes_nothing() -> None:
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
def test_a_copy_has_bytes_of_its_own(recipe: Recipe, duplicate: Callable) -> None:
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
def test_deepcopy_keeps_what_a_parameter_carries(recipe: Recipe) -> None:
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
    assert twin.alias.storage is twin.first.storage
    assert twin.first.storage is not parameter.storage
    assert twin.first.tag == ["expert"]
    assert twin.first.tag is not parameter.tag  # type: ignore[attr-defined]
    assert_same_bytes(twin.first.grad, parameter.grad, "grad")
    assert twin.first.grad is not parameter.grad
    frozen = copy.deepcopy(torch.nn.Parameter(make(recipe), requires_grad=False))
    assert not frozen.requires_grad


@both_recipes
def test_pickle_and_torch_save_keep_the_bytes(recipe: Recipe) -> None:
    """By safe types only; parameters stay parameters; aliases still share a storage."""
    weight = make(recipe, dtype=torch.bfloat16)
    saved = {
        "p": torch.nn.Parameter(weight),
        "w": weight,
        "frozen": torch.nn.Parameter(weight, False),
    }
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    for loaded in (torch.load(file, weights_only=True), pickle.loads(pickle.dumps(saved))):
        assert isinstance(loaded["p"], torch.nn.Parameter)
        assert loaded["p"].requires_grad
        assert not loaded["frozen"].requires_grad
        assert loaded["p"].storage is loaded["w"].storage
        assert loaded["w"].recipe == recipe
        assert loaded["w"].dtype == torch.bfloat16
        assert_same_storage(loaded["w"], weight, "loaded")


def test_a_saved_weight_does_not_bring_its_gather_buffer() -> None:
    """A weight whose codes are a slice of a large flat buffer is saved by its own bytes."""
    weight = make(FP8)
    replace_raw_data(weight, torch.zeros(10_000_000, dtype=torch.uint8)[5 : 5 + 17 * 48])
    file = io.BytesIO()
    torch.save(weight, file)
    assert len(file.getvalue()) < 20_000
    file.seek(0)
    assert_same_storage(torch.load(file, weights_only=True), weight, "loaded")


@both_recipes
def test_to_changes_the_nominal_dtype_and_leaves_the_codes(recipe: Recipe) -> None:
    """float(), bfloat16(), half() stay quantized; other dtypes are values; no change is self."""
    weight = make(recipe, dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.float16):
        other = weight.to(dtype)
        assert isinstance(other, QuantizedTensor)
        assert (other.dtype, weight.dtype) == (dtype, torch.bfloat16)
        assert_same_storage(other, weight, str(dtype))
        other.zero_()
        assert weight.dequantize().any()
    assert weight.to(torch.bfloat16) is weight
    assert weight.cpu() is weight
    assert type(weight.to(torch.float64)) is torch.Tensor
    assert_same_bytes(weight.double(), weight.dequantize().double(), "float64")


@both_recipes
def test_a_module_moves_its_quantized_parameters(recipe: Recipe) -> None:
    """module.to(dtype) keeps them quantized parameters with the same bytes."""
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(make(recipe))
    expected = module.weight.clone()
    module.bfloat16()
    assert isinstance(module.weight, QuantizedTensor)
    assert isinstance(module.weight, torch.nn.Parameter)
    assert module.weight.dtype == torch.bfloat16
    assert_same_storage(module.weight, expected, "weight")


@both_recipes
def test_state_dict_round_trips(recipe: Recipe) -> None:
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
    assert plain.weight.storage is source.weight.storage


def test_share_memory_reaches_the_bytes() -> None:
    """The buffers are in shared memory afterwards, with their values."""
    weight = make(NVFP4)
    expected = weight.clone()
    assert not weight.is_shared()
    assert weight.share_memory_() is weight
    assert weight.is_shared()
    assert_same_storage(weight, expected, "shared")


# --- autograd and torch.compile ---


@both_recipes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_of_full_shape_reaches_the_weight(recipe: Recipe, dtype: torch.dtype) -> None:
    """Straight-through: it is the gradient of the dequantized value, in the nominal dtype."""
    x = torch.randn(5, 48, dtype=dtype)
    weight = torch.nn.Parameter(make(recipe, dtype=dtype))
    plain = weight.dequantize().requires_grad_()
    for w in (weight, plain):
        (F.linear(x, w).tanh().sum() + w[3:5].square().sum() + w.t()[1].sum()).backward()
        F.linear(x, w).sum().backward()  # accumulates
    assert type(weight.grad) is torch.Tensor
    assert_same_bytes(weight.grad, plain.grad, "grad")
    with torch.no_grad():
        assert not (weight + 1).requires_grad
    weight.grad.zero_()
    assert not weight.detach().requires_grad


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor's, of torch.jit
@both_recipes
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_function_of_the_weight_compiles(recipe: Recipe, backend: str) -> None:
    """Without a graph break; values and gradients are the eager ones, also after a copy_."""
    torch._dynamo.reset()

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w).relu() + w[2].sum()

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    x = torch.randn(5, 48)
    weight = torch.nn.Parameter(make(recipe))
    for _ in range(2):
        grads = []
        for f in (function, compiled):
            weight.grad = None
            out = f(x, weight)
            out.sum().backward()
            grads.append((out.detach(), weight.grad))
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            weight.copy_(torch.randn(17, 48))
