"""Stacks: weights [..., M, K] whose matrices are quantized each by itself."""

import copy
import dataclasses
import math

import pytest
import torch

import zerocast
from tests.support.recipes import NOT_SHARDABLE, RECIPES
from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from tests.support.values import KINDS, draw_values
from tests.support.weights import through_a_file
from zerocast.errors import InputError
from zerocast.recipes import Recipe
from zerocast.tensors import QuantizedTensor, quantize_into

PER_MATRIX = {
    name: recipe if recipe.per_matrix else dataclasses.replace(recipe, per_matrix=True)
    for name, recipe in (RECIPES | NOT_SHARDABLE).items()
}
every_recipe = pytest.mark.parametrize("recipe", PER_MATRIX.values(), ids=PER_MATRIX.keys())
SHAPES = [(3, 17, 32), (2, 1, 33, 96)]


def values_of(shape: tuple[int, ...], first: int = 0) -> torch.Tensor:
    """Matrices of values of one kind after the other, whose amaxes differ by orders of magnitude
    and are not always finite.
    """
    numel = math.prod(shape[-2:])
    kinds = [KINDS[(first + i) % len(KINDS)] for i in range(math.prod(shape[:-2]))]
    return torch.stack([draw_values(k, numel, first + i) for i, k in enumerate(kinds)]).view(shape)


def matrix_by_matrix(given: torch.Tensor, recipe: Recipe, *casts: torch.Tensor) -> list:
    """Each matrix of ``given`` quantized alone, under its name in the stack ``w``; then those of
    ``casts`` are cast into it.
    """
    shape, weights = given.shape[-2:], []
    for i, value in enumerate(given.reshape(-1, *shape)):
        weight = zerocast.quantize(value, recipe, dtype=torch.bfloat16, name=f"w[{i}]")
        for each in casts:
            quantize_into(weight.quantized_storage, each.reshape(-1, *shape)[i])
        weights.append(weight)
    return weights


@pytest.mark.usefixtures("backend")
@every_recipe
def test_a_stack_is_its_matrices_quantized_each_alone(recipe):
    """Codes, scales, amax, state, padding and copies; no block reaches into another matrix, and no
    amax, of whatever value, into its scales. The value is theirs.
    """
    for first, shape in enumerate(SHAPES):
        given, again = values_of(shape, first), values_of(shape, first + 3)
        stack = zerocast.quantize(given, recipe, dtype=torch.bfloat16, name="w")
        quantize_into(stack.quantized_storage, again)
        alone = matrix_by_matrix(given, recipe, again)
        matrices = [QuantizedTensor(each) for each in stack.quantized_storage.matrices]
        for i, (matrix, expected) in enumerate(zip(matrices, alone, strict=True)):
            assert_same_storage(matrix, expected, f"matrix {i} of {shape}")
        values = torch.stack([each.dequantize() for each in alone]).view(shape)
        assert_same_bytes(stack.dequantize(), values, "the value")


@every_recipe
def test_the_buffers_of_a_stack_are_those_of_its_matrices(recipe):
    """Behind its leading dimensions, whatever they hold; also of a copy, and out of a file."""
    stack = zerocast.quantize(values_of((2, 3, 17, 32)), recipe, name="w")
    one = zerocast.quantize(values_of((17, 32)), recipe, name="w")
    shapes = {n: (2, 3, *b.shape) for n, b in one.quantized_storage.buffers.items()}
    assert {n: tuple(b.shape) for n, b in stack.quantized_storage.buffers.items()} == shapes
    assert_same_storage(copy.deepcopy(stack), stack, "copy")
    assert_same_storage(through_a_file(stack, weights_only=False), stack, "file")


def test_without_per_matrix_all_dimensions_are_one_tensor():
    """FP8 of a whole tensor has one scale then, as TransformerEngine's has."""
    x = torch.tensor([1.0, 448.0]).view(2, 1, 1).expand(2, 3, 4)
    one, each = (
        zerocast.quantize(x, zerocast.Float8CurrentScaling(per_matrix=per_matrix))
        for per_matrix in (False, True)
    )
    assert one.rowwise_scale_inv.tolist() == [1.0]
    assert each.rowwise_scale_inv.tolist() == [[torch.tensor(1 / 448).item()], [1.0]]


def test_one_matrix_of_a_stack_is_decoded_alone(monkeypatch):
    """Experts that a forward takes one by one are not all decoded for each."""
    stack = zerocast.quantize(values_of((3, 17, 32)), zerocast.NVFP4BlockScaling())
    expected, decoded = stack.dequantize(), []
    whole = QuantizedTensor.dequantize
    record = lambda self, *a: (decoded.append(tuple(self.shape)), whole(self, *a))[1]  # noqa: E731
    monkeypatch.setattr(QuantizedTensor, "dequantize", record)
    for i in (0, 2, -1):
        assert_same_bytes(stack[i].clone(), expected[i], f"matrix {i}")
    assert decoded == [(17, 32)] * 3
    with pytest.raises(IndexError):
        stack[3]
    assert_same_bytes(stack.select(1, 4).clone(), expected.select(1, 4), "a row of each")


def test_gradients_reach_a_stack_through_its_matrices():
    """As if it were in high precision."""
    stack = zerocast.quantize(torch.randn(3, 16, 32), zerocast.NVFP4BlockScaling())
    weight, x = torch.nn.Parameter(stack), torch.randn(5, 32)
    plain = stack.dequantize().requires_grad_()
    for each in (weight, plain):
        sum((x @ each[i].t()).square().sum() * (i + 1) for i in range(3)).backward()
    assert_same_bytes(weight.grad, plain.grad, "gradient")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: zerocast.NVFP4BlockScaling(per_matrix=False),
            r"NVFP4BlockScaling\(per_matrix=False\) is not supported: a block lies in one matrix",
        ),
        (
            lambda: zerocast.empty(
                (2, 16, 16),
                zerocast.NVFP4BlockScaling(),
                tp_shard=zerocast.TensorParallelShard.chunk(
                    (4, 16, 16), 0, zerocast.comm.SingleRank()
                ),
            ),
            r"rows \[0, 64\) of \(4, 16, 16\) have shape \(4, 16, 16\), got \(2, 16, 16\)",
        ),
        (
            lambda: zerocast.Quantizer(zerocast.NVFP4BlockScaling())(torch.ones(2, 3, 16)),
            r"takes a matrix, got shape \(2, 3, 16\), a stack of them; flatten",
        ),
    ],
)
def test_what_no_stack_can_be_is_refused(call, message):
    """With what can."""
    with pytest.raises((InputError, zerocast.UnsupportedError), match=message):
        call()
