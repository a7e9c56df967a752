// How a CUDA launch is divided: a thread block takes a tile, a thread four elements side by side, a
// Vec4, at a time.
//
// Python makes the tiles (zerocast/backends/cuda/tiling.py), once, for all weights of a launch: a
// kernel divides nothing to find its work. Only tiles in which the rank owns an element exist.
// There are three shapes, all of TILE_VECTORS vectors a thread:
//
//     16 x 512    rows of one row of blocks        blocks at least 16 high
//     1 x 8192                                     lower blocks, and a weight of one block, which
//                                                  is seen as one row
//     32 x 256    rows of blocks of one row        blocks of one row, and a second plane of blocks
//                                                  of one column beside them
//
// A kernel is compiled for a Shape: Tile, which is of the first two, or Tile32x256.
//
// A thread's vectors are a constant stride apart, and the threads of a warp read 512 consecutive
// bytes. Where a tile is cut off at the right, its threads take several of its rows at once, so
// that all of them have a part in it.
#pragma once

#include "arithmetic/tables.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

constexpr int THREADS = 128;
constexpr u32 ALL_LANES = 0xFFFFFFFFu;  // of a warp
constexpr int TILE_VECTORS = 16;
constexpr int MAX_TILE_BLOCKS = 512;

// Bits 0 to count - 1.
ZEROCAST_FN u32 first_bits(int count) { return (1u << count) - 1; }

// The vectors of one thread in one tile.
struct ThreadVectors {
    i64 element;   // flat index, in the weight, of the first vector's first element
    i64 step;      // elements from one vector to the next
    int row, col;  // of the first vector in the tile
    int row_step, col_step;
    int rows, cols;  // of the tile
    int count;       // vectors that the tile has for the thread of its first element

    ZEROCAST_FN i64 at(int i) const { return element + i * step; }
    ZEROCAST_FN int row_of(int i) const { return row + i * row_step; }
    ZEROCAST_FN int col_of(int i) const { return col + i * col_step; }

    // Those of a tile of several rows, at most `width` columns wide: as many threads side by side
    // as its columns need, and a warp at least.
    static ZEROCAST_FN ThreadVectors of_rows(int rows, int cols, int width, i64 element, i64 stride,
                                             int thread) {
        int across = cols > width / 2 ? width / 4 : cols > width / 4 ? width / 8 : width / 16;
        if (across < 32) across = 32;
        int row = thread / across, col = 4 * (thread % across), row_step = THREADS / across;
        int log2_step = row_step / 2;  // of 1, 2 and 4
        return {
            element + row * stride + col,      row_step * stride, row, col, row_step, 0, rows, cols,
            (rows + row_step - 1) >> log2_step};
    }
};

// A rectangle of a weight, inside one row of blocks. Its blocks are numbered from 0 on.
struct Tile {
    i32 weight;        // row of the table
    short rows, cols;  // of the matrix in this tile
    i32 blocks;        // side by side in this tile, cut ones included
    i32 offset;        // columns of the first block to the left of the tile; 0 where blocks is 1
    i64 element;       // flat index of the first element
    i64 first_block;   // its block

    static constexpr bool ROW_BLOCKS = false;  // whether its blocks are one row high by its shape
    static constexpr int COLUMNS = 0;          // blocks of the second plane
    static constexpr int ROWS = 16, COLS = 512, LONG_COLS = 8192;
    static_assert(4 * TILE_VECTORS * THREADS == ROWS * COLS && ROWS * COLS == LONG_COLS,
                  "a thread's vectors fill a tile");
    static_assert(THREADS == COLS / 4, "the threads fill a row of a tile of several rows");

    ZEROCAST_FN const Tile& as_tile(const Grid&) const { return *this; }
    ZEROCAST_FN int num_blocks() const { return blocks; }
    // The distance of block b from the first one, where adjacent blocks are `right` apart.
    ZEROCAST_FN i64 offset_of(int b, i64, i64 right) const { return b * right; }
    // The block of the element in this row and column of the tile.
    ZEROCAST_FN int block_of(const Grid& grid, int, int col) const {
        return blocks == 1 ? 0 : (int)((u32)(offset + col) / (u32)grid.block_w);
    }
    ZEROCAST_FN ThreadVectors vectors(const Grid& grid, int thread) const {
        if (grid.block_h >= ROWS)
            return ThreadVectors::of_rows(rows, cols, COLS, element, grid.cols, thread);
        int col = 4 * thread, step = 4 * THREADS;
        return {element + col, step, 0, col, 0, step, rows, cols, (cols + step - 1) / step};
    }
};
static_assert(sizeof(Tile) == 32, "four words of the table that Python makes");

