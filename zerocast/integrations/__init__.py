"""Adapters by which other projects use zerocast: named in their configurations, or called by
them.
"""
