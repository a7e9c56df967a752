"""untraced: keeps torch.compile out of functions that read addresses and launch kernels.

``torch._disable_dynamo`` does this, too. But its first call imports torch's compiler, which takes
seconds in every process, and each call disables the compiler even if it is not active. Here both
happen only in threads that run compiled code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._C._dynamo import eval_frame

_P = ParamSpec("_P")
_T = TypeVar("_T")

_compiler_at_work: Callable[[], object] = getattr(eval_frame, "get_eval_frame_callback", lambda: "")
"""Returns None if this thread runs nothing compiled. If torch lacks the query, returns a value."""


def untraced(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make compiled code call ``function`` untraced, between two graphs.

    Torch refuses this for code that must be one graph.
    """
    disabled = torch._disable_dynamo(function)

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        # The compiler may trace to here; it knows the value of the first condition.
        if torch.compiler.is_dynamo_compiling() or _compiler_at_work() is not None:
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return run
