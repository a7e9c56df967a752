"""statistics: counts on request how many elements quantization has lost.

    with zerocast.nn.statistics(model) as counts:
        ...                                  # forward and backward, under autocast
    print(counts)

An element is *underflowed* where it is not zero and decodes to zero; *saturated* where it is larger
than all values that round to the largest code, so that it was clipped. Both are counted
over what layers quantize: inputs, weights in high precision, quantized outputs, gradients. The
rowwise copy is counted if there is one. Counting decodes each tensor once more.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from zerocast.arguments import check_module
from zerocast.nn.layer_product import Watch
from zerocast.nn.regions import in_backward
from zerocast.numerics import ElementFormat, unpack_nibbles
from zerocast.recipes import Role
from zerocast.tensors import QuantizedStorage, dequantize
from zerocast.tensors.wrapped_names import named_modules


@dataclass(slots=True)
class Counts:
    """The elements that quantization lost of the tensors of one role in one layer.

    Attributes:
        elements: the number of elements that were quantized.
        underflowed: not zero, and decoded to zero.
        saturated: larger than all values that round to the largest code.
    """

    elements: int = 0
    underflowed: int = 0
    saturated: int = 0

    def __str__(self) -> str:
        return (
            f"{self.elements} elements, {self.underflowed} underflowed, {self.saturated} saturated"
        )


@dataclass
class Statistics:
    """The result of :func:`statistics`.

    Attributes:
        layers: by the layer's name in the model (``"block.mlp"``; of a layer with several products
            ``"block.mlp, product 1"``) and by role (``"input"``, ``"weight"``, ``"output"``,
            ``"grad_output"``).
    """

    layers: dict[str, dict[Role, Counts]] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join(
            f"{layer or '(the model itself)'}, {role}: {counts}"
            for layer, roles in self.layers.items()
            for role, counts in roles.items()
        )


_counting: ContextVar[tuple[dict[torch.nn.Module, str], Statistics] | None] = ContextVar(
    "zerocast_statistics", default=None
)


@contextmanager
def statistics(model: torch.nn.Module) -> Iterator[Statistics]:
    """Count, within the context, what the layers of ``model`` lose by quantization.

    If a layer's forward ran within the context, its backward is counted, whenever it runs.

    Args:
        model: the model whose layers are counted, by their names in it.

    Yields:
        The counts, which grow as layers run.
    """
    names = {module: name for name, module in named_modules(check_module("model", model))}
    counts = Statistics()
    token = _counting.set((names, counts))
    try:
        yield counts
    finally:
        _counting.reset(token)


def observer(module: torch.nn.Module, gemm: int) -> Watch | None:
    """Return the function that product ``gemm`` of ``module`` calls with its quantized tensors;
    None if nothing is counted.
    """
    counting = _counting.get()
    if counting is None or module not in counting[0]:
        return None
    names, counts = counting
    several = getattr(module, "gemms", 1) > 1
    name = f"{names[module]}, product {gemm}" if several else names[module]

    is_again = in_backward()  # the forward has been counted before

    def watch(role: Role, tensor: torch.Tensor, quantized: QuantizedStorage) -> None:
        if is_again and role != "grad_output":
            return
        total = counts.layers.setdefault(name, {}).setdefault(role, Counts())
        underflowed, saturated = _count(tensor, quantized)
        total.elements += tensor.numel()
        total.underflowed += underflowed
        total.saturated += saturated

    return watch


def _count(tensor: torch.Tensor, quantized: QuantizedStorage) -> tuple[int, int]:
    """Count underflowed and saturated elements."""
    columnwise = not quantized.has_rowwise
    plane = quantized.planes[columnwise]
    codes = quantized.buffers[plane.codes_name]
    fmt = quantized.recipe.numerics.fmt
    values = dequantize(quantized, columnwise=columnwise).abs()
    if fmt.bits == 4:
        codes = unpack_nibbles(codes, plane.grid.cols)
    codes = (codes.t() if plane.is_transposed else codes).reshape(values.shape)
    codes = codes & (2 ** (fmt.bits - 1) - 1)
    given = tensor.detach().to(torch.float32).abs()
    underflowed = (values == 0) & (given != 0)
    # A decoded value is scale_inv times its code's value: that of the largest code gives the bound.
    saturated = (codes == fmt.max_code) & (given > values * _saturation_bound(fmt)) & (values != 0)
    return int(underflowed.sum()), int(saturated.sum())


def _saturation_bound(fmt: ElementFormat) -> float:
    """Return the bound above which values saturate, as a multiple of the largest code: half a step
    above it.
    """
    significand, _ = math.frexp(fmt.max)  # from 1/2 to 1, in which a step is 2^-(mantissa_bits + 1)
    return 1 + 2.0 ** -(fmt.mantissa_bits + 2) / significand
