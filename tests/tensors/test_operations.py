"""Views read, unknown operations decode, and nothing writes a quantized weight but copy_."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from tests.support.weights import FP8, both_recipes, make
from zerocast.errors import UnsupportedError
from zerocast.tensors import QuantizedTensor, replace_raw_data

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
def test_a_view_of_the_whole_weight_is_an_alias(recipe, alias):
    """It shares the storage: a copy into one and a moved buffer are seen by the other."""
    weight = make(recipe)
    other = alias(weight)
    assert isinstance(other, QuantizedTensor)
    assert other.quantized_storage is weight.quantized_storage
    with torch.no_grad():
        other.copy_(torch.ones(17, 48))
    assert (weight.dequantize() == 1).all()
    replace_raw_data(weight, torch.zeros_like(weight.rowwise_data).view(-1))
    assert other.rowwise_data.data_ptr() == weight.rowwise_data.data_ptr()


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
def test_any_other_view_has_the_values(recipe, view):
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
def test_nothing_can_be_written_through_a_view(recipe, view):
    """A write would reach a value decoded for the occasion, so it is refused, not lost."""
    weight = make(recipe)
    expected = weight.clone()
    for write in (
        lambda v: v.zero_(),
        lambda v: v.copy_(torch.ones(())),
        lambda v: v.add_(1),
        lambda v: v.__setitem__(0, 1.0),
        lambda v: torch.add(torch.ones(v.shape), 1, out=v),
        lambda v: v.apply_(lambda value: 1.0),
        lambda v: v.map_(torch.ones(v.shape), lambda value, other: other),
    ):
        with pytest.raises(UnsupportedError, match="in place"):
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
def test_an_unknown_operation_works_on_the_dequantized_value(recipe, operation):
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
        lambda w: w.resize_(64, 64),
        lambda w: w.set_(torch.ones(17 * 48).untyped_storage()),
        lambda w: w.set_(torch.ones(17, 48)),
        lambda w: torch._foreach_mul_([w], 2.0),
        lambda w: torch._foreach_zero_([w]),
        lambda w: torch.neg(torch.ones(17, 48), out=w),
        lambda w: torch.nn.init.xavier_uniform_(w),
    ],
)
def test_writing_in_place_is_refused_with_the_reason(recipe, write):
    """The error says what to do instead, and the weight is what it was."""
    weight = make(recipe)
    expected = weight.clone()
    with pytest.raises(UnsupportedError, match=r"aten\..* in place.*FP32 master.*weight\.copy_"):
        write(weight)
    assert_same_storage(weight, expected, "weight")


def test_torch_optimizers_are_refused_rather_than_wrong():
    """SGD on a quantized parameter raises; it does not train a temporary."""
    weight = torch.nn.Parameter(make(FP8))
    weight.grad = torch.ones(17, 48)
    with pytest.raises(UnsupportedError, match="ZeroOptimizer"):
        torch.optim.SGD([weight], lr=1.0).step()


def test_what_needs_memory_of_the_nominal_dtype_is_refused():
    """Assigning .data and handing out a pointer would bypass the codes."""
    weight = make(FP8)
    with pytest.raises(UnsupportedError, match=r"use weight.copy_\(value\)"):
        weight.data = torch.ones(17, 48)
    with pytest.raises(UnsupportedError, match=r"use weight.copy_\(value\)"):
        torch.nn.utils.vector_to_parameters(torch.ones(17 * 48), [torch.nn.Parameter(weight)])
    with pytest.raises(UnsupportedError, match="no memory of its nominal dtype"):
        torch.from_dlpack(weight)
    with pytest.raises(UnsupportedError, match="apply a Python function to in place"):
        weight.apply_(lambda value: 1.0)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(weight)
    with pytest.raises(UnsupportedError, match=r"Parameter\(weight.dequantize\(dtype\)\)"):
        module.double()


@both_recipes
def test_numpy_and_lists_are_of_the_value(recipe):
    """NumPy reads the value and cannot write it; as for any tensor, numpy() needs a detach() where
    a gradient is required.
    """
    weight = make(recipe)
    expected = weight.dequantize()
    assert np.array_equal(weight.numpy(), expected.numpy())
    assert np.array_equal(np.asarray(weight), expected.numpy())
    assert weight.tolist() == expected.tolist()
    with pytest.raises(ValueError, match="read-only"):
        weight.numpy()[0] = 0
    with pytest.raises(RuntimeError, match="requires grad"):
        torch.nn.Parameter(weight).numpy()
    assert np.array_equal(torch.nn.Parameter(weight).numpy(force=True), expected.numpy())


@both_recipes
def test_factories_make_plain_tensors(recipe):
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
