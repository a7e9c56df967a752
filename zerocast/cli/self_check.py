"""The self-check of doctor: every recipe, cast on ranks that are threads, against the unsharded
cast by the reference backend.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from zerocast.backends import use_backend
from zerocast.cast import CastPlan
from zerocast.comm import Communicator, run_in_process
from zerocast.recipes import RECIPES, MXFP8BlockScaling, NVFP4BlockScaling, QParams, Recipe
from zerocast.tensors import QuantizedTensor, empty, quantize

SHAPE = (96, 160)

BOUNDS = (0, 1301, 1302, 96 * 160)
"""Rank r owns elements BOUNDS[r] to BOUNDS[r + 1]: cut inside of rows, blocks and bytes."""


@dataclass(frozen=True)
class Outcome:
    """Of one recipe.

    Attributes:
        compared: bytes, on each rank.
        difference: the first one, or an error; empty where there is none.
    """

    compared: int
    difference: str


def recipes() -> dict[str, Recipe]:
    """Those by name, and NVFP4's and MXFP8's options that change a weight's cast."""
    drawn = QParams(fp4_2d_quantization=True, stochastic_rounding=True)
    return {name: scheme() for name, scheme in RECIPES.items()} | {
        "mxfp8 in 32x32": MXFP8BlockScaling(enable_2d_quantization=True),
        "nvfp4, 4-over-6": NVFP4BlockScaling(nvfp4_4over6="weights"),
        "nvfp4, stochastic rounding": NVFP4BlockScaling(fp4_quant_fwd_weight=drawn),
    }


def self_check(device: torch.device) -> dict[str, Outcome]:
    """The outcome of each recipe on ``device``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the backend that steps in is a finding of its own
        return {name: _check(recipe, device) for name, recipe in recipes().items()}


def _check(recipe: Recipe, device: torch.device) -> Outcome:
    generator = torch.Generator("cpu").manual_seed(0)
    sizes = torch.logspace(-6, 3, SHAPE[0], dtype=torch.float32, device="cpu").unsqueeze(1)
    values = torch.randn(SHAPE, generator=generator, dtype=torch.float32, device="cpu")
    master = (values * sizes).to(device)
    try:
        with use_backend("reference"):
            whole = quantize(master, recipe, dtype=torch.bfloat16, name="w")

        def on_rank(comm: Communicator) -> QuantizedTensor:
            start, end = BOUNDS[comm.rank], BOUNDS[comm.rank + 1]
            weight = empty(SHAPE, recipe, device=device, name="w")
            plan = CastPlan([weight], [master.view(-1)[start:end]], [start], comm)
            plan.cast()
            plan.all_gather()
            return weight

        gathered = run_in_process(len(BOUNDS) - 1, on_rank)
        expected = whole.quantized_storage.buffers
        for rank, weight in enumerate(gathered):
            for name, buffer in weight.quantized_storage.buffers.items():
                bits = buffer.contiguous().view(torch.uint8).view(-1)
                differs = bits != expected[name].contiguous().view(torch.uint8).view(-1)
                if differs.any():
                    text = f"rank {rank}: {int(differs.sum())} bytes of {name} differ"
                    return Outcome(0, f"{text}; please report this with the whole output")
        return Outcome(sum(buffer.nbytes for buffer in expected.values()), "")
    except Exception as error:  # whatever fails on this machine is what is asked for
        return Outcome(0, f"{type(error).__name__}: {error}")
