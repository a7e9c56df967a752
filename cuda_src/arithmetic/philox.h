// Random words by position: Philox 4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random
// numbers: as easy as 1, 2, 3" (SC 2011).
//
// A word depends on the seed, the weight's name, the step and the element's place in the weight,
// and on nothing else: not on who draws it, nor in which order.
#pragma once

#include "arithmetic/lanes.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// The words of one weight in one step.
struct RandomWords {
    u32 key[2];  // low and high half of the seed
    u32 name_hash, step;

    ZEROCAST_FN RandomWords(u64 seed, const i64* counter)
        : key{(u32)seed, (u32)(seed >> 32)}, name_hash((u32)counter[0]), step((u32)counter[1]) {}

    // The words of elements 4 * i to 4 * i + 3, where `low` and `high` are the halves of i.
    template <class L>
    ZEROCAST_FN void of_four(typename L::Unsigned low, typename L::Unsigned high,
                             typename L::Unsigned (&words)[4]) const {
        typedef typename L::Unsigned Unsigned;
        constexpr u32 MULTIPLIER_0 = 0xD2511F53u, MULTIPLIER_1 = 0xCD9E8D57u;
        constexpr u32 WEYL_0 = 0x9E3779B9u,  // the golden ratio, less 1
            WEYL_1 = 0xBB67AE85u;            // the square root of 3, less 1
        Unsigned zero = low ^ low;
        Unsigned c0 = low, c1 = high, c2 = zero + name_hash, c3 = zero + step;
        u32 key_0 = key[0], key_1 = key[1];
        for (int round = 0; round < 10; round++) {
            Unsigned high_0 = L::multiply_high(c0, MULTIPLIER_0), low_0 = c0 * MULTIPLIER_0;
            Unsigned high_1 = L::multiply_high(c2, MULTIPLIER_1), low_1 = c2 * MULTIPLIER_1;
            c0 = high_1 ^ c1 ^ key_0;
            c1 = low_1;
            c2 = high_0 ^ c3 ^ key_1;
            c3 = low_0;
            key_0 += WEYL_0;
            key_1 += WEYL_1;
        }
        words[0] = c0;
        words[1] = c1;
        words[2] = c2;
        words[3] = c3;
    }
};

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
