"""Runs functions on integers of any size, and lets z3 prove what holds of what they return.

A :class:`Symbol` stands for an integer, a :class:`Condition` for what a comparison of them says.
Where Python has to know whether it holds, the function is run once for either answer that can be. A
quotient is a number of its own, of which the solver knows what a quotient is. A product of two
symbols is a number of its own as well (z3 reasons about products, but for long), of which it knows
:data:`LAWS`: what it has to decide is linear. Only an example is looked for among true products.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import z3


class Refuted(AssertionError):
    """A claim that does not follow, with an example if the solver finds one."""


TIMES = z3.Function("times", *[z3.IntSort()] * 3)
"""A product of two symbols, of which z3 itself knows nothing."""


def _laws() -> Iterator[Any]:
    x, f, y, g = z3.Ints("x f y g")
    for gap in (0, 1):
        orders = z3.And(x + gap <= y, f >= 0, f <= g, z3.Or(y >= 0, f == g))
        law = z3.Implies(orders, TIMES(x, f) + gap * f <= TIMES(y, g))
        yield z3.ForAll([x, f, y, g], law, patterns=[z3.MultiPattern(TIMES(x, f), TIMES(y, g))])


LAWS = list(_laws())
"""Where x + gap <= y and 0 <= f <= g, and either 0 <= y or f is g, (x + gap) f <= y g."""


Answers: TypeAlias = list[tuple[bool, bool]]
"""Those that comparisons are given, and whether the other one could be, too."""


class Path:
    """One run of a claim: the answers that comparisons are given, and what is known from them.

    Args:
        left: the paths that are left, by their first answers; this one begins with the last.
        assumed: what is known from the beginning.
    """

    def __init__(self, left: list[Answers], assumed: tuple[Any, ...]) -> None:
        self._left, self._answers, self._asked = left, left.pop(), 0
        self.quotients: dict[tuple[str, str], tuple[Symbol, Symbol]] = {}
        self.made: list[Any] = []
        self._facts: list[Any] = []
        self._products: set[int] = set()
        self._solver = z3.Solver()
        self._solver.set(
            mbqi=False
        )  # it applies the laws to products that it has met, and no others
        self._solver.add(*LAWS)
        self.know(*assumed)

    def know(self, *facts: Any) -> None:
        """Let the solver know ``facts``."""
        self._facts += facts
        self._solver.add(*map(self._noted, facts))

    def decide(self, condition: Any) -> bool:
        """Whether ``condition`` holds on this path; where it may or may not, first that it does."""
        if self._asked == len(self._answers):
            ways = (True, z3.Not(condition)), (False, condition)
            known = next(((way, False) for way, excluded in ways if self.excludes(excluded)), None)
            if known is None:
                self._left.append([*self._answers, (False, True)])
            self._answers.append(known or (True, True))
        self._noted(condition)
        answer, is_chosen = self._answers[self._asked]
        self._asked += 1
        if is_chosen:
            self.know(condition if answer else z3.Not(condition))
        return answer

    def excludes(self, condition: Any) -> bool:
        """Whether ``condition`` cannot be."""
        return self._solver.check(self._noted(condition)) == z3.unsat

    def example(self, condition: Any) -> str:
        """Numbers of which ``condition`` holds, on this path."""
        solver = z3.Solver()
        solver.set("timeout", 20_000)
        solver.add(condition, *self._facts)
        return f"{solver.model()}" if solver.check() == z3.sat else "no example was found"

    def _noted(self, formula: Any) -> Any:
        """A formula as the solver is told it, whose products are noted."""
        products = _products_in(formula)
        for number in sorted(products.keys() - self._products):
            self._products.add(number)
            product = products[number]
            for x, f in itertools.permutations(product.children()):
                for sign in (1, -1):
                    noted = TIMES(_told(sign * x), _told(f)) == _told(sign * product)
                    self._solver.add(noted, TIMES(0, _told(f)) == 0)
        return _told(formula)


def _once(of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``of``, which is called once for each formula: most of the time was spent on calling it."""
    made: dict[int, tuple[Any, Any]] = {}

    def known(formula: Any) -> Any:
        if formula.get_id() not in made:  # it is kept, so that no other one gets its number
            made[formula.get_id()] = formula, of(formula)
        return made[formula.get_id()][1]

    return known


