"""TensorScale: how a checkpoint holds what NVFP4 knows of the whole tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zerocast.formats import FLT_MAX


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


def _quotient(number: int, by: torch.Tensor) -> torch.Tensor:
    """Return ``number / by``, rounded once; torch's operator multiplies by a rounded inverse."""
    return torch.full_like(by, number) / by
