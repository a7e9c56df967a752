"""CheckpointConversion: casts a checkpoint in files to a dialect, or decodes it to high precision.

Note: how files come about
~~~~~~~~~~~~~~~~~~~~~~~~~~
Every bucket of tensors is one file, and each rank converts the buckets whose number is its own
modulo the number of ranks. So ranks exchange nothing, and the files are the same on any number of
them. Files are written to a hidden directory beside the target, and each gets its name once it is
on the disk. A conversion that was interrupted finds them there and goes on. At the end that
directory gets the target's name: the target is whole, or does not exist.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch

from zerocast.cast.amax_groups import AUTO, Groups
from zerocast.comm import Attempt, Group, SingleRank, as_communicator, raise_together
from zerocast.errors import InputError
from zerocast.export.bucket_tensors import named_tensors
from zerocast.export.chosen_weights import ChosenWeights
from zerocast.export.dialects import Dialect
from zerocast.export.entries import Entry, StoredParameter, whole
from zerocast.export.exported_weights import BUCKET_BYTES, Export
from zerocast.export.folder import (
    MODEL_FILES,
    OTHER_WEIGHTS,
    copy_other_files,
    file_names,
    write_index,
    write_json,
    write_tensors,
)
from zerocast.export.input_scales import InputScales
from zerocast.export.known_dialects import DIALECTS, as_dialect
from zerocast.export.stages import NamedTensors, in_buckets
from zerocast.export.stored_files import read_json
from zerocast.export.stored_model import StoredModel
from zerocast.export.stored_names import stored_order
from zerocast.recipes.recipe_patterns import ALL, Recipes
from zerocast.versions import __version__

HIGH_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The targets without codes, by name."""

STAGE_BYTES = 96 << 20
"""The bytes of codes that are cast at once; of NVFP4 their BF16 values have four times as many."""

Progress = Callable[[int], None]
"""Takes the bytes of the source that were converted since the last call."""


