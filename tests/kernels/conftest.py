"""CUDA's backend for tests: one text for the emulation and for a device."""

import pytest
import torch

from tests.cuda_emulation.emulator import Emulator, needs_emulation
from zerocast.backends import backend_for
from zerocast.backends.cuda import CudaBackend

device_only = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("emulated", marks=needs_emulation),
        pytest.param("device", marks=device_only),
    ],
)
def cuda(request: pytest.FixtureRequest) -> CudaBackend:
    """CUDA's kernels, run on the CPU by the emulation, and on a device, whose tensors they are the
    backend of; ``cuda.launcher`` has the device of the tensors.
    """
    if request.param == "emulated":
        # Few blocks a launch, so that every one of them goes on to further tiles.
        return CudaBackend(Emulator("random", max_grid=5))
    backend = backend_for(torch.device("cuda"))
    assert isinstance(backend, CudaBackend), "the reference stepped in for the kernels"
    return backend
