// compare: flags the elements that are not what they were, adds to a digest what that changes, and
// stores them.
//
// runs: the flagged elements as they travel: of each run of them the elements left out before it,
// 16 bits, and its length, 8 bits; then the elements of all runs. A longer gap or run takes several
// entries. Runs less than an entry's bytes apart are one, which is shorter.
#include "cpu/changes.h"

#include <string.h>

#include "cpu/launch.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {
namespace {

constexpr i64 WORD = 64;  // flags
constexpr i64 MOST_GAP = (1 << 16) - 1, MOST_LENGTH = (1 << 8) - 1;
constexpr i64 ENTRY_BYTES = 3;

// Compares elements [begin, end), which no other thread has flags of.
template <class T>
void compare(const Comparison& target, i64 begin, i64 end) {
    auto held = (T*)target.held;
    auto values = (const T*)target.values;
    u64 digest = 0, count = 0;
    for (i64 at = begin; at < end; at += WORD) {
        i64 n = min_of(WORD, end - at);
        if (!memcmp(held + at, values + at, n * sizeof(T))) continue;
        u64 changed = 0;
        for (i64 i = at; i < at + n; i++) {
            if (held[i] == values[i]) continue;
            changed |= 1ull << (i - at);
            for (i64 b = i * (i64)sizeof(T), e = b + (i64)sizeof(T); b < e; b++)
                digest += digest_of_change(target.values[b], target.held[b],
                                           target.first * (i64)sizeof(T) + b);
            held[i] = values[i];
        }
        target.changes.flags[at / WORD] = changed;
        count += __builtin_popcountll(changed);
    }
    add_changes(target.changes, digest, count);
}

// Runs of elements, in order.
struct Runs {
    static constexpr int MOST = 256;
    i64 starts[MOST + WORD], ends[MOST + WORD];
};

// Calls batch(runs, count) for all runs of flagged elements, many at once, those that lie less than
// `closed` apart as one.
template <class Batch>
ZEROCAST_FN void each_batch_of_runs(const RunsTarget& target, i64 closed, const Batch& batch) {
    constexpr int LIST = 4096;
    i64 words = (target.count + WORD - 1) / WORD;
    int list[LIST];
    Runs runs;
    int last = -1;           // the run that may go on
    i64 last_end = -closed;  // before the first
    for (i64 from = 0; from < words; from += LIST) {
        const u64* flags = target.flags + from;
        // Few words have flags: which they are is found for many at once, guessing no branch.
        int found = 0;
        for (int place = 0, places = (int)min_of(LIST, words - from); place < places; place++) {
            list[found] = place;
            found += flags[place] != 0;
        }
        for (int i = 0; i < found; i++) {
            i64 at = (from + list[i]) * WORD;
            // The elements lie far apart, and are asked for before they are copied.
            __builtin_prefetch(target.values + at * target.itemsize);
            for (u64 left = flags[list[i]]; left;) {
                int first = __builtin_ctzll(left);
                u64 above = ~(left >> first);
                int length = above ? __builtin_ctzll(above) : (int)WORD;
                bool is_apart = at + first - last_end >= closed;
                last += is_apart;
                if (is_apart) runs.starts[last] = at + first;
                runs.ends[last] = last_end = at + first + length;
                left = first + length < WORD ? left & ~0ull << (first + length) : 0;
            }
            if (last >= Runs::MOST) {
                batch(runs, last);
                runs.starts[0] = runs.starts[last];
                runs.ends[0] = runs.ends[last];
                last = 0;
            }
        }
    }
    batch(runs, last + 1);
}

// Writes the entries of a run that does not fit one; returns how many they are.
i64 long_entries(u8* gaps, u8* lengths, i64 gap, i64 length) {
    i64 entries = 0;
    auto entry = [&](i64 left_out, i64 taken) {
        auto bits = (unsigned short)left_out;
        memcpy(gaps + 2 * entries, &bits, sizeof bits);
        lengths[entries++] = (u8)taken;
    };
    for (; gap >= MOST_GAP; gap -= MOST_GAP) entry(MOST_GAP, 0);
    for (; length > 0; length -= MOST_LENGTH, gap = 0) entry(gap, min_of(length, MOST_LENGTH));
    return entries;
}

// Writes entries and elements where there is place for the most, moves them together and says how
// many they are.
void write_runs(const RunsTarget& target) {
    if (!target.data) return;  // where nothing can have changed
    i64 closed = ENTRY_BYTES / target.itemsize + 1;
    i64 most = target.sizes[0], itemsize = target.itemsize;
    u8 *gaps = target.data, *lengths = gaps + 2 * most, *elements = lengths + most;
    const u8 *values = target.values, *values_end = values + target.count * itemsize;
    const u8* elements_end = elements + target.sizes[1] * itemsize;
    i64 all_entries = 0, end = 0, all_bytes = 0;
    each_batch_of_runs(target, closed, [&](const Runs& runs, int count) {
        // Of their own, since what is stored as bytes might be them else.
        i64 entries = all_entries, before = end;
        for (int i = 0; i < count; i++) {
            i64 gap = runs.starts[i] - before, length = runs.ends[i] - runs.starts[i];
            before = runs.ends[i];
            if (gap >= MOST_GAP || length > MOST_LENGTH) {
                entries += long_entries(gaps + 2 * entries, lengths + entries, gap, length);
                continue;
            }
            auto bits = (unsigned short)gap;
            memcpy(gaps + 2 * entries, &bits, sizeof bits);
            lengths[entries++] = (u8)length;
        }
        all_entries = entries, end = before;
        u8* to = elements + all_bytes;
        for (int i = 0; i < count; i++) {
            const u8* from = values + runs.starts[i] * itemsize;
            i64 size = (runs.ends[i] - runs.starts[i]) * itemsize;
            // Most runs are short: a copy of a fixed size costs a load, and the next run overwrites
            // what it has too much.
            if (size <= 8 && elements_end - to >= 8 && values_end - from >= 8)
                memcpy(to, from, 8);
            else
                memcpy(to, from, size);
            to += size;
        }
        all_bytes = to - elements;
    });
    memmove(gaps + 2 * all_entries, lengths, all_entries);
    memmove(gaps + 3 * all_entries, elements, all_bytes);
    target.sizes[0] = all_entries;
    target.sizes[1] = all_bytes / itemsize;
}

}  // namespace
}  // namespace ZEROCAST_ISA
}  // namespace zerocast

ZEROCAST_EXPORT(compare)(const void* table, long long count, long long threads) {
    using namespace zerocast;
    auto elements = [](const Comparison& target, i64) { return Span{0, target.count, WORD}; };
    auto piece = [](const Comparison& target, i64 begin, i64 end, i64) {
        if (target.itemsize == 1) return compare<u8>(target, begin, end);
        if (target.itemsize == 2) return compare<unsigned short>(target, begin, end);
        if (target.itemsize == 4) return compare<u32>(target, begin, end);
        compare<u64>(target, begin, end);
    };
    share_in_parallel<Comparison>(table, count, threads, elements, piece);
}

ZEROCAST_EXPORT(runs)(const void* table, long long count, long long threads) {
    using namespace zerocast;
    // One thread walks a whole target: where its runs go depends on those before.
    auto elements = [](const RunsTarget& target, i64) {
        return Span{0, target.count, target.count};
    };
    auto piece = [](const RunsTarget& target, i64, i64, i64) { write_runs(target); };
    share_in_parallel<RunsTarget>(table, count, threads, elements, piece);
}
