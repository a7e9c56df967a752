// How a CUDA launch cuts what follows the whole weight: stored planes of scales, and matrices that
// are transposed.
//
// Python makes the tiles (zerocast/backends/cuda/tiling.py); what rows and columns count is said by
// the kernel.
#pragma once

#include "cuda/tiles.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// compute_scale: threads side by side, four stored scales each; the others take the next row of
// blocks.
constexpr int STRIP_THREADS = 64;

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

ZEROCAST_FN i32 bits_of(u8 stored) { return stored; }
ZEROCAST_FN i32 bits_of(float stored) { return Scalar::bits(stored); }

ZEROCAST_FN Entries four_times(i32 bits) { return Entries{{bits, bits, bits, bits}}; }

// The first `left` of four entries, all at once where there are four and the address allows it.
ZEROCAST_FN void store_entries(u8* to, const Entries& e, i64 left) {
    if (left >= 4 && (u64)to % 4 == 0) {
        *(u32*)to =
            (u32)e.bits[0] | (u32)e.bits[1] << 8 | (u32)e.bits[2] << 16 | (u32)e.bits[3] << 24;
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (k < left) to[k] = (u8)e.bits[k];
    }
}

ZEROCAST_FN void store_entries(float* to, const Entries& e, i64 left) {
    if (left >= 4 && (u64)to % 16 == 0) {
        *(int4*)to = int4{e.bits[0], e.bits[1], e.bits[2], e.bits[3]};
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (k < left) to[k] = Scalar::value(e.bits[k]);
    }
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
