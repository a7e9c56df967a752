"""Finds the kernels' sources: inside the installed package, or beside it in a checkout."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from zerocast.errors import BackendError


def cuda_sources() -> Path:
    """Return the folder with ``arithmetic/`` and ``cuda/``.

    A wheel carries it as ``zerocast/cuda_src``. In a checkout, installed editable or not, it stands
    beside the package.

    Raises:
        BackendError: where it is in neither place, with the places.
    """
    spec = importlib.util.find_spec("zerocast")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    places = [root / "cuda_src" for root in roots] + [root.parent / "cuda_src" for root in roots]
    for place in places:
        if (place / "arithmetic").is_dir() and (place / "cuda").is_dir():
            return place
    raise BackendError(
        "the cuda backend needs the sources of its kernels, and found none in "
        f"{', '.join(map(str, places))}; install zerocast again (pip install .)."
    )
