"""Receiver: the tensors that deltas are applied to, and which version of each is held."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from zerocast.backends.reference.digest import as_integers, digest_of
from zerocast.errors import DeltaError
from zerocast.refit.delta import Delta, unpacked
from zerocast.tensors.digest import digest


@dataclass
class _State:
    """What is known of a held tensor: the version that it has, and its checksum."""

    version: int
    checksum: int


class Receiver:
    """The receiving side of :meth:`zerocast.refit.Refit.deltas`.

    A delta is checked before anything is written: that it is whole, that it follows the version
    which the tensor has, and that the tensor has the bytes afterwards that it has at the trainer.

    Args:
        tensors: by name in the checkpoint, those that a full sync is written into, contiguous, on
            any device; others are made where the delta is.

    Attributes:
        tensors: by name, as they are now.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        self.tensors = dict(tensors or {})
        self._states: dict[str, _State] = {}

    @property
    def version(self) -> int | None:
        """The version of all tensors, to be given as ``since``; None where they differ or there are
        none, and a full sync is needed.
        """
        versions = {state.version for state in self._states.values()}
        return versions.pop() if len(versions) == 1 else None

    @torch.no_grad()
    def apply_delta(self, name: str, delta: torch.Tensor) -> torch.Tensor:
        """Bring the tensor ``name`` up to date; return it.

        Args:
            delta: uint8, what :meth:`~zerocast.refit.Refit.deltas` yielded under this name.

        Raises:
            DeltaError: for one that was damaged, comes a second time, or follows one that did not
                come; nothing has been written. A full sync repairs it.
        """
        given = unpacked(name, delta)
        if given.places is None:
            return self._store(name, given)
        state, tensor = self._states.get(name), self.tensors.get(name)
        if state is None or tensor is None or state.version != given.since:
            held = "none" if state is None else f"version {state.version}"
            raise DeltaError(
                f"{name}: this delta follows version {given.since}, and {held} is held, so one was "
                f"lost or came twice; ask for a full sync, deltas(since=None)."
            )
        flat = as_integers(tensor)
        places = given.places.to(tensor.device)
        values = as_integers(given.values).to(tensor.device)
        fits = (tensor.shape, tensor.dtype) == (given.shape, given.dtype)
        if fits and len(places):
            difference = digest_of(values, places, flat[places])
            fits = int(difference + state.checksum) == given.checksum
        elif fits:
            fits = state.checksum == given.checksum
        if not fits:
            raise DeltaError(
                f"{name}: this delta does not make version {given.version} of the tensor that is "
                f"held, which was written by something else; ask for a full sync, "
                f"deltas(since=None)."
            )
        flat[places] = values
        self._states[name] = _State(given.version, given.checksum)
        return tensor

    def _store(self, name: str, given: Delta) -> torch.Tensor:
        """Hold all of a tensor."""
        values = given.values.view(given.shape)
        if int(digest(given.values)) != given.checksum:
            raise DeltaError(
                f"{name}: the bytes of this full sync are not those of the trainer's shards; ask "
                f"for another, deltas(since=None)."
            )
        tensor = self.tensors.get(name)
        if tensor is None or (tensor.shape, tensor.dtype) != (given.shape, given.dtype):
            tensor = self.tensors[name] = torch.empty_like(values)
        tensor.copy_(values)
        self._states[name] = _State(given.version, given.checksum)
        return tensor

    def check(self) -> None:
        """Read all tensors, and compare their bytes with the checksums of the latest deltas.

        Raises:
            DeltaError: where a tensor was written by something else; its name is in the message.
        """
        for name, state in self._states.items():
            if int(digest(self.tensors[name])) != state.checksum:
                raise DeltaError(
                    f"{name}: the tensor that is held is not version {state.version}; it was "
                    f"written by something else. Ask for a full sync, deltas(since=None)."
                )
