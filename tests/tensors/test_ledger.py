"""The ledger tells what has happened to memory since it was watched, and keeps none alive."""

from collections.abc import Callable

import pytest
import torch

from zerocast.errors import InputError
from zerocast.tensors.ledger import (
    ADDRESS,
    FORM,
    WRITES,
    announce,
    check_scope,
    look_at,
    memory_of,
    watch,
)


def given_other_memory(tensor: torch.Tensor) -> None:
    """As many elements, elsewhere."""
    tensor.data = tensor.data.clone()


def given_other_dtype(tensor: torch.Tensor) -> None:
    """The same bytes, read as something else."""
    tensor.data = tensor.data.view(torch.int32)


def given_gaps(tensor: torch.Tensor) -> None:
    """Every other element, as many as before, from where they began."""
    tensor.data = tensor.data.new_zeros(2 * len(tensor)).set_(
        tensor.data.untyped_storage(), 0, (len(tensor) // 2,), (2,)
    )


def written(tensor: torch.Tensor) -> None:
    """By an operation that torch counts."""
    tensor.add_(1)


FOUND = {
    given_other_memory: (ADDRESS, FORM, WRITES),
    given_other_dtype: (FORM,),
    given_gaps: (FORM,),
    written: (WRITES,),
}
"""What finds each change."""


@pytest.mark.parametrize("change", FOUND)
@pytest.mark.parametrize("looks", [ADDRESS, FORM, WRITES], ids=["address", "form", "writes"])
def test_what_each_look_finds(
    change: Callable[[torch.Tensor], None], looks: tuple[Callable[[torch.Tensor], object], ...]
) -> None:
    """An address that stays tells nothing of dtype, size and values, nor these of each other."""
    tensor, other = torch.ones(8), torch.ones(8)
    token = watch([other, tensor], looks)
    assert not token.changed()
    change(tensor)
    assert token.changed() == (looks in FOUND[change])


def test_scopes() -> None:
    """One tensor of a storage tells that the storage moves, and not what its tensors are given."""
    whole = torch.ones(8)
    parts = list(whole.split(2))
    few, all_ = watch(parts, scope="storage"), watch(parts)
    assert (len(few.tensors), len(all_.tensors)) == (1, 4)
    given_other_memory(parts[0])
    assert (few.changed(), all_.changed()) == (False, True)
    whole.untyped_storage().resize_(1 << 16)
    assert few.changed()
    with pytest.raises(InputError, match="scope must be"):
        check_scope("weight")  # type: ignore[arg-type]


def test_what_is_announced_to_one_scope_is_no_news_to_the_other() -> None:
    """Until it is noted."""
    tokens = watch([]), watch([], scope="storage")
    announce("tensor")
    assert [token.is_announced for token in tokens] == [True, False]
    announce()
    assert [token.is_announced for token in tokens] == [True, True]
    for token in tokens:
        token.note_announced()
    assert [token.is_announced for token in tokens] == [False, False]


def test_bytes_that_differ() -> None:
    """A write that torch does not count is found by the bytes, of the tensor that has it, until
    they are kept again.
    """
    tensors = [torch.ones(8), torch.ones(3), torch.ones(0)]
    token = watch(tensors, WRITES)
    token.keep_bytes()
    tensors[1].data.mul_(2)
    assert not token.changed()
    assert token.differs().tolist() == [False, True, False]
    token.keep_bytes()
    assert not token.differs().any()


def test_what_was_found_of_freed_memory_is_of_no_other() -> None:
    """Other memory at the same address, as many times written, is told apart, and the freed one is
    not kept.
    """
    tensor = torch.ones(1 << 16)
    before, memory = look_at([tensor], WRITES), memory_of(tensor)
    del tensor
    assert memory.expired()
    for _ in range(8):
        assert look_at([torch.ones(1 << 16)], WRITES) != before
