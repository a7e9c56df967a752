"""What recipes remember, as one tensor of bytes, and what layers save of it."""

import copy
import functools

import pytest
import torch

import zerocast
from tests.support.claims import assert_same_tensors
from tests.support.layers import step
from tests.support.recipes import VARIANTS
from tests.support.same_bytes import assert_same_bytes
from tests.support.weights import through_a_file
from zerocast.nn.saved_state import pack, unpack
from zerocast.recipes import recipe_to_values

DELAYED = zerocast.DelayedScaling(fp8_format="hybrid", amax_history_len=4)


def assert_plain(values) -> None:
    """Nothing but dictionaries, numbers and strings."""
    for value in values.values():
        if isinstance(value, dict):
            assert_plain(value)
        else:
            assert isinstance(value, int | float | str)


def test_recipes_are_told_apart_by_plain_values():
    """Those of two recipes are equal where the recipes are."""
    recipes = [recipe for name, recipe in VARIANTS.items() if name != "delayed-function"]
    values = [recipe_to_values(recipe) for recipe in recipes]
    for recipe, given in zip(recipes, values, strict=True):
        assert_plain(given)
        assert values.count(given) == recipes.count(recipe)


def test_tensors_come_back_from_bytes():
    """With their names, dtypes and shapes, bit for bit, whatever the length of the header."""
    tensors = {
        "scale": torch.tensor([float("nan"), -0.0, 1e-45]),
        "amaxes": torch.arange(6, dtype=torch.int32).reshape(2, 3),
        "rounding_counter": torch.tensor([-(2**62), 3]),
    }
    for i in range(8):
        packed = pack({"of": "x" * i}, tensors)
        assert packed.dtype == torch.uint8
        owner, again = unpack(packed, "up")
        assert owner == {"of": "x" * i}
        assert again.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert_same_bytes(again[name], tensor, name)


PACKED = pack({}, {"scale": torch.ones(3)})


@pytest.mark.parametrize(
    "given",
    [
        PACKED[:-1],
        torch.cat([PACKED, PACKED[:1]]),
        PACKED[:4],
        torch.full((40,), 255, dtype=torch.uint8),
        torch.zeros(8, dtype=torch.uint8),
        PACKED.to("meta"),
        PACKED.float(),
        PACKED[None],
        pack({}, {}).index_fill(0, torch.tensor([10]), 0),
        {"recipe": "nvfp4"},
    ],
    ids=str,
)
def test_what_is_no_state_is_refused(given):
    """A damaged tensor, one of another kind, and a dictionary: nothing is read beyond its end."""
    with pytest.raises(zerocast.InputError, match="state of up must be the tensor of bytes .*got"):
        unpack(given, "up")


def trained(recipe, layer=None, steps=1) -> zerocast.nn.Linear:
    """A layer that ran under autocast."""
    layer = layer or zerocast.nn.Linear(32, 32, bias=False)
    for i in range(steps):
        with zerocast.autocast(recipe=recipe):
            layer(torch.full((32, 32), 1.0 + i)).sum().backward()
    return layer


@pytest.mark.parametrize("own", [None, torch.amax, functools.partial(torch.amax, dim=0)])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_a_layer_goes_on_from_a_tensor(kind, own):
    """A layer's state dict holds plain tensors only; one that loads it from a file read with
    weights_only=True has the same state, and goes on bit for bit, with a recipe of a function of
    the user's, too.
    """
    recipe = DELAYED if own is None else zerocast.DelayedScaling(amax_compute_algo=own)
    layer, loaded = (getattr(zerocast.nn, kind)(32, 32) for _ in range(2))
    trained(recipe, layer, steps=2)
    state = layer.state_dict()
    assert all(type(tensor) is torch.Tensor for tensor in state.values())
    loaded.load_state_dict(through_a_file(state))
    for one in (loaded, copy.deepcopy(loaded)):
        assert_same_bytes(one.state_dict()["_extra_state"], state["_extra_state"], "loaded")
    x, states = torch.randn(6, 32, requires_grad=True), []
    for i in range(2):
        outputs = []
        for one in (loaded, layer):
            outputs.append(step(one, x, recipe))
            states.append(one.get_extra_state())
        assert_same_tensors(*outputs, f"after {i + 1} steps")
    assert_same_bytes(states[0], states[1], "after a step")


def test_a_state_survives_a_change_of_dtype():
    """It is bytes: ``layer.half()`` and ``state.to(bfloat16)`` of floating tensors pass it over."""
    layer = trained(DELAYED)
    before = layer.state_dict()["_extra_state"]
    assert_same_bytes(layer.bfloat16().state_dict()["_extra_state"], before, "bfloat16")


def test_a_forward_under_another_recipe_starts_anew():
    """What was saved under another recipe is not taken for its own."""
    layer, fresh = zerocast.nn.Linear(32, 32, bias=False), zerocast.nn.Linear(32, 32, bias=False)
    layer.load_state_dict(trained(DELAYED).state_dict())
    fresh.load_state_dict({"weight": layer.weight})
    longer = zerocast.DelayedScaling(amax_history_len=8)
    assert_same_bytes(
        trained(longer, layer).state_dict()["_extra_state"],
        trained(longer, fresh).state_dict()["_extra_state"],
        "another recipe",
    )


def test_the_state_of_another_kind_of_layer_is_refused():
    """Two products are not one."""
    state = trained(DELAYED).state_dict()["_extra_state"]
    mlp = zerocast.nn.LayerNormMLP(32, 32, name="mlp")
    with pytest.raises(zerocast.InputError) as raised:
        mlp.set_extra_state(state)
    assert str(raised.value) == (
        "the recipe state of mlp must be that of a LayerNormMLP, of 2 products, got one of "
        "1; take its '_extra_state' out of the state dict to start without it."
    )
