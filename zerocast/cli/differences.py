"""WeightDifference: how one weight differs between two checkpoints, and the likely cause.

The bytes alone show which of codes, block scales and the tensor scale differ, and by how many
steps; causes that are found from them are likely ones. With the weight from which both were cast
the formulas of :mod:`zerocast.lab.conformance` are computed anew, with the changes that other
implementations make to them: what gives every byte is the cause.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerocast.backends.reference.planes import read_plane
from zerocast.cli.stored_weights import StoredWeights
from zerocast.export import Dialect
from zerocast.lab.conformance.causes import changes_giving
from zerocast.lab.conformance.stored_values import same_bytes
from zerocast.layout import Plane
from zerocast.numerics import E4M3, NVFP4Numerics, decode
from zerocast.tensors import QuantizedStorage, QuantizedTensor

SAMPLE = 1 << 17
"""The number of elements, of blocks that differ, for which formulas are computed anew."""

PIECE = 1 << 24
"""The number of bytes of codes that are compared at once."""


@dataclass(frozen=True)
class WeightDifference:
    """A weight, parameter or buffer that differs between the checkpoints A and B.

    Attributes:
        name: the name of the parameter or buffer.
        a, b: how each stores it: a dialect or a dtype; empty if it does not.
        codes: the number of codes that differ, or of elements without codes; None if their formats
            or shapes differ.
        scales: the number of scales that differ, with that of the tensor; None without codes.
        largest: the largest difference of finite decoded values; None if the shapes differ.
        relative: the same divided by the amax of A, or of B if A is zero.
        cause: the likely cause.
    """

    name: str
    a: str
    b: str
    codes: int | None
    scales: int | None
    largest: float | None
    relative: float | None
    cause: str


def difference(
    name: str, a: StoredWeights, b: StoredWeights, source: StoredWeights | None = None
) -> WeightDifference | None:
    """Return the difference of one weight; None if it has the same codes and scales in both.

    Args:
        name: the name of the parameter or buffer.
        a, b: the checkpoints.
        source: the checkpoint in high precision from which both were cast.

    Raises:
        InputError: if its tensors do not match their dialect.
    """
    stored = a.describe(name), b.describe(name)
    if not all(stored):
        cause = f"only in {'A' if stored[0] else 'B'}"
        return WeightDifference(name, *stored, None, None, None, None, cause)
    given = a.tensors(name), b.tensors(name)
    if stored[0] == stored[1] and all(map(same_bytes, *given)):
        return None
    left, right = (_decoded(each, name) for each in (a, b))
    if left.shape != right.shape:
        cause = f"other shapes, {list(left.shape)} and {list(right.shape)}"
        return WeightDifference(name, *stored, None, None, None, None, cause)
    largest, relative = _decoded_difference(left, right)
    codes, scales = None, None
    if isinstance(left, QuantizedTensor) and isinstance(right, QuantizedTensor):
        storages = left.quantized_storage, right.quantized_storage
        codes, scales, cause = _from_bytes(*storages, largest)
        if codes == scales == 0 and stored[0] != stored[1]:
            return None
        if source is not None and codes is not None:
            cause = "; ".join(filter(None, (cause, _from_source(name, (a, b), source))))
    elif left.dtype == right.dtype:
        unequal = left != right
        unequal &= ~(left.isnan() & right.isnan()) if left.is_floating_point() else True
        codes = int(unequal.sum())
        cause = "other values" if codes else "other bits of zeros or NaNs"
    else:
        cause = "other precision"
    return WeightDifference(name, *stored, codes, scales, largest, relative, cause)


def experts_of(name: str) -> tuple[str, bool]:
    """Return the module of the experts that have a weight, empty if none do, and whether it is of
    one of them alone.
    """
    module, point, last = name.rpartition(".experts.")
    return (module + point).rstrip("."), last[:1].isdigit()


def experts_in_other_layouts(a: StoredWeights, b: StoredWeights) -> list[WeightDifference]:
    """Return a difference for each module of experts that one checkpoint has in one tensor, and the
    other apart: they are not compared.
    """
    held, other = (dict.fromkeys(map(experts_of, each.by_name)) for each in (a, b))
    texts, cause = ("in one tensor", "each apart"), "not compared: experts in other layouts"
    return [
        WeightDifference(module, texts[is_one], texts[not is_one], None, None, None, None, cause)
        for module, is_one in held
        if module and (module, not is_one) in other
    ]


def _decoded(checkpoint: StoredWeights, name: str) -> torch.Tensor:
    dialects, tensors = checkpoint.by_name[name].dialects, checkpoint.tensors(name)
    if not dialects:
        return tensors[0]
    return dialects[0].decode(dict(zip(dialects[0].names, tensors, strict=True)))


def _decoded_difference(
    left: torch.Tensor, right: torch.Tensor
) -> tuple[float | None, float | None]:
    """Return the largest difference of finite values, and its ratio to the amax."""
    x, y = (
        each.dequantize(torch.float32) if isinstance(each, QuantizedTensor)
        else each if each.dtype == torch.float64 else each.float()
        for each in (left, right)
    )  # fmt: skip
    finite = x.isfinite() & y.isfinite()
    if not finite.any():
        return None, None
    largest = torch.where(finite, x - y, 0.0).abs().max().item()
    amaxes = (torch.where(finite, each, 0.0).abs().max().item() for each in (x, y))
    amax = next(filter(None, amaxes), 0.0)
    return largest, largest / amax if amax else None


# --- from the bytes alone ---


def _from_bytes(
    a: QuantizedStorage, b: QuantizedStorage, largest: float | None
) -> tuple[int | None, int | None, str]:
    """Return the numbers of codes and scales that differ, None if the formats do, and the cause."""
    planes, own = [each.planes[0] for each in (a, b)], [each.recipe.numerics for each in (a, b)]
    formats = [(type(n), n.fmt, plane.grid) for n, plane in zip(own, planes, strict=True)]
    if formats[0] != formats[1]:
        return None, None, "another format"
    stored = [each.buffers[planes[0].codes_name].reshape(-1) for each in (a, b)]
    codes, steps = _codes_apart(*stored, bits=own[0].fmt.bits)
    x, y = (_scales(each, plane) for each, plane in zip((a, b), planes, strict=True))
    scales = int((x != y).sum())
    if isinstance(own[0], NVFP4Numerics):
        amaxes = [each.buffers["amax"].item() for each in (a, b)]
        if amaxes[0] != amaxes[1]:
            return codes, scales + 1, _other_amax(*amaxes)
    if scales and (largest or steps):
        return codes, scales, _other_scales(x, y, is_e4m3=isinstance(own[0], NVFP4Numerics))
    if scales:
        return codes, scales, "the scales of blocks of zeros"
    if steps > 1:
        cause = f"equal scales, and codes up to {steps} steps apart: other weights, or damage"
    elif steps:
        cause = "equal scales, and codes one step apart: rounding beside ties"
    else:
        cause = "the signs of zeros" if codes else "other bytes of the tensor scale"
    return codes, scales, cause


def _codes_apart(a: torch.Tensor, b: torch.Tensor, *, bits: int) -> tuple[int, int]:
    """Return how many codes differ, and by how many steps of magnitudes at most."""
    differing, furthest, half = 0, 0, 1 << bits - 1
    for pair in zip(a.split(PIECE), b.split(PIECE), strict=True):
        x, y = (torch.cat((each & 15, each >> 4)) if bits == 4 else each for each in pair)
        differing += int((x != y).sum())
        x, y = (torch.where(each < half, each.short(), half - each.short()) for each in (x, y))
        furthest = max(furthest, int((x - y).abs().max()) if len(x) else 0)
    return differing, furthest


def _scales(storage: QuantizedStorage, plane: Plane) -> torch.Tensor:
    """Return the scales of all blocks as they are stored, without padding: [blocks]."""
    return torch.cat([
        read_plane(each.buffers[plane.scales_name], plane.scales).flatten()
        for each in storage.matrices
    ])  # fmt: skip


def _other_amax(a: float, b: float) -> str:
    if math.isclose(a, b, rel_tol=1e-6):
        return "tensor scales a step apart: another formula of the tensor scale"
    if math.isclose(a, b, rel_tol=2**-8):
        return f"tensor scales of amaxes {a:g} in A and {b:g} in B: one is rounded to BF16"
    return f"tensor scales of other amaxes, {a:g} in A and {b:g} in B: of other groups of weights"


def _other_scales(x: torch.Tensor, y: torch.Tensor, *, is_e4m3: bool) -> str:
    """Return the likely cause of block scales that differ, as they are stored, [blocks]."""
    some = x != y
    if x.dtype == torch.float32:
        if len(x) == 1 and not math.isclose(x.item(), y.item(), rel_tol=1e-6):
            return _other_amax(E4M3.max * x.item(), E4M3.max * y.item())
        powers = [not (each.view(torch.int32) & 0x7FFFFF).any() for each in (x, y)]
        if powers[0] != powers[1]:
            return f"the scales of {'A' if powers[0] else 'B'} alone are powers of two"
        apart = (x[some].view(torch.int32).long() - y[some].view(torch.int32).long()).abs().max()
    else:
        apart = (x[some].short() - y[some].short()).abs().max()
    if apart <= 1 + (x.dtype == torch.float32):
        return "block scales a step apart: another formula or rounding of scales"
    if is_e4m3:
        given, other = (decode(each[some], E4M3) for each in (x, y))
        ratio = torch.maximum(given, other) / torch.minimum(given, other)
        if ((ratio > 1.25) & (ratio < 1.8)).float().mean() > 0.9:  # 1.5, of rounded scales
            return "block scales 1.5 times those of the other: 4-over-6 in one of them"
    return f"block scales up to {int(apart)} steps apart: other weights, or another recipe"


# --- from the weight that was cast ---


def _from_source(name: str, checkpoints: Sequence[StoredWeights], source: StoredWeights) -> str:
    """Return which formulas give both weights, by some of the blocks that differ; an empty string
    if ``source`` does not have the weight.
    """
    if name not in source.by_name or source.by_name[name].dialects:
        return ""
    (master,) = source.tensors(name)
    weights = [_decoded(each, name) for each in checkpoints]
    if master.shape != weights[0].shape:
        master = master.mT  # experts that a model keeps as [K, M]
    if master.shape != weights[0].shape or not master.numel():
        return ""
    master = master.flatten(0, -2)
    recipe = checkpoints[0].by_name[name].dialects[0].recipe
    height = 1 if recipe.has_one_block else recipe.planes(master.shape)[0].grid.block_h
    codes = [_bytes_of_rows(each.tensors(name)[0], len(master)) for each in checkpoints]
    bands = (codes[0] != codes[1]).any(1).nonzero().flatten() // height
    scales = [each.tensors(name)[1] for each in checkpoints]
    if not recipe.has_one_block:
        scales = [_bytes_of_rows(each, -(-len(master) // height)) for each in scales]
        bands = torch.cat((bands, (scales[0] != scales[1]).any(1).nonzero().flatten()))
    if not len(bands):  # the scale of the tensor alone differs
        bands = torch.zeros(1, dtype=torch.int64, device="cpu")
    bands = bands.unique()[: max(1, SAMPLE // (height * master.shape[1]))]
    within = torch.arange(height, dtype=torch.int64, device="cpu")
    rows = (bands[:, None] * height + within).flatten()
    rows = rows[rows < len(master)]
    texts = []
    for i, each in enumerate(checkpoints):
        _, scale, *tensor = each.tensors(name)
        found = _formula(
            each.by_name[name].dialects,
            master[rows].float(),
            (codes[i][rows], scale if recipe.has_one_block else scales[i][bands], *tensor),
            [master.abs().amax().float(), *_group_amax(weights[i], master)],
        )
        texts.append(f"{'AB'[i]} {found}")
    return "; ".join(texts)


def _bytes_of_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a stored tensor as uint8 [rows, bytes]."""
    return tensor.contiguous().reshape(rows, -1).view(torch.uint8)


