"""Runs zerocast on several hosts, which are namespaces of this machine, and hurts their network.

    scripts/hosts_check.sh [DIRECTORY [--only PATTERN ...]]

Every gathered byte is compared with the unsharded cast, by hosts_ranks.py and by the examples,
under torchrun and under mpiexec with a program in place of ssh. Then trainings on three hosts meet
a fault. Where the network comes back within the timeout, or loses packets, their weights must be
those of the same training by threads of one process; where a host is cut off, every rank must raise
within the timeout and 10 s more. The hosts are made by hosts_net.py.

Exits with 1 where a check is bad. Where this machine has no such hosts it says what they need, and
exits with 0.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from hosts_net import INTERFACE, Hosts, lacks
from hosts_ranks import trained

from zerocast.comm import run_in_process

ROOT = Path(__file__).resolve().parent.parent
RANKS = Path(__file__).with_name("hosts_ranks.py")
EXAMPLES = ROOT / "examples"

HOSTS = 3
TIMEOUT, LATEST = 12.0, 10.0
"""Seconds of the communicators in trainings with a fault, and how much later all have raised."""
FIRST = 5
"""The step in which a fault is planted, or soon after."""
DOWN = 5.0
"""Seconds for which a link is down that comes back."""
PATIENCE = 500.0
"""Seconds for any job."""

BYTES = {
    "hosts_ranks.py": (RANKS, "bytes", "{folder}"),
    "train_gpt.py": (
        EXAMPLES / "train_gpt.py", "--steps", 3, "--batch", 12, "--check", "--verify", "hash",
        "--out", "{folder}", "--checkpoint", "{folder}/checkpoint",
    ),
    "fsdp2.py": (EXAMPLES / "fsdp2.py", "--steps", 3, "--batch", 12),
    "tensor_parallel.py": (EXAMPLES / "tensor_parallel.py", "--steps", 2),
    "param_buffer.py": (EXAMPLES / "param_buffer.py", "--steps", 3),
    "refit.py": (EXAMPLES / "refit.py", "--steps", 3, "--receivers", 1),
    "cast_only.py": (EXAMPLES / "cast_only.py",),
    "tests on 4 ranks": (
        "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--rootdir", ROOT, "--with-mpi",
        "-m", "mpi and not slow and not nightly", ROOT / "tests/comm/test_collectives.py",
        ROOT / "tests/comm/test_groups.py", ROOT / "tests/cast/test_bitwise_guarantee.py",
    ),
}  # fmt: skip
"""By name a program that compares its bytes, with its arguments."""

OF_MPI = {"cast_only.py": (2, 3), "tests on 4 ranks": (2,)}
"""Programs for MPI alone, and on how many hosts they run."""

ON = {
    "torchrun, 2 hosts with 2 ranks": ("torchrun", 2, 2),
    "torchrun by c10d, 3 hosts with 1 rank": ("torchrun_by_c10d", 3, 1),
    "mpiexec, 2 hosts with 2 ranks": ("mpiexec", 2, 2),
    "mpiexec, 3 hosts with 1 rank": ("mpiexec", 3, 1),
}


Verdict = tuple[bool | None, str]
"""Whether a check is good, None where it was skipped; and what was seen."""


class Job:
    """Processes of one job; ended with it, however it ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[tuple[subprocess.Popen[bytes], Path]] = []

    def start(self, command: Sequence[str], **variables: object) -> None:
        """Start a program with these variables of the environment, too."""
        said = self._folder / f"said-{len(self._started)}"
        environment = os.environ | {name: str(value) for name, value in variables.items()}
        with said.open("wb") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                env=environment,
            )  # fmt: skip
        self._started.append((process, said))

    @property
    def codes(self) -> list[int | None]:
        """The exit code of each; None of one that runs."""
        return [process.poll() for process, _ in self._started]

    def said(self) -> str:
        """What all have printed."""
        return "\n".join(path.read_text(errors="replace") for _, path in self._started)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process, _ in self._started:
            process.kill()
            process.wait()


