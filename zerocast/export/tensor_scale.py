"""TensorScale: how a dialect stores NVFP4's tensor amax, as a scale of the tensor."""

from dataclasses import dataclass

import torch

from zerocast.numerics import FLT_MAX


@dataclass(frozen=True)
class TensorScale:
    """NVFP4's FP32 tensor scale, stored as ``X.<name>`` for a module ``X``.

    Attributes:
        name: the last part of the tensor's name.
        inverted: True for ``6 * scale_max / amax``, shape [1], by which block scales are divided;
            False for ``amax / (6 * scale_max)``, shape [], by which they are multiplied.
    """

    name: str
    inverted: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stored scale."""
        return (1,) if self.inverted else ()

    def of(self, amax: torch.Tensor, scale_max: int) -> torch.Tensor:
        """Return the FP32 scales for tensor amaxes. The inverted scale of amax 0 is 1."""
        if not self.inverted:
            return amax / (6 * scale_max)
        scale = _quotient(6 * scale_max, amax).clamp(max=FLT_MAX)
        return torch.where(amax == 0, torch.ones_like(amax), scale)

    def amax(
        self, scale: torch.Tensor, scale_max: int, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return FP32 tensor amaxes that :meth:`of` maps to ``scale``; the nearest if none exists.

        If several exist, one that ``dtype`` can represent is preferred, since the amax of a weight
        of that dtype is such a value.
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


def _quotient(number: int, by: torch.Tensor) -> torch.Tensor:
    """Return ``number / by``, rounded once; torch's ``number / by`` multiplies by a rounded
    inverse.
    """
    return torch.full_like(by, number) / by
