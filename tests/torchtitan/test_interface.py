"""The interface that the converters serve: recorded, and compared with the package's own."""

import dataclasses

import pytest

from tests.torchtitan import interface, stand_in
from tests.torchtitan.interface import ASKED, fact, installed, recorded, signature
from zerocast.torchtitan.model_converter import ModelConverter


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


@pytest.mark.parametrize("method", ["__init__", "convert", "post_optimizer_hook"])
def test_the_protocol_of_0_2_is_served(method):
    """ModelConverter's methods take what torchtitan 0.2 hands to a converter's."""
    record = recorded("0.2.2")[f"torchtitan.protocols.model_converter:ModelConverter.{method}"]
    assert signature(getattr(ModelConverter, method)) == record


def test_the_protocol_of_0_3_is_served():
    """LinearConverter is a quantizing converter of torchtitan's, and converts what those do."""
    pytest.importorskip("torchtitan.models.common.linear")
    from torchtitan.components.quantization import QuantizationConverter

    from zerocast.torchtitan.config_converter import LinearConverter

    assert issubclass(LinearConverter, QuantizationConverter)
    assert issubclass(LinearConverter.Config, QuantizationConverter.Config)
    record = recorded("0.3.0")["torchtitan.protocols.model:ModelConfigConverter.convert"]
    assert signature(LinearConverter.convert) == record
    assert type(LinearConverter.Config().build()) is LinearConverter


def test_options_have_torchtitan_s_names():
    """The options are those of torchtitan's own converter, with its defaults; ``emulate`` is none,
    and instead of no ``recipe_name`` there is the scheme that this means.
    """
    pytest.importorskip("torchtitan.models.common.linear")
    from zerocast.torchtitan.config_converter import LinearConverter

    theirs = dict(recorded("0.2.2")["torchtitan.config.job_config:Float8Linear"])
    del theirs["emulate"]
    ours = {f.name: repr(getattr(LinearConverter.Config(), f.name)) for f in _own_fields()}
    assert theirs.pop("recipe_name") == "None"
    assert ours.pop("recipe_name") == "'tensorwise'"
    assert ours.pop("weights_only") == "False"
    assert ours == theirs


def _own_fields() -> list["dataclasses.Field"]:
    from torchtitan.components.quantization import QuantizationConverter

    from zerocast.torchtitan.config_converter import LinearConverter

    inherited = {f.name for f in dataclasses.fields(QuantizationConverter.Config)}
    return [f for f in dataclasses.fields(LinearConverter.Config) if f.name not in inherited]


def test_a_job_config_registers_the_converter():
    """Importing the module that a configuration of 0.2 names registers "zerocast"."""
    protocol = pytest.importorskip("torchtitan.protocols.model_converter")
    from zerocast.torchtitan import job_config

    assert job_config.JobConfig().quantize.linear.float8.recipe_name is None
    registry = getattr(protocol, "_registry_model_converter_cls", stand_in.registered)
    assert registry["zerocast"] is ModelConverter


@pytest.mark.skipif(not (installed() or "").startswith("0.2"), reason="needs torchtitan 0.2")
def test_a_configuration_of_0_2_builds_the_converter(tmp_path):
    """torchtitan 0.2 makes the converter, with all options, from a configuration alone."""
    from torchtitan.config import ConfigManager
    from torchtitan.protocols.model_converter import build_model_converters

    path = tmp_path / "job.toml"
    path.write_text(
        '[job]\ncustom_config_module = "zerocast.torchtitan.job_config"\n'
        '[model]\nconverters = ["zerocast"]\n'
        '[quantize.linear.float8]\nrecipe_name = "nvfp4"\n'
        "enable_fsdp_float8_all_gather = true\nweights_only = true\n"
    )
    config = ConfigManager().parse_args([f"--job.config_file={path}"])
    ranks = type("ParallelDims", (), {"fsdp_enabled": True})
    (converter,) = build_model_converters(config, ranks).converters
    assert type(converter).__name__ == "ModelConverter"
    assert type(converter.recipe).__name__ == "NVFP4BlockScaling"
