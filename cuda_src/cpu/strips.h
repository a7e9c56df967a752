// Walks a range of a weight's elements in strips: a piece of one row of blocks, so that what belongs to a block (a
// multiplier, a running maximum) is made once a block row and kept at hand, not once an element row.
#pragma once

#include <zerocast/tables.h>

#include "launch.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// Blocks side by side in one strip. What a strip keeps for each has to stay in the first-level cache.
constexpr i64 STRIP_BLOCKS = 256;

struct Strip {
    i64 first_block;  // number of its first block
    i64 blocks;       // how many, side by side
    i64 col;          // column of the first element of the first block
};

// For elements [begin, end) of a weight under grid, calls
//     open(strip)                             before its rows
//     row(strip, element, col, count)         for each piece of a row: count elements from the flat index element on
//     close(strip)                            after its rows
// A strip may hold fewer than all rows and columns of its blocks, where begin and end say so.
template <class Open, class Row, class Close>
void for_each_strip(const Grid& grid, i64 begin, i64 end, const Open& open, const Row& row, const Close& close) {
    i64 blocks_w = grid.blocks_w();
    i64 row_end = (end + grid.cols - 1) / grid.cols;
    for (i64 r = begin / grid.cols; r < row_end;) {
        i64 block_row = r / grid.block_h;
        i64 next = min_of((block_row + 1) * grid.block_h, row_end);
        for (i64 b = 0; b < blocks_w; b += STRIP_BLOCKS) {
            Strip strip{block_row * blocks_w + b, min_of(STRIP_BLOCKS, blocks_w - b), b * grid.block_w};
            i64 strip_end = min_of(strip.col + strip.blocks * grid.block_w, grid.cols);
            // Only the first and the last row can be cut; a strip that they do not reach is not opened.
            bool opened = false;
            for (i64 at = r; at < next; at++) {
                i64 from = max_of(begin, at * grid.cols + strip.col);
                i64 to = min_of(end, at * grid.cols + strip_end);
                if (from >= to) continue;
                if (!opened) open(strip);
                opened = true;
                row(strip, from, from - at * grid.cols, to - from);
            }
            if (opened) close(strip);
        }
        r = next;
    }
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
