"""From rows and cuts to launches: the tables that a kernel is given, and where they lie.

A launch points to two tables: the rows of the weights (``tables.h``), and the tiles that it visits.
Both are copied to the device when the launch is prepared. The addresses of masters stand in a table
of their own, which is sent again only after the masters were bound to other tensors.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence

import torch

from zerocast.backends.cuda.launcher import Arguments, Kernel, Launcher
from zerocast.backends.cuda.tiling import Cut, tiles_of
from zerocast.errors import BackendError
from zerocast.ops import Candidates, Launch, Masters

KEPT_TILES = 256
"""Tables of tiles that stay on the device for the next launch of the same shapes."""

FEW_WEIGHTS = 4
"""Up to so many weights a launch has tiles that are kept: an activation is cast and decoded again
and again, in the same shape and at other addresses."""


class Tables:
    """What launches of one launcher point to."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._pointers: weakref.WeakKeyDictionary[Masters, MasterPointers] = (
            weakref.WeakKeyDictionary()
        )
        self._tiles: OrderedDict[tuple[tuple[Cut, ...], ...], torch.Tensor] = OrderedDict()

    def launch(
        self,
        kernel: Kernel,
        rows: list[list[int]],
        cuts: Sequence[Sequence[Cut]] | None,
        scalars: list[int],
        operands: object,
    ) -> Launch:
        """The launch of ``kernel`` over the tiles that the weights are cut into, or over the
        weights themselves where ``cuts`` is None; it keeps alive what it points to.

        Prepared in a capture, it is for that capture only: its tables are written when the graph
        runs.

        Args:
            kernel: which.
            rows: one a weight, as the kernel's table has them.
            cuts: how each weight is cut.
            scalars: the arguments after the tables and their length.
            operands: what the rows point to.
        """
        if not rows:
            return nothing
        launcher = self._launcher
        handle = launcher.prepare(kernel)
        weights = launcher.upload(torch.tensor(rows, dtype=torch.int64, device="cpu"))
        tables, count = [weights], len(rows)
        if cuts is not None:
            tables.append(self._visited(cuts))
            count = len(tables[1])
        arguments = Arguments([*(table.data_ptr() for table in tables), count, *scalars])
        grid = min(count, launcher.max_grid)
        alive, captured = (tables, operands), launcher.capturing

        def launch() -> None:
            assert alive
            if captured and not launcher.capturing:
                raise BackendError(
                    "what is prepared while a CUDA graph is captured must run in that capture, "
                    f"got {kernel.name} outside of it; prepare it outside, too."
                )
            launcher.launch(kernel, handle, grid, arguments)

        return launch

    def pointers(self, masters: Masters) -> MasterPointers:
        """The addresses of ``masters``, one table for all launches."""
        known = self._pointers.get(masters)
        if known is None:
            known = MasterPointers(self._launcher, masters)
            if not self._launcher.capturing:
                self._pointers[masters] = known
        return known

    def lists(self, candidates: Sequence[Candidates]) -> Lists:
        """The lists of candidates, one table for one launch."""
        return Lists(self._launcher, [t for c in candidates for t in (c.cut, c.segments)])

    def _visited(self, cuts: Sequence[Sequence[Cut]]) -> torch.Tensor:
        if len(cuts) > FEW_WEIGHTS:
            return self._launcher.upload(tiles_of(cuts))
        key = tuple(tuple(weight) for weight in cuts)
        tiles = self._tiles.pop(key, None)
        if tiles is None:
            tiles = self._launcher.upload(tiles_of(cuts))
        if not self._launcher.capturing:
            self._tiles[key] = tiles  # the latest one used is the last one
            if len(self._tiles) > KEPT_TILES:
                self._tiles.popitem(last=False)
        return tiles


class MasterPointers:
    """The addresses of masters where kernels can read them."""

    def __init__(self, launcher: Launcher, masters: Masters) -> None:
        self._launcher = launcher
        self._version = masters.version
        self._table = launcher.upload(masters.pointers)

    def slot(self, index: int) -> int:
        """Where the address of one master stands."""
        return self._table.data_ptr() + index * self._table.element_size()

    def follow(self, masters: Masters) -> None:
        """Send the addresses again where ``masters`` were bound anew."""
        if self._version != masters.version:
            self._launcher.refresh(self._table, masters.pointers)
            self._version = masters.version


class Lists:
    """Lists of integers, given on the CPU, where kernels can read them: all in one table."""

    def __init__(self, launcher: Launcher, lists: Sequence[torch.Tensor]) -> None:
        self._alive = lists  # an id belongs to its tensor as long as that lives
        self._offsets: dict[int, int] = {}
        total = 0
        for values in lists:
            self._offsets[id(values)] = total
            total += values.numel()
        self._table = launcher.upload(torch.cat(list(lists))) if total else None

    def address(self, values: torch.Tensor) -> int:
        """Of one of the lists; 0 where all are empty."""
        if self._table is None:
            return 0
        return self._table.data_ptr() + self._offsets[id(values)] * values.element_size()


def in_turn(launches: Sequence[Launch]) -> Launch:
    """The launch of all, one after the other."""

    def launch() -> None:
        for run in launches:
            run()

    return launch


def nothing() -> None:
    """The launch of an operation on no elements."""