@_once
def _products_in(formula: Any) -> dict[int, Any]:
    """Those of symbols, by their numbers."""
    found = {n: each for part in formula.children() for n, each in _products_in(part).items()}
    if z3.is_mul(formula) and len(_symbols(formula)) > 1:
        found[formula.get_id()] = formula
    return found


def _symbols(product: Any) -> list[Any]:
    return sorted((each for each in product.children() if not z3.is_int_value(each)), key=str)


@_once
def _told(formula: Any) -> Any:
    """A formula in sums of products, each of which is one of :data:`TIMES`."""
    expanded, told = z3.simplify(formula, som=True), []
    for each in _products_in(expanded).values():
        number = math.prod(part for part in each.children() if z3.is_int_value(part))
        told.append((each, number * functools.reduce(TIMES, _symbols(each))))
    return z3.substitute(expanded, *told)


_path: Any = None
"""The :class:`Path` that is run; None between two."""


class Symbol(z3.ArithRef):
    """An integer that z3 knows; what its operators give is one, too."""

    def __init__(self, term: Any) -> None:
        super().__init__(term.as_ast(), term.ctx)
        if _path is not None:
            _path.made.append(self)

    def __divmod__(self, divisor: Any) -> tuple[Symbol, Symbol]:
        number, by = term(self), term(divisor)
        if (key := (number.sexpr(), by.sexpr())) not in _path.quotients:
            assert z3.is_true(z3.simplify(by > 0)) or _path.excludes(by <= 0), f"{divisor} <= 0?"
            quotient, rest = z3.FreshInt("quotient"), z3.FreshInt("rest")
            _path.know(number == quotient * by + rest, rest >= 0, rest < by)
            _path.know((number >= 0) == (quotient >= 0))
            _path.quotients[key] = Symbol(quotient), Symbol(rest)
        return _path.quotients[key]

    def __floordiv__(self, divisor: Any) -> Symbol:
        return divmod(self, divisor)[0]

    def __mod__(self, divisor: Any) -> Symbol:
        return divmod(self, divisor)[1]

    def __bool__(self) -> bool:
        return bool(self != 0)


class Condition(z3.BoolRef):
    """What a comparison says, as z3 knows it. Where Python asks, the path decides."""

    def __init__(self, term: Any) -> None:
        super().__init__(term.as_ast(), term.ctx)

    def __bool__(self) -> bool:
        return _path.decide(self)

    def __and__(self, other: Any) -> bool:
        return bool(self) & bool(other)

    def __or__(self, other: Any) -> bool:
        return bool(self) | bool(other)


for _kind, _names in (Symbol, "add radd sub rsub mul rmul neg"), (Condition, "lt le gt ge eq ne"):
    for _name in (f"__{name}__" for name in _names.split()):
        of_z3 = getattr(z3.ArithRef, _name)
        setattr(Symbol, _name, lambda *all, kind=_kind, of_z3=of_z3: kind(of_z3(*all)))


def term(value: Any) -> Any:
    """The same number, of which nothing is noted that is made of it."""
    return z3.simplify(z3.IntVal(value) if isinstance(value, int) else value)


def assume(*conditions: Any) -> None:
    """Go on with numbers of which ``conditions`` hold."""
    _path.know(*conditions)


def prove(claim: Callable[..., Any], *assumed: Any, **given: Any) -> None:
    """Prove that the conditions which ``claim`` yields hold on every path, where those that are
    ``assumed`` do. Of its parameters those that are not ``given`` by name are symbols.

    Raises:
        Refuted: with numbers for which one does not.
    """
    global _path
    numbers = [given[name] if name in given else Symbol(z3.Int(name))
               for name in inspect.signature(claim).parameters]  # fmt: skip
    left: list[Answers] = [[]]
    possible = False
    while left:
        _path = path = Path(left, assumed)
        try:
            for condition in claim(*numbers):
                if not path.excludes(z3.Not(condition)):
                    example = path.example(z3.Not(condition))
                    raise Refuted(f"{condition} does not follow: {example}")
            possible |= not path.excludes(z3.BoolVal(True))
        finally:
            _path = None
    assert possible, "no numbers are as assumed"


def in_range(limit: int) -> Any:
    """That every number of this path so far lies between ``-limit`` and ``limit``."""
    for made in {str(made): made for made in _path.made}.values():
        yield z3.And(made > -limit, made < limit)
