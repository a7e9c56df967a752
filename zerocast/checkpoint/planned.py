"""Planned: who writes what, and what the checkpoint says, worked out by all ranks together."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerocast.checkpoint.training import Contents
from zerocast.comm import Attempt, Communicator, raise_together

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan

    from zerocast.checkpoint.planners import SharePlanner


@dataclass
class Planned:
    """What is written, worked out by all ranks together.

    Attributes:
        saved: the id of the save.
        said: what the checkpoint says beside its tensors.
        plans: by rank, the pieces that it writes; of what several have, one does.
        metadata: DCP's, of all tensors.
        planner: has this rank's pieces.
    """

    saved: str
    said: dict[str, Any]
    plans: list[SavePlan]
    metadata: Metadata
    planner: SharePlanner


def plan_save(contents: Contents, of_rank: Any, comm: Communicator) -> Planned:
    """Work out who writes what. Collective."""
    from zerocast.checkpoint.planners import SharePlanner

    planner = SharePlanner(contents.shares)
    local = planner.create_local_plan()
    told = secrets.token_hex(8), contents.said["state"], of_rank, local
    tokens, states, of_ranks, locals_ = map(list, zip(*comm.all_gather_object(told), strict=True))
    state: dict[str, dict[str, Any]] = {}
    for by_name in states:
        for name, kinds in by_name.items():
            state.setdefault(name, {}).update(kinds)
    attempt = Attempt()
    with attempt:  # whether the pieces of all ranks are every tensor once
        plans, metadata = planner.create_global_plan(locals_)
    raise_together(comm, attempt.error)
    said = {**contents.said, "state": state, "of_rank": of_ranks}
    return Planned(tokens[0], said, plans, metadata, planner)
