"""Counters of the writes of a weight's codes, which show whether copies are older than the codes.

Note: derived copies
~~~~~~~~~~~~~~~~~~~~
The columnwise copy is derived from the gathered rowwise codes. A cast changes this rank's codes at
once; those of other ranks follow with the all-gather. Between a cast and post-all-gather processing
the copy is *stale*: reading it raises an error, because rebuilding it would read bytes that have
not arrived. A plan casts thousands of weights and rebuilds them, so it does not mark each of them.
It has a :class:`CastVersion`, which records when it last cast and when it last rebuilt all of its
weights, on a common clock. A weight refers to the versions of its plans, and records when it was
rebuilt alone. Its copies are stale if any of the plans has cast after the latest rebuild.

If each rank of a plan makes the scales of its blocks only, the stored scales are valid again after
a gather of the scales. Until then a weight *lacks scales*, and reading it raises an error.

Note: casts and gathers that fail
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Between the first and the last code that a cast writes, and while codes are gathered, a weight holds
parts of two casts. If either fails, reading the weight raises an error until the same plan has cast
or gathered again, or something else has written all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import ClassVar

import torch

from zerocast.errors import StaleCopyError, UnfinishedStepError

_clock = itertools.count(1)


class CastVersion:
    """A counter of the casts of one plan.

    Attributes:
        ticks: the number of casts so far.
        ticked_at, rebuilt_at: the time of the last cast, and of the last rebuild of all weights; 0
            for never.
        rebuild_on_use: whether the next forward may rebuild derived copies, because the caller
            guarantees that the all-gather is done by then
            (``manual_post_all_gather_processing=False``).
        retired: whether the plan was deleted and will not cast again.
        has_scales: whether the stored scales are those of the latest cast; set by the plan.
        unfinished: what has begun to write the weights and not ended: "cast", "all-gather".
        begun_by_casts: what each cast adds to ``unfinished``.
    """

    all_writes: ClassVar[int] = 0
    """The number of writes of all weights: casts of plans, and single writes by other code. Code
    that counts its own casts needs one comparison to detect other writes."""

    def __init__(self, *, rebuild_on_use: bool) -> None:
        self.ticks = self.ticked_at = self.rebuilt_at = 0
        self.rebuild_on_use = rebuild_on_use
        self.retired = False
        self.has_scales = True
        self.unfinished: set[str] = set()
        self.begun_by_casts = {"cast"}

    def retire(self) -> None:
        """Record that the plan was deleted."""
        self.retired = True

    def tick(self, written: Collection[torch.Tensor] = ()) -> None:
        """Record that a cast begins to write, so that existing derived copies are stale.

        Torch counts a write of the tensors ``written``, so that a backward which saved one of them
        raises an error. The cast is ``unfinished`` until the plan ends it.
        """
        self.unfinished |= self.begun_by_casts
        self.ticks += 1
        CastVersion.all_writes += 1
        self.ticked_at = next(_clock)
        if written:
            torch.autograd.graph.increment_version(written)

    def begin(self, what: str) -> None:
        """Record that ``what`` begins to write the plan's weights.

        Until its :meth:`end`, which is not called after an exception, reading a weight raises
        :class:`zerocast.UnfinishedStepError`.
        """
        self.unfinished.add(what)

    def end(self, what: str) -> None:
        """Record that ``what`` has finished writing."""
        self.unfinished.discard(what)

    def mark_rebuilt(self) -> None:
        """Record that the derived copies of all weights of the plan have just been made."""
        self.rebuilt_at = next(_clock)


class Writes:
    """Counters of the writes of one weight's codes, by plans and by other code.

    Attributes:
        others: the number of writes other than casts of watched plans; adjusted when a plan is
            watched or forgotten, so that :attr:`version` does not change then.
    """

    def __init__(self) -> None:
        self.others = 0
        self._watched: dict[CastVersion, int] = {}  # versions of plans: the tick of the first watch
        self._own_rebuilt_at = self._others_wrote_at = 0

    @property
    def version(self) -> int:
        """A number that changes with every write of codes."""
        return self.others + sum(version.ticks for version in self._watched)

    def note_other(self) -> None:
        """Record that something other than a plan has just written codes and scales."""
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
        """What has begun, in or after the latest cast, to write the weight and not ended."""
        latest = self._latest
        return set() if latest is None else latest.unfinished

    @property
    def are_readable(self) -> bool:
        """Whether codes and scales are those of one write, which has ended."""
        return not (self.lack_scales or self.unfinished)

    @property
    def _latest(self) -> CastVersion | None:
        """The plan that cast last, or None if something else has written since."""
        latest = max(self._watched, key=lambda version: version.ticked_at, default=None)
        return latest if latest and latest.ticked_at > self._others_wrote_at else None

    def require_scales(self) -> None:
        """Raise an error if the codes and scales are not those of one finished write.

        It is :class:`UnfinishedStepError` if one is :attr:`unfinished`, and
        :class:`StaleCopyError` if the writes :attr:`lack_scales`.
        """
        if self.unfinished:
            raise UnfinishedStepError(
                f"this weight holds parts of two casts, because its {min(self.unfinished)} has "
                "started and not completed; cast and gather again, or load a checkpoint."
            )
        if self.lack_scales:
            raise StaleCopyError(
                "this weight was read after a cast by a plan with exchange='boundary' and before "
                "its scales were gathered; call plan.all_gather(), or plan.all_gather_scales() if "
                "you gather the codes yourself."
            )

    @property
    def were_cast(self) -> bool:
        """Whether a plan has cast since the derived copies were made."""
        return bool(self._stale())

    @property
    def rebuild_on_use(self) -> bool | None:
        """Whether the next forward may rebuild derived copies; None if they are not stale."""
        stale = self._stale()
        return all(version.rebuild_on_use for version in stale) if stale else None

    def watch(self, version: CastVersion) -> None:
        """Count each tick of ``version`` as a cast from now on."""
        if version not in self._watched:
            self._forget_retired()
            self._watched[version] = next(_clock)
            self.others -= version.ticks

    def mark_rebuilt(self) -> None:
        """Record that the derived copies have just been made from the current codes."""
        self._own_rebuilt_at = next(_clock)
        self._forget([version for version in self._watched if version.retired])

    def take_over(self, rebuild_on_use: bool | None) -> None:
        """Copy the staleness of another weight, given its :attr:`rebuild_on_use`.

        Its plans are not copied, because they cast only that weight.
        """
        if rebuild_on_use is not None:
            self._tick_once(rebuild_on_use)

    def _tick_once(self, rebuild_on_use: bool) -> CastVersion:
        """Watch a new version that has ticked once and is retired."""
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
            self.others -= 1  # the tick of the version that replaces them
            one.has_scales, one.unfinished = not lack_scales, set(unfinished)

    def _forget(self, retired: Iterable[CastVersion]) -> None:
        """Count the casts of ``retired`` as other writes, and stop watching these versions."""
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
