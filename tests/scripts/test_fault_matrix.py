"""A few cells of scripts/fault_matrix.py; the whole table takes many minutes."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_faults_end_with_errors_and_nothing_is_lost():
    """A rank that casts once more than the others, on threads and on gloo: an error on all, weights
    of one step or none to be read, and the step repeated from the checkpoint.
    """
    done = subprocess.run(
        [
            sys.executable, ROOT / "scripts" / "fault_matrix.py",
            "--communicators", "threads", "gloo", "--only", "cast: twice",
        ],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "2 cells, 0 bad" in done.stdout
