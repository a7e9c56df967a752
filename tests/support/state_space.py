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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

STEPS = 2
FAILED = ("raised", "dead", "gave up")
"""Ends of a rank: it raised an error that it alone knows; it died; it waited for one that did."""

TRANSIENT = frozenset({"error", "raises", "not finite", "overflow", "skips", "repeats"})
"""What is known of one attempt at a step."""


@dataclass(frozen=True, eq=False)  # each is itself only, which is quickly told
class Op:
    """An operation.

    Attributes:
        kind: "held", a phase whose error all ranks hear of; "alone", one whose error this rank
            raises; "given", what the caller gives; "begin" and "wait", of a collective; "set", of
            what is known; "use" of the weights; "may", where the next two operations may be passed
            over; "start" of what is made again after an error, or where there is no name, is not;
            "next" step; "again"; and "end", as what it is named.
        name: the function of zerocast that does it.
        sets, clears: what the rank knows afterwards, of a wait once it gives up; and knows no more.
        writes, of_all: the parts of the weights of which it writes its own shard, and all shards.
        moves: the part that a collective gathers, or -1.
        on: what follows a collective, by its result.
        faults: what else may go wrong, and is known then.
        only, unless: what must be known, and must not, or it is passed over; or "".
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


class Rank(NamedTuple):
    """A rank: the place of its next operation, or how it ended; that of what it would make again;
    steps made, and the number of the last; what is known of it; the collectives that it waits for,
    and how many it has begun; by part and owner the step of its weights; how often it heard of an
    error.
    """

    at: int | str
    back: int | str
    made: int
    number: int
    known: frozenset[str]
    waits: tuple[int, ...]
    begun: int
    weights: tuple[tuple[int, ...], ...]
    heard: int

    @property
    def step(self) -> int:
        """The number of the step that it makes, or has made last where there is none to make."""
        left = self.made < STEPS
        return self.number + left + ("skips" in self.known) - ("repeats" in self.known)


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

    def __str__(self) -> str:
        what = f"rank {self.rank}: {self.name} {self.fault}" if self.name else self.fault
        return f"  {what.rstrip()}\n" if what else ""


class Mistake(AssertionError):
    """A protocol does what it must not."""


class Program:
    """Operations in order, over weights of some ``parts``."""

    def __init__(self, ops: Iterable[Op], parts: int) -> None:
        self.ops: list[Op] = []
        self.following: list[dict[str, int]] = []  # by result
        self.parts = parts
        self.first = self._link(tuple(ops), -1)
        self.places = range(len(self.ops))

    def _link(self, ops: Sequence[Op], end: int) -> int:
        for op in reversed(ops):
            branches = op.on if op.kind == "wait" else ()
            following = {"": end} | {result: self._link(then, end) for result, then in branches}
            self.ops.append(op)
            self.following.append(following)
            end = len(self.ops) - 1
        return end

    def start(self, size: int, faults: int) -> World:
        """The state in which nothing was done."""
        known = frozenset({"forgets"})  # no plan is found
        weights = ((0,) * size,) * self.parts
        rank = Rank(self.first, self.first, 0, 0, known, (), 0, weights, 0)
        ranks = (rank._replace(known=known | {f"rank {r}"}) for r in range(size))
        return self._settled(World(tuple(ranks), (), faults))

    def moves(self, world: World) -> Iterator[Move]:
        """All that may happen in a state."""
        k = next((k for k, call in enumerate(world.calls) if not call.done), -1)  # in order
        if k >= 0 and None not in world.calls[k].brought:
            told = f"{world.calls[k].op.name} is carried out"
            yield Move(-1, "", told, self._settled(_carried(world, k)))
        for r in range(len(world.ranks)):
            for move in self._moves_of(world, r):
                yield move._replace(world=self._settled(move.world))

    def _settled(self, world: World) -> World:
        """The state in which each rank has done what nobody can tell and nothing can prevent."""
        for r in range(len(world.ranks)):
            while isinstance(at := world.ranks[r].at, int) and self.ops[at].kind != "may":
                move = next(self._moves_of(world, r), None)
                if move is None or move.name:
                    break
                world = move.world
        return _tidied(world)

    def _moves_of(self, world: World, r: int) -> Iterator[Move]:
        rank = world.ranks[r]
        for name, fault, to, *calls in self._ways(world, r, rank) if rank.at in self.places else ():
            ranks = (*world.ranks[:r], to, *world.ranks[r + 1 :])
            left = world.faults - bool(fault)
            yield Move(r, name, fault, World(ranks, calls[0] if calls else world.calls, left))

    def _ways(self, world: World, r: int, rank: Rank) -> Iterator[tuple[Any, ...]]:
        """What a rank may do: name, fault, the rank afterwards, and collectives if changed."""
        op, following = self.ops[rank.at], self.following[rank.at]
        on = rank._replace(at=following[""])
        can_give_up = any(other.at in FAILED for other in world.ranks)
        if op.only not in ("", *rank.known) or op.unless in rank.known:
            yield "", "", on
        elif op.kind in ("held", "alone", "given"):
            done, torn = _written(op, r, on, on.step), _written(op, r, on, -1)
            yield op.name, "", done
            ways = {"": on, " inside": torn, " after": done}
            for way, to in ways.items() if world.faults and op.kind != "given" else ():
                error = to._replace(known=to.known | {"error"})
                raised = error if op.kind == "held" else error._replace(at="raised")
                yield op.name, f"raises{way}", raised
                yield op.name, f"dies{way}", to._replace(at="dead")
            for fault in op.faults if world.faults else ():
                yield op.name, fault, done._replace(known=done.known | {fault})
        elif op.kind == "begin":
            to = on._replace(waits=(*rank.waits, rank.begun), begun=rank.begun + 1)
            yield op.name, "", to, _brought(world, r, rank, op)
            if can_give_up:
                yield "gave up", "", rank._replace(at="gave up")
        elif op.kind == "wait":
            mine = [k for k in rank.waits if world.calls[k].op.name == op.name]
            to = rank._replace(waits=tuple(k for k in rank.waits if k not in mine))
            if all(world.calls[k].done for k in mine):
                found = _result(world.calls[mine[-1]]) if mine else ""
                yield "", "", to._replace(at=following[found])
            elif can_give_up and any(None in world.calls[k].brought for k in mine):
                yield "gave up", "", to._replace(at="gave up", known=rank.known.union(op.sets))
        elif op.kind == "use":
            if {at for part in rank.weights for at in part} != {rank.step}:
                raise Mistake(f"rank {r} uses weights of the steps {rank.weights}")
            yield "use", "", on
        elif op.kind == "start":
            yield "", "", on._replace(back=following[""] if op.name else "refused")
        elif op.kind == "next":
            if "error" in rank.known:
                raise Mistake(f"rank {r} has an error that nobody hears of")
            to = on if rank.made == STEPS - 1 else on._replace(at=rank.back)
            known = rank.known - TRANSIENT
            yield "next", "", to._replace(made=rank.made + 1, number=rank.step, known=known)
        elif op.kind == "again":
            known = rank.known - TRANSIENT
            yield "again", "", rank._replace(at=rank.back, known=known, heard=rank.heard + 1)
        elif op.kind == "end":
            yield op.name, "", rank._replace(at=op.name)
        else:  # "set" or "may"
            yield "", "", _written(op, r, on, rank.step)
        if op.kind == "may":
            after = self.following[self.following[following[""]][""]][""]
            yield "", "", on._replace(at=after)
        if world.faults and op.kind in ("begin", "given"):
            yield op.name, "dies", rank._replace(at="dead")

    def search(self, size: int, faults: int) -> dict[World, Any]:
        """Visit all states breadth first; return by each the one before it and what happened.

        Raises:
            Mistake: with what happened before it, in as few moves as there can be.
        """

        def moves(world: World) -> Iterator[tuple[Move, World]]:
            found = [(move, move.world) for move in self.moves(world)]
            if not found:
                judge(world)
            yield from found

        return _reach(self.start(size, faults), moves)

    def follow(self, size: int, events: Sequence[tuple[int, str, str]]) -> set[World]:
        """The states in which the ranks may be after ``events``: ranks, names and faults.

        Raises:
            Mistake: where the program does something else.
        """

        def moves(at: tuple[int, World]) -> Iterator[tuple[Move, tuple[int, World]]]:
            for move in self.moves(at[1]):
                if not move.name or [move[:3]] == events[at[0] : at[0] + 1]:
                    yield move, (at[0] + bool(move.name), move.world)

        found = _reach((0, self.start(size, 1)), moves)
        last = max(k for k, _ in found)
        worlds = {world for k, world in found if k == last}
        if last < len(events):
            possible = (move for world in worlds for move in self.moves(world) if move.name)
            others = {move.name for move in possible if move[::2] == (events[last][0], "")}
            told = "".join(str(Move(*event, self.start(size, 1))) for event in events[: last + 1])
            raise Mistake(f"the last of this is not in the model, {sorted(others)} is:\n{told}")
        return worlds


def _reach(start: Any, moves: Callable[[Any], Iterable[tuple[Move, Any]]]) -> dict[Any, Any]:
    """All that can be reached, breadth first, with what was before it and what happened then."""
    before: dict[Any, Any] = {start: None}
    queue = deque([start])
    while queue:
        at = queue.popleft()
        try:
            for move, to in moves(at):
                if to not in before:
                    before[to] = at, move
                    queue.append(to)
        except Mistake as mistake:
            story = ""
            while before[at] is not None:
                at, move = before[at]
                story = f"{move}{story}"
            raise Mistake(f"{mistake}:\n{story}") from None
    return before


def _written(op: Op, r: int, rank: Rank, step: int) -> Rank:
    """The rank with what the operation writes and makes known."""
    weights = tuple(
        tuple(step if i in op.of_all or (i in op.writes and owner == r) else was
              for owner, was in enumerate(part))
        for i, part in enumerate(rank.weights)
    )  # fmt: skip
    return rank._replace(weights=weights, known=rank.known.difference(op.clears).union(op.sets))


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
    part, ranks = world.calls[k].op.moves, world.ranks
    whole = tuple(rank.weights[part][r] for r, rank in enumerate(ranks))
    if part >= 0:
        moved = ((*rank.weights[:part], whole, *rank.weights[part + 1 :]) for rank in ranks)
        ranks = tuple(map(lambda rank, to: rank._replace(weights=to), ranks, moved))
    call = world.calls[k]._replace(done=True)
    return World(ranks, (*world.calls[:k], call, *world.calls[k + 1 :]), world.faults)


def _tidied(world: World) -> World:
    """The state without the collectives that nobody asks for any more."""
    asked = min([len(world.calls), *(k for rank in world.ranks for k in rank.waits)])
    drop = next((k for k in range(asked) if not world.calls[k].done), asked)
    if not drop:
        return world
    ranks = (
        rank._replace(begun=rank.begun - drop, waits=tuple(k - drop for k in rank.waits))
        for rank in world.ranks
    )
    return World(tuple(ranks), world.calls[drop:], world.faults)


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
