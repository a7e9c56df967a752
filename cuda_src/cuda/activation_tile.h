// How a CUDA thread block holds a tile of a layer's result, from the function to the codes: the
// operation Backend.fused_op of zerocast/numerics. This is the tile, and elements in memory; see
// activation_plane.h for the cast, and activation_kernels.h for what a launch runs.
//
// A tile is 128 columns wide and 32 rows high, or 128 (TALL) where FP8 blocks are: no block that is
// scaled by itself is larger. A thread holds 4x4 elements, 8x4 in a tall tile, from
// the function to the codes; a warp whole rows of the tile. So nothing in high precision touches
// memory, a tile's amaxes take one trip through shared memory, and so do codes that are stored
// transposed.
//
// Blocks that do not fit into a tile (the whole tensor, a row, a column) have their amaxes taken by
// a launch of its own, with NoNumerics, before the one that casts.
#pragma once

#include "arithmetic/activation.h"
#include "cuda/vec4.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

constexpr int TILE_COLS = 128, LOW = 32, TALL = 128;
constexpr int THREAD_COLS = 4;  // of a thread; it has as many rows, or twice as many in a tall tile
constexpr int LANES = 32;
static_assert(TILE_COLS == THREAD_COLS * LANES, "a warp is as wide as a tile");

// One copy of the codes. A block is seen within the tile: of one that does not fit, the tile's
// part.
struct CastPlane {
    u8* codes;        // or null
    void* scale_inv;  // or null
    i32* block_amax;  // of blocks that do not fit into a tile; else null
    i64 transposed;   // codes are [cols, rows]
    i64 log2_h, log2_w;
    i64 down, right;  // 0 where all blocks of a column, of a row, are one; else 1
    // Stored scales: a block has repeats of them, as far as there are entries.
    i64 down_repeat, right_repeat;
    i64 down_entries, right_entries;
    i64 down_stride, right_stride;
};
static_assert(sizeof(CastPlane) == 14 * sizeof(i64), "a row that Python writes");

// A launch's only argument.
struct ActivationTask {
    ActivationTable table;
    i64 source_type, weight_type, bias_type;  // Nominal
    i64 tiles_per_unit;                       // side by side, by one thread block
    NumericsTable numerics;
    DelayedState delayed;
    i32* tensor_amax;  // [1] or null; NVFP4Numerics reads it, others raise it
    i32* amax;         // FP32 [1] by its bits, or null
    CastPlane planes[2];
};
static_assert(sizeof(ActivationTask) == 60 * sizeof(i64), "a row that Python writes");

// min(count, 4), and 0 for what is negative.
ZEROCAST_FN int at_most_four(i64 count) { return count >= 4 ? 4 : count > 0 ? (int)count : 0; }

// Where a thread's elements lie in the matrix, and its block's tile, HEIGHT rows high.
template <int HEIGHT>
struct TilePosition {
    static constexpr int ROWS = HEIGHT == TALL ? 8 : 4;  // of a thread
    static constexpr int THREADS = HEIGHT / ROWS * LANES;
    int tile_row, tile_col;  // of the tile's first element; Python keeps matrices below 2^30
    int rows, cols;          // of the matrix
    int warp, lane;

    ZEROCAST_FN TilePosition(const ActivationTable& table, int strip)
        : tile_row(strip * HEIGHT),
          tile_col(0),
          rows((int)table.rows),
          cols((int)table.cols),
          warp(threadIdx.x / LANES),
          lane(threadIdx.x % LANES) {}

    ZEROCAST_FN int row(int i) const { return tile_row + ROWS * warp + i; }
    ZEROCAST_FN int col() const { return tile_col + THREAD_COLS * lane; }
    // Columns of the thread that the matrix has.
    ZEROCAST_FN int left() const { return at_most_four(cols - col()); }
    ZEROCAST_FN bool first() const { return tile_row == 0 && tile_col == 0; }
};

