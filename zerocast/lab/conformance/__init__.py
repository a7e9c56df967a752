"""Conformance: a ruler for formats, block scales and partitions, and a runner that applies it.

:func:`packs` makes documents of inputs and of the bytes that they must become, out of
docs/NUMERICS.md; :func:`score` measures a :class:`Package` by them, byte by byte, and says by
recomputing why bytes are others. ``python -m zerocast conform`` is both on the command line.
"""

from zerocast.lab.conformance.case_packs import Case, Pack, packs, write_packs
from zerocast.lab.conformance.packages import PACKAGES, Package, package_of
from zerocast.lab.conformance.scores import Score, score

__all__ = ["PACKAGES", "Case", "Pack", "Package", "Score",
           "package_of", "packs", "score", "write_packs"]  # fmt: skip
