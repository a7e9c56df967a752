"""The interface of torchtitan's converters, as the package has it."""

import dataclasses
import inspect

import pytest

pytest.importorskip("torchtitan", reason="scripts/torchtitan.sh installs torchtitan")

from torchtitan.components.quantization import QuantizationConverter
from torchtitan.protocols.model import ModelConfigConverter

from zerocast.adapters.torchtitan import LinearConverter


def test_the_protocol_is_served():
    """LinearConverter is a quantizing converter of torchtitan's, and takes what those take."""
    assert issubclass(LinearConverter, QuantizationConverter)
    assert issubclass(LinearConverter.Config, QuantizationConverter.Config)
    theirs, ours = (
        [(p.name, p.kind, p.default) for p in inspect.signature(c.convert).parameters.values()]
        for c in (ModelConfigConverter, LinearConverter)
    )
    assert ours == theirs
    assert type(LinearConverter.Config().build()) is LinearConverter


def test_options_have_torchtitan_s_names():
    """The options are those of the ``Float8Linear`` that torchtitan 0.2 had, with its defaults, but
    for ``emulate``; instead of no ``recipe_name`` there is the scheme that this means.
    """
    inherited = {f.name for f in dataclasses.fields(QuantizationConverter.Config)}
    own = {f.name for f in dataclasses.fields(LinearConverter.Config)} - inherited
    assert {name: getattr(LinearConverter.Config(), name) for name in own} == {
        "recipe_name": "tensorwise",
        "enable_fsdp_float8_all_gather": False,
        "precompute_float8_dynamic_scale_for_fsdp": False,
        "filter_fqns": [],
        "weights_only": False,
    }
