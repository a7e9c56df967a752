"""What a configuration of torchtitan 0.2 names to have zerocast's converter, with its options.

::

    [job]
    custom_config_module = "zerocast.torchtitan.job_config"

    [model]
    converters = ["zerocast"]

    [quantize.linear.float8]
    recipe_name = "nvfp4"
    enable_fsdp_float8_all_gather = true
    precompute_float8_dynamic_scale_for_fsdp = true
    filter_fqns = ["output"]

torchtitan imports this module before it reads the rest. The import registers
:class:`zerocast.torchtitan.model_converter.ModelConverter` under the name ``"zerocast"``, and the
classes below are merged into torchtitan's own, field by field: ``recipe_name`` may be any of
:mod:`zerocast.torchtitan.options`, and ``weights_only`` is new.
"""

from dataclasses import dataclass, field

from torchtitan.protocols.model_converter import register_model_converter

from zerocast.torchtitan.model_converter import ModelConverter


@dataclass
class Float8Section:
    """``quantize.linear.float8``, in addition to its own fields.

    Attributes:
        recipe_name: None for "tensorwise".
        weights_only: products are those of decoded weights and inputs as they are: the only way
            under torch.compile where the scheme rounds stochastically, as "nvfp4" does.
    """

    recipe_name: str | None = None
    weights_only: bool = False


@dataclass
class LinearSection:
    """``quantize.linear``."""

    float8: Float8Section = field(default_factory=Float8Section)


@dataclass
class QuantizeSection:
    """``quantize``."""

    linear: LinearSection = field(default_factory=LinearSection)


@dataclass
class JobConfig:
    """What torchtitan merges into its ``JobConfig``."""

    quantize: QuantizeSection = field(default_factory=QuantizeSection)


register_model_converter(ModelConverter, "zerocast")
