"""What belongs to the memory and ranks of a process is not copied, pickled or saved."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zerocast
from tests.support.claims import message_of
from zerocast.comm import RecordingCommunicator, SingleRank, run_in_process
from zerocast.comm.uncopied import Uncopied
from zerocast.export import Export
from zerocast.refit import Refit

WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda held: torch.save({"held": held}, io.BytesIO()),
}


def made(folder: Path) -> dict[str, Any]:
    """One of each class, and what its message says is to be done."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    zerocast.nn.convert(model, "nvfp4")
    optimizer = zerocast.optim.ZeroOptimizer(model.named_parameters())
    weight, master = zerocast.empty((32, 32), "nvfp4"), torch.zeros(32 * 32)
    dialect, gloo = "compressed-tensors/nvfp4", zerocast.as_communicator(dist.group.WORLD)
    (thread,) = run_in_process(1, lambda comm: [comm])
    return {
        "make a plan": zerocast.CastPlan([weight], [master], [0], SingleRank()),
        "optimizer.state_dict()": optimizer,
        "ema(decay)": optimizer.ema(0.5),
        "of the other model": Export(model, dialect),
        "of the other model.": Refit(model, dialect),
        "wait()": zerocast.checkpoint.save(folder, optimizer, asynchronous=True),
        "zerocast.as_communicator": gloo,
        "of the other communicator": RecordingCommunicator(gloo),
        "split(color)": thread[0],
    }


def test_each_refuses_every_way_by_name(tmp_path: Path) -> None:
    """By an error that names the class and says what to do."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for remedy, each in made(tmp_path).items():
            for way, call in WAYS.items():
                said = message_of(zerocast.UnsupportedError, call, each)
                assert said.startswith(type(each).__name__), way
                assert remedy in said, way
    finally:
        dist.destroy_process_group()


def test_no_class_is_left_out() -> None:
    """Those of the test above are all but the communicator of MPI; that of one rank is copied."""
    assert {kind.__name__ for kind in Uncopied.__subclasses__()} == {
        "Average", "CastPlan", "Export", "InProcessCommunicator", "PendingSave",
        "ProcessCommunicator", "RecordingCommunicator", "Refit", "ShardedOptimizer",
    }  # fmt: skip
    assert type(copy.deepcopy(SingleRank())) is SingleRank
