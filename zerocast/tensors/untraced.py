"""untraced: keeps torch.compile out of functions that read addresses and launch kernels.

``torch._disable_dynamo`` does so, too. But its first call imports torch's compiler, which takes
seconds in every process, and each call tells that compiler to stand aside, where it is not at work
as well. Here both are left to threads in which something compiled runs.
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
"""Returns None where this thread runs nothing compiled. Where torch cannot tell, it may."""


def untraced(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let compiled code call ``function`` as it is, between two graphs; a graph that must be whole
    is refused by torch.
    """
    disabled = torch._disable_dynamo(function)

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        # The compiler, which may follow a call until here, knows the first answer.
        if torch.compiler.is_dynamo_compiling() or _compiler_at_work() is not None:
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return run
