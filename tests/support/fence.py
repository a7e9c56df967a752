"""What the packages of zerocast use of each other, read out of their sources.

python -m tests.support.fence > tests/fence.toml
"""

import ast
from collections.abc import Container, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "zerocast"
OUTSIDE = ("adapters", "lab")
"""The packages around the core, which is all others."""

NOT_OURS = {
    *dir(torch),
    *dir(torch.Tensor),
    *dir(torch.nn.Module()),
    *dir(torch.ops.aten),
    "_fields",
}
"""Private names of torch, and of named tuples, which a class of zerocast may have, too."""

Uses = dict[str, dict[str, list[str]]]
"""For each package around the core the names that it uses, by module of the core."""


class Source(NamedTuple):
    """One module: its dotted name, and its tree."""

    module: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """The part of zerocast that it belongs to: ``zerocast.comm.mpi`` -> ``comm``."""
        return package_of(self.module)


def package_of(module: str) -> str:
    """``zerocast.comm.mpi`` -> ``comm``; of zerocast itself ``__init__``."""
    return module.split(".")[1] if "." in module else "__init__"


def module_of(file: Path) -> str:
    """``zerocast/comm/mpi.py`` -> ``zerocast.comm.mpi``; an ``__init__.py`` is its package."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> list[Source]:
    """Every module of zerocast."""
    files = sorted(PACKAGE.rglob("*.py"))
    return [Source(module_of(file), ast.parse(file.read_text())) for file in files]


def used_names(
    source: Source, modules: set[str], hidden: Container[str] = ()
) -> Iterator[tuple[str, str]]:
    """Each name that ``source`` imports from ``modules``, with its module; of a module that is
    imported as a whole, the attributes that it uses. One that is ``hidden`` is not imported so:
    its package has a function of the same name.
    """
    held = dict[str, str]()  # modules by the names that they have in the source
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in modules and whole not in hidden:
                    held[alias.asname or alias.name] = whole
                else:
                    yield node.module, alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in modules:
                    held[alias.asname or "zerocast"] = alias.name if alias.asname else "zerocast"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute):
            found = held.get(ast.unparse(node.value))
            found = found or _submodule(ast.unparse(node.value), held, modules)
            if found and f"{found}.{node.attr}" not in modules:
                yield found, node.attr


def _submodule(text: str, held: dict[str, str], modules: set[str]) -> str | None:
    """The module that ``text`` is, ``nn.functional`` where ``nn`` has been imported."""
    first, _, rest = text.partition(".")
    whole = f"{held.get(first, '')}.{rest}"
    return whole if rest and whole in modules else None


def uses() -> Uses:
    """What the packages around the core use of it."""
    every = sources()
    core = {each.module for each in every if each.package not in OUTSIDE}
    hidden = {
        f"{each.module}.{alias.name}"
        for each in every
        for node in each.tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if node.module == f"{each.module}.{alias.name}"
    }
    found: Uses = {}
    for package in OUTSIDE:
        names = {use for s in every if s.package == package for use in used_names(s, core, hidden)}
        found[package] = {
            module: sorted(name for of, name in names if of == module)
            for module in sorted({module for module, _ in names})
        }
    return found


def written(found: Uses) -> str:
    """The text of tests/fence.toml."""
    lines = ["# The names of the core that the packages around it use, all of them."]
    for package, modules in found.items():
        lines += ["", f"[{package}]"]
        for module, names in modules.items():
            lines += [f'"{module}" = [', *(f'    "{name}",' for name in names), "]"]
    return "\n".join(lines) + "\n"


# --- private names ---


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(source: Source) -> set[str]:
    """The private names that ``source`` defines: in the module, in classes, and on ``self``."""
    found = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr if ast.unparse(node.value) in ("self", "cls") else "")
    return set(filter(_is_private, found)) - NOT_OURS


def private_uses() -> set[tuple[str, str]]:
    """Each module that uses a private name of another package, with the name.

    A name is of another package where that defines it and the module's own does not. What is asked
    of ``super()`` must be defined in another module of the same package.
    """
    every, found = sources(), set()
    owners: dict[str, set[str]] = {}  # the modules that define a name
    for source in every:
        for name in private_names(source):
            owners.setdefault(name, set()).add(source.module)
    for source in every:
        for node in ast.walk(source.tree):
            names = []
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zerocast"):
                if package_of(node.module or "") != source.package:
                    names = [alias.name for alias in node.names if _is_private(alias.name)]
            elif isinstance(node, ast.Attribute) and node.attr in owners:
                of_super = {source.module} if ast.unparse(node.value) == "super()" else set()
                packages = set(map(package_of, owners[node.attr] - of_super))
                names = [node.attr] if packages and source.package not in packages else []
            found |= {(source.module, name) for name in names}
    return found


if __name__ == "__main__":
    print(written(uses()), end="")  # noqa: T201
