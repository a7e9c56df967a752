"""The fields of recipes: TransformerEngine's names, what they decide, and what is refused."""

from dataclasses import fields
from functools import partial

import pytest

from tests.support.claims import message_of
from zerocast.errors import InputError, UnsupportedError
from zerocast.layout import Source
from zerocast.numerics import (
    E2M1,
    E4M3,
    E5M2,
    Float8DelayedNumerics,
    Float8Numerics,
    MXNumerics,
    NVFP4Numerics,
)
from zerocast.recipes import (
    RECIPES,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
)

FLOAT8 = (Float8CurrentScaling, Float8BlockScaling, Float8RowwiseScaling)
WITH_FORMAT = (*FLOAT8, DelayedScaling, MXFP8BlockScaling)


# --- formats ---


@pytest.mark.parametrize("kind", WITH_FORMAT)
@pytest.mark.parametrize("name", ["HYBRID", "hybrid", Format.HYBRID])
def test_a_format_is_a_member_or_its_name(kind, name):
    """In either case; the recipe holds the member."""
    assert kind(fp8_format=name).fp8_format is Format.HYBRID


@pytest.mark.parametrize("kind", WITH_FORMAT)
@pytest.mark.parametrize(
    ("fmt", "forward", "backward"),
    [(Format.E4M3, E4M3, E4M3), (Format.HYBRID, E4M3, E5M2), (Format.E5M2, E5M2, E5M2)],
)
def test_the_format_of_each_role(kind, fmt, forward, backward):
    """HYBRID is E4M3 forward and E5M2 backward."""
    recipe = kind(fp8_format=fmt)
    assert recipe.numerics.fmt is forward
    for role in ("input", "weight", "output"):
        assert recipe.for_role(role).numerics.fmt is forward, role
    for role in ("grad_output", "grad_input"):
        assert recipe.for_role(role).numerics.fmt is backward, role


# --- the parameters of a tensor ---


@pytest.mark.parametrize("kind", FLOAT8)
def test_each_role_has_parameters_of_its_own(kind):
    """Inputs and outputs by fp8_quant_fwd_inp, weights and gradients by theirs."""
    recipe = kind(
        fp8_format="e4m3",
        fp8_quant_fwd_inp=QParams(power_2_scale=True, amax_epsilon=0.25),
        fp8_quant_fwd_weight=QParams(amax_epsilon=0.5),
        fp8_quant_bwd_grad=QParams(power_2_scale=True),
    )
    expected = {
        "input": Float8Numerics(E4M3, True, 0.25), "output": Float8Numerics(E4M3, True, 0.25),
        "weight": Float8Numerics(E4M3, False, 0.5),
        "grad_output": Float8Numerics(E4M3, True), "grad_input": Float8Numerics(E4M3, True),
    }  # fmt: skip
    assert {role: recipe.for_role(role).numerics for role in expected} == expected
    assert recipe.for_role("weight") is recipe


def test_the_default_laws():
    """As TransformerEngine's: powers of two in blocks only, HYBRID where a tensor has one scale."""
    assert (
        Float8CurrentScaling().numerics == Float8RowwiseScaling().numerics == Float8Numerics(E4M3)
    )
    assert Float8BlockScaling().numerics == Float8Numerics(E4M3, power_2_scale=True)
    assert DelayedScaling().numerics == Float8DelayedNumerics(E4M3, 0, "max")
    assert DelayedScaling().amax_history_len == 1024
    assert MXFP8BlockScaling().numerics == MXNumerics(E4M3)
    assert MXFP4BlockScaling().numerics == MXNumerics(E2M1, "up")
    assert NVFP4BlockScaling().numerics == NVFP4Numerics()
    gradients = {
        name: kind().for_role("grad_output").numerics.fmt.name for name, kind in RECIPES.items()
    }
    assert gradients == {"delayed": "e5m2", "current": "e5m2", "rowwise": "e4m3", "block": "e4m3",
                         "mxfp8": "e4m3", "mxfp4": "e2m1", "nvfp4": "e2m1"}  # fmt: skip


def test_one_switch_for_all_tensors():
    """use_power_2_scales and use_f32_scales go before what the tensors' own parameters say."""
    for role in ("input", "weight", "grad_output"):
        assert Float8CurrentScaling(use_power_2_scales=True).for_role(role).numerics.power_2_scale
        assert not Float8BlockScaling(use_f32_scales=True).for_role(role).numerics.power_2_scale


# --- blocks ---


def test_the_dimension_of_float8_blocks_by_role():
    """1-D activations and gradients, 2-D weights; each can be chosen."""
    roles = ("input", "output", "weight", "grad_output", "grad_input")
    cast, derived = Source.TRANSPOSED_MASTER, Source.ROWWISE
    other = Float8BlockScaling(
        x_block_scaling_dim=2, w_block_scaling_dim=1, grad_block_scaling_dim=2
    )
    for recipe, activations, weights in (
        (Float8BlockScaling(), cast, derived), (other, derived, cast),
    ):  # fmt: skip
        sources = [recipe.for_role(role).columnwise_source for role in roles]
        assert sources == [activations, activations, weights, activations, activations]


