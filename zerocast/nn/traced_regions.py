"""What torch.compile sees of regions of autocast.

A compiled function is guarded by what it has read. It can read an attribute of a thread, and
neither a context variable nor an object that each region has anew. So every region shows itself
here, as the text of its recipe.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import replace

import torch

from zerocast.recipes import DelayedScaling, Recipe

NO_REGION = ""
HIGH_PRECISION = "high precision"
UNTRACEABLE = "untraceable"

GRAPHS_REMEMBER = torch.__version__ >= (2, 13)  # type: ignore[operator]
"""Whether torch.compile holds operations of recipes that remember something; with earlier releases
of torch the graph breaks there."""


class _Traced:
    """What a compiled function can be guarded by.

    Attributes:
        recipe: the text of the recipe by which products are quantized here; or
            :data:`HIGH_PRECISION` in a region that is not enabled, :data:`NO_REGION` outside of
            any, :data:`UNTRACEABLE` where a graph could not hold what the region does.
        entries: for each region that is open, whether a compiled function has entered it, and what
            ``recipe`` was before.
    """

    def __init__(self) -> None:
        self.recipe = NO_REGION
        self.entries: list[tuple[bool, str]] = []

    def enter(self, recipe: str, *, compiled: bool) -> None:
        """A region of this recipe is entered."""
        self.entries.append((compiled, self.recipe))
        self.recipe = recipe

    def leave(self) -> bool:
        """The innermost region is left; gives whether a compiled function had entered it."""
        compiled, self.recipe = self.entries.pop()
        return compiled


class _Here(threading.local):
    """Of each thread. (Attributes of such an object itself a compiled function reads, but does not
    write.)
    """

    def __init__(self) -> None:
        self.traced = _Traced()


here = _Here()
_lock = threading.Lock()
_open = 0  # regions that are open in any thread
any_open = False
"""Whether any thread has a region open. A worker thread or a task may be in a region of another
one, which :class:`_Traced` does not show."""
were_entered = False
"""Whether any region has been entered in this process."""


def traced_recipe() -> str:
    """For a function that is being compiled: what counts here, as ``_Traced.recipe``."""
    if any_open and here.traced.recipe == NO_REGION:
        return UNTRACEABLE
    return here.traced.recipe


def shown_recipe(recipe: Recipe) -> str:
    """What a region of this recipe shows that was entered outside of compiled functions. Its
    operations take the recipe itself from the region, so a function of its own is left out.
    """
    if isinstance(recipe, DelayedScaling) and callable(recipe.amax_compute_algo):
        recipe = replace(recipe, amax_compute_algo="max")
    if recipe.remembers and not GRAPHS_REMEMBER:
        return UNTRACEABLE
    return recipe.text


def show(recipe: str) -> None:
    """Let compiled functions see that a region is entered, which shows ``recipe``."""
    global _open, any_open, were_entered
    with _lock:
        _open += 1
        any_open = were_entered = True
    asyncio = sys.modules.get("asyncio")
    in_task = asyncio is not None and asyncio._get_running_loop() is not None
    # Tasks of one thread are in regions of their own.
    here.traced.enter(UNTRACEABLE if in_task else recipe, compiled=False)


def hide() -> None:
    """Let them see that the innermost one is not active any more."""
    global _open, any_open
    here.traced.leave()
    with _lock:
        _open -= 1
        any_open = _open > 0
    if not any_open and not here.traced.entries:
        here.traced.recipe = NO_REGION
