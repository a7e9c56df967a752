"""What transformers calls the weights of a model in its checkpoints, where a model has other names.

transformers keeps the experts of Mixtral in one parameter, ``mlp.experts.gate_up_proj``, and its
checkpoints have ``block_sparse_moe.experts.0.w1.weight``. It converts a state dict to these names
itself, so it is given one whose values are numbers, and is seen to move them.
"""

import sys
from collections.abc import Sequence

import torch

from zerocast.errors import InputError
from zerocast.export.entries import Entry, ExportSource

_SIDE = 12
"""Of what stands for a tensor: one that is cut into 2, 3, 4 or 6 parts is seen to be cut."""


def package_names(
    source: ExportSource, parts: Sequence[tuple[Entry, Sequence[Entry]]]
) -> dict[str, str]:
    """Return the names that transformers gives to tensors in a checkpoint, by ours; of a source
    that is no model of that package none. A stack that it leaves fused has a name itself, and none
    of its projections.

    Args:
        source: a model, or what holds weights alone.
        parts: the entry of each parameter and buffer, and what is exported of it: itself, or of a
            stack its projections, matrix by matrix.

    Raises:
        InputError: where transformers cannot convert the names of such a model.
    """
    package = sys.modules.get("transformers")
    loading = sys.modules.get("transformers.core_model_loading")  # before 5 names were one
    if package is None or loading is None or not isinstance(source, package.PreTrainedModel):
        return {}
    ours: list[str] = []
    state: dict[str, torch.Tensor] = {}
    for entry, own in parts:
        names = [each.name for each in own] if own[0].recipe else [*own[0].parts] or [entry.name]
        end = len(ours) + len(names)
        numbers = torch.arange(len(ours), end, dtype=torch.float64, device="cpu")
        if names != [entry.name]:
            state[entry.name] = numbers.view(*entry.shape[:-2], -1, 1)
        elif not own[0].experts:  # stacks that a checkpoint has fused keep their own name
            state[entry.name] = numbers[0].expand((_SIDE,) * entry.tensor.dim())
        ours += names
    try:
        theirs = loading.revert_weight_conversion(source, dict(state))
    except Exception as error:
        raise InputError(
            f"transformers could not say what it calls the weights of {type(source).__name__} "
            f"({error}); give names=, a mapping or a function; {{}} keeps the model's own."
        ) from error
    stacks = {int(state[each.name].flatten()[0]): each.name for each, own in parts if own[0].parts}
    found: dict[str, str] = {}
    for name, values in theirs.items():
        number = int(values.reshape(-1)[0])
        mine, stack = ours[number], stacks.get(number)
        if stack is not None and values.numel() == state[stack].numel() > 1:
            found[stack] = name
            continue
        is_whole = values.numel() == (state[mine].numel() if mine in state else 1)
        if is_whole and bool((values == number).all()):
            found[mine] = name
    return found
