"""Files that take their names when all are whole, and that replace nothing unasked.

A draft stands in a directory whose name nobody can foresee, beside where its file will be. There it
is opened without a look at links, and no other program writes to it.
"""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DRAFTS = ".*.zerocast-drafts"
"""The names of directories of drafts."""


@contextmanager
def drafts_in(directory: Path) -> Iterator[Path]:
    """Give a directory in ``directory``, which is made, for its drafts; it is removed at the end.

    Raises:
        OSError: where it cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    drafts = directory / DRAFTS.replace("*", secrets.token_hex(8))
    drafts.mkdir()
    try:
        yield drafts
    finally:
        shutil.rmtree(drafts, ignore_errors=True)


def publish(drafts: Path, *, last: str = "", overwrite: bool = False) -> dict[str, int]:
    """Give every draft its name in the directory that ``drafts`` is in, each with the umask's mode;
    after an error none has it.

    Args:
        drafts: of :func:`drafts_in`.
        last: the name that is given last.
        overwrite: whether files of these names are replaced.

    Returns:
        The size of each file in bytes, by name.

    Raises:
        FileExistsError: where there is a file of such a name. It stays as it is.
        OSError: where a name cannot be given.
    """
    mode, sizes = drafts.stat().st_mode & 0o666, dict[str, int]()
    files = (file for file in drafts.rglob("*") if file.is_file())
    try:
        for draft in sorted(files, key=lambda file: (file.name == last, file)):
            name = str(draft.relative_to(drafts))
            path = drafts.parent / name
            draft.chmod(mode)
            path.parent.mkdir(parents=True, exist_ok=True)
            if not overwrite:
                path.open("xb").close()  # a rename would replace what another program wrote now
            sizes[name] = draft.stat().st_size
            draft.replace(path)
    except BaseException:
        for name in () if overwrite else sizes:
            (drafts.parent / name).unlink(missing_ok=True)
        raise
    return sizes
