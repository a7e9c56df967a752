"""Dialects: how the checkpoints that servers load name, shape and encode a quantized weight.

A server reads the codes of a matrix [M, K] row by row, under scales along K. So a dialect stores
the rowwise plane of a weight: its codes as they are, and its scales without what pads or transposes
them. Only NVFP4's tensor scale is computed from something, the tensor amax. The table of them is in
:mod:`zerocast.export.known_dialects`.
"""

import contextlib
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from zerocast.errors import InputError
from zerocast.layout import Plane
from zerocast.numerics import FLT_MAX, NVFP4Numerics, decode_e8m0
from zerocast.recipes import Recipe
from zerocast.tensors import QuantizedStorage, QuantizedTensor
from zerocast.tensors.saved_storage import checked_storage

Section = dict[str, Any]
"""The ``quantization_config`` of a ``config.json``."""

LINEAR, EXPERTS, HEADS = "of a linear layer", "of experts", "of an output layer"
"""Kinds of weights, as a message says it: servers have readers of their own for each."""


@dataclass(frozen=True)
class TensorScale:
    """NVFP4's FP32 scale of the tensor, ``X.<name>`` of a module ``X``.

    Attributes:
        name: what it is called.
        inverted: whether it is ``6 * scale_max / amax``, of shape [1], by which a scale of a block
            is divided; else ``amax / (6 * scale_max)``, of shape [], by which it is multiplied.
    """

    name: str
    inverted: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that it is stored in."""
        return (1,) if self.inverted else ()

    def of(self, amax: torch.Tensor, scale_max: int) -> torch.Tensor:
        """Return the scales of the tensor amaxes ``amax``, FP32. An amax of 0 has the inverse 1."""
        if not self.inverted:
            return amax / (6 * scale_max)
        scale = _quotient(6 * scale_max, amax).clamp(max=FLT_MAX)
        return torch.where(amax == 0, torch.ones_like(amax), scale)

    def amax(
        self, scale: torch.Tensor, scale_max: int, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return tensor amaxes, FP32, of which :meth:`of` makes the scales ``scale``; the nearest
        ones where there are none. Of several, one that is a value of ``dtype``, as the amax of a
        weight of that dtype is.
        """
        largest = 6 * scale_max
        nearest = _quotient(largest, scale) if self.inverted else scale * largest
        amax = nearest
        for candidate in (
            torch.nextafter(nearest, torch.zeros_like(nearest)),
            torch.nextafter(nearest, torch.full_like(nearest, torch.inf)),
            nearest,
            nearest.to(dtype).float(),
        ):
            amax = torch.where(self.of(candidate, scale_max) == scale, candidate, amax)
        return amax


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How one kind of checkpoint holds the quantized weight of a module ``X``.

    Names of tensors that begin with ``_`` are put behind that of the parameter instead:
    ``X.weight_blocks``, or of experts in one parameter ``X.down_proj_blocks``.

    Attributes:
        name: what users call it.
        recipe: the scheme by which masters are cast for it.
        codes: ``X.<codes>`` are the codes: [M, K / 2], two of 4 bits a byte, the first one in the
            low half; or [M, K] of 8 bits.
        code_dtype: their dtype, a byte each.
        code_block: bytes of a block of codes, which are then stored as [M, K / block, bytes]; None
            where they are not.
        scales: ``X.<scales>`` are the scales of the blocks.
        scale_dtype: their dtype; float8_e8m0fnu where they are powers of two, whose exponents are
            stored.
        scale_shape: their shape where the tensor has one scale: [1] or []; [-1] where they are one
            row; None where they are [blocks down a column, blocks along a row].
        tensor_scale: NVFP4's scale of the tensor; None for other formats.
        section: the ``quantization_config`` of ``config.json``, without the modules whose weights
            stay unquantized.
        unquantized_key: under which it names those.
        reads: the kinds of weights whose codes servers read from it: LINEAR, EXPERTS, HEADS.
        input_scale: ``X.<input_scale>`` is the static scale of the inputs of ``X``, FP32 [], which
            the caller gives; None where servers scale inputs as they come.
        also_in_config: what ``config.json`` has of it beside the section.
        fuses_experts: whether a stack [..., M, K] is stored in one tensor, behind its leading
            dimensions, and the matrices of a model that has them as [K, M] are turned for it; else
            each projection of each expert is a weight of its own.
        by_name: the dialects of weights that are stored otherwise in the same checkpoint, each
            behind a pattern with ``*`` that the names of these match and those of all others do
            not; the section is that of the whole.
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
        """Return how the checkpoint has the parameter, or the tensor of one, ``name``."""
        found = (other for like, other in self.by_name if fnmatch.fnmatchcase(name, like))
        return next(found, self)

    @property
    def names(self) -> tuple[str, ...]:
        """The last parts of the names of the tensors that hold one weight."""
        tensor_scale = () if self.tensor_scale is None else (self.tensor_scale.name,)
        return self.codes, self.scales, *tensor_scale

    @property
    def _stores_exponents(self) -> bool:
        """Whether FP32 scales, powers of two, are stored as their exponents."""
        is_float = self.recipe.numerics.scale_dtype == torch.float32
        return is_float and self.scale_dtype == torch.float8_e8m0fnu

    def parameter_of(self, name: str) -> tuple[str, str] | None:
        """Return the parameter whose weight the tensor ``name`` of a checkpoint is part of, and
        which of :attr:`names` it is; None where it is none.
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
        """Whether readers match each layer of the checkpoint by its own name or class, as those of
        compressed-tensors do; others build the experts of a module alike, by the module's name.
        """
        return self.section.get("quant_method") == "compressed-tensors"

    def quantization_config(self, unquantized: Sequence[str], heads: Sequence[str] = ()) -> Section:
        """Return the section for a model whose modules ``unquantized``, by their names, are not,
        and whose output layers ``heads`` are: vLLM's are not of the class Linear, so where layers
        are matched they are targets of their own.
        """
        section = {**self.section, self.unquantized_key: list(unquantized)}
        if heads and self.matches_layers:
            groups = section["config_groups"].items()
            section["config_groups"] = {
                name: {**group, "targets": [*group["targets"], *heads]} for name, group in groups
            }
        return section

    def has_section(self, given: Section) -> bool:
        """Say whether ``given`` is the section of this dialect, for whatever model."""
        heads: Sequence[str] = ()
        if self.matches_layers:
            with contextlib.suppress(LookupError, TypeError):
                heads = given["config_groups"]["group_0"]["targets"][1:]
        return {**given, self.unquantized_key: []} == self.quantization_config((), heads)

    def holds(self, recipe: Recipe, shape: Sequence[int]) -> bool:
        """Say whether the bytes of a weight [M, K] of ``recipe``, or of the matrices of a stack,
        can be stored as they are.
        """
        shape = shape[len(recipe.stack_of(shape)) :]
        own, given = self.recipe.numerics, recipe.numerics
        if (own.fmt, own.scale_dtype) != (given.fmt, given.scale_dtype) or len(shape) != 2:
            return False
        if getattr(own, "power_2_scale", False) and not getattr(given, "power_2_scale", False):
            return False
        own_plane, plane = (r.planes(shape, columnwise=False)[0] for r in (self.recipe, recipe))
        return _scale_rows_and_columns(own_plane) == _scale_rows_and_columns(plane)

    def encode(self, storage: QuantizedStorage) -> dict[str, torch.Tensor]:
        """Return what is stored of a weight that this dialect :meth:`holds`, by :attr:`names`;
        views of its buffers where that is possible.
        """
        codes = storage.buffers[storage.planes[0].codes_name]
        return {
            self.codes: self.shaped_codes(self.encode_codes(codes)),
            **self.encode_scales(storage),
        }

    def shaped_codes(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the stored codes of a whole weight, a row of bytes each, in blocks where it has
        such.
        """
        return codes if self.code_block is None else codes.unflatten(-1, (-1, self.code_block))

    def encode_codes(self, codes: torch.Tensor) -> torch.Tensor:
        """Return ``codes``, uint8, those of a weight or of some of its elements, as stored."""
        return codes.view(self.code_dtype)

    def encode_scales(self, storage: QuantizedStorage) -> dict[str, torch.Tensor]:
        """Return what is stored of a weight beside its codes, which it need not hold."""
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
        """Return ``scales`` of blocks, contiguous, as stored."""
        if self._stores_exponents:
            scales = (scales.view(torch.int32) >> 23).to(torch.uint8)
        return scales.view(self.scale_dtype)

    def decode(
        self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16
    ) -> QuantizedTensor:
        """Return the weight that is stored as ``tensors``, by :attr:`names`: of :attr:`recipe`,
        without a columnwise copy.

        Args:
            tensors: as :meth:`encode` returns them.
            dtype: the weight's nominal one.

        Raises:
            InputError: where a tensor is missing, or of another shape or dtype than this dialect
                has.
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
        shape = torch.Size((*rows, columns * (8 // numerics.fmt.bits)))
        if max(shape) >= 2**31:
            raise InputError(
                f"{self.codes} of {self.name} must have dimensions below 2^31, got shape "
                f"{list(codes.shape)}."
            )
        make = partial(QuantizedStorage.empty, shape, dtype, self.recipe, columnwise=False)
        # Scales that are not given take no memory: rows without elements can be any number.
        for name, like in self.encode(make(torch.device("meta"))).items():
            given = tensors[name]
            if (given.shape, given.dtype) != (like.shape, like.dtype):
                raise InputError(
                    f"{name} of {self.name} must be {like.dtype} {list(like.shape)} beside codes "
                    f"of shape {list(codes.shape)}, got {given.dtype} {list(given.shape)}."
                )
        made = make(codes.device)
        plane, buffers = made.planes[0], made.buffers
        buffers[plane.codes_name].copy_(codes.view(torch.uint8))
        scales = without_padding(plane, buffers[plane.scales_name])
        if self._stores_exponents:
            given = decode_e8m0(tensors[self.scales].view(torch.uint8))
        else:
            given = tensors[self.scales].view(scales.dtype)
        scales.copy_(given.reshape(scales.shape))
        if self.tensor_scale is not None:
            assert isinstance(numerics, NVFP4Numerics)
            if scales.any():  # else the tensor is 0, as it was made
                scale = tensors[self.tensor_scale.name].reshape(1)
                buffers["amax"].copy_(self.tensor_scale.amax(scale, numerics.scale_max, dtype))
        return QuantizedTensor(checked_storage(shape, dtype, self.recipe, buffers))


def stored_name(parameter: str, part: str) -> str:
    """Return the name, in a checkpoint, of the tensor ``part`` of a ``parameter``."""
    if part.startswith("_"):
        return parameter + part
    module = parameter.rpartition(".")[0]
    return f"{module}.{part}" if module else part


def _scale_rows_and_columns(plane: Plane) -> tuple[int, int]:
    return plane.scales.rows, plane.scales.cols


def without_padding(plane: Plane, scales: torch.Tensor) -> torch.Tensor:
    """Return the view [..., rows, columns] of the stored ``scales``, of a matrix or of those of a
    stack, that belong to blocks.
    """
    stack = scales.shape[: scales.dim() - len(plane.scale_shape)]
    stored = scales.view(*stack, *plane.scales.shape)
    matrix = stored.mT if plane.scales.transposed else stored
    rows, columns = _scale_rows_and_columns(plane)
    return matrix[..., :rows, :columns]


def _quotient(number: int, by: torch.Tensor) -> torch.Tensor:
    """Return ``number / by``, rounded once; torch's operator multiplies by a rounded inverse."""
    return torch.full_like(by, number) / by
