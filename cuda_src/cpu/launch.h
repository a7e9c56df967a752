// What every CPU launch is made of: the floating-point mode, the threads, and how work is split
// over them.
#pragma once

#include "arithmetic/tables.h"

#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#endif

// The name of an operation as this instruction set's copy exports it, such as
// zerocast_avx2_partial_cast.
#define ZEROCAST_JOIN_(isa, name) zerocast_##isa##_##name
#define ZEROCAST_JOIN(isa, name) ZEROCAST_JOIN_(isa, name)
#define ZEROCAST_EXPORT(name) \
    extern "C" __attribute__((visibility("default"))) void ZEROCAST_JOIN(ZEROCAST_ISA, name)

namespace zerocast {
inline namespace ZEROCAST_ISA {

ZEROCAST_FN i64 min_of(i64 a, i64 b) { return a < b ? a : b; }
ZEROCAST_FN i64 max_of(i64 a, i64 b) { return a > b ? a : b; }

// IEEE arithmetic during its lifetime, whatever torch.set_flush_denormal did to this thread before:
// no flush to zero of inputs or results, round to nearest even, no traps.
class IeeeMode {
  public:
#if defined(__x86_64__) || defined(__i386__)
    IeeeMode() : saved_(_mm_getcsr()) {
        _mm_setcsr(0x1F80);
    }  // all exceptions masked, every other bit clear
    ~IeeeMode() { _mm_setcsr(saved_); }

  private:
    unsigned saved_;
#elif defined(__aarch64__)
    IeeeMode() {
        asm volatile("mrs %0, fpcr" : "=r"(saved_));
        asm volatile("msr fpcr, %0" ::"r"((u64)0));
    }
    ~IeeeMode() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

  private:
    u64 saved_;
#endif
};

// Elements below which one more thread costs more than it brings: waking a team takes some
// microseconds.
constexpr i64 ELEMENTS_PER_THREAD = 1 << 16;

// Runs work(thread, num_threads) on each of at most max_threads threads: as many as the elements
// are worth. Little work stays on the calling thread and makes no team, so hundreds of
// in-process ranks may cast at once.
template <class Work>
void in_parallel(i64 elements, i64 max_threads, const Work& work) {
    i64 threads = min_of(max_threads, elements / ELEMENTS_PER_THREAD);
#if defined(_OPENMP)
    if (threads > 1) {
#pragma omp parallel num_threads((int)threads)
        {
            IeeeMode ieee;
            work(omp_get_thread_num(), omp_get_num_threads());
        }
        return;
    }
#endif
    IeeeMode ieee;
    work(0, 1);
}

template <class Item, class Range>
i64 total_elements(const Item* items, i64 count, const Range& range) {
    i64 total = 0;
    for (i64 i = 0; i < count; i++) total += range(items[i]).size();
    return total;
}

// Elements [begin, end) of one item, in granules: where a cut between two threads may be.
struct Span {
    i64 begin, end, granule;

    ZEROCAST_FN i64 size() const { return end - begin; }
};

// Gives this thread its even share of all items' elements: calls work(item, begin, end) for each
// item it touches. Cuts are at multiples of the item's granule, and every thread computes the same
// ones.
template <class Item, class Range, class Work>
void share(const Item* items, i64 count, i64 thread, i64 num_threads, const Range& range,
           const Work& work) {
    i64 total = total_elements(items, count, range);
    i64 first = (i64)((__int128)total * thread / num_threads);
    i64 last = (i64)((__int128)total * (thread + 1) / num_threads);
    i64 before = 0;  // elements of the items so far
    for (i64 i = 0; i < count && before < last; i++) {
        Span span = range(items[i]);
        auto cut = [&](i64 at) {
            i64 element = span.begin + at - before;
            if (element <= span.begin) return span.begin;
            if (element >= span.end) return span.end;
            return max_of(span.begin, element / span.granule * span.granule);
        };
        i64 begin = cut(first), end = cut(last);
        if (begin < end) work(items[i], begin, end);
        before += span.size();
    }
}

// A launch over a table of items: shares range(item, num_threads) of all of them among at most
// max_threads threads, and calls work(item, begin, end, num_threads) for every thread's piece.
template <class Item, class Range, class Work>
void share_in_parallel(const void* table, i64 count, i64 max_threads, const Range& range,
                       const Work& work) {
    auto items = (const Item*)table;
    auto whole = [&](const Item& item) { return range(item, 1); };
    in_parallel(total_elements(items, count, whole), max_threads, [&](i64 thread, i64 num_threads) {
        auto span = [&](const Item& item) { return range(item, num_threads); };
        auto piece = [&](const Item& item, i64 begin, i64 end) {
            work(item, begin, end, num_threads);
        };
        share(items, count, thread, num_threads, span, piece);
    });
}

// The narrowest rowwise blocks that share a pass with columnwise ones.
constexpr i64 ROW_BLOCK = 16;

// Whether a shard's two planes have blocks of one row and blocks of one column, which one pass
// serves.
ZEROCAST_FN bool in_rows_and_columns(const CastShard& shard) {
    return shard.columnwise.codes && shard.rowwise.grid.block_h == 1
           && shard.rowwise.grid.block_w >= ROW_BLOCK && shard.columnwise.grid.block_w == 1;
}

// Elements of whole rows of blocks, of both planes.
ZEROCAST_FN i64 block_rows(const CastShard& shard) {
    i64 rows = shard.rowwise.grid.block_h;
    if (shard.columnwise.codes) {
        i64 others = shard.columnwise.grid.block_h;
        rows = others % rows == 0 ? others : rows % others == 0 ? rows : rows * others;
    }
    return rows * shard.rowwise.grid.cols;
}

// Whether a shard is cut between rows of blocks, so that no two threads touch one block: where
// there is enough work for that to be even.
ZEROCAST_FN bool cut_between_blocks(const CastShard& shard, i64 num_threads) {
    return shard.size() / block_rows(shard) >= 4 * num_threads;
}

// The rows of blocks of a shard that are cast while they are measured.
ZEROCAST_FN Span whole_rows(const CastShard& shard) {
    return Span{shard.whole_begin, shard.whole_end, 1};
}

// Elements of a shard. However it is cut, no byte of codes is shared: granules are even.
ZEROCAST_FN Span shard_span(const CastShard& shard, i64 num_threads) {
    i64 rows = block_rows(shard);
    i64 granule = cut_between_blocks(shard, num_threads) ? rows << (rows & 1) : 128;
    return Span{shard.start, shard.end, granule};
}

// Whether the codes of a launch go past the caches, where few of them would stay: a store there
// first reads the line that it writes.
inline bool streams_codes(const CastShard* shards, i64 count) {
    constexpr i64 ENOUGH = 1 << 24;  // elements
    return total_elements(shards, count, [](const CastShard& s) { return shard_span(s, 1); })
           >= ENOUGH;
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
