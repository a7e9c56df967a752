"""Tests against the installed torchtitan, or against what stands in for it."""

import importlib
import warnings

from tests.torchtitan import interface, stand_in

if interface.installed() is None:
    stand_in.install()
else:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the package itself imports
        for name in interface.ASKED[interface.installed()]:
            importlib.import_module(name.partition(":")[0])
