"""TransformerEngine's own compiled kernels beside ours, on the tensors of scripts/bench_cuda.py.

Its casts of sharded master weights come down to a few functions of its C interface, called weight
by weight. bench_transformer_engine.cpp calls the same functions in the same order, with all handles
made beforehand; so what is timed are its launches and kernels, not its bindings. Both are timed in
one run, over the same shapes, shards, masters and gathered codes, in two ways:

    FP32    its kernels read the FP32 masters: one pass less than what it does, and other bytes
    BF16    as its users call it: torch rounds each master to BF16 into a tensor of its own, and the
            kernels read that; this gives the bytes that ours give, so it is the same work

Where both give the same bytes by numerics, they are compared, and differing ones counted.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from bench_frame import RankSteps, Work

SCHEMES = {"fp8": 0, "fp8_blockwise": 1, "nvfp4": 2}
"""Our recipes that it has, by the numbers of the driver's Scheme."""

STEPS = ("amax", "scale", "cast", "transpose")
"""By the numbers of the driver's Step."""

WEIGHT = (
    "rows", "cols", "start", "owned", "master", "block_amax", "block_scale", "amax_rows",
    "amax_cols", "tensor_amax", "tensor_scale", "scale_inv", "scale_rows", "scale_cols", "codes",
    "gathered", "gathered_scale", "columnwise", "columnwise_scale", "columnwise_rows",
    "columnwise_cols",
)  # fmt: skip
"""The driver's struct Weight: one int64 each."""

TENSOR_HANDLES_MB = "512"
"""For the library's pool of handles: its default of 20 does not hold those of 5,568 weights."""


def cannot_run(recipe: str, step: str, capability: tuple[int, int]) -> str | None:
    """Return why this device has no such kernel; None where it has."""
    if (recipe, step) == ("nvfp4", "cast") and capability < (10, 0):
        return (
            "its NVFP4 cast converts by an instruction of compute capability 10.0 and above, this "
            f"device has {capability[0]}.{capability[1]}"
        )
    return None


class Driver:
    """The library that build_transformer_engine.py makes."""

    def __init__(self, path: Path) -> None:
        os.environ.setdefault("NVTE_TENSOR_HANDLE_POOL_SIZE_MB", TENSOR_HANDLES_MB)
        # It looks up the CUDA runtime among the global symbols.
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        address, number = ctypes.c_void_p, ctypes.c_int64
        # A prototype called with a pair of a name and a library looks that function up.
        arguments = number, address, number, number, address
        self._prepare = ctypes.CFUNCTYPE(address, *arguments)(("bench_prepare", library))
        step = ctypes.CFUNCTYPE(ctypes.c_bool, address, number, address)
        self._step = step(("bench_step", library))
        self._release = ctypes.CFUNCTYPE(None, address)(("bench_release", library))
        self._error = ctypes.CFUNCTYPE(ctypes.c_char_p)(("bench_error", library))

    def raise_error(self) -> None:
        """Raise what the library threw, without the path that it was compiled at."""
        message = self._error().decode(errors="replace").strip().splitlines()[0]
        raise RuntimeError(re.sub(r"/\S*/", "", message))

    def prepare(self, scheme: int, table: torch.Tensor, bf16: bool, flag: torch.Tensor) -> Launches:
        """Prepare the launches over the weights of ``table``, int64 [weights, len(WEIGHT)] on the
        host; ``flag`` is an int32 [1] on the device.
        """
        rows, fields = table.shape
        assert table.is_contiguous()
        assert table.dtype == torch.int64
        assert fields == len(WEIGHT)
        handle = self._prepare(scheme, table.data_ptr(), rows, bf16, flag.data_ptr())
        if not handle:
            self.raise_error()
        return Launches(self, handle)


class Launches:
    """The steps of one set of weights."""

    def __init__(self, driver: Driver, handle: int) -> None:
        self._driver, self._handle = driver, handle

    def step(self, name: str) -> None:
        """Run all launches of one step, on torch's current stream."""
        stream = torch.cuda.current_stream().cuda_stream
        if not self._driver._step(self._handle, STEPS.index(name), stream):
            self._driver.raise_error()

    def close(self) -> None:
        """Give the handles back."""
        self._driver._release(self._handle)


# --- what it works on ---


