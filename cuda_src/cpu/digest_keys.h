// What halfwords are multiplied by in a row of the digest, as registers take it.
#pragma once

#include "arithmetic/digest.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// Of a row: the weight of each halfword, and the factors of each lane. No register lies in two
// lines.
struct DigestKeys {
    alignas(64) short weights[DIGEST_ROW_BYTES / 2];
    alignas(64) i32 plain[DIGEST_LANES];
    alignas(64) i32 weighted[DIGEST_LANES];

    constexpr DigestKeys() : weights(), plain(), weighted() {
        for (i64 i = 0; i < DIGEST_ROW_BYTES / 2; i++) weights[i] = (short)halfword_weight(i);
        for (i64 i = 0; i < DIGEST_LANES; i++) {
            plain[i] = plain_factor(i);
            weighted[i] = weighted_factor(i);
        }
    }
};
inline constexpr DigestKeys DIGEST_KEYS;

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
