"""The interface that the converters serve: recorded, and compared with the package's own."""

import dataclasses

import pytest

from tests.torchtitan import interface, stand_in
from tests.torchtitan.interface import ASKED, fact, installed, recorded, signature


@pytest.mark.skipif(installed() is None, reason="torchtitan is not installed")
def test_the_package_is_as_recorded():
    """The installed torchtitan has the recorded signatures, fields and defaults."""
    release = installed()
    assert {name: fact(name) for name in ASKED[release]} == recorded(release)


@pytest.mark.skipif(installed() is not None, reason="torchtitan itself is there")
@pytest.mark.parametrize("release", interface.ASKED)
def test_what_stands_in_is_as_recorded(release):
    """What the tests run against where torchtitan is not installed has the recorded interface."""
    there = [name for name in ASKED[release] if name.partition(":")[0] in stand_in.MODULES]
    assert len(there) >= 4
    assert {name: fact(name) for name in there} == {name: recorded(release)[name] for name in there}


def test_the_protocol_is_served():
    """LinearConverter is a quantizing converter of torchtitan's, and converts what those do."""
    pytest.importorskip("torchtitan.models.common.linear")
    from torchtitan.components.quantization import QuantizationConverter

    from zerocast.integrations.torchtitan import LinearConverter

    assert issubclass(LinearConverter, QuantizationConverter)
    assert issubclass(LinearConverter.Config, QuantizationConverter.Config)
    record = recorded("0.3.0")["torchtitan.protocols.model:ModelConfigConverter.convert"]
    assert signature(LinearConverter.convert) == record
    assert type(LinearConverter.Config().build()) is LinearConverter


def test_options_have_torchtitan_s_names():
    """The options are those of the ``Float8Linear`` that torchtitan 0.2 had, with its defaults, but
    for ``emulate``; instead of no ``recipe_name`` there is the scheme that this means.
    """
    pytest.importorskip("torchtitan.models.common.linear")
    from zerocast.integrations.torchtitan import LinearConverter

    assert {f.name: getattr(LinearConverter.Config(), f.name) for f in _own_fields()} == {
        "recipe_name": "tensorwise",
        "enable_fsdp_float8_all_gather": False,
        "precompute_float8_dynamic_scale_for_fsdp": False,
        "filter_fqns": [],
        "weights_only": False,
    }


def _own_fields() -> list["dataclasses.Field"]:
    from torchtitan.components.quantization import QuantizationConverter

    from zerocast.integrations.torchtitan import LinearConverter

    inherited = {f.name for f in dataclasses.fields(QuantizationConverter.Config)}
    return [f for f in dataclasses.fields(LinearConverter.Config) if f.name not in inherited]
