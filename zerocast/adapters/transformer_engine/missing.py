"""Refuses the names of TransformerEngine that are not here.

An attribute that is missing is an AttributeError, so that ``hasattr`` says False, and an import
that fails an ImportError, so that code which looks whether something is there goes on without it.
Both name the page that says what to use instead. Python makes its own text for ``from module import
name``, but first looks for a module of that name: :class:`_LastFinder` stands behind all finders
and answers then.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from zerocast import UnsupportedError

_PREFIX = "zerocast.adapters."


class MissingNameError(UnsupportedError, AttributeError):
    """A name of TransformerEngine's that zerocast does not have; the text says where to look."""


class MissingImportError(UnsupportedError, ImportError):
    """:class:`MissingNameError` for a name that was imported."""


def _text(path: str) -> str:
    """Return what is said of the dotted ``path``."""
    return (
        f"zerocast.adapters.transformer_engine has no {path.removeprefix(_PREFIX)}; "
        '"Names that are not here" in docs/TRANSFORMER_ENGINE.md says what to use instead.'
    )


def refuse_missing(package: str) -> None:
    """Give each module of ``package`` that is loaded a ``__getattr__`` which refuses; let Python
    ask finders for what it lacks.
    """
    for name, module in list(sys.modules.items()):
        if f"{name}.".startswith(f"{package}."):
            vars(module).setdefault("__path__", [])
            vars(module)["__getattr__"] = partial(_refuse, name)


def _refuse(module: str, name: str) -> NoReturn:
    raise MissingNameError(_text(f"{module}.{name}"))


class _LastFinder:
    """The finder of modules that no other finder found; it refuses them."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        """Raise :class:`MissingImportError` for a module of this package."""
        if name.startswith(_PREFIX):
            raise MissingImportError(_text(name))


sys.meta_path.append(_LastFinder)
