"""Tests against the installed torchtitan, or against what stands in for it."""

import importlib
import warnings

from tests.adapters.torchtitan import stand_in
from tests.adapters.torchtitan.interface import RECORD, RELEASE, installed

if installed() is None:
    stand_in.install()
else:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the package itself imports
        for name in RECORD[RELEASE]:
            importlib.import_module(name.partition(":")[0])
