// Stored planes of scales, written a row of blocks at a time: repeats and padding.
#pragma once

#include <string.h>

#include "cpu/launch.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// n times the value of these bits.
template <class Stored>
void fill(Stored* to, i64 n, i64 bits) {
    for (i64 i = 0; i < n; i++) memcpy(to + i, &bits, sizeof *to);  // little-endian: the low bytes
}

// Stores rows of blocks [first, last) of a plane that is not transposed: make(i, to) puts the
// scales of row i side by side.
template <class Stored, class Make>
void store_rows(const ScalePlane& plane, i64 first, i64 last, const Make& make) {
    auto entries = (Stored*)plane.scale_inv;
    i64 blocks_w = plane.grid.blocks_w(), stride = plane.padded_cols;
    for (i64 i = first; i < last; i++) {
        i64 row = i * plane.row_repeat;
        Stored* to = entries + row * stride;
        // Made at the row's end, where they are repeated from, left to right.
        Stored* made = to + plane.cols - blocks_w;
        make(i, made);
        for (i64 b = 0; plane.col_repeat > 1 && b < blocks_w; b++) {
            i64 col = b * plane.col_repeat;
            Stored scale = made[b];
            i64 col_end = min_of(col + plane.col_repeat, plane.cols);
            for (; col < col_end; col++) to[col] = scale;
        }
        fill(to + plane.cols, stride - plane.cols, plane.padding);
        i64 row_end = min_of(row + plane.row_repeat, plane.rows);
        for (i64 r = row + 1; r < row_end; r++)
            memcpy(entries + r * stride, to, stride * sizeof(Stored));
    }
}

// Stores what follows the last row that holds scales.
template <class Stored>
void pad_rows(const ScalePlane& plane) {
    i64 used = (plane.transposed ? plane.cols : plane.rows) * plane.padded_cols;
    fill((Stored*)plane.scale_inv + used, plane.padded_rows * plane.padded_cols - used,
         plane.padding);
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
