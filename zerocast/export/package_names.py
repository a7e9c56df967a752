"""The names that transformers gives to weights in its checkpoints, if they differ from a model's.

transformers keeps the experts of Mixtral in one parameter, ``mlp.experts.gate_up_proj``, and its
checkpoints have ``block_sparse_moe.experts.0.w1.weight``. It can convert a state dict to these
names. So this module lets it convert one whose values are index numbers, and looks where they are.
"""

import sys
from collections.abc import Sequence

import torch

from zerocast.errors import InputError
from zerocast.export.entries import Entry, ExportSource

_SIDE = 12
"""The size of each dimension of a tensor's stand-in, divisible by 2, 3, 4 and 6. If transformers
splits a tensor into so many parts, each is smaller than the stand-in.
"""


def package_names(
    source: ExportSource, parts: Sequence[tuple[Entry, Sequence[Entry]]]
) -> dict[str, str]:
    """Return the names of transformers in a checkpoint by ours; empty if ``source`` is not a
    transformers model.

    A stack that transformers leaves fused has a name, and its projections have none.

    Args:
        source: a model, an optimizer or a plan.
        parts: the entry of each parameter and buffer, with the entries exported for it: itself, or
            the projections of a stack, matrix by matrix.

    Raises:
        InputError: if transformers cannot convert the names of the model.
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
        elif not own[0].experts:  # stacks that the checkpoint has fused keep their name
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
