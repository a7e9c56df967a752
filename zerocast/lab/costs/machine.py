"""Machine: the seconds that bytes, messages and launches take, by a latency-bandwidth model.

Note: the model of time
~~~~~~~~~~~~~~~~~~~~~~~
A step runs its phases one after another, without overlap with forward, backward or other phases.
The time of a collective over D ranks is its sequential messages times ``seconds`` of its kind, plus
the bytes that a rank sends, divided by ``rate``. Sequential messages are::

    all-reduce       2 ceil(log2 D) messages
    all-gather         ceil(log2 D)
    all-to-all         D - 1

The work of a phase takes its ``seconds``, plus the bytes that it reads and writes, divided by its
``rate``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from zerocast import InputError
from zerocast.comm import Traffic
from zerocast.safe_files import printable, read_text


@dataclass(frozen=True, slots=True)
class Cost:
    """The latency and rate of an operation.

    Attributes:
        seconds: the latency of a message of a collective, or of a phase.
        rate: bytes per second.
    """

    seconds: float
    rate: float

    def __post_init__(self) -> None:
        if not (self.seconds >= 0 and self.rate > 0):
            raise InputError(
                f"a cost must have seconds of 0 or more and a rate above 0, in bytes a second, got "
                f"{self}."
            )

    def of(self, nbytes: int, times: int = 1) -> float:
        """Return the seconds of ``nbytes`` in ``times`` messages."""
        return times * self.seconds + nbytes / self.rate


@dataclass(frozen=True, slots=True)
class Machine:
    """The costs of one kind of machine.

    Attributes:
        name: the name of the machine, and the source of its numbers.
        network: the cost of a collective that :attr:`collectives` does not name.
        memory: the cost of a phase that :attr:`phases` does not name.
        collectives: the costs of collectives by kind, as
            :class:`zerocast.comm.RecordingCommunicator` names them.
        phases: the costs of phases by name, as :attr:`zerocast.optim.ZeroOptimizer.phases` names
            them.
    """

    name: str
    network: Cost
    memory: Cost
    collectives: Mapping[str, Cost] = field(default_factory=dict)
    phases: Mapping[str, Cost] = field(default_factory=dict)

    def collective(self, kind: str, size: int, traffic: Traffic) -> float:
        """Return the seconds of ``traffic``, collectives of one ``kind`` over ``size`` ranks."""
        cost = self.collectives.get(kind, self.network)
        return cost.of(traffic.sent_bytes, traffic.calls * messages(kind, size))

    def phase(self, name: str, nbytes: int) -> float:
        """Return the seconds of a phase that reads and writes ``nbytes``."""
        return self.phases.get(name, self.memory).of(nbytes)

    def save(self, path: Path) -> None:
        """Write the machine as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, name: str | Path) -> Machine:
        """Return one of :data:`MACHINES`, or a machine from a file that :meth:`save` wrote.

        Raises:
            InputError: if ``name`` is neither.
        """
        if str(name) in MACHINES:
            return MACHINES[str(name)]
        try:
            found = json.loads(read_text(Path(name)))
            tables = (
                {kind: _cost(cost) for kind, cost in found[key].items()}
                for key in ("collectives", "phases")
            )
            network, memory = _cost(found["network"]), _cost(found["memory"])
            return cls(printable(str(found["name"])), network, memory, *tables)
        except (
            OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError,
            RecursionError,
        ) as error:  # fmt: skip
            raise InputError(
                f"a machine must be one of {', '.join(MACHINES)} or a file that `python -m "
                f"zerocast fit` wrote, got {name}: {type(error).__name__}: {error}"
            ) from error


def _cost(given: Mapping[str, float]) -> Cost:
    """Return a cost from JSON with floats, since sums of large integers may not fit one."""
    return Cost(**{name: number + 0.0 for name, number in given.items()})


def messages(kind: str, size: int) -> int:
    """Return the number of sequential messages of a collective."""
    rounds = (size - 1).bit_length()
    return {"all_reduce": 2 * rounds, "all_to_all": size - 1, "reduce_scatter": size - 1}.get(
        kind, rounds
    )


MACHINES = {
    "h100": Machine(
        "H100 SXM as its data sheet has it (3.35 TB/s of memory, 400 Gb/s of network a GPU); "
        "10 us a message and 1 us a peer of an all-to-all are assumed, none of it is measured",
        Cost(1e-5, 50e9),
        Cost(1e-5, 3.35e12),
        {"all_to_all": Cost(1e-6, 50e9)},
    ),
}
"""Machines by name."""
