// digest: adds to a sum the digest of a range of a tensor's bytes. A thread takes whole rows of
// keys.
#include "arithmetic/digest.h"
#include "cpu/launch.h"
#include "cpu/simd.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {
namespace {

// What halfwords are multiplied by in a row: both weights of each line, lower and upper, and the
// factors of each lane. No register spans two cache lines.
struct DigestKeys {
    alignas(64) i32 weights[DIGEST_LINES];
    alignas(64) i32 plain[DIGEST_LANES];
    alignas(64) i32 weighted[DIGEST_LANES];

    constexpr DigestKeys() : weights(), plain(), weighted() {
        for (i64 line = 0; line < DIGEST_LINES; line++)
            weights[line] = halfword_weight(line, 1) * 65536 | (halfword_weight(line, 0) & 0xFFFF);
        for (i64 i = 0; i < DIGEST_LANES; i++) {
            plain[i] = plain_factor(i);
            weighted[i] = weighted_factor(i);
        }
    }
};
constexpr DigestKeys DIGEST_KEYS;

constexpr i64 LINE = DIGEST_LINE_BYTES;
constexpr int LINE_REGISTERS = LINE / sizeof(Native::Int);

ZEROCAST_FN void load_line(Native::Int* line, const u8* from) {
    for (int k = 0; k < LINE_REGISTERS; k++) {
        line[k] = Native::load_as<Native::Int>(from + k * sizeof(Native::Int));
#if defined(__AVX512F__)
        // Here multiplications take an operand from memory, and each would read the line again.
        asm("" : "+v"(line[k]));
#endif
    }
}

// The sums over lines of a row, lane by lane: exact, as a row has 64 lines.
struct DigestSum {
    typedef Native::Wide Wide;

    Native::Int plain[LINE_REGISTERS] = {}, weighted[LINE_REGISTERS] = {};

    // Adds line `number` of the row.
    ZEROCAST_FN void add(const Native::Int* line, i64 number) {
        auto weights = Native::splat(DIGEST_KEYS.weights[number]);
        for (int k = 0; k < LINE_REGISTERS; k++) {
            plain[k] = Native::add_products(plain[k], line[k], Native::splat(0x00010001));
            weighted[k] = Native::add_products(weighted[k], line[k], weights);
        }
    }
    // The digest, in parts, if that is row `row` of the tensor.
    ZEROCAST_FN Wide digest(i64 row) const {
        Wide total{};
        for (int k = 0; k < LINE_REGISTERS; k++) {
            total += products(plain[k], DIGEST_KEYS.plain + k * Native::WIDTH)
                     + products(weighted[k], DIGEST_KEYS.weighted + k * Native::WIDTH);
        }
        return total * (Wide{} + row_factor(row));
    }

  private:
    // Lanes times their factors, added up in pairs.
    static ZEROCAST_FN Wide products(Native::Int lanes, const i32* factors) {
        auto even = (Wide)lanes, of_even = Native::load_as<Wide>(factors);
        return Native::multiply_low_signed(even, of_even)
               + Native::multiply_low_signed(even >> 32, of_even >> 32);
    }
};

ZEROCAST_FN u64 sum_of(Native::Wide parts) {
    u64 total = 0;
    for (int i = 0; i < Native::WIDTH / 2; i++) total += parts[i];
    return total;
}

// Bytes [at, end) of a row that begins at place `start` of the tensor, one by one.
u64 digest_bytes(const u8* row, i64 at, i64 end, i64 start) {
    u64 total = 0;
    for (; at < end; at++) total += digest_of_change(row[at], 0, start + at);
    return total;
}

// Rows whose lines are digested alternately by the same weights, as many as there are registers
// for: of 512 KiB in a cache 75 GB/s by four, 57 by two, 38 by one, whose sums wait for each other.
constexpr int ROWS_AT_ONCE = Native::WIDTH / 4;

// How many bytes ahead lines are prefetched: further than the present rows.
template <int ROWS>
constexpr i64 ASKED_AHEAD = ROWS * DIGEST_ROW_BYTES > 8192 ? ROWS * DIGEST_ROW_BYTES : 8192;

// Lines [at, end) of each of ROWS rows, the first of which is row `number` of the tensor. Returns
// their digests, in parts.
template <int ROWS>
ZEROCAST_FN Native::Wide digest_lines(const u8* rows, i64 at, i64 end, i64 number) {
    DigestSum sums[ROWS];
    auto take = [&](i64 line_number) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            const u8* from = rows + r * DIGEST_ROW_BYTES + line_number * LINE;
            __builtin_prefetch(from + ASKED_AHEAD<ROWS>, 0, 3);
            Native::Int line[LINE_REGISTERS];
            load_line(line, from);
            sums[r].add(line, line_number);
        }
    };
    // Without a separate count for each line, 0.3 ms of 22 less.
    constexpr i64 AT_A_TIME = 8;
    i64 next = at / LINE, last = end / LINE;
    for (; next + AT_A_TIME <= last; next += AT_A_TIME) {
#pragma GCC unroll 8
        for (i64 l = 0; l < AT_A_TIME; l++) take(next + l);
    }
    for (; next < last; next++) take(next);
    Native::Wide digest{};
    for (int r = 0; r < ROWS; r++) digest += sums[r].digest(number + r);
    return digest;
}

// Bytes [begin, end) of a tensor whose byte `first` stands at `from`.
u64 digest_rows(const u8* from, i64 first, i64 begin, i64 end) {
    Native::Wide lines{};
    u64 edges = 0;
    for (i64 stop; begin < end; begin = stop) {
        i64 number = begin / DIGEST_ROW_BYTES, start = number * DIGEST_ROW_BYTES;
        stop = min_of(end, start + DIGEST_ROW_BYTES);
        const u8* row = from + (start - first);
        if (begin == start && end - start >= ROWS_AT_ONCE * DIGEST_ROW_BYTES) {
            stop = start + ROWS_AT_ONCE * DIGEST_ROW_BYTES;
            lines += digest_lines<ROWS_AT_ONCE>(row, 0, DIGEST_ROW_BYTES, number);
            continue;
        }
        i64 at = begin - start, last = stop - start;
        i64 head = min_of((at + LINE - 1) / LINE * LINE, last);
        i64 tail = max_of(last / LINE * LINE, head);
        lines += digest_lines<1>(row, head, tail, number);
        edges += digest_bytes(row, at, head, start) + digest_bytes(row, tail, last, start);
    }
    return sum_of(lines) + edges;
}

}  // namespace
}  // namespace ZEROCAST_ISA
}  // namespace zerocast

ZEROCAST_EXPORT(digest)(const void* table, long long count, long long threads) {
    using namespace zerocast;
    auto span = [](const DigestTarget& target, i64) {
        return Span{target.first, target.first + target.bytes, DIGEST_ROW_BYTES};
    };
    auto piece = [](const DigestTarget& target, i64 begin, i64 end, i64) {
        u64 digest = digest_rows(target.data, target.first, begin, end);
        __atomic_fetch_add(target.sum, digest, __ATOMIC_RELAXED);
    };
    share_in_parallel<DigestTarget>(table, count, threads, span, piece);
}
