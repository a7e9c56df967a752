"""A model of what ranks do together, all of whose states are visited.

A program is a list of operations, one for all ranks: phases that one rank does by itself, each of
which may fail, and collectives, each with what follows on all ranks where its result is not the
usual one. A state is where each rank is, what it knows, the collectives that are begun, and the
steps whose masters each rank's weights were cast from. In every state each rank may go on,
collectives may be carried out, and so long as faults are left, a rank may fail or die.

The transport does what it promises: a collective that all have begun is carried out, at any moment
before a wait for it ends, and ranks that wait for one that failed does not come to give up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

STEPS = 2

FAILED = ("raised", "dead", "gave up")
"""Ends of a rank: it raised an error that it alone knows; it died; it waited for one that did."""

TRANSIENT = frozenset({"error", "not finite", "overflow", "skips", "repeats"})
"""What is known of one attempt at a step."""


@dataclass(frozen=True, eq=False)  # each is itself only, which is quickly told
class Op:
    """An operation.

    Attributes:
        kind: "held", a phase whose error all ranks hear of; "alone", one whose error this rank
            raises; "begin" and "wait", of a collective; "set", of what is known; "use" of the
            weights; "may", where the next two operations may be passed over; "start" of what is
            made again after an error, or where there is no name, is not; "next" step; "again"; and
            "end", as what it is named.
        name: the function of zerocast that does it.
        sets, clears: what the rank knows afterwards, of a wait once it gives up; and knows no more.
        writes, of_all: the parts of the weights of which it writes its own shard, and all shards.
        moves: the part that a collective gathers, or -1.
        on: what follows a collective, by its result.
        faults: what else may go wrong, and is known then.
        only, unless: what must be known, and must not, or it is passed over; or "".
        ranks: who does it, where not all do.
    """

    kind: str
    name: str = ""
    sets: tuple[str, ...] = ()
    clears: tuple[str, ...] = ()
    writes: tuple[int, ...] = ()
    of_all: tuple[int, ...] = ()
    moves: int = -1
    on: tuple[tuple[str, tuple[Op, ...]], ...] = ()
    faults: tuple[str, ...] = ()
    only: str = ""
    unless: str = ""
    ranks: tuple[int, ...] = ()


class Rank(NamedTuple):
    """A rank: the place of its next operation, or how it ended; that of what it would make again;
    steps made; what is known of it; the collectives that it waits for, and how many it has begun;
    by part and owner the step of its weights; how often it heard of an error.
    """

    at: int | str
    back: int
    made: int
    known: frozenset[str]
    waits: tuple[int, ...]
    begun: int
    weights: tuple[tuple[int, ...], ...]
    heard: int

    @property
    def step(self) -> int:
        """The number of the step that it makes."""
        return self.made + 1 + ("skips" in self.known) - ("repeats" in self.known)


class Call(NamedTuple):
    """A collective: its operation, what each rank has brought, and whether it was carried out."""

    op: Op
    brought: tuple[Any, ...]
    done: bool


class World(NamedTuple):
    """A state: ranks, the collectives that somebody will ask for yet, and the faults left."""

    ranks: tuple[Rank, ...]
    calls: tuple[Call, ...]
    faults: int


class Move(NamedTuple):
    """What happens: to which rank, in what, with which fault; what nobody sees has no name."""

    rank: int
    name: str
    fault: str
    world: World


class Mistake(AssertionError):
    """A protocol does what it must not."""


class Program:
    """Operations in order, over weights of some ``parts``."""

    def __init__(self, ops: Iterable[Op], parts: int) -> None:
        self.ops: list[Op] = []
        self.following: list[dict[str, int]] = []  # by result
        self.parts = parts
        self.first = self._link(tuple(ops), -1)

    def _link(self, ops: tuple[Op, ...], end: int) -> int:
        for op in reversed(ops):
            following = {"": end} | {result: self._link(then, end) for result, then in op.on}
            self.ops.append(op)
            self.following.append(following)
            end = len(self.ops) - 1
        return end

    def start(self, size: int, faults: int) -> World:
        """The state in which nothing was done."""
        weights = ((0,) * size,) * self.parts
        known = frozenset({"forgets"})  # no plan is found
        rank = Rank(self.first, self.first, 0, known, (), 0, weights, 0)
        return self._settled(World((rank,) * size, (), faults))

    def moves(self, world: World) -> Iterator[Move]:
        """All that may happen in a state."""
        for k, call in enumerate(world.calls):
            if not call.done:  # they are carried out in order
                if None not in call.brought:
                    told = f"{call.op.name} is carried out"
                    yield Move(-1, "", told, self._settled(_carried(world, k)))
                break
        for r, rank in enumerate(world.ranks):
            if isinstance(rank.at, int):
                for name, fault, to, calls in self._moves_of(world, r, rank, rank.at):
                    ranks = (*world.ranks[:r], to, *world.ranks[r + 1 :])
                    left = world.faults - bool(fault)
                    yield Move(r, name, fault, self._settled(World(ranks, calls, left)))

    def _settled(self, world: World) -> World:
        """The state in which each rank has done what nobody can tell and nothing can prevent."""
        for r in range(len(world.ranks)):
            while isinstance(at := world.ranks[r].at, int) and self.ops[at].kind != "may":
                quiet = next(self._moves_of(world, r, world.ranks[r], at), None)
                if quiet is None or quiet[0]:
                    break
                world = world._replace(ranks=(*world.ranks[:r], quiet[2], *world.ranks[r + 1 :]))
        return _tidied(world)

    def _moves_of(
        self, world: World, r: int, rank: Rank, at: int
    ) -> Iterator[tuple[str, str, Rank, tuple[Call, ...]]]:
        op, calls, following = self.ops[at], world.calls, self.following[at]
        on = rank._replace(at=following[""])
        others_failed = any(other.at in FAILED for other in world.ranks)
        is_due = op.only in ("", *rank.known) and op.unless not in rank.known
        if not is_due or r not in (op.ranks or (r,)):
            yield "", "", on, calls
        elif op.kind in ("held", "alone"):
            done, torn = _written(op, r, on, on.step), _written(op, r, on, -1)
            yield op.name, "", done, calls
            ways = {"": on, " inside": torn, " after": done} if world.faults else {}
            for way, to in ways.items():
                error = to._replace(known=to.known | {"error"})
                yield op.name, f"raises{way}", _held(op, error), calls
                yield op.name, f"dies{way}", to._replace(at="dead"), calls
            for fault in op.faults if world.faults else ():
                yield op.name, fault, done._replace(known=done.known | {fault}), calls
        elif op.kind == "begin":
            to = on._replace(waits=(*rank.waits, rank.begun), begun=rank.begun + 1)
            yield op.name, "", to, _brought(world, r, rank, op)
            if world.faults:
                yield op.name, "dies", rank._replace(at="dead"), calls
            if others_failed:
                yield "gave up", "", rank._replace(at="gave up"), calls
        elif op.kind == "wait":
            mine = [k for k in rank.waits if calls[k].op.name == op.name]
            to = rank._replace(waits=tuple(k for k in rank.waits if k not in mine))
            if all(calls[k].done for k in mine):
                found = following[_result(calls[mine[-1]]) if mine else ""]
                yield "", "", to._replace(at=found), calls
            elif others_failed and any(None in calls[k].brought for k in mine):
                known = rank.known.union(op.sets)
                yield "gave up", "", to._replace(at="gave up", known=known), calls
        elif op.kind == "set":
            yield "", "", _written(op, r, on, rank.step), calls
        elif op.kind == "may":
            yield "", "", on, calls
            after = self.following[self.following[following[""]][""]][""]
            yield "", "", on._replace(at=after), calls
        elif op.kind == "use":
            step = rank.step - (rank.made == STEPS)
            if {at for part in rank.weights for at in part} != {step}:
                raise Mistake(f"rank {r} uses weights of the steps {rank.weights}")
            yield "use", "", on, calls
        elif op.kind == "start":
            yield "", "", on._replace(back=following[""] if op.name else -1), calls
        elif op.kind == "next":
            if "error" in rank.known:
                raise Mistake(f"rank {r} has an error that nobody hears of")
            last, known = rank.made == STEPS - 1, rank.known - TRANSIENT
            to = on._replace(at=following[""] if last else rank.back, known=known)
            yield "next", "", to._replace(made=rank.made + 1), calls
        elif op.kind == "again":
            to = rank._replace(known=rank.known - TRANSIENT, heard=rank.heard + 1)
            yield "again", "", to._replace(at=rank.back if rank.back >= 0 else "refused"), calls
        else:
            yield op.name, "", rank._replace(at=op.name), calls

    def search(self, size: int, faults: int) -> dict[World, Any]:
        """Visit all states breadth first; return by each the one before it and what happened.

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
                    judge(world)
            except Mistake as mistake:
                raise Mistake(f"{mistake}:\n{_story(before, world)}") from None
            for move in found:
                if move.world not in before:
                    before[move.world] = world, move
                    queue.append(move.world)
        return before

    def follow(self, size: int, events: Iterable[tuple[int, str, str]]) -> set[World]:
        """The states in which the ranks may be after ``events``: ranks, names and faults.

        Raises:
            Mistake: where the program does something else.
        """
        worlds, told = self._unseen({self.start(size, 1)}), ""
        for event in events:
            found = [move for world in worlds for move in self.moves(world) if move.name]
            told += _line(*event)
            worlds = self._unseen({move.world for move in found if move[:3] == event})
            if not worlds:
                others = {move.name for move in found if move.rank == event[0] and not move.fault}
                raise Mistake(f"the last of this is not in the model, {sorted(others)} is:\n{told}")
        return worlds

    def _unseen(self, worlds: set[World]) -> set[World]:
        """These states, and those that follow by what nobody sees."""
        queue, found = list(worlds), set(worlds)
        while queue:
            for move in self.moves(queue.pop()):
                if not move.name and move.world not in found:
                    found.add(move.world)
                    queue.append(move.world)
        return found


