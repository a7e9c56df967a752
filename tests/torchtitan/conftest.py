"""Tests against the installed torchtitan, or against what stands in for it."""

from tests.torchtitan import interface, stand_in

if interface.installed() is None:
    stand_in.install()
