"""A model of what ranks do together, all of whose states are visited.

What a rank does is a generator: it yields each operation that it comes to, and is sent how that
came out. Where two histories lead to the same place, with the same things known, what follows is
the same, so a rank's state is the number of that place. In every state each rank may go on,
collectives may be carried out, and so long as faults are left, a rank may fail or die.

The transport does what it promises: a collective that all have begun is carried out, at any moment
before a wait for it ends, and ranks that wait for one that failed do not come to give up.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, TypeAlias

FAILED = ("raised", "dead", "gave up")
"""Ends of a rank: it raised an error that it alone knows; it died; it waited for one that did."""


class Op(NamedTuple):
    """An operation.

    Attributes:
        kind: "do", what a rank does by itself; "begin" and "wait", of a collective; "end".
        name: the function of zerocast that does it; how the rank ended.
        faults: how it may come out that is one fault fewer left.
        answers: how else, but for collectives that fail.
        step: the step that it belongs to.
        writes, of_all: the parts of the weights of which it writes its own shard, and all shards.
        part: that which a collective gathers, or -1.
        says: by name what a rank tells the others in a collective. All of them read the first name
            by which somebody said True, or not all the same.
    """

    kind: str
    name: str
    faults: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    step: int = 0
    writes: tuple[int, ...] = ()
    of_all: tuple[int, ...] = ()
    part: int = -1
    says: tuple[tuple[str, Any], ...] = ()


Ops: TypeAlias = Generator[Op, str, Any]


class Rank(NamedTuple):
    """A rank: the number of its place; the collectives that it waits for, and how many it has
    begun; by part and owner the step of its weights.
    """

    at: int
    waits: tuple[int, ...]
    begun: int
    weights: tuple[tuple[int, ...], ...]


class Call(NamedTuple):
    """A collective: its operation, and what each rank has said."""

    op: Op
    said: tuple[Any, ...]


class World(NamedTuple):
    """A state: ranks; the collectives that somebody will ask for yet, and how many of them are
    carried out; the faults left.
    """

    ranks: tuple[Rank, ...]
    calls: tuple[Call, ...]
    done: int
    faults: int


class Move(NamedTuple):
    """What happens: to which rank, or to a collective; in what; how it came out; and then."""

    rank: int
    name: str
    answer: str
    world: World

    def __str__(self) -> str:
        who = f"rank {self.rank}: " if self.rank >= 0 else ""
        return f"  {who}{self.name} {self.answer}".rstrip() + "\n"


class Mistake(AssertionError):
    """A protocol does what it must not."""


class Model:
    """All that ranks may do.

    Args:
        make: makes what rank ``rank`` knows, whose ``run()`` is what it does. Its ``codes`` are
            parts of the weights, and scales are one more.
        mistake: makes of what a rank knows and comes to what it does instead, or None.

    Attributes:
        ops: by place the operation that a rank has come to.
        known: by place what it knows.
    """

    def __init__(
        self, make: Callable[[int], Any], mistake: Callable[[Any, Op], Op | None] = lambda _, op: op
    ) -> None:
        self.ops: list[Op] = []
        self.known: list[Any] = []
        self._make, self._mistake, self._parts = make, mistake, make(0).codes + 1
        self._ways: list[tuple[Any, ...]] = []  # by place a rank, and answers that led it there
        self._places: dict[Any, int] = {}
        self._place = functools.cache(self._find)

    def _find(self, way: tuple[Any, ...]) -> int:
        """The place to which a rank comes by answers."""
        known = self._make(way[0])
        run = known.run()
        for answer in (None, *way[1:]):
            op = run.send(answer)
            while (mistaken := self._mistake(known, op)) is None:
                op = run.send("")
            op = mistaken
        place = (op.name, known.rank, known.stale, known.flips, known.heard)
        if op.kind != "end":
            place = (op, *sorted(vars(known).items()), *_frames(run))
        if place not in self._places:
            self._places[place] = len(self.ops)
            self.ops.append(op)
            self.known.append(known)
            self._ways.append(way)
        return self._places[place]

    def start(self, size: int, faults: int) -> World:
        """The state in which nothing was done."""
        weights = ((-2,) * size,) * self._parts
        ranks = tuple(Rank(self._place((rank,)), (), 0, weights) for rank in range(size))
        return World(ranks, (), 0, faults)

    def moves(self, world: World) -> Iterator[Move]:
        """All that may happen in a state."""
        due = world.calls[world.done :][:1]  # they are carried out in order
        if due and None not in due[0].said:
            yield Move(-1, f"{due[0].op.name} is carried out", "", self._settled(_carried(world)))
        lost = any(self.ops[rank.at].name in FAILED for rank in world.ranks)
        for r, rank in enumerate(world.ranks):
            op = self.ops[rank.at]
            if op.name == "use" and {at for part in rank.weights for at in part} != {op.step}:
                raise Mistake(f"rank {r} uses weights of the steps {rank.weights}")
            answers = op.answers + op.faults * (world.faults > 0)
            lacks = any(None in world.calls[k].said for k in _waits(world, rank, op))
            if lost and (lacks or op.kind == "begin"):
                answers += ("gave up",)
            for answer in answers:
                yield Move(r, op.name, answer, self._settled(self._gone_on(world, r, answer)))

    def _gone_on(self, world: World, r: int, answer: str) -> World:
        """The state in which a rank's operation has come out so."""
        rank, calls = world.ranks[r], world.calls
        op, begun = self.ops[rank.at], rank.begun
        waits = tuple(k for k in rank.waits if k not in _waits(world, rank, op))
        if op.kind == "begin" and not answer:
            call = calls[begun] if begun < len(calls) else Call(op, (None,) * len(world.ranks))
            if call.op.name != op.name:
                raise Mistake(f"rank {r} calls {op.name}, another one {call.op.name}")
            said = tuple((it, rank.weights) if name == "flips" else it for name, it in op.says)
            calls = _with(calls, begun, Call(call.op, _with(call.said, r, said)))
            waits, begun = (*waits, begun), begun + 1
        step = -1 if answer.endswith("inside") else op.step
        weights = rank.weights
        for part in (*op.writes, *op.of_all) if answer not in ("raises", "dies") else ():
            whole = (step,) * len(world.ranks)
            written = whole if part in op.of_all else _with(weights[part], r, step)
            weights = _with(weights, part, written)
        at = self._place((*self._ways[rank.at], answer))
        ranks = _with(world.ranks, r, Rank(at, waits, begun, weights))
        return World(ranks, calls, world.done, world.faults - (answer in op.faults))

    def _settled(self, world: World) -> World:
        """The state in which waits for what was carried out have ended, without the collectives
        that nobody asks for any more.
        """
        for r in range(len(world.ranks)):
            while (op := self.ops[world.ranks[r].at]).kind == "wait":
                last = max(_waits(world, world.ranks[r], op), default=-1)
                if last >= world.done:
                    break
                world = self._gone_on(world, r, _result(world.calls[last]) if last >= 0 else "")
        drop = min([world.done, *(k for rank in world.ranks for k in rank.waits)])
        ranks = (
            rank._replace(begun=rank.begun - drop, waits=tuple(k - drop for k in rank.waits))
            for rank in world.ranks
        )
        return World(tuple(ranks), world.calls[drop:], world.done - drop, world.faults)

    def search(self, size: int, faults: int) -> int:
        """Visit all states, breadth first; return how many there are.

        Raises:
            Mistake: with what happened before it, in as few moves as there can be.
        """
        start = self.start(size, faults)
        before: dict[World, Any] = {start: None}
        queue = deque([start])
        while queue:
            world = queue.popleft()
            try:
                found = list(self.moves(world))
                if not found:
                    self.judge(world)
            except Mistake as mistake:
                story, way = "", before[world]
                while way is not None:
                    story, way = f"{way[1]}{story}", before[way[0]]
                raise Mistake(f"{mistake}:\n{story}") from None
            for move in found:
                if move.world not in before:
                    before[move.world] = world, move
                    queue.append(move.world)
        return len(before)

    def judge(self, world: World) -> None:
        """Raise :class:`Mistake` where a state in which nothing can happen is no proper end."""
        ends = [self.ops[rank.at] for rank in world.ranks]
        names = {end.name for end in ends}
        if any(end.kind != "end" for end in ends):
            raise Mistake("ranks wait for each other for ever")
        if len({rank.begun for rank in world.ranks}) > 1 and names & {"done", "refused"}:
            raise Mistake("a rank lacks a collective, and another one has not raised")
        heard = {self.known[rank.at].heard for rank in world.ranks}
        if not names & set(FAILED) and (len(names) > 1 or len(heard) > 1):
            raise Mistake("some ranks raised, and others did not")
        for r, (rank, end) in enumerate(zip(world.ranks, ends, strict=True)):
            known = self.known[rank.at]
            can_be_read = not (rank.waits or known.stale or known.flips)
            torn = max(len(set(part)) for part in rank.weights) > 1
            if torn and can_be_read and end.name not in ("dead", "refused"):
                raise Mistake(f"rank {r} accepts weights of the steps {rank.weights}")