template <int HEIGHT>
struct ThreadTile {
    static constexpr int ROWS = TilePosition<HEIGHT>::ROWS;
    Vec4 row[ROWS];  // 0 where the matrix has no element

    // row[i] = f(i, row[i]) for each i, by one copy of the code of f: rows go round, because
    // registers cannot be indexed.
    template <class F>
    ZEROCAST_FN void for_each_row(const F& f) {
#pragma unroll 1
        for (int i = 0; i < ROWS; i++) {
            Vec4 made = f(i, row[0]);
#pragma unroll
            for (int k = 1; k < ROWS; k++) row[k - 1] = row[k];
            row[ROWS - 1] = made;
        }
    }
};

// What a thread block shares; one plane at a time.
template <int HEIGHT>
struct TileMemory {
    // Amaxes of the tile's blocks, then multipliers: of 16 elements, at least.
    i32 block[HEIGHT * TILE_COLS / 16];
    // Codes of a column; one more word, so that threads which fill a row touch more banks.
    u32 column[TILE_COLS][HEIGHT / 4 + 1];
};

// --- elements in memory ---

// Elements [at, at + 4) of a matrix, zeros past the first `left`.
ZEROCAST_FN Vec4 load_nominal(const void* from, i64 type, i64 at, int left) {
    Vec4 q{};
    if (type == NOMINAL_FP32) {
        const float* x = (const float*)from + at;
        if (left == 4 && (u64)x % 16 == 0) return load_vec4(x);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j < left) q.x[j] = x[j];
        }
        return q;
    }
    auto x = (const unsigned short*)from + at;
    u64 bits = 0;
    if (left == 4 && (u64)x % 8 == 0) {
        bits = *(const u64*)x;
    } else {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j < left) bits |= (u64)x[j] << 16 * j;
        }
    }
    return type == NOMINAL_BF16 ? Four<Bf16>{bits}.values() : Four<Fp16>{bits}.values();
}

// The first `left` of four rounded elements, to element `at` of a matrix.
ZEROCAST_FN void store_nominal(void* to, i64 type, i64 at, int left, const Vec4& q) {
    if (type == NOMINAL_FP32) {
        float* x = (float*)to + at;
        if (left == 4 && (u64)x % 16 == 0) return store_vec4(x, q, true);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j < left) x[j] = q.x[j];
        }
        return;
    }
    auto x = (unsigned short*)to + at;
    u64 all = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 half =
            type == NOMINAL_BF16 ? (u32)Scalar::bits(q.x[j]) >> 16 : (u32)to_fp16<Scalar>(q.x[j]);
        all |= (u64)half << 16 * j;
    }
    if (left == 4 && (u64)x % 8 == 0) {
        *(u64*)x = all;
        return;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (j < left) x[j] = (unsigned short)(all >> 16 * j);
    }
}

template <int HEIGHT>
ZEROCAST_FN void round_elements(ThreadTile<HEIGHT>& elements, i64 nominal) {
#pragma unroll
    for (int i = 0; i < TilePosition<HEIGHT>::ROWS; i++) {
        if (nominal == NOMINAL_BF16)
            elements.row[i] = round_vec4<Bf16>(elements.row[i]);
        else if (nominal == NOMINAL_FP16)
            elements.row[i] = round_vec4<Fp16>(elements.row[i]);
        else
            elements.row[i] = round_vec4<Fp32>(elements.row[i]);
    }
}

template <int HEIGHT>
ZEROCAST_FN void store_output(const ActivationTable& table, const TilePosition<HEIGHT>& position,
                              const ThreadTile<HEIGHT>& elements) {
    if (!table.output || position.left() == 0) return;
#pragma unroll
    for (int i = 0; i < TilePosition<HEIGHT>::ROWS; i++) {
        if (position.row(i) >= position.rows) continue;
        store_nominal(table.output, table.round_to,
                      (i64)position.row(i) * position.cols + position.col(), position.left(),
                      elements.row[i]);
    }
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
