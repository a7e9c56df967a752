"""ModelConverter: torchtitan 0.2 converts a built model, and calls the converter after each step.

A configuration has it by naming :mod:`zerocast.torchtitan.job_config`. Elsewhere it is registered
by ``register_model_converter(ModelConverter, "zerocast")``, and has the options that torchtitan
knows.
"""

from __future__ import annotations

from typing import Any

import torch

from zerocast.errors import UnsupportedError
from zerocast.nn import ConversionReport, convert
from zerocast.torchtitan.layers import AutocastLinear, logger, precompute, product_recipe
from zerocast.torchtitan.options import check_combination, recipe_named


class ModelConverter:
    """torchtitan's protocol of that name.

    Where ``parallel_dims`` shards no parameters there is no all-gather, and the options about it
    have no object: weights stay in high precision, as with torchtitan's own converter.

    Args:
        job_config: torchtitan's ``JobConfig``, of which ``quantize.linear.float8`` and ``compile``
            are read.
        parallel_dims: torchtitan's ``ParallelDims``.

    Attributes:
        recipe: the scheme.
        report: what :meth:`convert` did; None before.

    Raises:
        InputError: for an unknown ``recipe_name``, or an option that would do nothing.
        UnsupportedError: for a known ``recipe_name`` that is not served, ``emulate``, quantized
            products in a compiled model by a recipe that remembers something between casts.
    """

    def __init__(self, job_config: Any, parallel_dims: Any) -> None:
        options, compilation = job_config.quantize.linear.float8, job_config.compile
        weights_only = getattr(options, "weights_only", False)  # where job_config.py is merged in
        self.recipe = recipe_named(options.recipe_name or "tensorwise")
        check_combination(
            self.recipe,
            gathers_codes=options.enable_fsdp_float8_all_gather,
            precomputes=options.precompute_float8_dynamic_scale_for_fsdp,
            weights_only=weights_only,
            compiles=compilation.enable and "model" in compilation.components,
        )
        if options.emulate:
            raise UnsupportedError(
                "emulate=True is not served: products are those of decoded operands wherever torch "
                "has no GEMM on codes, and of codes where it has one; leave it False."
            )
        self.report: ConversionReport | None = None
        self._weights_only = weights_only
        self._filter_fqns = tuple(options.filter_fqns)
        self._gathers_codes = options.enable_fsdp_float8_all_gather and parallel_dims.fsdp_enabled
        self._precomputes = self._gathers_codes and options.precompute_float8_dynamic_scale_for_fsdp

    def convert(self, model: torch.nn.Module) -> None:
        """Convert the linear layers of ``model``, in place."""
        self.report = convert(
            model,
            self.recipe,
            weights="master" if self._gathers_codes else "high_precision",
            filter_fqns=self._filter_fqns,
        )
        logger.info("%s", self.report)
        for fqn in self.report.converted:
            layer = model.get_submodule(fqn)
            layer.__class__ = AutocastLinear
            assert isinstance(layer, AutocastLinear)
            layer.product_recipe = (
                None if self._weights_only else product_recipe(self.recipe, fqn, layer.out_features)
            )

    def post_optimizer_hook(self, model: torch.nn.Module | list[torch.nn.Module]) -> None:
        """After a step of the optimizer on ``model``, or on the parts of one."""
        if self._precomputes:
            precompute(model)
