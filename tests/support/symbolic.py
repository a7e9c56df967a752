"""Runs functions on integers of any size, and lets z3 prove what holds of what they return.

A :class:`Symbol` stands for an integer, a :class:`Condition` for what a comparison of them says.
Where Python has to know whether it holds, the function is run once for either answer that can be. A
quotient is a number of its own, of which the solver knows what a quotient is. A product of two
symbols is a number of its own as well (z3's reasoning about products is switched off), of which the
solver knows its sign and the inequalities that a claim names (:func:`ordered`): what it has to
decide is then linear. It always does, but may search for long: then another seed is tried. Only an
example is looked for among true products.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import z3

SECONDS, SEEDS = 5, 20
"""Given to the solver for one search, and searches of a question that has no answer yet."""


class Refuted(AssertionError):
    """A claim that does not follow, with an example if the solver finds one."""


class Path:
    """One run of a claim: the answers that comparisons were given, and what is known from them."""

    def __init__(self, answers: list[bool], assumed: tuple[Any, ...]) -> None:
        self.answers = answers
        self.asked = 0
        self.quotients: dict[tuple[str, str], tuple[Symbol, Symbol]] = {}
        self.made: list[Any] = []
        self._products: set[str] = set()
        self._solver = _solver()
        self.know(*assumed)

    def know(self, *facts: Any) -> None:
        """Let the solver know ``facts``."""
        self._solver.add(*map(self._expanded, facts))

    def decide(self, condition: Any) -> bool:
        """Whether ``condition`` holds on this path; where it may or may not, first that it does."""
        for way, excluded in ((True, z3.Not(condition)), (False, condition)):
            if self.excludes(excluded):
                return way
        if self.asked == len(self.answers):
            self.answers.append(True)
        answer = self.answers[self.asked]
        self.asked += 1
        self.know(condition if answer else z3.Not(condition))
        return answer

    def excludes(self, condition: Any) -> bool:
        """Whether ``condition`` cannot be.

        Raises:
            AssertionError: where no seed finds out in time. How long z3 searches depends on its
                seed, and on all that the process has asked it before.
        """
        expanded, solver = self._expanded(condition), self._solver
        for seed in range(1, SEEDS + 1):
            answer = solver.check(expanded)
            if answer != z3.unknown or solver.reason_unknown() not in ("timeout", "canceled"):
                return answer == z3.unsat
            solver = _solver(seed)
            solver.add(self._solver.assertions())
        raise AssertionError(f"z3 searches for too long, whatever the seed: {condition}")

    def example(self, condition: Any) -> str:
        """Numbers of which ``condition`` holds, on this path."""
        solver = z3.Solver()
        solver.set("timeout", 4 * SECONDS * 1000)
        solver.add(condition, *self._solver.assertions())
        return f"{solver.model()}" if solver.check() == z3.sat else "no example was found"

    def _expanded(self, formula: Any) -> Any:
        """``formula`` in sums of products. Of each product of symbols the solver is told that it is
        0 where a factor is, and else as large as any of them, with its sign.
        """
        left = [expanded := z3.simplify(formula, som=True)]
        while left:
            left += (each := left.pop()).children()
            factors = [part for part in each.children() if not z3.is_int_value(part)]
            if not z3.is_mul(each) or len(factors) < 2 or str(each) in self._products:
                continue
            self._products.add(str(each))
            product = z3.Product(*factors)
            self._solver.add(z3.Or(*(factor == 0 for factor in factors)) == (product == 0))
            for signs in itertools.product((1, -1), repeat=len(factors)):
                sizes = [sign * f for sign, f in zip(signs, factors, strict=True)]
                larger = z3.And(*(math.prod(signs) * product >= size for size in sizes))
                self._solver.add(z3.Implies(z3.And(*(size > 0 for size in sizes)), larger))
        return expanded


def _solver(seed: int = 0) -> z3.Solver:
    solver = z3.Solver()
    solver.set("smt.arith.nl", False)
    solver.set("smt.random_seed", seed)
    solver.set("timeout", SECONDS * 1000)
    return solver


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
            assert _path.excludes(by <= 0), f"{divisor} may not be positive"
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
    answers: list[bool] = []
    possible = False
    while True:
        _path = path = Path(answers, assumed)
        try:
            for condition in claim(*numbers):
                if not path.excludes(z3.Not(condition)):
                    example = path.example(z3.Not(condition))
                    raise Refuted(f"{condition} does not follow: {example}")
            possible |= not path.excludes(z3.BoolVal(True))
        finally:
            _path = None
        # The next path: the last answer that was not given the other way yet.
        answers = path.answers[: path.asked]
        while answers and not answers[-1]:
            answers.pop()
        if not answers:
            assert possible, "no numbers are as assumed"
            return
        answers[-1] = False


def in_range(limit: int) -> Any:
    """That every number of this path so far lies between ``-limit`` and ``limit``."""
    for made in {str(made): made for made in _path.made}.values():
        yield z3.And(made > -limit, made < limit)


def ordered(one: Any, other: Any, factor: Any) -> None:
    """Tell the solver of three numbers what the order of the first two says of their products with
    the third, where that is not negative.
    """
    a, b, f = map(term, (one, other, factor))
    for least, most in ((a, b), (b, a), (a + 1, b), (b + 1, a)):
        _path.know(z3.Implies(z3.And(least <= most, f >= 0), least * f <= most * f))
