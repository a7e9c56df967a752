"""Computes the bytes, collectives, launches, memory and seconds of a training step without running
it.

:func:`estimate` takes a model on the meta device and makes the objects that train it, for one of
any number of ranks (:mod:`zerocast.lab.costs.dry_run`). So bytes and counts are exactly those of
:class:`zerocast.optim.ZeroOptimizer`. Seconds come from a model, fitted to a machine by
:func:`fit`, or taken from its data sheet (:data:`MACHINES`).
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
