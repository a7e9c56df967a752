"""zerocast.nn.Linear computes with the dequantized weight, forward and backward."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from tests.support.weights import FP8, NVFP4, both_recipes
from zerocast.errors import ChangedWeightError, InputError, StaleCopyError
from zerocast.nn import Linear
from zerocast.recipes import Recipe
from zerocast.tensors import CastVersion, QuantizedTensor, quantize, rebuild_derived


@both_recipes
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
)
@pytest.mark.parametrize("leading", [(), (1,), (5,), (2, 3), (2, 1, 3)])
def test_all_three_products_are_those_of_the_dequantized_weight(
    recipe: Recipe,
    bias: bool,
    dtype: torch.dtype,
    tolerance: float,
    leading: tuple[int, ...],
) -> None:
    """Output and gradients equal float64 arithmetic, relative to the largest magnitude."""
    torch.manual_seed(0)
    layer = Linear(80, 33, bias, recipe=recipe, dtype=dtype)
    x = torch.randn(*leading, 80, dtype=dtype, requires_grad=True)
    grad = torch.randn(*leading, 33, dtype=dtype)
    y = layer(x)
    assert y.shape == (*leading, 33)
    y.backward(grad)

    x64 = x.detach().double().requires_grad_()
    w64 = layer.weight.dequantize().double().requires_grad_()
    b64 = layer.bias.detach().double().requires_grad_() if bias else None
    y64 = F.linear(x64, w64, b64)
    y64.backward(grad.double())
    compared = {
        "output": (y, y64),
        "input": (x.grad, x64.grad),
        "weight": (layer.weight.grad, w64.grad),
    }
    if bias:
        compared["bias"] = (layer.bias.grad, b64.grad)
    for name, (actual, expected) in compared.items():
        assert actual.dtype == dtype
        assert actual.shape == expected.shape
        error = (actual.double() - expected).abs().max() / expected.abs().max()
        assert error <= tolerance, f"{name}: relative error {error:.2e}"


@both_recipes
@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=3)))
def test_only_the_gradients_asked_for_are_made(recipe: Recipe, needs: tuple[bool, ...]) -> None:
    """And without any, the output has no graph."""
    layer = Linear(32, 16, recipe=recipe)
    x = torch.randn(4, 32, requires_grad=needs[0])
    layer.weight.requires_grad_(needs[1])
    layer.bias.requires_grad_(needs[2])
    y = layer(x)
    assert y.requires_grad == any(needs)
    if any(needs):
        y.sum().backward()
    for tensor, needed in zip((x, layer.weight, layer.bias), needs, strict=True):
        assert (tensor.grad is not None) == needed
    with torch.no_grad():
        assert not layer(x).requires_grad


def test_it_starts_like_torch_and_remembers_the_values_before_quantization() -> None:
    """The same random numbers as torch.nn.Linear, and the next numbers are the same, too."""
    torch.manual_seed(3)
    plain = torch.nn.Linear(48, 24, dtype=torch.bfloat16)
    following = torch.rand(3)
    torch.manual_seed(3)
    layer = Linear(48, 24, recipe=NVFP4, dtype=torch.bfloat16)
    assert_same_bytes(torch.rand(3), following, "random state")
    assert_same_bytes(layer.bias, plain.bias, "bias")
    assert_same_storage(layer.weight, quantize(plain.weight, NVFP4), "weight")
    assert_same_bytes(layer.weight.get_high_precision_init_val(), plain.weight, "initial value")
    assert layer.weight.requires_grad
    assert isinstance(layer.weight, torch.nn.Parameter)
    torch.manual_seed(5)
    layer.reset_parameters()
    torch.manual_seed(5)
    plain.reset_parameters()
    assert_same_storage(layer.weight, quantize(plain.weight, NVFP4), "weight after reset")
    assert_same_bytes(layer.weight.get_high_precision_init_val(), plain.weight, "after reset")


def test_it_stands_where_torch_nn_linear_stands() -> None:
    """isinstance, attributes, repr, columnwise=False, parameters, state_dict keys."""
    layer = Linear(32, 16, bias=False, recipe=FP8, columnwise=False)
    assert isinstance(layer, torch.nn.Linear)
    assert (layer.in_features, layer.out_features, layer.bias) == (32, 16, None)
    assert not layer.weight.quantized_storage.has_columnwise
    assert repr(layer) == f"Linear(in_features=32, out_features=16, bias=False, recipe={FP8})"
    assert list(Linear(32, 16, recipe=FP8).state_dict()) == ["weight", "bias"]


@both_recipes
def test_state_dicts_are_exchanged_with_torch_nn_linear(recipe: Recipe) -> None:
    """Values of a torch layer are quantized; a torch layer gets the dequantized values."""
    plain, layer = torch.nn.Linear(48, 20), Linear(48, 20, recipe=recipe)
    layer.load_state_dict(plain.state_dict())
    assert_same_storage(layer.weight, quantize(plain.weight, recipe), "weight")
    assert_same_bytes(layer.weight.get_high_precision_init_val(), plain.weight, "initial value")
    twin = Linear(48, 20, recipe=recipe)
    twin.load_state_dict(layer.state_dict())
    assert_same_storage(twin.weight, layer.weight, "weight")
    plain.load_state_dict(layer.state_dict())
    assert_same_bytes(plain.weight, layer.weight.dequantize(), "plain weight")


def test_a_changed_weight_between_forward_and_backward_is_an_error() -> None:
    """By a cast, which torch's version counter does not see, and by a copy_, which it does."""
    clock = CastVersion(rebuild_on_use=True)
    layer, x = Linear(32, 16, recipe=NVFP4), torch.randn(4, 32, requires_grad=True)
    layer.weight.quantized_storage.watch(clock)
    for change in (clock.tick, lambda: layer.weight.data.zero_()):
        y = layer(x)
        change()
        with pytest.raises(
            ChangedWeightError, match=r"the weight \(16, 32\) that its forward used"
        ):
            y.sum().backward()
        layer(x).sum().backward()


