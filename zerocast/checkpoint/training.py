"""What a checkpoint holds of a training, in terms that all optimizers share.

A :class:`zerocast.optim.ZeroOptimizer` and a torch optimizer of masters under FSDP2 hold the same
things in different places. Both give them these names, so either loads what the other has saved:

    master.NAME             a weight's master, in the weight's shape
    state.NAME.KEY          what the optimizer keeps of it, in the same shape or as it is
    recipe.NAME.KEY         its recipe state

and say of themselves, beside what :mod:`zerocast.optim.state_description` lists, in JSON, for each
optimizer of the training under ``optimizers``::

    identity   by which a save knows what it may replace (:mod:`zerocast.checkpoint.runs`)
    options    of each param group
    steps      that were made; 0 where they are not counted
    mode       of an optimizer that has modes
    averages   the decays of averages, which are state under ``ema(DECAY)``
    due        the weights whose recipe state is before the cast of these masters, and not after

and for all together::

    state      NAME -> KEY -> "shard", or "whole" of what is not in the weight's shape, or
               {"value": ...}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from zerocast.checkpoint.boxes import Share
from zerocast.checkpoint.manifest import SavedTensor
from zerocast.checkpoint.python_values import decode, encode
from zerocast.errors import InputError
from zerocast.optim.param_groups import options
from zerocast.optim.state_description import Description, check_described

SHARD, WHOLE = "shard", "whole"


@dataclass
class Contents:
    """What one rank saves.

    Attributes:
        said: JSON values; equal on all ranks, but for ``said["state"]``, of which each rank has
            that of the weights of which it holds elements.
        shares: the part that it has of each tensor, by name.
        error: the first thing of this rank that cannot be saved; None where all can.
    """

    said: dict[str, Any] = field(default_factory=lambda: {"optimizers": [], "state": {}})
    shares: dict[str, Share] = field(default_factory=dict)
    error: InputError | None = None

    def put_state(self, name: str, key: str, value: Any, share: Share | None) -> None:
        """Add what the optimizer keeps of a weight; ``share`` where it has the weight's shape.

        Of tensors inside of a list, tuple or dict, and of values that are no JSON, :attr:`error`
        tells.
        """
        kinds, place = self.said["state"].setdefault(name, {}), f"state.{name}.{key}"
        if share is not None:
            kinds[key], self.shares[place] = SHARD, share
        elif isinstance(value, torch.Tensor):
            kinds[key], self.shares[place] = WHOLE, Share.of(value)
        else:
            inside: dict[str, torch.Tensor] = {}
            try:
                kinds[key] = {"value": encode(value, place, inside)}
            except InputError as error:
                self.error = self.error or error
            if inside:
                self.error = self.error or InputError(
                    f"what an optimizer keeps of a weight must be tensors, numbers or text, got "
                    f"tensors in a {type(value).__name__} under {key!r} of {name}, which loading "
                    f"would miss; keep each tensor under a key of its own."
                )

    def put_optimizer(self, said: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
        """Add what an optimizer says of itself, and the options of its param groups."""
        own: list[Any] = self.said["optimizers"]
        given = self.encoded(f"options.{len(own)}", [options(group) for group in groups])
        own.append({**said, "options": given})

    def encoded(self, name: str, value: Any) -> Any:
        """Return values of Python and tensors, the same on every rank, in JSON; add the tensors."""
        tensors: dict[str, torch.Tensor] = {}
        made = encode(value, f"value.{name}", tensors)
        self.shares |= {key: Share.of(tensor) for key, tensor in tensors.items()}
        return made


@dataclass
class Saved:
    """What a checkpoint has, as it is loaded.

    Attributes:
        said: as the training that saved it said of itself.
        tensors: the tensors of the checkpoint, by name.
        shares: by name, the parts that this rank needs; filled before :meth:`Training.prepare`.
    """

    said: dict[str, Any]
    tensors: dict[str, SavedTensor]
    shares: dict[str, Share] = field(default_factory=dict)

    def of(self, place: int) -> Saved:
        """Return the same as one of its optimizers said it of itself."""
        return replace(self, said=self.said | self.said["optimizers"][place])

    def want(self, name: str, share: Share) -> None:
        """Ask for the elements of a tensor that ``share`` has, in the dtype in which it was saved.

        Raises:
            InputError: where the checkpoint has no such tensor of this shape.
        """
        kept = self.kept(name)
        if kept.shape != share.shape:
            raise InputError(
                f"{name} must be {list(share.shape)} in the checkpoint, and is {list(kept.shape)}; "
                "it is damaged. Load an earlier checkpoint."
            )
        self.shares[name] = Share(share.shape, kept.dtype, share.pieces).like()

    def want_whole(self, name: str) -> None:
        """Ask for all of a tensor; raises as :meth:`want` does."""
        kept = self.kept(name)
        self.want(name, Share.of(torch.empty(kept.shape, dtype=kept.dtype, device="meta")))

    def kept(self, name: str) -> SavedTensor:
        """Return a tensor of the checkpoint; :class:`InputError` where there is none."""
        if name not in self.tensors:
            raise InputError(
                f"the checkpoint must have {name}, and has none; it is damaged. Load an earlier "
                "checkpoint."
            )
        return self.tensors[name]

    def want_values(self, of_rank: str | None) -> None:
        """Ask for the tensors of :meth:`Contents.encoded`, and for those that begin with
        ``of_rank``.
        """
        for name in self.tensors:
            is_own = of_rank is not None and name.startswith(of_rank)
            if is_own or name.startswith(("value.options.", "value.extra.")):
                self.want_whole(name)

    def value(self, name: str) -> Any:
        """Return what was put under a name."""
        return decode(self.said[name], {key: share.only for key, share in self.shares.items()})

    def state_of(self, name: str) -> dict[str, Any]:
        """Return what was said of a weight's state, by key; nothing if it was never stepped."""
        return self.said["state"].get(name, {})


def check(described: Description, saved: Saved) -> None:
    """Raise :class:`InputError` unless a training that says this of itself can continue from what
    was saved.
    """
    places = {each["name"]: i for i, each in enumerate(described["weights"])}
    by_place = sorted(saved.said["weights"], key=lambda each: places.get(each["name"], len(places)))
    check_described({**saved.said, "weights": by_place}, described)
