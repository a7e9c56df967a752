"""What every communicator promises, stamped on all of them."""

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch

from tests.support.ranks import on_ranks, split_ranks
from tests.support.same_bytes import assert_same_bytes
from zerocast.comm import Communicator
from zerocast.errors import InputError

MOVED_DTYPES = (
    torch.uint8,
    torch.int8,
    torch.bool,
    torch.int16,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
)


def random_bytes(count: int, seed: int) -> torch.Tensor:
    """uint8 [count], all 256 values."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)


def random_elements(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """[count] of any bit patterns that ``dtype`` allows, NaNs with their payloads among them."""
    if dtype == torch.bool:
        return random_bytes(count, seed) < 128
    return random_bytes(count * dtype.itemsize, seed).view(dtype)


def random_floats(count: int, seed: int) -> torch.Tensor:
    """FP32 [count] of very different magnitudes, so that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-20, 20, (count,), generator=generator)
    return torch.randn(count, generator=generator) * 2.0**exponents


def guarded(content: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer that holds ``content`` in the middle of a larger allocation, and that allocation."""
    whole = torch.zeros(content.numel() + 6, dtype=content.dtype)
    buffer = whole[3:-3]
    buffer.copy_(content)
    return buffer, whole


def own_part(comm: Communicator, parts: list[torch.Tensor]) -> torch.Tensor:
    """All ranks' parts end to end, of which this rank has its own, and zeros for the others."""
    return torch.cat([p if r == comm.rank else torch.zeros_like(p) for r, p in enumerate(parts)])


def assert_guards_stand(whole: torch.Tensor) -> None:
    """What lies beside the buffer has not been written."""
    for guard in (whole[:3], whole[-3:]):
        assert not guard.view(torch.uint8).any(), "written outside of the buffer"


@on_ranks()
def test_all_reduce_max_is_the_maximum_of_every_element(comm):
    """Every rank holds max over r of x[r, i] in place, for int32 of both signs."""
    for numel in (0, 1, 8, 9, 70_000):
        values = [random_elements(numel, torch.int32, r) for r in range(comm.size)]
        buffer, whole = guarded(values[comm.rank])
        address = buffer.data_ptr()
        comm.all_reduce_max_(buffer)
        assert buffer.data_ptr() == address
        assert_guards_stand(whole)
        assert_same_bytes(buffer, torch.stack(values).amax(0), f"rank {comm.rank}, {numel}")


@on_ranks()
def test_maxima_of_a_few_numbers(comm):
    """As those of a tensor, on every rank, of as many as travel with what is called and of more."""
    for numel in (1, 2, 8, 9):
        values = [random_elements(numel, torch.int32, r) for r in range(comm.size)]
        given = values[comm.rank].tolist()
        assert comm.maxima(given) == torch.stack(values).amax(0).tolist()
        assert given == values[comm.rank].tolist()


@on_ranks()
def test_nan_as_a_bit_pattern_wins_the_maximum(comm):
    """Amaxes travel as int32: NaN 0x7FC00000 > infinity 0x7F800000 > any finite, on every rank."""
    amax = torch.tensor([1.0, 3e38, 0.0, 1e-45])  # what rank 0 has
    if comm.rank > 0:
        amax = torch.tensor([math.nan, math.inf, -0.0, 0.0]).abs()
    comm.all_reduce_max_(amax.view(torch.int32))
    expected = [0x3F800000, 0x7F61B1E6, 0, 1] if comm.size == 1 else [0x7FC00000, 0x7F800000, 0, 1]
    assert amax.view(torch.int32).tolist() == expected


@on_ranks()
def test_all_reduce_sum_adds_exact_values_exactly(comm):
    """The sum over r of (r + 1) * i is i * D * (D + 1) / 2, any shape, in place."""
    for dtype in (torch.float32, torch.float64, torch.int32, torch.int64):
        weights = torch.arange(6, dtype=dtype).view(2, 3)
        buffer = weights * (comm.rank + 1)
        comm.all_reduce_sum_(buffer)
        expected = weights * (comm.size * (comm.size + 1) // 2)
        assert_same_bytes(buffer, expected, f"rank {comm.rank}, {dtype}")


@on_ranks()
def test_a_float_sum_is_the_same_bits_on_every_rank(comm):
    """Where the order of a sum shows, ranks still agree to the bit, on about the right value."""
    numel = 100_003
    buffer = random_floats(numel, comm.rank)
    comm.all_reduce_sum_(buffer)
    addends = torch.stack([random_floats(numel, r) for r in range(comm.size)]).double()
    error = (buffer.double() - addends.sum(0)).abs()
    assert (error <= 2**-23 * comm.size * addends.abs().sum(0)).all()
    for rank, other in enumerate(comm.all_gather_object(buffer)):
        assert_same_bytes(buffer, other, f"rank {comm.rank} against rank {rank}")


@on_ranks()
def test_all_gather_moves_bits(comm):
    """Every rank holds every part, to the bit, whatever the dtype and however the parts are cut."""
    cuts = (
        [5] * comm.size,
        [(3 * r * r + 2) % 7 for r in range(comm.size)],  # 2 5 0 1 1
        [11 * (r == comm.size - 1) for r in range(comm.size)],  # of one owner
        [0] * comm.size,
    )
    for counts, dtype in product(cuts, MOVED_DTYPES):
        contents = [random_elements(count, dtype, r) for r, count in enumerate(counts)]
        buffer, whole = guarded(own_part(comm, contents))
        comm.all_gather_(buffer, counts)
        assert_guards_stand(whole)
        assert_same_bytes(buffer, torch.cat(contents), f"rank {comm.rank}, {counts}, {dtype}")


@on_ranks()
def test_all_gather_without_counts_has_equal_parts(comm):
    """With D * n elements and no counts, rank r's part is n elements from r * n."""
    buffer = torch.zeros(3 * comm.size, dtype=torch.int16)
    buffer[3 * comm.rank : 3 * comm.rank + 3] = comm.rank + 1
    comm.all_gather_(buffer)
    assert buffer.tolist() == [r + 1 for r in range(comm.size) for _ in range(3)]


@on_ranks()
@pytest.mark.parametrize("order", ["as started", "last first"])
def test_started_gathers_end_when_they_are_waited_for(comm, order):
    """Three gathers, of equal, uneven and no parts, are begun before the first is waited for, with
    an all-reduce among them; waited for in any order, each leaves what ``all_gather_`` leaves.
    """
    started = []
    for case, counts in enumerate(
        (None, [(3 * r * r + 2) % 7 for r in range(comm.size)], [0] * comm.size)
    ):
        contents = [
            random_elements(count, torch.bfloat16, 7 * case + r)
            for r, count in enumerate(counts or [100_003] * comm.size)
        ]
        buffer, whole = guarded(own_part(comm, contents))
        started.append((comm.start_all_gather_(buffer, counts), buffer, whole, contents))
        total = torch.ones(1)
        comm.all_reduce_sum_(total)
        assert total == comm.size
    for wait, *_ in started if order == "as started" else reversed(started):
        wait()
    for case, (_, buffer, whole, contents) in enumerate(started):
        assert_guards_stand(whole)
        assert_same_bytes(buffer, torch.cat(contents), f"rank {comm.rank}, case {case}")


@on_ranks()
def test_reduce_scatter_gives_each_rank_its_part_of_the_sum(comm):
    """Rank r's output is sum over s of x[s, r * n : (r + 1) * n], exact for small integers; it may
    be that part of the buffer.
    """
    for numel, in_place in product((0, 1, 1001), (False, True)):
        values = [torch.arange(numel * comm.size) + 1000.0 * rank for rank in range(comm.size)]
        buffer, whole = guarded(values[comm.rank])
        mine = slice(comm.rank * numel, (comm.rank + 1) * numel)
        output = buffer[mine] if in_place else torch.full((numel,), -1.0)
        comm.reduce_scatter_sum(output, buffer)
        assert_guards_stand(whole)
        assert_same_bytes(output, sum(values)[mine], f"rank {comm.rank}, {numel}, {in_place}")


PARTS: dict[str, Callable[[int, int, int], int]] = {
    "in place": lambda r, s, size: 1001,
    "equal": lambda r, s, size: 1001,
    "uneven": lambda r, s, size: (3 * r * r + 2 * s) % 7,
    "one receiver": lambda r, s, size: (11 + r) * (s == size - 1),
    "none": lambda r, s, size: 0,
}
"""How many elements rank r of so many sends to rank s."""


@on_ranks()
def test_all_to_all_moves_bits(comm):
    """Part s of rank r's buffer becomes part r of rank s's output, to the bit, whatever the dtype
    and however the parts are cut; several are begun before the first is waited for.
    """
    ranks, started = range(comm.size), []
    for parts, dtype in product(PARTS, MOVED_DTYPES):
        cut = [[PARTS[parts](r, s, comm.size) for s in ranks] for r in ranks]
        sent = [[random_elements(cut[r][s], dtype, 10 * r + s) for s in ranks] for r in ranks]
        buffer, whole = guarded(torch.cat(sent[comm.rank]))
        expected = torch.cat([sent[r][comm.rank] for r in ranks])
        output = buffer if parts == "in place" else torch.empty_like(expected)
        takes = [cut[r][comm.rank] for r in ranks], cut[comm.rank]
        counts = () if parts in ("in place", "equal") else takes
        wait = comm.start_all_to_all(output, buffer, *counts)
        started.append((f"{parts}, {dtype}", wait, output, whole, expected))
    for case, wait, output, whole, expected in started:
        wait()
        assert_guards_stand(whole)
        assert_same_bytes(output, expected, f"rank {comm.rank}, {case}")


@on_ranks()
def test_broadcast_moves_bits_from_every_root(comm):
    """Each rank in turn is the root; the others get its bits, in any dtype and shape."""
    for case in product(range(comm.size), MOVED_DTYPES, (0, 6)):
        root, dtype, numel = case
        buffer, sent = (
            random_elements(numel, dtype, rank).view(2, numel // 2) for rank in (comm.rank, root)
        )
        comm.broadcast_(buffer, root)
        assert_same_bytes(buffer, sent, f"rank {comm.rank}, root, dtype, numel {case}")


@on_ranks()
def test_objects_are_gathered_in_rank_order(comm):
    """Every rank gets every rank's object, of whatever kind and size."""
    comm.barrier()
    found = comm.all_gather_object({"rank": comm.rank, "pad": "x" * 10**comm.rank})
    assert found == [{"rank": r, "pad": "x" * 10**r} for r in range(comm.size)]


@on_ranks()
def test_sub_groups_count_their_own_ranks(comm):
    """Even and odd ranks form groups with ranks from 0; roots and parts are those of the group."""
    group = split_ranks(comm, comm.rank % 2)
    root = torch.tensor([comm.rank])
    group.broadcast_(root, group.size - 1)
    total = torch.tensor([comm.rank])
    group.all_reduce_sum_(total)
    parts = torch.zeros(sum(range(1, group.size + 1)), dtype=torch.uint8)
    start = group.rank * (group.rank + 1) // 2
    parts[start : start + group.rank + 1] = comm.rank
    group.all_gather_(parts, range(1, group.size + 1))  # 1, 2, 3 ... elements
    members = range(comm.rank % 2, comm.size, 2)
    assert (group.rank, int(root), int(total)) == (comm.rank // 2, members[-1], sum(members))
    assert parts.tolist() == [m for place, m in enumerate(members) for _ in range(place + 1)]


@on_ranks()
def test_a_buffer_that_autograd_watches_is_only_memory(comm):
    """Collectives write through a leaf that requires grad, and leave no graph behind."""
    leaf = torch.full((2,), float(comm.rank), requires_grad=True)
    comm.all_reduce_sum_(leaf)
    comm.all_gather_(leaf, [2] + [0] * (comm.size - 1))
    comm.broadcast_(leaf)
    assert leaf.is_leaf
    assert leaf.tolist() == [sum(range(comm.size))] * 2


REFUSALS = (
    (
        lambda c: c.all_reduce_max_(torch.zeros(2)),
        "all_reduce_max_ takes a tensor of torch.int32, got torch.float32; reduce in one of these",
    ),
    (
        lambda c: c.all_reduce_sum_(torch.zeros(2, dtype=torch.bfloat16)),
        "all_reduce_sum_ takes a tensor of torch.float32, torch.float64, torch.int32, "
        "torch.int64, got torch.bfloat16",
    ),
    (
        lambda c: c.all_reduce_sum_(torch.zeros(2, 3).t()),
        r"all_reduce_sum_ works in place on a contiguous tensor, got shape \(3, 2\) with "
        r"strides \(1, 3\); call it on a .contiguous\(\) copy",
    ),
    (
        lambda c: c.broadcast_(torch.zeros(4)[::2]),
        r"broadcast_ works in place on a contiguous tensor, got shape \(2,\) with strides \(2,",
    ),
    (
        lambda c: c.broadcast_(torch.zeros(4), c.size),
        r"broadcast_.s root, a rank of this group, must be an integer from 0 to \d, got \d",
    ),
    (
        lambda c: c.all_gather_(torch.zeros(c.size, 2)),
        r"all_gather_ takes a 1-D tensor, got shape \(\d, 2\)",
    ),
    (
        lambda c: c.all_gather_(torch.zeros(c.size), [1] * (c.size + 1)),
        r"one count, 0 or more, for each of the \d ranks, \d in all as the buffer holds, got \d",
    ),
    (
        lambda c: c.all_gather_(torch.zeros(c.size), [2] * c.size),
        r"\d in all as the buffer holds, got \d counts with sum \d+ and least 2",
    ),
    (
        lambda c: c.all_gather_(torch.zeros(0), [*[0] * (c.size - 1), -1]),
        "with sum -1 and least -1",
    ),
    (
        lambda c: c.reduce_scatter_sum(torch.zeros(2), torch.zeros(2 * c.size + 1)),
        r"takes a buffer of \d+ elements, \d ranks by 2 of output, got \d+; pad it to a multiple",
    ),
    (
        lambda c: c.reduce_scatter_sum(torch.zeros(2), torch.zeros(2 * c.size).double()),
        "reduce_scatter_sum takes a tensor of torch.float32, got torch.float64",
    ),
    (
        lambda c: c.start_all_to_all(torch.zeros(c.size), torch.zeros(c.size, 1)),
        r"all_to_all takes a 1-D tensor, got shape \(\d, 1\)",
    ),
    (
        lambda c: c.start_all_to_all(torch.zeros(c.size), torch.zeros(c.size).double()),
        "takes an output of the buffer's dtype and device, torch.float64 on cpu, got torch.float32",
    ),
    (
        lambda c: c.start_all_to_all(torch.zeros(c.size), torch.zeros(c.size), None, [2] * c.size),
        r"all_to_all takes one count, 0 or more, for each of the \d ranks, \d in all",
    ),
)


@on_ranks()
def test_every_communicator_refuses_the_same_arguments(comm):
    """A wrong argument is refused on the rank that gives it, with what is taken and was given."""
    for call, message in REFUSALS:
        with pytest.raises(InputError, match=message):
            call(comm)
    if comm.size > 1:
        message = f"takes a multiple of {comm.size} elements, one equal part per rank, got "
        with pytest.raises(InputError, match=message):
            comm.all_gather_(torch.zeros(3 * comm.size + 1))
        with pytest.raises(InputError, match=message):
            comm.start_all_to_all(torch.zeros(comm.size), torch.zeros(comm.size + 1))
        both, counts = torch.zeros(comm.size), [2, *[1] * (comm.size - 2), 0]
        with pytest.raises(InputError, match="in place takes equal parts"):
            comm.start_all_to_all(both, both, counts, counts)
