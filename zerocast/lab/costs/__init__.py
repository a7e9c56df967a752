"""Computes what a training step costs, without running it: bytes, collectives, launches, memory,
seconds.

:func:`estimate` takes a model on the meta device and makes of it the objects that train, for one
rank of as many as are asked for: :mod:`zerocast.lab.costs.dry_run` says how. So bytes and counts
are those of :class:`zerocast.optim.ZeroOptimizer`, to the byte. Seconds are a model, fitted to a
machine by :func:`fit`, or taken from its data sheet (:data:`MACHINES`).
"""

from zerocast.lab.costs.counted_launches import Work
from zerocast.lab.costs.dry_run import StepOptions
from zerocast.lab.costs.estimation import Estimate, compare_gathers, estimate, estimate_model
from zerocast.lab.costs.fitting import Check, fit
from zerocast.lab.costs.machine import MACHINES, Cost, Machine
from zerocast.lab.costs.models import MODELS, model_of, params_of, quantize_model

__all__ = [
    "MACHINES",
    "MODELS",
    "Check",
    "Cost",
    "Estimate",
    "Machine",
    "StepOptions",
    "Work",
    "compare_gathers",
    "estimate",
    "estimate_model",
    "fit",
    "model_of",
    "params_of",
    "quantize_model",
]
