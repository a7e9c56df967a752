// Both planes of rows of blocks under scales that are powers of two, blocks of one row and of one
// column, measured and cast in one loop as cast_rows() does.
#pragma once

#include "cpu/cast_shard.h"
#include "cpu/plane_amax.h"
#include "cpu/powers_of_two.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// Of BLOCK x BLOCK elements, which have a scale for each of their rows and columns.
template <int BLOCK, class F>
class CastRowsAndColumns {
  public:
    // How many bytes of memory it takes to work on rows of so many elements.
    static i64 bytes(i64 cols) {
        return LINES * (sizeof(Waiting) * cols + sizeof(short) * padded(cols / BLOCK))
               + 2 * sizeof(short) * cols + sizeof(int) * (cols / GROUP + 1);
    }

    // Works on rows of blocks of a shard whose columns are a multiple of GROUP.
    CastRowsAndColumns(const CastShard& shard, const BlockMultipliers& multipliers,
                       const Region& region, void* memory)
        : shard_(shard),
          region_(region),
          cols_(shard.rowwise.grid.cols),
          blocks_(shard.rowwise.grid.blocks_w()),
          numerics_(multipliers.of_powers_of_two<F>()),
          rows_(shard, nullptr, shard.rowwise, multipliers, NearestGroup<F>{}, 0, region.streams),
          columns_(shard, nullptr, shard.columnwise, multipliers, NearestGroup<F>{}, 0,
                   region.streams),
          waiting_((Waiting*)memory),
          column_steps_((short*)(waiting_ + LINES * cols_)),
          column_largest_(column_steps_ + cols_),
          irregular_((int*)(column_largest_ + cols_)),
          row_steps_((short*)(irregular_ + cols_ / GROUP + 1)) {}

    template <class Source>
    void operator()(const Source& source) {
        i64 last = region_.end / cols_;
        Native::Int tensor{};
        for (i64 row = region_.begin / cols_, above = 0; row < last || above > 0; row += BLOCK) {
            i64 rows = max_of(0, min_of(BLOCK, last - row));
            Amaxes measured;
            memset(column_largest_, 0, cols_ * sizeof *column_largest_);
            for (i64 r = 0; r < max_of(rows, above); r++)
                measure_and_cast(source, r < rows ? row + r : -1, r < above ? row + r - BLOCK : -1,
                                 measured);
            tensor = Native::max(tensor, measured.largest);
            if (rows > 0) prepare(row, measured);
            above = rows;
        }
        raise_tensor(shard_, reduce_max<Native>(tensor));
    }

  private:
    typedef PlaneCast<Waiting, Fp32, NearestGroup<F>> Plane;
    typedef PowerOfTwoCodes<F> Codes;
    static constexpr int W = Native::WIDTH, LINES = BLOCK + 1;

    // Columns that are measured at a time. What raise_row() makes of them is still in the nearest
    // cache; a whole row would evict the columns' maxima from there.
    static constexpr i64 SEGMENT = 2 * W * BLOCK;

    // The largest amax of some blocks, and the smallest of those that are not 0.
    struct Amaxes {
        Native::Int largest{}, smallest = Native::splat(MAGNITUDE_MASK);

        ZEROCAST_FN void add(Native::Int amax) {
            largest = Native::max(largest, amax);
            auto no_zero = Native::select(amax == 0, Native::splat(MAGNITUDE_MASK), amax);
            smallest = Native::min(smallest, no_zero);
        }
        bool are_regular() const {
            return reduce_max<Native>(largest) < INFINITY_BITS
                   && -reduce_max<Native>(-smallest) >= LEAST_AMAX;
        }
    };

    const CastShard& shard_;
    const Region& region_;
    i64 cols_, blocks_;
    const MXNumerics<F>& numerics_;
    Plane rows_, columns_;
    Waiting* waiting_;       // elements, of the latest LINES rows
    short* column_steps_;    // of the row of blocks that is cast, in the order of Waiting
    short* column_largest_;  // magnitudes of the one that is measured, in that order
    int* irregular_;         // columns of the groups of a row that have to be cast again
    short* row_steps_;       // of the blocks of the latest LINES rows
    bool regular_ = false;   // whether Codes serves the row of blocks that is cast

