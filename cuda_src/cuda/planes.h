// How a CUDA launch cuts what follows the whole weight: stored planes of scales, and matrices that
// are transposed.
//
// Python makes the tiles (zerocast/backends/cuda/tiling.py); what rows and columns count is said by
// the kernel.
#pragma once

#include "cuda/tiles.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// The most threads side by side in a row of a plane of scales.
constexpr int MOST_ACROSS = 64;

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
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (k >= left) continue;
            if constexpr (SAME<Stored, float>)
                to[k] = Scalar::value(e.bits[k]);
            else
                to[k] = (Stored)e.bits[k];
        }
    }
}

// Four scales, `right` apart: all at once where they are adjacent and the address allows it.
template <class Raw>
ZEROCAST_FN Entries load_entries(const Raw* from, i64 right, i64 count) {
    if constexpr (sizeof(Raw) == 4) {
        if (right == 1 && count >= 4 && (u64)from % 16 == 0) {
            int4 four = *(const int4*)from;
            return Entries{{four.x, four.y, four.z, four.w}};
        }
    }
    Entries found{};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (k < count) found.bits[k] = (i32)from[k * right];
    }
    return found;
}

ZEROCAST_FN int at_most(i64 count, int most) { return count < most ? (int)count : most; }

// Threads side by side in a row of a plane that is stored with so many columns, four a thread, so
// that those of a narrow plane take several rows at once; tiling.scale_tile() cuts by the same.
ZEROCAST_FN int threads_across(i64 stored_cols) {
    int across = MOST_ACROSS;
    while (across > 1 && 2 * across >= stored_cols) across /= 2;
    return across;
}

// Stores one tile of a plane, all stored rows of some rows of blocks, with their padding. Block
// (i, j), as the plane is stored, is from[i * down + j * right]; convert(that, block) makes the bit
// pattern of its scale, where `block` is that index.
//
// A thread takes four stored columns of some rows of blocks, and has read all rows of a batch
// before it stores the first. Where a scale repeats to the right, all four are of one block.
template <class Stored, int NUM_THREADS, class Raw, class Convert>
ZEROCAST_FN void store_scales(const ScalePlane& plane, const PlaneTile& tile, const Raw* from,
                              i64 down, i64 right, const Convert& convert) {
    constexpr int BATCH = 2;
    // Rows and columns, and their repeats, change places where the plane is stored transposed.
    bool transposed = plane.transposed;
    i64 rows = transposed ? plane.cols : plane.rows, cols = transposed ? plane.rows : plane.cols;
    int repeat = (int)(transposed ? plane.col_repeat : plane.row_repeat);
    i64 col_repeat = transposed ? plane.row_repeat : plane.col_repeat;
    int across = threads_across(plane.padded_cols), step = NUM_THREADS / across;
    i64 col = tile.col + threadIdx.x % across * 4;
    i64 left = plane.padded_cols - col, count = cols - col;  // none of a thread behind the columns
    // From here on, rows are counted from the tile's first, of blocks and as they are stored.
    i64 first = tile.row * repeat, block = tile.row * down + col / col_repeat * right;
    int blocks = (int)(tile.row_end - tile.row);
    int filled = at_most(rows - first, blocks * repeat);
    int stored = at_most(plane.padded_rows - first, blocks * repeat);
    auto padding = (i32)plane.padding;
    auto to = (Stored*)plane.scale_inv + first * plane.padded_cols + col;
    if (col_repeat != 1) right = 0;
    for (int i = threadIdx.x / across; i < blocks; i += BATCH * step) {
        Entries scales[BATCH];
#pragma unroll
        for (int n = 0; n < BATCH; n++) {
            int row = i + n * step;
            scales[n] = four_times(padding);
            if (row * repeat >= filled) continue;
            i64 at = block + row * down;
            Entries found = load_entries(from + at, right, count);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                if (k < count) scales[n].bits[k] = convert(found.bits[k], at + k * right);
            }
        }
#pragma unroll
        for (int n = 0; n < BATCH; n++) {
            int row = (i + n * step) * repeat, end = row + repeat;
            for (; row < end && row < stored; row++)
                store_entries(to + row * plane.padded_cols,
                              row < filled ? scales[n] : four_times(padding), left);
        }
    }
}

// --- a small square of codes, transposed in the registers of one thread ---

// Four words, the rows of 4x4 bytes, become the columns.
ZEROCAST_FN void transpose_4x4(u32 (&w)[4]) {
    u32 low01 = __byte_perm(w[0], w[1], 0x5140), high01 = __byte_perm(w[0], w[1], 0x7362);
    u32 low23 = __byte_perm(w[2], w[3], 0x5140), high23 = __byte_perm(w[2], w[3], 0x7362);
    w[0] = __byte_perm(low01, low23, 0x5410);
    w[1] = __byte_perm(low01, low23, 0x7632);
    w[2] = __byte_perm(high01, high23, 0x5410);
    w[3] = __byte_perm(high01, high23, 0x7632);
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
