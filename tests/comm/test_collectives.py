"""What every communicator promises, stamped on all of them."""

import math

import pytest
import torch

from tests.support.same_bytes import assert_same_bytes
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


def assert_guards_stand(whole: torch.Tensor) -> None:
    """What lies beside the buffer has not been written."""
    for guard in (whole[:3], whole[-3:]):
        assert not guard.view(torch.uint8).any(), "written outside of the buffer"


@pytest.mark.parametrize("numel", [0, 1, 7, 70_000])
def test_all_reduce_max_is_the_maximum_of_every_element(ranks, numel):
    """Every rank holds max over r of x[r, i] in place, for int32 of both signs."""

    def values(rank):
        generator = torch.Generator().manual_seed(rank)
        return torch.randint(-(2**31), 2**31 - 1, (numel,), generator=generator, dtype=torch.int32)

    def body(comm):
        buffer, whole = guarded(values(comm.rank))
        address = buffer.data_ptr()
        comm.all_reduce_max_(buffer)
        assert buffer.data_ptr() == address
        assert_guards_stand(whole)
        return buffer.clone()

    expected = torch.stack([values(r) for r in range(ranks.size)]).amax(0)
    for rank, result in enumerate(ranks.run(body)):
        assert_same_bytes(result, expected, f"rank {rank}")


def test_nan_as_a_bit_pattern_wins_the_maximum(ranks):
    """Amaxes travel as int32: NaN 0x7FC00000 > infinity 0x7F800000 > any finite, on every rank."""
    columns = [
        torch.tensor([1.0, 3e38, 0.0, 1e-45]),  # what rank 0 has
        torch.tensor([math.nan, math.inf, -0.0, 0.0]).abs(),  # what all others have
    ]

    def body(comm):
        amax = columns[comm.rank > 0].clone()
        comm.all_reduce_max_(amax.view(torch.int32))
        return amax.view(torch.int32).tolist()

    expected = [0x3F800000, 0x7F61B1E6, 0, 1] if ranks.size == 1 else [0x7FC00000, 0x7F800000, 0, 1]
    assert ranks.run(body) == [expected] * ranks.size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64])
