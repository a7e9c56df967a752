// The column factors of a row of the digest.
#pragma once

#include "arithmetic/digest.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// All of them, and those of odd columns where the even ones' stand: no register lies in two lines.
struct ColumnFactors {
    alignas(64) u32 all[DIGEST_ROW], odd[DIGEST_ROW];

    constexpr ColumnFactors() : all(), odd() {
        for (i64 c = 0; c < DIGEST_ROW; c++) {
            all[c] = column_factor(c);
            odd[c] = column_factor(c | 1);
        }
    }
};
inline constexpr ColumnFactors COLUMN_FACTORS;

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
