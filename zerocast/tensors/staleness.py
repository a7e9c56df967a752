"""Counts of the writes of a weight's codes, by which copies that are older than the codes are
found.

Note: derived copies
~~~~~~~~~~~~~~~~~~~~
The columnwise copy is derived from the gathered rowwise codes. A cast changes this rank's codes at
once and those of other ranks follow with the all-gather, so between a cast and post-all-gather
processing the copy is *stale*: reading it raises an error, because it would be rebuilt from bytes
that have not arrived. A plan casts thousands of weights and rebuilds them, so it does not mark them
one by one: it owns a :class:`CastVersion`, which notes when it last cast and when it last rebuilt
all of its weights, by a clock that all of them share. A weight holds the versions of the plans that
it is in, and when it was rebuilt alone; its copies are stale where any of the plans has cast after
the latest rebuilding.

Where a plan's ranks make the scales of their own blocks alone, the stored scales are true again
when these have been gathered. Until then a weight *lacks scales*, and reading it raises an error.

Note: casts and gathers that fail
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Between the first code that a cast writes and its last, and while codes are gathered, a weight holds
parts of two casts. If either fails, it stays so, and reading it raises an error until the same plan
has cast or gathered again, or something else has written all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import ClassVar

import torch

from zerocast.errors import StaleCopyError, UnfinishedStepError

_clock = itertools.count(1)


class CastVersion:
    """Counts the casts of one plan.

    Attributes:
        ticks: casts so far.
        ticked_at, rebuilt_at: when it last cast, and when it last rebuilt all of its weights; 0 for
            never.
        rebuild_on_use: whether the next forward may rebuild derived copies, because the caller
            promised that the all-gather is done by then
            (``manual_post_all_gather_processing=False``).
        retired: whether the plan was deleted and will not cast again.
        has_scales: whether the stored scales are those of the latest cast; the plan says so.
        unfinished: what has begun to write the weights and not ended: "cast", "all-gather".
        begun_by_casts: what of that each cast begins.
    """

    all_writes: ClassVar[int] = 0
    """Of all weights that there are: casts of plans, and single writes by others. Who knows the
    casts of his own sees in one comparison whether to look for others' writes."""

    def __init__(self, *, rebuild_on_use: bool) -> None:
        self.ticks = self.ticked_at = self.rebuilt_at = 0
        self.rebuild_on_use = rebuild_on_use
        self.retired = False
        self.has_scales = True
        self.unfinished: set[str] = set()
        self.begun_by_casts = {"cast"}

    def retire(self) -> None:
        """Note that the plan was deleted."""
        self.retired = True

    def tick(self, written: Collection[torch.Tensor] = ()) -> None:
        """Note that a cast begins to write, so that derived copies made before are stale. torch
        counts the write of the tensors ``written``, so that a backward which saved one of them is
        an error. The cast is ``unfinished`` until the plan says otherwise.
        """
        self.unfinished |= self.begun_by_casts
        self.ticks += 1
        CastVersion.all_writes += 1
        self.ticked_at = next(_clock)
        if written:
            torch.autograd.graph.increment_version(written)

    def begin(self, what: str) -> None:
        """Note that ``what`` begins to write the plan's weights. Until its :meth:`end`, which an
        exception leaves out, reading a weight raises :class:`zerocast.UnfinishedStepError`.
        """
        self.unfinished.add(what)

    def end(self, what: str) -> None:
        """Note that ``what`` has written all that it was to write."""
        self.unfinished.discard(what)

    def mark_rebuilt(self) -> None:
        """Note that the derived copies of all weights of the plan have just been made."""
        self.rebuilt_at = next(_clock)