class Check:
    """Jobs on hosts, each in a folder of its own."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self._folder = hosts, folder
        self.first = hosts.addresses[0]
        self._launcher = hosts.write_launcher(folder / "launcher")
        self._jobs = 0
        self._expected: str | None = None

    def folder(self) -> Path:
        """A new one."""
        self._jobs += 1
        made = self._folder / f"job{self._jobs}"
        made.mkdir()
        return made

    def all(self) -> dict[str, Callable[[], Verdict]]:
        """Every check, by name."""
        checks: dict[str, Callable[[], Verdict]] = {}
        for on, (launcher, hosts, ranks) in ON.items():
            for name in BYTES:
                if name == "tensor_parallel.py" and hosts * ranks % 2:  # two ranks share a layer
                    continue
                if name not in OF_MPI or (launcher == "mpiexec" and hosts in OF_MPI[name]):
                    run = partial(self.bytes_on, launcher, hosts, ranks, name)
                    checks[f"{on}: {name}"] = run
        for transport in ("gloo", "mpi"):
            for name, fault in FAULTS.items():
                checks[f"{transport}: {name}"] = partial(self.fault, transport, fault)
        return checks

    # --- launchers ---

    def torchrun(self, job: Job, hosts: int, ranks: int, program: Sequence[object]) -> None:
        """Start ``ranks`` on each of the first ``hosts``."""
        for host in range(hosts):
            found = ["--node-rank", host, "--master-addr", self.first, "--master-port", 29500]
            self._torchrun(job, host, hosts, ranks, [*found, *program])

    def torchrun_by_c10d(self, job: Job, hosts: int, ranks: int, program: Sequence[object]) -> None:
        """The same; hosts find each other, and may come in any order."""
        for host, address in enumerate(self.hosts.addresses[:hosts]):
            found = [
                "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.first}:29500", "--rdzv-id", 1,
                "--rdzv-conf", f"is_host={host == 0}", "--local-addr", address,
            ]  # fmt: skip
            self._torchrun(job, host, hosts, ranks, [*found, *program])

    def _torchrun(
        self, job: Job, host: int, hosts: int, ranks: int, given: Sequence[object]
    ) -> None:
        of_all = ["--nnodes", hosts, "--nproc-per-node", ranks]
        command = [sys.executable, "-m", "torch.distributed.run", *of_all, *given]
        job.start(self.hosts.command(host, command), GLOO_SOCKET_IFNAME=INTERFACE)

    def mpiexec(self, job: Job, hosts: int, ranks: int, program: Sequence[object]) -> None:
        """The same, by the launcher that MPICH brings. Examples tell gloo its interface; tests do
        not.
        """
        command = [
            Path(sys.executable).with_name("mpiexec"), "-launcher", "ssh", "-launcher-exec",
            self._launcher, "-hosts", ",".join(self.hosts.addresses[:hosts]), "-ppn", ranks,
            "-iface", INTERFACE, "-n", hosts * ranks, sys.executable, "-m", "mpi4py", *program,
        ]  # fmt: skip
        own = self.hosts.command(0, command)
        of_gloo = {"GLOO_SOCKET_IFNAME": INTERFACE} if "pytest" in program else {}
        job.start(own, FI_PROVIDER="tcp", FI_TCP_IFACE=INTERFACE, **of_gloo)

    def by_variables(self, job: Job, program: Sequence[object]) -> None:
        """Start a rank of torch.distributed on every host, without a launcher."""
        addresses = self.hosts.addresses
        for rank in range(len(addresses)):
            job.start(
                self.hosts.command(rank, [sys.executable, *program]),
                GLOO_SOCKET_IFNAME=INTERFACE, MASTER_ADDR=self.first, MASTER_PORT=29501,
                RANK=rank, WORLD_SIZE=len(addresses),
            )  # fmt: skip

    # --- checks ---

    def bytes_on(self, launcher: str, hosts: int, ranks: int, name: str) -> Verdict:
        """A program compares its bytes on every rank."""
        folder, since = self.folder(), time.monotonic()
        program = [str(part).format(folder=folder) for part in BYTES[name]]
        with Job(folder) as job:
            getattr(self, launcher)(job, hosts, ranks, program)
            in_time = wait(lambda: None not in job.codes, PATIENCE)
            good = in_time and not any(job.codes) and "WRONG" not in job.said()
            text = f"equal, {time.monotonic() - since:.0f} s"
            return good, text if good else f"exit codes {job.codes}\n{job.said()[-6000:]}"

    def fault(self, transport: str, fault: Fault) -> Verdict:
        """A training on every host, into which a fault is planted when all ranks train."""
        folder = self.folder()
        program = (RANKS, "steps", folder, TIMEOUT, transport)
        with Job(folder) as job:
            if transport == "mpi":
                self.mpiexec(job, HOSTS, 1, program)
            else:
                self.by_variables(job, program)
            ranks = [Rank(folder / f"{rank}") for rank in range(HOSTS)]
            if not wait(lambda: all(rank.is_at(FIRST) for rank in ranks), PATIENCE):
                return False, f"the training does not begin\n{job.said()[-6000:]}"
            lacking, since = fault.plant(self.hosts), time.time()
            if lacking:
                return None, lacking
            try:
                if fault.is_cut:
                    return self._judge_cut(transport, fault, ranks, since)
                time.sleep(fault.seconds)
            finally:
                healed = fault.heal(self.hosts)
            return self._judge_end(ranks, healed)

    def _judge_end(self, ranks: list[Rank], healed: str) -> Verdict:
        """Every rank must end with the bytes of threads."""
        wait(lambda: all(rank.end for rank in ranks), PATIENCE)
        if self._expected is None:
            self._expected = run_in_process(HOSTS, trained)[0]
        ends = [rank.end for rank in ranks]
        if any(end is None or end[1:] != ("digest", self._expected) for end in ends):
            return False, f"bytes {self._expected} expected, got {ends}"
        longest = max(rank.longest_step for rank in ranks)
        return True, f"the bytes of threads; {healed}the longest step took {longest:.1f} s"

    def _judge_cut(self, transport: str, fault: Fault, ranks: list[Rank], since: float) -> Verdict:
        """Every rank must raise in time. MPI may end the one whose host it no longer reaches."""
        wait(lambda: all(rank.end for rank in ranks), TIMEOUT + LATEST + 3)
        said, good = [], True
        for number, rank in enumerate(ranks):
            if rank.end is None:
                may_end = transport == "mpi" and number == fault.host
                good &= may_end
                said.append(f"rank {number} {'has no error' if not may_end else 'was ended'}")
                continue
            at, what, text = rank.end
            good &= what == "raised" and text.startswith("Peer") and at - since < TIMEOUT + LATEST
            said.append(f"rank {number} {what} after {at - since:.1f} s {text.split('. Make')[0]}")
        return good, "\n    ".join(["", *said])


@dataclass(frozen=True)
class Fault:
    """What happens to the network.

    Attributes:
        plant: begins it; says why it cannot, or None.
        heal: ends it; says what there is to say.
        seconds: how long it lasts; unused where a host is cut off.
        host: the host that is cut off, if one is.
    """

    plant: Callable[[Hosts], str | None]
    heal: Callable[[Hosts], str]
    seconds: float = 0.0
    host: int | None = None

    @property
    def is_cut(self) -> bool:
        """Whether the network does not come back."""
        return self.host is not None

    @classmethod
    def of_link(cls, host: int, seconds: float = 0.0) -> Fault:
        """The link of a host is down, for good or for so many seconds."""

        def heal(hosts: Hosts) -> str:
            hosts.set_link(host, "up")
            return ""

        plant = lambda hosts: hosts.set_link(host, "down")  # noqa: E731
        return cls(plant, heal, seconds, None if seconds else host)


FAULTS = {
    "a link is down for 5 s": Fault.of_link(1, DOWN),
    "1 of 10 packets is lost": Fault(
        lambda hosts: hosts.lose(10), lambda hosts: f"{hosts.lost()} packets were lost, ", 15.0
    ),
    "the host of rank 0, and of the store, is cut off": Fault.of_link(0),
    "the host of rank 2 is cut off": Fault.of_link(2),
}


class Rank:
    """What a rank of a training with a fault has written."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def _lines(self) -> list[tuple[float, str, str]]:
        text = self._path.read_text() if self._path.exists() else ""
        parts = [line.split("|", 2) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
        return [(float(at), what, said.strip()) for at, what, said in parts]

    def is_at(self, step: int) -> bool:
        """Whether it has begun so many steps."""
        return len(self._lines) > step

    @property
    def end(self) -> tuple[float, str, str] | None:
        """Its last line, where that is no step."""
        last = self._lines[-1:]
        return last[0] if last and last[0][1] != "step" else None

    @property
    def longest_step(self) -> float:
        """Seconds between two lines."""
        times = [at for at, *_ in self._lines]
        return max(b - a for a, b in pairwise(times))


def wait(is_done: Callable[[], bool], seconds: float) -> bool:
    """Wait until ``is_done``, at most so many seconds; whether it is."""
    until = time.monotonic() + seconds
    while not is_done():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def main() -> int:
    """Run the checks that are asked for; 0, or 1 where one is bad."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of the checks' names")
    only = parser.parse_args().only
    if lacking := lacks():
        print(f"skipped: {lacking}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the hosts are removed, too
    torch.set_num_threads(1)
    bad, hosts = 0, Hosts(HOSTS)
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            check = Check(hosts, Path(folder))
            for name, run in check.all().items():
                if any(fnmatch.fnmatch(name, pattern) for pattern in only):
                    good, said = run()
                    bad += good is False
                    word = {True: "good", False: "BAD ", None: "skipped"}[good]
                    print(f"{word} {name}: {said}", flush=True)
    finally:
        hosts.remove()
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
