"""Several hosts on one machine: namespaces of Linux's kernel behind one switch.

A host has an address, a name that no other host can resolve, and processes and shared memory of its
own. It shares with the others the files, as over a network's file system, and the processor. What
differs on hosts of their own, and is not shown here: clocks, kernels, libraries, and a network's
speed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

NETWORK, INTERFACE = "192.0.2", "eth0"  # addresses that RFC 5737 keeps free for examples

_ENTER = """hostname "$0" && mount -t tmpfs tmpfs /dev/shm &&
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$0" >/dev/shm/hosts &&
mount --bind /dev/shm/hosts /etc/hosts && exec "$@"
"""  # a host knows its own name alone, at the address that Debian gives it
_PACKAGES = {"ip": "iproute2", "unshare": "util-linux", "mount": "mount", "hostname": "hostname"}


def lacks() -> str | None:
    """Why this machine can have no such hosts; None where it can."""
    if sys.platform != "linux":
        return "namespaces are Linux's"
    for program, package in _PACKAGES.items():
        if shutil.which(program) is None:
            return f"the program {program} is missing (Debian's package {package})"
    probe = f"zerocast-{os.getpid()}-probe"
    made = _run("ip", "netns", "add", probe, check=False)
    if made.returncode:
        return (
            "network namespaces are not allowed: they take root, or the capabilities "
            f"CAP_SYS_ADMIN and CAP_NET_ADMIN (ip netns add: {made.stderr.strip()})"
        )
    try:
        inside = _run(*_inside(probe, "host", ["true"]), check=False)
    finally:
        _run("ip", "netns", "del", probe)
    if inside.returncode:
        said = inside.stderr.strip()
        return f"namespaces of processes, mounts or names are not allowed (unshare: {said})"
    return None


class Hosts:
    """``count`` hosts; :meth:`remove` ends what runs on them."""

    def __init__(self, count: int) -> None:
        self._name = f"zerocast-{os.getpid()}"
        self._switch = f"{self._name}-switch"
        self.addresses = [f"{NETWORK}.{10 + host}" for host in range(count)]
        try:
            _run("ip", "netns", "add", self._switch)
            self._on_switch("link", "add", "bridge", "type", "bridge")
            self._on_switch("link", "set", "bridge", "up")
            for host, address in enumerate(self.addresses):
                _run("ip", "netns", "add", self._of(host))
                port = f"port{host}"
                self._on_switch(
                    "link", "add", port, "type", "veth", "peer", "name", INTERFACE,
                    "netns", self._of(host),
                )  # fmt: skip
                self._on_switch("link", "set", port, "master", "bridge", "up")
                own = ("ip", "-n", self._of(host))
                _run(*own, "address", "add", f"{address}/24", "dev", INTERFACE)
                _run(*own, "link", "set", INTERFACE, "up")
                _run(*own, "link", "set", "lo", "up")
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove what there is of them."""
        for name in (*map(self._of, range(len(self.addresses))), self._switch):
            _run("ip", "netns", "del", name, check=False)

    def command(self, host: int, program: Sequence[object]) -> list[str]:
        """The command that starts ``program`` on a host, by root of this machine."""
        return _inside(self._of(host), f"host{host}", program)

    def write_launcher(self, path: Path) -> Path:
        """Write what stands in for ssh: ``path [OPTION...] ADDRESS COMMAND...``."""
        cases = "".join(
            f'    {address}) exec {" ".join(_quoted(self.command(host, ["sh", "-c"])))} "$*" ;;\n'
            for host, address in enumerate(self.addresses)
        )
        path.write_text(
            "#!/bin/sh\n"
            'while [ "${1#-}" != "$1" ]; do shift; done\n'
            f"address=$1\nshift\ncase $address in\n{cases}esac\n"
            'echo "no host $address" >&2\nexit 1\n'
        )
        path.chmod(0o755)
        return path

    def set_link(self, host: int, state: str) -> None:
        """Make the link of a host ``up`` or ``down``."""
        self._on_switch("link", "set", f"port{host}", state)

    def lose(self, percent: int) -> str | None:
        """Lose so many percent of all packets between hosts; why that cannot be done, or None."""
        if shutil.which("nft") is None:
            return "the program nft is missing (Debian's package nftables)"
        rule = f"numgen random mod 100 < {percent} counter drop"
        chain = f"chain all_packets {{\ntype filter hook forward priority 0;\n{rule}\n}}"
        made = self._nft("-f", "-", rules=f"table bridge loss {{\n{chain}\n}}\n")
        return f"nft cannot lose packets here: {made.stderr.strip()}" if made.returncode else None

    def lost(self) -> int:
        """How many packets :meth:`lose` has lost; from now on none is."""
        said = self._nft("list", "table", "bridge", "loss").stdout
        self._nft("delete", "table", "bridge", "loss")
        return int(said.split("counter packets ")[1].split()[0])

    def _nft(self, *given: str, rules: str = "") -> subprocess.CompletedProcess[str]:
        return _run("ip", "netns", "exec", self._switch, "nft", *given, stdin=rules, check=False)

    def _of(self, host: int) -> str:
        return f"{self._name}-host{host}"

    def _on_switch(self, *given: str) -> None:
        _run("ip", "-n", self._switch, *given)


def _inside(namespace: str, name: str, program: Sequence[object]) -> list[str]:
    """The command that starts ``program`` in a network namespace, on a host called ``name``."""
    own = ["unshare", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    entered = ["ip", "netns", "exec", namespace, *own, "sh", "-c", _ENTER, name]
    return [*entered, *map(str, program)]


def _quoted(command: Sequence[str]) -> list[str]:
    return ["'" + part.replace("'", "'\\''") + "'" for part in command]


def _run(*command: str, stdin: str = "", check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done