class Writes:
    """The writes of one weight's codes, by plans and by others.

    Attributes:
        others: the number of writes that were not casts of watched plans; corrected when a plan is
            watched or forgotten, so that :attr:`version` does not change then.
    """

    def __init__(self) -> None:
        self.others = 0
        self._watched: dict[CastVersion, int] = {}  # the versions of plans, and since when
        self._own_rebuilt_at = self._others_wrote_at = 0

    @property
    def version(self) -> int:
        """A number that every write of codes changes."""
        return self.others + sum(version.ticks for version in self._watched)

    def note_other(self) -> None:
        """Note that something other than a plan has just written codes and scales."""
        self.others += 1
        CastVersion.all_writes += 1
        self._others_wrote_at = next(_clock)

    @property
    def lack_scales(self) -> bool:
        """Whether the latest write was a cast whose scales have not been gathered."""
        latest = self._latest
        return latest is not None and not latest.has_scales

    @property
    def unfinished(self) -> set[str]:
        """The names of what has begun to write the weight, in or after the latest cast, and has not
        ended.
        """
        latest = self._latest
        return set() if latest is None else latest.unfinished

    @property
    def are_readable(self) -> bool:
        """Whether codes and scales are those of one write, which has ended."""
        return not (self.lack_scales or self.unfinished)

    @property
    def _latest(self) -> CastVersion | None:
        """The plan that cast last, where nothing else has written since."""
        latest = max(self._watched, key=lambda version: version.ticked_at, default=None)
        return latest if latest and latest.ticked_at > self._others_wrote_at else None

    def require_scales(self) -> None:
        """Raise :class:`StaleCopyError` where the writes :attr:`lack_scales`, and
        :class:`UnfinishedStepError` where one is :attr:`unfinished`.
        """
        if self.unfinished:
            raise UnfinishedStepError(
                f"this weight holds parts of two casts, because its {min(self.unfinished)} has "
                "begun and not ended; cast and gather again, or load a checkpoint."
            )
        if self.lack_scales:
            raise StaleCopyError(
                "this weight was read after a cast by a plan with exchange='boundary' and before "
                "its scales were gathered; call plan.all_gather(), or plan.all_gather_scales() "
                "where you gather the codes by yourself."
            )

    @property
    def were_cast(self) -> bool:
        """Whether a plan has cast since the derived copies were made."""
        return bool(self._stale())

    @property
    def rebuild_on_use(self) -> bool | None:
        """Whether the next forward may rebuild derived copies; None where no plan has cast since
        they were made.
        """
        stale = self._stale()
        return all(version.rebuild_on_use for version in stale) if stale else None

    def watch(self, version: CastVersion) -> None:
        """Let a tick of ``version`` count as a cast from now on."""
        if version not in self._watched:
            self._forget_retired()
            self._watched[version] = next(_clock)
            self.others -= version.ticks

    def mark_rebuilt(self) -> None:
        """Note that the derived copies have just been made from the present codes."""
        self._own_rebuilt_at = next(_clock)
        self._forget([version for version in self._watched if version.retired])

    def take_over(self, rebuild_on_use: bool | None) -> None:
        """Take over the staleness of another weight, given its :attr:`rebuild_on_use`, but not its
        plans, which cast that weight alone.
        """
        if rebuild_on_use is not None:
            self._tick_once(rebuild_on_use)

    def _tick_once(self, rebuild_on_use: bool) -> CastVersion:
        """Watch a version that has ticked and is retired."""
        version = CastVersion(rebuild_on_use=rebuild_on_use)
        self.watch(version)
        version.tick()
        version.unfinished.clear()
        version.retire()
        return version

    def _forget_retired(self) -> None:
        """Replace all retired versions by one; :attr:`version` and staleness do not change."""
        retired = [version for version in self._watched if version.retired]
        if len(retired) < 2:
            return
        stale = [version for version in self._stale() if version.retired]
        lack_scales, unfinished = self.lack_scales, self.unfinished
        self._own_rebuilt_at = self._rebuilt_at
        self._forget(retired)
        if stale:
            one = self._tick_once(all(version.rebuild_on_use for version in stale))
            self.others -= 1  # the tick of the one that stands for them
            one.has_scales, one.unfinished = not lack_scales, set(unfinished)

    def _forget(self, retired: Iterable[CastVersion]) -> None:
        """Count what these have cast as the writes of others."""
        for version in retired:
            self.others += version.ticks
            del self._watched[version]

    @property
    def _rebuilt_at(self) -> int:
        """The time at which the derived copies were last made, by a plan or alone."""
        by_plans = [v.rebuilt_at for v, since in self._watched.items() if v.rebuilt_at > since]
        return max(self._own_rebuilt_at, *by_plans, 0)

    def _stale(self) -> list[CastVersion]:
        """Return the versions that have ticked since the derived copies were made."""
        rebuilt = self._rebuilt_at
        return [v for v, since in self._watched.items() if v.ticked_at > max(rebuilt, since)]
