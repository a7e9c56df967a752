"""The plans that functional calls made earlier for the same weights.

A plan refers to its weights, so no global table may refer to the plan. It is kept in the first of
its weights (:attr:`QuantizedStorage.plans`) and is freed together with them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from zerocast.tensors import QuantizedStorage

if TYPE_CHECKING:
    from zerocast.cast.plan import CastPlan

PLANS_KEPT = 4
"""Plans kept per weight: an optimizer needs one, a caller that alternates a few."""


def find_plan(storages: Sequence[QuantizedStorage], key: Hashable) -> CastPlan | None:
    """Return the plan kept for these weights under ``key``, or None.

    ``key`` identifies everything else that the plan depends on.
    """
    return storages[0].plans.get(_key(storages, key)) if storages else None


def keep_plan(storages: Sequence[QuantizedStorage], key: Hashable, plan: CastPlan) -> CastPlan:
    """Keep ``plan``; drop the oldest one if there are more than :data:`PLANS_KEPT`."""
    if storages:
        plans = storages[0].plans
        plans[_key(storages, key)] = plan
        while len(plans) > PLANS_KEPT:
            del plans[next(iter(plans))]
    return plan


def drop_plan(storages: Sequence[QuantizedStorage], key: Hashable) -> None:
    """Drop the plan kept for these weights under ``key``, if there is one."""
    storages[0].plans.pop(_key(storages, key), None)


def _key(storages: Sequence[QuantizedStorage], key: Hashable) -> Hashable:
    # No other weight has one of these ids as long as the plan keeps these weights alive.
    return tuple(map(id, storages)), key
