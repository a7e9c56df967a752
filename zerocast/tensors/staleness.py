"""Counts the writes of a weight's codes, and says whether its derived copies are older.

Note: derived copies
~~~~~~~~~~~~~~~~~~~~
The columnwise copy is derived from the gathered rowwise codes. A cast changes this rank's codes at
once and those of other ranks follow with the all-gather, so between a cast and post-all-gather
processing the copy is *stale*: reading it is refused, because it would be rebuilt from bytes that
are not there yet. A plan casts thousands of weights, so it does not mark them one by one: it owns a
:class:`CastVersion`, which increases with each cast, each weight keeps the number at which its
copies were last rebuilt, and a copy is stale where any plan has cast since.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class CastVersion:
    """Counts the casts of one plan.

    Attributes:
        ticks: casts so far.
        rebuild_on_use: whether the next forward may rebuild derived copies by itself, because the
            caller promised that the all-gather is done by then
            (``manual_post_all_gather_processing=False``).
        retired: whether the plan is gone and will not cast again.
    """

    def __init__(self, *, rebuild_on_use: bool) -> None:
        self.ticks = 0
        self.rebuild_on_use = rebuild_on_use
        self.retired = False

    def retire(self) -> None:
        """Note that the plan is gone."""
        self.retired = True

    def tick(self, written: Iterable[torch.Tensor] = ()) -> None:
        """Note that a cast begins to write, so that derived copies made before are stale. torch
        counts the write of the tensors ``written``, so that a backward which saved one of them is
        an error.
        """
        self.ticks += 1
        torch.autograd.graph.increment_version(written)


class Writes:
    """The writes of one weight's codes, by plans and by others.

    Attributes:
        others: how many there were by other than plans' casts; corrected wherever a plan is watched
            or forgotten, so that :attr:`version` stays.
    """

    def __init__(self) -> None:
        self.others = 0
        # The ticks of each plan's version at which the derived copies were true.
        self._seen: dict[CastVersion, int] = {}

    @property
    def version(self) -> int:
        """A number that every write of codes changes."""
        return self.others + sum(version.ticks for version in self._seen)

    @property
    def were_cast(self) -> bool:
        """Whether a plan has cast since the derived copies were made."""
        return any(version.ticks != seen for version, seen in self._seen.items())

    @property
    def rebuild_on_use(self) -> bool | None:
        """Whether the next forward may rebuild derived copies; None where no plan has cast since
        they were made.
        """
        stale = [version for version, seen in self._seen.items() if version.ticks != seen]
        return all(version.rebuild_on_use for version in stale) if stale else None

    def watch(self, version: CastVersion) -> None:
        """Let a tick of ``version`` count as a cast from now on."""
        if version not in self._seen:
            self._forget_retired()
            self._seen[version] = version.ticks
            self.others -= version.ticks

    def mark_rebuilt(self) -> None:
        """Note that the derived copies have just been made from the present codes."""
        seen: dict[CastVersion, int] = {}
        for version in self._seen:
            if version.retired:
                self.others += version.ticks
            else:
                seen[version] = version.ticks
        self._seen = seen

    def take_over(self, rebuild_on_use: bool | None) -> None:
        """Be stale as another weight is whose :attr:`rebuild_on_use` is given, without its plans,
        which cast that weight alone.
        """
        if rebuild_on_use is not None:
            version = CastVersion(rebuild_on_use=rebuild_on_use)
            self.watch(version)
            version.tick()
            version.retire()

    def _forget_retired(self) -> None:
        """Let one retired version stand for all of them; version and staleness stay."""
        retired = [version for version in self._seen if version.retired]
        if len(retired) < 2:
            return
        stale = [version for version in retired if version.ticks != self._seen[version]]
        self.others += sum(version.ticks for version in retired)
        for version in retired:
            del self._seen[version]
        if stale:
            self.take_over(all(version.rebuild_on_use for version in stale))
            self.others -= 1  # the tick of the one that stands for them
