"""FP8 with one scale a tensor, made from the amaxes of earlier casts ("delayed scaling").

The scale is known before the data, so one pass over the data casts it and takes its amax, and other
work can overlap the reduction of that amax. In return it needs state: each tensor has a history of
amaxes. The numerics is :class:`zerocast.numerics.Float8DelayedNumerics`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from zerocast.arguments import check_integer
from zerocast.errors import InputError
from zerocast.layout import FULL, Source
from zerocast.numerics import Float8DelayedNumerics
from zerocast.recipes.format import Format, replace_fields
from zerocast.recipes.recipe import Buffers, BufferSpec, Recipe, fixed

AmaxAlgorithm = Callable[[torch.Tensor], torch.Tensor]
"""A function of an amax history, FP32 [history length], newest first and 0 where there is none yet,
that returns one FP32 amax."""

MAX_MARGIN = 100
"""Any larger, and 448 * 2^-margin comes near the ends of FP32."""


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(Recipe):
    """FP8 weights under one FP32 scale a tensor; N-D weights are served, as one tensor or with
    ``per_matrix`` as a stack.

    Stored are ``rowwise_data`` uint8 in the weight's shape, ``rowwise_scale_inv`` FP32 [1], as a
    derived copy ``columnwise_data`` uint8 [K, product of the leading dimensions], and the state,
    all FP32: ``scale`` [1] for the next cast, ``cast_scale`` [1] and ``amax`` [1] of the latest
    one, ``amax_history`` [amax_history_len], newest first.

    Attributes:
        margin: the number of powers of two that the scale keeps below the largest.
        fp8_format: a :class:`Format` or its name.
        amax_history_len: the number of amaxes that are kept.
        amax_compute_algo: which amax the history stands for: ``"max"``, ``"most_recent"``, or a
            function of the history.
        interval: must stay 1: every step makes a new scale.
        scaling_factor_compute_algo: must stay None: the scale is the format's largest value, less
            the margin, over the amax.
        override_linear_precision: must stay (False, False, False): all three products of a layer
            are quantized.
        reduce_amax: must stay True: the region says over which ranks amaxes are reduced.
    """

    scheme = "delayed"
    block = FULL, FULL
    columnwise_source = Source.ROWWISE
    state = ("scale", "cast_scale", "amax_history", "amax")
    scales_tensor = casts_before_reduction = True

    margin: int = 0
    fp8_format: Format | str = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | AmaxAlgorithm = "max"
    interval: int = fixed(1, "every step makes a new scale")
    scaling_factor_compute_algo: None = fixed(None, "the scale follows from amax and margin")
    override_linear_precision: tuple[bool, bool, bool] = fixed(
        (False, False, False), "all three products of a layer are quantized"
    )
    reduce_amax: bool = fixed(
        True,
        "the region says over which ranks amaxes are reduced; with autocast(amax_reduction_group="
        "zerocast.comm.SingleRank()) every rank uses its own",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        replace_fields(self, fp8_format=Format.of(self.fp8_format))
        check_integer("margin", self.margin, -MAX_MARGIN, MAX_MARGIN)
        check_integer("amax_history_len", self.amax_history_len, 1, 2**31 - 1)
        algorithm = self.amax_compute_algo
        if not callable(algorithm) and algorithm not in ("max", "most_recent"):
            raise InputError(
                f"amax_compute_algo must be 'max', 'most_recent' or a function of the amax "
                f"history, got {algorithm!r}."
            )

    @property
    def numerics(self) -> Float8DelayedNumerics:
        fmt = Format.of(self.fp8_format).forward
        return Float8DelayedNumerics(fmt, self.margin, self.amax_compute_algo)

    def of_activations(self, *, gradients: bool) -> dict[str, Any]:
        fmt = Format.of(self.fp8_format)
        return {"fp8_format": fmt.of_backward if gradients else fmt}

    def own_buffers(self) -> dict[str, BufferSpec]:
        return {
            "scale": BufferSpec((1,), torch.float32, 1.0),
            "cast_scale": BufferSpec((1,), torch.float32, 1.0),
            "amax_history": BufferSpec((self.amax_history_len,), torch.float32),
            "amax": BufferSpec((1,), torch.float32),
        }

    def rewind(self, buffers: Buffers) -> None:
        super().rewind(buffers)
        amax, history = buffers["amax"], buffers["amax_history"]
        # The latest cast added its amax unless that was zero or not finite. The oldest entry, which
        # it dropped, is not needed: the same cast drops it again.
        earlier = torch.cat((history[..., 1:], history[..., -1:]), dim=-1)
        history.copy_(torch.where(amax.isfinite() & (amax != 0), earlier, history))