def test_2d_mxfp4_is_for_weights():
    """Whose other copy is then derived; activations and gradients keep blocks of one dimension, and
    the rounding of scales is everyone's.
    """
    recipe = MXFP4BlockScaling(enable_2d_quantization=True, scale_rounding="even")
    assert recipe.columnwise_source is Source.ROWWISE
    for role in ("input", "output", "grad_output", "grad_input"):
        assert recipe.for_role(role) == MXFP4BlockScaling(scale_rounding="even"), role


def test_2d_mxfp8_is_for_weights():
    """Activations and gradients keep blocks of one dimension, and HYBRID its two formats."""
    recipe = MXFP8BlockScaling(enable_2d_quantization=True, fp8_format="hybrid")
    assert recipe.for_role("weight").columnwise_source is Source.SHARED
    for role in ("input", "output", "grad_output", "grad_input"):
        assert recipe.for_role(role).columnwise_source is Source.MASTER, role
    assert recipe.for_role("grad_input").numerics == MXNumerics(E5M2)


# --- delayed scaling ---


def test_the_fields_of_delayed_scaling_reach_its_numerics():
    """Margin and algorithm, a function too; the history's length is that of the buffer."""

    def mean(history):
        return history.mean()

    recipe = DelayedScaling(margin=2, amax_history_len=3, amax_compute_algo=mean, fp8_format="E5M2")
    assert recipe.numerics == Float8DelayedNumerics(E5M2, 2, mean)
    assert recipe.buffers((4,), columnwise=False)["amax_history"].shape == (3,)
    assert (
        DelayedScaling(amax_compute_algo="most_recent").numerics.amax_compute_algo == "most_recent"
    )


# --- NVFP4's options ---


def test_four_over_six_is_for_weights():
    """Other roles are rounded as without it, and weights keep their maximum and error."""
    recipe = NVFP4BlockScaling(nvfp4_4over6="weights")
    assert recipe.numerics == NVFP4Numerics(scale_max=256, four_over_six="mae")
    assert recipe.chooses_scales
    for role in ("input", "output", "grad_output", "grad_input"):
        other = recipe.for_role(role)
        assert not other.chooses_scales
        assert other.numerics == NVFP4BlockScaling().for_role(role).numerics


@pytest.mark.parametrize(
    ("use_256", "scale_max"), [("all", 256), ("weights", 256), ("activations", 448), ("none", 448)]
)
@pytest.mark.parametrize("mode", ["MAE", "MSE", "mse"])
def test_the_maximum_and_the_error_of_four_over_six(use_256, scale_max, mode):
    """TransformerEngine's fields: 256 unless told otherwise; without 4-over-6 always 448."""
    fields = {"nvfp4_4over6_e4m3_use_256": use_256, "nvfp4_4over6_err_mode": mode}
    numerics = NVFP4BlockScaling(nvfp4_4over6="weights", **fields).numerics
    assert numerics == NVFP4Numerics(scale_max=scale_max, four_over_six=mode.lower())
    assert NVFP4BlockScaling(**fields).numerics == NVFP4Numerics()


def test_stochastic_rounding_is_for_gradients_unless_weights_ask():
    """As TransformerEngine has it; the seed belongs to the numerics of what is drawn."""
    drawn = NVFP4Numerics(stochastic_rounding=True, seed=7)
    recipe = NVFP4BlockScaling(seed=7)
    roles = ("input", "weight", "output", "grad_output", "grad_input")
    nearest = NVFP4Numerics()
    numerics_types = [recipe.for_role(role).numerics for role in roles]
    assert numerics_types == [nearest, nearest, nearest, drawn, drawn]
    weights = QParams(stochastic_rounding=True, fp4_2d_quantization=True)
    assert NVFP4BlockScaling(seed=7, fp4_quant_fwd_weight=weights).numerics == drawn
    disabled = NVFP4BlockScaling(
        seed=7, fp4_quant_fwd_weight=weights, disable_stochastic_rounding=True
    )
    assert {disabled.for_role(role).numerics for role in roles} == {nearest}
    assert disabled.state == ()


def test_the_blocks_of_nvfp4_by_role():
    """16x16 for weights, 1x16 for the others, or for all."""
    roles = ("input", "weight", "grad_output")
    recipe, one_dimension = NVFP4BlockScaling(), NVFP4BlockScaling(disable_2d_quantization=True)
    assert [recipe.for_role(r).block for r in roles] == [(1, 16), (16, 16), (1, 16)]
    assert [one_dimension.for_role(r).block for r in roles] == [(1, 16)] * 3


# --- what cannot be meant ---

