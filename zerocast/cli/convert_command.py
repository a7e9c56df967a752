"""convert: casts a checkpoint of safetensors to a dialect, or decodes it to high precision."""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch

from zerocast.arguments import counted, shown_bytes
from zerocast.cast.amax_groups import AUTO, Groups
from zerocast.cli.output import progress
from zerocast.cli.stored_checksums import checksums, lines_of
from zerocast.comm import Group
from zerocast.errors import InputError
from zerocast.export.checkpoint_conversion import HIGH_PRECISION, CheckpointConversion
from zerocast.export.known_dialects import KNOWN_DIALECTS, as_dialect
from zerocast.export.stored_files import read_json
from zerocast.lab.conformance.stored_values import check_stored
from zerocast.recipes import in_words
from zerocast.recipes.recipe_patterns import ALL, Recipes
from zerocast.safe_files import printable
from zerocast.sharded.report import grouped_names

CHECKSUMS = "checksums.sha256"
"""The file in the target that ``--checksums`` writes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add("source", type=Path, metavar="SOURCE", help="a directory of safetensors files")
    add("target", type=Path, metavar="TARGET", help="the directory to make")
    known = [*HIGH_PRECISION, *KNOWN_DIALECTS]
    add("--to", required=True, metavar="DIALECT", help=", ".join(known))
    add("--from", dest="dialect", metavar="DIALECT", help="of SOURCE (that of its config.json)")
    several: dict[str, Any] = {"action": "append", "default": [], "metavar": "PATTERN"}
    pair = "PATTERN=RECIPE, of layers; or a JSON file of such pairs; the first that fits decides"
    add("--recipe", **{**several, "metavar": "PATTERN=RECIPE"}, help=pair)
    add("--include", **several, help="layers to convert; may repeat (*: all but heads and routers)")
    add("--exclude", **several, help="layers to leave")
    add("--4over6", dest="four_over_six", action="store_true", help="NVFP4 with 4-over-6")
    groups = "weights with one tensor scale: auto, or names such as q_proj,k_proj,v_proj"
    add("--amax-groups", action="append", default=[], metavar="NAMES", help=groups)
    add("--input-scales", type=Path, metavar="FILE", help="safetensors, as --to names them")
    add("--dry-run", action="store_true", help="say what would be done")
    add("--verify", action="store_true", help="read TARGET back and compare")
    add("--checksums", action="store_true", help=f"write the SHA-256 of tensors to {CHECKSUMS}")


def run(given: argparse.Namespace) -> tuple[Any, int]:
    """Return the output and the exit code, which is 1 if ``--verify`` finds a difference.

    Raises:
        ZerocastError: for wrong arguments, a damaged source, or a full disk.
    """
    group = _group()
    started = time.monotonic()
    conversion = CheckpointConversion(
        given.source,
        given.target,
        given.to,
        recipe=_recipes(given),
        include=given.include or (ALL,),
        exclude=given.exclude,
        amax_groups=_groups(given.amax_groups),
        dialect=None if given.dialect is None else as_dialect(given.dialect),
        input_scales=given.input_scales,
        group=group,
    )
    found = _described(conversion)
    if given.dry_run:
        return "" if conversion.comm.rank else _output(given, found), 0
    total, is_first = conversion.value_bytes, conversion.comm.rank == 0
    with progress("convert", total // conversion.comm.size, is_shown=is_first) as add:
        sizes = conversion.run(add)
    found["files"], found["seconds"] = sizes, round(time.monotonic() - started, 1)
    if conversion.comm.rank:
        return "", 0
    if given.verify:
        with progress("verify", total) as add:
            found["different"] = check_stored(conversion, add)
    if given.checksums:
        sums = lines_of(checksums(conversion.target))
        (conversion.target / CHECKSUMS).write_text(sums + "\n")
    return _output(given, found), int(bool(found.get("different")))


def _group() -> Group:
    """Return the ranks of mpiexec or torchrun, if one of them started this process."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        torch.distributed.init_process_group("gloo")
        return torch.distributed.group.WORLD
    if any(name in os.environ for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")):
        from mpi4py import MPI

        return MPI.COMM_WORLD
    return None


def _recipes(given: argparse.Namespace) -> Recipes | None:
    """Return the recipes by pattern of ``--recipe`` and ``--4over6``."""
    found: dict[str, Any] = {}
    for pair in given.recipe:
        pattern, equals, name = pair.partition("=")
        if not equals and Path(pair).suffix != ".json":
            raise InputError(f"--recipe must be PATTERN=RECIPE or a .json file, got {pair!r}.")
        found |= {pattern: name} if equals else read_json(Path(pair))
    if given.four_over_six:
        if found:
            raise InputError("--4over6 is for all weights; name nvfp4-4over6-1x16 in --recipe.")
        return "nvfp4-4over6-1x16"
    return found or None


def _groups(given: list[str]) -> Groups:
    if not given or given == [AUTO]:
        return AUTO
    return [[f"*.{name}" for name in names.split(",")] for names in given]


def _described(conversion: CheckpointConversion) -> dict[str, Any]:
    """Return what a conversion does, as JSON values."""
    by_format: dict[str, list[str]] = {}
    for each in conversion.entries:
        own = f"{each.dtype}".removeprefix("torch.")
        if each.recipe is not None:
            own = f"{each.dialect.name}: {in_words(each.recipe)}"
        by_format.setdefault(own, []).append(each.stored)
    left: dict[str, list[str]] = {}
    for name, reason in conversion.left.items():
        left.setdefault(reason, []).append(name)
    return {
        "target": f"{conversion.target}",
        "bytes": {"values": conversion.value_bytes, "target": conversion.num_bytes},
        "formats": {form: len(names) for form, names in by_format.items()},
        "left": {reason: [each for each, _ in grouped_names(n)] for reason, n in left.items()},
    }


def _output(given: argparse.Namespace, found: dict[str, Any]) -> Any:
    if given.json:
        return found
    values, target = found["bytes"]["values"], found["bytes"]["target"]
    lines = [
        f"{found['target']}: {shown_bytes(target)} of tensors, "
        f"{100 * target / max(values, 1):.0f} % of {shown_bytes(values)} of values"
    ]
    lines += [f"  {counted(count, 'tensor')} as {form}" for form, count in found["formats"].items()]
    for reason, names in found["left"].items():
        lines.append(f"  left, {reason}: {printable(', '.join(names))}")
    if "seconds" in found:
        rate = values / max(found["seconds"], 0.1)
        lines.append(f"written in {found['seconds']} s, {shown_bytes(rate)} of values a second")
    if "different" in found:
        wrong = found["different"]
        lines.append("read back: equal" if not wrong else f"read back: {len(wrong)} differ: ")
        lines += [f"  {printable(name)}" for name in wrong[:20]]
    if given.to not in HIGH_PRECISION and "seconds" in found:
        lines.append(
            "No calibration data was used: what needs scales of inputs has --input-scales."
        )
    return "\n".join(lines)
