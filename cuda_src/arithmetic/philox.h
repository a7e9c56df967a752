// Random bits by position: Philox 4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random
// numbers: as easy as 1, 2, 3" (SC 2011).
//
// The 16 bits of an element depend on the seed, the weight's name, the step and the element's place
// in the weight, and on nothing else: not on who draws them, nor in which order.
#pragma once

#include "arithmetic/lanes.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// The bits of one weight in one step.
struct RandomDraws {
    u32 key[2];  // low and high half of the seed
    u32 name_hash, step;

    ZEROCAST_FN RandomDraws(u64 seed, const i64* counter)
        : key{(u32)seed, (u32)(seed >> 32)}, name_hash((u32)counter[0]), step((u32)counter[1]) {}

    // Those of elements 8 * i to 8 * i + 7: 16 an element, the first one's lowest, 4 elements in
    // each of `draws`.
    template <class L>
    ZEROCAST_FN void of_eight(typename L::Wide i, typename L::Wide (&draws)[2]) const {
        typedef typename L::Wide Wide;
        constexpr u32 MULTIPLIER_0 = 0xD2511F53u, MULTIPLIER_1 = 0xCD9E8D57u;
        constexpr u32 WEYL_0 = 0x9E3779B9u,  // the golden ratio, less 1
            WEYL_1 = 0xBB67AE85u;            // the square root of 3, less 1
        constexpr u64 LOW = 0xFFFFFFFFu;
        // Words of 32 bits, each in the low half of 64: what the upper halves hold is never read.
        Wide zero = i ^ i;
        Wide c0 = i, c1 = i >> 32, c2 = zero + name_hash, c3 = zero + step;
        u32 key_0 = key[0], key_1 = key[1];
        for (int round = 0; round < 10; round++) {
            Wide product_0 = L::multiply_low(c0, MULTIPLIER_0);
            Wide product_1 = L::multiply_low(c2, MULTIPLIER_1);
            c0 = product_1 >> 32 ^ c1 ^ (u64)key_0;
            c1 = product_1;
            c2 = product_0 >> 32 ^ c3 ^ (u64)key_1;
            c3 = product_0;
            key_0 += WEYL_0;
            key_1 += WEYL_1;
        }
        draws[0] = (c0 & LOW) | c1 << 32;
        draws[1] = (c2 & LOW) | c3 << 32;
    }
};

// The bits of one of four elements.
ZEROCAST_FN u32 draw_of(u64 draws, int element) { return (u32)(draws >> 16 * element) & 0xFFFFu; }

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
