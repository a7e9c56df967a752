"""CUDA's backend for tests: one text for the emulation and for a device."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.cuda_emulation.emulator import Emulator, needs_emulation
from zerocast.backends import backend_for
from zerocast.backends.cuda import CudaBackend
from zerocast.backends.cuda.device import DeviceLauncher

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


class Stream:
    """One of torch's streams."""

    def __init__(self, number: int) -> None:
        self.cuda_stream = number
        self.waited: list[object] = []

    def record_event(self) -> "Event":
        return Event()

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


class Event:
    """One of torch's events."""

    over = False

    def query(self) -> bool:
        return self.over


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A launcher for a GPU that is not there: ``launcher``, whose driver, streams and events only
    take notes; ``calls`` of the driver; ``contexts``, the threads in which CUDA's runtime was
    called; and ``use(stream)``, which makes one the thread's current one.
    """
    here = threading.local()
    calls: list[tuple[int, ...]] = []
    contexts: list[tuple[threading.Thread, int]] = []

    def current() -> Stream:
        if not hasattr(here, "stream"):
            here.stream = Stream(threading.get_ident())
        return here.stream

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr("torch.empty_like", lambda table, device: table.clone())
    monkeypatch.setattr("zerocast.backends.cuda.device.import_nvrtc", lambda: None)
    launcher = DeviceLauncher(torch.device("cuda", 0))
    launcher.__dict__["_cupy"] = SimpleNamespace(
        driver=SimpleNamespace(
            launchKernel=lambda *given: calls.append(given), CUDADriverError=RuntimeError
        ),
        runtime=SimpleNamespace(
            setDevice=lambda index: contexts.append((threading.current_thread(), index))
        ),
    )
    launcher.__dict__["_write"] = 1
    return SimpleNamespace(
        launcher=launcher,
        calls=calls,
        contexts=contexts,
        use=lambda stream: setattr(here, "stream", stream),
    )
