"""CountingBackend: counts launches, and computes nothing.

It gets the operands of a cast like every backend, so it counts the launches of a real backend: one
for all weights of a recipe.
"""

from collections import Counter

from zerocast.backends import CpuBackend, CudaBackend, ReferenceBackend
from zerocast.numerics import Launch, Masters, Numerics, Operands, TensorOperand

BACKENDS: dict[str, type[CpuBackend | CudaBackend]] = {"cpu": CpuBackend, "cuda": CudaBackend}
"""The backends whose launches can be counted."""


class CountingBackend(ReferenceBackend):
    """A backend whose cast operations only count.

    Args:
        name: one of :data:`BACKENDS`; it determines whether masters are read once or twice.

    Attributes:
        step: the name of the current step.
        launches: the number of launches of each step, by name.
    """

    def __init__(self, name: str) -> None:
        self.name, self.reads_once = name, BACKENDS[name].reads_once  # type: ignore[method-assign]
        self.step, self.launches = "", Counter[str]()

    def partial_amax(
        self, operands: Operands, masters: Masters, numerics: Numerics | None = None
    ) -> Launch:
        shards = _held(operands)
        if self.name == "cuda" and numerics is not None and any(each.whole for each in shards):
            # Elements outside of whole blocks take an additional launch.
            return self._launch(shards, 1 + any(map(_left, shards)))
        return self._launch(shards)

    def partial_select(self, numerics: Numerics, operands: Operands, masters: Masters) -> Launch:
        return self._launch(_held(operands))

    def select(self, numerics: Numerics, operands: Operands) -> Launch:
        return self._launch([e for e in operands if e.candidates and e.candidates.cut.numel()])

    def compute_scale(self, numerics: Numerics, operands: Operands) -> Launch:
        return self._launch([each for each in operands if each.grid.numel])

    def expand_scales(self, numerics: Numerics, operands: Operands) -> Launch:
        return self._launch(operands)

    def partial_cast(self, numerics: Numerics, operands: Operands, masters: Masters) -> Launch:
        shards = _held(operands)
        return self._launch([e for e in shards if self.name != "cuda" or _left(e)])

    def transpose(self, numerics: Numerics, operands: Operands) -> Launch:
        return self._launch(operands)

    def _launch(self, operands: Operands, launches: int = 1) -> Launch:
        if not operands:
            return lambda: None
        return lambda: self.launches.update({self.step: launches})


def _held(operands: Operands) -> list[TensorOperand]:
    """Return the operands of which this rank owns elements."""
    return [each for each in operands if each.extent]


def _left(operand: TensorOperand) -> int:
    """Return the number of elements that are not measured and cast in one pass."""
    return operand.extent.size - operand.whole.size
