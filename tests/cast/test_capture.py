"""What cannot be captured in a CUDA graph says so."""

from collections.abc import Callable

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


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (
            lambda: check_capture(GPU, [SingleRank(), Staging()]),
            "that run on the device, got .* host for cuda:0; use torch",
        ),
        (
            lambda: check_capture(GPU, [SingleRank()], check_finite=True),
            "got check_finite=True; make the plan without",
        ),
        (
            lambda: check_planning(GPU),
            "its weights moved, before a CUDA graph is captured",
        ),
    ],
    ids=["staging", "check_finite", "planning"],
)
def test_what_cannot_be_captured_is_refused(
    capturing: None, check: Callable[[], None], text: str
) -> None:
    """Collectives through host memory, by the communicator's name; a check that makes the host
    wait; and a plan, which is made, and follows moved weights, before the capture.
    """
    with pytest.raises(UnsupportedError, match=text):
        check()


def test_all_else_is_captured(capturing: None) -> None:
    """One rank on a GPU, and tensors on the CPU, pass."""
    check_capture(GPU, [SingleRank()])
    check_capture(torch.device("cpu"), [Staging()], check_finite=True)
    check_planning(torch.device("cpu"))


def test_without_a_capture_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of a capture staging and checks are allowed."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    check_capture(GPU, [Staging()], check_finite=True)
    check_planning(GPU)
