"""Ways in which the memory of masters, weights and gradients becomes another: rows of the table
"Moved memory" of docs/edges.md.

Training goes on as without the move: where the values matter, the move keeps them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

import zerocast
from tests.edges.ways import with_plain_weights
from tests.support.subjects import Subject
from zerocast.layout import Source

Move = Callable[[torch.Tensor], object]


def given(tensor: torch.Tensor) -> None:
    """``tensor.data = other``."""
    tensor.data = tensor.detach().clone()


def set_to(tensor: torch.Tensor) -> None:
    """``tensor.set_(other)``."""
    with torch.no_grad():
        tensor.set_(tensor.detach().clone())


def emptied(tensor: torch.Tensor) -> None:
    """``tensor.data = zeros``, where the values must not matter."""
    tensor.data = torch.zeros_like(tensor)


def set_to_zeros(tensor: torch.Tensor) -> None:
    """``tensor.set_(zeros)``."""
    tensor.set_(torch.zeros_like(tensor))


def swapped(tensor: torch.Tensor) -> None:
    """``torch.utils.swap_tensors`` with zeros."""
    torch.utils.swap_tensors(tensor, torch.zeros_like(tensor))


def moved(tensor: torch.Tensor) -> None:
    """The storage grows, and has its old size again."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    storage.resize_(16 * size)
    storage.resize_(size)


def shared(tensor: torch.Tensor) -> None:
    """To memory that child processes share."""
    tensor.detach().share_memory_()


def regrown(tensor: torch.Tensor) -> None:
    """Grown by its own method, which moves it, and back to its size."""
    tensor, shape = tensor.detach(), tensor.shape
    tensor.resize_(64 * shape.numel())
    tensor.resize_(shape)


def lost_and_found(tensor: torch.Tensor) -> None:
    """The memory is given back, and there is some again, as FSDP does."""
    storage = tensor.untyped_storage()
    size, first = storage.nbytes(), torch.zeros(1 << 16)
    storage.resize_(0)
    del first
    storage.resize_(size)


def given_back(tensor: torch.Tensor) -> None:
    """Without memory."""
    tensor.untyped_storage().resize_(0)


def cut_short(tensor: torch.Tensor) -> None:
    """Some elements less."""
    tensor.resize_(5)


def strided(tensor: torch.Tensor) -> None:
    """As many elements, with gaps."""
    tensor.data = torch.zeros(2 * tensor.numel())[::2]


def double(tensor: torch.Tensor) -> None:
    """A dtype that no master has."""
    tensor.data = tensor.data.double()


def half(weight: torch.Tensor) -> None:
    """As a module of torch's own converts its weight."""
    module = torch.nn.Linear(1, 1)
    module.weight = weight
    module.half()


def replaced(weight: torch.Tensor) -> None:
    """``zerocast.replace_raw_data``."""
    zerocast.replace_raw_data(weight, torch.zeros_like(weight.rowwise_data))


NAMES = (
    "rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "amax", "scale",
    "cast_scale", "amax_history", "rounding_counter",
)  # fmt: skip
Find = Callable[[Subject], list[torch.Tensor]]


def attributes(*names: str) -> Find:
    """Those that the subject's weights have."""
    return lambda subject: [
        getattr(weight, name)
        for weight in subject.model.parameters()
        for name in names
        if name in weight.quantized_storage.buffers
    ]


def outputs(subject: Subject) -> list[torch.Tensor]:
    """What a cast writes and does not read, beside codes."""
    derived = ["columnwise_data"] if subject.recipe.columnwise_source is not Source.MASTER else []
    return attributes("rowwise_scale_inv", "amax", *derived)(subject)


def weights(subject: Subject) -> list[torch.Tensor]:
    """The last one."""
    return list(subject.model.parameters())[-1:]


def plain_weight(subject: Subject) -> list[torch.Tensor]:
    """A norm's."""
    return [with_plain_weights(subject).model[3].weight]


def gradients(subject: Subject) -> list[torch.Tensor]:
    """After a backward pass."""
    subject.backward()
    return [p.grad for p in subject.model.parameters()]


@dataclass(frozen=True)
class Moves:
    """What is moved, and in which ways."""

    find: Find
    moves: tuple[Move, ...]


MOVES: dict[str, Moves] = {
    "a master: `.data = other`, `set_`": Moves(lambda s: s.masters(), (given, set_to)),
    "a master's storage: `share_memory_`, `resize_`": Moves(
        lambda s: s.masters(), (moved, shared, regrown)
    ),
    "a master that no longer fits": Moves(
        lambda s: s.masters()[:1], (cut_short, given_back, strided, double)
    ),
    "an attribute of a weight: `rowwise_data`, `amax`, ...": Moves(
        attributes(*NAMES), (emptied, set_to_zeros, swapped)
    ),
    "the storage of a weight's codes": Moves(attributes("rowwise_data"), (shared,)),
    "the storage of a weight's codes, given back": Moves(attributes("rowwise_data"), (given_back,)),
    "the storage of scales, an amax, a columnwise copy": Moves(
        outputs, (moved, shared, lost_and_found)
    ),
    "codes, by `zerocast.replace_raw_data`": Moves(weights, (replaced,)),
    "a weight: `Module.half` of torch's layers": Moves(weights, (half,)),
    "a plain weight: `.data = other`": Moves(plain_weight, (given,)),
    "a gradient": Moves(gradients, (given, set_to, moved, shared)),
}
