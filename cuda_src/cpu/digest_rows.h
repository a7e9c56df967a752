// The digest of any bytes, which may be copied meanwhile.
#pragma once

#include "cpu/digest_sum.h"
#include "cpu/launch.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// Bytes [at, end) of a row, one by one.
inline u64 digest_bytes(const u8* row, i64 at, i64 end) {
    u64 total = 0;
    for (; at < end; at++) total += ((u64)row[at] << at % 4 * 8) * column_factor(at / 4);
    return total;
}

enum Copying { NONE, CACHED, STREAMED };

// Bytes [at, end) of a row, before its own factor; they are copied to `to`, where the row begins
// there, too.
template <Copying COPY>
u64 digest_row(const u8* row, i64 at, i64 end, u8* to) {
    i64 head = min_of((at + LINE - 1) / LINE * LINE, end);
    i64 tail = max_of(end / LINE * LINE, head);
    DigestSum sum;
    for (i64 i = head; i < tail; i += LINE) {
        __builtin_prefetch(row + i + PREFETCH_AHEAD * 4, 0, 2);  // into L2, as the keys fill L1
        alignas(LINE) Native::Int line[LINE_REGISTERS];
        load_line(line, row + i);
        for (int k = 0; COPY == CACHED && k < LINE_REGISTERS; k++)
            Native::store(to + i + k * sizeof(Native::Int), line[k]);
        if (COPY == STREAMED) stream_line(to + i, (const u8*)line);
        sum.add(line, i);
    }
    if (COPY != NONE) {
        __builtin_memcpy(to + at, row + at, head - at);
        __builtin_memcpy(to + tail, row + tail, end - tail);
    }
    return sum_of(sum.parts()) + digest_bytes(row, at, head) + digest_bytes(row, tail, end);
}

// Bytes [begin, end) of a tensor whose byte `first` stands at `from`, and is copied to `to`.
template <Copying COPY>
u64 digest_rows(const u8* from, i64 first, i64 begin, i64 end, u8* to = nullptr) {
    u64 total = 0;
    for (i64 at = begin; at < end;) {
        i64 row = at / DIGEST_ROW_BYTES, start = row * DIGEST_ROW_BYTES;
        i64 stop = min_of(end, start + DIGEST_ROW_BYTES);
        u8* row_to = COPY == NONE ? nullptr : to + (start - first);
        total += row_factor(row)
                 * digest_row<COPY>(from + (start - first), at - start, stop - start, row_to);
        at = stop;
    }
    return total;
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
