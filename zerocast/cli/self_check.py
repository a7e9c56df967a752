"""The self-check of doctor: compares sharded casts of every recipe with an unsharded cast.

Ranks are threads, and the reference backend runs the unsharded cast.
"""

import warnings

import torch

from zerocast.backends import use_backend
from zerocast.errors import VerificationError
from zerocast.lab.threaded_cast import cast_on_threads
from zerocast.recipes import RECIPES, MXFP8BlockScaling, NVFP4BlockScaling, QParams, Recipe
from zerocast.tensors import QuantizedTensor, empty, quantize

SHAPE = (96, 160)

BOUNDS = (0, 1301, 1302, 96 * 160)
"""Rank r owns elements BOUNDS[r] to BOUNDS[r + 1], which begin inside of rows, blocks and bytes."""


def recipes() -> dict[str, Recipe]:
    """Return all recipes by name, and variants of NVFP4 and MXFP8 that cast weights differently."""
    drawn = QParams(fp4_2d_quantization=True, stochastic_rounding=True)
    return {name: scheme() for name, scheme in RECIPES.items()} | {
        "mxfp8 in 32x32": MXFP8BlockScaling(enable_2d_quantization=True),
        "nvfp4, 4-over-6": NVFP4BlockScaling(nvfp4_4over6="weights"),
        "nvfp4, stochastic rounding": NVFP4BlockScaling(fp4_quant_fwd_weight=drawn),
    }


def compare_casts(recipe: Recipe, device: torch.device) -> int:
    """Cast a weight sharded and unsharded; return the number of bytes, all equal on each rank.

    Raises:
        VerificationError: if a byte differs.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    sizes = torch.logspace(-6, 3, SHAPE[0], dtype=torch.float32, device="cpu").unsqueeze(1)
    values = torch.randn(SHAPE, generator=generator, dtype=torch.float32, device="cpu")
    master = (values * sizes).to(device)

    def make() -> QuantizedTensor:
        return empty(SHAPE, recipe, device=device, name="w")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the backend is reported by a separate finding
        with use_backend("reference"):
            whole = quantize(master, recipe, dtype=torch.bfloat16, name="w")
        gathered = cast_on_threads(make, master, BOUNDS)
    expected = whole.quantized_storage.buffers
    for rank, weight in enumerate(gathered):
        for name, buffer in weight.quantized_storage.buffers.items():
            bits, other = (b.contiguous().view(torch.uint8) for b in (buffer, expected[name]))
            if wrong := int((bits != other).sum()):
                raise VerificationError(
                    f"rank {rank}: {wrong} bytes of {name} differ; please report this with the "
                    "whole output"
                )
    return sum(buffer.nbytes for buffer in expected.values())
