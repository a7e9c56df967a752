"""A recipe may be given by its short name, wherever one is taken."""

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch

import zerocast
from tests.support.same_bytes import assert_same_bytes
from zerocast.errors import InputError
from zerocast.recipes import (
    NAMED,
    RECIPES,
    QParams,
    Recipe,
    as_recipe,
    in_words,
    recipe_from_text,
    short_name,
)


@pytest.mark.parametrize("name", RECIPES)
def test_a_name_stands_for_the_scheme_with_its_defaults(name):
    """And a recipe for itself."""
    recipe = RECIPES[name]()
    assert as_recipe(name) == recipe
    assert as_recipe(recipe) is recipe


VARIANTS = [name for name in NAMED if name not in RECIPES]


def test_every_scheme_has_its_class_at_the_top():
    """``zerocast.NVFP4BlockScaling`` and so on, as README and docs write them."""
    assert {kind.__name__ for kind in RECIPES.values()} <= set(zerocast.__all__)


def test_variants_are_the_recipes_of_checkpoints():
    """FP8 is that of the dialects of these names. NVFP4 chooses between two scales, of which the
    largest is 256, by the mean absolute error; or has blocks of 1x16, to nearest.
    """
    for name in VARIANTS:
        assert (short_name(NAMED[name]), as_recipe(name)) == (name, NAMED[name])
        if name.startswith("fp8"):
            assert zerocast.export.DIALECTS[f"compressed-tensors/{name}"].recipe is NAMED[name]
    for name, block in {"nvfp4-4over6": (16, 16), "nvfp4-4over6-1x16": (1, 16)}.items():
        numerics = NAMED[name].numerics
        assert (numerics.scale_max, numerics.four_over_six) == (256, "mae")
        assert NAMED[name].block == block
    assert NAMED["nvfp4-1x16"].block == (1, 16)
    flat = NAMED["nvfp4-1x16"].numerics
    assert flat == zerocast.export.DIALECTS["compressed-tensors/nvfp4"].recipe.numerics
    assert short_name(zerocast.NVFP4BlockScaling()) == "NVFP4BlockScaling()"


@pytest.mark.parametrize("given", ["nvfp5", "", None, 4, ["nvfp4"], zerocast.NVFP4BlockScaling])
def test_an_unknown_name_is_answered_with_the_known_ones(given):
    """A class and other types, too; a misspelt name with the one that was meant."""
    near = " Did you mean 'nvfp4'?" if given == "nvfp5" else ""
    with pytest.raises(InputError) as raised:
        as_recipe(given)
    assert str(raised.value) == (
        f"recipe must be a zerocast recipe such as NVFP4BlockScaling(), or the name of one "
        f"('delayed', 'current', 'rowwise', 'block', 'mxfp8', 'mxfp4', 'nvfp4', 'nvfp4-4over6', "
        f"'nvfp4-1x16', 'nvfp4-4over6-1x16', 'fp8-tensor', 'fp8-channel', 'fp8-block'), "
        f"got {given!r}.{near}"
    )


def test_recipes_in_words():
    """What has a scale, and the format: schemes, and variants of them."""
    assert {name: in_words(recipe) for name, recipe in NAMED.items()} == {
        "delayed": "FP8, one scale a tensor, of earlier casts",
        "current": "FP8, one scale a tensor",
        "rowwise": "FP8, one scale a row",
        "block": "FP8, one scale a 128x128 block",
        "mxfp8": "MXFP8, one scale a 1x32 block",
        "mxfp4": "MXFP4, one scale a 1x32 block",
        "nvfp4": "NVFP4, one scale a 16x16 block",
        "nvfp4-4over6": "NVFP4, 4-over-6, one scale a 16x16 block",
        "nvfp4-1x16": "NVFP4, one scale a 1x16 block",
        "nvfp4-4over6-1x16": "NVFP4, 4-over-6, one scale a 1x16 block",
        "fp8-tensor": "FP8, one scale a tensor",
        "fp8-channel": "FP8, one scale a row",
        "fp8-block": "FP8, one scale a 128x128 block",
    }


def autocast_recipe(region) -> zerocast.Recipe | None:
    """The recipe that is active in ``region``."""
    with region:
        return zerocast.nn.regions.current().recipe


def made_by(region) -> zerocast.Recipe:
    """The recipe of a layer that is made in ``region``."""
    with region:
        return zerocast.nn.Linear(32, 32).weight.recipe


