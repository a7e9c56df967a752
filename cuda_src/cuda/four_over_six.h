// 4-over-6 on a GPU: sixteen neighbouring lanes are the sixteen rows inside a block.
#pragma once

#include "arithmetic/scaling.h"
#include "cuda/tiles.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

constexpr int CHOICE_SIDE = 16;  // of a block

// 1 where map4 is the better one, else 0, in the first of the block's lanes: sums over the rows by
// the tree 8, 4, 2, 1. All lanes of the warp take part.
ZEROCAST_FN u8 choose(Errors<Scalar> rows) {
#pragma unroll
    for (int apart = CHOICE_SIDE / 2; apart > 0; apart /= 2) {
        i32 map4 = __shfl_xor_sync(ALL_LANES, Scalar::bits(rows.map4), apart);
        i32 map6 = __shfl_xor_sync(ALL_LANES, Scalar::bits(rows.map6), apart);
        rows.map4 = rows.map4 + Scalar::value(map4);
        rows.map6 = rows.map6 + Scalar::value(map6);
    }
    return rows.map4 < rows.map6;
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
