"""Running one test body on the ranks of any communicator.

Kinds:
    single_rank         this process alone; one rank only
    in_process          threads of this process; works in every session
    mpi                 processes of an MPI session, the first ``world_size`` of its ranks
    torch_distributed   the same processes, as a gloo group
    forked              processes forked from this one, as a gloo group; for any number of ranks
                        outside of an MPI session
"""

import functools
import inspect
import io
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zerocast.comm import (
    Communicator,
    InProcessCommunicator,
    MpiCommunicator,
    SingleRank,
    TorchDistributedCommunicator,
    as_communicator,
    run_in_process,
)

MPI_RANKS = 4
"""The ranks of an MPI session: ``mpiexec -n 4 python -m mpi4py -m pytest --with-mpi -x -m mpi``."""

PROCESSES = ("mpi", "torch_distributed")
"""Those of an MPI session."""

KINDS = ("in_process", *PROCESSES)
"""Those that can be of any size."""


def run_ranks(kind: str, world_size: int, fn: Callable[[Communicator], Any]) -> list[Any]:
    """Call ``fn(comm)`` on every rank of a fresh group; return the results in rank order.

    In an MPI session every process calls this, with the same arguments, and every process gets all
    results (by torch.save), those beyond ``world_size`` too. ``fn`` must not raise on some ranks
    only: the others would wait (``python -m mpi4py`` and ``-x`` then end the session).
    """
    if kind == "single_rank":
        assert world_size == 1
        return [fn(SingleRank())]
    if kind == "in_process":
        return run_in_process(world_size, fn)
    if kind == "forked":
        return _run_forked(world_size, fn)
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    assert 1 <= world_size <= world.size, (
        f"{world_size} ranks asked for, the session has {world.size}"
    )
    run = {"mpi": _run_mpi, "torch_distributed": _run_gloo}[kind]
    results = io.BytesIO()  # not by pickle, which fails on float8 tensors
    torch.save(run(world, world_size, fn), results)
    by_rank = world.allgather(results.getvalue())[:world_size]
    return [torch.load(io.BytesIO(result), weights_only=False) for result in by_rank]


def on_ranks(
    kind: str | None = None, world_size: int | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a body that runs on every rank: ``comm`` is the rank's communicator, all other
    parameters are the test's. Without a ``world_size`` the test has a parameter of that name;
    without a kind it runs on those of the fixture ``ranks``. A body must not skip the test: ranks
    beyond ``world_size`` would wait.
    """
    asked = "ranks" if kind is None else "world_size" if world_size is None else None

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**given: Any) -> None:
            value = given.pop(asked, None)
            on_rank = lambda comm: body(comm=comm, **given)  # noqa: E731
            if kind is None:
                value.run(on_rank)
            else:
                run_ranks(kind, world_size or value, on_rank)

        parameters = [p for p in inspect.signature(body).parameters.values() if p.name != "comm"]
        if asked is not None:
            parameters.append(inspect.Parameter(asked, inspect.Parameter.KEYWORD_ONLY))
        test.__signature__ = inspect.Signature(parameters)
        return pytest.mark.mpi(min_size=MPI_RANKS)(test) if kind in PROCESSES else test

    return decorate


on_gloo = functools.partial(on_ranks, "torch_distributed")


def split_ranks(comm: Communicator, color: int) -> Communicator:
    """The sub-group of the ranks of ``comm`` that give the same ``color``. Every rank calls it."""
    if isinstance(comm, SingleRank):
        return comm
    if isinstance(comm, InProcessCommunicator):
        return comm.split(color)
    if isinstance(comm, MpiCommunicator):
        from mpi4py import MPI

        return as_communicator(_member_of(MPI.COMM_WORLD, comm.size).Split(color, comm.rank))
    colors = comm.all_gather_object(color)
    groups = {
        each: dist.new_group([rank for rank, theirs in enumerate(colors) if theirs == each])
        for each in sorted(set(colors))  # new_group is collective: every rank makes every group
    }
    return as_communicator(groups[color])


def shared_folder(comm: Communicator) -> Path:
    """A new one, the same on every rank. Every rank calls it."""
    return Path(comm.all_gather_object(tempfile.mkdtemp() if comm.rank == 0 else None)[0])


_groups: dict[int, Any] = {}


def _member_of(world: Any, world_size: int) -> Any:
    """The MPI communicator of the first ranks; None on the others. Made once a session."""
    if world_size not in _groups:
        from mpi4py import MPI

        sub = world.Split(0 if world.rank < world_size else MPI.UNDEFINED, world.rank)
        _groups[world_size] = None if sub == MPI.COMM_NULL else sub
    return _groups[world_size]


def _run_mpi(world: Any, world_size: int, fn: Callable[[Communicator], Any]) -> Any:
    group = _member_of(world, world_size)
    return None if group is None else fn(MpiCommunicator(group))


def _forget_meshes() -> None:
    """DTensor remembers results of its operations, and with them a mesh that equals later ones and
    whose groups are gone.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def _run_gloo(world: Any, world_size: int, fn: Callable[[Communicator], Any]) -> Any:
    # A fresh default group each time, and none left behind: to other tests, group=None is one rank.
    # The last store of a group deletes its file. All are gone at the barrier, but for one that an
    # error which a test has caught keeps alive: it may write here while this is removed.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        path = world.bcast(str(Path(directory) / "store"))
        result = None
        if world.rank < world_size:
            try:
                result = _in_gloo_group(path, world.rank, world_size, fn)
            finally:
                _forget_meshes()  # not in forked ranks, which end: torch 2.13 may crash in it there
                Path(f"{path}.done").touch()
        while world.rank >= world_size and not Path(f"{path}.done").exists():
            time.sleep(2e-3)  # MPI's barrier waits busily, on the cores of those that work
        world.Barrier()
        return result


def _run_forked(world_size: int, fn: Callable[[Communicator], Any]) -> list[Any]:
    processes = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:

        def body(rank: int) -> None:
            torch.set_num_threads(1)  # a fork has no threads of OpenMP, and would wait for them
            result = _in_gloo_group(f"{directory}/store", rank, world_size, fn)
            torch.save(result, f"{directory}/{rank}")

        ranks = [processes.Process(target=body, args=(rank,)) for rank in range(world_size)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        assert not any(each.exitcode for each in ranks), "a rank has failed, and said why"
        results = [f"{directory}/{rank}" for rank in range(world_size)]
        return [torch.load(result, weights_only=False) for result in results]


def _in_gloo_group(path: str, rank: int, world_size: int, fn: Callable[[Communicator], Any]) -> Any:
    """``fn``'s result. Nothing of the group outlives the call."""
    store = dist.FileStore(path, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        comm = TorchDistributedCommunicator(dist.group.WORLD)
        result = fn(comm)
        comm.barrier()  # a rank that leaves at once can cut off one that still connects
        return result
    finally:
        dist.destroy_process_group()
