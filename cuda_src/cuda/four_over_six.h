// 4-over-6 on a GPU: sixteen neighbouring lanes are the sixteen rows inside a block.
#pragma once

#include "arithmetic/scaling.h"
#include "cuda/tiles.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

constexpr int CHOICE_SIDE = 16;  // of a block

ZEROCAST_FN float shuffled(float x, int apart) {
    return Scalar::value(__shfl_xor_sync(ALL_LANES, Scalar::bits(x), apart));
}

// Whether map4 is the better one: sums over the rows by the tree 8, 4, 2, 1. All lanes of the warp
// take part: one half of a block adds up map4's errors, the other half map6's.
ZEROCAST_FN bool choose(const Errors<Scalar>& rows) {
    bool first_half = threadIdx.x % CHOICE_SIDE < CHOICE_SIDE / 2;
    float sum = first_half ? rows.map4 : rows.map6, others = first_half ? rows.map6 : rows.map4;
    sum = sum + shuffled(others, CHOICE_SIDE / 2);
#pragma unroll
    for (int apart = CHOICE_SIDE / 4; apart > 0; apart /= 2) sum = sum + shuffled(sum, apart);
    others = shuffled(sum, CHOICE_SIDE / 2);
    return first_half ? sum < others : others < sum;
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
