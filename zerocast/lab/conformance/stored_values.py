"""Reads a converted checkpoint back, with a decoder that shares no code with the casts."""

from collections.abc import Mapping

import torch

from zerocast.export import Dialect
from zerocast.export.checkpoint_conversion import CheckpointConversion, Progress, value_bytes
from zerocast.export.stored_files import StoredFiles
from zerocast.lab.conformance.case_packs import raw
from zerocast.numerics import NVFP4Numerics

_HALVES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = torch.tensor([*_HALVES, *(-each for each in _HALVES)], dtype=torch.float32, device="cpu")
"""The values of 4-bit codes, by the OCP Microscaling specification 1.0, section 5.3.3."""


def stored_values(dialect: Dialect, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the FP32 values of a weight that is stored as ``tensors``, by :attr:`Dialect.names`.

    A value is its code times the scale of its block, rounded once; of NVFP4 that scale is first
    multiplied by the tensor's.
    """
    codes = tensors[dialect.codes]
    if dialect.code_block is not None:
        codes = codes.flatten(-2)
    if dialect.recipe.numerics.fmt.bits == 4:
        held = codes.view(torch.uint8)
        pairs = torch.stack([held & 15, held >> 4], dim=-1).flatten(-2)
        values = _E2M1[pairs.long()]
    else:
        values = codes.view(torch.float8_e4m3fn).float()
    scales = tensors[dialect.scales]
    if isinstance(dialect.recipe.numerics, NVFP4Numerics):
        scales = scales.view(torch.float8_e4m3fn).float()
    elif scales.element_size() == 1:  # exponents
        scales = torch.exp2(scales.view(torch.uint8).double() - 127).float()
    if dialect.tensor_scale is not None:
        scale = tensors[dialect.tensor_scale.name].float()
        scales = scales / scale if dialect.tensor_scale.inverted else scales * scale
    *stack, rows, columns = values.shape
    height, width = dialect.recipe.block  # 0 is the whole height or width
    height, width = height or rows, width or columns
    scales = scales.reshape(*stack, -(-rows // height), -(-columns // width))
    scales = scales.repeat_interleave(height, -2).repeat_interleave(width, -1)
    return values * scales[..., :rows, :columns]


@torch.no_grad()
def check_stored(conversion: CheckpointConversion, progress: Progress) -> list[str]:
    """Return the names of the tensors of a target that are missing, differ from those of another
    cast, or decode to other values here than by :meth:`Dialect.decode`.

    The values may differ by the rounding of NVFP4's tensor scale, which dialects store as its
    inverse.
    """
    stored, wrong = StoredFiles(conversion.target).tensors, list[str]()
    expected = set[str]()
    for bucket in range(len(conversion.buckets)):
        for stage in conversion.stages(bucket):
            fresh = conversion.tensors_of(stage)
            expected |= fresh.keys()
            held = {name: stored[name].whole() for name in fresh if name in stored}
            differing = [name for name in fresh if not same_bytes(fresh[name], held.get(name))]
            wrong += differing
            for entry in stage:
                if entry.recipe is None or differing:
                    continue
                dialect = entry.dialect
                parts = {part: held[entry.stored_name(part)] for part in dialect.names}
                ours = dialect.decode(parts, torch.float32).dequantize(torch.float32)
                if not torch.allclose(stored_values(dialect, parts), ours, rtol=2**-20, atol=0):
                    wrong.append(entry.stored)
            progress(value_bytes(stage))
    return [*wrong, *(stored.keys() - expected)]


def same_bytes(given: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Return whether two tensors have the same dtype, shape and bytes; False if one is None."""
    if other is None or (given.dtype, given.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(raw(given), raw(other))
