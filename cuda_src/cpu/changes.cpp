// compare: flags the elements that are not what they were, adds to a digest what that changes, and
// stores them.
//
// runs: the flagged elements as they travel: of each run of them the elements left out before it,
// 16 bits, and its length, 8 bits; then the elements of all runs. A longer gap or run takes several
// entries. Runs less than an entry's bytes apart are one, which is shorter.
#include <string.h>

#include "arithmetic/digest.h"
#include "cpu/launch.h"
#include "cpu/simd.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {
namespace {

constexpr i64 WORD = 64;  // flags
constexpr i64 MOST_GAP = (1 << 16) - 1, MOST_LENGTH = (1 << 8) - 1;
constexpr i64 ENTRY_BYTES = 3;

// What halfwords of a row are multiplied by, beside the row's own factor.
struct HalfwordFactors {
    i64 of[DIGEST_ROW_BYTES / 2];

    constexpr HalfwordFactors() : of() {
        for (i64 lane = 0; lane < DIGEST_LANES; lane++) {
            i64 plain = plain_factor(lane), weighted = weighted_factor(lane);
            for (i64 line = 0; line < DIGEST_LINES; line++)
                for (i64 upper = 0; upper < 2; upper++)
                    of[line * DIGEST_LINE_BYTES / 2 + 2 * lane + upper] =
                        plain + halfword_weight(line, upper) * weighted;
        }
    }
};
constexpr HalfwordFactors FACTORS;

// Which of n elements differ, at most WORD: a bit each.
template <class T>
ZEROCAST_FN u64 differing(const T* a, const T* b, i64 n) {
    constexpr i64 AT_ONCE = sizeof(u64) / sizeof(T);
    auto word = [](const T* from) { return Native::load_as<u64>((const u8*)from); };
    if (n == WORD) {  // most often none does, which takes no branch within
        u64 any = 0;
        for (i64 i = 0; i < WORD; i += AT_ONCE) any |= word(a + i) ^ word(b + i);
        if (!any) return 0;
    }
    u64 found = 0;
    for (i64 i = 0; i < n; i += AT_ONCE) {
        if (i + AT_ONCE <= n && word(a + i) == word(b + i)) continue;
        for (i64 k = i; k < min_of(i + AT_ONCE, n); k++) found |= (u64)(a[k] != b[k]) << k;
    }
    return found;
}

// As digest_of_change(), of factors that are at hand: these took most of the time of deltas.
ZEROCAST_FN u64 change(u8 byte, u8 instead_of, i64 place) {
    i64 difference = in_halfword(byte, place) - in_halfword(instead_of, place);
    u64 factor = (u64)FACTORS.of[place % DIGEST_ROW_BYTES / 2];
    return (u64)difference * factor * row_factor(place / DIGEST_ROW_BYTES);
}

// Compares elements [begin, end), which no other thread has flags of.
template <class T>
void compare(const Comparison& target, i64 begin, i64 end) {
    auto held = (T*)target.held;
    auto values = (const T*)target.values;
    u64 digest = 0, count = 0;
    for (i64 at = begin; at < end; at += WORD) {
        i64 n = min_of(WORD, end - at);
        u64 changed = differing(held + at, values + at, n);
        if (!changed) continue;
        for (u64 left = changed; left; left &= left - 1) {
            i64 i = at + __builtin_ctzll(left);
            for (i64 b = i * (i64)sizeof(T), e = b + (i64)sizeof(T); b < e; b++)
                digest +=
                    change(target.values[b], target.held[b], target.first * (i64)sizeof(T) + b);
            held[i] = values[i];
        }
        target.changes.flags[at / WORD] = changed;
        count += __builtin_popcountll(changed);
    }
    if (!count) return;
    __atomic_fetch_add(target.changes.digest, digest, __ATOMIC_RELAXED);
    __atomic_fetch_add(target.changes.digest + 1, count, __ATOMIC_RELAXED);
}

// Runs of elements, in order.
struct Runs {
    static constexpr int MOST = 256;
    i64 starts[MOST + 1], ends[MOST + 1];
};

// Words that have flags.
struct FlaggedWords {
    static constexpr int MOST = 4096;
    // With room for a register more, and for one that has none.
    int places[MOST + 8];
    u64 flags[MOST + 8];
    int count;

    // Finds those of `words`, at most MOST, guessing no branch: few have flags.
    ZEROCAST_FN void find(const u64* from, int words) {
        count = 0;
        int place = 0;
#if defined(__AVX512VL__)
        __m256i each = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        for (; place + 8 <= words;
             place += 8, each = _mm256_add_epi32(each, _mm256_set1_epi32(8))) {
            __m512i word = _mm512_loadu_si512(from + place);
            __mmask8 any = _mm512_test_epi64_mask(word, word);
            _mm256_storeu_si256((__m256i*)(places + count), _mm256_maskz_compress_epi32(any, each));
            _mm512_storeu_si512(flags + count, _mm512_maskz_compress_epi64(any, word));
            count += __builtin_popcount(any);
        }
#endif
        for (; place < words; place++) {
            places[count] = place;
            flags[count] = from[place];
            count += from[place] != 0;
        }
    }

