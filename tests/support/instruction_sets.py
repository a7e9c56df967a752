"""The native backend on every instruction set; what imports this is skipped where it is not."""

from collections.abc import Callable, Sequence

import pytest

from tests.support.claims import assert_same_tensors
from tests.support.operations import Written
from zerocast.backends import native_library
from zerocast.backends.cpu import CpuBackend
from zerocast.backends.reference import ReferenceBackend
from zerocast.errors import BackendError
from zerocast.numerics import Backend

try:
    ISAS = native_library.instruction_sets(native_library.load())
except BackendError as error:
    pytest.skip(str(error), allow_module_level=True)


def assert_as_reference(
    run: Callable[[Backend], Written],
    what: object = "",
    *,
    threads: Sequence[int] = (1,),
    isas: Sequence[str] = ISAS,
) -> None:
    """``run`` writes the reference's bytes on every instruction set."""
    expected = run(ReferenceBackend())
    for isa in isas:
        for n in threads:
            assert_same_tensors(run(CpuBackend(isa, n)), expected, f"on {isa}, {n} threads, {what}")
