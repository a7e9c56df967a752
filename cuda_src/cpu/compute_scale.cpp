// compute_scale: the stored scales of whole weights from reduced amaxes, padding and repeats
// included.
#include <string.h>

#include <zerocast/scaling.h>

#include "launch.h"
#include "laws.h"
#include "pack.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {
namespace {

template <class Stored>
void fill(Stored* to, i64 n, Stored value) {
    for (i64 i = 0; i < n; i++) to[i] = value;
}

// Rows of blocks [first, last) of one weight.
template <class Law>
void block_rows(const ScaleTarget& target, const Law& law, i64 first, i64 last) {
    typedef typename Law::Stored Stored;
    const ScalePlane& plane = target.rowwise;
    auto padding = (i32)plane.padding;
    Stored pad;
    memcpy(&pad, &padding, sizeof pad);  // little-endian: a byte's code is the low byte
    auto scales_at = (Stored*)plane.scale_inv;
    i64 blocks_w = plane.grid.blocks_w();
    for (i64 i = first; i < last; i++) {
        const i32* amax = plane.block_amax + i * blocks_w;
        i64 row = i * plane.row_repeat;
        Stored* to = scales_at + row * plane.padded_cols;
        for (i64 b = 0; b < blocks_w; b += GROUP) {
            i64 n = min_of(GROUP, blocks_w - b);
            Native::Int amaxes[4] = {}, stored[4];
            memcpy(amaxes, amax + b, n * sizeof(i32));
            for (int v = 0; v < 4; v++) stored[v] = law.template stored<Native>(amaxes[v]);
            Stored scales[GROUP];
            if constexpr (sizeof(Stored) == 1)
                store_bytes(scales, stored);
            else
                memcpy(scales, stored, sizeof stored);
            memcpy(to + b, scales, n * sizeof(Stored));
        }
        fill(to + blocks_w, plane.padded_cols - blocks_w, pad);
        i64 row_end = min_of(row + plane.row_repeat, plane.rows);
        for (i64 r = row + 1; r < row_end; r++) {
            memcpy(scales_at + r * plane.padded_cols, to, plane.padded_cols * sizeof(Stored));
        }
    }
    if (last == plane.grid.blocks_h()) {
        i64 used = plane.rows * plane.padded_cols;
        fill(scales_at + used, plane.padded_rows * plane.padded_cols - used, pad);
        if (target.amax) *target.amax = *target.tensor_amax;
    }
}

}  // namespace
}  // namespace ZEROCAST_ISA
}  // namespace zerocast

ZEROCAST_EXPORT(compute_scale)(const void* law, const void* table, long long count,
                               long long threads) {
    using namespace zerocast;
    auto targets = (const ScaleTarget*)table;
    auto stored =
        [](const ScaleTarget& t) {  // counted in stored scales, cut between rows of blocks
            i64 row = t.rowwise.row_repeat * t.rowwise.padded_cols;
            return Span{0, t.rowwise.grid.blocks_h() * row, row};
        };
    i64 total = total_elements(targets, count, stored);
    // Most stored scales are copies of the one above: sixteen are as much work as one element.
    in_parallel(total / 16, threads, [&](i64 part, i64 parts) {
        share(targets, count, total, part, parts, stored,
              [&](const ScaleTarget& target, i64 begin, i64 end) {
                  i64 row = target.rowwise.row_repeat * target.rowwise.padded_cols;
                  with_law(*(const LawTable*)law, target.tensor_amax, [&](const auto& law) {
                      block_rows(target, law, begin / row, end / row);
                  });
              });
    });
}
