"""LinearConverter: torchtitan 0.3 converts the tree of configurations that a model is built from.

In a function of its config registry, among the ``converters`` of a model registry::

    from zerocast.integrations.torchtitan.config_converter import LinearConverter

    config.model_spec = model_registry(
        "8B",
        converters=[
            LinearConverter.Config(
                recipe_name="nvfp4",
                enable_fsdp_float8_all_gather=True,
                precompute_float8_dynamic_scale_for_fsdp=True,
                filter_fqns=["lm_head"],
            ),
        ],
    )

Each ``Linear.Config`` becomes a :class:`QuantizedLinear.Config`, and the model is built with layers
of zerocast, which torchtitan initialises, shards and saves as its own.

Note: after a step
~~~~~~~~~~~~~~~~~~
A converter of this release is not called after a step of the optimizer. What torchtitan steps is an
``OptimizersContainer``, which is a torch optimizer and knows the parts of its model. So the scales
are made ahead in a hook that torch calls after the step of any optimizer, and that passes over
those which do not step such layers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.models.common.linear import Linear as TitanLinear
from torchtitan.protocols.module import Module

from zerocast.errors import InputError
from zerocast.integrations.torchtitan.layers import (
    AutocastLinear,
    logger,
    precompute,
    product_recipe,
)
from zerocast.integrations.torchtitan.options import check_combination, recipe_named
from zerocast.nn import ConversionReport
from zerocast.nn.convert import read_filter, why_small
from zerocast.nn.masters import master_parameter


class QuantizedLinear(AutocastLinear, Module):
    """torchtitan's ``Linear``, quantized.

    Attributes:
        precomputes: whether scales are made after a step of the optimizer.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TitanLinear.Config):
        """A layer to be built.

        Attributes:
            recipe_name: of the scheme.
            name: the layer's, in the model.
            gathers_codes: whether FSDP2 gathers the weight in codes.
            precomputes: whether their scales are made after a step of the optimizer.
            weights_only: whether products are those of the decoded weight and the input as it is.
        """

        recipe_name: str
        name: str
        gathers_codes: bool
        precomputes: bool
        weights_only: bool

    def __init__(self, config: Config) -> None:
        super().__init__(
            config.in_features, config.out_features, bias=config.bias, name=config.name
        )
        recipe = recipe_named(config.recipe_name)
        if not config.weights_only:
            self.product_recipe = product_recipe(recipe, config.name, config.out_features)
        self.low_bit_all_gather = config.gathers_codes
        self.precomputes = config.precomputes
        if config.gathers_codes:
            self.weight = master_parameter(self.weight, recipe, name=f"{config.name}.weight")


class LinearConverter(QuantizationConverter):
    """torchtitan's protocol ``ModelConfigConverter``.

    Raises:
        InputError: for an unknown ``recipe_name``, or an option that would do nothing.
        UnsupportedError: for a known ``recipe_name`` that is not served, and for quantized products
            in a compiled model by a recipe that remembers something between casts.

    Attributes:
        report: what :meth:`convert` did; None before.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """What to convert, and how.

        Attributes:
            recipe_name: one of :mod:`zerocast.integrations.torchtitan.options`.
            enable_fsdp_float8_all_gather: FSDP2 gathers the weights in codes, of whatever scheme.
            precompute_float8_dynamic_scale_for_fsdp: after a step of the optimizer, one all-reduce
                makes the scales of all weights.
            filter_fqns: a layer stays as it is where its name contains any of these;
                ``"auto_filter_small_kn"`` leaves out those that are too small to gain.
            weights_only: products are those of decoded weights and inputs as they are: the only
                way under torch.compile where the scheme rounds stochastically, as "nvfp4" does.
        """

        recipe_name: str = "tensorwise"
        enable_fsdp_float8_all_gather: bool = False
        precompute_float8_dynamic_scale_for_fsdp: bool = False
        filter_fqns: list[str] = field(default_factory=list)
        weights_only: bool = False

    def __init__(self, config: Config) -> None:
        self._recipe = recipe_named(config.recipe_name)
        check_combination(
            self._recipe,
            gathers_codes=config.enable_fsdp_float8_all_gather,
            precomputes=config.precompute_float8_dynamic_scale_for_fsdp,
            weights_only=config.weights_only,
            compiles=config.model_compile_enabled,
        )
        self.config = config
        self.report: ConversionReport | None = None
        self._parts_of_names, self._filters_small = read_filter(config.filter_fqns)

    def convert(self, model_config: Any) -> Any:
        """The tree ``model_config``, or what takes its place, with the linear layers converted."""
        if self.config.precompute_float8_dynamic_scale_for_fsdp:
            _precompute_after_steps()
        ties_head = getattr(model_config, "enable_weight_tying", False)
        converted: list[str] = []
        left: dict[str, str] = {}
        for fqn, layer, parent, place in model_config.traverse(TitanLinear.Config):
            why = self._why_not(fqn, layer)
            if fqn == "lm_head" and ties_head:
                why = "its weight is tied with the embedding's"
            if why is not None:
                left[fqn] = why
                continue
            converted.append(fqn)
            new = self._quantized(fqn, layer)
            if parent is None:
                model_config = new
            elif isinstance(parent, list):
                parent[place] = new
            else:
                setattr(parent, place, new)
        self.report = ConversionReport(self._recipe, tuple(converted), left)
        logger.info("%s", self.report)
        return model_config

    def _why_not(self, fqn: str, layer: Any) -> str | None:
        """Why this layer stays as it is; None where it is converted."""
        for part in self._parts_of_names:
            if part in fqn:
                return f"its name contains {part!r} of filter_fqns"
        if type(layer) is not TitanLinear.Config:
            return f"is a {type(layer).__qualname__}, which may use its weight in another way"
        shape = (layer.out_features, layer.in_features)
        try:
            self._recipe.check_shape(shape)
        except InputError as error:
            return str(error)
        return why_small(self._recipe, shape) if self._filters_small else None

    def _quantized(self, fqn: str, layer: Any) -> QuantizedLinear.Config:
        """What takes the place of ``layer``."""
        return QuantizedLinear.Config(
            in_features=layer.in_features,
            out_features=layer.out_features,
            bias=layer.bias,
            param_init=layer.param_init,
            sharding_config=layer.sharding_config,
            recipe_name=self.config.recipe_name,
            name=fqn,
            gathers_codes=self.config.enable_fsdp_float8_all_gather,
            precomputes=self.config.precompute_float8_dynamic_scale_for_fsdp,
            weights_only=self.config.weights_only,
        )


@functools.cache
def _precompute_after_steps() -> Any:
    """From now on, the scales of layers that ask for it are made after the steps of optimizers."""
    return register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for part in getattr(optimizer, "model_parts", ()):
        if any(isinstance(m, QuantizedLinear) and m.precomputes for m in part.modules()):
            precompute(part)
