"""What of scripts/arm_check.py needs neither a compiler for AArch64 nor an emulator: the library in
another process, on this processor.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import arm_check
import pytest

from tests.cuda_emulation.emulator import needs_emulation
from tests.kernels import other_process
from tests.kernels.other_process import OtherCpuBackend, OtherProcess
from tests.kernels.subjects import SUBJECTS
from zerocast.backends import native_library


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OtherCpuBackend]:
    """The installed library, in another process."""
    program = tmp_path_factory.mktemp("other") / "program"
    subprocess.run(["g++", str(other_process.PROGRAM), "-o", str(program), "-ldl"], check=True)
    library = OtherProcess([str(program), str(native_library.find_library())])
    assert library.instruction_sets == native_library.instruction_sets(native_library.load())
    yield OtherCpuBackend(library)
    library.close()


@needs_emulation
def test_another_process_writes_the_same_bytes(backend: OtherCpuBackend) -> None:
    """Every operation of the library."""
    assert arm_check.check_subjects(backend) > 1_000_000


@needs_emulation
def test_other_bytes_are_seen(backend: OtherCpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are compared come from the other process: without them the comparison fails."""
    monkeypatch.setattr(other_process.SentMemory, "take_back", lambda self: None)
    for name in ("nvfp4", "adamw", "digests"):
        with pytest.raises(AssertionError, match="expected"):
            arm_check.compare(name, SUBJECTS[name], backend)


@needs_emulation
def test_a_process_that_ends_is_an_error(tmp_path: Path) -> None:
    """It names the command, and says how it ended."""
    with pytest.raises(RuntimeError, match="false.* ended with 1"):
        OtherCpuBackend(OtherProcess(["false"]))


@pytest.mark.parametrize("option", ["--compiler", "--emulator"])
def test_what_is_missing_is_named(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the packages that have it."""
    monkeypatch.setattr(arm_check.shutil, "which", lambda name: None if "absent" in name else name)
    with pytest.raises(SystemExit, match="absent is not on PATH: on Debian, apt-get install g"):
        arm_check.main([option, "absent"])
