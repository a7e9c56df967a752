"""Dialects: how the checkpoints that servers load name, shape and encode a quantized weight.

A server reads the codes of a matrix [M, K] row by row, under scales along K. So a dialect stores
the rowwise plane of a weight: its codes as they are, and its scales without what pads or transposes
them. Only NVFP4's tensor scale is computed from something, the tensor amax.

The sources of names, shapes and formulas are compressed-tensors 0.20 (``compressors/``), NVIDIA's
ModelOpt 0.47 (``torch/export``), and the checkpoints of DeepSeek-V3 and V3.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerocast.errors import InputError
from zerocast.export.tensor_scale import TensorScale
from zerocast.formats import E2M1
from zerocast.layout import Plane
from zerocast.numerics import NVFP4Numerics
from zerocast.recipes import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from zerocast.tensors import QuantizedStorage, QuantizedTensor
from zerocast.tensors.saved import checked_storage

Section = dict[str, Any]
"""The ``quantization_config`` of a ``config.json``."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How one kind of checkpoint holds the quantized weight of a module ``X``.

    Attributes:
        name: what users call it.
        recipe: the scheme by which masters are cast for it.
        codes: ``X.<codes>`` are the codes: uint8 [M, K / 2], two of 4 bits a byte, the first one in
            the low half; or float8_e4m3fn [M, K].
        scales: ``X.<scales>`` are the scales of the blocks.
        scale_dtype: their dtype.
        scale_shape: their shape where the tensor has one scale: [1] or []; None where they are
            [blocks down a column, blocks along a row].
        tensor_scale: NVFP4's scale of the tensor; None for other formats.
        section: the ``quantization_config`` of ``config.json``, without the modules whose weights
            stay unquantized.
        unquantized_key: under which it names those.
    """

    name: str
    recipe: Recipe
    codes: str = "weight"
    scales: str = "weight_scale"
    scale_dtype: torch.dtype = torch.float32
    scale_shape: tuple[int, ...] | None = None
    tensor_scale: TensorScale | None = None
    section: Section
    unquantized_key: str = "ignore"

    @property
    def names(self) -> tuple[str, ...]:
        """The last parts of the names of the tensors that hold one weight."""
        tensor_scale = () if self.tensor_scale is None else (self.tensor_scale.name,)
        return self.codes, self.scales, *tensor_scale

    def quantization_config(self, unquantized: Sequence[str]) -> Section:
        """Return the section for a model whose modules ``unquantized``, by their names, are not."""
        return {**self.section, self.unquantized_key: list(unquantized)}

    def holds(self, recipe: Recipe, shape: Sequence[int]) -> bool:
        """Say whether the bytes of a weight [M, K] of ``recipe`` can be stored as they are."""
        own, given = self.recipe.numerics, recipe.numerics
        if (own.fmt, own.scale_dtype) != (given.fmt, given.scale_dtype) or len(shape) != 2:
            return False
        if getattr(own, "power_2_scale", False) and not getattr(given, "power_2_scale", False):
            return False
        return _scale_rows_and_columns(_rowwise(recipe, shape)) == _scale_rows_and_columns(
            _rowwise(self.recipe, shape)
        )

    def encode(self, storage: QuantizedStorage) -> dict[str, torch.Tensor]:
        """Return what is stored of a weight that this dialect :meth:`holds`, by :attr:`names`;
        views of its buffers where that is possible.
        """
        codes = storage.buffers[storage.planes[0].codes_name]
        return {self.codes: self.encode_codes(codes), **self.encode_scales(storage)}

    def encode_codes(self, codes: torch.Tensor) -> torch.Tensor:
        """Return ``codes``, uint8, those of a weight or of some of its elements, as stored."""
        is_packed = self.recipe.numerics.fmt is E2M1
        return codes if is_packed else codes.view(torch.float8_e4m3fn)

    def encode_scales(self, storage: QuantizedStorage) -> dict[str, torch.Tensor]:
        """Return what is stored of a weight beside its codes, which it need not hold."""
        plane, numerics = storage.planes[0], storage.recipe.numerics
        scales = _without_padding(plane, storage.buffers[plane.scales_name])
        encoded = {self.scales: scales.contiguous().view(self.scale_dtype)}
        if self.scale_shape is not None:
            encoded[self.scales] = encoded[self.scales].reshape(self.scale_shape)
        if self.tensor_scale is not None:
            assert isinstance(numerics, NVFP4Numerics)
            amax = storage.buffers["amax"]
            scale = self.tensor_scale.of(amax, numerics.scale_max)
            encoded[self.tensor_scale.name] = scale.reshape(self.tensor_scale.shape)
        return encoded

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
        if codes.dim() != 2:
            raise InputError(
                f"{self.codes} of {self.name} must be a matrix, got shape {list(codes.shape)}."
            )
        rows, columns = codes.shape
        shape = torch.Size((rows, columns * (8 // numerics.fmt.bits)))
        plane = _rowwise(self.recipe, shape)
        buffers = {
            name: spec.allocate(codes.device)
            for name, spec in self.recipe.buffers(shape, columnwise=False).items()
        }
        encoded = self.encode(QuantizedStorage(shape, dtype, self.recipe, buffers))
        for name, like in encoded.items():
            given = tensors[name]
            if (given.shape, given.dtype) != (like.shape, like.dtype):
                raise InputError(
                    f"{name} of {self.name} must be {like.dtype} {list(like.shape)} beside codes "
                    f"of shape {list(codes.shape)}, got {given.dtype} {list(given.shape)}."
                )
        buffers[plane.codes_name].copy_(codes.view(torch.uint8))
        scales = _without_padding(plane, buffers[plane.scales_name])
        scales.copy_(tensors[self.scales].view(scales.dtype).reshape(scales.shape))
        if self.tensor_scale is not None:
            assert isinstance(numerics, NVFP4Numerics)
            if scales.any():  # else the tensor is 0, as it was made
                scale = tensors[self.tensor_scale.name].reshape(1)
                buffers["amax"].copy_(self.tensor_scale.amax(scale, numerics.scale_max, dtype))
        return QuantizedTensor(checked_storage(shape, dtype, self.recipe, buffers))


def _rowwise(recipe: Recipe, shape: Sequence[int]) -> Plane:
    return recipe.planes(shape, columnwise=False)[0]


def _scale_rows_and_columns(plane: Plane) -> tuple[int, int]:
    return plane.scales.rows, plane.scales.cols


def _without_padding(plane: Plane, scales: torch.Tensor) -> torch.Tensor:
    """Return the view [rows, columns] of the stored ``scales`` that belong to blocks."""
    stored = scales.view(plane.scales.shape)
    matrix = stored.t() if plane.scales.transposed else stored
    rows, columns = _scale_rows_and_columns(plane)
    return matrix[:rows, :columns]


# --- the sections of config.json ---


def _arguments(bits: int, strategy: str, **others: Any) -> Section:
    """Return one ``QuantizationArgs`` of compressed-tensors."""
    given = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy}
    return {**given, "dynamic": False, **others}


def _compressed_tensors(fmt: str, **arguments: Section) -> Section:
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": fmt,
        "config_groups": {"group_0": {"targets": ["Linear"], "format": fmt, **arguments}},
    }


def _modelopt(algorithm: str, **arguments: Section) -> Section:
    given = {name: {"dynamic": False, "type": "float", **a} for name, a in arguments.items()}
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "config_groups": {"group_0": {**given, "targets": ["Linear"]}},
    }


_DEEPSEEK = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}

_PER_TOKEN = _arguments(8, "token", dynamic=True)
_NVFP4 = NVFP4BlockScaling(disable_2d_quantization=True, disable_stochastic_rounding=True)
_MXFP8 = MXFP8BlockScaling()
_ANY_BLOCK_SCALE = Float8BlockScaling(use_f32_scales=True)
_E8M0_SCALES = {"group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
_E4M3_SCALES = {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}

DIALECTS = {
    dialect.name: dialect
    for dialect in (
        Dialect(
            name="compressed-tensors/nvfp4",
            recipe=_NVFP4,
            codes="weight_packed",
            scale_dtype=torch.float8_e4m3fn,
            tensor_scale=TensorScale("weight_global_scale", inverted=True),
            section=_compressed_tensors(
                "nvfp4-pack-quantized",
                weights=_arguments(4, "tensor_group", group_size=16, **_E4M3_SCALES),
            ),
        ),
        Dialect(
            name="compressed-tensors/fp8-tensor",
            recipe=Float8CurrentScaling(fp8_format="e4m3"),
            scale_shape=(1,),
            section=_compressed_tensors(
                "float-quantized", weights=_arguments(8, "tensor"), input_activations=_PER_TOKEN
            ),
        ),
        Dialect(
            name="compressed-tensors/fp8-channel",
            recipe=Float8RowwiseScaling(fp8_format="e4m3"),
            section=_compressed_tensors(
                "float-quantized", weights=_arguments(8, "channel"), input_activations=_PER_TOKEN
            ),
        ),
        Dialect(
            name="compressed-tensors/fp8-block",
            recipe=_ANY_BLOCK_SCALE,
            section=_compressed_tensors(
                "float-quantized",
                weights=_arguments(8, "block", block_structure=[128, 128]),
                input_activations=_arguments(8, "group", dynamic=True, group_size=128),
            ),
        ),
        Dialect(
            name="compressed-tensors/mxfp8",
            recipe=_MXFP8,
            scale_dtype=torch.uint8,
            section=_compressed_tensors(
                "mxfp8-quantized",
                weights=_arguments(8, "group", **_E8M0_SCALES),
                input_activations=_arguments(8, "group", **_E8M0_SCALES, dynamic=True),
            ),
        ),
        Dialect(
            name="modelopt/nvfp4",
            recipe=_NVFP4,
            scale_dtype=torch.float8_e4m3fn,
            tensor_scale=TensorScale("weight_scale_2", inverted=False),
            section=_modelopt("W4A16_NVFP4", weights={"num_bits": 4, "group_size": 16}),
        ),
        Dialect(
            name="modelopt/mxfp8",
            recipe=_MXFP8,
            scale_dtype=torch.uint8,
            section=_modelopt(
                "MXFP8",
                weights={"num_bits": 8, "group_size": 32},
                input_activations={"num_bits": 8, "group_size": 32},
            ),
        ),
        Dialect(
            name="deepseek/fp8",
            recipe=_ANY_BLOCK_SCALE,
            scales="weight_scale_inv",
            section=_DEEPSEEK,
            unquantized_key="modules_to_not_convert",
        ),
        Dialect(
            name="deepseek/fp8-ue8m0",
            recipe=Float8BlockScaling(),
            scales="weight_scale_inv",
            section={**_DEEPSEEK, "scale_fmt": "ue8m0"},
            unquantized_key="modules_to_not_convert",
        ),
    )
}
"""Every dialect by its name."""


def as_dialect(dialect: Dialect | str) -> Dialect:
    """Return the dialect that ``dialect`` is or names.

    Raises:
        InputError: where there is none.
    """
    if isinstance(dialect, Dialect):
        return dialect
    if not isinstance(dialect, str) or dialect not in DIALECTS:
        raise InputError(
            f"dialect must be one of {', '.join(DIALECTS)}, or a zerocast.export.Dialect, got "
            f"{dialect!r}."
        )
    return DIALECTS[dialect]
