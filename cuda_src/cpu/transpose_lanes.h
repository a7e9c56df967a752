// Transposes a square of elements in the registers.
#pragma once

#include "cpu/simd.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// Two registers, the first halves of them interleaved (HALF 0), or their second halves.
template <class L, int HALF, class T, int... I>
ZEROCAST_FN T interleaved(T a, T b, Indices<I...>) {
    constexpr int W = L::WIDTH;
    return __builtin_shufflevector(a, b, (I / 2 + HALF * W / 2 + I % 2 * W)...);
}

// Element c of register r goes to element r of register c. Each round interleaves registers half of
// them apart, which moves one bit of the register's number into the element's.
template <class L, class T>
ZEROCAST_FN void transpose_lanes(T* x) {
    typedef typename IndicesTo<L::WIDTH>::Type All;
    constexpr int W = L::WIDTH;
    T y[W];
    for (int round = 1; round < W; round *= 2) {
        for (int i = 0; i < W / 2; i++) {
            y[2 * i] = interleaved<L, 0>(x[i], x[i + W / 2], All{});
            y[2 * i + 1] = interleaved<L, 1>(x[i], x[i + W / 2], All{});
        }
        for (int i = 0; i < W; i++) x[i] = y[i];
    }
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
