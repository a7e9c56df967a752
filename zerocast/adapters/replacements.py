"""Replacements: functions of another package that zerocast replaces while it is installed there.

The adapters of Megatron-Core and DeepSpeed use this module, their tests test it, and it can be
removed with them. A replacement is called with the original function, then its arguments. A package
whose functions zerocast does not support is left unchanged.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from zerocast import UnsupportedError

Replacement = tuple[Any, str, str, Callable[..., Any]]
"""Owner, name and parameters of a function ("self, model"; for ``__init__`` only the first ones),
and its replacement."""


@dataclass
class Replacements:
    """The functions of one package that are replaced.

    Attributes:
        ours: the name of zerocast's package that replaces them.
        theirs: the name of the other package.
        on_pip: the name of the other package on PyPI.
        version: a supported version of it.
        find: imports the other package, and returns the replacements.
        importers: prefixes of the names of modules that may have imported a function by name.
    """

    ours: str
    theirs: str
    on_pip: str
    version: str
    find: Callable[[], Sequence[Replacement]]
    importers: tuple[str, ...] = ()
    _installed: list[tuple[Any, str, Any, Any]] = field(default_factory=list)

    def install(self) -> None:
        """Replace all functions that :attr:`find` returns, or none. A second call does nothing.

        Raises:
            UnsupportedError: if the package is missing, or a function has other parameters.
        """
        if self._installed:
            return
        try:
            found = self.find()
        except ImportError as error:
            raise UnsupportedError(
                f"{self.ours} needs {self.theirs}, got {error!r}; pip install {self.on_pip}."
            ) from error
        for owner, name, known, _ in found:
            function = getattr(owner, name, None)
            given = list(inspect.signature(function).parameters) if callable(function) else []
            checked = given[: len(known.split(", "))] if name == "__init__" else given
            if ", ".join(checked) != known:
                raise UnsupportedError(
                    f"{self.ours} needs {owner.__name__}.{name}({known}), got {given}; use a "
                    f"version of {self.theirs} that it supports, such as {self.version}."
                )
        for owner, name, _, ours in found:
            function = getattr(owner, name)
            replacement = _in_place_of(function, ours)
            self._put(owner, name, function, replacement)
            self._installed.append((owner, name, function, replacement))

    def uninstall(self) -> None:
        """Undo :meth:`install`, also in modules that were imported after it."""
        while self._installed:
            owner, name, function, replacement = self._installed.pop()
            self._put(owner, name, replacement, function)

    def _put(self, owner: Any, name: str, old: object, new: object) -> None:
        """Replace ``old`` by ``new`` in ``owner``, and in modules that imported it by name."""
        modules = [
            module
            for module in list(sys.modules.values())
            if getattr(module, "__name__", "").startswith(self.importers)
        ]
        for holder in (owner, *modules):
            if vars(holder).get(name) is old:
                setattr(holder, name, new)


def _in_place_of(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        return ours(theirs, *args, **kwargs)

    return call
