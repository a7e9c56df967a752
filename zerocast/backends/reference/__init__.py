"""The reference backend: the numerics of every operation in plain torch, written to be read.

It runs on any device that torch runs on. Each element's block, byte and nibble are computed from
its flat index in the whole weight, one formula each, and nothing is optimised: other backends must
make the same bytes.
"""

from zerocast.backends.reference.reference_backend import ReferenceBackend

__all__ = ["ReferenceBackend"]
