// Transposes 64x64 bytes in the registers: first the squares of 16x16 bytes within themselves, then
// the squares among each other.
#pragma once

#include <string.h>

#include "cpu/simd.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

constexpr int TILE = 64;    // bytes: a cache line
constexpr int SQUARE = 16;  // bytes: as far as a shuffle of bytes reaches

typedef u8 Line[TILE];
typedef Native::Bytes4 Bytes4;
constexpr int WIDE = sizeof(Bytes4);
typedef IndicesTo<WIDE>::Type Everywhere;

// Within each 16 bytes: the first halves of a and b interleaved (HALF 0), or their second halves
// (HALF 1).
template <int HALF, int... I>
ZEROCAST_FN Bytes4 interleave(Bytes4 a, Bytes4 b, Indices<I...>) {
    return __builtin_shufflevector(a, b, (I / 16 * 16 + I % 16 / 2 + 8 * HALF + I % 2 * WIDE)...);
}

// a and b end to end, every second 16 bytes of them: from the first on (FIRST 0), or the second.
template <int FIRST, int... I>
ZEROCAST_FN Bytes4 every_second_square(Bytes4 a, Bytes4 b, Indices<I...>) {
    return __builtin_shufflevector(a, b, (I / 16 * 32 + FIRST * 16 + I % 16)...);
}

// 16 lines: in each 16 columns of them, byte (row r, column c) moves to (row c, column r). Four
// rounds of interleaving rows i and i + 8 do that.
inline void transpose_squares(const u8* from, i64 stride, Line* to) {
    for (int col = 0; col < TILE; col += WIDE) {
        Bytes4 a[SQUARE], b[SQUARE];
        for (int i = 0; i < SQUARE; i++) memcpy(&a[i], from + i * stride + col, WIDE);
        for (int round = 0; round < 4; round++) {
            for (int i = 0; i < 8; i++) {
                b[2 * i] = interleave<0>(a[i], a[i + 8], Everywhere{});
                b[2 * i + 1] = interleave<1>(a[i], a[i + 8], Everywhere{});
            }
            for (int i = 0; i < SQUARE; i++) a[i] = b[i];
        }
        for (int i = 0; i < SQUARE; i++) memcpy(&to[i][col], &a[i], WIDE);
    }
}

// Rows i, 16 + i, 32 + i and 48 + i of the transpose of a tile, whose squares are transposed within
// themselves: a register holds pieces of so many rows, and rounds of taking every second one sort
// them.
ZEROCAST_FN void rows_of(const Line* tile, int i, Line* rows) {
    constexpr int N = WIDE / SQUARE, REGISTERS = TILE / WIDE;
    for (int across = 0; across < REGISTERS; across++) {
        for (int down = 0; down < REGISTERS; down++) {
            Bytes4 a[N], b[N];
            for (int k = 0; k < N; k++)
                memcpy(&a[k], &tile[(down * N + k) * SQUARE + i][across * WIDE], WIDE);
            for (int round = 1; round < N; round *= 2) {
                for (int k = 0; k < N / 2; k++) {
                    b[k] = every_second_square<0>(a[2 * k], a[2 * k + 1], Everywhere{});
                    b[k + N / 2] = every_second_square<1>(a[2 * k], a[2 * k + 1], Everywhere{});
                }
                for (int k = 0; k < N; k++) a[k] = b[k];
            }
            for (int k = 0; k < N; k++) memcpy(&rows[across * N + k][down * WIDE], &a[k], WIDE);
        }
    }
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
