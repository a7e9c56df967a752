"""The native CPU backend (in the making): until the library is built, the reference steps in."""

from zerocast.backends.reference import ReferenceBackend
from zerocast.errors import BackendError


class CpuBackend(ReferenceBackend):
    """Placeholder that reports the library as missing."""

    name = "cpu"

    def __init__(self) -> None:
        raise BackendError("the native library is not built.")
