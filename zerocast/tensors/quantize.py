"""Making quantized weights, and what touches their bytes outside a plan.
 The unsharded cast runs the same four steps of a recipe as a plan does, with one shard that is the
whole weight and no reduction between them; so a sharded cast has something to be equal to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from zerocast.backends import backend_for
from zerocast.errors import InputError
from zerocast.layout import Cuts, Extent
from zerocast.ops import Candidates, Masters
from zerocast.recipes import NOMINAL_DTYPES, Recipe
from zerocast.tensors.quantized_tensor import QuantizedTensor
from zerocast.tensors.storage import QuantizedStorage

_NOMINAL_NAMES = "torch.float32, torch.bfloat16 or torch.float16"


def quantize(
    tensor: torch.Tensor,
    recipe: Recipe,
    *,
    dtype: torch.dtype | None = None,
    columnwise: bool = True,
) -> QuantizedTensor:
    """Cast a whole tensor: the law that every sharded cast must equal, byte for byte.

    Args:
        tensor: FP32, BF16 or FP16, of a shape that the recipe holds; any strides. A gradient does
            not flow through.
        recipe: the scheme.
        dtype: the nominal dtype of the result, which elements are rounded to first; the tensor's
            own by default.
        columnwise: whether the weight holds the columnwise copy.

    Returns:
        A weight of its own bytes on the tensor's device. A NaN or an infinity makes everything
        under its scale NaN.

    Raises:
        InputError: for another dtype, or a shape that the recipe cannot hold.
    """
    given = getattr(tensor, "dtype", type(tensor).__name__)
    if given not in NOMINAL_DTYPES:
        raise InputError(
            f"quantize needs a tensor of {_NOMINAL_NAMES}, got {given}; convert it first."
        )
    weight = empty(
        tensor.shape,
        recipe,
        dtype=tensor.dtype if dtype is None else dtype,
        device=tensor.device,
        columnwise=columnwise,
    )
    quantize_into(weight.storage, tensor)
    return weight


def empty(
    shape: Sequence[int],
    recipe: Recipe,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    columnwise: bool = True,
) -> QuantizedTensor:
    """An unfilled quantized weight: every code and every scale is 0, so it decodes to zeros.

    Args:
        shape: the nominal shape.
        recipe: the scheme.
        dtype: the nominal dtype: FP32, BF16 or FP16.
        device: where the bytes are; torch's default device by default.
        columnwise: whether the weight holds the columnwise copy.

    Raises:
        InputError: for another dtype, or a shape that the recipe cannot hold.
    """
    if not isinstance(recipe, Recipe):
        raise InputError(
            f"recipe must be a zerocast recipe such as NVFP4BlockScaling(), got {recipe!r}; pass "
            f"an instance."
        )
    if dtype not in NOMINAL_DTYPES:
        raise InputError(
            f"the nominal dtype of a quantized weight must be {_NOMINAL_NAMES}, got {dtype}."
        )
    recipe.check_shape(shape)
    device = torch.get_default_device() if device is None else torch.device(device)
    return QuantizedTensor(
        QuantizedStorage.empty(shape, dtype, recipe, device, columnwise=columnwise)
    )


def quantize_into(storage: QuantizedStorage, source: torch.Tensor) -> None:
    """Cast ``source`` into an existing weight: codes, scales, amax and derived copies.

    Args:
        storage: the weight's bytes; written in place, so buffers stay where they are.
        source: of the weight's shape; any strides, real dtype and device. FP32 is what is cast:
            other dtypes are converted to it first.
    """
    assert source.shape == storage.shape, (source.shape, storage.shape)
    master = _plain_fp32(source, storage.device)
    sources = [master]
    recipe, backend = storage.recipe, backend_for(storage.device)
    transposes = recipe.casts_transpose and storage.has_columnwise
    if transposes:
        sources.append(master.view(-1, master.shape[-1]).t().contiguous())
    masters = Masters(len(sources))
    masters.bind(sources)
    amax = torch.zeros(storage.amax_slots, dtype=torch.int32, device=storage.device)
    candidates = None
    if recipe.chooses_scales:
        uncut = Cuts()
        words = Candidates.words(storage.grid, uncut)
        buffer = torch.zeros(words, dtype=torch.int32, device=storage.device)
        candidates = Candidates.carve(buffer, storage.grid, uncut)
    shards = storage.cast_shards(
        0,
        Extent(0, master.numel()),
        amax,
        candidates=candidates,
        transposed_slot=1 if transposes else None,
    )
    if not recipe.casts_before_reduction:
        recipe.partial_amax(backend, shards, masters)()
        if candidates is not None:
            recipe.partial_select(backend, shards, masters)()
        recipe.compute_scale(backend, storage.scale_targets(amax, candidates))()
    recipe.partial_cast(backend, shards, masters)()
    if recipe.casts_before_reduction:
        recipe.compute_scale(backend, storage.scale_targets(amax))()
    storage.mark_written()
    rebuild_derived([storage])


def _plain_fp32(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``source`` in memory that a backend can read: FP32, contiguous; itself where it is that."""
    if type(source) in (torch.Tensor, torch.nn.Parameter):
        return source.detach().to(device, torch.float32).contiguous()
    # A subclass may have no memory of its own (a quantized weight, a view of one) but can be read.
    return torch.empty(source.shape, dtype=torch.float32, device=device).copy_(source.detach())