def pieces(sizes: Iterable[int], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Return zeros of these sizes, out of one allocation."""
    sizes = list(sizes)
    return list(torch.zeros(sum(sizes), dtype=dtype, device=device).split(sizes))


@dataclass(frozen=True)
class Operands:
    """What its kernels read and write for one set of weights, by the fields of ``WEIGHT``."""

    numbers: dict[str, list[int]]
    tensors: dict[str, list[torch.Tensor]]

    def table(self, masters: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return one row a weight, with these masters."""
        tensors = {**self.tensors, "master": masters}
        columns = [
            self.numbers[name]
            if name in self.numbers
            else [0 if t is None else t.data_ptr() for t in tensors[name]]
            for name in WEIGHT
        ]
        return torch.tensor(columns, dtype=torch.int64).t().contiguous()


def operands(recipe: str, work: RankSteps) -> Operands:
    """Make its buffers for amaxes, scales and bytes; the gathered codes and scales are ours."""
    storages, shards, device = work.storages, work.shards, work.storages[0].device
    grids = [storage.grid for storage in storages]
    scales = [storage.buffers["rowwise_scale_inv"] for storage in storages]
    nvfp4 = recipe == "nvfp4"
    # Under FP8 amaxes and scales have one shape; under NVFP4 stored scales repeat and are padded.
    planes = [s.shape if s.dim() == 2 else (1, 1) for s in scales]
    amaxes = [(g.blocks_h, g.blocks_w) for g in grids] if nvfp4 else planes
    gathered = [storage.buffers["rowwise_data"] for storage in storages]
    columnwise = [storage.buffers["columnwise_data"] for storage in storages]
    others = [storage.buffers.get("columnwise_scale_inv") for storage in storages]
    other_planes = [s.shape if nvfp4 and s is not None else (0, 0) for s in others]
    starts = [shard.extent.start for shard in shards]
    codes = pieces((g.numel() for g in gathered), torch.uint8, device)
    per_byte = 2 if nvfp4 else 1
    return Operands(
        {
            "rows": [g.rows for g in grids],
            "cols": [g.cols for g in grids],
            "start": starts,
            "owned": [shard.extent.size for shard in shards],
            "amax_rows": [rows for rows, _ in amaxes],
            "amax_cols": [cols for _, cols in amaxes],
            "scale_rows": [rows for rows, _ in planes],
            "scale_cols": [cols for _, cols in planes],
            "columnwise_rows": [rows for rows, _ in other_planes],
            "columnwise_cols": [cols for _, cols in other_planes],
        },
        {
            "block_amax": pieces((h * w for h, w in amaxes), torch.float32, device),
            "block_scale": pieces((h * w for h, w in amaxes), torch.float32, device),
            "tensor_amax": pieces((1 for _ in grids), torch.float32, device),
            "tensor_scale": pieces((1 for _ in grids), torch.float32, device),
            "scale_inv": pieces((h * w for h, w in planes), scales[0].dtype, device),
            "codes": [c[start // per_byte :] for c, start in zip(codes, starts, strict=True)],
            "gathered": gathered,
            "gathered_scale": scales,
            "columnwise": pieces((c.numel() for c in columnwise), torch.uint8, device),
            "columnwise_scale": pieces((h * w for h, w in other_planes), torch.uint8, device),
        },
    )


def differing(recipe: str, work: RankSteps, theirs: Operands) -> dict[str, int]:
    """Count by step which of its results are not ours: amaxes, codes, columnwise bytes."""
    counts = dict.fromkeys(("amax", "cast", "transpose"), 0)
    per_byte = 2 if recipe == "nvfp4" else 1
    for i, (storage, shard) in enumerate(zip(work.storages, work.shards, strict=True)):
        width, stride = storage.grid.blocks_w, theirs.numbers["amax_cols"][i]
        amax = theirs.tensors["block_amax"][i].view(-1, stride)[:, :width].reshape(-1)
        first, last = shard.extent.start // per_byte, -(-shard.extent.end // per_byte)
        codes = storage.buffers["rowwise_data"].view(-1)[first:last]
        columnwise = storage.buffers["columnwise_data"].view(-1)
        pairs = {
            "amax": (amax.view(torch.int32), shard.planes[0].block_amax),
            "cast": (theirs.tensors["codes"][i][: last - first], codes),
            "transpose": (theirs.tensors["columnwise"][i], columnwise),
        }
        for step, (its, ours) in pairs.items():
            counts[step] += int((its != ours).sum())
    return counts


# --- the comparison ---


def compare(
    driver: Driver,
    recipe: str,
    work: RankSteps,
    capability: tuple[int, int],
    seconds: Callable[[Work], float],
) -> dict:
    """Measure the seconds of our steps and of its own in both ways. Also return the reasons for
    what did not run, and how many values differ.

    Args:
        driver: the library.
        recipe: a key of ``SCHEMES``.
        work: our steps, and what they work on.
        capability: of the device.
        seconds: how a call is timed.
    """
    found: dict = {"ours": {}, "FP32": {}, "BF16": {}, "not_run": {}}
    work.steps["memset"]()
    for step in STEPS:
        found["ours"][step] = seconds(work.steps[step])
    masters = work.masters.tensors
    rounded = [None if m is None else torch.empty_like(m, dtype=torch.bfloat16) for m in masters]

    def round_masters() -> None:
        for master, target in zip(masters, rounded, strict=True):
            if target is not None:
                target.copy_(master)

    found["BF16"]["round"] = seconds(round_masters)
    theirs = operands(recipe, work)
    flag = torch.zeros(1, dtype=torch.int32, device=work.storages[0].device)
    for way, read in (("FP32", masters), ("BF16", rounded)):
        launches = driver.prepare(SCHEMES[recipe], theirs.table(read), way == "BF16", flag)
        for step in STEPS:
            reason = cannot_run(recipe, step, capability)
            if reason is None:
                try:
                    found[way][step] = seconds(partial(launches.step, step))
                except RuntimeError as error:
                    reason = str(error).splitlines()[0]
            if reason is not None:
                found["not_run"][step] = reason
        launches.close()
    counts = differing(recipe, work, theirs)
    found["differing"] = {step: n for step, n in counts.items() if step not in found["not_run"]}
    return found
