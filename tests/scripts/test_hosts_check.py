"""scripts/hosts_check.py says what it needs, and leaves no host behind. All of it takes long."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def checked(*only: str, path: str = os.environ["PATH"]) -> subprocess.CompletedProcess[str]:
    """What the checks of these names print."""
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "hosts_check.py", "--only", *only],
        capture_output=True, text=True, timeout=500, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": path},
    )  # fmt: skip


def test_a_program_that_is_missing_is_named(tmp_path: Path) -> None:
    """With the package that has it; nothing is checked, and the exit code is 0."""
    done = checked("*", path=str(tmp_path))
    assert done.stdout == "skipped: the program ip is missing (Debian's package iproute2)\n", done
    assert done.returncode == 0


@pytest.mark.nightly
def test_hosts_whose_link_comes_back_train_the_same_bytes() -> None:
    """On gloo, with a link that is down for less than the timeout."""
    if shutil.which("ip") is None:
        pytest.skip("needs the program ip")
    done = checked("gloo: a link is down*")
    if done.stdout.startswith("skipped: "):
        pytest.skip(done.stdout)
    assert done.stdout.startswith("good gloo: a link is down for 5 s: the bytes of threads"), done
    assert done.returncode == 0
    left = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert "zerocast-" not in left
