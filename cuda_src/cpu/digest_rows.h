// The digest of any bytes, which may be copied meanwhile.
#pragma once

#include "cpu/digest_sum.h"
#include "cpu/launch.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// Bytes [at, end) of a row that begins at place `start` of the tensor, one by one.
inline u64 digest_bytes(const u8* row, i64 at, i64 end, i64 start) {
    u64 total = 0;
    for (; at < end; at++) total += digest_of_change(row[at], 0, start + at);
    return total;
}

// What becomes of bytes beside their digest: nothing, of those that are in a cache or in memory; or
// they are copied, through the caches or past them.
enum Digested { IN_CACHE, IN_MEMORY, COPIED, STREAMED };

template <Digested BYTES>
constexpr bool COPIES = BYTES == COPIED || BYTES == STREAMED;

// Rows whose lines are digested in turn by the same weights, as many as there are registers for: of
// 512 KiB in a cache 75 GB/s by four, 57 by two, 38 by one, whose sums wait for each other. Copies
// wait for memory, and are slower in more streams than one.
constexpr int ROWS_AT_ONCE = Native::WIDTH / 4;

// The level of the cache into which lines are asked for: for a copy past the caches the second, as
// without a digest. Into the first, it took 8 to 9 % longer on an Emerald Rapids. Where bytes are
// in a cache none are asked for, as what follows them is not there: of 44 MB that another process
// holds, read in pieces of 256 KiB, the digest took 0.5 to 0.6 ms of 10 instead of 0.9 to 1.1; with
// slower memory, of 13 ms, no less.
template <Digested BYTES>
constexpr int ASKED_INTO = BYTES == STREAMED ? 2 : 3;

// How many bytes ahead lines are asked for: further than the rows at hand.
template <int ROWS>
constexpr i64 ASKED_AHEAD = ROWS * DIGEST_ROW_BYTES > 8192 ? ROWS * DIGEST_ROW_BYTES : 8192;

// Lines [at, end) of each of ROWS rows; they are copied to `to`, where the first begins there, too.
// Returns their digests, in parts; the first is row `number` of the tensor.
template <Digested BYTES, int ROWS>
ZEROCAST_FN Native::Wide digest_lines(const u8* rows, i64 at, i64 end, u8* to, i64 number) {
    DigestSum sums[ROWS];
    auto take = [&](i64 line_number) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            i64 place = r * DIGEST_ROW_BYTES + line_number * LINE;
            if (BYTES != IN_CACHE)
                __builtin_prefetch(rows + place + ASKED_AHEAD<ROWS>, 0, ASKED_INTO<BYTES>);
            alignas(LINE) Native::Int line[LINE_REGISTERS];
            load_line(line, rows + place);
            for (int k = 0; BYTES == COPIED && k < LINE_REGISTERS; k++)
                Native::store(to + place + k * sizeof(Native::Int), line[k]);
            if (BYTES == STREAMED) stream_line(to + place, (const u8*)line);
            sums[r].add(line, line_number);
        }
    };
    // Eight at a time: threads' copies past the caches took 0.2 to 0.8 ms of 30 less than by two.
    // Without a count of its own for each line, 0.3 ms of 22 less.
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

// Bytes [begin, end) of a tensor whose byte `first` stands at `from`, and is copied to `to`.
template <Digested BYTES>
u64 digest_rows(const u8* from, i64 first, i64 begin, i64 end, u8* to = nullptr) {
    Native::Wide lines{};
    u64 edges = 0;
    for (i64 stop; begin < end; begin = stop) {
        i64 number = begin / DIGEST_ROW_BYTES, start = number * DIGEST_ROW_BYTES;
        stop = min_of(end, start + DIGEST_ROW_BYTES);
        const u8* row = from + (start - first);
        u8* row_to = COPIES<BYTES> ? to + (start - first) : nullptr;
        constexpr int ROWS = COPIES<BYTES> ? 1 : ROWS_AT_ONCE;
        if (begin == start && end - start >= ROWS * DIGEST_ROW_BYTES) {
            stop = start + ROWS * DIGEST_ROW_BYTES;
            lines += digest_lines<BYTES, ROWS>(row, 0, DIGEST_ROW_BYTES, row_to, number);
            continue;
        }
        i64 at = begin - start, last = stop - start;
        i64 head = min_of((at + LINE - 1) / LINE * LINE, last);
        i64 tail = max_of(last / LINE * LINE, head);
        lines += digest_lines<BYTES, 1>(row, head, tail, row_to, number);
        if (at == head && tail == last) continue;
        edges += digest_bytes(row, at, head, start) + digest_bytes(row, tail, last, start);
        if (!COPIES<BYTES>) continue;
        __builtin_memcpy(row_to + at, row + at, head - at);
        __builtin_memcpy(row_to + tail, row + tail, last - tail);
    }
    return sum_of(lines) + edges;
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
