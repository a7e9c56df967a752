// Walks a range of a weight's elements in strips: a piece of one row of blocks, so that what
// belongs to a block (a multiplier, a running maximum) is made once a block row and kept at hand,
// not once an element row.
#pragma once

#include "arithmetic/tables.h"
#include "cpu/launch.h"
#include "cpu/simd.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// Blocks side by side in one strip. What a strip keeps for each, at most 64 bytes, has to stay in
// the first-level cache; longer strips read memory in longer runs.
constexpr i64 STRIP_BLOCKS = 512;

// Columns side by side in one strip of a plane whose blocks are one column wide: what is kept for
// them all is 32 KiB. Rows of up to so many elements are read from end to end, which is worth more
// than what would stay in the first-level cache beside them.
constexpr i64 STRIP_COLUMNS = 8192;

// What a pass visits of a weight: elements [begin, end) that are in columns [col, col_end), which
// are those of whole blocks. `ahead`: how many elements ahead of the one that is read to prefetch.
struct Region {
    i64 begin, end;
    i64 col = 0, col_end = 1LL << 62;
    i64 ahead = PREFETCH_AHEAD;
    bool streams = false;  // whether codes may pass the caches
};

struct Strip {
    i64 first_block;   // number of its first block
    i64 blocks;        // how many, side by side
    i64 col, col_end;  // columns of the weight
};

// A rectangle of a strip: `rows` pieces of rows, each `count` elements long.
struct Panel {
    i64 element;  // flat index of the first
    i64 col;      // its column, counted from the strip's first
    i64 count, rows;
};

// For a region of a weight under grid, calls
//     open(strip)           before its rows
//     work(strip, panel)    for each of the at most three panels that it is made of: a cut first
//     row, whole rows, a
//                           cut last row
//     close(strip)          after its rows
// Because of begin and end, a strip may hold fewer than all rows and columns of its blocks. It is
// at most `across` blocks wide.
template <class Open, class Work, class Close>
void for_each_strip(const Grid& grid, const Region& region, const Open& open, const Work& work,
                    const Close& close, i64 across = STRIP_BLOCKS) {
    i64 begin = region.begin, end = region.end, blocks_w = grid.blocks_w();
    i64 first_block = region.col / grid.block_w;
    i64 last_block = (min_of(region.col_end, grid.cols) + grid.block_w - 1) / grid.block_w;
    i64 row_end = (end + grid.cols - 1) / grid.cols;
    for (i64 first = begin / grid.cols; first < row_end;) {
        i64 block_row = first / grid.block_h;
        i64 next = min_of((block_row + 1) * grid.block_h, row_end);
        for (i64 b = first_block; b < last_block; b += across) {
            i64 blocks = min_of(across, last_block - b);
            Strip strip{block_row * blocks_w + b, blocks, b * grid.block_w,
                        min_of((b + blocks) * grid.block_w, grid.cols)};
            bool opened = false;
            for (i64 r = first; r < next;) {
                i64 from = max_of(begin, r * grid.cols + strip.col);
                i64 to = min_of(end, r * grid.cols + strip.col_end);
                i64 rows = 1;
                if (to - from
                    == strip.col_end
                           - strip.col) {  // whole, and so are those down to where the range ends
                    rows = min_of(next, (end - strip.col_end) / grid.cols + 1) - r;
                }
                if (from < to) {
                    if (!opened) open(strip);
                    opened = true;
                    work(strip, Panel{from, from - r * grid.cols - strip.col, to - from, rows});
                }
                r += rows;
            }
            if (opened) close(strip);
        }
        first = next;
    }
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