class CheckpointConversion:
    """A plan of a conversion. Making one reads no values and writes nothing.

    Args:
        source: a directory of safetensors files with a ``config.json``, in high precision or a
            dialect, which is decoded first.
        target: the directory to make.
        to: a dialect or its name, or one of :data:`HIGH_PRECISION`.
        recipe, include, exclude: see :class:`ChosenWeights`.
        amax_groups: weights that share one tensor amax, as in :func:`save_pretrained`.
        dialect: the dialect of ``source``; by default the one that its ``config.json`` says.
        input_scales: see :class:`Export`.
        bucket_bytes: the approximate bytes of codes per file.
        group: the ranks that convert together, each of which sees both directories.

    Attributes:
        model: the source.
        left: why linear layers and experts are not converted, by the names of their weights.
        entries: the tensors of the target.
        num_bytes: the approximate bytes of the target's tensors.
        value_bytes: the bytes of their values in high precision, which progress counts.

    Raises:
        InputError: for a wrong argument, a damaged source, or a target that exists.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        target: str | os.PathLike[str],
        to: Dialect | str,
        *,
        recipe: Recipes | None = None,
        include: Sequence[str] = (ALL,),
        exclude: Sequence[str] = (),
        amax_groups: Groups = AUTO,
        dialect: Dialect | str | None = None,
        input_scales: InputScales = None,
        bucket_bytes: int = BUCKET_BYTES,
        group: Group = None,
    ) -> None:
        self.comm = as_communicator(group)
        self.target = Path(target).absolute()
        self.model = StoredModel(Path(source), None if dialect is None else as_dialect(dialect))
        self._drafts = self.target.parent / f".{self.target.name}.zerocast-convert"
        self._export: Export | None = None
        self.left: dict[str, str] = {}
        if isinstance(to, str) and to in HIGH_PRECISION:
            self._name, self.entries = to, self._decoded(HIGH_PRECISION[to])
        else:
            own = as_dialect(to)
            chosen = ChosenWeights(self.model, own, recipe, include, exclude)
            self.left, self._name = chosen.left, own.name
            self._export = Export(
                self.model,
                own,
                from_masters=True,
                include=chosen.recipes,
                amax_groups=amax_groups,
                names={},
                input_scales=input_scales,
                bucket_bytes=bucket_bytes,
                group=SingleRank(),
            )
            self._export.entries.sort(key=stored_order)
            self.entries = self._export.entries
        self.buckets = in_buckets(self.entries, bucket_bytes)
        self._names = file_names(len(self.buckets))
        self.num_bytes = sum(_num_bytes(each) for each in self.entries)
        self.value_bytes = value_bytes(self.entries)
        self._check_target()

    def _decoded(self, dtype: torch.dtype) -> list[Entry]:
        """Return the entries of a target in high precision: matrices, in ``dtype``, and others."""
        found = []
        for name, parameter in self.model.named_parameters():
            is_cast = parameter.is_floating_point() and parameter.dim() > 1
            own = dtype if is_cast else parameter.dtype
            # A tensor in high precision is stored alike in every dialect.
            found.append(Entry(name, parameter, own, next(iter(DIALECTS.values()))))
        return sorted(found, key=stored_order)

    def _check_target(self) -> None:
        folder = self.target.parent
        if self.target.exists() and not (self.target.is_dir() and not os.listdir(self.target)):
            raise InputError(f"{self.target} exists; choose another target, or remove it.")
        if not folder.is_dir():
            raise InputError(f"{self.target} must be in a directory that exists.")
        free = shutil.disk_usage(folder).free
        needed = self.num_bytes - sum(f.stat().st_size for f in self._drafts.glob("files/*"))
        if needed > free:
            raise InputError(
                f"{folder} has {free:,} bytes free, and {self.target.name} needs {needed:,} more; "
                "make room, or choose a target on another disk."
            )

    def _fingerprint(self) -> dict[str, Any]:
        """What decides the bytes of the target's files, as JSON values."""
        files = self.model.files
        found = {
            "zerocast": __version__,
            "source": f"{files.folder.absolute()}",
            "to": self._name,
            "files": files.files,
            "tensors": [[f"{e.dtype} {e.recipe} {e.amax_group}" for e in b] for b in self.buckets],
        }
        return json.loads(json.dumps(found))

    def run(self, progress: Progress = lambda _: None) -> dict[str, int]:
        """Convert, and return the sizes of the target's files by name. Collective.

        Raises:
            InputError: on every rank, if another conversion has the target, a file was changed, or
                the disk is full.
            NonFiniteError: on every rank, if a weight holds a NaN or an infinity.
        """
        attempt, sizes = Attempt(), dict[str, int]()
        with self._prepared() as files:
            with attempt, _named_disk(self.target):
                self._write_own(files, progress)
            raise_together(self.comm, attempt.error)
            with attempt, _named_disk(self.target):
                if self.comm.rank == 0:
                    sizes = self._finish(files)
            raise_together(self.comm, attempt.error)
        return self.comm.all_gather_object(sizes)[0]

    @contextmanager
    def _prepared(self) -> Iterator[Path]:
        """Yield the directory of the drafts, which this conversion alone uses. Collective."""
        attempt, lock = Attempt(), None
        with attempt:
            if self.comm.rank == 0:
                if self._drafts.is_symlink():
                    raise InputError(f"{self._drafts} is a link; remove it.")
                (self._drafts / "files").mkdir(parents=True, exist_ok=True)
                lock = _locked(self._drafts / "lock")
                self._check_drafts()
        try:
            raise_together(self.comm, attempt.error)
            yield self._drafts / "files"
            if lock is not None:
                shutil.rmtree(self._drafts)
        finally:
            if lock is not None:
                lock.close()

    def _check_drafts(self) -> None:
        """Check that files of earlier runs are of this conversion, which the first notes down."""
        note, own = self._drafts / "conversion.json", self._fingerprint()
        if not note.exists():
            write_json(own, self._drafts / "conversion.part")
            (self._drafts / "conversion.part").rename(note)
            return
        held = read_json(note)
        wrong = [key for key in own if held.get(key) != own[key]]
        if wrong:
            raise InputError(
                f"{self._drafts} has files of another conversion to {self.target.name}, of other "
                f"{', '.join(wrong)}; remove it, or choose another target."
            )

    def _write_own(self, files: Path, progress: Progress) -> None:
        """Write the files of this rank's buckets that are not there yet."""
        if self._export is not None:
            self._export.plan_stages()
        written: Future[None] | None = None
        with ThreadPoolExecutor(1) as writer:
            for i in range(self.comm.rank, len(self.buckets), self.comm.size):
                if (files / self._names[i]).exists():
                    progress(value_bytes(self.buckets[i]))
                    continue
                tensors = NamedTensors()
                for stage in self.stages(i):
                    tensors |= self.tensors_of(stage)
                    progress(value_bytes(stage))
                if written is not None:
                    written.result()
                written = writer.submit(_write_durably, tensors, files / self._names[i])
                del tensors
            if written is not None:
                written.result()

    def stages(self, bucket: int) -> Iterator[list[Entry]]:
        """Yield the entries of a bucket that are cast at once, with their values; the next are read
        meanwhile.
        """
        first, *others = in_buckets(self.buckets[bucket], STAGE_BYTES)
        with ThreadPoolExecutor(1) as reader:
            following = reader.submit(_loaded, first)
            for after in [*others, None]:
                stage = following.result()
                if after is not None:
                    following = reader.submit(_loaded, after)
                yield stage

    @torch.no_grad()
    def tensors_of(self, stage: Sequence[Entry]) -> NamedTensors:
        """Return the tensors of some entries as the target stores them."""
        if self._export is None:
            return named_tensors(SingleRank(), stage, dict)
        return self._export.gather(stage, self._export.cast(stage))()

    def _finish(self, files: Path) -> dict[str, int]:
        """Write what is not tensors, and give the directory the target's name."""
        write_index(files, self._names)
        if self._export is None:
            contents = {"dtype": f"{HIGH_PRECISION[self._name]}".removeprefix("torch.")}
        else:
            contents = self._export.config.contents()
            for name, other in self._export.config.files().items():
                write_json(other, files / name)
        own = {k: v for k, v in self.model.configuration.items() if k != "torch_dtype"}
        copy_other_files(self.model.files.folder, files, [*MODEL_FILES, *OTHER_WEIGHTS])
        write_json(own | contents, files / "config.json")
        sizes = {
            str(file.relative_to(files)): file.stat().st_size
            for file in sorted(files.rglob("*"))
            if file.is_file()
        }
        for name in self._names:  # safetensors gives its files to their owner alone
            (files / name).chmod(files.stat().st_mode & 0o666)
        files.rename(self.target)
        return sizes


