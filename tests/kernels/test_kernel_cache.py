"""The cache of compiled kernels heals itself, and nobody else can put code there. The compiler is a
stand-in, so no NVRTC is needed.
"""

import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zerocast.backends.cuda import Kernel, compiler, kernel_cache

CUBIN = b"\x7fELF machine\0code"
KERNEL = Kernel("transpose", 256, ("8",))


@pytest.fixture
def compile_count(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that were compiled, in order."""
    done: list[str] = []

    def compile_text(text: str, kernel: str, *args: object) -> tuple[str, bytes, str]:
        done.append(kernel)
        return "mangled", CUBIN, ""

    monkeypatch.setattr(compiler, "compile_text", compile_text)
    monkeypatch.setattr(compiler, "cache_key", lambda kernel, arch: f"{kernel.name}-{arch}")
    return done


@pytest.fixture
def umask() -> Iterator[None]:
    """Files and folders are open to everybody unless their maker says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


def compiled(folder: Path) -> bytes:
    """The stand-in's code, from the cache in ``folder`` or compiled."""
    return compiled_by_name(folder)[1]


def compiled_by_name(folder: Path | None, afresh: bool = False) -> tuple[str, bytes]:
    """The same, after its name."""
    return compiler.compiled(KERNEL, "sm_90", folder, afresh=afresh)


def link(file: Path) -> None:
    """Move it away, and leave a link to it."""
    file.symlink_to(file.rename(file.parent.parent / "other"))


def replaced(file: Path, make: Callable[[Path], object]) -> None:
    """Make something else in its place."""
    file.unlink()
    make(file)


DAMAGES = {
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:20]),
    "last byte": lambda file: file.write_bytes(file.read_bytes()[:-1] + b"?"),
    "link": link,
    "directory": lambda file: replaced(file, Path.mkdir),
    "pipe, which a reader would wait for": lambda file: replaced(file, os.mkfifo),
    "nothing": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_compiled_anew(damage, compile_count, tmp_path):
    """A file that is empty, cut, changed, or none is not used; the next one in its place is."""
    assert compiled(tmp_path / "kernels") == compiled(tmp_path / "kernels") == CUBIN
    assert len(compile_count) == 1
    DAMAGES[damage](tmp_path / "kernels" / "transpose-sm_90.cubin")
    assert compiled(tmp_path / "kernels") == CUBIN
    assert len(compile_count) == 2
    compiled(tmp_path / "kernels")
    assert len(compile_count) == (3 if damage == "directory" else 2)


def test_what_the_driver_refuses_is_replaced(compile_count, tmp_path):
    """A file that is whole and yet not taken is compiled anew on demand, and kept."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    kernel_cache.keep(folder / "transpose-sm_90.cubin", b"name\0another")
    assert compiled_by_name(folder) == ("name", b"another")
    assert compiled_by_name(folder, afresh=True) == ("mangled", CUBIN)
    assert compiled_by_name(folder) == ("mangled", CUBIN)
    assert compile_count == ["transpose<8>"]


def test_the_folder_is_closed_to_others(umask, compile_count, tmp_path):
    """Whatever the umask, the folder, what is made above it and the file are the user's alone."""
    compiled(tmp_path / "cache" / "zerocast" / "kernels")
    made = sorted((tmp_path / "cache").rglob("*"))
    assert len(made) == 3
    assert [stat.S_IMODE(path.stat().st_mode) & 0o077 for path in (tmp_path / "cache", *made)] == (
        [0] * 4
    )
    older = tmp_path / "older"
    older.mkdir()
    compiled(older)
    assert stat.S_IMODE(older.stat().st_mode) == 0o700


def test_what_belongs_to_others_is_not_used(compile_count, tmp_path, monkeypatch):
    """A folder of another owner, or a link in its place, is neither read nor written."""
    real = tmp_path / "kernels"
    compiled(real)
    (tmp_path / "link").symlink_to(real)
    before = sorted(real.iterdir())
    compiled(tmp_path / "link")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    compiled(real)
    assert compile_count == ["transpose<8>"] * 3
    assert sorted(real.iterdir()) == before


def test_drafts_of_killed_processes_are_removed(compile_count, tmp_path):
    """An old draft goes with the next file that is kept; one that may still be written stays."""
    old, young = tmp_path / "a.cubin.draft", tmp_path / "b.cubin.draft"
    for draft in (old, young):
        draft.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    compiled(tmp_path)
    assert not old.exists()
    assert young.exists()


def test_a_user_without_a_home_does_without(compile_count, monkeypatch):
    """Where there is no home directory, kernels are compiled and not kept."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert compiled_by_name(None) == ("mangled", CUBIN)
    assert compile_count == ["transpose<8>"]
