"""checkpoint: activation recomputation that gives the same codes.

Recomputation runs a forward a second time, in the backward, when the region of
:class:`zerocast.autocast` has usually been left and the scales of delayed scaling have moved on.
The second run must quantize as the first one did: under its recipe, from its scales, and without
recording amaxes again. Layers see to that by themselves under torch's own checkpoints
(:mod:`zerocast.nn.recomputation`); this serves quantizers outside of layers, too, in both modes of
torch. :func:`zerocast.nn.autocast.checkpoint_contexts` does so for the mode without reentrance.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from zerocast.nn import autocast


def checkpoint(
    function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **options: Any
) -> Any:
    """``torch.utils.checkpoint.checkpoint`` for functions with zerocast's layers in them.

    Args:
        function: what to compute, now and again in the backward.
        args: its arguments.
        use_reentrant: torch's mode; either gives the gradients of no checkpoint at all, bit for
            bit.
        options: torch's further options and, without reentrance, the function's keyword arguments.

    Returns:
        What ``function`` returns.
    """
    first, again = autocast.checkpoint_contexts()
    has_run = False
    # A reentrant first run has gradients disabled, and is not an evaluation for all that.
    records = use_reentrant and torch.is_grad_enabled() and autocast.current().enabled

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        now, has_run = (again if has_run else first), True
        with ExitStack() as stack:
            stack.enter_context(now)
            if now is first and records:
                active = autocast.current()
                stack.enter_context(autocast.autocast(True, True, active.recipe, active.group))
            return function(*args, **kwargs)

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant, **options)
