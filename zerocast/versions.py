"""Which versions run: zerocast's own, and those that all ranks of a group must have in common.

NOT here: the oldest torch that is accepted (:mod:`zerocast.errors`); the version of the arithmetic
(``NUMERICS_VERSION`` of :mod:`zerocast.numerics`); the interface of the native library, which
each process compares with its own Python code when it loads the library.
"""

from __future__ import annotations

import sys

import torch

__version__ = "0.1.0"  # pyproject.toml reads it here


def common_versions() -> str:
    """Return, as a text, the versions that must be the same on every rank of a group.

    Python's patch release and torch's build (``+cpu``, ``+cu130``) are not in it, because hosts may
    differ in them without a difference in what ranks exchange.
    """
    release = str(torch.__version__).partition("+")[0]
    major, minor = sys.version_info[:2]
    return f"zerocast {__version__}, torch {release}, Python {major}.{minor}"