def value_bytes(entries: Iterable[Entry]) -> int:
    """Return the bytes of the values of some entries in high precision."""
    return sum(each.shape.numel() * each.dtype.itemsize for each in entries)


def _loaded(stage: Sequence[Entry]) -> list[Entry]:
    """Return entries whose values are in memory, but for those that are transposed first."""
    found = []
    for each in stage:
        if each.shard is not None and each.original is None:
            each = replace(each, shard=each.shard.loaded())
        elif isinstance(each.tensor, StoredParameter) and each.recipe is None:
            values = whole(each.tensor, each.dtype)
            each = replace(each, tensor=torch.nn.Parameter(values, requires_grad=False))
        found.append(each)
    return found


def _num_bytes(entry: Entry) -> int:
    """Return the bytes of an entry's tensors."""
    if entry.recipe is None:
        return entry.num_bytes
    plane = entry.recipe.planes(entry.shape[-2:], columnwise=False)[0]
    scales = plane.scales.rows * plane.scales.cols * entry.dialect.scale_dtype.itemsize
    return entry.num_bytes + entry.shape[:-2].numel() * scales


def _write_durably(tensors: NamedTensors, path: Path) -> None:
    """Write a safetensors file that has its name only once its bytes are on the disk."""
    draft = path.with_suffix(".part")
    write_tensors(tensors, draft)
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.rename(path)


def _locked(path: Path) -> IO[str]:
    """Return a file that this process alone holds open, until it is closed.

    Raises:
        InputError: if another process holds it.
    """
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise InputError(
            f"another process converts to the target of {path.parent}; wait for it, or choose "
            "another target."
        ) from error
    return file


@contextmanager
def _named_disk(target: Path) -> Iterator[None]:
    """Raise :class:`InputError` for an error of the disk; it names the target."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{target} cannot be written: {error}; the files that are whole are kept, and the same "
            "command goes on from there."
        ) from error
