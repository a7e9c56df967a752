// The column factors of a row of the digest.
#pragma once

#include "arithmetic/digest.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// Their lower and their upper halves: no register of them lies in two lines.
struct ColumnFactors {
    alignas(64) u32 low[DIGEST_ROW], high[DIGEST_ROW];

    constexpr ColumnFactors() : low(), high() {
        for (i64 c = 0; c < DIGEST_ROW; c++) {
            low[c] = (u32)column_factor(c);
            high[c] = (u32)(column_factor(c) >> 32);
        }
    }
    ZEROCAST_FN u64 of(i64 column) const { return low[column] | (u64)high[column] << 32; }
};
inline constexpr ColumnFactors COLUMN_FACTORS;

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
