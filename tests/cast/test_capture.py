"""What cannot be captured in a CUDA graph says so."""

import pytest
import torch

from zerocast.cast.capture import check_capture, check_planning
from zerocast.comm import SingleRank
from zerocast.errors import UnsupportedError

GPU = torch.device("cuda", 0)


class Staging(SingleRank):
    def stages(self, device: torch.device) -> bool:
        return device.type != "cpu"


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that is being captured, as torch would report it."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_a_staging_communicator_is_refused(capturing: None) -> None:
    """Collectives through host memory are refused by the communicator's name."""
    with pytest.raises(UnsupportedError, match=r"without the host, got .* on cuda:0; use torch"):
        check_capture(GPU, [SingleRank(), Staging()])


def test_check_finite_is_refused(capturing: None) -> None:
    """A check that makes the host wait is refused."""
    with pytest.raises(UnsupportedError, match="got check_finite=True; make the plan without"):
        check_capture(GPU, [SingleRank()], check_finite=True)


def test_all_else_is_captured(capturing: None) -> None:
    """One rank on a GPU, and tensors on the CPU, pass."""
    check_capture(GPU, [SingleRank()])
    check_capture(torch.device("cpu"), [Staging()], check_finite=True)


def test_planning_is_refused(capturing: None) -> None:
    """A plan is made, and follows moved weights, before the capture."""
    with pytest.raises(
        UnsupportedError, match="its weights moved, before a CUDA graph is captured"
    ):
        check_planning(GPU)
    check_planning(torch.device("cpu"))


def test_without_a_capture_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of a capture staging and checks are allowed."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    check_capture(GPU, [Staging()], check_finite=True)
    check_planning(GPU)