def test_all_reduce_sum_adds_exact_values_exactly(ranks, dtype):
    """The sum over r of (r + 1) * i is i * D * (D + 1) / 2, any shape, in place."""
    weights = torch.arange(6, dtype=dtype).view(2, 3)

    def body(comm):
        buffer = weights * (comm.rank + 1)
        comm.all_reduce_sum_(buffer)
        return buffer

    for rank, result in enumerate(ranks.run(body)):
        expected = weights * (ranks.size * (ranks.size + 1) // 2)
        assert_same_bytes(result, expected, f"rank {rank}")


def test_a_float_sum_is_the_same_bits_on_every_rank(ranks):
    """Where the order of a sum shows, ranks still agree to the bit, on about the right value."""
    numel = 100_003

    def body(comm):
        buffer = random_floats(numel, comm.rank)
        comm.all_reduce_sum_(buffer)
        return buffer

    results = ranks.run(body)
    addends = torch.stack([random_floats(numel, r) for r in range(ranks.size)]).double()
    error = (results[0].double() - addends.sum(0)).abs()
    assert (error <= 2**-23 * ranks.size * addends.abs().sum(0)).all()
    for rank, result in enumerate(results):
        assert_same_bytes(result, results[0], f"rank {rank} against rank 0")


@pytest.mark.parametrize("parts", ["equal", "uneven", "one owner", "none"])
def test_all_gather_moves_bits(ranks, parts):
    """Every rank holds every part, to the bit, whatever the dtype and however the parts are cut."""
    counts = {
        "equal": [5] * ranks.size,
        "uneven": [(3 * r * r + 2) % 7 for r in range(ranks.size)],  # 2 5 0 1 1
        "one owner": [11 * (r == ranks.size - 1) for r in range(ranks.size)],
        "none": [0] * ranks.size,
    }[parts]

    def contents(dtype):
        return [random_elements(count, dtype, r) for r, count in enumerate(counts)]

    def body(comm):
        results = []
        for dtype in MOVED_DTYPES:
            mine = [
                content if r == comm.rank else torch.zeros_like(content)
                for r, content in enumerate(contents(dtype))
            ]
            buffer, whole = guarded(torch.cat(mine))
            comm.all_gather_(buffer, counts)
            assert_guards_stand(whole)
            results.append(buffer.clone())
        return results

    for rank, results in enumerate(ranks.run(body)):
        for dtype, result in zip(MOVED_DTYPES, results, strict=True):
            assert_same_bytes(result, torch.cat(contents(dtype)), f"rank {rank}, {dtype}")


def test_all_gather_without_counts_has_equal_parts(ranks):
    """With D * n elements and no counts, rank r's part is n elements from r * n."""

    def body(comm):
        buffer = torch.zeros(3 * comm.size, dtype=torch.int16)
        buffer[3 * comm.rank : 3 * comm.rank + 3] = comm.rank + 1
        comm.all_gather_(buffer)
        return buffer.tolist()

    assert ranks.run(body) == [[r + 1 for r in range(ranks.size) for _ in range(3)]] * ranks.size


@pytest.mark.parametrize("order", ["as started", "last first"])
def test_started_gathers_end_when_they_are_waited_for(ranks, order):
    """Three gathers, of equal, uneven and no parts, are begun before the first is waited for, with
    an all-reduce among them; waited for in any order, each leaves what ``all_gather_`` leaves.
    """
    cases = [None, [(3 * r * r + 2) % 7 for r in range(ranks.size)], [0] * ranks.size]

    def contents(case):
        counts = cases[case] or [100_003] * ranks.size
        return [random_elements(n, torch.bfloat16, 7 * case + r) for r, n in enumerate(counts)]

    def body(comm):
        buffers, waits = [], []
        for case, counts in enumerate(cases):
            mine = [part if r == comm.rank else torch.zeros_like(part)
                    for r, part in enumerate(contents(case))]  # fmt: skip
            buffer, whole = guarded(torch.cat(mine))
            waits.append(comm.start_all_gather_(buffer, counts))
            buffers.append((buffer, whole))
            total = torch.ones(1)
            comm.all_reduce_sum_(total)
            assert total == comm.size
        for wait in waits if order == "as started" else reversed(waits):
            wait()
        for _, whole in buffers:
            assert_guards_stand(whole)
        return [buffer.clone() for buffer, _ in buffers]

    for rank, results in enumerate(ranks.run(body)):
        for case, result in enumerate(results):
            assert_same_bytes(result, torch.cat(contents(case)), f"rank {rank}, case {case}")


@pytest.mark.parametrize("numel", [0, 1, 1001])
@pytest.mark.parametrize("output_is", ["its own tensor", "a part of the buffer"])
def test_reduce_scatter_gives_each_rank_its_part_of_the_sum(ranks, numel, output_is):
    """Rank r's output is sum over s of x[s, r * n : (r + 1) * n], exact for small integers."""

    def values(rank):
        return torch.arange(numel * ranks.size, dtype=torch.float32) + 1000 * rank

    def body(comm):
        buffer, whole = guarded(values(comm.rank))
        output = torch.full((numel,), -1.0)
        if output_is == "a part of the buffer":
            output = buffer[comm.rank * numel : (comm.rank + 1) * numel]
        comm.reduce_scatter_sum(output, buffer)
        assert_guards_stand(whole)
        return output.clone()

    total = sum(values(r) for r in range(ranks.size))
    for rank, result in enumerate(ranks.run(body)):
        assert_same_bytes(result, total[rank * numel : (rank + 1) * numel], f"rank {rank}")


def test_broadcast_moves_bits_from_every_root(ranks):
    """Each rank in turn is the root; the others get its bits, in any dtype and shape."""

    def content(root, dtype, numel):
        return random_elements(numel, dtype, root).view(2, numel // 2)

    cases = [
        (root, dtype, numel)
        for root in range(ranks.size)
        for dtype in MOVED_DTYPES
        for numel in (0, 6)
    ]

    def body(comm):
        received = []
        for root, dtype, numel in cases:
            buffer = content(comm.rank, dtype, numel).clone()
            comm.broadcast_(buffer, root)
            received.append(buffer)
        return received

    for rank, received in enumerate(ranks.run(body)):
        for case, buffer in zip(cases, received, strict=True):
            assert_same_bytes(buffer, content(*case), f"rank {rank}, root, dtype, numel {case}")


def test_objects_are_gathered_in_rank_order(ranks):
    """Every rank gets every rank's object, of whatever kind and size."""

    def body(comm):
        comm.barrier()
        return comm.all_gather_object({"rank": comm.rank, "pad": "x" * 10**comm.rank})

    expected = [{"rank": r, "pad": "x" * 10**r} for r in range(ranks.size)]
    assert ranks.run(body) == [expected] * ranks.size


def test_sub_groups_count_their_own_ranks(ranks):
    """Even and odd ranks form groups with ranks from 0; roots and parts are those of the group."""

    def body(comm):
        group = ranks.split(comm, comm.rank % 2)
        root = torch.tensor([comm.rank])
        group.broadcast_(root, group.size - 1)
        total = torch.tensor([comm.rank])
        group.all_reduce_sum_(total)
        parts = torch.zeros(sum(range(1, group.size + 1)), dtype=torch.uint8)
        start = group.rank * (group.rank + 1) // 2
        parts[start : start + group.rank + 1] = comm.rank
        group.all_gather_(parts, range(1, group.size + 1))  # 1, 2, 3 ... elements
        return group.rank, int(root), int(total), parts.tolist()

    for rank, result in enumerate(ranks.run(body)):
        members = range(rank % 2, ranks.size, 2)
        parts = [member for place, member in enumerate(members) for _ in range(place + 1)]
        assert result == (rank // 2, members[-1], sum(members), parts), f"rank {rank}"


def test_a_buffer_that_autograd_watches_is_only_memory(ranks):
    """Collectives write through a leaf that requires grad, and leave no graph behind."""

    def body(comm):
        leaf = torch.full((2,), float(comm.rank), requires_grad=True)
        comm.all_reduce_sum_(leaf)
        comm.all_gather_(leaf, [2] + [0] * (comm.size - 1))
        comm.broadcast_(leaf)
        assert leaf.is_leaf
        return leaf.tolist()

    assert ranks.run(body) == [[sum(range(ranks.size))] * 2] * ranks.size


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
        r"broadcast_ takes a root from 0 to \d, a rank of this group, got \d",
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
)


def test_every_communicator_refuses_the_same_arguments(ranks):
    """A wrong argument is refused on the rank that gives it, with what is taken and was given."""

    def body(comm):
        for call, message in REFUSALS:
            with pytest.raises(InputError, match=message):
                call(comm)
        if comm.size > 1:
            message = f"takes a multiple of {comm.size} elements, one equal part a rank, got "
            with pytest.raises(InputError, match=message):
                comm.all_gather_(torch.zeros(3 * comm.size + 1))

    ranks.run(body)
