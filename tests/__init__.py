"""The tests. This is a package because wheels, such as verl's, install another of this name, which
Python would find instead of a folder without this file.
"""