    Waiting* line(i64 row) const { return waiting_ + row % LINES * cols_; }
    // What follows a row's last step may be written with it.
    static i64 padded(i64 blocks) { return blocks + W; }
    short* row_steps(i64 row) const { return row_steps_ + row % LINES * padded(blocks_); }

    // Measures one row and casts one row above it; -1 stands for none.
    template <class Source>
    void measure_and_cast(const Source& source, i64 measured_row, i64 cast_row, Amaxes& measured) {
        bool casts = cast_row >= 0 && regular_;
        for (i64 c = 0; cast_row >= 0 && !casts && c < cols_; c += GROUP) cast_any(cast_row, c);
        i64 count = 0;
        auto cast = [&, group = regular_group(max_of(cast_row, 0)), irregular = irregular_](i64 c)
                        __attribute__((always_inline)) {
                            bool is_irregular = group(c);
                            if (!Codes::MAY_BE_IRREGULAR) return;
                            irregular[count] = (int)c;
                            count += is_irregular;
                        };
        auto none = [](i64) {};
        for (i64 c = 0, width; c < cols_; c += width) {
            width = min_of(SEGMENT, cols_ - c);
            auto cast_here = [&](i64 i) __attribute__((always_inline)) { cast(c + i); };
            if (measured_row >= 0) {
                i64 begin = measured_row * cols_ + c;
                Shorts largest[SEGMENT / BLOCK];
                if (width < SEGMENT) memset(largest, 0, sizeof largest);
                auto measure = measuring(measured_row, c, largest);
                if (casts)
                    source.template in_groups<FIRST_LEVEL>(begin, begin + width, cast_here,
                                                           measure);
                else
                    source.template in_groups<FIRST_LEVEL>(begin, begin + width, none, measure);
                raise_row(measured_row, c / BLOCK, width / BLOCK, largest, measured);
            } else if (casts) {
                for (i64 i = 0; i < width; i += GROUP) cast_here(i);
            }
        }
        for (i64 i = 0; i < count; i++) cast_any(cast_row, irregular_[i]);
    }

    // What casts the group at a column of a row by Codes, and returns whether that has to be done
    // again. It holds what it takes by value: stores of bytes might change all else.
    ZEROCAST_FN auto regular_group(i64 row) const {
        u8 *to_rows = rows_.codes(row * cols_), *to_columns = columns_.codes(row * cols_);
        return [=, streams_rows = rows_.streams(to_rows),
                streams_columns = columns_.streams(to_columns), line = line(row),
                block_steps = row_steps(row),
                column_steps = column_steps_](i64 c) __attribute__((always_inline)) {
            Codes codes(line + c);
            Packed irregular = Packed{} + Codes::NONE;
            auto of_rows = codes.under(Shorts{} + block_steps[c / BLOCK],
                                       Shorts{} + block_steps[(c + 2 * W) / BLOCK], irregular);
            auto first = Native::load_as<Shorts>(column_steps + c);
            auto second = Native::load_as<Shorts>(column_steps + c + 2 * W);
            auto of_columns = codes.under(first, second, irregular);
            bool is_irregular = Codes::is_irregular(irregular);
            if constexpr (F::BITS == 4) {
                auto nibbles = nibbles_in_order(of_rows, of_columns);
                Plane::write(to_rows + c / 2, nibbles.a, streams_rows);
                Plane::write(to_columns + c / 2, nibbles.b, streams_columns);
                return is_irregular;
            }
            Plane::write(to_rows + c, in_order(of_rows), streams_rows);
            Plane::write(to_columns + c, in_order(of_columns), streams_columns);
            return is_irregular;
        };
    }

