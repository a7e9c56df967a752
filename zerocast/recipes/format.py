"""Format and QParams: types of the fields of recipes, with the names that TransformerEngine gives
them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import get_args

import torch

from zerocast.arguments import check_choice, check_fields, shown
from zerocast.errors import InputError, UnsupportedError
from zerocast.numerics import E4M3, E5M2, FLT_MAX, NOMINALS, ElementFormat, ScaleFormula

NOMINAL_DTYPES = tuple(NOMINALS)
"""The dtypes that a quantized weight can present to torch."""


def check_nominal(what: str, dtype: object) -> torch.dtype:
    """Return ``dtype``, that of ``what``, if a quantized weight can present it; else raise."""
    if not isinstance(dtype, torch.dtype) or dtype not in NOMINAL_DTYPES:
        raise InputError(
            f"{what} must be of torch.float32, torch.bfloat16 or torch.float16, got "
            f"{shown(dtype)}; convert it first."
        )
    return dtype


class Format(str, Enum):
    """The FP8 formats of the tensors of forward and backward. A recipe takes a member or its name,
    in either case.
    """

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"
    """E4M3 in the forward pass, for its precision; E5M2 in the backward, for its range."""

    def __reduce_ex__(self, protocol: object) -> tuple[type[Format], tuple[str]]:
        """Pickle by value in every Python: some versions name ``getattr``, which ``torch.load``
        refuses where it reads ``weights_only``.
        """
        return Format, (self.value,)

    @property
    def forward(self) -> ElementFormat:
        """The element format of weights, inputs and outputs."""
        return E5M2 if self is Format.E5M2 else E4M3

    @property
    def of_backward(self) -> Format:
        """The member whose forward format is this one's for gradients."""
        return Format.E5M2 if self is Format.HYBRID else self

    @classmethod
    def of(cls, value: Format | str) -> Format:
        """Return the member that ``value`` is or names.

        Raises:
            InputError: where no member has that name.
        """
        if isinstance(value, cls):
            return value
        for member in cls:
            if isinstance(value, str) and value.lower() == member.value:
                return member
        names = [member.value for member in cls]
        raise InputError(f"fp8_format must be one of {names}, got {value!r}.")


@dataclass(frozen=True)
class QParams:
    """The options by which tensors of one kind are quantized. Every recipe lists which of these it
    supports, and refuses the others.

    Attributes:
        power_2_scale: round scales down to powers of two.
        amax_epsilon: a smaller amax is replaced by this one; FP32, not negative.
        scale_formula: ``"reciprocal"`` stores ``1 / (max / amax)``; ``"quotient"`` stores
            ``amax / max``, as some servers do; ``"inverse first"`` stores the same and multiplies
            by its reciprocal, ``1 / (amax / max)``.
        random_hadamard_transform: refused: it belongs to activations and gradients of NVFP4
            training and is not built here.
        stochastic_rounding: draw each code from its value's two neighbours, without bias.
        fp4_2d_quantization: blocks of 16x16 that serve both directions, in place of 1x16.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    scale_formula: ScaleFormula = "reciprocal"
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.random_hadamard_transform:
            refuse_hadamard("QParams(random_hadamard_transform=True)")
        if not 0 <= self.amax_epsilon <= FLT_MAX:
            raise InputError(
                f"amax_epsilon must be finite in FP32 and not negative, got {self.amax_epsilon}; 0 "
                f"keeps every amax as it is."
            )
        check_choice("scale_formula", self.scale_formula, get_args(ScaleFormula))

    @classmethod
    def check(cls, field: str, value: QParams, known: tuple[str, ...]) -> None:
        """Raise :class:`InputError` where the ``value`` of a recipe's ``field`` is not a QParams,
        or sets an option that is not in ``known``.
        """
        if not isinstance(value, cls):
            raise InputError(f"{field} must be a zerocast.recipes.QParams, got {shown(value)}.")
        for name, given in asdict(value).items():
            if name not in known and given != getattr(cls(), name):
                raise InputError(
                    f"{field} takes {' and '.join(known)}, got {name}={given!r}, which this recipe "
                    f"does not know; leave it out."
                )


def replace_fields(recipe: object, **values: object) -> None:
    """Store normalized values in the fields of a frozen recipe during its construction."""
    assert {f.name for f in fields(recipe)} >= set(values)  # type: ignore[arg-type]
    for name, value in values.items():
        object.__setattr__(recipe, name, value)


def refuse_hadamard(given: str) -> None:
    """Raise :class:`UnsupportedError`, which says why there is no random Hadamard transform."""
    raise UnsupportedError(
        f"the random Hadamard transform is not available, got {given}: it applies to activations "
        "and gradients of NVFP4 training, never to weights; leave it disabled (disable_rht=True)."
    )