RHT = (
    "the random Hadamard transform is not available, got {}: it applies to activations and "
    "gradients of NVFP4 training, never to weights; leave it disabled (disable_rht=True)."
)
OF_NO_USE = "which this recipe does not know; leave it out."
REFUSED = [
    (InputError, Float8CurrentScaling, "fp8_format", ("e3m4", "", 4, None, E4M3),
     "fp8_format must be one of ['e4m3', 'e5m2', 'hybrid'], got {!r}."),
    (InputError, QParams, "amax_epsilon", (-1.0, float("nan"), float("inf"), 1e39),  # in FP32
     "amax_epsilon must be finite in FP32 and not negative, got {}; 0 keeps every amax as it is."),
    # An option that would do nothing is an error.
    *((InputError, kind, "fp8_quant_fwd_inp", [QParams(stochastic_rounding=True)],
       f"fp8_quant_fwd_inp takes power_2_scale and amax_epsilon and scale_formula, got "
       f"stochastic_rounding=True, {OF_NO_USE}") for kind in FLOAT8),
    *((InputError, kind, "fp8_quant_bwd_grad", [{"power_2_scale": True}],
       "fp8_quant_bwd_grad must be a zerocast.recipes.QParams, got {}.") for kind in FLOAT8),
    (InputError, NVFP4BlockScaling, "fp4_quant_fwd_weight", [QParams(power_2_scale=True)],
     f"fp4_quant_fwd_weight takes stochastic_rounding and fp4_2d_quantization, got "
     f"power_2_scale=True, {OF_NO_USE}"),
    *((InputError, Float8BlockScaling, f"{name}_block_scaling_dim", (0, 3, "1", None),
       f"{name}_block_scaling_dim must be 1 (1x128) or 2 (128x128), got {{!r}}.")
      for name in ("x", "w", "grad")),
    (InputError, DelayedScaling, "margin", (101, 0.5),
     "margin must be an integer from -100 to 100, got {}."),
    (InputError, DelayedScaling, "amax_history_len", [0],
     f"amax_history_len must be an integer from 1 to {2**31 - 1}, got {{}}."),
    (InputError, DelayedScaling, "amax_compute_algo", ["mean"],
     "amax_compute_algo must be 'max', 'most_recent' or a function of the amax history, got {!r}."),
    # The random Hadamard transform belongs to activations and gradients.
    (UnsupportedError, QParams, "random_hadamard_transform", [True],
     RHT.format("QParams(random_hadamard_transform={})")),
    (UnsupportedError, NVFP4BlockScaling, "disable_rht", [False],
     RHT.format("NVFP4BlockScaling(disable_rht={})")),
    # 4-over-6 would take a second pass over every activation.
    (UnsupportedError, NVFP4BlockScaling, "nvfp4_4over6", ("activations", "all"),
     "4-over-6 is for weights: it reads the tensor once more, got nvfp4_4over6={!r}; choose "
     "'weights' or 'none'."),
    (InputError, NVFP4BlockScaling, "nvfp4_4over6", ["yes"],
     "nvfp4_4over6 must be 'none', 'weights', 'activations' or 'all', got {!r}."),
    (InputError, NVFP4BlockScaling, "nvfp4_4over6_err_mode", ["max"],
     "nvfp4_4over6_err_mode must be 'MAE' or 'MSE', got {!r}."),
    (InputError, QParams, "scale_formula", ["amax / 448"],
     "scale_formula must be 'reciprocal', 'quotient' or 'inverse first', got {!r}."),
    (InputError, partial(Float8CurrentScaling, use_power_2_scales=True), "fp8_quant_fwd_weight",
     [QParams(scale_formula="quotient")],
     "scales that are powers of two have one formula, got scale_formula='quotient' for "
     "Float8CurrentScaling; leave one of them out."),
    (InputError, MXFP4BlockScaling, "scale_rounding", ("down", "UP"),
     "scale_rounding must be 'up', 'floor' or 'even', got {!r}."),
    (InputError, NVFP4BlockScaling, "seed", (-1, 2**64),
     f"seed must be an integer from 0 to {2**64 - 1}, got {{}}."),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "kind", "field", "given", "message"),
    [(*case, given, message) for *case, values, message in REFUSED for given in values],
)
def test_what_a_field_cannot_mean_is_refused(error, kind, field, given, message):
    """When the recipe is made, not at the first cast."""
    assert message_of(error, kind, **{field: given}) == message.format(given)


# --- what TransformerEngine's users pass ---

FIXED = [(kind, f) for kind in RECIPES.values() for f in fields(kind) if "reason" in f.metadata]


@pytest.mark.parametrize(
    ("kind", "field"), FIXED, ids=[f"{kind.__name__}-{f.name}" for kind, f in FIXED]
)
def test_a_field_that_can_mean_one_thing(kind, field):
    """At its default it is taken and changes nothing; anything else is refused by name, with the
    reason.
    """
    assert kind(**{field.name: field.default}) == kind()
    message = message_of(UnsupportedError, kind, **{field.name: "another"})
    assert f"{kind.__name__}({field.name}='another')" in message
    assert field.metadata["reason"] in message
    assert f"leave it {field.default!r}" in message
