"""Measurement: the amaxes of a plan's masters, taken at the cast, or earlier by an optimizer that
updates the masters.

Note: amaxes that an optimizer took
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An update that writes masters has them at hand, so :meth:`Measurement.update` measures them in the
same pass (:meth:`zerocast.numerics.Backend.adamw_cast`), and writes the codes of whole blocks. The
next cast begins with these amaxes where they are those of the masters as they are: if since then no
master was written, by torch's count of writes, none moved or was bound anew, and no weight moved.
Otherwise it measures again, and so does every later cast. A write that torch does not count
(through ``.data``) must not come between the update and the cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerocast.cast.exchange import Exchange
from zerocast.cast.prepared_cast import PreparedCast
from zerocast.comm import Attempt
from zerocast.numerics import AdamWUpdate
from zerocast.tensors import CastVersion
from zerocast.tensors.cast_steps import CastSteps


@dataclass(frozen=True)
class _Measured:
    """What the amaxes were taken of: unequal where that has changed."""

    steps: CastSteps  # which are made anew where a weight has moved
    bindings: int
    writes: list[int]  # by master, as torch counts them


class Measurement:
    """The first step of a cast: amaxes, and what codes wait for nothing.

    Args:
        prepared: the launches.
        exchange: whose buffers receive the amaxes.
        version: of the cast's weights.
    """

    def __init__(self, prepared: PreparedCast, exchange: Exchange, version: CastVersion) -> None:
        self._prepared, self._exchange, self._version = prepared, exchange, version
        self._measured: _Measured | None = None

    def run(self, attempt: Attempt) -> None:
        """Measure the masters, but where an update has just done so; nothing after an error."""
        measured, self._measured = self._measured, None
        if attempt.error is not None:
            return
        with attempt:
            self._follow()
            if measured is None or measured != self._now():
                self._begin()
                self._prepared.steps.run("partial_amax")

    def update(self, updates: Sequence[AdamWUpdate]) -> list[AdamWUpdate]:
        """Make those of ``updates`` that are of masters, and measure all masters; return the
        others, and all where a cast must write nothing before its amaxes were judged.
        """
        bound = self._prepared.bound
        places = {master.data_ptr(): i for i, master in enumerate(bound) if master is not None}
        by_place: list[AdamWUpdate | None] = [None] * len(bound)
        others = []
        for update in updates:
            place = places.get(update.master.data_ptr())
            if place is None or self._prepared.judges_amaxes:
                others.append(update)
            else:
                by_place[place] = update
        if any(by_place):
            self._measured = None
            self._follow()
            self._begin()
            self._prepared.update(by_place)
            self._measured = self._now()
        return others

    def _follow(self) -> None:
        """Find what has moved."""
        self._prepared.follow_moves()
        self._prepared.follow_masters()

    def _begin(self) -> None:
        """Clear the amaxes, and take the codes for written where they will be."""
        self._exchange.follow_stream(self._prepared.gathered_scales)
        self._exchange.buffers.clear()
        if self._prepared.steps.writes_early:
            self._version.tick(self._prepared.addresses.written)

    def _now(self) -> _Measured:
        writes = [-1 if m is None else m._version for m in self._prepared.bound]
        return _Measured(self._prepared.steps, self._prepared.masters.version, writes)
