// The digest of the lines of a row of keys, in registers.
#pragma once

#include "cpu/digest_keys.h"
#include "cpu/simd.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

constexpr i64 LINE = DIGEST_LINE_BYTES;
constexpr int LINE_REGISTERS = LINE / sizeof(Native::Int);

// Register by register: a copy of the line may be made by halves of registers, and a load that
// takes what two stores wrote waits until both have left the core.
ZEROCAST_FN void load_line(Native::Int* line, const u8* from) {
    for (int k = 0; k < LINE_REGISTERS; k++) {
        line[k] = Native::load_as<Native::Int>(from + k * sizeof(Native::Int));
#if defined(__AVX512F__)
        // Here multiplications take an operand from memory, and each would read the line again.
        asm("" : "+v"(line[k]));
#endif
    }
}

// The byte of a row at which a place of the tensor is; unsigned, which takes one instruction.
ZEROCAST_FN u64 in_digest_row(u64 place) { return place % DIGEST_ROW_BYTES; }

// The sums over lines of a row, lane by lane: exact, as a row has 64 lines.
struct DigestSum {
    typedef Native::Wide Wide;

    Native::Int plain[LINE_REGISTERS] = {}, weighted[LINE_REGISTERS] = {};

    // Adds a register whose first byte is byte `i` of the row, a multiple of its size.
    ZEROCAST_FN void add(Native::Int bytes, u64 i) {
#pragma GCC unroll 4
        for (int k = 0; k < LINE_REGISTERS; k++)
            if (i / sizeof bytes % LINE_REGISTERS == (u64)k) add(bytes, (i64)(i / LINE), k);
    }
    // Adds line `number` of the row.
    ZEROCAST_FN void add(const Native::Int* line, i64 number) {
        for (int k = 0; k < LINE_REGISTERS; k++) add(line[k], number, k);
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
    // Adds register `k` of a line, which the compiler has to know, or the sums would be in memory.
    ZEROCAST_FN void add(Native::Int bytes, i64 line, int k) {
        auto weights = Native::splat(DIGEST_KEYS.weights[line]);
        plain[k] = Native::add_products(plain[k], bytes, Native::splat(0x00010001));
        weighted[k] = Native::add_products(weighted[k], bytes, weights);
    }
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

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
