"""Makes launches of rows and cuts: the tables that a kernel is given, and their memory.

A launch points to two tables: the rows of the weights (``tables.h``), and the tiles that it visits.
Both are copied to the device when the launch is prepared. The addresses and dtypes of masters are
in a separate table, which is sent again only after they were bound to other tensors.
"""

from __future__ import annotations

import threading
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import torch

from zerocast.backends.cuda.cuts import Cuts, WeightCuts
from zerocast.backends.cuda.launcher import Kernel, KernelArguments, Launcher
from zerocast.backends.launches import nothing
from zerocast.errors import BackendError
from zerocast.numerics import Masters, Operands

KEPT_TILES = 256
"""Tables of tiles that stay on the device for the next launch of the same shapes, beside those that
CUDA graphs read."""

_Key = tuple[tuple[WeightCuts, ...], bytes]
"""The fields of :class:`Cuts`."""

FEW_WEIGHTS = 4
"""The most weights of a launch whose tiles are kept: an activation is cast and decoded repeatedly,
in the same shape and at other addresses."""


class Tables:
    """The tables that the launches of one launcher point to.

    Note: tables in a CUDA graph
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    A graph repeats addresses and owns nothing. What is prepared in its capture has tables in the
    graph's own memory, except the tiles: those were sent before, so a table of tiles that a
    capture has used is kept until the process ends; one a shape. What was prepared before
    belongs to its owner, a plan, which therefore has to outlive the graphs that hold its launches.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._masters: weakref.WeakKeyDictionary[Masters, MasterTable] = weakref.WeakKeyDictionary()
        self._tiles: OrderedDict[_Key, torch.Tensor] = OrderedDict()
        self._tiles_in_graphs: dict[_Key, torch.Tensor] = {}
        # Of many weights: amax and cast of one plan visit the same tiles.
        self._tiles_of_plans: weakref.WeakValueDictionary[_Key, torch.Tensor] = (
            weakref.WeakValueDictionary()
        )
        self._one_thread = threading.Lock()  # for these four

    def launch(
        self,
        kernel: Kernel,
        rows: Iterable[list[int]],
        cuts: Cuts | None,
        numerics: list[int],
        operands: object,
        others: Sequence[torch.Tensor] = (),
        buffers: int = 0,
    ) -> Callable[..., None]:
        """Return the launch of ``kernel`` over the tiles that the weights are cut into, or over the
        weights themselves where ``cuts`` is None; it keeps alive what it points to.

        Prepared in a capture, it is for that capture only: its tables are written when the graph
        runs.

        Args:
            kernel: the kernel.
            rows: one a weight, as the kernel's table has them.
            cuts: how each weight is cut.
            numerics: the fields of NumericsTable; empty where the kernel takes no such struct.
            operands: the operands that the rows point to.
            others: tables that the rows point to.
            buffers: the number of tensors that each launch is given, whose addresses are the
                kernel's last single arguments.
        """
        fields, count = _table_of(rows)
        if not count:
            return nothing
        launcher = self._launcher
        handle = launcher.prepare(kernel)
        tables = [launcher.upload(torch.frombuffer(fields, dtype=torch.int64).view(count, -1))]
        if cuts is not None:
            tables.append(self._visited(cuts))
            count = len(tables[1])
        addresses = [table.data_ptr() for table in tables]
        words = [*addresses, count, *[0] * buffers]
        arguments = KernelArguments(words, numerics, [*tables, *others], operands)
        grid = min(count, launcher.max_grid)
        captured = launcher.capturing

        def launch(*given: torch.Tensor) -> None:
            if captured and not launcher.capturing:
                raise BackendError(
                    "a launch prepared during the capture of a CUDA graph must run in that "
                    f"capture, got {kernel} outside of it; prepare it before the capture."
                )
            for word, buffer in enumerate(given, len(words) - buffers):
                arguments.replace(word, buffer.data_ptr())
            launcher.launch(kernel, handle, grid, arguments)

        return launch

    def masters(self, masters: Masters) -> MasterTable:
        """Return the table of ``masters`` on the device, one for all launches."""
        with self._one_thread:
            known = self._masters.get(masters)
        if known is None:
            known = MasterTable(self._launcher, masters)
            if not self._launcher.capturing:
                with self._one_thread:
                    self._masters[masters] = known
        return known

    def lists(self, operands: Operands) -> Lists:
        """Return the lists of candidates, one table for one launch."""
        candidates = [o.candidates for o in operands if o.candidates is not None]
        return Lists(self._launcher, [t for c in candidates for t in (c.cut, c.segments)])

    def _visited(self, cuts: Cuts) -> torch.Tensor:
        key, capturing = (cuts.distinct, cuts.of_weights.tobytes()), self._launcher.capturing
        if len(cuts.of_weights) > FEW_WEIGHTS:
            return self._visited_by_plans(key, cuts)
        with self._one_thread:
            tiles = self._tiles_in_graphs.get(key)
            if tiles is None:
                tiles = self._tiles.get(key)
                if tiles is not None and capturing:
                    self._tiles_in_graphs[key] = self._tiles.pop(key)
                elif tiles is not None:
                    self._tiles.move_to_end(key)
        if tiles is None:
            tiles = self._launcher.upload(cuts.tiles())
            if not capturing:
                self._keep(key, tiles)
        return tiles

    def _visited_by_plans(self, key: _Key, cuts: Cuts) -> torch.Tensor:
        with self._one_thread:
            tiles = self._tiles_of_plans.get(key)
        # A graph cannot rely on what belongs to a plan.
        if tiles is None or self._launcher.capturing:
            tiles = self._launcher.upload(cuts.tiles())
            with self._one_thread:
                self._tiles_of_plans[key] = tiles
        return tiles

    def _keep(self, key: _Key, tiles: torch.Tensor) -> None:
        with self._one_thread:
            self._tiles[key] = tiles
            if len(self._tiles) > KEPT_TILES:
                self._tiles.popitem(last=False)  # the least recently used


def _table_of(rows: Iterable[list[int]]) -> tuple[array[int], int]:
    """Return the rows end to end, and how many there are."""
    fields, count = array("q"), 0
    for row in rows:
        fields.fromlist(row)
        count += 1
    return fields, count


class MasterTable:
    """A copy of ``Masters.table`` that kernels can read."""

    def __init__(self, launcher: Launcher, masters: Masters) -> None:
        self._launcher = launcher
        self._version = masters.version
        self.tensor = launcher.upload(masters.table)

    def place(self, masters: Masters, slot: int) -> int:
        """Return the address at which a kernel reads the master of a slot."""
        return masters.place(slot, self.tensor)

    def follow(self, masters: Masters) -> None:
        """Send the table again if ``masters`` were bound to other tensors."""
        if self._version != masters.version:
            self._launcher.refresh(self.tensor, masters.table)
            self._version = masters.version


class Lists:
    """A copy of lists of integers, given on the CPU, that kernels can read: all in one table."""

    def __init__(self, launcher: Launcher, lists: Sequence[torch.Tensor]) -> None:
        self._alive = lists  # a freed tensor's id could become another's
        self._offsets: dict[int, int] = {}
        total = 0
        for values in lists:
            self._offsets[id(values)] = total
            total += values.numel()
        self.tensors = [launcher.upload(torch.cat(list(lists)))] if total else []

    def address(self, values: torch.Tensor) -> int:
        """Return the address of one of the lists; 0 if all are empty."""
        for tensor in self.tensors:
            return tensor.data_ptr() + self._offsets[id(values)] * values.element_size()
        return 0
