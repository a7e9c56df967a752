// How a CUDA thread block holds a tile of a fused operation's result, from the function to the
// codes: the tile, and elements in memory. See fused_plane.h for the cast.
//
// A tile is 128 columns wide and 32 rows high, or 128 (TALL) where FP8 blocks are: no block that is
// scaled by itself is larger. A thread holds 4x4 elements, 8x4 in a tall tile; a warp whole rows of
// the tile. So nothing in high precision touches memory, a tile's amaxes take one trip through
// shared memory, and so do codes that are stored transposed.
#pragma once

#include "arithmetic/fused_op.h"
#include "cuda/conversions.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

constexpr int LOG2_COLS = 7, TILE_COLS = 1 << LOG2_COLS, LOW = 32, TALL = 128;
constexpr int LANES = 32, THREAD_COLS = TILE_COLS / LANES;
static_assert(THREAD_COLS == 4, "a thread has one Vec4 of each of its rows");

// One copy of the codes. Its grid, and where its scales stand, are those of the matrix that is
// stored, which is the transposed one where `transposed`; the blocks' size is that in the result.
struct FusedPlane {
    ScalePlane scales;  // with the amaxes of blocks that do not fit into a tile
    u8* codes;          // or null
    i64 transposed;
    i64 log2_h, log2_w;  // SPANS where a block is as long as the matrix
};
constexpr int SPANS = 30;  // Python keeps matrices below 2^30
static_assert(sizeof(FusedPlane) == 18 * sizeof(i64), "a row that Python writes");

// A launch's only argument.
struct FusedTask {
    FusedTable table;
    i64 tiles_per_unit;  // side by side, by one thread block
    NumericsTable numerics;
    DelayedState delayed;
    i32* tensor_amax;  // [1] or null; NVFP4Numerics reads it, others raise it
    i32* amax;         // FP32 [1] by its bits, or null
    FusedPlane planes[2];
};
static_assert(sizeof(FusedTask) == 70 * sizeof(i64), "a row that Python writes");

// min(count, 4), and 0 for what is negative.
ZEROCAST_FN int at_most_four(i64 count) { return count >= 4 ? 4 : count > 0 ? (int)count : 0; }

// --- elements in memory ---

template <class T>
struct alignas(4 * sizeof(T)) FourInMemory {
    T x[4];
};

// The first `left` of four elements, and zeros.
ZEROCAST_FN Vec4 load_some(const void* from, i64 nominal, i64 at, int left) {
    Vec4 q;
    with_nominal(nominal, [&](auto zero) {
        typedef decltype(zero) T;
        const T* x = (const T*)from + at;
        FourInMemory<T> four{};
        if (left == 4 && (u64)x % sizeof four == 0) {
            four = *(const FourInMemory<T>*)x;
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (j < left) four.x[j] = x[j];
            }
        }
#pragma unroll
        for (int j = 0; j < 4; j++) q.x[j] = value_of(four.x[j]);
    });
    return q;
}

ZEROCAST_FN void set(Fp32& to, float x) { to.value = x; }
ZEROCAST_FN void set(Bf16& to, float x) { to.bits = (unsigned short)(Scalar::bits(x) >> 16); }
ZEROCAST_FN void set(Fp16& to, float x) { to.bits = (unsigned short)to_fp16<Scalar>(x); }

// The first `left` of four elements that are rounded to T, but for NaNs: round_vec4 leaves those of
// an instruction.
template <class T>
ZEROCAST_FN void store_some(T* to, int left, const Vec4& q) {
    FourInMemory<T> four;
#pragma unroll
    for (int j = 0; j < 4; j++) set(four.x[j], with_canonical_nan<Scalar>(q.x[j]));
    if (left == 4 && (u64)to % sizeof four == 0) {
        *(FourInMemory<T>*)to = four;
        return;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (j < left) to[j] = four.x[j];
    }
}

// --- tiles ---

// What a thread block shares; one plane at a time.
template <int HEIGHT>
struct TileMemory {
    // Amaxes of the tile's blocks, then multipliers: of 16 elements, at least.
    i32 block[HEIGHT * TILE_COLS / 16];
    // Codes of a column; one more word, so that threads which fill a row touch more banks.
    u32 column[TILE_COLS][HEIGHT / 4 + 1];
    RowStatistics rows[HEIGHT];  // of a norm
};

// What a thread has of its block's tile, HEIGHT rows high.
template <int HEIGHT>
struct FusedTile {
    static constexpr int ROWS = HEIGHT == TALL ? 8 : 4;  // of a thread
    static constexpr int THREADS = HEIGHT / ROWS * LANES;
    const FusedTable& table;
    TileMemory<HEIGHT>& memory;
    int rows, cols;  // of the matrix
    int first_row;   // of this thread in the tile
    int first_col;
    int tile_row, tile_col;  // of the tile's first element
    Vec4 elements[ROWS];     // 0 where the matrix has none

    ZEROCAST_FN FusedTile(const FusedTable& of, TileMemory<HEIGHT>& shared)
        : table(of),
          memory(shared),
          rows((int)of.rows),
          cols((int)of.cols),
          first_row(threadIdx.x / LANES * ROWS),
          first_col(threadIdx.x % LANES * THREAD_COLS) {}

    ZEROCAST_FN int row(int i) const { return tile_row + first_row + i; }
    ZEROCAST_FN int col() const { return tile_col + first_col; }
    // Columns of the thread that the matrix has.
    ZEROCAST_FN int left() const { return at_most_four(cols - col()); }
    ZEROCAST_FN bool has_row(int i) const { return row(i) < rows; }

    // Of row i the four elements of the source that stand `offset` columns further right.
    ZEROCAST_FN Vec4 load(int i, i64 offset = 0) const {
        i64 at = row(i) * table.source_cols() + offset + col();
        return load_some(table.source, table.source_type, at, has_row(i) ? left() : 0);
    }

    // elements[i] = f(i, elements[i]) for each i, by one copy of the code of f: rows go round,
    // because registers cannot be indexed.
    template <class F>
    ZEROCAST_FN void for_each_row(const F& f) {
#pragma unroll 1
        for (int i = 0; i < ROWS; i++) {
            Vec4 made = f(i, elements[0]);
#pragma unroll
            for (int k = 1; k < ROWS; k++) elements[k - 1] = elements[k];
            elements[ROWS - 1] = made;
        }
    }

    // Rounds the elements, which are the output.
    ZEROCAST_FN void round() {
        with_nominal(table.round_to, [&](auto zero) {
            typedef decltype(zero) T;
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                elements[i] = round_vec4<T>(elements[i]);
                if (table.output && has_row(i))
                    store_some((T*)table.output + (i64)row(i) * cols + col(), left(), elements[i]);
            }
        });
    }

    // --- magnitudes, by their bits; a NaN is the largest ---

    ZEROCAST_FN i32 largest_in_row(int i) const {
        i32 magnitude[4];
        magnitudes_of(elements[i], magnitude);
        return largest_of(magnitude);
    }

    ZEROCAST_FN i32 largest_in_column(int j) const {
        i32 largest = 0;
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            largest = Scalar::max(largest, Scalar::bits(elements[i].x[j]) & MAGNITUDE_MASK);
        return largest;
    }

    ZEROCAST_FN i32 largest() const {
        i32 largest = 0;
#pragma unroll
        for (int i = 0; i < ROWS; i++) largest = Scalar::max(largest, largest_in_row(i));
        return largest;
    }
};

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