def test_a_changed_weight_does_not_matter_to_the_weight_gradient() -> None:
    """It is grad.T @ input: where no input gradient is needed, the backward runs, as in torch."""
    layer = Linear(32, 16, recipe=NVFP4)
    y = layer(torch.ones(4, 32))
    with torch.no_grad():
        layer.weight.zero_()
    y.sum().backward()
    assert (layer.weight.grad == 4).all()


def test_a_stale_weight_is_refused_or_rebuilt_as_the_plan_says() -> None:
    """Manual processing: refused until it is done. Automatic: the forward rebuilds, once."""
    layer, x = Linear(32, 16, recipe=NVFP4), torch.randn(4, 32)
    expected = layer(x)
    manual = CastVersion(rebuild_on_use=False)
    layer.weight.quantized_storage.watch(manual)
    manual.tick()
    with pytest.raises(StaleCopyError, match="post_all_gather_processing"):
        layer(x)
    rebuild_derived([layer.weight.quantized_storage])
    assert_same_bytes(layer(x), expected, "output")

    layer = Linear(32, 16, recipe=NVFP4)
    automatic = CastVersion(rebuild_on_use=True)
    layer.weight.quantized_storage.watch(automatic)
    true = layer.weight.columnwise_data.clone()
    layer.weight.columnwise_data.fill_(0x77)
    automatic.tick()
    layer(x)
    assert_same_bytes(layer.weight.columnwise_data, true, "columnwise_data")


@both_recipes
@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_its_dtype(recipe: Recipe, autocast_dtype: torch.dtype) -> None:
    """As torch.nn.Linear does: output in autocast's dtype, gradients in the parameters' own."""
    torch.manual_seed(0)
    layer, x = Linear(48, 20, recipe=recipe), torch.randn(6, 48, requires_grad=True)
    plain = torch.nn.Linear(48, 20)
    plain.load_state_dict(layer.state_dict())
    results = []
    for module in (layer, plain):
        x.grad = None
        with torch.autocast("cpu", autocast_dtype):
            y = module(x)
        y.sum().backward()
        assert y.dtype == autocast_dtype
        assert module.weight.grad.dtype == module.bias.grad.dtype == x.grad.dtype == torch.float32
        results.append((y.detach(), x.grad, module.weight.grad, module.bias.grad))
    torch.testing.assert_close(results[0], results[1], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_gradients(use_reentrant: bool) -> None:
    """The forward runs again in the backward, on the same codes."""
    model = torch.nn.Sequential(
        Linear(32, 32, recipe=NVFP4), torch.nn.GELU(), Linear(32, 16, recipe=FP8)
    )
    x = torch.randn(4, 32, requires_grad=True)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    for i, p in enumerate(model.parameters()):
        assert_same_bytes(p.grad, expected[i], f"gradient {i}")


def test_no_dequantized_weight_is_kept_for_the_backward() -> None:
    """What autograd saves is the input alone, and that only where the weight needs a gradient."""
    saved: list[torch.Tensor] = []
    layer, x = Linear(64, 256, recipe=FP8), torch.randn(2, 64, requires_grad=True)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x)
        layer.weight.requires_grad_(False)
        layer(x)
    assert [tuple(t.shape) for t in saved] == [(2, 64)]


@pytest.mark.parametrize("recipe", [NVFP4])
def test_a_compiled_model_gives_the_eager_results(recipe: Recipe) -> None:
    """Without a graph break, also after a cast has changed the codes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        Linear(32, 48, recipe=recipe), torch.nn.ReLU(), Linear(48, 16, recipe=recipe)
    )
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 32)
    for _ in range(2):
        results = []
        for module in (model, compiled):
            model.zero_grad()
            y = module(x)
            y.square().sum().backward()
            results.append((y.detach(), [p.grad.clone() for p in model.parameters()]))
        torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            model[0].weight.copy_(torch.randn(48, 32))


@both_recipes
def test_a_layer_survives_deepcopy_and_to(recipe: Recipe) -> None:
    """The copy computes the same with bytes of its own; to(dtype) keeps it quantized."""
    layer, x = Linear(32, 16, recipe=recipe), torch.randn(4, 32)
    twin = copy.deepcopy(layer)
    assert_same_bytes(twin(x), layer(x), "output")
    assert twin.weight.quantized_storage is not layer.weight.quantized_storage
    twin.to(torch.bfloat16)
    assert isinstance(twin.weight, QuantizedTensor)
    assert twin(x.bfloat16()).dtype == torch.bfloat16
    layer.weight = torch.nn.Parameter(torch.ones(16, 32))
    assert (layer(torch.zeros(1, 32)) == layer.bias).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"in_features": 10, "recipe": NVFP4}, "multiple of 16 .* got K = 10"),
        ({"in_features": 16, "recipe": NVFP4, "dtype": torch.float64}, "got torch.float64"),
        ({"in_features": 16, "recipe": "nvfp5"}, "recipe must be a zerocast recipe"),
    ],
)
def test_what_cannot_be_quantized_is_refused(arguments: dict, message: str) -> None:
    """When the layer is made, with what is required."""
    with pytest.raises(InputError, match=message):
        Linear(**{"out_features": 8, **arguments})
