"""Recipes as plain values, and what layers save of them."""

import io

import pytest
import torch

import zerocast
from tests.cast.test_first_law import RECIPES
from zerocast.nn.saved_recipe import recipe_from_values, recipe_to_values


def assert_plain(values) -> None:
    """Nothing but dictionaries, numbers and strings."""
    for value in values.values():
        if isinstance(value, dict):
            assert_plain(value)
        else:
            assert isinstance(value, int | float | str)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_every_recipe_comes_back(recipe):
    """A recipe equals the one made from its values, which are plain."""
    values = recipe_to_values(recipe)
    assert_plain(values)
    assert recipe_from_values(values) == recipe


def test_a_layer_saves_plain_values_beside_tensors():
    """The state of a layer that ran under autocast is saved and loaded with ``weights_only``, and
    the loaded layer goes on with the same scales.
    """
    recipe = zerocast.DelayedScaling(fp8_format="hybrid", amax_history_len=4)
    layer, loaded = (zerocast.nn.Linear(32, 32, bias=False) for _ in range(2))
    with zerocast.autocast(recipe=recipe):
        layer(torch.ones(32, 32)).sum().backward()
    state = layer.state_dict()
    assert_plain(state["_extra_state"]["recipe"])
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    again = loaded.state_dict()["_extra_state"]
    assert again["recipe"] == state["_extra_state"]["recipe"]
    for mode in ("forward", "backward"):
        for key, tensor in state["_extra_state"][mode].items():
            assert torch.equal(again[mode][key], tensor), (mode, key)


def test_a_recipe_of_another_name_is_refused():
    """What names no class of zerocast's is an error that says what to do."""
    values = recipe_to_values(zerocast.NVFP4BlockScaling()) | {"class": "NVFP2BlockScaling"}
    with pytest.raises(zerocast.InputError) as raised:
        recipe_from_values(values)
    names = {type(recipe).__name__ for recipe in RECIPES}
    assert str(raised.value) == (
        f"a saved layer must name one of the recipes {sorted(names)}, got "
        f"'NVFP2BlockScaling'; take its '_extra_state' out of the state dict to start anew."
    )


def test_a_function_of_the_users_stays_what_it_is():
    """A recipe with an own function of the history comes back with the same function."""
    recipe = zerocast.DelayedScaling(amax_compute_algo=torch.amax)
    loaded = recipe_from_values(recipe_to_values(recipe))
    assert isinstance(loaded, zerocast.DelayedScaling)
    assert loaded.amax_compute_algo is torch.amax
