"""Finds and loads the native library, ``libzerocast_cpu``, and says what to do where it is missing.

It is inside the package, in ``zerocast/_native``; an editable install keeps it in a second folder
that is on the package's path. No other place is searched, no environment variable and no search
path of the system, so the library that runs is the one that was installed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from functools import cache
from pathlib import Path

import torch  # noqa: F401  (loads torch's OpenMP runtime first, so that the library shares it)

from zerocast.errors import BackendError

INTERFACE = 27
"""The number of the interface of functions and tables that this Python code calls; the library
returns its own from ``zerocast_cpu_interface()``.
"""

LIBRARY = "libzerocast_cpu" + (".dylib" if sys.platform == "darwin" else ".so")

REMEDY = (
    "install zerocast where a C++ compiler is available (pip install .), or build into a checkout: "
    "cmake -S . -B build/native && cmake --build build/native && cmake --install build/native "
    "--prefix ."
)


def find_library() -> Path:
    """Find the file of the library.

    Raises:
        BackendError: where there is none, with the places that were searched and the remedy.
    """
    spec = importlib.util.find_spec("zerocast")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    places = [Path(root) / "_native" / LIBRARY for root in roots]
    for place in places:
        if place.is_file():
            return place
    tried = " nor ".join(map(str, places))
    raise BackendError(
        f"the native library is not built: there is no {tried}. To build it, {REMEDY}."
    )


def open_library(path: Path) -> ctypes.CDLL:
    """Load the library at ``path`` and check that it has the interface that this Python code calls.

    Raises:
        BackendError: where it cannot be loaded, or was built from other sources than this Python.
    """
    try:
        library = ctypes.CDLL(str(path))
        found = library.zerocast_cpu_interface()
    except (OSError, AttributeError) as error:
        raise BackendError(
            f"the native library {path} cannot be loaded ({error}). To build it again, {REMEDY}."
        ) from error
    if found != INTERFACE:
        raise BackendError(
            f"the native library must have interface {INTERFACE}, and {path} has {found}: it was "
            f"built from another version of zerocast. To build it again, {REMEDY}."
        )
    library.zerocast_cpu_isas.restype = ctypes.c_char_p
    return library


@cache
def load() -> ctypes.CDLL:
    """Return the native library, loaded once a process.

    Raises:
        BackendError: as :func:`find_library` and :func:`open_library` do.
    """
    return open_library(find_library())


def instruction_sets(library: ctypes.CDLL) -> list[str]:
    """Return the instruction sets that ``library`` holds and this machine runs, fastest first."""
    return library.zerocast_cpu_isas().decode().split()
