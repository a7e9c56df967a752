// How a CUDA launch cuts what follows the whole weight: stored planes of scales, and matrices that
// are transposed.
//
// Python makes the tiles (zerocast/backends/cuda/tiling.py); what rows and columns count is said by
// the kernel.
#pragma once

#include "cuda/tiles.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

struct PlaneTile {
    i32 weight;  // row of the table
    i32 plane;   // which of the weight's planes
    i64 row, row_end, col;
};
static_assert(sizeof(PlaneTile) == 32, "four words of the table that Python makes");

// Four stored scales side by side, by their bit patterns.
struct Entries {
    i32 bits[4];
};

ZEROCAST_FN Entries four_times(i32 bits) { return Entries{{bits, bits, bits, bits}}; }

// The first `left` of four entries, all at once where there are four and the address allows it.
template <class Stored>
ZEROCAST_FN void store_entries(Stored* to, const Entries& e, i64 left) {
    if (left >= 4 && (u64)to % (4 * sizeof(Stored)) == 0) {
        if constexpr (sizeof(Stored) == 1)
            *(u32*)to =
                (u32)e.bits[0] | (u32)e.bits[1] << 8 | (u32)e.bits[2] << 16 | (u32)e.bits[3] << 24;
        else
            *(int4*)to = int4{e.bits[0], e.bits[1], e.bits[2], e.bits[3]};
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (k >= left) continue;
        if constexpr (sizeof(Stored) == 1)
            to[k] = (u8)e.bits[k];
        else
            to[k] = Scalar::value(e.bits[k]);
    }
}

// Stores one tile of a plane, all stored rows of some rows of blocks, with their padding. A thread
// takes four stored columns side by side: ACROSS threads take a row of blocks, and the others of
// NUM_THREADS the next ones. stored_at(i, j) is the bit pattern of the scale that stands in row i
// and column j of the blocks as they are stored.
template <class Stored, int ACROSS, int NUM_THREADS, class StoredAt>
ZEROCAST_FN void store_scales(const ScalePlane& plane, const PlaneTile& tile,
                              const StoredAt& stored_at) {
    // Rows and columns, and their repeats, change places where the plane is stored transposed.
    bool transposed = plane.transposed;
    i64 rows = transposed ? plane.cols : plane.rows, cols = transposed ? plane.rows : plane.cols;
    i64 row_repeat = transposed ? plane.col_repeat : plane.row_repeat;
    i64 col_repeat = transposed ? plane.row_repeat : plane.col_repeat;
    i64 col = tile.col + threadIdx.x % ACROSS * 4;
    if (col >= plane.padded_cols) return;
    auto padding = (i32)plane.padding;
    for (i64 i = tile.row + threadIdx.x / ACROSS; i < tile.row_end; i += NUM_THREADS / ACROSS) {
        Entries scales = four_times(padding);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (col + k >= cols || i * row_repeat >= rows) continue;
            scales.bits[k] = stored_at(i, col_repeat == 1 ? col + k : (col + k) / col_repeat);
        }
        for (i64 r = 0; r < row_repeat; r++) {
            i64 row = i * row_repeat + r;
            if (row >= plane.padded_rows) break;
            store_entries((Stored*)plane.scale_inv + row * plane.padded_cols + col,
                          row < rows ? scales : four_times(padding), plane.padded_cols - col);
        }
    }
}

// --- small squares of codes, transposed in the registers of one thread ---

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