def _held(op: Op, rank: Rank) -> Rank:
    return rank if op.kind == "held" else rank._replace(at="raised")


def _written(op: Op, r: int, rank: Rank, step: int) -> Rank:
    """The rank with what the operation writes and makes known."""
    weights = [
        tuple(step if i in op.of_all or (i in op.writes and owner == r) else was
              for owner, was in enumerate(part))
        for i, part in enumerate(rank.weights)
    ]  # fmt: skip
    known = rank.known.difference(op.clears).union(op.sets)
    return rank._replace(weights=tuple(weights), known=known)


def _brought(world: World, r: int, rank: Rank, op: Op) -> tuple[Call, ...]:
    """The collectives after a rank has begun its next one."""
    calls = [*world.calls, Call(op, (None,) * len(world.ranks), done=False)]
    call = calls[rank.begun]
    if call.op.name != op.name:
        raise Mistake(f"rank {r} calls {op.name}, another one {call.op.name}")
    compared = {"number": rank.step, "flips": rank.weights}
    said = tuple((name in rank.known, compared.get(name)) for name, _ in op.on)
    calls[rank.begun] = call._replace(brought=(*call.brought[:r], said, *call.brought[r + 1 :]))
    return tuple(calls[: max(len(world.calls), rank.begun + 1)])


