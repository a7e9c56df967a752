"""LinearConverter: a converter for torchtitan's configurations that quantizes linear layers.

Supports torchtitan 0.3. scripts/torchtitan.sh runs tests/adapters/torchtitan and
tests/integration/test_torchtitan.py with the package. This adapter can be removed when torchtitan
drops converters of configurations, or trains with zerocast.nn.convert on a model that it has built.

Usage, in a function of torchtitan's config registry::

    from zerocast.adapters.torchtitan import LinearConverter

    config.model_spec = model_registry(
        "8B",
        converters=[
            LinearConverter.Config(
                recipe_name="nvfp4",
                enable_fsdp_float8_all_gather=True,
                filter_fqns=["lm_head"],
            ),
        ],
    )

Each ``Linear.Config`` becomes a :class:`QuantizedLinear.Config`, and the model is built with layers
of zerocast, which torchtitan initialises, shards and saves like its linear layers. Options that
torchtitan has keep their names and meanings (:mod:`zerocast.adapters.torchtitan.options`).

Note: after a step
~~~~~~~~~~~~~~~~~~
After a step of the optimizer, one all-reduce can compute the scales of all weights. torchtitan 0.3
calls no converter at that point, so a program that has the optimizer calls::

    precompute_after_steps(trainer.optimizers)

A configuration has no optimizer. For runs that are described by a configuration alone, the option
``precompute_float8_dynamic_scale_for_fsdp`` registers a hook that torch calls after the steps of
all optimizers of the process. The hook ignores optimizers without such layers.

Note: why no region is opened around the model
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torchtitan's trainer has no :class:`zerocast.autocast`, and calls parts of a model separately (the
head in chunks, inside of the loss). It recomputes activations in the backward, after a region
around the forward would have ended. So each converted layer opens a separate region. This works for
recipes whose scales are computed from the current tensors. Delayed scaling would reduce amaxes at
the end of every layer, and recompute with other scales, so it is refused.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.models.common.linear import Linear as TitanLinear
from torchtitan.protocols.module import Module

from zerocast import InputError, Recipe, TensorParallelShard, UnsupportedError, as_communicator
from zerocast.adapters.torchtitan.options import check_combination, recipe_named
from zerocast.nn import ConversionReport
from zerocast.nn.autocast_linear import AutocastLinear
from zerocast.nn.layer_filter import read_filter, why_small
from zerocast.nn.linear import master_parameter
from zerocast.recipes.recipe_patterns import ALL, RecipePatterns
from zerocast.sharded import precompute_scales_for_fsdp

logger = logging.getLogger(__name__)

# --- layers ---


class QuantizedLinear(AutocastLinear, Module):
    """torchtitan's ``Linear``, quantized.

    Attributes:
        precomputes: whether the hook of the option computes its scales after a step.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TitanLinear.Config):
        """The configuration of a layer.

        Attributes:
            recipe_name: the name of the recipe.
            name: the name of the layer in the model.
            gathers_codes: whether FSDP2 gathers the weight in codes.
            precomputes: whether scales are computed after a step of the optimizer.
            weights_only: whether products are of the decoded weight and the unquantized input.
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

    def parallelize(self, parallel_dims: Any) -> None:
        """Split the layer over ranks, as torchtitan splits its linear layers.

        Raises:
            UnsupportedError: for a tensor-parallel layer under ``spmd_backend="full_dtensor"``.
        """
        if parallel_dims.tp_enabled and parallel_dims.spmd_backend == "full_dtensor":
            raise UnsupportedError(
                f"{self.name}: spmd_backend='full_dtensor' is not supported with tensor "
                "parallelism: weights must be split over a mesh of one dimension. Choose "
                "'spmd_types' or 'partial_dtensor'."
            )
        whole = self.weight.shape
        super().parallelize(parallel_dims)
        dims = [dim for dim in (0, 1) if self.weight.shape[dim] != whole[dim]]
        if dims and not self.low_bit_all_gather:  # spmd_types makes plain tensors of the parts
            comm = as_communicator(parallel_dims.get_mesh("tp").get_group())
            self.tp_shard = TensorParallelShard.chunk(whole, dims[0], comm)


def product_recipe(recipe: Recipe, fqn: str, out_features: int) -> Recipe | None:
    """Return ``recipe`` for the products of the layer ``fqn``; None, and log a line, if it cannot
    quantize the gradient of the output.
    """
    try:
        recipe.for_role("grad_output").check_shape((1, out_features))
    except InputError:
        logger.info(
            "%s: its products stay in high precision; %s cannot hold the gradient of its output, "
            "[..., %d]",
            fqn,
            type(recipe).__name__,
            out_features,
        )
        return None
    return recipe


# --- the converter ---


class LinearConverter(QuantizationConverter):
    """An implementation of torchtitan's protocol ``ModelConfigConverter``.

    Raises:
        InputError: for an unknown ``recipe_name``, or an option that would have no effect.
        UnsupportedError: for a known ``recipe_name`` that is not supported.

    Attributes:
        report: the result of :meth:`convert`; None before.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """The options of the converter.

        Attributes:
            recipe_name: a name that :func:`recipe_named` accepts; or such names, or None, by
                patterns of the names of linear layers, as :func:`zerocast.nn.convert` takes them:
                ``{"lm_head": None, "*.attention.*": "fp8-channel", "*": "mxfp8"}``.
            enable_fsdp_float8_all_gather: whether FSDP2 gathers weights in codes, of any recipe.
            precompute_float8_dynamic_scale_for_fsdp: whether one all-reduce after a step of the
                optimizer computes the scales of all weights; see :func:`precompute_after_steps`.
            filter_fqns: layers whose names contain any of these are not converted;
                ``"auto_filter_small_kn"`` excludes layers that are too small to gain.
            weights_only: whether products are of decoded weights and unquantized inputs.
        """

        recipe_name: str | dict[str, str | None] = "tensorwise"
        enable_fsdp_float8_all_gather: bool = False
        precompute_float8_dynamic_scale_for_fsdp: bool = False
        filter_fqns: list[str] = field(default_factory=list)
        weights_only: bool = False

    def __init__(self, config: Config) -> None:
        given = config.recipe_name
        names = given if isinstance(given, dict) else {ALL: given}
        self._recipes = {
            p: None if name is None else recipe_named(name) for p, name in names.items()
        }
        self._names = {recipe: names[pattern] for pattern, recipe in self._recipes.items()}
        RecipePatterns(self._recipes)
        self._own = {
            "gathers_codes": config.enable_fsdp_float8_all_gather,
            "precomputes": config.precompute_float8_dynamic_scale_for_fsdp,
            "weights_only": config.weights_only,
        }
        check_combination(**self._own)
        self.config = config
        self.report: ConversionReport | None = None
        self._parts_of_names, self._filters_small = read_filter(config.filter_fqns)

    def convert(self, model_config: Any) -> Any:
        """Return the tree ``model_config``, changed in place, with linear layers converted.

        If its root is a linear layer, return the converted configuration instead.
        """
        if self.config.precompute_float8_dynamic_scale_for_fsdp:
            _precompute_after_steps_of_all()
        ties_head = getattr(model_config, "enable_weight_tying", False)
        patterns = RecipePatterns(self._recipes)
        layers = [
            (*found, *patterns.recipe_for([found[0]]))
            for found in model_config.traverse(TitanLinear.Config)
        ]
        patterns.check_all_decide()
        recipes: dict[str, Recipe] = {}
        left: dict[str, str] = {}
        for fqn, layer, parent, place, recipe, why_none in layers:
            why = self._why_not(fqn, layer, recipe) or why_none
            if fqn == "lm_head" and ties_head:
                why = "its weight is tied with the embedding's"
            if why is not None:
                left[fqn] = why
                continue
            recipes[fqn] = recipe
            names = ("in_features", "out_features", "bias", "param_init", "sharding_config")
            titans = {name: getattr(layer, name) for name in names}
            own = {"recipe_name": self._names[recipe], "name": fqn, **self._own}
            new = QuantizedLinear.Config(**titans, **own)
            if parent is None:
                model_config = new
            elif isinstance(parent, list):
                parent[place] = new
            else:
                setattr(parent, place, new)
        self.report = ConversionReport(recipes, tuple(recipes), left)
        logger.info("%s", self.report)
        return model_config

    def _why_not(self, fqn: str, layer: Any, recipe: Recipe | None) -> str | None:
        """Return why this layer is not converted by ``recipe``; None if it is converted."""
        for part in self._parts_of_names:
            if part in fqn:
                return f"its name contains {part!r} of filter_fqns"
        if type(layer) is not TitanLinear.Config:
            return f"is a {type(layer).__qualname__}, which may use its weight in another way"
        if recipe is None:
            return None
        shape = (layer.out_features, layer.in_features)
        try:
            recipe.check_shape(shape)
        except InputError as error:
            return str(error)
        return why_small(recipe, shape) if self._filters_small else None


