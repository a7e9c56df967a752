// How a CUDA launch is cut: a thread block takes a tile, a thread four elements side by side, a
// quad, at a time.
//
// Python makes the tiles (zerocast/backends/cuda/tiling.py), once, for all weights of a launch: a
// kernel divides nothing to find its work. Only tiles in which the rank owns an element exist.
// There are two shapes, both of TILE_QUADS quads a thread:
//
//     tall    16 rows of one row of blocks, 512 columns    blocks at least 16 high
//     flat    one row, 8192 columns                        lower blocks, and a weight of one block,
//                                                          which is seen as one row
//
// A thread's quads are a constant stride apart, and the threads of a warp read 512 consecutive
// bytes.
#pragma once

#include "tables.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

constexpr int THREADS = 128;
constexpr int TILE_QUADS = 16;
constexpr int TALL_ROWS = 16;
constexpr int TALL_COLS = 512;
constexpr int FLAT_COLS = 8192;
constexpr int MAX_TILE_BLOCKS = 512;
constexpr u32 ALL_QUADS = (1u << TILE_QUADS) - 1;
static_assert(4 * TILE_QUADS * THREADS == TALL_ROWS * TALL_COLS, "a thread's quads fill a tile");
static_assert(4 * TILE_QUADS * THREADS == FLAT_COLS, "a thread's quads fill a tile");

// A part of a weight, inside one row of blocks.
struct Tile {
    i32 weight;        // row of the table
    short rows, cols;  // of the matrix in this tile
    i32 blocks;        // side by side in this tile, cut ones included
    i32 offset;        // columns of the first block to the left of the tile; 0 where blocks is 1
    i64 element;       // flat index of the first element
    i64 first_block;   // its block
};
static_assert(sizeof(Tile) == 32, "four words of the table that Python makes");

// The quads of one thread in one tile.
struct Quads {
    i64 element;   // flat index, in the weight, of the first quad's first element
    i64 step;      // elements from one quad to the next
    int row, col;  // of the first quad in the tile
    int row_step, col_step;
    int rows, cols;  // of the tile

    ZEROCAST_FN Quads(const Tile& tile, const Grid& grid, int thread)
        : rows(tile.rows), cols(tile.cols) {
        bool tall = grid.block_h >= TALL_ROWS;
        constexpr int ACROSS = TALL_COLS / 4;
        row = tall ? thread / ACROSS : 0;
        col = tall ? 4 * (thread % ACROSS) : 4 * thread;
        row_step = tall ? THREADS / ACROSS : 0;
        col_step = tall ? 0 : 4 * THREADS;
        element = tile.element + row * grid.cols + col;
        step = row_step * grid.cols + col_step;
    }

    ZEROCAST_FN i64 at(int i) const { return element + i * step; }
    ZEROCAST_FN int row_of(int i) const { return row + i * row_step; }
    ZEROCAST_FN int col_of(int i) const { return col + i * col_step; }
};

// The block, counted from the tile's first, that the tile's column `col` lies in.
ZEROCAST_FN int block_in_tile(const Tile& tile, const Grid& grid, int col) {
    return tile.blocks == 1 ? 0 : (int)((u32)(tile.offset + col) / (u32)grid.block_w);
}

// Whether a quad can be read or written at once: the first one lies at a multiple of `bytes`, and
// so does every row.
ZEROCAST_FN bool quads_aligned(const void* first, int bytes, const Tile& tile, const Grid& grid) {
    return (u64)first % bytes == 0 && (tile.rows == 1 || grid.cols % 4 == 0);
}

// Whether no quad of the tile lies in two blocks.
ZEROCAST_FN bool quads_keep_to_blocks(const Tile& tile, const Grid& grid) {
    return tile.blocks == 1 || (grid.block_w % 4 == 0 && tile.offset % 4 == 0);
}

// Whether element j of quad i is of the tile and of [start, end), which this rank owns.
ZEROCAST_FN bool owns(const Quads& quads, i64 start, i64 end, int i, int j) {
    i64 element = quads.at(i) + j;
    return quads.row_of(i) < quads.rows && quads.col_of(i) + j < quads.cols && element >= start
           && element < end;
}

// Bit i says whether all four elements of quad i are owned.
ZEROCAST_FN u32 whole_quads(const Quads& quads, const Tile& tile, const Grid& grid, i64 start,
                            i64 end) {
    i64 last = tile.element + (tile.rows - 1) * grid.cols + tile.cols - 1;
    bool full = tile.rows * tile.cols == 4 * TILE_QUADS * THREADS;
    if (full && tile.element >= start && last < end) return ALL_QUADS;
    u32 whole = 0;
#pragma unroll 1
    for (int i = 0; i < TILE_QUADS; i++) {
        if (owns(quads, start, end, i, 0) && owns(quads, start, end, i, 3)) whole |= 1u << i;
    }
    return whole;
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
