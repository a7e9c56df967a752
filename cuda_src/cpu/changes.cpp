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
    u64 digest = 0;
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
    }
    __atomic_fetch_add(target.changes.digest, digest, __ATOMIC_RELAXED);
}

// Calls word(at, flags) for each word of flags that has some, of those from element `at` on, after
// asking for its values. Few words have some, and their values lie far apart: which they are is
// found for many words at once, so that the processor guesses no branch and waits for no line.
template <class Word>
ZEROCAST_FN void each_flagged_word(const RunsTarget& target, const Word& word) {
    constexpr int LIST = 4096, AHEAD = 32;
    i64 count = (target.count + WORD - 1) / WORD, word_bytes = WORD * target.itemsize;
    int list[LIST];
    for (i64 first = 0; first < count; first += LIST) {
        const u64* flags = target.flags + first;
        const u8* values = target.values + first * word_bytes;
        int found = 0;
        for (int place = 0, places = (int)min_of(LIST, count - first); place < places; place++) {
            list[found] = place;
            found += flags[place] != 0;
        }
        // Asked for in no function of its own: GCC leaves out calls of one that does no more.
        for (int i = -AHEAD; i < found; i++) {
            if (i + AHEAD < found) __builtin_prefetch(values + list[i + AHEAD] * word_bytes);
            if (i >= 0) word((first + list[i]) * WORD, flags[list[i]]);
        }
    }
}

// Calls run(start, end) for each run of flagged elements, those that lie less than `closed` apart
// as one.
template <class Run>
ZEROCAST_FN void each_run(const RunsTarget& target, i64 closed, const Run& run) {
    i64 start = 0, end = -1;
    each_flagged_word(target, [&](i64 at, u64 left) {
        while (left) {
            int first = __builtin_ctzll(left);
            u64 above = ~(left >> first);
            int length = above ? __builtin_ctzll(above) : (int)WORD;
            if (end < 0 || at + first - end >= closed) {
                if (end >= 0) run(start, end);
                start = at + first;
            }
            end = at + first + length;
            left = first + length < WORD ? left & ~0ull << (first + length) : 0;
        }
    });
    if (end >= 0) run(start, end);
}

// Calls entry(gap, length) for each entry of a run; nearly all have one.
template <class Entry>
ZEROCAST_FN void each_entry(i64 gap, i64 length, const Entry& entry) {
    if (gap < MOST_GAP && length <= MOST_LENGTH) return entry(gap, length);
    for (; gap >= MOST_GAP; gap -= MOST_GAP) entry(MOST_GAP, 0);
    for (; length > 0; length -= MOST_LENGTH, gap = 0) entry(gap, min_of(length, MOST_LENGTH));
}

// No more than so many entries and elements: a run has a flag, and from the next one `closed`
// elements part it.
void bound_runs(const RunsTarget& target, i64 closed) {
    i64 flagged = 0;
    for (i64 at = 0; at < target.count; at += WORD)
        flagged += __builtin_popcountll(target.flags[at / WORD]);
    i64 elements = min_of(flagged * closed, target.count);
    i64 runs = min_of(flagged, target.count / (closed + 1) + 1);
    target.sizes[0] = runs + target.count / MOST_GAP + elements / MOST_LENGTH;
    target.sizes[1] = elements;
}

// Writes entries and elements where there is place for the most, moves them together and says how
// many they are.
void write_runs(const RunsTarget& target, i64 closed) {
    i64 most = target.sizes[0];
    u8 *gaps = target.data, *lengths = gaps + 2 * most;
    u8 *elements = lengths + most, *to = elements;
    const u8* to_end = to + target.sizes[1] * target.itemsize;
    const u8* values_end = target.values + target.count * target.itemsize;
    i64 entries = 0, before = 0;
    each_run(target, closed, [&](i64 start, i64 end) {
        each_entry(start - before, end - start, [&](i64 gap, i64 length) {
            auto bits = (unsigned short)gap;
            memcpy(gaps + 2 * entries, &bits, sizeof bits);
            lengths[entries++] = (u8)length;
        });
        const u8* from = target.values + start * target.itemsize;
        i64 size = (end - start) * target.itemsize;
        // Most runs are short: a copy of a fixed size costs a load, and the next run overwrites
        // what it has too much.
        if (size <= 8 && to_end - to >= 8 && values_end - from >= 8)
            memcpy(to, from, 8);
        else
            memcpy(to, from, size);
        to += size;
        before = end;
    });
    memmove(gaps + 2 * entries, lengths, entries);
    memmove(gaps + 3 * entries, elements, to - elements);
    target.sizes[0] = entries;
    target.sizes[1] = (to - elements) / target.itemsize;
}

void find_runs(const RunsTarget& target) {
    i64 closed = ENTRY_BYTES / target.itemsize + 1;
    target.data ? write_runs(target, closed) : bound_runs(target, closed);
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
    auto piece = [](const RunsTarget& target, i64, i64, i64) { find_runs(target); };
    share_in_parallel<RunsTarget>(table, count, threads, elements, piece);
}
