"""Computes the bytes, collectives, launches and memory of a training step without running it.

:func:`estimate` takes a model on the meta device and makes the objects that train it, for one of
any number of ranks (:mod:`zerocast.lab.costs.dry_run`). So bytes and counts are exactly those of
:class:`zerocast.optim.ZeroOptimizer`.
"""

from zerocast.lab.costs.dry_run import StepOptions
from zerocast.lab.costs.estimation import Estimate, compare_gathers, estimate, estimate_model
from zerocast.lab.costs.models import MODELS, model_of, params_of, quantize_model

__all__ = [
    "MODELS",
    "Estimate",
    "StepOptions",
    "compare_gathers",
    "estimate",
    "estimate_model",
    "model_of",
    "params_of",
    "quantize_model",
]
