"""A model that is built on the meta device and filled later has the weights of one built whole."""

import pytest
import torch

import zerocast
from tests.support.layers import RECIPES
from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from zerocast import nn
from zerocast.errors import InputError
from zerocast.recipes import Recipe

pytestmark = pytest.mark.own_defaults

ROUNDED = zerocast.NVFP4BlockScaling(
    fp4_quant_fwd_weight=zerocast.recipes.QParams(stochastic_rounding=True)
)


def plain() -> torch.nn.Sequential:
    """Always the same."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))


def converted(recipe: Recipe, weights: str) -> torch.nn.Module:
    """Of layers that are made first."""
    model = plain()
    nn.convert(model, recipe, weights=weights)  # type: ignore[arg-type]
    return model


def initialized(recipe: Recipe, weights: str) -> torch.nn.Module:
    """Made with quantized weights."""
    with zerocast.model_init(recipe=recipe, preserve_high_precision_init_val=True):
        return torch.nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))


def emptied(model: torch.nn.Module) -> None:
    """Torch's way to fill a model."""
    model.to_empty(device="cpu")
    model.load_state_dict(plain().state_dict())


def assigned(model: torch.nn.Module) -> None:
    """Its other way."""
    model.load_state_dict(plain().state_dict(), assign=True)


def reset(model: torch.nn.Module) -> None:
    """As plain layers start."""
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for layer in model:
        layer.reset_parameters()


@pytest.mark.parametrize("fill", [emptied, assigned, reset])
@pytest.mark.parametrize(
    ("build", "weights"),
    [(converted, "quantized"), (converted, "master"), (initialized, "quantized")],
)
@pytest.mark.parametrize("recipe", ["nvfp4", "delayed", "block"])
def test_a_model_filled_later(fill, build, weights, recipe):
    """Codes, masters and initial values are those of a model that was never on meta."""
    wanted = converted(RECIPES[recipe], weights)
    with torch.device("meta"):
        model = build(RECIPES[recipe], weights)
    assert all(p.is_meta for p in model.parameters())
    fill(model)
    for actual, expected in zip(model.parameters(), wanted.parameters(), strict=True):
        assert type(actual) is type(expected)
        if isinstance(expected, zerocast.QuantizedTensor):
            assert_same_storage(actual, expected, "weight")
            initial = actual.get_high_precision_init_val()
            assert_same_bytes(initial, expected.get_high_precision_init_val(), "initial value")
        else:
            assert_same_bytes(actual.detach(), expected.detach(), "parameter")


def test_random_words_are_those_of_the_weights_name():
    """Under stochastic rounding, too."""
    wanted = converted(ROUNDED, "quantized")
    with torch.device("meta"):
        model = converted(ROUNDED, "quantized")
    emptied(model)
    for actual, expected in zip(model, wanted, strict=True):
        assert_same_storage(actual.weight, expected.weight, "weight")


@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
@pytest.mark.parametrize("recipe", ["nvfp4", "block"])
def test_shapes_flow_on_meta(weights, recipe):
    """Forward and backward, as torch's layers do it; in a region of autocast, too."""
    with torch.device("meta"):
        model = converted(RECIPES[recipe], weights)
        x = torch.randn(32, 32, requires_grad=True)
    for enabled in (False, True):
        with zerocast.autocast(enabled=enabled, recipe=RECIPES[recipe]):
            y = model(x)
        y.sum().backward()
        assert y.is_meta
        assert x.grad is not None


def test_masters_do_not_start_on_meta():
    """The optimizer says what to do first."""
    model = converted(RECIPES["nvfp4"], "quantized").to("meta")
    with pytest.raises(InputError, match="to_empty"):
        zerocast.optim.ZeroOptimizer(model.named_parameters(), torch.optim.AdamW, lr=1.0)


def test_assigning_keeps_the_parameter():
    """``load_state_dict(assign=True)`` fills the weight that plans and optimizers know."""
    model, value = converted(RECIPES["block"], "quantized"), plain().state_dict()
    weight = model[0].weight
    value["0.weight"] *= 2
    model.load_state_dict(value, assign=True)
    assert model[0].weight is weight
    wanted = zerocast.quantize(value["0.weight"], weight.recipe, name="0.weight")
    assert_same_storage(weight, wanted, "weight")


def test_a_class_that_is_called_as_a_parameter_is_refused():
    """As accelerate's init_empty_weights calls it."""
    weight = converted(RECIPES["block"], "quantized")[0].weight
    with pytest.raises(zerocast.UnsupportedError, match=r"zerocast\.nn\.convert afterwards"):
        type(weight)(weight.to("meta"), requires_grad=True)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_tied_embedding_in_codes_stays_tied_when_emptied(device):
    """Both modules hold one weight, unfilled, wherever it was before."""
    model = torch.nn.ModuleDict(
        {
            "embedding": torch.nn.Embedding(64, 32, device=device),
            "head": torch.nn.Linear(32, 64, bias=False, device=device),
        }
    )
    model["head"].weight = model["embedding"].weight
    zerocast.nn.convert(model, "mxfp8", weights="quantized", include=["embedding"])
    model.to_empty(device="cpu")
    weight = model["head"].weight
    assert weight is model["embedding"].weight
    assert isinstance(weight, zerocast.QuantizedTensor)
    assert weight.device.type == "cpu"
