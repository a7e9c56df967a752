"""CountingBackend: counts launches, and the bytes that they would read and write, and computes
nothing.

It gets the operands of a cast like every backend, so it counts the launches of a real backend: one
for all weights of a recipe. Bytes are those of the operands, each read or written once.
"""

from dataclasses import dataclass

import torch

from zerocast.backends import CpuBackend, CudaBackend, ReferenceBackend
from zerocast.numerics import Launch, Masters, Numerics, Operands, TensorOperand

BACKENDS: dict[str, type[CpuBackend | CudaBackend]] = {"cpu": CpuBackend, "cuda": CudaBackend}
"""The backends whose launches can be counted."""


@dataclass(slots=True)
class Work:
    """A sum over launches.

    Attributes:
        launches: the number of launches.
        nbytes: the bytes that they read and write.
    """

    launches: int = 0
    nbytes: int = 0


class CountingBackend(ReferenceBackend):
    """A backend whose cast operations only count.

    Args:
        name: one of :data:`BACKENDS`; it determines whether masters are read once or twice.

    Attributes:
        step: the name of the current step.
        work: the sum of the launches of each step, by name.
    """

    def __init__(self, name: str) -> None:
        self.name, self.reads_once = name, BACKENDS[name].reads_once  # type: ignore[method-assign]
        self.step, self.work = "", dict[str, Work]()

    def partial_amax(
        self, operands: Operands, masters: Masters, numerics: Numerics | None = None
    ) -> Launch:
        shards = _held(operands)
        if numerics is None or not any(each.whole for each in shards):
            nbytes = sum(_master_bytes(each, masters) + _amax_bytes(each) for each in shards)
            return self._launch(shards, nbytes)
        nbytes = sum(
            _master_bytes(each, masters)
            + _amax_bytes(each)
            + _code_bytes(each, numerics, each.whole.size)
            for each in shards
        )
        # On CUDA, elements outside of whole blocks take an additional launch of partial_amax.
        kernels = any(each.whole for each in shards) + any(map(_left, shards))
        return self._launch(shards, nbytes, kernels if self.name == "cuda" else 1)

    def partial_select(self, numerics: Numerics, operands: Operands, masters: Masters) -> Launch:
        shards = _held(operands)
        nbytes = sum(
            _master_bytes(each, masters)
            + _choice_bytes(each)
            + _code_bytes(each, numerics, each.whole.size)
            for each in shards
        )
        return self._launch(shards, nbytes)

    def select(self, numerics: Numerics, operands: Operands) -> Launch:
        chosen = [each for each in operands if each.candidates and each.candidates.cut.numel()]
        return self._launch(chosen, sum(map(_choice_bytes, chosen)))

    def compute_scale(self, numerics: Numerics, operands: Operands) -> Launch:
        scaled = [each for each in operands if each.grid.numel]
        made = [plane.scale_inv for each in scaled for plane in each.scaled_planes]
        nbytes = _nbytes(*made) + sum(map(_amax_bytes, scaled))
        return self._launch(scaled, nbytes)

    def expand_scales(self, numerics: Numerics, operands: Operands) -> Launch:
        planes = [plane for each in operands for plane in each.planes]
        nbytes = sum(_nbytes(plane.compact, plane.scale_inv) for plane in planes)
        return self._launch(operands, nbytes)

    def partial_cast(self, numerics: Numerics, operands: Operands, masters: Masters) -> Launch:
        shards, nbytes = _held(operands), 0
        if self.name == "cuda":
            shards = [each for each in shards if _left(each)]
        for each in shards:
            left = _left(each)
            nbytes += _master_bytes(each, masters) * left // each.extent.size
            nbytes += _code_bytes(each, numerics, left)
        return self._launch(shards, nbytes)

    def transpose(self, numerics: Numerics, operands: Operands) -> Launch:
        planes = [plane for each in operands for plane in each.planes]
        nbytes = sum(_nbytes(plane.codes, plane.scale_inv) for plane in planes)
        return self._launch(operands, nbytes)

    def _launch(self, operands: Operands, nbytes: int, launches: int = 1) -> Launch:
        if not operands:
            return lambda: None

        def launch() -> None:
            work = self.work.setdefault(self.step, Work())
            work.launches += launches
            work.nbytes += nbytes

        return launch


def _held(operands: Operands) -> list[TensorOperand]:
    """Return the operands of which this rank owns elements."""
    return [each for each in operands if each.extent]


def _left(operand: TensorOperand) -> int:
    """Return the number of elements that are not measured and cast in one pass."""
    return operand.extent.size - operand.whole.size


def _nbytes(*buffers: torch.Tensor | None) -> int:
    return sum(buffer.nbytes for buffer in buffers if buffer is not None)


def _master_bytes(operand: TensorOperand, masters: Masters) -> int:
    return _nbytes(masters.tensors[operand.slot])


def _amax_bytes(operand: TensorOperand) -> int:
    return _nbytes(*(plane.block_amax for plane in operand.cast_planes))


def _code_bytes(operand: TensorOperand, numerics: Numerics, elements: int) -> int:
    return len(operand.cast_planes) * (elements * numerics.fmt.bits // 8)


def _choice_bytes(operand: TensorOperand) -> int:
    candidates = operand.candidates
    assert candidates is not None
    return _nbytes(candidates.choices, candidates.row_errors, candidates.elements)
