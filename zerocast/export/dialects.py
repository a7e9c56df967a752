"""Dialects: how the checkpoints that servers load name, shape and encode a quantized weight.

A server reads the codes of a matrix [M, K] row by row, with scales along K. So a dialect stores the
rowwise plane of a weight: its codes unchanged, and its scales without padding or transposition.
Only NVFP4's tensor scale is computed, from the tensor amax. All dialects are in
:mod:`zerocast.export.known_dialects`.
"""

import contextlib
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from zerocast.errors import InputError
from zerocast.export.tensor_scale import TensorScale
from zerocast.layout import Plane
from zerocast.numerics import NVFP4Numerics, decode_e8m0
from zerocast.recipes import Recipe
from zerocast.tensors import QuantizedStorage, QuantizedTensor
from zerocast.tensors.saved_storage import checked_storage

Section = dict[str, Any]
"""The ``quantization_config`` of a ``config.json``."""

LINEAR, EXPERTS, HEADS = "of a linear layer", "of experts", "of an output layer"
"""Kinds of weights, as worded in messages: servers read each kind with different code."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The format in which one kind of checkpoint stores the quantized weight of a module ``X``.

    A tensor name that begins with ``_`` is appended to the parameter's name instead:
    ``X.weight_blocks``, or ``X.down_proj_blocks`` for experts in one parameter.

    Attributes:
        name: the name by which users choose the dialect.
        recipe: the recipe by which masters are cast.
        codes: ``X.<codes>`` holds the codes: 4-bit ones as [M, K / 2], two per byte, the first in
            the low half; 8-bit ones as [M, K].
        code_dtype: the dtype in which codes are stored: of one byte, or uint32, which holds four in
            their order.
        code_block: bytes per block of codes, which are then stored as [M, K / block, bytes]; None
            if codes are not stored in blocks.
        scales: ``X.<scales>`` holds the block scales.
        scale_dtype: the dtype in which scales are stored; float8_e8m0fnu stores the exponents of
            powers of two.
        scale_shape: [1] or [] for one scale per tensor, [-1] for one row of scales; None for
            [blocks down a column, blocks along a row].
        tensor_scale: NVFP4's tensor scale; None for other formats.
        section: the ``quantization_config`` of ``config.json``, without the list of unquantized
            modules.
        unquantized_key: the key of that list in the section; empty if it has none.
        reads: the kinds of weights whose codes servers read: LINEAR, EXPERTS, HEADS.
        input_scale: ``X.<input_scale>`` holds the static scale of the inputs of ``X``, FP32, of the
            shape of the tensor scale if there is one, else []; the caller gives it. None if servers
            scale inputs dynamically.
        also_in_config: items of ``config.json`` beside the section.
        fuses_experts: True if a stack [..., M, K] is stored in one tensor, for which matrices that
            a model keeps as [K, M] are transposed; False if each projection of each expert is
            stored as a separate weight.
        by_name: pairs of a pattern with ``*`` and the dialect of the weights whose names match it,
            for weights stored in another format in the same checkpoint. The checkpoint has only
            the section of this dialect.
    """

    name: str
    recipe: Recipe
    codes: str = "weight"
    code_dtype: torch.dtype = torch.float8_e4m3fn
    code_block: int | None = None
    scales: str = "weight_scale"
    scale_dtype: torch.dtype = torch.float32
    scale_shape: tuple[int, ...] | None = None
    tensor_scale: TensorScale | None = None
    section: Section
    unquantized_key: str = "ignore"
    reads: tuple[str, ...] = (LINEAR, EXPERTS, HEADS)
    input_scale: str | None = None
    also_in_config: Section = field(default_factory=dict)
    fuses_experts: bool = False
    by_name: tuple[tuple[str, "Dialect"], ...] = ()

    def of(self, name: str) -> "Dialect":
        """Return the dialect of the parameter or stored tensor ``name``: see ``by_name``."""
        found = (other for like, other in self.by_name if fnmatch.fnmatchcase(name, like))
        return next(found, self)

    def of_weight(self, name: str, recipe: Recipe | None, shape: Sequence[int]) -> "Dialect":
        """Return the dialect of the weight ``name``, whose recipe may be ``recipe`` already."""
        return self.of(name)

    def of_stored(self, name: str, stored: Mapping[str, torch.Tensor]) -> "Dialect":
        """Return the dialect of the tensor ``name`` of a checkpoint that holds ``stored``."""
        return self.of(name)

    @property
    def names(self) -> tuple[str, ...]:
        """The last parts of the names of the tensors that hold one weight."""
        tensor_scale = () if self.tensor_scale is None else (self.tensor_scale.name,)
        return self.codes, self.scales, *tensor_scale

    @property
    def _stores_exponents(self) -> bool:
        """Whether the recipe's FP32 scales, powers of two, are stored as exponents."""
        is_float = self.recipe.numerics.scale_dtype == torch.float32
        return is_float and self.scale_dtype == torch.float8_e8m0fnu

    def parameter_of(self, name: str) -> tuple[str, str] | None:
        """Return the parameter that the stored tensor ``name`` belongs to, and which of
        :attr:`names` it is; None if it is not part of a quantized weight.
        """
        for part in self.names:
            if part.startswith("_") and name.endswith(part):
                return name.removesuffix(part), part
            module, _, last = name.rpartition(".")
            if last == part:
                return f"{module}.weight" if module else "weight", part
        return None

    @property
    def matches_layers(self) -> bool:
        """Whether readers match each layer by its name or class, as those of compressed-tensors do.
        Others match all experts at once, by the name of their module.
        """
        return self.section.get("quant_method") == "compressed-tensors"

    def quantization_config(
        self,
        unquantized: Sequence[str],
        heads: Sequence[str] = (),
        quantized: Mapping[str, "Dialect"] = MappingProxyType({}),
    ) -> Section:
        """Return the section for a model with these unquantized modules and quantized ``heads``.

        vLLM's output layers are not of the class Linear, so if layers are matched, each of
        ``heads`` is added as a target. ``quantized`` has the dialects of all quantized modules by
        name, which only the section of a mixed dialect lists.
        """
        section = dict(self.section)
        if self.unquantized_key:
            section[self.unquantized_key] = list(unquantized)
        if heads and self.matches_layers:
            groups = section["config_groups"].items()
            section["config_groups"] = {
                name: {**group, "targets": [*group["targets"], *heads]} for name, group in groups
            }
        return section

    def has_section(self, given: Section) -> bool:
        """Return whether ``given`` is this dialect's section for some model."""
        heads: Sequence[str] = ()
        if self.matches_layers:
            with contextlib.suppress(LookupError, TypeError):
                heads = given["config_groups"]["group_0"]["targets"][1:]
        own = self.quantization_config((), heads)
        return all(
            given.get(key) == own.get(key)
            for key in {*given, *own} - {self.unquantized_key, "producer"}
        )

    def holds(self, recipe: Recipe, shape: Sequence[int]) -> bool:
        """Return whether this dialect can store the bytes of a weight of ``recipe`` unchanged;
        ``shape`` is [M, K], or that of a stack of such matrices.
        """
        shape = shape[len(recipe.stack_of(shape)) :]
        own, given = self.recipe.numerics, recipe.numerics
        if (own.fmt, own.scale_dtype) != (given.fmt, given.scale_dtype) or len(shape) != 2:
            return False
        if getattr(own, "power_2_scale", False) and not getattr(given, "power_2_scale", False):
            return False
        if getattr(own, "one_level", False) and not getattr(given, "one_level", False):
            return False
        own_plane, plane = (r.planes(shape, columnwise=False)[0] for r in (self.recipe, recipe))
        return _scale_rows_and_columns(own_plane) == _scale_rows_and_columns(plane)

    def fits(self, parts: Mapping[str, torch.Tensor]) -> bool:
        """Return whether ``parts``, by :attr:`names`, have the dtypes and shapes of one weight of
        this dialect; they may be on the meta device.
        """
        try:
            self.shape_of(parts)
        except InputError:
            return False
        return parts.keys() == set(self.names)

    def encode(self, storage: QuantizedStorage) -> dict[str, torch.Tensor]:
        """Return the tensors, by :attr:`names`, that store a weight that this dialect
        :meth:`holds`; views of its buffers where possible.
        """
        codes = storage.buffers[storage.planes[0].codes_name]
        return {
            self.codes: self.shaped_codes(self.encode_codes(codes)),
            **self.encode_scales(storage),
        }

    def shaped_codes(self, codes: torch.Tensor) -> torch.Tensor:
        """Return a weight's stored codes, given with rows of bytes; in blocks if ``code_block``."""
        return codes if self.code_block is None else codes.unflatten(-1, (-1, self.code_block))

    def encode_codes(self, codes: torch.Tensor) -> torch.Tensor:
        """Return uint8 ``codes``, of a weight or of some of its elements, in ``code_dtype``."""
        return codes.view(self.code_dtype)

    def encode_scales(self, storage: QuantizedStorage) -> dict[str, torch.Tensor]:
        """Return the stored tensors other than the codes; ``storage`` need not have codes."""
        plane, numerics = storage.planes[0], storage.recipe.numerics
        scales = without_padding(plane, storage.buffers[plane.scales_name])
        encoded = {self.scales: self.encode_scale_values(scales.contiguous())}
        if self.scale_shape is not None:
            encoded[self.scales] = encoded[self.scales].reshape(self.scale_shape)
        if self.tensor_scale is not None:
            assert isinstance(numerics, NVFP4Numerics)
            amax = storage.buffers["amax"]
            scale = self.tensor_scale.of(amax, numerics.scale_max)
            encoded[self.tensor_scale.name] = scale.reshape(self.tensor_scale.shape)
        return encoded

    def encode_scale_values(self, scales: torch.Tensor) -> torch.Tensor:
        """Return contiguous block ``scales`` in ``scale_dtype``."""
        if self._stores_exponents:
            scales = (scales.view(torch.int32) >> 23).to(torch.uint8)
        return scales.view(self.scale_dtype)

    def shape_of(self, tensors: Mapping[str, torch.Tensor]) -> torch.Size:
        """Return the shape of the weight stored as ``tensors``, which may be on the meta device.

        Raises:
            InputError: if a tensor is missing, or its shape or dtype is not that of this dialect.
        """
        missing = [name for name in self.names if name not in tensors]
        if missing:
            raise InputError(
                f"a weight of {self.name} is stored as {', '.join(self.names)}, got "
                f"{', '.join(tensors) or 'nothing'}; {', '.join(missing)} is missing."
            )
        codes, numerics = tensors[self.codes], self.recipe.numerics
        if self.code_block is not None and codes.dim() > 2:
            codes = codes.flatten(-2)
        if codes.dim() < 2 or (codes.dim() > 2 and not self.fuses_experts):
            raise InputError(
                f"{self.codes} of {self.name} must be a matrix, got shape {list(codes.shape)}."
            )
        *rows, columns = codes.shape
        if self.code_block is not None and columns % self.code_block:
            raise InputError(
                f"{self.codes} of {self.name} must be in blocks of {self.code_block} bytes, got "
                f"shape {list(tensors[self.codes].shape)}."
            )
        shape = torch.Size((*rows, columns * (8 * codes.itemsize // numerics.fmt.bits)))
        if max(shape) >= 2**31:
            raise InputError(
                f"{self.codes} of {self.name} must have dimensions below 2^31, got shape "
                f"{list(codes.shape)}."
            )
        meta = torch.device("meta")
        empty = QuantizedStorage.empty(shape, torch.bfloat16, self.recipe, meta, columnwise=False)
        # Expected shapes come from the meta device: a tensor with empty rows may have many scales,
        # which must not be allocated before the given ones are checked.
        for name, like in self.encode(empty).items():
            given = tensors[name]
            if (given.shape, given.dtype) != (like.shape, like.dtype):
                raise InputError(
                    f"{name} of {self.name} must be {like.dtype} {list(like.shape)} beside codes "
                    f"of shape {list(codes.shape)}, got {given.dtype} {list(given.shape)}."
                )
        return shape

    def decode(
        self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16
    ) -> QuantizedTensor:
        """Return the weight stored as ``tensors``, of :attr:`recipe`, without a columnwise copy.

        Args:
            tensors: the stored tensors by :attr:`names`, as :meth:`encode` returns them.
            dtype: the nominal dtype of the weight.

        Raises:
            InputError: as :meth:`shape_of`.
        """
        shape, numerics = self.shape_of(tensors), self.recipe.numerics
        codes = tensors[self.codes]
        if self.code_block is not None and codes.dim() > 2:
            codes = codes.flatten(-2)
        made = QuantizedStorage.empty(shape, dtype, self.recipe, codes.device, columnwise=False)
        plane, buffers = made.planes[0], made.buffers
        buffers[plane.codes_name].copy_(codes.view(torch.uint8))
        scales = without_padding(plane, buffers[plane.scales_name])
        if self._stores_exponents:
            given = decode_e8m0(tensors[self.scales].view(torch.uint8))
        else:
            given = tensors[self.scales].view(scales.dtype)
        scales.copy_(given.reshape(scales.shape))
        if isinstance(numerics, NVFP4Numerics) and numerics.one_level:
            buffers["amax"].fill_(numerics.one_level_amax)
        if self.tensor_scale is not None:
            assert isinstance(numerics, NVFP4Numerics)
            if scales.any():  # else the amax stays 0, as allocated
                scale = tensors[self.tensor_scale.name].reshape(1)
                buffers["amax"].copy_(self.tensor_scale.amax(scale, numerics.scale_max, dtype))
        return QuantizedTensor(checked_storage(shape, dtype, self.recipe, buffers))


def stored_name(parameter: str, part: str) -> str:
    """Return the name in a checkpoint of the tensor ``part`` of ``parameter``."""
    if part.startswith("_"):
        return parameter + part
    module = parameter.rpartition(".")[0]
    return f"{module}.{part}" if module else part


def _scale_rows_and_columns(plane: Plane) -> tuple[int, int]:
    return plane.scales.rows, plane.scales.cols


def without_padding(plane: Plane, scales: torch.Tensor) -> torch.Tensor:
    """Return the view [..., rows, columns] of stored ``scales`` without padding or transposition;
    they are of a matrix or of a stack.
    """
    stack = scales.shape[: scales.dim() - len(plane.scale_shape)]
    stored = scales.view(*stack, *plane.scales.shape)
    matrix = stored.mT if plane.scales.transposed else stored
    rows, columns = _scale_rows_and_columns(plane)
    return matrix[..., :rows, :columns]
