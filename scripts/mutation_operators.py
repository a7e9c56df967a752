"""What scripts/mutation.py changes: the mutants of a Python module and of a C++ header."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OPERATORS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+",
    "*": "//", "//": "*", "/": "*", "%": "//", "**": "*", "<<": ">>", ">>": "<<", "&": "|",
    "|": "&", "^": "&", "and": "or", "or": "and", "is": "is not", "is not": "is", "in": "not in",
    "not in": "in",
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
SYMMETRIC = {"min", "max", "lcm", "maximum", "minimum"}
"""Calls whose first two arguments may change places."""
CHECKED = {"isinstance", "TypeVar", "cast"}
"""Calls that no mutation is made of: of types, which mypy checks."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        path: the file, relative to the repository.
        function: the outermost function, as classes qualify it; empty where the change takes effect
            when the module is imported.
        line: where it is, from 1 on.
        before, after: the changed lines, each run of white space one blank.
        source: the whole file, changed.
    """

    path: str
    function: str
    line: int
    before: str
    after: str
    source: bytes

    @property
    def key(self) -> tuple[str, str, str]:
        """What names it in a list that outlives other changes of the file."""
        return self.path, self.function, f"{self.before} => {self.after}"


def _changed(path: str, function: str, source: bytes, start: int, end: int, text: str) -> Mutant:
    first, last = source.rfind(b"\n", 0, start) + 1, source.find(b"\n", end)
    after = source[first:start] + text.encode() + source[end:last]
    both = [" ".join(part.decode().split()) for part in (source[first:last], after)]
    line = source.count(b"\n", 0, start) + 1
    return Mutant(path, function, line, *both, source[:first] + after + source[last:])


class _Visitor:
    """Collects ``(function, start, end, text)``: between these bytes the text is put instead."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.edits: list[tuple[str, int, int, str]] = []
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

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

    @staticmethod
    def is_effect(node: ast.AST) -> bool:
        """Whether a node is a statement that is there for what it does."""
        if isinstance(node, ast.Expr):
            return not isinstance(node.value, ast.Constant)  # a docstring
        if isinstance(node, ast.Assign):
            return isinstance(node.targets[0], (ast.Attribute, ast.Subscript))
        return isinstance(node, (ast.AugAssign, ast.Raise, ast.Delete))

    def between(self, left: ast.AST, right: ast.AST) -> Iterator[tuple[int, int, str]]:
        """The operator that stands between two nodes, and its change."""
        start, end = self.span(left)[1], self.span(right)[0]
        found = re.search(r"is not|not in|[a-z]+|[-+*/%<>=!&|^]+", self.source[start:end].decode())
        if found and found.group() in OPERATORS:
            yield start + found.start(), start + found.end(), OPERATORS[found.group()]

    def edits_of(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        """The changes of one node: where, and what stands there instead."""
        if isinstance(node, ast.Compare):
            for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
                yield from self.between(left, right)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from self.between(left, right)
        elif isinstance(node, ast.BinOp):
            yield from self.between(node.left, node.right)
        elif isinstance(node, ast.UnaryOp):
            start = self.span(node)[0]
            yield start, start + (4 if isinstance(node.op, ast.Not) else 1), ""
        elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
            if not self.has_opposite(node.test):
                yield *self.span(node.test), f"not ({self.text(node.test)})"
        elif isinstance(node, ast.comprehension):
            for condition in node.ifs:
                if not self.has_opposite(condition):
                    yield *self.span(condition), f"not ({self.text(condition)})"
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, bool):
                yield *self.span(node), str(not node.value)
            elif isinstance(node.value, int):
                yield *self.span(node), str(node.value + 1)
                yield *self.span(node), f"({node.value - 1})"
            elif isinstance(node.value, float):
                yield *self.span(node), str(node.value * 2 + 1)
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
        elif self.is_effect(node):
            yield *self.span(node), "pass"


def of_python(root: Path, path: str) -> list[Mutant]:
    """All mutants of a module."""
    source = (root / path).read_bytes()
    visitor = _Visitor(source)
    visitor.visit(ast.parse(source))
    return [_changed(path, function, source, *edit) for function, *edit in visitor.edits]


CPP_OPERATORS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+",
    "*": "/", "/": "*", "%": "/", "&&": "||", "||": "&&", "&": "|", "|": "&", "<<": ">>",
    ">>": "<<",
}  # fmt: skip
CPP_CALLS = {"min_of": "max_of", "max_of": "min_of"}
NO_CODE = (
    r"//[^\n]*|#[^\n]*|static_assert\(.*?\);|constexpr[^;]*;|template <[^>]*>|enum[^;]*;|asm[^;]*;"
)
"""Comments, directives, declarations, and what the compiler checks."""


def of_cpp(root: Path, path: str) -> list[Mutant]:
    """All mutants of a header: operators, which clang-format sets between blanks, constants, calls,
    negations and jumps.
    """
    source = (root / path).read_bytes()
    plain = re.sub(
        NO_CODE, lambda m: re.sub(".", "_", m.group()), source.decode("ascii"), flags=re.S
    )
    edits: list[tuple[int, int, str]] = []
    for found in re.finditer(r"(?<= )[-+*/%<>=!&|]+(?= )|\b(?:min|max)_of\b(?=\()", plain):
        changed = (CPP_OPERATORS | CPP_CALLS).get(found.group())
        edits += [(*found.span(), changed)] if changed else []
    for found in re.finditer(r"(?<![\w.])\d+(?![\w.])", plain):
        edits += [(*found.span(), str(int(found.group()) + by)) for by in (1, -1)]
    for found in re.finditer(r"!(?=[\w(])|\b(?:continue|break|return)\b(?=;)", plain):
        edits.append((*found.span(), ""))
    return [_changed(path, "", source, *edit) for edit in sorted(edits)]