// The same where blocks are one row high: `blocks` adjacent ones in each row, none of which is cut
// unless it is the only one. All rows are in one row of the second plane's blocks.
struct Tile32x256 {
    i32 weight;
    short rows, cols;
    i32 row, col;  // of the first element
    i32 blocks;
    i32 columnwise_block_row;  // 0 without a second plane
    i64 first_block;

    static constexpr bool ROW_BLOCKS = true;
    static constexpr int ROWS = 32, COLS = 256, COLUMNS = COLS;
    static_assert(4 * TILE_VECTORS * THREADS == ROWS * COLS, "a thread's vectors fill a tile");

    ZEROCAST_FN Tile as_tile(const Grid& grid) const {
        return Tile{weight, rows, cols, blocks, 0, row * grid.cols + col, first_block};
    }
    ZEROCAST_FN int num_blocks() const { return rows * blocks; }
    ZEROCAST_FN i64 offset_of(int b, i64 down, i64 right) const {
        return b / blocks * down + b % blocks * right;
    }
    ZEROCAST_FN int block_of(const Grid& grid, int row_in_tile, int col_in_tile) const {
        return row_in_tile * blocks
               + (blocks == 1 ? 0 : (int)((u32)col_in_tile / (u32)grid.block_w));
    }
    // The block of the second plane that holds the tile's first column.
    ZEROCAST_FN i64 first_column(const Grid& grid) const {
        return columnwise_block_row * grid.cols + col;
    }
    ZEROCAST_FN ThreadVectors vectors(const Grid& grid, int thread) const {
        i64 element = row * grid.cols + col;
        return ThreadVectors::of_rows(rows, cols, COLS, element, grid.cols, thread);
    }
};
static_assert(sizeof(Tile32x256) == 32, "four words of the table that Python makes");

// Whether every vector can be read or written at once: the address of the first one is a multiple
// of `bytes`, and so is that of every row.
ZEROCAST_FN bool vectors_aligned(const void* first, int bytes, const Tile& tile, const Grid& grid) {
    return (u64)first % bytes == 0 && (tile.rows == 1 || grid.cols % 4 == 0);
}

// Whether the tile is all vectors, of elements of [start, end), which this rank owns.
ZEROCAST_FN bool owns_all(const Tile& tile, const Grid& grid, i64 start, i64 end) {
    i64 last = tile.element + (tile.rows - 1) * grid.cols + tile.cols;
    return tile.cols % 4 == 0 && start <= tile.element && last <= end;
}

// Whether no vector of the tile is in two blocks.
template <class Shape>
ZEROCAST_FN bool vectors_keep_to_blocks(const Tile& tile, const Grid& grid) {
    return Shape::ROW_BLOCKS || tile.blocks == 1 || (grid.block_w % 4 == 0 && tile.offset % 4 == 0);
}

// Whether element j of vector i is of the tile and of [start, end), which this rank owns.
ZEROCAST_FN bool owns(const ThreadVectors& vectors, i64 start, i64 end, int i, int j) {
    i64 element = vectors.at(i) + j;
    return vectors.row_of(i) < vectors.rows && vectors.col_of(i) + j < vectors.cols
           && element >= start && element < end;
}

// Which vectors of a thread this rank owns, bit i for vector i: all four elements, or some.
struct OwnedVectors {
    u32 whole, some;
};

// How many of a thread's vectors start before `element`; more than there are where all do.
ZEROCAST_FN int vectors_before(const ThreadVectors& vectors, i64 element) {
    int count = 0;
#pragma unroll 1
    for (int half = TILE_VECTORS; half > 0; half /= 2) {
        if (vectors.at(count + half - 1) < element) count += half;
    }
    return count;
}

ZEROCAST_FN OwnedVectors owned_vectors(const ThreadVectors& vectors, const Tile& tile,
                                       const Grid& grid, i64 start, i64 end) {
    OwnedVectors owned;
    int left = vectors.cols - vectors.col;
    if (vectors.row_step == 0) {
        constexpr int STEP = 4 * THREADS;  // columns
        owned.some = first_bits((left + STEP - 1) / STEP);
        owned.whole = first_bits((left + STEP - 4) / STEP);
    } else {
        bool last = vectors.row_of(vectors.count - 1) < vectors.rows;
        u32 all = first_bits(last ? vectors.count : vectors.count - 1);
        owned.some = left > 0 ? all : 0;
        owned.whole = left > 3 ? all : 0;
    }
    i64 last = tile.element + (tile.rows - 1) * grid.cols + tile.cols - 1;
    if (tile.element < start || last >= end) {
        owned.whole &= first_bits(vectors_before(vectors, end - 3));
        owned.whole &= ~first_bits(vectors_before(vectors, start));
        owned.some &= first_bits(vectors_before(vectors, end));
        owned.some &= ~first_bits(vectors_before(vectors, start - 3));
    }
    return owned;
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
