// How a CUDA launch is cut: a thread block takes a tile, a thread four elements side by side, a
// Vec4, at a time.
//
// Python makes the tiles (zerocast/backends/cuda/tiling.py), once, for all weights of a launch: a
// kernel divides nothing to find its work. Only tiles in which the rank owns an element exist.
// There are three shapes, all of TILE_VECTORS vectors a thread:
//
//     tall    16 rows of one row of blocks, 512 columns    blocks at least 16 high
//     flat    one row, 8192 columns                        lower blocks, and a weight of one block,
//                                                          which is seen as one row
//     fine    32 rows, 256 columns                         blocks of one row, and a second plane of
//                                                          blocks of one column beside them
//
// Kernels over tall and flat tiles are the same; those over fine tiles have names of their own.
//
// A thread's vectors are a constant stride apart, and the threads of a warp read 512 consecutive
// bytes.
#pragma once

#include "arithmetic/tables.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

constexpr int THREADS = 128;
constexpr u32 ALL_LANES = 0xFFFFFFFFu;  // of a warp
constexpr int TILE_VECTORS = 16;
constexpr int TALL_ROWS = 16;
constexpr int TALL_COLS = 512;
constexpr int FLAT_COLS = 8192;
constexpr int FINE_ROWS = 32;
constexpr int FINE_COLS = 256;
constexpr int MAX_TILE_BLOCKS = 512;
// Vectors that a thread reads before it looks at the first: 96 and 48 KiB on their way to a
// multiprocessor of 768 threads.
constexpr int AMAX_IN_FLIGHT = 8;
constexpr int CAST_IN_FLIGHT = 4;
constexpr u32 ALL_VECTORS = (1u << TILE_VECTORS) - 1;
static_assert(4 * TILE_VECTORS * THREADS == TALL_ROWS * TALL_COLS,
              "a thread's vectors fill a tile");
static_assert(4 * TILE_VECTORS * THREADS == FLAT_COLS, "a thread's vectors fill a tile");
static_assert(4 * TILE_VECTORS * THREADS == FINE_ROWS * FINE_COLS,
              "a thread's vectors fill a tile");

// A rectangle of a weight, inside one row of blocks.
struct Tile {
    i32 weight;        // row of the table
    short rows, cols;  // of the matrix in this tile
    i32 blocks;        // side by side in this tile, cut ones included
    i32 offset;        // columns of the first block to the left of the tile; 0 where blocks is 1
    i64 element;       // flat index of the first element
    i64 first_block;   // its block
};
static_assert(sizeof(Tile) == 32, "four words of the table that Python makes");

// The same where blocks are one row high: `blocks` of them side by side in each row, none of which
// is cut unless it is the only one. All rows lie in one row of the second plane's blocks.
struct FineTile {
    i32 weight;
    short rows, cols;
    i32 row, col;  // of the first element
    i32 blocks;
    i32 columnwise_block_row;  // 0 without a second plane
    i64 first_block;

    ZEROCAST_FN Tile as_tile(const Grid& grid) const {
        return Tile{weight, rows, cols, blocks, 0, row * grid.cols + col, first_block};
    }
};
static_assert(sizeof(FineTile) == 32, "four words of the table that Python makes");

// The vectors of one thread in one tile.
struct ThreadVectors {
    i64 element;   // flat index, in the weight, of the first vector's first element
    i64 step;      // elements from one vector to the next
    int row, col;  // of the first vector in the tile
    int row_step, col_step;
    int rows, cols;  // of the tile

    // Of a tall or a flat tile.
    ZEROCAST_FN ThreadVectors(const Tile& tile, const Grid& grid, int thread)
        : rows(tile.rows), cols(tile.cols) {
        bool tall = grid.block_h >= TALL_ROWS;
        static_assert(THREADS == TALL_COLS / 4, "the threads fill a row of a tall tile");
        row = 0;
        col = 4 * thread;
        row_step = tall ? 1 : 0;
        col_step = tall ? 0 : 4 * THREADS;
        element = tile.element + col;
        step = row_step * grid.cols + col_step;
    }

    static ZEROCAST_FN ThreadVectors of_fine(const Tile& tile, const Grid& grid, int thread) {
        constexpr int ACROSS = FINE_COLS / 4;
        ThreadVectors vectors(tile, grid, thread);
        vectors.row = thread / ACROSS;
        vectors.col = 4 * (thread % ACROSS);
        vectors.row_step = THREADS / ACROSS;
        vectors.col_step = 0;
        vectors.element = tile.element + vectors.row * grid.cols + vectors.col;
        vectors.step = vectors.row_step * grid.cols;
        return vectors;
    }

    ZEROCAST_FN i64 at(int i) const { return element + i * step; }
    ZEROCAST_FN int row_of(int i) const { return row + i * row_step; }
    ZEROCAST_FN int col_of(int i) const { return col + i * col_step; }
};

// The block, counted from the tile's first, that the tile's column `col` lies in.
ZEROCAST_FN int block_in_tile(const Tile& tile, const Grid& grid, int col) {
    return tile.blocks == 1 ? 0 : (int)((u32)(tile.offset + col) / (u32)grid.block_w);
}

// Whether every vector can be read or written at once: the first one lies at a multiple of `bytes`,
// and so does every row.
ZEROCAST_FN bool vectors_aligned(const void* first, int bytes, const Tile& tile, const Grid& grid) {
    return (u64)first % bytes == 0 && (tile.rows == 1 || grid.cols % 4 == 0);
}

// Whether no vector of the tile lies in two blocks.
ZEROCAST_FN bool vectors_keep_to_blocks(const Tile& tile, const Grid& grid) {
    return tile.blocks == 1 || (grid.block_w % 4 == 0 && tile.offset % 4 == 0);
}

// Whether element j of vector i is of the tile and of [start, end), which this rank owns.
ZEROCAST_FN bool owns(const ThreadVectors& vectors, i64 start, i64 end, int i, int j) {
    i64 element = vectors.at(i) + j;
    return vectors.row_of(i) < vectors.rows && vectors.col_of(i) + j < vectors.cols
           && element >= start && element < end;
}

// Bit i says whether all four elements of vector i are owned.
ZEROCAST_FN u32 whole_vectors(const ThreadVectors& vectors, const Tile& tile, const Grid& grid,
                              i64 start, i64 end) {
    i64 last = tile.element + (tile.rows - 1) * grid.cols + tile.cols - 1;
    bool full = tile.rows * tile.cols == 4 * TILE_VECTORS * THREADS;
    if (full && tile.element >= start && last < end) return ALL_VECTORS;
    u32 whole = 0;
#pragma unroll 1
    for (int i = 0; i < TILE_VECTORS; i++) {
        if (owns(vectors, start, end, i, 0) && owns(vectors, start, end, i, 3)) whole |= 1u << i;
    }
    return whole;
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
