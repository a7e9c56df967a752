"""The compiled backends, whose bytes are the reference's: the CPU library on every instruction set,
and CUDA's kernels, run on the CPU by the emulation in several orders of threads.
"""

from collections.abc import Callable, Mapping

import pytest

from tests.cuda_emulation.emulator import ORDERS, Emulator, needs_emulation
from tests.support.claims import assert_same_tensors
from tests.support.instruction_sets import ISAS
from tests.support.operations import Written
from zerocast.backends.cpu import CpuBackend
from zerocast.backends.cuda import CudaBackend
from zerocast.backends.reference import ReferenceBackend
from zerocast.numerics import Backend


def on_cpu(threads: int = 1) -> dict[str, CpuBackend]:
    """The CPU library on every instruction set, with so many threads."""
    return {isa: CpuBackend(isa, threads) for isa in ISAS}


ON_CPU = on_cpu()
# One for each order of threads, kept so that each kernel is loaded once. Few blocks a launch, so
# that every one of them goes on to further tiles.
EMULATED = {order: CudaBackend(Emulator(order, max_grid=5)) for order in ORDERS}
COMPILED: dict[str, Backend] = {**ON_CPU, **EMULATED}

on_every_backend = pytest.mark.parametrize(
    "name", [*ISAS, *(pytest.param(order, marks=needs_emulation) for order in ORDERS)]
)
"""A test's ``name`` of a backend in :data:`COMPILED`."""


def assert_as_reference(
    run: Callable[[Backend], Written],
    what: object = "",
    backends: Mapping[str, Backend] = ON_CPU,
) -> None:
    """``run`` writes the reference's bytes on each of ``backends``."""
    expected = run(ReferenceBackend())
    for name, backend in backends.items():
        assert_same_tensors(run(backend), expected, f"on {name}, {what}")
