// Rows of blocks, measured and cast in one loop: while it reads one it casts the one above, whose
// elements wait, rounded, in a buffer. So the processor computes while it waits for memory.
#pragma once

#include "cpu/cast_shard.h"
#include "cpu/plane_amax.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// Masters that are read as they are.
struct Read {
    const float* master;

    template <Prefetched INTO, class Before, class After>
    ZEROCAST_FN void in_groups(i64 begin, i64 end, const Before& before, const After& after) const {
        const float* from = master + begin;  // a local copy: no store changes it
        for (i64 i = 0; i < end - begin; i += GROUP) {
            before(i);
            prefetch<INTO>(from + i);
            Native::Float x[4];
            for (int k = 0; k < 4; k++) x[k] = load_of(from + i, k);
            after(i, x);
        }
    }
};

// Measures and casts rows of blocks of a shard, BLOCK high and wide, as `source` gives them.
// `memory`: maxima and multipliers of a row of blocks, and its elements in BF16.
template <int BLOCK, class F, class Source>
void cast_rows(const CastShard& shard, const Source& source, const BlockMultipliers& multipliers,
               const Region& region, void* memory) {
    i64 cols = shard.rowwise.grid.cols, blocks = shard.rowwise.grid.blocks_w();
    auto largest = (Native::Int*)memory;
    auto waiting = (Waiting*)(largest + blocks + Native::WIDTH);
    auto by_block = (float*)(waiting + BLOCK * cols);
    PlaneCast<Waiting, Fp32, NearestGroup<F>> plane(shard, waiting, shard.rowwise, multipliers,
                                                    NearestGroup<F>{}, 0, region.streams);
    Native::Int tensor{};
    bool positive = false;
    i64 last = region.end / cols;
    for (i64 row = region.begin / cols, above = 0; row < last || above > 0; row += BLOCK) {
        i64 rows = max_of(0, min_of(BLOCK, last - row));
        memset(largest, 0, (blocks + Native::WIDTH) * sizeof *largest);
        for (i64 r = 0; r < max_of(rows, above); r++) {
            i64 element = (row + r) * cols;
            Waiting* line = waiting + r * cols;  // of the row of blocks above, until it is cast
            i64 cast_element = element - BLOCK * cols;
            auto cast = [&](i64 c) {
                plane.template cast_group<BLOCK>(cast_element + c, line + c, by_block + c / BLOCK,
                                                 positive);
            };
            auto keep = [&](i64 c, const Native::Float(&read)[4]) {
                Native::Float x[4];
                bool nan = any_nan(read);
                for (int k = 0; k < 4; k++)
                    x[k] = nan ? with_canonical_nan<Native>(read[k]) : read[k];
                raise_group<BLOCK>(largest + c / BLOCK, x);
                for (int k = 0; k < 4; k += 2)
                    Native::store(line + c + k * Native::WIDTH, rounded_waiting(x[k], x[k + 1]));
            };
            if (r < rows && r < above)
                source.template in_groups<ALL_LEVELS>(element, element + cols, cast, keep);
            else if (r < rows)
                source.template in_groups<ALL_LEVELS>(element, element + cols, [](i64) {}, keep);
            else
                for (i64 c = 0; c < cols; c += GROUP) cast(c);
        }
        above = rows;
        if (rows == 0) break;
        i64 first_block = row / BLOCK * blocks;
        i32* slots = shard.rowwise.block_amax + first_block;
        tensor = Native::max(tensor, flush(largest, blocks, slots, shard.round_to, false));
        positive = plane.fill_multipliers(first_block, blocks, by_block);
    }
    raise_tensor(shard, reduce_max<Native>(tensor));
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
