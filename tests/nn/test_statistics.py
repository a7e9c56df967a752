"""statistics counts what quantization loses; explain says who computes what."""

import pytest
import torch

from tests.support.layers import RECIPES, every_recipe
from zerocast import nn
from zerocast.nn.autocast import autocast, get_default_recipe
from zerocast.numerics import E2M1, E4M3, E5M2
from zerocast.recipes import DelayedScaling, Float8CurrentScaling, Format, NVFP4BlockScaling

E4M3_ONLY = DelayedScaling(fp8_format=Format.E4M3)


def counts(x: torch.Tensor, recipe: DelayedScaling = E4M3_ONLY) -> nn.Counts:
    """Of an input under a scale of 1, which delayed scaling starts with."""
    layer = nn.Linear(x.shape[-1], 16)
    with nn.statistics(layer) as counted, autocast(recipe=recipe):
        layer(x)
    return counted.layers[""]["input"]


def test_the_ends_of_e4m3():
    """Half a step above 448 is 464, a tie that rounds down to it: saturated is what lies above.
    Half the smallest, 2^-10, is a tie that rounds to zero; zeros themselves do not count.
    """
    row = [0.0, -0.0, 2**-10, -(2**-10), 2**-10 + 2**-20, 2**-30, 448, 464, 464.5, -465, 1e6, 1]
    counted = counts(torch.tensor([row + [1.0] * 4]))
    assert counted == nn.Counts(elements=16, underflowed=3, saturated=3)
    assert str(counted) == "16 elements, 3 underflowed, 3 saturated"


def test_the_upper_end_of_e5m2():
    """57344 and half a step: 61440."""
    x = torch.tensor([[57344, 61440, 61441, -62000, *[1.0] * 12]])
    assert counts(x, DelayedScaling(fp8_format=Format.E5M2)).saturated == 2


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1], ids=lambda f: f.name)
def test_rounding_ends_half_a_step_above_the_largest(fmt):
    """464, 61440 and 7."""
    from zerocast.nn.statistics import _saturation_bound

    bounds = {"e4m3": 464, "e5m2": 61440, "e2m1": 7}
    assert _saturation_bound(fmt) * fmt.max == pytest.approx(bounds[fmt.name])


@every_recipe
def test_every_role_of_every_layer_is_counted(recipe):
    """Inputs, weights in high precision and gradients, forward and a later backward; by name."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(nn.LayerNormMLP(32, 64), nn.Linear(32, 32, recipe=RECIPES["block"]))
    x = torch.randn(6, 32) * torch.exp(3 * torch.randn(6, 32))
    with nn.statistics(model) as counted, autocast(recipe=recipe):
        y = model(x)
    model(x)  # not counted
    y.sum().backward()
    sizes = {
        name: {role: c.elements for role, c in roles.items()}
        for name, roles in counted.layers.items()
    }
    assert sizes == {
        "0, product 0": {"input": 6 * 32, "weight": 64 * 32, "grad_output": 6 * 64},
        "0, product 1": {"input": 6 * 64, "weight": 32 * 64, "grad_output": 6 * 32},
        "1": {"input": 6 * 32, "grad_output": 6 * 32},
    }
    assert "0, product 0, weight: 2048 elements" in str(counted)


@every_recipe
def test_scales_from_the_data_saturate_nothing(recipe):
    """Whatever the range; a scale that a block shares lets small elements underflow."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 32)
    width = 2 if isinstance(recipe, NVFP4BlockScaling) else 8  # its scales have a range, too
    x = torch.randn(40, 64) * torch.exp(width * torch.randn(40, 64))
    with nn.statistics(layer) as counted, autocast(recipe=recipe):
        layer(x)
    found = counted.layers[""]["input"]
    assert found.underflowed > 0
    if not isinstance(recipe, DelayedScaling):
        assert found.saturated == 0


def test_counting_changes_no_result():
    """Neither outputs nor gradients."""
    torch.manual_seed(0)
    layer, x = nn.LayerNormMLP(32, 64), torch.randn(6, 32, requires_grad=True)
    results = []
    for model in (layer, torch.nn.Identity()):
        x.grad = None
        with nn.statistics(model), autocast(recipe=Float8CurrentScaling()):
            y = layer(x)
        y.sum().backward()
        results.append((y, x.grad))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


# --- explain ---


def test_explain_names_every_product_and_its_reason():
    """On a CPU every product is decoded; other modules are not mentioned."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), nn.LayerNormMLP(32, 64), nn.Linear(32, 16))
    found = nn.explain(model, RECIPES["mxfp8"])
    layers = ["1.fc1_weight", "1.fc2_weight", "2"]
    products = ["output", "input gradient", "weight gradient"]
    assert [(p.layer, p.product) for p in found.products] == [
        (layer, product) for layer in layers for product in products
    ]
    assert {p.engine for p in found.products} == {"decoded"}
    lines = str(found).splitlines()
    assert lines[1].startswith(
        "  1.{fc1_weight,fc2_weight}, output: decoded operands: torch has no"
    )
    assert (
        "under autocast it would be refused: its out_features, 16, must be a multiple of 32"
        in lines[-1]
    )
    with autocast(recipe=Float8CurrentScaling()):
        assert nn.explain(model[2]).recipe == Float8CurrentScaling()
        assert "  (the model itself), output" in str(nn.explain(model[2]))


def test_explain_without_a_region_takes_the_recipe_of_each_weight():
    """Held or gathered in codes; of others autocast's default. The text says that no autocast is
    active, and inside of one that does not stand there.
    """
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
    ways = {"nvfp4": "quantized", "mxfp8": "master", "current": "high_precision"}
    for layer, (recipe, weights) in zip(model, ways.items(), strict=True):
        nn.convert(layer, RECIPES[recipe], weights=weights)
    found = nn.explain(model)
    expected = [RECIPES["nvfp4"], RECIPES["mxfp8"], get_default_recipe()]
    assert [p.recipe for p in found.products[::3]] == expected
    assert found.recipe is None
    head = str(found).splitlines()[0]
    assert f"{expected[0]} and {expected[1]} and {expected[2]} (no autocast is active" in head
    for told in (nn.explain(model[0], "mxfp8"), nn.explain(torch.nn.Linear(8, 8), "mxfp8")):
        assert "no autocast" not in str(told)
    with autocast(recipe=RECIPES["mxfp8"]):
        inside = nn.explain(model)
    assert {p.recipe for p in inside.products} == {inside.recipe} == {RECIPES["mxfp8"]}
    assert "no autocast" not in str(inside)


def test_explain_says_which_call_a_gpu_makes(monkeypatch):
    """Hopper multiplies FP8 and not FP4; a weight without its columnwise copy is decoded."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "H200")
    layer = nn.Linear(128, 64, dtype=torch.bfloat16)
    current = nn.explain(layer, Float8CurrentScaling(), device="cuda")
    assert [p.engine for p in current.products] == ["library"] * 3
    assert str(current).splitlines()[1].endswith("output: torch._scaled_mm, tensorwise")
    nvfp4 = nn.explain(layer, NVFP4BlockScaling(), device="cuda")
    assert "needs compute capability" in str(nvfp4).replace("need ", "needs ")
    bare = nn.Linear(128, 64, recipe=Float8CurrentScaling(), columnwise=False)
    found = nn.explain(bare, Float8CurrentScaling(), device="cuda", tokens=40)
    assert [p.engine for p in found.products] == ["library", "decoded", "decoded"]
    assert "made with columnwise=False" in found.products[1].reason
    assert "a contraction of a multiple of 16" in found.products[2].reason
