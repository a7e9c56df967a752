"""What options mean, and the text of every refusal."""

import pytest

pytest.importorskip("torchtitan", reason="scripts/torchtitan.sh installs torchtitan")

import zerocast
from tests.support.claims import message_of
from zerocast.adapters.torchtitan.options import check_combination, recipe_named
from zerocast.recipes import NAMED


def test_torchtitan_s_schemes():
    """torchtitan's names are the schemes of torchao: "tensorwise" has gradients in E5M2, "rowwise"
    has E4M3 and powers of two everywhere, MXFP8 rounds its scales up.
    """
    assert recipe_named("tensorwise") == zerocast.Float8CurrentScaling(fp8_format="HYBRID")
    rowwise = recipe_named("rowwise")
    assert isinstance(rowwise, zerocast.Float8RowwiseScaling)
    for role in ("input", "weight", "grad_output"):
        numerics = rowwise.for_role(role).numerics
        assert (numerics.fmt.name, numerics.power_2_scale) == ("e4m3", True)
    for name in ("mxfp8_rceil", "mxfp8_cublas_rceil"):
        assert recipe_named(name) == zerocast.MXFP8BlockScaling(fp8_format="E4M3")


@pytest.mark.parametrize("name", ["current", "block", "mxfp8", "nvfp4", "fp8-channel"])
def test_short_names(name):
    """zerocast's short names mean what they mean everywhere."""
    assert recipe_named(name) == NAMED[name]


OFF = dict.fromkeys(("gathers_codes", "precomputes", "weights_only"), False)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "rowwise_with_gw_hp",
            "it computes the gradient of the weight from operands in high precision; 'rowwise' "
            "quantizes those as well.",
        ),
        (
            "mxfp8_rceil_wgrad_with_hp",
            "it computes the gradient of the weight from operands in high precision; 'mxfp8_rceil' "
            "quantizes those as well.",
        ),
        (
            "mxfp8_cublas",
            "it rounds scales down, and MXFP8 here rounds them up; 'mxfp8_cublas_rceil' is that "
            "scheme.",
        ),
        (
            "delayed",
            "torchtitan recomputes activations in the backward, without the scales of the forward; "
            "'tensorwise' makes its scales from the tensors at hand.",
        ),
    ],
)
def test_schemes_that_are_not_served(name, why):
    """A scheme that is known and not served is refused with what to choose instead."""
    message = message_of(zerocast.UnsupportedError, recipe_named, name)
    assert message == f"recipe_name={name!r} is not supported: {why}"


def test_an_unknown_scheme():
    """An unknown name is answered with the known ones."""
    assert message_of(zerocast.InputError, recipe_named, "int8") == (
        "recipe_name must be a zerocast recipe such as NVFP4BlockScaling(), or the name of one "
        "('current', 'rowwise', 'block', 'mxfp8', 'mxfp4', 'nvfp4', 'nvfp4-4over6', 'nvfp4-1x16', "
        "'nvfp4-4over6-1x16', 'fp8-tensor', 'fp8-channel', 'fp8-block', 'tensorwise', "
        "'mxfp8_cublas_rceil', "
        "'mxfp8_rceil'), got 'int8'."
    )


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        (
            "precomputes",
            zerocast.InputError,
            "precompute_float8_dynamic_scale_for_fsdp=True needs "
            "enable_fsdp_float8_all_gather=True: it casts the codes that FSDP2 will gather.",
        ),
        (
            "weights_only",
            zerocast.InputError,
            "weights_only=True needs enable_fsdp_float8_all_gather=True: without it nothing would "
            "be quantized.",
        ),
    ],
)
def test_options_that_would_do_nothing(option, error, message):
    """An option that would do nothing, or cannot be served beside the others, is refused."""
    options = OFF | {option: True}
    assert message == message_of(error, check_combination, **options)


def test_options_that_go_together():
    """Gathers in codes with scales made ahead, with and without quantized products."""
    for weights_only in (False, True):
        check_combination(gathers_codes=True, precomputes=True, weights_only=weights_only)
