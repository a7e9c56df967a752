"""What scripts/mutation.py changes: the mutants of a Python module and of a C++ header."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

OPERATORS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+",
    "*": "//", "//": "*", "/": "*", "%": "//", "**": "*", "<<": ">>", ">>": "<<", "&": "|",
    "|": "&", "^": "&", "and": "or", "or": "and", "is": "is not", "is not": "is", "in": "not in",
    "not in": "in",
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "min_of": "max_of",
         "max_of": "min_of"}  # fmt: skip
CONSTANTS: dict[type, list[Callable[[Any], str]]] = {
    bool: [lambda value: str(not value)], float: [lambda value: str(value * 2 + 1)],
    int: [lambda value: str(value + 1), lambda value: f"({value - 1})"],
}  # fmt: skip
SYMMETRIC = {"min", "max", "lcm", "maximum", "minimum"}
"""Calls whose first two arguments may change places."""
CHECKED = {"isinstance", "TypeVar", "cast"}
"""Calls that no mutation is made of: of types, which mypy checks."""


class Mutant(NamedTuple):
    """One change of one file. The first three name it in a list that outlives other changes of it.

    Attributes:
        path: the file, relative to the repository.
        function: the outermost function, as classes qualify it; empty where the change takes effect
            when the module is imported.
        change: the changed lines, before and after, each run of white space one blank.
        line: where it is, from 1 on.
        source: the whole file, changed.
    """

    path: str
    function: str
    change: str
    line: int
    source: bytes


def _changed(path: str, function: str, source: bytes, start: int, end: int, text: str) -> Mutant:
    first, last = source.rfind(b"\n", 0, start) + 1, source.find(b"\n", end)
    after = source[first:start] + text.encode() + source[end:last]
    change = " => ".join(" ".join(part.decode().split()) for part in (source[first:last], after))
    changed = source[:first] + after + source[last:]
    return Mutant(path, function, change, source.count(b"\n", 0, start) + 1, changed)


class _Visitor:
    """Collects ``(function, start, end, text)``: between these bytes the text is put instead."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.edits: list[tuple[str, int, int, str]] = []
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self.visit(ast.parse(source))

    def span(self, node: ast.AST) -> tuple[int, int]:
        return (self._lines[node.lineno - 1] + node.col_offset,
                self._lines[node.end_lineno - 1] + node.end_col_offset)  # fmt: skip

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.source[start:end].decode()

    def visit(self, node: ast.AST, scope: tuple[str, ...] = (), function: str = "") -> None:
        """Collect the edits of a node and of what it consists of."""
        if isinstance(node, (ast.Assert, ast.JoinedStr)) or getattr(node, "arg", "") == "strict":
            return  # texts, and what we assume
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            scope = (*scope, node.name)
            for default in getattr(getattr(node, "args", None), "defaults", []):
                self.visit(default, scope, function)
            if isinstance(node, ast.FunctionDef):
                function = function or ".".join(scope)
            for statement in node.body:
                self.visit(statement, scope, function)
            return
        self.edits += [(function, *edit) for edit in self.edits_of(node)]
        if isinstance(node, ast.Raise):
            return
        called = getattr(getattr(node, "func", None), "id", None)
        for field, child in ast.iter_fields(node):
            for each in child if isinstance(child, list) else [child]:
                if isinstance(each, ast.AST) and field != "annotation" and called not in CHECKED:
                    self.visit(each, scope, function)

    @staticmethod
    def has_opposite(test: ast.AST) -> bool:
        """Whether another edit makes the opposite of a condition."""
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return not isinstance(test.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE))
        return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)

    def edits_of(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        """The changes of one node: where, and what stands there instead."""
        if isinstance(node, (ast.Compare, ast.BoolOp, ast.BinOp)):
            operands = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
            for left, right in pairwise(operands):
                start, end = self.span(left)[1], self.span(right)[0]
                between = self.source[start:end].decode()
                found = re.search(r"is not|not in|[a-z]+|[-+*/%<>=!&|^]+", between)
                if found and found.group() in OPERATORS:
                    yield start + found.start(), start + found.end(), OPERATORS[found.group()]
        elif isinstance(node, ast.UnaryOp):
            start = self.span(node)[0]
            yield start, start + (4 if isinstance(node.op, ast.Not) else 1), ""
        elif isinstance(node, (ast.If, ast.While, ast.IfExp, ast.comprehension)):
            for condition in node.ifs if isinstance(node, ast.comprehension) else [node.test]:
                if not self.has_opposite(condition):
                    yield *self.span(condition), f"not ({self.text(condition)})"
        elif isinstance(node, ast.Constant):
            for change in CONSTANTS.get(type(node.value), []):
                yield *self.span(node), change(node.value)
        elif isinstance(node, ast.Return):
            if node.value is not None and self.text(node.value) != "None":
                yield *self.span(node.value), "None"
        elif isinstance(node, (ast.Break, ast.Continue)):
            yield *self.span(node), "continue" if isinstance(node, ast.Break) else "break"
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in CALLS:
                end = self.span(node.func)[1]
                yield end - len(name), end, CALLS[name]
            first = [each for each in node.args[:2] if not isinstance(each, ast.Starred)]
            texts = [self.text(each) for each in first]
            if len(set(texts)) == 2 and name not in SYMMETRIC | CHECKED:
                (start, end), (after, last) = map(self.span, first)
                yield start, last, texts[1] + self.source[end:after].decode() + texts[0]
        elif (
            (isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant))  # a docstring
            or isinstance(getattr(node, "targets", [None])[0], (ast.Attribute, ast.Subscript))
            or isinstance(node, (ast.AugAssign, ast.Raise, ast.Delete))
        ):
            yield *self.span(node), "pass"


CPP = OPERATORS | CALLS | {
    "*": "/", "%": "/", "&&": "||", "||": "&&", "!": "", "continue": "", "break": "", "return": "",
}  # fmt: skip
NO_CODE = (
    r"//[^\n]*|#[^\n]*|static_assert\(.*?\);|constexpr[^;]*;|template <[^>]*>|enum[^;]*;|asm[^;]*;"
)
"""Comments, directives, declarations, and what the compiler checks."""
PLACES = (
    r"(?<= )[-+*/%<>=!&|]+(?= )|\b(?:min|max)_of\b(?=\()|(?<![\w.])\d+(?![\w.])|!(?=[\w(])"
    r"|\b(?:continue|break|return)\b(?=;)"
)
"""Operators, which clang-format sets between blanks, calls, constants, negations and jumps."""


def _cpp_edits(source: bytes) -> Iterator[tuple[str, int, int, str]]:
    blank = re.compile(NO_CODE, re.DOTALL).sub(
        lambda m: "_" * len(m.group()), source.decode("ascii")
    )
    for found in re.finditer(PLACES, blank):
        text = found.group()
        numbers = sorted(str(int(text) + by) for by in (1, -1)) if text.isdigit() else []
        for change in numbers or ([CPP[text]] if text in CPP else []):
            yield "", *found.span(), change


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """All mutants of a Python module, or of a C++ header."""
    edits = _Visitor(source).edits if path.endswith(".py") else _cpp_edits(source)
    return [_changed(path, function, source, *edit) for function, *edit in edits]
