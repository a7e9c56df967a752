"""Receiver: holds the tensors that deltas are applied to, and the version of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from zerocast.backends.reference.digest_formula import as_integers, digest_of
from zerocast.errors import DeltaError
from zerocast.refit.delta import Delta, unpacked
from zerocast.refit.sha256 import sha256
from zerocast.tensors.digest import digest


@dataclass
class _State:
    """The version and checksum of a held tensor, and ``applied`` when it last changed."""

    version: int
    checksum: int
    changed: int


class Receiver:
    """The receiving side of :meth:`zerocast.refit.Refit.deltas`.

    A delta is checked before anything is written. It must be undamaged and follow the version of
    the tensor. The updated tensor must have the same bytes as at the trainer.

    Args:
        tensors: contiguous tensors on any device, by name in the checkpoint, that full syncs are
            written into; others are allocated on the device of the delta.

    Attributes:
        tensors: the current tensors by name.
        applied: the number of deltas applied to all tensors.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        self.tensors = dict(tensors or {})
        self.applied = 0
        self._states: dict[str, _State] = {}

    @property
    def version(self) -> int | None:
        """The version of all tensors, to be given as ``since``; None if they differ or there are no
        tensors, so that a full sync is needed.
        """
        versions = {state.version for state in self._states.values()}
        return versions.pop() if len(versions) == 1 else None

    @torch.no_grad()
    def apply_delta(self, name: str, delta: torch.Tensor) -> torch.Tensor:
        """Apply a delta to the tensor ``name``, and return the tensor.

        Args:
            name: the name of the tensor in the checkpoint.
            delta: the uint8 tensor that :meth:`~zerocast.refit.Refit.deltas` yielded for it.

        Raises:
            DeltaError: if the delta was damaged, was already applied, or follows a delta that was
                not applied; nothing has been written. A full sync repairs this.
        """
        given = unpacked(name, delta)
        if given.places is None:
            return self._store(name, given)
        state, tensor = self._states.get(name), self.tensors.get(name)
        if state is None or tensor is None or state.version != given.since:
            held = "none" if state is None else f"version {state.version}"
            raise DeltaError(
                f"{name}: this delta follows version {given.since}, and {held} is held, so one was "
                "lost or applied twice; ask for a full sync, deltas(since=None)."
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
                "held, which other code has written; ask for a full sync, deltas(since=None)."
            )
        flat[places] = values
        self.applied += 1
        changed = self.applied if len(places) else state.changed
        self._states[name] = _State(given.version, given.checksum, changed)
        return tensor

    def _store(self, name: str, given: Delta) -> torch.Tensor:
        """Store a whole tensor."""
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
        self.applied += 1
        self._states[name] = _State(given.version, given.checksum, self.applied)
        return tensor

    def changed_since(
        self, applied: int, packed_modules_mapping: Mapping[str, Sequence[str]]
    ) -> dict[str, torch.Tensor]:
        """Return, by name, all tensors of the server's modules in which a tensor has changed.

        vLLM's ``reload_weights``, for example, rebuilds a module from the tensors that it gets. For
        a missing tensor it uses uninitialized memory, and may then serve NaN.

        Args:
            applied: the value of :attr:`applied` when the server last got tensors; 0 if never.
            packed_modules_mapping: maps the name of a module of the server to the names of the
                checkpoint's modules that it fuses; vLLM's model classes have it. All experts of a
                module ``experts`` always count as one module of the server.

        Raises:
            DeltaError: if the tensors have several versions.
        """
        if self._states and self.version is None:
            raise DeltaError(
                "the tensors that are held are of several versions, which no server may load "
                "together; apply every delta of a version, or ask for a full sync, "
                "deltas(since=None)."
            )
        fused = _fused(packed_modules_mapping)
        modules = {name: _module_of(name, fused) for name in self.tensors}
        changed = {modules[n] for n, state in self._states.items() if state.changed > applied}
        return {n: tensor for n, tensor in self.tensors.items() if modules[n] in changed}

    def checksums(self) -> dict[str, str]:
        """Return by name the hexadecimal SHA-256 of the bytes of every tensor that is held, which
        equals the trainer's :meth:`~zerocast.refit.Refit.checksums`.
        """
        return {name: sha256(tensor) for name, tensor in self.tensors.items()}

    def check(self) -> None:
        """Compare the bytes of all tensors with the checksums of their latest deltas.

        Raises:
            DeltaError: if a tensor was written by something else; the message names it.
        """
        for name, state in self._states.items():
            if int(digest(self.tensors[name])) != state.checksum:
                raise DeltaError(
                    f"{name}: the tensor that is held is not version {state.version}; other code "
                    "has written it. Ask for a full sync, deltas(since=None)."
                )


def _fused(packed_modules_mapping: Mapping[str, Sequence[str]]) -> list[set[str]]:
    """Return sets of names of modules that the server fuses; sets that share a name are merged."""
    found: list[set[str]] = []
    for parts in packed_modules_mapping.values():
        together = {part.strip(".") for part in parts}
        together = together.union(*(each for each in found if each & together))
        found = [each for each in found if not each & together] + [together]
    return found


def _module_of(name: str, fused: Sequence[set[str]]) -> tuple[str, int]:
    """Return a key that identifies the server's module with the tensor ``name``."""
    path = "." + name.rpartition(".")[0]
    before, is_expert, _ = f"{path}.".partition(".experts.")
    if is_expert:
        return before + is_expert, -1
    for i, parts in enumerate(fused):
        for part in parts:
            if path.endswith(f".{part}"):
                return path.removesuffix(part), i
    return path, -1
