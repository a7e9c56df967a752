"""Runs the cells of scripts/fault_matrix.py on threads, on gloo and on MPI.

Ranks of gloo and of threads run in processes forked for the cell, those of gloo over a TCPStore, as
under torchrun; those of MPI in one job for all cells that leave the processes alive, and in one of
its own for each that ends one. A rank leaves
what it saw in a file, so that it is there whatever becomes of its process.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fault_cells import (
    ALL_EXIT,
    CELLS,
    FAULTY,
    NOT_OF_THREADS,
    OF_GLOO,
    RANKS,
    TIMEOUT,
    WITH_STORE,
    Run,
    ends,
)

import zerocast
from zerocast.comm import (
    Communicator,
    MpiCommunicator,
    TorchDistributedCommunicator,
    run_in_process,
)

TRANSPORTS = ("threads", "gloo", "mpi")


@dataclass(frozen=True)
class Outcome:
    """What came of a cell.

    Attributes:
        saws: by rank what it saw, of those that lived to say so.
        in_time: whether all processes ended that had to.
        job: of MPI, how its job ended; empty elsewhere.
        failed: whether a process ended with another status than 0.
    """

    saws: dict[int, dict[str, Any]]
    in_time: bool
    job: str
    failed: bool


def run(kind: str, cells: Sequence[str], patience: float) -> Iterator[tuple[str, Outcome]]:
    """Run those of ``cells`` that there are on a transport, each as long as ``patience`` lasts."""
    missing = {"threads": NOT_OF_THREADS, "mpi": (*OF_GLOO, *WITH_STORE)}.get(kind, ())
    own = [cell for cell in cells if not cell.startswith(missing)]
    if kind == "mpi":
        alive = [cell for cell in own if not ends(cell)]
        for job in [*([alive] if alive else []), *([cell] for cell in own if ends(cell))]:
            yield from _run_mpi(job, patience)
    else:
        for cell in own:
            yield cell, _run_forked(kind, cell, patience)


# --- a rank ---


def _first_part(comm: Communicator, cell: str) -> tuple[dict[str, Any], bytes]:
    """What this rank saw of a fault, and its checkpoint of the step before."""
    run = Run(comm)
    run.step(0)
    buffer = io.BytesIO()
    torch.save(run.optimizer.state_dict(), buffer)
    run.since, error = time.monotonic(), None
    try:
        CELLS[cell](run)
    except BaseException as e:
        error = e
    saw = {
        "error": type(error).__name__ if error else None,
        "text": str(error)[:2000],
        "ours": isinstance(error, zerocast.ZerocastError),
        "seconds": round(time.monotonic() - run.since, 1),
        "digest": run.digest(),
    }
    return saw, buffer.getvalue()


def _second_part(comm: Communicator, checkpoint: bytes) -> str | None:
    """The weights after the faulty step, repeated from the checkpoint."""
    run = Run(comm)
    run.optimizer.load_state_dict(torch.load(io.BytesIO(checkpoint), weights_only=True))
    run.step(1)
    return run.digest()


def _write(folder: Path, rank: int, saw: dict[str, Any]) -> None:
    """Leave what a rank saw, whole or not at all."""
    path = folder / f"{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(saw))
    path.with_suffix(".part").rename(path)


def _read(folder: Path) -> dict[int, dict[str, Any]]:
    """What ranks have left."""
    paths = {rank: folder / f"{rank}.json" for rank in range(RANKS)}
    return {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}


# --- threads and gloo ---


def _threads_cell(cell: str, folder: Path) -> None:
    """All ranks of a cell, as threads of this process."""
    saws: list[Any] = [None] * RANKS

    def body(comm: Communicator) -> None:
        saws[comm.rank] = _first_part(comm, cell)

    with suppress(BaseException):  # each rank has noted its own
        run_in_process(RANKS, body, timeout=TIMEOUT)
    while None in saws:
        time.sleep(0.05)
    again = run_in_process(RANKS, lambda comm: _second_part(comm, saws[comm.rank][1]))
    for rank, (saw, _) in enumerate(saws):
        _write(folder, rank, {**saw, "again": again[rank]})


def _gloo_rank(cell: str, folder: Path, port: int, rank: int) -> None:
    """One rank of a cell, in a process of its own."""
    serves = rank == (FAULTY if cell.startswith(WITH_STORE) else 0)
    store = dist.TCPStore("127.0.0.1", port, is_master=serves, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    comm = TorchDistributedCommunicator(dist.group.WORLD, timeout=TIMEOUT)
    saw, checkpoint = _first_part(comm, cell)
    _write(folder, rank, saw)
    if ends(cell):
        return
    dist.destroy_process_group()
    again = dist.PrefixStore("again", store)
    dist.init_process_group("gloo", store=again, rank=rank, world_size=RANKS)
    comm = TorchDistributedCommunicator(dist.group.WORLD, timeout=30)
    _write(folder, rank, {**saw, "again": _second_part(comm, checkpoint)})
    dist.destroy_process_group()


def _run_forked(kind: str, cell: str, patience: float) -> Outcome:
    """Run a cell on threads or gloo."""
    folder = Path(tempfile.mkdtemp())  # which no rank's exit removes
    needed = set(range(RANKS)) - {FAULTY} if ends(cell) and cell != ALL_EXIT else None
    if kind == "threads":
        pids = [_forked(lambda: _threads_cell(cell, folder))]
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pids = [_forked(lambda r=rank: _gloo_rank(cell, folder, port, r)) for rank in range(RANKS)]

    def is_done() -> bool:
        return needed is not None and needed <= {*_read(folder)}

    in_time, failed = _wait_for(pids, is_done, patience)
    outcome = Outcome(_read(folder), in_time, "", failed)
    shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _forked(function: Callable[[], None]) -> int:
    """The id of a process that runs ``function`` and ends."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        function()
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def _wait_for(pids: list[int], is_done: Callable[[], bool], patience: float) -> tuple[bool, bool]:
    """Wait until all processes have ended, or all is done, and end those that are left.
    Whether it was in time; whether one ended by itself with a status other than 0.
    """
    left, failed, until = list(pids), False, time.monotonic() + patience
    while left and time.monotonic() < until and not is_done():
        for pid in list(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.remove(pid)
                failed |= status != 0
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return time.monotonic() < until, failed


# --- MPI ---


def mpi_rank(cells: list[str], folder: Path) -> None:
    """One rank of a job, cell after cell, each with a group of its own."""
    from mpi4py import MPI

    for cell in cells:
        comm = MpiCommunicator(MPI.COMM_WORLD.Dup(), timeout=TIMEOUT)
        here = folder / _slug(cell)
        here.mkdir(exist_ok=True)
        saw, checkpoint = _first_part(comm, cell)
        _write(here, comm.rank, saw)
        if not ends(cell):
            again = _second_part(MpiCommunicator(MPI.COMM_WORLD.Dup(), timeout=30), checkpoint)
            _write(here, comm.rank, {**saw, "again": again})


def _run_mpi(cells: list[str], patience: float) -> Iterator[tuple[str, Outcome]]:
    """Run the cells of one MPI job."""
    mpiexec, main = (
        os.environ.get("MPIEXEC", "mpiexec"),
        Path(__file__).with_name("fault_matrix.py"),
    )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [mpiexec, "-n", str(RANKS), sys.executable, str(main), "--mpi-rank", folder]
        job, status, said = "", 0, b""
        with suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                [*command, *cells], timeout=patience + 10 * len(cells), capture_output=True,
                stdin=subprocess.DEVNULL, check=False,
            )  # fmt: skip
            status, said = done.returncode, done.stderr
            job = f"MPI ended the whole job (status {status})"
        if not any(_read(Path(folder, _slug(cell))) for cell in cells):  # it did not even begin
            sys.stderr.write(said.decode(errors="replace")[-2000:])
        for cell in cells:
            yield cell, Outcome(_read(Path(folder, _slug(cell))), bool(job), job, status != 0)


def _slug(cell: str) -> str:
    """A folder's name."""
    return "".join(c if c.isalnum() else "_" for c in cell)
