"""What scripts/mutation.py changes: the mutants of a Python module and of a C++ header."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

OPERATORS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+",
    "*": "//", "//": "*", "/": "*", "%": "//", "**": "*", "<<": ">>", ">>": "<<", "&": "|",
    "|": "&", "^": "&", "and": "or", "or": "and", "is": "is not", "is not": "is", "in": "not in",
    "not in": "in",
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "min_of": "max_of",
         "max_of": "min_of"}  # fmt: skip
CPP = OPERATORS | CALLS | {
    "*": "/", "%": "/", "&&": "||", "||": "&&", "!": "", "continue": "", "break": "", "return": "",
}  # fmt: skip
SYMMETRIC = {"min", "max", "lcm", "maximum", "minimum"}
"""Calls whose first two arguments may change places."""
CHECKED = {"isinstance", "TypeVar", "cast"}
"""Calls that no mutation is made of: of types, which mypy checks."""
NO_CODE = (
    r"//[^\n]*|#[^\n]*|static_assert\(.*?\);|constexpr[^;]*;|template <[^>]*>|enum[^;]*;|asm[^;]*;"
)
"""Of C++: comments, directives, declarations, and what the compiler checks."""
PLACES = (
    r"(?<= )[-+*/%<>=!&|]+(?= )|\b(?:min|max)_of\b(?=\()|(?<![\w.])\d+(?![\w.])|!(?=[\w(])"
    r"|\b(?:continue|break|return)\b(?=;)"
)
"""Operators, which clang-format sets between blanks, calls, constants, negations and jumps."""


OPERATOR = re.compile(r"is not|not in|[a-z]+|[-+*/%<>=!&|^]+")
Edits: TypeAlias = Iterator[tuple[str, int, int, str]]
"""By function: between these places the text is put instead."""


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
    source: str


def _python_edits(source: str) -> Edits:
    lines = [0, *accumulate(map(len, source.splitlines(keepends=True)))]

    def span(node: ast.AST) -> tuple[int, int]:
        return (lines[node.lineno - 1] + node.col_offset,
                lines[node.end_lineno - 1] + node.end_col_offset)  # fmt: skip

    def text(node: ast.AST) -> str:
        return source[slice(*span(node))]

    def edits(node: ast.AST, scope: str = "", function: str = "") -> Edits:
        """Those of a node and of what it consists of."""
        if isinstance(node, (ast.Assert, ast.JoinedStr)) or getattr(node, "arg", "") == "strict":
            return  # texts, and what we assume
        parts = list(ast.iter_child_nodes(node))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            for default in getattr(getattr(node, "args", None), "defaults", []):
                yield from edits(default, scope, function)
            function = function or (scope + node.name) * isinstance(node, ast.FunctionDef)
            scope, parts = f"{scope}{node.name}.", node.body
        elif isinstance(node, ast.Raise) or getattr(getattr(node, "func", 0), "id", 0) in CHECKED:
            parts = []
        for start, end, text in edits_of(node):
            yield function, start, end, text
        for part in parts:
            if part is not getattr(node, "annotation", None):
                yield from edits(part, scope, function)

    def edits_of(node: ast.AST) -> Iterator[tuple[int, int, str]]:
        """Those of one node."""
        order = ast.Lt, ast.LtE, ast.Gt, ast.GtE
        for test in filter(None, getattr(node, "ifs", [getattr(node, "test", None)])):
            first, *more = getattr(test, "ops", [getattr(test, "op", None)])
            if more or isinstance(first, order) or not isinstance(first, (ast.cmpop, ast.Not)):
                yield *span(test), f"not ({text(test)})"  # else another edit says so
        match node:
            case ast.Compare() | ast.BoolOp() | ast.BinOp():
                operands = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.expr)]
                for (_, start), (end, _) in pairwise(map(span, operands)):
                    found = OPERATOR.search(source, start, end)
                    if found and found.group() in OPERATORS:
                        yield *found.span(), OPERATORS[found.group()]
            case ast.UnaryOp():
                start = span(node)[0]
                yield start, start + (4 if isinstance(node.op, ast.Not) else 1), ""
            case ast.Constant(value=bool() | int() | float() as value):
                near = [str(value + 1), f"({value - 1})"]
                others = {bool: [str(not value)], float: [str(value * 2 + 1)]}
                yield from ((*span(node), text) for text in others.get(type(value), near))
            case ast.Return(value=ast.expr() as value) if text(value) != "None":
                yield *span(value), "None"
            case ast.Break() | ast.Continue():
                yield *span(node), "continue" if isinstance(node, ast.Break) else "break"
            case ast.Call():
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name in CALLS:
                    end = span(node.func)[1]
                    yield end - len(name), end, CALLS[name]
                first = [each for each in node.args[:2] if not isinstance(each, ast.Starred)]
                texts = list(map(text, first))
                if len(set(texts)) == 2 and name not in SYMMETRIC | CHECKED:
                    (start, end), (after, last) = map(span, first)
                    yield start, last, texts[1] + source[end:after] + texts[0]
            case ast.Expr(value=ast.Constant()):
                pass  # a docstring
            case (ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]) | ast.Expr()
                  | ast.AugAssign() | ast.Raise() | ast.Delete()):  # fmt: skip
                yield *span(node), "pass"

    return edits(ast.parse(source))


def _cpp_edits(source: str) -> Edits:
    blank = re.compile(NO_CODE, re.DOTALL).sub(lambda found: "_" * len(found.group()), source)
    for found in re.finditer(PLACES, blank):
        text = found.group()
        numbers = sorted(str(int(text) + by) for by in (1, -1)) if text.isdigit() else []
        for change in numbers or ([CPP[text]] if text in CPP else []):
            yield "", *found.span(), change


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """All mutants of a Python module, or of a C++ header; of ASCII."""
    edits = _python_edits if path.endswith(".py") else _cpp_edits
    for function, start, end, text in edits(source):
        first, last = source.rfind("\n", 0, start) + 1, source.find("\n", end)
        before, after = source[first:last], source[first:start] + text + source[end:last]
        change = " => ".join(" ".join(part.split()) for part in (before, after))
        line = source.count("\n", 0, start) + 1
        yield Mutant(path, function, change, line, source[:first] + after + source[last:])
