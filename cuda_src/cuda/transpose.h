// Small squares of codes, transposed in the registers of one CUDA thread.
#pragma once

#include "arithmetic/lanes.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// Four words, the rows of 4x4 bytes, become the columns.
ZEROCAST_FN void transpose_4x4(u32 (&w)[4]) {
    u32 low01 = __byte_perm(w[0], w[1], 0x5140), high01 = __byte_perm(w[0], w[1], 0x7362);
    u32 low23 = __byte_perm(w[2], w[3], 0x5140), high23 = __byte_perm(w[2], w[3], 0x7362);
    w[0] = __byte_perm(low01, low23, 0x5410);
    w[1] = __byte_perm(low01, low23, 0x7632);
    w[2] = __byte_perm(high01, high23, 0x5410);
    w[3] = __byte_perm(high01, high23, 0x7632);
}

// The same of 4x4 nibbles, four in the low half of each word.
ZEROCAST_FN void transpose_4x4_nibbles(u32 (&w)[4]) {
    u32 column[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        column[j] = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) column[j] |= (w[i] >> 4 * j & 0xFu) << 4 * i;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) w[j] = column[j];
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
