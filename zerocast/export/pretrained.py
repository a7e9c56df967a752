"""save_pretrained: directories of safetensors that servers load.

Note: who writes what
~~~~~~~~~~~~~~~~~~~~~
Every bucket of tensors is one file, and the ranks write the files in turn. The files are the same
on any number of ranks. Rank 0 first writes the files that need no cast, so that errors in them are
raised early. At the end all files are renamed to their final names, ``config.json`` last: a
directory without it is unfinished. :mod:`zerocast.export.folder` checks the directory.
"""

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from zerocast.cast.amax_groups import AUTO, Groups
from zerocast.comm import Attempt, Group, raise_together, raising_together
from zerocast.errors import InputError
from zerocast.export.dialects import Dialect
from zerocast.export.entries import Names
from zerocast.export.export_report import ExportReport
from zerocast.export.exported_weights import BUCKET_BYTES, Export
from zerocast.export.folder import (
    add_tokenizer,
    check_folder,
    file_names,
    require_safetensors,
    write_index,
    write_json,
    write_tensors,
)
from zerocast.export.include import Include
from zerocast.export.input_scales import InputScales
from zerocast.export.stored_names import stored_order
from zerocast.export.unwrapping import unwrapped
from zerocast.optim import ZeroOptimizer
from zerocast.safe_files import drafts_in, publish


def save_pretrained(
    model: torch.nn.Module,
    directory: str | os.PathLike[str],
    *,
    dialect: Dialect | str,
    optimizer: ZeroOptimizer | None = None,
    from_masters: bool = False,
    include: Include = (),
    amax_groups: Groups = AUTO,
    dtype: torch.dtype | None = None,
    names: Names = None,
    modules: Sequence[str] | None = None,
    input_scales: InputScales = None,
    tokenizer: Any = None,
    bucket_bytes: int = BUCKET_BYTES,
    group: Group = None,
) -> ExportReport:
    """Save a model in a format that servers load: safetensors and ``config.json``. Collective.

    The files are the same on any number of ranks. Every quantized weight in them equals
    ``zerocast.quantize`` of the whole weight. A rank holds its shards and two buckets, not the
    model.

    Args:
        model: a model with quantized weights, whole on every rank, or with masters sharded by
            FSDP2. The configuration of a transformers model is saved; tied weights are stored once.
        directory: created if it does not exist. A directory with files of a model or of another
            export, or with a file of a name to be written, is refused.
        dialect: one of :data:`zerocast.export.DIALECTS`, or its name.
        optimizer: the ZeroOptimizer that holds the masters of ``model``, for ``from_masters``.
        from_masters: False saves the bytes that the model was trained with, which the dialect must
            be able to store; True casts the masters by the dialect's recipe.
        include: linear layers that are not quantized in the model and are also cast by the
            dialect's recipe: exact names, or patterns with ``*``. Or a mapping from exact names of
            parameters, also of stacks of experts, to the recipes by which they are cast.
        amax_groups: weights that the server fuses, which share one tensor amax if they are cast by
            the dialect's recipe. "auto": those of transformers and torchtitan models that servers
            are known to fuse, as in :func:`zerocast.nn.convert`. Or patterns of names,
            ``[["*.q_proj", "*.k_proj", "*.v_proj"], ["*.gate_proj", "*.up_proj"]]``. Weights that
            were trained in groups are always grouped.
        dtype: the dtype that masters are rounded to before a cast, and in which other parameters
            are stored. By default their dtype; for masters of FSDP2 that of the latest gather.
        names: maps names in the model to names in the checkpoint: a function, or a mapping, where
            missing names are kept. By default the names of transformers for its models.
        modules, input_scales: see :class:`zerocast.export.Export`.
        tokenizer: a tokenizer or processor with a method ``save_pretrained``, or its directory,
            from which all files are copied except hidden ones, weights and model configuration.
        bucket_bytes: the approximate bytes per file.
        group: the ranks that save together; by default those of ``optimizer``, or all.

    Returns:
        The report, on every rank. Rank 0 also logs it to the logger ``zerocast`` at INFO.

    Raises:
        InputError, UnsupportedError: on every rank, for a wrong argument, or if a weight cannot be
            saved this way on any rank, such as fused weights with different tensor scales.
        NonFiniteError: on every rank, if a weight holds a NaN or an infinity.

    After an error the directory holds no file of this export.
    """
    export = Export(
        model,
        dialect,
        optimizer=optimizer,
        from_masters=from_masters,
        include=include,
        amax_groups=amax_groups,
        dtype=dtype,
        names=names,
        modules=modules,
        input_scales=input_scales,
        bucket_bytes=bucket_bytes,
        group=group,
    )
    export.entries.sort(key=stored_order)
    comm, model, drafts = export.comm, unwrapped(model), Path()
    with ExitStack() as opened:
        with raising_together(comm):
            require_safetensors()
            contents = export.config.contents()
            if comm.rank == 0:
                drafts = opened.enter_context(drafts_in(Path(directory).absolute()))
                if tokenizer is not None:
                    add_tokenizer(tokenizer, drafts)
                generation = getattr(model, "generation_config", None)
                if generation is not None:
                    generation.save_pretrained(drafts)
                write_json(_configuration(model) | contents, drafts / "config.json")
                for name, other in export.config.files().items():
                    write_json(other, drafts / name)
                check_folder(drafts)
        drafts = Path(comm.all_gather_object(str(drafts))[0])
        with raising_together(comm):
            if not drafts.is_dir():
                raise InputError(
                    f"save_pretrained needs a directory that all ranks share, got {drafts.parent}."
                )

        names_of_files = file_names(len(export.plan_buckets()))
        attempt, buckets = Attempt(), export.buckets()
        for i, file in enumerate(names_of_files):
            tensors = next(buckets)  # enumerate would keep a reference to it
            if comm.rank == i % comm.size:
                with attempt:
                    write_tensors(tensors, drafts / file)
            del tensors  # before the next ones are gathered
        raise_together(comm, attempt.error)

        files: dict[str, int] = {}
        with raising_together(comm):
            if comm.rank == 0:
                write_index(drafts, names_of_files)
                check_folder(drafts)
                files = publish(drafts, last="config.json")
    formats = {
        each.stored: each.dialect.name if each.recipe else f"{each.dtype}"
        for each in export.entries
    }
    report = ExportReport(drafts.parent, comm.all_gather_object(files)[0], formats)
    if comm.rank == 0:
        logging.getLogger("zerocast").info("%s", report)
    return report


def _configuration(model: torch.nn.Module) -> dict[str, Any]:
    """Return a model's transformers configuration; an empty dict for a model without one."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return {}
    # fully_shard makes the model an instance of a subclass whose name begins with FSDP.
    own = next(each for each in type(model).__mro__ if not each.__name__.startswith("FSDP"))
    return {**config.to_dict(), "architectures": [own.__name__]}
