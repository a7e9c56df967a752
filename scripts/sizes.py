"""The budget of code: what is in the repository, held against the numbers in scripts/sizes.toml.

    python scripts/sizes.py            prints the counts of today, in the form of the table
    python scripts/sizes.py --check    fails where a count and its number in the table disagree
    python scripts/sizes.py --write    lowers numbers of the table to their counts; raises none

Code lines have code on them: blank lines, comments and docstrings are none, nor is any other string
that stands alone. A count above its number fails. So does one that is well below it: otherwise the
code could grow back unseen. Only Python, C++ and CUDA are counted.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("cuda_src", "examples", "scripts", "tests", "zerocast")
SUFFIXES = (".cpp", ".cu", ".cuh", ".h", ".py")

LONGEST_MODULE = 350
"""All lines of a file of zerocast/."""
LONGEST_OTHER = 450
"""Code lines of a file elsewhere."""
UNLIMITED = ("tests/support/simulation.py",)
"""One list of events that belong together."""

SECTIONS = {
    "code_lines": "Without blank lines, comments and docstrings.",
    "counts": "A named tuple counts as a dataclass.",
    "lines_of_long_modules": f"Of more than {LONGEST_MODULE} lines of any kind. None may grow.",
    "code_lines_of_long_files": f"Of more than {LONGEST_OTHER} code lines. None may grow.",
}
Sizes = dict[str, dict[str, int]]
"""By section of the table: what is counted, and how many there are."""

NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip
COMMENT_OR_LITERAL = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])'""", re.DOTALL | re.VERBOSE
)


def python_lines(text: str) -> int:
    """The number of code lines of Python."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            code.difference_update(range(node.lineno, node.end_lineno + 1))
    return sum(bool(line.strip()) for n, line in enumerate(text.split("\n"), 1) if n in code)


def cpp_lines(text: str) -> int:
    """The number of code lines of C++."""

    def keep(match: re.Match[str]) -> str:
        found = match.group()
        return "\n" * found.count("\n") if found[0] == "/" else found

    return sum(bool(line.strip()) for line in COMMENT_OR_LITERAL.sub(keep, text).split("\n"))


def is_dataclass(node: ast.ClassDef) -> bool:
    """Whether it is decorated as a dataclass, or a named tuple."""
    marks = [ast.unparse(mark) for mark in (*node.decorator_list, *node.bases)]
    return any(re.match(r"(dataclasses\.)?dataclass\b|(typing\.)?NamedTuple$", m) for m in marks)


def definitions(module: str, text: str) -> Iterator[str]:
    """For each class, method and flag that is counted, the name of its entry."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            yield "classes of zerocast"
            if module.startswith("zerocast/numerics/") and is_dataclass(node):
                yield "dataclasses of zerocast/numerics"
            for member in node.body if node.name in ("Backend", "Communicator") else ():
                if isinstance(member, ast.FunctionDef):
                    yield f"methods of {node.name}"
                elif isinstance(member, ast.AnnAssign) and ast.unparse(member.annotation) == "bool":
                    yield f"flags of {node.name}"


def count(root: Path) -> Sizes:
    """All that the table limits, as it is under ``root``."""
    sizes: dict[str, Counter[str]] = {section: Counter() for section in SECTIONS}
    for path in sorted(file for part in PARTS for file in (root / part).rglob("*")):
        if path.suffix not in SUFFIXES:
            continue
        file, text = path.relative_to(root).as_posix(), path.read_text()
        code = python_lines(text) if path.suffix == ".py" else cpp_lines(text)
        part, *folders = file.split("/")[:-1]
        if part == "zerocast":
            part = f"zerocast/{folders[0]}" if folders else "zerocast/*.py"
            sizes["counts"].update(definitions(file, text))
            if (lines := text.count("\n")) > LONGEST_MODULE:
                sizes["lines_of_long_modules"][file] = lines
        elif code > LONGEST_OTHER and file not in UNLIMITED:
            sizes["code_lines_of_long_files"][file] = code
        sizes["code_lines"][part] += code
    return {section: dict(+sizes[section]) for section in SECTIONS}  # + leaves out zeros


def read(table: str) -> Sizes:
    """The sizes that a table allows. Python reads TOML since 3.11 only, and this is little of it.

    Raises:
        SystemExit: where a line is no entry, or the second one of its name.
    """
    sizes: Sizes = {section: {} for section in SECTIONS}
    section = ""
    for line in filter(None, table.split("\n")):
        if line[0] == "[" and line.strip("[]") in sizes:
            section = line.strip("[]")
        elif (entry := re.fullmatch(r'"(.+)" = (\d+)', line)) and section:
            if entry[1] in sizes[section]:
                raise SystemExit(f"scripts/sizes.toml has two entries for {entry[1]}; keep one.")
            sizes[section][entry[1]] = int(entry[2])
        elif line[0] != "#":
            raise SystemExit(f'scripts/sizes.toml: write "NAME" = NUMBER, not {line!r}.')
    return sizes


def written(sizes: Sizes) -> str:
    """The text of a table, sorted."""
    text = "# What scripts/sizes.py counts and allows. A number is raised by hand, with a reason.\n"
    for section, comment in SECTIONS.items():
        entries = (f'"{name}" = {number}\n' for name, number in sorted(sizes[section].items()))
        text += f"\n# {comment}\n[{section}]\n{''.join(entries)}"
    return text


def complaints(found: Sizes, allowed: Sizes) -> Iterator[str]:
    """A sentence for each disagreement: entry, count, and what to do."""
    for section in SECTIONS:
        few = 0 if section == "counts" else 10
        for name in sorted(found[section].keys() | allowed[section].keys()):
            number, limit = found[section].get(name, 0), allowed[section].get(name, 0)
            what = (
                f"{name}, {section.replace('_', ' ')}: {number or 'none'}; "
                f"scripts/sizes.toml has {limit or 'no entry'}."
            )
            if number > limit:
                yield (
                    f"{what} Make it smaller, or write {number} there in the same commit and say "
                    "in its message why."
                )
            elif limit - number > max(few, limit // 50) or not number:
                yield f"{what} Lower it: python scripts/sizes.py --write"


def lowered(found: Sizes, allowed: Sizes) -> Sizes:
    """What is allowed, but no more than there is."""
    return {
        section: {
            name: min(number, found[section][name])
            for name, number in allowed[section].items()
            if name in found[section]
        }
        for section in SECTIONS
    }


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Print, check or lower; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="compare with scripts/sizes.toml")
    mode.add_argument("--write", action="store_true", help="lower its numbers to the counts")
    options = parser.parse_args(arguments)
    found, table = count(root), root / "scripts" / "sizes.toml"
    if options.write:
        table.write_text(written(lowered(found, read(table.read_text()))))
    elif options.check:
        wrong = list(complaints(found, read(table.read_text())))
        print("\n".join(wrong) or "All sizes are as the table says.")
        return bool(wrong)
    else:
        print(written(found), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