# --- after a step of the optimizer ---


def precompute_after_steps(optimizer: torch.optim.Optimizer) -> Any:
    """Compute scales after each step of ``optimizer``, torchtitan's ``OptimizersContainer``.

    One all-reduce computes the scales of all its weights that FSDP2 gathers in codes.

    Returns:
        A handle, whose ``remove()`` unregisters the hook.
    """
    for layer in _layers(getattr(optimizer, "model_parts", ())):
        layer.precomputes = False  # so that the hook of the option ignores them
    return optimizer.register_step_post_hook(_after_step(lambda layer: layer.low_bit_all_gather))


@functools.cache
def _precompute_after_steps_of_all() -> Any:
    """Register a hook for all optimizers that computes the scales of layers with the option."""
    return register_optimizer_step_post_hook(_after_step(lambda layer: layer.precomputes))


def _layers(model_parts: Any) -> Iterator[QuantizedLinear]:
    for part in model_parts:
        yield from (module for module in part.modules() if isinstance(module, QuantizedLinear))


def _after_step(is_wanted: Any) -> Any:
    """Return a hook that computes scales in parts of a model with a layer that ``is_wanted``."""

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for part in getattr(optimizer, "model_parts", ()):
            if any(map(is_wanted, _layers([part]))):
                precompute_scales_for_fsdp(part)

    return hook
