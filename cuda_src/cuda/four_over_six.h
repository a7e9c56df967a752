// 4-over-6 on a GPU: sixteen neighbouring lanes are the sixteen rows inside a block.
#pragma once

#include "arithmetic/scaling.h"
#include "cuda/tiles.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

constexpr int CHOICE_SIDE = 16;  // of a block

// Summed errors of one row inside a block, or of a whole block, under both candidates.
struct Errors {
    float map4, map6;
};

// Both candidates of one block, ready to be applied to its elements.
template <bool SQUARED>
struct BlockCandidates {
    FourOverSixNumerics numerics;
    float map4, map6;                // the stored scales' values
    float multiplier4, multiplier6;  // what elements are multiplied by

    ZEROCAST_FN BlockCandidates(i32 tensor_amax, i64 scale_max, i32 amax_bits)
        : numerics(tensor_amax, scale_max) {
        i32 stored4 = numerics.stored<Scalar>(amax_bits, 1),
            stored6 = numerics.stored<Scalar>(amax_bits, 0);
        map4 = decode<E4M3, Scalar>(stored4);
        map6 = decode<E4M3, Scalar>(stored6);
        multiplier4 = numerics.multiplier_under<Scalar>(stored4);
        multiplier6 = numerics.multiplier_under<Scalar>(stored6);
    }

    // Adds the errors of one more element, rounded, to those on its left.
    ZEROCAST_FN void add(float x, Errors& sum) const {
        sum.map4 = sum.map4 + numerics.error<SQUARED, Scalar>(x, map4, multiplier4);
        sum.map6 = sum.map6 + numerics.error<SQUARED, Scalar>(x, map6, multiplier6);
    }
};

// 1 where map4 is the better one, else 0, in the first of the block's lanes: sums over the rows by
// the tree 8, 4, 2, 1. All lanes of the warp take part.
ZEROCAST_FN u8 choose(Errors rows) {
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
