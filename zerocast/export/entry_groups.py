"""Groups of exported weights that share a tensor amax, and the check that fused weights do."""

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch

from zerocast.arguments import present
from zerocast.cast.amax_groups import (
    AUTO,
    Groups,
    Patterns,
    amax_group_labels,
    by_first_names,
    fused_weights,
    is_auto,
)
from zerocast.errors import InputError
from zerocast.export.dialects import Dialect
from zerocast.export.entries import Entry, ExportSource, stored_tensors
from zerocast.numerics import NVFP4Numerics
from zerocast.sharded.placement import to_local
from zerocast.tensors import QuantizedTensor


def trained_amax_groups(source: ExportSource) -> dict[str, str]:
    """Return the labels of the weights that were trained under a shared tensor amax."""
    labels: dict[str, str] = {}
    known: dict[int, str] = {}
    for name, tensor in stored_tensors(source).items():
        local = to_local(tensor)
        if isinstance(local, QuantizedTensor) and local.quantized_storage.amax_group is not None:
            labels[name] = f"trained {local.quantized_storage.amax_group}"
    for name, module in source.named_modules() if isinstance(source, torch.nn.Module) else ():
        group: Any = getattr(module, "amax_group", None)
        if group is not None:
            weight = f"{name}.weight" if name else "weight"
            labels[weight] = f"trained with {known.setdefault(id(group), str(len(known)))}"
    return labels


class AmaxGroups:
    """The amax groups of an export.

    Args:
        source: the model, optimizer or plan that is exported.
        amax_groups: patterns of names of weights that are cast, or "auto".
        recast: the names of the weights of ``source`` that are cast by the dialect's recipe;
            only these may be grouped by "auto".
    """

    def __init__(self, source: ExportSource, amax_groups: Groups, recast: Container[str]) -> None:
        self._patterns: Patterns = () if is_auto(amax_groups) else amax_groups
        self._fused = fused_weights(source) if isinstance(source, torch.nn.Module) else []
        self._labels = trained_amax_groups(source)
        for i, fused in enumerate(self._fused if is_auto(amax_groups) else ()):
            own = [name for name in fused if name in recast]
            label = next((self._labels[n] for n in own if n in self._labels), f"fused {i}")
            self._labels |= dict.fromkeys(own, label)

    def of_weights(self, entries: Iterable[Entry]) -> list[Entry]:
        """Return ``entries``, before stacks are split, with the labels of those that are cast.
        Entries whose bytes are exported get no label.
        """
        return [
            dataclasses.replace(entry, amax_group=self._labels.get(entry.name))
            if entry.shard is not None
            else entry
            for entry in entries
        ]

    def of_entries(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return ``entries`` with labels from the patterns; others keep the labels that they have.
        Every label becomes the name of the first entry of its group.
        """
        cast = [entry.name for entry in entries if entry.shard is not None]
        found = dict(zip(cast, amax_group_labels(self._patterns, cast), strict=True))
        labels = [found.get(entry.name) or entry.amax_group for entry in entries]
        groups = by_first_names(labels, [entry.name for entry in entries])
        return [
            dataclasses.replace(entry, amax_group=group)
            for entry, group in zip(entries, groups, strict=True)
        ]

    def check_fused(
        self, dialect: Dialect, matrices: Mapping[str, Sequence[str]], entries: Sequence[Entry]
    ) -> None:
        """Raise :class:`InputError` if weights that servers fuse have different tensor scales.

        Args:
            dialect: the dialect of the checkpoint.
            matrices: by the name of each weight, the names of the ``entries`` it was split into.
            entries: the entries of the export.
        """
        by_name = {e.name: e for e in entries if e.recipe is not None}
        fused = [
            [name for name in names if name in by_name]
            for weights in self._fused
            for names in zip(*(matrices[each] for each in weights if each in matrices), strict=True)
        ]
        for names in fused:
            forms = {name: by_name[name].dialect.name for name in names}
            if len(set(forms.values())) > 1:
                raise InputError(
                    f"servers fuse {', '.join(names)} into one layer, which has one format, got "
                    f"{', '.join(forms.values())}; give all of them one recipe, or pairs in "
                    f"by_name of {dialect.name}."
                )
        groups = {
            name: by_name[name].amax_group or name
            for names in fused
            for name in names
            if present(by_name[name].recipe).scales_tensor
        }
        whole = [name for name in groups if by_name[name].shard is None]
        if whole:
            scales = [_tensor_scale(by_name[name]) for name in whole]
            bits = torch.stack([each.to(scales[0].device) for each in scales]).tolist()
            groups |= dict(zip(whole, map(str, bits), strict=True))
        wrong = [names for names in fused if len({groups.get(name) for name in names}) > 1]
        if wrong:
            others = f" (and others, {len(wrong)} times)" if len(wrong) > 1 else ""
            raise InputError(
                f"servers fuse {', '.join(wrong[0])}{others} into one layer, which has one tensor "
                f"scale, and in {dialect.name} each would have a separate one; give "
                f"from_masters=True with amax_groups={AUTO!r}, the default, or convert the model "
                "in groups before it is trained (amax_groups of zerocast.nn.convert)."
            )


def _tensor_scale(entry: Entry) -> torch.Tensor:
    """Return the bits, as int32, of the tensor amax or scale in an entry's quantized bytes."""
    assert isinstance(entry.tensor, QuantizedTensor)
    storage = entry.tensor.quantized_storage
    has_amax = isinstance(storage.recipe.numerics, NVFP4Numerics)
    name = "amax" if has_amax else storage.planes[0].scales_name
    return storage.buffers[name].view(torch.int32).reshape(())
