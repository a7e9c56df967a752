// The codes of one shard in all its planes: what partial_cast is made of.
#pragma once

#include "cpu/amax.h"
#include "cpu/cast_plane.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// Elements that delayed scaling reads for the amax, and then again, from the nearest cache.
constexpr i64 CHUNK = 2048;

// Both planes of a shard, blocks of one row and blocks of one column, in one pass over the master.
template <class F, class T, class Rounded>
class RowsAndColumns {
  public:
    typedef PlaneCast<T, Rounded, NearestGroup<F>> Plane;

    RowsAndColumns(const Plane& rows, const Plane& columns) : rows_(rows), columns_(columns) {}

    void operator()(const Region& region) const {
        float by_column[STRIP_COLUMNS], by_block[STRIP_COLUMNS / ROW_BLOCK + 2];
        bool positive = false;  // whether all multipliers of columns are
        auto open = [&](const Strip& strip) {
            positive = columns_.fill_multipliers(strip.first_block, strip.blocks, by_column);
        };
        auto work = [&](const Strip& strip, const Panel& panel) {
            const Grid& grid = rows_.grid();
            i64 row = panel.element / grid.cols, col = strip.col + panel.col;
            i64 first = col / grid.block_w, last = (col + panel.count - 1) / grid.block_w;
            const T* x = rows_.master(panel.element);
            for (i64 r = 0; r < panel.rows; r++, x += grid.cols) {
                bool all = rows_.fill_multipliers((row + r) * grid.blocks_w() + first,
                                                  last - first + 1, by_block)
                           && positive;
                cast_row(panel.element + r * grid.cols, x, col % grid.block_w, panel.count,
                         by_block, by_column + panel.col, all);
            }
        };
        for_each_strip(columns_.grid(), region, open, work, [](const Strip&) {}, STRIP_COLUMNS);
    }

  private:
    static constexpr int W = Native::WIDTH;

    const Plane& rows_;
    const Plane& columns_;

    // count elements of one row from x on, the first of them col columns into its first block.
    void cast_row(i64 element, const T* x, i64 col, i64 count, const float* by_block,
                  const float* by_column, bool positive) const {
        i64 block_w = rows_.grid().block_w, done = 0;
        bool at_once = positive && rows_.starts_group(element);
        if (at_once && col == 0 && block_w == 32)
            done = groups<32>(element, x, count, by_block, by_column);
        else if (at_once && col + count <= block_w)
            done = groups<ONE_BLOCK>(element, x, count, by_block, by_column);
        rows_.cast_row(element + done, x + done, col + done, count - done, by_block, positive);
        columns_.cast_row(element + done, x + done, 0, count - done, by_column + done, positive);
    }

    // The whole groups of a row, of blocks of BLOCK elements, up to one that has a NaN; returns how
    // many elements they hold. What does not depend on the plane is done once.
    template <int BLOCK>
    ZEROCAST_FN i64 groups(i64 element, const T* x, i64 count, const float* by_block,
                           const float* by_column) const {
        u8 *to_rows = rows_.codes(element), *to_columns = columns_.codes(element);
        bool streams_rows = rows_.streams(to_rows), streams_columns = columns_.streams(to_columns);
        i64 i = 0;
        for (; i + GROUP <= count; i += GROUP) {
            prefetch(x + i, rows_.ahead());
            Native::Float loaded[4];
            for (int k = 0; k < 4; k++) loaded[k] = load(x + i + k * W);
            if (any_nan(loaded)) break;
            Native::Int rows[4], columns[4];
            for (int k = 0; k < 4; k++) {
                Native::Int bits = Native::bits(Rounding<Rounded, Native>::of_number(loaded[k]));
                auto magnitude = Native::value(bits & MAGNITUDE_MASK);
                auto of_row = Native::splat(by_block[(i + k * W) / BLOCK]);
                auto of_columns = Native::load(by_column + i + k * W);
                rows[k] =
                    with_sign<F, Native>(encode_magnitude<F, Native>(magnitude * of_row), bits);
                columns[k] =
                    with_sign<F, Native>(encode_magnitude<F, Native>(magnitude * of_columns), bits);
            }
            Plane::store(to_rows + Plane::bytes(i), rows, streams_rows);
            Plane::store(to_columns + Plane::bytes(i), columns, streams_columns);
        }
        return i;
    }
};

// The codes of a region of a shard, in all planes that are cast. `master` points to its elements as
// if it were the whole weight.
template <class Rounded, class T, class Encoder>
void cast_planes(const CastShard& shard, const T* master, const BlockMultipliers& multipliers,
                 const Encoder& encoder, const Region& region) {
    typedef PlaneCast<T, Rounded, Encoder> Plane;
    Plane rowwise(shard, master, shard.rowwise, multipliers, encoder, region.ahead, region.streams);
    if (shard.delayed.scale) {
        float multiplier;
        bool positive = rowwise.fill_multipliers(0, 1, &multiplier);
        i32 largest = 0;
        for (i64 at = region.begin, n; at < region.end; at += n) {
            n = min_of(CHUNK, region.end - at);
            const T* x = master + at;
            largest = Scalar::max(largest, largest_of(x, n));
            rowwise.run(at, x, n, multiplier, positive);
        }
        return raise_one_block(shard, largest);
    }
    if (!shard.columnwise.codes) return rowwise(region);
    Plane columnwise(shard, master, shard.columnwise, multipliers, encoder, region.ahead,
                     region.streams);
    if constexpr (SAME<Encoder, NearestGroup<typename Encoder::Format>>) {
        if (in_rows_and_columns(shard))
            return RowsAndColumns<typename Encoder::Format, T, Rounded>(rowwise,
                                                                        columnwise)(region);
    }
    rowwise(region);
    columnwise(region);
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
