"""The interface that the converters serve: recorded, and compared with the package's own."""

import dataclasses

import pytest
from torchtitan.components.quantization import QuantizationConverter

from tests.adapters.torchtitan import stand_in
from tests.adapters.torchtitan.interface import RECORD, RELEASE, fact, installed, signature
from zerocast.adapters.torchtitan import LinearConverter


@pytest.mark.skipif(installed() is None, reason="torchtitan is not installed")
def test_the_package_is_as_recorded():
    """The installed torchtitan has the recorded signatures, fields and defaults."""
    recorded = RECORD[str(installed())]
    assert {name: fact(name) for name in recorded} == recorded


@pytest.mark.skipif(installed() is not None, reason="torchtitan itself is there")
def test_what_stands_in_is_as_recorded():
    """What the tests run against where torchtitan is not installed has the recorded interface."""
    there = [name for name in RECORD[RELEASE] if name.partition(":")[0] in stand_in.MODULES]
    assert len(there) >= 4
    assert {name: fact(name) for name in there} == {name: RECORD[RELEASE][name] for name in there}


def test_the_protocol_is_served():
    """LinearConverter is a quantizing converter of torchtitan's, and converts what those do."""
    assert issubclass(LinearConverter, QuantizationConverter)
    assert issubclass(LinearConverter.Config, QuantizationConverter.Config)
    recorded = RECORD[RELEASE]["torchtitan.protocols.model:ModelConfigConverter.convert"]
    assert signature(LinearConverter.convert) == recorded
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
