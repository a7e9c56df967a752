"""vLLM's Triton kernel of MXFP4, run by Triton's interpreter on a CPU, gives the bytes of
``compressed-tensors/mxfp4``. At the ends of FP32 the interpreter's arithmetic is not a GPU's, so
amaxes are from 2^-100 to 2^100.
"""

import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from triton.backends import backends

import zerocast
from zerocast.export import DIALECTS


def quantizer():
    """vLLM's function; vLLM for CPUs imports Triton only if Triton has a backend of that name, and
    the interpreter needs none.
    """
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    from vllm.model_executor.layers.quantization.utils.mxfp4_utils import mxfp4_quantize

    return mxfp4_quantize


mxfp4_quantize = quantizer()
np.seterr(all="ignore")
dialect = DIALECTS["compressed-tensors/mxfp4"]
generator = torch.Generator().manual_seed(0)
draws = torch.randn(128, 1024, generator=generator)
ties = torch.randint(-24, 25, (128, 1024), generator=generator) / 4  # of codes, and of scales
exponents = torch.randint(-100, 100, (128, 32, 1), generator=generator).double()
zeros = torch.zeros(2, 64)
zeros[1] = -0.0
for values in (draws, ties, zeros):
    blocks = values.unflatten(1, (-1, 32)).double()
    scaled = blocks * torch.exp2(exponents if len(values) == 128 else exponents[:2, :2])
    for weight in (values.bfloat16(), scaled.flatten(1).bfloat16()):
        whole = zerocast.quantize(weight, dialect.recipe, columnwise=False)
        ours = dialect.encode(whole.quantized_storage)
        for (name, own), their in zip(ours.items(), mxfp4_quantize(weight), strict=True):
            assert torch.equal(own, their), (name, (own != their).sum(), own.numel())
print("the same bytes")
