"""A fault file gives back what was written, bit for bit."""

from pathlib import Path

import torch

from tests.support.claims import assert_same_tensors
from zerocast.cast.fault_file import read_fault, write_fault


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    """Every dtype; a scalar, a tensor of nothing and one that lies behind it."""
    tensors = {
        "master": torch.tensor([[1.5, -0.0], [torch.inf, torch.nan]]),
        "amaxes": torch.arange(3, dtype=torch.int32),
        "before/draws": torch.tensor(2**62 + 1),
        "held/nothing": torch.empty(0, 4, dtype=torch.uint8),
        "held/rowwise_data": torch.arange(256, dtype=torch.uint8).view(4, 64).t(),
    }
    fault = {"name": "layer.0", "step": 3, "ranks": [0, 1]}
    write_fault(tmp_path / "fault", fault, tensors)
    read, found = read_fault(tmp_path / "fault")
    assert read == fault
    assert_same_tensors(found, tensors, "read")
