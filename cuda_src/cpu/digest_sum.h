// The digest of the lines of a row of keys, in registers.
#pragma once

#include "cpu/column_factors.h"
#include "cpu/simd.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

constexpr i64 LINE = 64;  // bytes
constexpr int LINE_REGISTERS = LINE / sizeof(Native::Int);

// Register by register: a copy of the line may be made by halves of registers, and a load that
// takes what two stores wrote waits until both have left the core.
ZEROCAST_FN void load_line(Native::Int* line, const u8* from) {
    for (int k = 0; k < LINE_REGISTERS; k++) {
        line[k] = Native::load_as<Native::Int>(from + k * sizeof(Native::Int));
#if defined(__AVX512F__)
        // Here multiplications and shifts take an operand from memory, and each would read the line
        // again: 20 MiB at 15 to 20 GB/s instead of 38.
        asm("" : "+v"(line[k]));
#endif
    }
}

// The byte of a row at which a place of the tensor is; unsigned, which takes one instruction.
ZEROCAST_FN u64 in_digest_row(u64 place) { return place % DIGEST_ROW_BYTES; }

// The sum over lines of a row: of words in even columns, and in odd ones.
struct DigestSum {
    typedef Native::Wide Wide;

    Wide even{}, odd{};

    // Adds a register whose first byte is byte `i` of the row, a multiple of its size.
    ZEROCAST_FN void add(Native::Int bytes, u64 i) {
        Wide words = (Wide)bytes;
        even += Native::multiply_low(words, Native::load_as<Wide>(COLUMN_FACTORS.all + i / 4));
        odd += Native::multiply_low(words >> 32, Native::load_as<Wide>(COLUMN_FACTORS.odd + i / 4));
    }
    // Adds the line whose first byte is byte `i` of the row.
    ZEROCAST_FN void add(const Native::Int* line, u64 i) {
        for (int k = 0; k < LINE_REGISTERS; k++) add(line[k], i + k * sizeof(Native::Int));
    }
    // The digest, in parts, if that is row `row` of the tensor.
    ZEROCAST_FN Wide digest(i64 row) const { return (even + odd) * (Wide{} + row_factor(row)); }
};

ZEROCAST_FN u64 sum_of(Native::Wide parts) {
    u64 total = 0;
    for (int i = 0; i < Native::WIDTH / 2; i++) total += parts[i];
    return total;
}

// The digest of a line, in parts; `place` is that of its first byte, a multiple of LINE.
ZEROCAST_FN Native::Wide digest_of_line(const u8* from, u64 place) {
    Native::Int line[LINE_REGISTERS];
    load_line(line, from);
    DigestSum sum;
    sum.add(line, in_digest_row(place));
    return sum.digest(place / DIGEST_ROW_BYTES);
}

ZEROCAST_FN void add_to(u64* sum, u64 total) { __atomic_fetch_add(sum, total, __ATOMIC_RELAXED); }

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
