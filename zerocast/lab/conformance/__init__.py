"""Conformance: tests formats, block scales and partitions of any implementation.

:func:`packs` makes test cases of inputs and required bytes, from docs/numerics.md. :func:`score`
compares a :class:`Package` with them byte by byte, and finds out by recomputation why bytes differ.
``python -m zerocast conform`` runs both.
"""

from zerocast.lab.conformance.case_packs import VERSION, Case, Pack, packs, write_packs
from zerocast.lab.conformance.packages import PACKAGES, Package, package_of
from zerocast.lab.conformance.scores import Score, score

__all__ = ["PACKAGES", "VERSION", "Case", "Pack", "Package", "Score",
           "package_of", "packs", "score", "write_packs"]  # fmt: skip