    // Casts a group of a row, whatever it holds.
    void cast_any(i64 row, i64 c) {
        const Waiting* group = line(row) + c;
        i64 element = row * cols_ + c;
        float by_block[GROUP / BLOCK], by_column[GROUP];
        bool positive = rows_.fill_multipliers(element / BLOCK, GROUP / BLOCK, by_block);
        positive &= columns_.fill_multipliers(row / BLOCK * cols_ + c, GROUP, by_column);
        rows_.template cast_group<BLOCK>(element, group, by_block, positive);
        columns_.template cast_group<1>(element, group, by_column, positive);
    }

    // What keeps the groups of a row from a column on, rounded, and measures them:
    // `row_largest` are magnitudes by block, in any lane.
    ZEROCAST_FN auto measuring(i64 row, i64 col, Shorts* row_largest) const {
        return [row_largest, line = line(row) + col, column_largest = column_largest_ + col](
                   i64 c, const Native::Float(&read)[4]) __attribute__((always_inline)) {
            Native::Float x[4];
            bool nan = any_nan(read);
            for (int k = 0; k < 4; k++) x[k] = nan ? with_canonical_nan<Native>(read[k]) : read[k];
            Shorts in_block{};
            for (int i = 0; i < 2; i++) {
                i64 at = c + 2 * W * i;
                auto kept = rounded_waiting(x[2 * i], x[2 * i + 1]);
                Native::store(line + at, kept);
                Shorts magnitude = (Shorts)kept & 0x7FFF;
                auto largest = Native::load_as<Shorts>(column_largest + at);
                Native::store(column_largest + at, Native::max(largest, magnitude));
                in_block = 2 * W * i % BLOCK ? Native::max(in_block, magnitude) : magnitude;
                row_largest[at / BLOCK] = in_block;
            }
        };
    }

    // The amaxes of `count` blocks side by side into their slots; returns their steps.
    ZEROCAST_FN Native::Int raise(i32* slots, i64 count, Native::Int amax, Amaxes& measured) const {
        amax = Native::max(load_some<Native::Int>(slots, count), amax);
        store_some(slots, amax, count);
        measured.add(amax);
        return Codes::steps(numerics_.template stored<Native>(amax));
    }

    // Those of blocks side by side in a row, from the first one on.
    ZEROCAST_FN void raise_row(i64 row, i64 first, i64 count, const Shorts* row_largest,
                               Amaxes& measured) const {
        i32* slots = shard_.rowwise.block_amax + row * blocks_ + first;
        auto max = [](Native::Int a, Native::Int b) {
            return (Native::Int)Native::max((Shorts)a, (Shorts)b);
        };
        for (i64 i = 0; i < count; i += W) {
            Native::Int each[W];
            for (int k = 0; k < W; k++) each[k] = (Native::Int)row_largest[i + k];
            auto halves = reduce_each<Native>(each, max);  // two magnitudes in a lane
            auto amax = Native::max(halves << 16, halves & ~0xFFFF);
            auto steps = raise(slots + i, count - i, amax, measured);
            Native::store(row_steps(row) + first + i,
                          __builtin_convertvector(steps, Native::Halves));
        }
    }

    // Makes what the cast of a row of blocks takes, once it is measured.
    void prepare(i64 row, Amaxes& measured) {
        i32* slots = shard_.columnwise.block_amax + row / BLOCK * cols_;
        for (i64 c = 0; c < cols_; c += 2 * W) {
            Native::Int steps[2];
            for (int k = 0; k < 2; k++) {
                i64 at = c + k * W;
                auto group = (const Waiting*)column_largest_ + at / GROUP * GROUP;
                auto amax = Native::bits(load_of(group, at % GROUP / W));
                steps[k] = raise(slots + at, W, amax, measured);
            }
            Native::store(column_steps_ + c, Codes::in_lanes(steps[0], steps[1]));
        }
        regular_ = measured.are_regular();
    }
};

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