    // Sets the flags between two of a word that are less than CLOSED apart.
    template <int CLOSED>
    ZEROCAST_FN void close_gaps() {
        for (int i = 0; i < count; i++) {
            u64 set = flags[i], below = 0, closed = set;
            for (int k = 1; k < CLOSED; k++) {
                u64 above = 0;
                for (int j = 1; j <= CLOSED - k; j++) above |= set >> j;
                below |= set << k;
                closed |= below & above;
            }
            flags[i] = closed;
        }
    }
};

// Where elements of runs are copied to, and what they are copied from.
template <int SIZE>
struct RunsCopy {
    u8* to;
    const u8 *to_end, *values, *values_end;

    // The elements between two runs of two words.
    ZEROCAST_FN void gap(i64 first, i64 count) {
        memcpy(to, values + first * SIZE, count * SIZE);
        to += count * SIZE;
    }

    // `count` elements from `first` on, whose flags are in one word.
    ZEROCAST_FN void operator()(i64 first, i64 count) {
        const u8* from = values + first * SIZE;
        i64 size = count * SIZE;
#if defined(__AVX512BW__)
        if constexpr (SIZE == 1) {  // a line alone is read
            i64 skipped = first % WORD;
            u64 taken = ~0ull >> (WORD - count) << skipped;
            auto line = _mm512_maskz_loadu_epi8(taken, from - skipped);
            _mm512_mask_storeu_epi8(to - skipped, taken, line);
            to += size;
            return;
        }
#endif
        // Most runs are short: a copy of a fixed size costs a load, and the next run overwrites
        // what it has too much.
        if (size <= 8 && to_end - to >= 8 && values_end - from >= 8)
            memcpy(to, from, 8);
        else
            memcpy(to, from, size);
        to += size;
    }
};

// How many flagged words before it is copied the memory of a word is prefetched.
constexpr int AHEAD = 64;

// Calls batch(runs, count) for all runs of flagged elements, many at once, those that are less than
// CLOSED apart as one, and copies their elements.
template <int SIZE, int CLOSED, class Batch>
ZEROCAST_FN void each_batch_of_runs(const RunsTarget& target, RunsCopy<SIZE>& copy,
                                    const Batch& batch) {
    i64 words = (target.count + WORD - 1) / WORD;
    FlaggedWords found;
    Runs runs;
    int last = -1;                      // the run that may go on
    i64 start = 0, last_end = -CLOSED;  // of it; before the first
    for (i64 from = 0; from < words; from += FlaggedWords::MOST) {
        found.find(target.flags + from, (int)min_of(FlaggedWords::MOST, words - from));
        found.template close_gaps<CLOSED>();
        found.flags[found.count] = 0;
        const u8* values = target.values + from * WORD * SIZE;
        for (int i = 0; i < min_of(AHEAD, found.count); i++)
            __builtin_prefetch(values + found.places[i] * WORD * SIZE);
        u64 left = found.flags[0];
        for (int i = 0; i < found.count;) {  // once a run of a word, or the next word's first
            int later = (int)min_of(i + AHEAD, found.count - 1);
            __builtin_prefetch(values + found.places[later] * WORD * SIZE);
            i64 at = (from + found.places[i]) * WORD;
            u64 carried = left + (left & -left);
            i64 first = at + __builtin_ctzll(left);
            i64 end = at + (carried ? __builtin_ctzll(carried) : WORD);
            i64 gap = first - last_end;
            bool is_apart = gap >= CLOSED;
            if (!is_apart && gap > 0) copy.gap(last_end, gap);
            copy(first, end - first);
            last += is_apart;
            start = is_apart ? first : start;
            runs.starts[last] = start;
            runs.ends[last] = last_end = end;
            left &= carried;
            bool is_done = !left;
            i += is_done;
            left = is_done ? found.flags[i] : left;
            if (last == Runs::MOST) {
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

// Writes entries and elements of SIZE bytes where there is place for the most, moves them together
// and says how many they are.
template <int SIZE>
void write_runs(const RunsTarget& target) {
    if (!target.data) return;  // where nothing can have changed
    i64 most = target.sizes[0];
    u8 *gaps = target.data, *lengths = gaps + 2 * most, *elements = lengths + most;
    RunsCopy<SIZE> copy{elements, elements + target.sizes[1] * SIZE, target.values,
                        target.values + target.count * SIZE};
    i64 all_entries = 0, end = 0;
    each_batch_of_runs<SIZE, ENTRY_BYTES / SIZE + 1>(target, copy, [&](const Runs& runs, int n) {
        // Local copies, because stores of bytes might alias the originals.
        i64 entries = all_entries, before = end;
        for (int i = 0; i < n; i++) {
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
    });
    i64 all_bytes = copy.to - elements;
    memmove(gaps + 2 * all_entries, lengths, all_entries);
    memmove(gaps + 3 * all_entries, elements, all_bytes);
    target.sizes[0] = all_entries;
    target.sizes[1] = all_bytes / SIZE;
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
    auto piece = [](const RunsTarget& target, i64, i64, i64) {
        if (target.itemsize == 1) return write_runs<1>(target);
        if (target.itemsize == 2) return write_runs<2>(target);
        if (target.itemsize == 4) return write_runs<4>(target);
        write_runs<8>(target);
    };
    share_in_parallel<RunsTarget>(table, count, threads, elements, piece);
}