def _frames(run: Any) -> Iterator[tuple[int, str]]:
    """Where a generator is, and those that it waits for, with numbers and words that they keep."""
    while run is not None:
        kept = run.gi_frame.f_locals.items()
        yield run.gi_frame.f_lasti, str([v for v in kept if isinstance(v[1], int | str)])
        run = run.gi_yieldfrom


def _waits(world: World, rank: Rank, op: Op) -> list[int]:
    """The collectives that an operation waits for."""
    return [k for k in rank.waits if op.kind == "wait" and world.calls[k].op.name == op.name]


def _with(items: tuple[Any, ...], i: int, item: Any) -> tuple[Any, ...]:
    """The items, but for one."""
    return (*items[:i], item, *items[i + 1 :])


def _result(call: Call) -> str:
    """What all ranks read from a collective."""
    for (name, _), *said in zip(call.op.says, *call.said, strict=True):
        if len(set(said)) > 1 or said[0] is True:
            return name
    return ""


def _carried(world: World) -> World:
    """The state in which the next collective has moved its bytes, as they are now."""
    part, ranks = world.calls[world.done].op.part, world.ranks
    if part >= 0:
        whole = tuple(rank.weights[part][r] for r, rank in enumerate(ranks))
        ranks = tuple(rank._replace(weights=_with(rank.weights, part, whole)) for rank in ranks)
    return world._replace(ranks=ranks, done=world.done + 1)
