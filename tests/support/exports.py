"""What tests do with exports, refits and the files that they write."""

import json
from pathlib import Path
from typing import Any

import torch

import zerocast
from tests.support.claims import assert_same_tensors
from tests.support.fused import cast_as_served
from tests.support.same_bytes import assert_same_bytes
from zerocast.comm import Communicator
from zerocast.export import Export, load_pretrained
from zerocast.layout import Extent
from zerocast.optim import ZeroOptimizer
from zerocast.refit import Receiver, Refit


def tensors_of(source: Any, *arguments: Any, **options: Any) -> dict[str, torch.Tensor]:
    """Everything that an Export gives, made of these arguments or given itself. Collective."""
    export = source if isinstance(source, Export) else Export(source, *arguments, **options)
    return {name: tensor for bucket in export.buckets() for name, tensor in bucket.items()}


def of_masters(model: torch.nn.Module, group: Any = None, **options: Any) -> dict[str, Any]:
    """The options that cast the masters of a new optimizer of the model."""
    optimizer = ZeroOptimizer(model.named_parameters(), group=group, **options)
    return {"optimizer": optimizer, "from_masters": True}


def update(refit: Refit, receiver: Receiver) -> None:
    """Apply the deltas since the receiver's version; a receiver that has none gets all."""
    for name, delta in refit.deltas(receiver.version):
        receiver.apply_delta(name, delta)


def assert_received(refit: Refit, receiver: Receiver, when: str = "") -> dict[str, torch.Tensor]:
    """What is held is what is sent whole, which is returned. Collective."""
    sent = dict(refit.named_tensors())
    assert_same_tensors(receiver.tensors, sent, when)
    return sent


def contents(folder: Path) -> dict[str, bytes]:
    """Of every file below ``folder``, by name; links and empty directories count, too."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


def configuration(folder: Path) -> dict[str, Any]:
    """The config.json of an export."""
    return json.loads((folder / "config.json").read_text())


def section_of(folder: Path) -> dict[str, Any]:
    """What it says about quantization."""
    return configuration(folder)["quantization_config"]


def plan_of_rows(comm: Communicator, values: torch.Tensor, rows: slice) -> zerocast.CastPlan:
    """Of weights [count, M, K], of each of which this rank has the same rows."""
    return zerocast.CastPlan(
        [zerocast.empty(value.shape, "block", dtype=torch.bfloat16) for value in values],
        [value[rows] for value in values],
        [rows.start * values.shape[2]] * len(values),
        comm,
        names=[f"{i}.weight" for i in range(len(values))],
    )


def pieces_of(refit: Refit, whole: dict[str, torch.Tensor]) -> dict[str, list[Extent]]:
    """Where the shards of a refit lie in the flat tensors of ``whole``, whose bytes they have."""
    found: dict[str, list[Extent]] = {}
    for piece in refit.shards():
        extent = Extent(piece.start, piece.start + len(piece.values))
        own = whole[piece.name].reshape(-1)[extent.start : extent.end]
        assert_same_tensors({piece.name: piece.values}, {piece.name: own}, f"at {extent}")
        assert piece.shape == whole[piece.name].shape
        found.setdefault(piece.name, []).append(extent)
    return found


def assert_served(folder, masters, recipe, dtype) -> dict[str, torch.Tensor]:
    """The folder has 14 weights in codes, those of one cast of whole masters where weights that
    servers fuse share an amax, and the other masters rounded to ``dtype``. Returns what it has.
    """
    stored = load_pretrained(folder)
    names = [n for n, tensor in stored.items() if isinstance(tensor, zerocast.QuantizedTensor)]
    assert len(names) == 14
    expected = masters | cast_as_served({name: masters[name] for name in names}, recipe, dtype)
    for name, tensor in stored.items():
        if name in names:
            assert_same_bytes(tensor.rowwise_data, expected[name].rowwise_data, name)
            assert_same_bytes(tensor.dequantize(), expected[name].dequantize(), name)
        else:
            assert_same_bytes(tensor, expected[name].to(dtype), name)
    return stored