def _result(call: Call) -> str:
    """What all ranks read from a collective."""
    for i, (name, _) in enumerate(call.op.on):
        said = {each[i] for each in call.brought}
        if len(said) > 1 or (True, None) in said:
            return name
    return ""


def _carried(world: World, k: int) -> World:
    """The state in which a collective has moved its bytes, as they are now."""
    call, ranks, part = world.calls[k], world.ranks, world.calls[k].op.moves
    if part >= 0:
        whole = tuple(rank.weights[part][r] for r, rank in enumerate(ranks))
        ranks = tuple(
            rank._replace(weights=(*rank.weights[:part], whole, *rank.weights[part + 1 :]))
            for rank in ranks
        )
    calls = (*world.calls[:k], call._replace(done=True), *world.calls[k + 1 :])
    return World(ranks, calls, world.faults)


def _tidied(world: World) -> World:
    """The state without the collectives that nobody asks for any more."""
    asked = min([len(world.calls), *(k for rank in world.ranks for k in rank.waits)])
    drop = next((k for k in range(asked) if not world.calls[k].done), asked)
    if not drop:
        return world
    ranks = tuple(
        rank._replace(begun=rank.begun - drop, waits=tuple(k - drop for k in rank.waits))
        for rank in world.ranks
    )
    return World(ranks, world.calls[drop:], world.faults)


def judge(world: World) -> None:
    """Raise :class:`Mistake` where a state in which nothing can happen is no proper end."""
    ranks = world.ranks
    failed = any(rank.at in FAILED for rank in ranks)
    if any(isinstance(rank.at, int) for rank in ranks):
        raise Mistake("ranks wait for each other for ever")
    if len({rank.begun for rank in ranks}) > 1 and {"done", "refused"} & {r.at for r in ranks}:
        raise Mistake("a rank lacks a collective, and another one has not raised")
    if not failed and len({(rank.at, rank.heard) for rank in ranks}) > 1:
        raise Mistake("some ranks raised, and others did not")
    for r, rank in enumerate(ranks):
        can_be_read = not rank.waits and not {"stale", "flips"} & rank.known
        torn = max(len(set(part)) for part in rank.weights) > 1
        if torn and can_be_read and rank.at not in ("dead", "refused"):
            raise Mistake(f"rank {r} accepts weights of the steps {rank.weights}")


def _line(rank: int, name: str, fault: str) -> str:
    """What happened, told."""
    return f"  rank {rank}: {name} {fault}".rstrip() + "\n" if name else f"  {fault}\n"


def _story(before: Mapping[World, Any], world: World) -> str:
    """What happened until a state, line by line."""
    lines: list[str] = []
    while before[world] is not None:
        world, move = before[world]
        if move.name or move.fault:
            lines.append(_line(move.rank, move.name, move.fault))
    return "".join(reversed(lines))
