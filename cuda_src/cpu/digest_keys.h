// What halfwords are multiplied by in a row of the digest, as registers take it.
#pragma once

#include "arithmetic/digest.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// Of a row: both weights of each line, lower and upper, and the factors of each lane. No register
// lies in two lines of a cache. (A table of the weights of all halfwords, 4 KiB, was crowded out of
// the nearest cache by a cast: digests of MXFP8 codes took 1.5 ms of 20 instead of 0.9.)
struct DigestKeys {
    alignas(64) i32 weights[DIGEST_LINES];
    alignas(64) i32 plain[DIGEST_LANES];
    alignas(64) i32 weighted[DIGEST_LANES];

    constexpr DigestKeys() : weights(), plain(), weighted() {
        for (i64 line = 0; line < DIGEST_LINES; line++)
            weights[line] = halfword_weight(line, 1) * 65536 | (halfword_weight(line, 0) & 0xFFFF);
        for (i64 i = 0; i < DIGEST_LANES; i++) {
            plain[i] = plain_factor(i);
            weighted[i] = weighted_factor(i);
        }
    }
};
inline constexpr DigestKeys DIGEST_KEYS;

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