def rebuild_derived(storages: Iterable[QuantizedStorage]) -> None:
    """Make the derived copies of weights from their present codes.

    One launch for each recipe and device. Weights without a columnwise copy are skipped.
    """
    groups: dict[tuple[Recipe, torch.device], list[QuantizedStorage]] = {}
    for storage in storages:
        if storage.derived_names:
            groups.setdefault((storage.recipe, storage.device), []).append(storage)
    for (recipe, device), group in groups.items():
        targets = [storage.transpose_target() for storage in group]
        recipe.post_all_gather_processing(backend_for(device), targets)()
        for storage in group:
            storage.mark_rebuilt()


def replace_raw_data(tensor: QuantizedTensor, new_raw_data: torch.Tensor) -> None:
    """Move a weight's codes into a buffer of the caller's; the value stays the same.

    Every alias of the weight sees the new buffer, and derived copies stay valid. This is how the
    codes of many weights become slices of the one flat buffer that an all-gather moves.

    Args:
        tensor: the weight.
        new_raw_data: uint8, contiguous, on the weight's device, of as many bytes as
            ``tensor.rowwise_data``: in its shape or as a 1-D slice. Overwritten with the codes.

    Raises:
        InputError: where it is not that. Nothing has been written.
    """
    if not isinstance(tensor, QuantizedTensor):
        raise InputError(f"replace_raw_data needs a QuantizedTensor, got {type(tensor).__name__}.")
    old = tensor.storage.buffers["rowwise_data"]
    given = getattr(new_raw_data, "dtype", type(new_raw_data).__name__)
    if given != torch.uint8:
        raise InputError(
            f"new_raw_data must be a torch.uint8 tensor (codes are bytes), got {given}; use "
            f".view(torch.uint8)."
        )
    if new_raw_data.device != old.device:
        raise InputError(
            f"new_raw_data must be on the weight's device {old.device}, got {new_raw_data.device}; "
            f"move the weight first."
        )
    if new_raw_data.shape not in (old.shape, (old.numel(),)):
        raise InputError(
            f"new_raw_data must hold the {old.numel()} bytes of the weight's codes, in shape "
            f"{tuple(old.shape)} or ({old.numel()},), got shape {tuple(new_raw_data.shape)}."
        )
    if not new_raw_data.is_contiguous():
        raise InputError(
            f"new_raw_data must be contiguous, got shape {tuple(new_raw_data.shape)} with strides "
            f"{new_raw_data.stride()}; give a slice of a flat buffer."
        )
    new = new_raw_data.detach().view(old.shape)
    new.copy_(old.clone())  # the clone, because the new buffer may overlap the old one
    tensor.storage.replace("rowwise_data", new)
