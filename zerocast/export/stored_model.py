"""StoredModel: the weights of a checkpoint in files, as a model of the names that they have there.

An export of it reads one weight at a time. What a module is follows from names and shapes, since no
code of the model is executed: a matrix ``X.weight`` is a linear layer, unless ``X`` has the name of
an embedding, or of a Conv1D in a model whose type has these. A nightly test compares the names with
the classes of transformers' modules. Weights in codes are decoded when they are read.
"""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zerocast.arguments import present
from zerocast.errors import InputError
from zerocast.export.dialects import Dialect, stored_name
from zerocast.export.entries import StoredParameter
from zerocast.export.pretrained_loading import dialect_of, nominal_dtype, read_configuration
from zerocast.export.stored_files import StoredFiles, StoredTensor
from zerocast.layout import Extent

EMBEDDING_PARTS = (
    "emb", "wte", "wpe", "_token", "relative_attention_bias", "bias_values", "codebook",
    "query_feat", "queries_features", "reference_points",
)  # fmt: skip
"""Parts of the last names of modules that look rows up."""

EMBEDDINGS = ("shared", "w", "pe_k")
"""Last names of other such modules, whole. A numbered module is one if the name above it is."""

LAYER_PARTS = ("patch", "project", "mapping", "dense", "transformation", "linear", "class_embed")
"""Parts of names that modules may have whose last names are like an embedding's and that are linear
layers. They stay in high precision, and the section names them, since servers may quantize them."""

CONV1D_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp", "clvp_decoder")
CONV1D = ("c_attn", "c_proj", "c_fc", "q_attn")
"""The types of transformers' models that have Conv1D, and the last names of these modules."""

SECTIONS = ("quantization_config", "quantization")
"""Items of ``config.json`` that say how weights are stored."""


class StoredModule(torch.nn.Module):
    """A module that is neither a linear layer nor an embedding."""


class StoredConv1D(StoredModule):
    """A layer of transformers whose matrix is stored [in, out]."""


class StoredModel(StoredModule):
    """The weights of a directory as a module that cannot be run.

    Args:
        folder: a directory of safetensors files with a ``config.json``.
        dialect: the dialect of the files; by default the one that ``config.json`` says.

    Attributes:
        files: the files.
        configuration: the contents of ``config.json``, without the section of a dialect.

    Raises:
        InputError: if the directory is damaged, or stores weights in an unknown format.
    """

    def __init__(self, folder: Path, dialect: Dialect | None = None) -> None:
        super().__init__()
        self.configuration: dict[str, Any] = read_configuration(folder)
        self.files = StoredFiles(folder)
        likes = self.files.likes
        if dialect is None and self.configuration.get("quantization_config") is not None:
            dialect = dialect_of(self.configuration, folder, likes)
        self.configuration = {k: v for k, v in self.configuration.items() if k not in SECTIONS}
        dtype, found = nominal_dtype(self.configuration), dict[str, StoredParameter]()
        self._has_conv1d = not _model_types(self.configuration).isdisjoint(CONV1D_MODELS)
        for name, tensor in self.files.tensors.items():
            own = None if dialect is None else dialect.of_stored(name, likes)
            parameter, part = (own.parameter_of(name) if own else None) or ("", "")
            if own is None or not part or stored_name(parameter, own.scales) not in likes:
                read = tensor.read
                found[name] = StoredParameter.of(tensor.like.shape, tensor.like.dtype, read)
            elif part == own.codes:
                found[parameter] = self._decoded(parameter, own, dtype)
        for name, values in found.items():
            self._module_of(name, found)._parameters[name.rpartition(".")[2]] = values
        if self.configuration.get("tie_word_embeddings"):
            matrix = torch.empty(1, 1, dtype=dtype, device="meta")
            self._module_of("lm_head.weight", {"lm_head.weight": matrix})

    def _module_of(self, name: str, found: Mapping[str, torch.Tensor]) -> torch.nn.Module:
        """Return the module of the parameter ``name``, made if needed, as are those above it."""
        module: torch.nn.Module = self
        *above, last = name.split(".")
        error = InputError(f"{self.files.folder} has {name!r}, which is no parameter's name.")
        if "" in (*above, last):
            raise error
        for path, each in zip(itertools.accumulate(above, "{}.{}".format), above, strict=True):
            if each not in module._modules:
                if hasattr(module, each):  # a method of modules, or a parameter
                    raise error
                weight = found.get(f"{path}.weight")
                is_layer = weight is not None and weight.dim() == 2
                module._modules[each] = self._made(path) if is_layer else StoredModule()
            module = present(module._modules[each])
        if last in module._modules:
            raise error
        return module

    def _made(self, path: str) -> torch.nn.Module:
        """Return the layer with a matrix of this name, without parameters."""
        if self._has_conv1d and path.rpartition(".")[2] in CONV1D:
            return StoredConv1D()
        if is_embedding(path) and any(part in path for part in LAYER_PARTS):
            return StoredModule()
        kind = torch.nn.Embedding if is_embedding(path) else torch.nn.Linear
        made = kind(1, 1, device="meta")
        made._parameters |= dict.fromkeys(made._parameters)
        return made

    def _decoded(self, name: str, dialect: Dialect, dtype: torch.dtype) -> StoredParameter:
        """Return the parameter whose values the tensors of ``dialect`` decode to."""
        stored, tensors = self.files.tensors, dict[str, StoredTensor]()
        for part in dialect.names:
            if stored_name(name, part) in stored:
                tensors[part] = stored[stored_name(name, part)]
        try:
            shape = dialect.shape_of({part: each.like for part, each in tensors.items()})
        except InputError as error:
            raise InputError(f"{self.files.folder}: {name}: {error}") from error
        is_transposed = dialect.fuses_experts and len(shape) > 2  # as models have such matrices
        if is_transposed:
            shape = torch.Size((*shape[:-2], shape[-1], shape[-2]))

        def read(extent: Extent) -> torch.Tensor:
            held = {part: each.whole() for part, each in tensors.items()}
            values = dialect.decode(held, dtype).dequantize(dtype)
            values = values.mT if is_transposed else values
            return values.reshape(-1)[extent.start : extent.end]

        return StoredParameter.of(shape, dtype, read)


def is_embedding(module: str) -> bool:
    """Return whether the module of this name looks rows up."""
    above, _, last = module.rpartition(".")
    if last.isdecimal():
        return is_embedding(above)
    return last in EMBEDDINGS or any(part in last.lower() for part in EMBEDDING_PARTS)


def _model_types(configuration: object) -> set[object]:
    """Return the ``model_type`` of a model and of those inside it."""
    if not isinstance(configuration, dict):
        return set()
    inside = (_model_types(value) for value in configuration.values())
    return {str(configuration.get("model_type"))}.union(*inside)
