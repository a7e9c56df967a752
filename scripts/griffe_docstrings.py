"""What griffe does to the package: docstrings become Markdown, functions stand before modules."""

import re
from typing import Any

from griffe import Alias, Extension, GriffeLoader, Module, NameResolutionError, Object

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`~?([^`]+)`")
MARKS = (
    (r"^( *)(.+)\n *~~~+$", r"\1**\2**\n"),  # titles of notes
    (r"(?<=\S)::$", ":"),  # literal blocks are indented in Markdown, too
    (r"``([^`]+)``", r"`\1`"),
    (r"^(\w[\w,. ]*\w {3,}\S.*)$", r"    \1"),  # tables of names
)


class Package(Extension):
    """Runs once the package is loaded."""

    def on_package(self, *, pkg: Module, loader: GriffeLoader, **_: Any) -> None:
        """Prepare ``pkg`` and all that is in it."""
        rewrite(pkg)
        prefer_functions(pkg)


def prefer_functions(module: Module) -> None:
    """Let a package's function stand for the submodule that has its name and defines it, as it does
    in Python, in the package and wherever it is imported from there.
    """
    for name, member in list(module.members.items()):
        if member.is_alias:
            if member.resolved and member.target.is_module:
                module.members[name] = Alias(name, member.target_path, parent=module)
        elif member.is_module:
            prefer_functions(member)
            if module.imports.get(name) == f"{member.path}.{name}":
                module.members[name] = Alias(name, member.members[name], parent=module)


def rewrite(obj: Object) -> None:
    """Rewrite the docstring of ``obj`` and of its members."""
    if obj.docstring is not None:
        text = ROLE.sub(lambda role: link(obj, role.group(1)), obj.docstring.value)
        for mark, instead in MARKS:
            text = re.sub(mark, instead, text, flags=re.MULTILINE)
        obj.docstring.value = text
    for member in obj.members.values():
        if not member.is_alias:
            rewrite(member)


def link(obj: Object, name: str) -> str:
    """A link to what ``name`` means to ``obj``, where the site describes that; else the name."""
    try:
        target = obj.resolve(name)
    except NameResolutionError:
        target = name
    shown = name.replace("_", "&#95;")  # or Markdown would take two of them for emphasis
    return f'<autoref optional identifier="{target}"><code>{shown}</code></autoref>'
