"""Decodes codes to values, also while torch.compile traces.

A backend may call a native library, which a compiler cannot trace. A registered torch operation is
an opaque call with known output to it. Such a call gets the whole meaning of the codes (numerics
and scale layout) as text: a process may load a compiled graph from a cache without tracing it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from functools import cache
from typing import get_args

import torch

from zerocast.backends import backend_for
from zerocast.errors import UnsupportedError
from zerocast.layout import BlockGrid, Plane, ScaleLayout, Source
from zerocast.numerics import (
    ELEMENT_FORMATS,
    Numerics,
    NVFP4Numerics,
    Operands,
    PlaneBuffers,
    TensorOperand,
)
from zerocast.tensors.storage import QuantizedStorage
from zerocast.tensors.weight_operands import decoded_operand

NAMES_IN_GRAPHS = tuple(
    [kind.__name__ for kind in get_args(Numerics)]
    + [field.name for kind in (ScaleLayout, BlockGrid) for field in fields(kind)]
)
"""The names that may occur in the text of a graph. A weight passes them to torch.compile with its
recipe, so that the cache on disk does not return graphs from before a renaming."""


def dequantize(storage: QuantizedStorage, *, columnwise: bool = False) -> torch.Tensor:
    """Return the values of the current codes, FP32 [storage.shape].

    Args:
        storage: the weight.
        columnwise: decode the columnwise codes, whose values differ from the rowwise ones under
            schemes that quantize them independently.

    Raises:
        StaleCopyError: if ``columnwise`` codes are stale.
        UnsupportedError: under ``torch.jit.trace``.
    """
    if torch.jit.is_tracing():
        raise UnsupportedError(
            "torch.jit.trace would record the current value of a quantized weight as a constant, "
            "and ignore later casts; use torch.export or torch.compile, or trace a model with "
            "torch.nn.Parameter(weight.dequantize()) in the place of each quantized weight."
        )
    plane = storage.planes[columnwise]
    if columnwise and plane.stores_codes:
        storage.derived(plane.codes_name)
    if not storage.shape.numel():  # an empty shard of a weight
        return torch.empty(storage.shape, dtype=torch.float32, device=storage.device)
    storage.writes.require_scales()
    matrices, shape = storage.matrices, [plane.grid.rows, plane.grid.cols]
    values = torch.empty(len(matrices), *shape, dtype=torch.float32, device=storage.device)
    operands = [
        decoded_operand(matrix, plane, each) for matrix, each in zip(matrices, values, strict=True)
    ]
    # A tracer passes tensors of a subclass. Outside of tracing, a call through torch's dispatcher
    # costs more than decoding a small weight, and the first call loads the compiler.
    if type(operands[0].planes[0].codes) is torch.Tensor and not torch.compiler.is_compiling():
        _decode(storage.recipe.numerics, operands)
    else:
        given = [(o.planes[0].codes, o.planes[0].scale_inv, o.amax) for o in operands]
        buffers = [each for buffers in given for each in buffers if each is not None]
        meaning = _to_text(storage.recipe.numerics, plane.scales)
        values = _traceable_decode(buffers, list(values.shape), meaning)
    return (values.mT if plane.is_transposed else values).reshape(storage.shape)


def _decode(numerics: Numerics, operands: Operands) -> None:
    assert operands[0].values is not None
    backend_for(operands[0].values.device).dequantize(numerics, operands)()


@torch.library.custom_op(
    "zerocast::dequantize",
    mutates_args=(),
    schema="(Tensor[] buffers, int[] shape, str meaning) -> Tensor",
)
def _traceable_decode(buffers: list[torch.Tensor], shape: list[int], meaning: str) -> torch.Tensor:
    numerics, layout = _from_text(meaning)
    values = torch.empty(shape, dtype=torch.float32, device=buffers[0].device)
    block = layout.grid.block_h, layout.grid.block_w
    plane = Plane("rowwise", Source.MASTER, block, layout)
    operands, count = [], len(buffers) // shape[0]  # of each matrix
    for i, matrix in enumerate(values):
        codes, scale_inv, *amax = buffers[i * count : (i + 1) * count]
        planes = (PlaneBuffers(plane, codes=codes, scale_inv=scale_inv),)
        operands.append(TensorOperand(planes, amax=amax[0] if amax else None, values=matrix))
    _decode(numerics, operands)
    return values


@_traceable_decode.register_fake
def _(buffers: list[torch.Tensor], shape: list[int], meaning: str) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=buffers[0].device)


def _to_text(numerics: Numerics, layout: ScaleLayout) -> str:
    """Return what decoding needs of ``numerics``, and ``layout``, as text."""
    options = {"scale_max": numerics.scale_max} if isinstance(numerics, NVFP4Numerics) else {}
    return json.dumps([type(numerics).__name__, numerics.fmt.name, options, asdict(layout)])


@cache
def _from_text(text: str) -> tuple[Numerics, ScaleLayout]:
    name, fmt, options, fields = json.loads(text)
    kind = next(kind for kind in get_args(Numerics) if kind.__name__ == name)
    layout = ScaleLayout(**fields | {"grid": BlockGrid(**fields["grid"])})
    return kind(ELEMENT_FORMATS[fmt], **options), layout