def _group_amax(weight: torch.Tensor, master: torch.Tensor) -> list[torch.Tensor]:
    """Return the amax that the scale of the whole tensor was made from, if it is another one than
    that of the weight; it is a value of the master's dtype.
    """
    assert isinstance(weight, QuantizedTensor)
    storage = weight.quantized_storage
    if isinstance(storage.recipe.numerics, NVFP4Numerics):
        stored = storage.buffers["amax"]
    elif storage.recipe.has_one_block:
        stored = storage.buffers[storage.planes[0].scales_name] * E4M3.max
    else:
        return []
    amax = stored.reshape(()).to(master.dtype).float()
    is_own = math.isclose(amax.item(), master.abs().max().item(), rel_tol=2**-7)
    return [] if is_own else [amax]


def _formula(
    dialects: Sequence[Dialect],
    x: torch.Tensor,
    stored: Sequence[torch.Tensor],
    amaxes: Sequence[torch.Tensor],
) -> str:
    """Return which formula gives ``stored``, with the fewest changes, and with which of ``amaxes``:
    that of the weight, or that of its group.
    """
    best: tuple[int, str] | None = None
    for dialect in dialects:
        for amax in amaxes:
            changes = changes_giving(dialect.name, [(x, stored)], amax)
            if changes is None or (best is not None and len(changes) >= best[0]):
                continue
            text = f"has the formula of {dialect.name}"
            if amax != amaxes[0]:
                text += f" with the amax {amax.item():g} of its group"
            text += f", but {' and '.join(changes)}" if changes else ""
            best = len(changes), text
            if not changes:
                return text
    return best[1] if best else "has no known formula"
