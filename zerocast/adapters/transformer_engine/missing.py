"""Raises errors for names of TransformerEngine that this package does not have.

A missing attribute raises an AttributeError, so that ``hasattr`` returns False. A failed import
raises an ImportError, so that code with a fallback uses it. Both messages name the page that says
what to use instead. For ``from module import name`` Python raises its standard message, but first
looks for a module of that name: :class:`_LastFinder`, the last of all finders, raises then.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from zerocast import UnsupportedError

_PREFIX = "zerocast.adapters."


class MissingNameError(UnsupportedError, AttributeError):
    """The error for a name of TransformerEngine that zerocast lacks; it says where to look."""


class MissingImportError(UnsupportedError, ImportError):
    """The error for an import of such a name."""


def _text(path: str) -> str:
    """Return the message for the dotted ``path``."""
    return (
        f"zerocast.adapters.transformer_engine has no {path.removeprefix(_PREFIX)}; "
        '"Names that are not here" in docs/transformer_engine.md says what to use instead.'
    )


def refuse_missing(package: str) -> None:
    """Add a ``__getattr__`` that raises to each loaded module of ``package``.

    Also add a ``__path__``, so that Python asks finders for its submodules.
    """
    for name, module in list(sys.modules.items()):
        if f"{name}.".startswith(f"{package}."):
            vars(module).setdefault("__path__", [])
            vars(module)["__getattr__"] = partial(_refuse, name)


def _refuse(module: str, name: str) -> NoReturn:
    raise MissingNameError(_text(f"{module}.{name}"))


class _LastFinder:
    """A finder that raises for modules of this package that no other finder has found."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        """Raise :class:`MissingImportError` for a module of this package."""
        if name.startswith(_PREFIX):
            raise MissingImportError(_text(name))


sys.meta_path.append(_LastFinder)