def converted(recipe) -> zerocast.Recipe:
    """The recipe of a converted layer."""
    layer = torch.nn.Linear(32, 32)
    zerocast.nn.convert(layer, recipe)
    return layer.weight.recipe


TAKERS = {
    "quantize": lambda r: zerocast.quantize(torch.ones(32, 32), r).recipe,
    "empty": lambda r: zerocast.empty((32, 32), r).recipe,
    "Quantizer": lambda r: zerocast.Quantizer(r).recipe,
    "RecipeState": lambda r: zerocast.RecipeState.create(r, "forward").recipe,
    "convert": converted,
    "Linear": lambda r: zerocast.nn.Linear(32, 32, recipe=r).weight.recipe,
    "LayerNormLinear": lambda r: zerocast.nn.LayerNormLinear(32, 32, recipe=r).weight.recipe,
    "LayerNormMLP": lambda r: zerocast.nn.LayerNormMLP(32, 32, recipe=r).fc2_weight.recipe,
    "explain": lambda r: zerocast.nn.explain(torch.nn.Linear(1, 1), r).recipe,
    "autocast": lambda r: autocast_recipe(zerocast.autocast(recipe=r)),
    "fp8_autocast": lambda r: autocast_recipe(zerocast.fp8_autocast(fp8_recipe=r)),
    "model_init": lambda r: made_by(zerocast.model_init(recipe=r)),
    "fp8_model_init": lambda r: made_by(zerocast.fp8_model_init(recipe=r)),
}


@pytest.mark.parametrize("taker", TAKERS)
def test_a_recipe_is_taken_by_name(taker):
    """Every public call that takes a recipe takes its name, and refuses an unknown one."""
    assert TAKERS[taker]("mxfp8") == zerocast.MXFP8BlockScaling()
    with pytest.raises(InputError, match="'mxfp4', 'nvfp4'.*, got 'nvfp5'"):
        TAKERS[taker]("nvfp5")


def test_a_name_gives_the_bytes_of_its_recipe():
    """Codes and scales of a quantized tensor."""
    x = torch.randn(32, 48)
    by_name, given = zerocast.quantize(x, "nvfp4"), zerocast.quantize(x, RECIPES["nvfp4"]())
    for name, buffer in given.quantized_storage.buffers.items():
        assert_same_bytes(by_name.quantized_storage.buffers[name], buffer, name)


MADE = {
    "ConversionReport", "Explanation", "LowBitAllGather", "ParameterCoverage", "ParameterGather",
    "ProductExplanation", "RecipeState",
}  # fmt: skip
"""Classes whose instances a public call makes, with the recipe that it was given."""


def parts_of(annotation: Any) -> Iterator[Any]:
    """The classes that an annotation names, at any depth."""
    yield annotation
    for each in get_args(annotation):
        yield from parts_of(each)


def takers() -> Iterator[tuple[str, list[Any]]]:
    """The functions, and the constructors of classes, that users are told of and that take recipes,
    and the classes that each parameter for one may have. Annotations may be texts or aliases.
    """
    for package in (zerocast, zerocast.nn, zerocast.sharded, zerocast.optim):
        for name in package.__all__:
            value = getattr(package, name)
            if not (inspect.isfunction(value) or inspect.isclass(value)):
                continue
            call = inspect.unwrap(value if inspect.isfunction(value) else value.__init__)
            for parameter in inspect.signature(call).parameters.values():
                annotation = parameter.annotation
                if isinstance(annotation, str) and "Recipe" in annotation:
                    annotation = eval(annotation, call.__globals__)
                kinds = [*parts_of(annotation)]
                if Recipe in kinds:
                    yield name, kinds


def test_no_public_call_takes_a_recipe_and_no_name():
    """Wherever a parameter is annotated as a Recipe, it may be a string, too. All that are tried
    above are found.
    """
    found = [(name, kinds) for name, kinds in takers() if name not in MADE]
    assert {name for name, _ in found} >= TAKERS.keys() - MADE
    assert [name for name, kinds in found if str not in kinds] == []


@pytest.mark.parametrize("kind", RECIPES.values())
def test_a_recipe_is_made_from_its_text(kind):
    """By default and with other fields, those that are objects included."""
    params = QParams(amax_epsilon=0.5)
    for fields in (
        {},
        {"round_master": False},
        {"fp8_quant_bwd_grad": params, "fp8_format": "e5m2"},
    ):
        if fields.keys() <= {field.name for field in dataclasses.fields(kind)}:
            recipe = kind(**fields)
            assert recipe_from_text(recipe.text) == recipe
