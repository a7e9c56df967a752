// partial_select and select: which of two scales each block takes under 4-over-6, also where ranks
// share it.
//
// A block that one rank owns is chosen for at once, and its elements are cast in the same read of
// the master: their codes under both scales are at hand. Of others the errors are noted, and ranks
// add them.
#include <string.h>

#include "cpu/cast_plane.h"
#include "cpu/four_over_six.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {
namespace {

using namespace four_over_six;

// How many columns ahead whole blocks are asked for: in ROWS rows PREFETCH_AHEAD elements.
constexpr i64 COLS_AHEAD = PREFETCH_AHEAD / ROWS;

// A constant that a generic function is called with.
template <bool VALUE>
struct Flag {
    static constexpr bool value = VALUE;
};

// Calls work(numerics) with those of one tensor.
template <class Work>
void with_errors(const NumericsTable& table, const CastShard& shard, const Work& work) {
    if (table.four_over_six == ERROR_MSE)
        work(ErrorNumerics<true>(*shard.tensor_amax, table.scale_max));
    else
        work(ErrorNumerics<false>(*shard.tensor_amax, table.scale_max));
}

// One shard's part of the decision, and the codes of the rows of blocks that it casts meanwhile.
template <class T, class Rounded, class Numerics>
class PartialSelect {
  public:
    PartialSelect(const CastShard& shard, const T* master, Rounded, const Numerics& numerics,
                  bool streams)
        : shard_(shard),
          grid_(shard.rowwise.grid),
          whole_(whole_rows(shard)),
          numerics_(numerics),
          master_(master),
          plane_(shard, master, shard.rowwise, BlockMultipliers(numerics_), {}, PREFETCH_AHEAD,
                 streams) {}

    // Rows of blocks, as far as they are in [begin, end).
    void operator()(i64 begin, i64 end) {
        if (!numerics_.finite) {  // everything is NaN whatever is chosen
            cast(Region{begin, end});
            return;
        }
        auto open = [&](const Strip& strip) {
            cut_ = find(shard_.candidates.cut, shard_.candidates.cuts,
                        strip.first_block / grid_.blocks_w());
            whole_blocks_ = 0;
            if (cut_ < 0 && grid_.block_h == 1 && grid_.block_w == COLS)
                whole_blocks_ = (strip.col_end - strip.col) / (W * COLS) * W;
            for (i64 b = whole_blocks_; b < strip.blocks; b += W)
                tables_.make(numerics_, block_amaxes(strip, b), b);
            errors_.clear(grid_.block_h);
        };
        auto work = [&](const Strip& strip, const Panel& panel) {
            if (cut_ < 0 && panel.rows == ROWS && grid_.block_w == COLS)
                whole_blocks_ = panel.count / (W * COLS) * W;
            for (i64 at = 0; at < whole_blocks_; at += W) {
                if (grid_.block_h == 1)
                    select_flat_blocks(strip, at, panel.element + at * COLS);
                else if (tables_.in_range[at / W])
                    select_blocks<true>(strip, at, panel.element + at * COLS);
                else
                    select_blocks<false>(strip, at, panel.element + at * COLS);
            }
            i64 row = panel.element / grid_.cols, col = strip.col + panel.col;
            // Registers begin at multiples of WIDTH blocks, as the candidates' scales do.
            i64 first = max_of(whole_blocks_, panel.col / grid_.block_w / W * W);
            for (i64 r = row; r < row + panel.rows; r++) {
                for (i64 at = first; at * grid_.block_w < panel.col + panel.count; at += W)
                    add_row(strip, at, r, col, col + panel.count);
            }
        };
        auto close = [&](const Strip& strip) {
            if (cut_ >= 0) return;
            errors_.choose(whole_blocks_, strip.blocks, choices(strip));
            i64 rows = grid_.block_h * grid_.cols;
            i64 row = strip.first_block / grid_.blocks_w() * rows;
            cast(Region{row, row + rows, strip.col + whole_blocks_ * grid_.block_w, strip.col_end});
        };
        for_each_strip(grid_, Region{begin, end}, open, work, close, ACROSS);
    }

  private:
    const CastShard& shard_;
    const Grid& grid_;
    Span whole_;  // the rows of blocks that are cast
    Numerics numerics_;
    const T* master_;  // as if it were the whole weight
    PlaneCast<T, Rounded, NearestGroup<E2M1>> plane_;
    i64 cut_;           // the strip's place among the rows of blocks that are cut, or -1
    i64 whole_blocks_;  // so many of the strip's, its first, go by registers of whole blocks
    BlockTables tables_;
    RowErrors errors_{};

    u8* choices(const Strip& strip) const { return shard_.candidates.choices + strip.first_block; }
    Int block_amaxes(const Strip& strip, i64 b) const {
        return load_some<Int>(shard_.rowwise.block_amax + strip.first_block + b, strip.blocks - b);
    }

    // The codes of a region, as far as they are cast.
    void cast(Region region) const {
        region.begin = max_of(region.begin, whole_.begin);
        region.end = min_of(region.end, whole_.end);
        if (region.begin < region.end && region.col < region.col_end) plane_(region);
    }

    static ZEROCAST_FN Float rounded(const T* x) {
        return Rounding<Rounded, Native>::of_number(load(x));
    }
    static ZEROCAST_FN Float magnitude(Float x) {
        return Native::value(Native::bits(x) & MAGNITUDE_MASK);
    }

    // The choices of WIDTH whole blocks, from number `at` of the strip on, and their codes if they
    // are cast; `element` is the first of them.
    template <bool ALL_IN_RANGE>
    ZEROCAST_FN void select_blocks(const Strip& strip, i64 at, i64 element) {
        RowCodes signs[ROWS / W][W], map4[ROWS / W][W], map6[ROWS / W][W];  // by rows and blocks
        const T* x = master_ + element;
        for (int rows = 0; rows < ROWS / W; rows++, x += W * grid_.cols) {
            Float errors4[W], errors6[W];
            for (i64 b = 0; b < W; b++) {
                Float columns[COLS];
                for (int r = 0; r < W; r++) {
                    const T* from = x + r * grid_.cols + b * COLS;
                    __builtin_prefetch(from + COLS_AHEAD, 0, 2);  // to L2: rows may share L1's sets
                    for (int c = 0; c < COLS; c += W) columns[c + r] = rounded(from + c);
                }
                for (int c = 0; c < COLS; c += W) transpose_lanes<Native>(columns + c);
                signs[rows][b] = take_signs(columns);
                errors4[b] = Numerics::template errors_of_rows<0, ALL_IN_RANGE>(
                    tables_, at + b, columns, map4[rows][b]);
                errors6[b] = Numerics::template errors_of_rows<1, ALL_IN_RANGE>(
                    tables_, at + b, columns, map6[rows][b]);
            }
            transpose_lanes<Native>(errors4);
            transpose_lanes<Native>(errors6);
            for (int r = 0; r < W; r++) {
                Native::store(&errors_.map4[rows * W + r][at], errors4[r]);
                Native::store(&errors_.map6[rows * W + r][at], errors6[r]);
            }
        }
        errors_.choose(at, at + W, choices(strip));
        if (element < whole_.begin || element >= whole_.end) return;
        for (int rows = 0; rows < ROWS / W; rows++) {
            Unsigned words[COLS / WORD][W];
            for (i64 b = 0; b < W; b++) {
                const RowCodes& chosen = (choices(strip)[at + b] ? map4 : map6)[rows][b];
                for (int i = 0; i < COLS / WORD; i++)
                    words[i][b] = chosen.words[i] | signs[rows][b].words[i];
            }
            for (auto& word : words) transpose_lanes<Native>(word);
            for (int r = 0; r < W; r++) {
                typedef typename IndicesTo<W>::Type All;
                Unsigned row[] = {interleaved<0>(words[0][r], words[1][r], All{}),
                                  interleaved<1>(words[0][r], words[1][r], All{})};
                plane_.put(element + (rows * W + r) * grid_.cols, row);
            }
        }
    }

    // The same of WIDTH whole blocks of one row, which is this rank's.
    ZEROCAST_FN void select_flat_blocks(const Strip& strip, i64 at, i64 element) {
        const T* x = master_ + element;
        Float columns[COLS];
        for (int i = 0; i < COLS; i++) {
            __builtin_prefetch(x + i * W + PREFETCH_AHEAD);
            // Lane l of column c is element c of block l: the rows that are transposed are blocks.
            columns[i % (COLS / W) * W + i / (COLS / W)] = rounded(x + i * W);
        }
        for (int c = 0; c < COLS; c += W) transpose_lanes<Native>(columns + c);
        RowCodes signs = take_signs(columns), map4, map6;
        Int amaxes = block_amaxes(strip, at);
        auto scales = numerics_.template candidates<Native>(amaxes);
        Float errors4, errors6;
        auto measure = [&](auto usual) {
            constexpr bool USUAL = decltype(usual)::value;
            errors4 = numerics_.template errors_of_blocks<0, USUAL>(scales.map4, scales.multiplier4,
                                                                    columns, map4);
            errors6 = numerics_.template errors_of_blocks<1, USUAL>(scales.map6, scales.multiplier6,
                                                                    columns, map6);
        };
        if (numerics_.is_usual(scales, amaxes))
            measure(Flag<true>{});
        else
            measure(Flag<false>{});
        Int chosen = errors4 < errors6 ? Native::splat(1) : Native::splat(0);
        store_some(choices(strip) + at, __builtin_convertvector(chosen, Native::Bytes), W);
        if (element < whole_.begin || element >= whole_.end) return;
        Unsigned words[COLS / WORD];
        for (int i = 0; i < COLS / WORD; i++)
            words[i] = (chosen != 0 ? map4.words[i] : map6.words[i]) | signs.words[i];
        typedef typename IndicesTo<W>::Type All;
        Unsigned row[] = {interleaved<0>(words[0], words[1], All{}),
                          interleaved<1>(words[0], words[1], All{})};
        plane_.put(element, row);
    }

    // Leaves the magnitudes of elements, and returns the signs as their codes have them.
    static ZEROCAST_FN RowCodes take_signs(Float (&columns)[COLS]) {
        RowCodes signs;
        for (int i = 0; i < COLS / WORD; i++) {
            Unsigned word{};
            for (int c = i * WORD; c < (i + 1) * WORD; c++) {
                Int bits = Native::bits(columns[c]);
                word = (Unsigned)Native::merge(MAGNITUDE_MASK, (Int)(word >> 4), bits);
                columns[c] = magnitude(columns[c]);
            }
            signs.words[i] = word;
        }
        return signs;
    }

    // The words of a and b, interleaved: the first half of them, or (HALF 1) the second.
    template <int HALF, int... I>
    static ZEROCAST_FN Unsigned interleaved(Unsigned a, Unsigned b, Indices<I...>) {
        return __builtin_shufflevector(a, b, (I / 2 + HALF * W / 2 + I % 2 * W)...);
    }

    // The errors of one row inside WIDTH blocks, from number `at` of the strip on, as far as this
    // rank owns all of it: columns [col, end) of the row are its own.
    ZEROCAST_FN void add_row(const Strip& strip, i64 at, i64 row, i64 col, i64 end) {
        i64 first = strip.col + at * grid_.block_w;
        const T* x = master_ + row * grid_.cols + first;
        T copy[W * COLS];
        u32 whole = (1u << W) - 1;  // bit b: of block at + b it owns all of this row
        if (grid_.block_w == COLS && col <= first && first + W * COLS <= end) {
            for (i64 i = 0; i < W * COLS; i += 16) __builtin_prefetch(x + i + PREFETCH_AHEAD);
        } else {
            whole = copy_blocks(copy, first, row, col, end);
            x = copy;
        }
        Float magnitudes[COLS];
        for (int i = 0; i < COLS; i++) magnitudes[i] = magnitude(rounded(x + i * W));
        Float map4 = Numerics::template row_errors<0>(tables_, at, magnitudes);
        Float map6 = Numerics::template row_errors<1>(tables_, at, magnitudes);
        i64 in_block = row % grid_.block_h;
        if (cut_ < 0) {
            Native::store(&errors_.map4[in_block][at], map4);
            Native::store(&errors_.map6[in_block][at], map6);
            return;
        }
        float* to = shard_.candidates.errors_of(grid_, cut_, in_block) + first / grid_.block_w * 2;
        for (i64 b = 0; b < W; b++) {
            if (!(whole >> b & 1)) continue;
            to[2 * b] = map4[b];
            to[2 * b + 1] = map6[b];
        }
    }

    // The same row from column `first` on to a separate buffer, COLS elements a block; zeros for
    // what a block has not or shares with other ranks. Returns the bits of blocks that are whole.
    u32 copy_blocks(T* copy, i64 first, i64 row, i64 col, i64 end) {
        memset(copy, 0, W * COLS * sizeof(T));
        u32 whole = 0;
        const T* x = master_ + row * grid_.cols;
        for (i64 b = 0; b < W; b++) {
            i64 start = first + b * grid_.block_w, stop = min_of(start + grid_.block_w, grid_.cols);
            i64 from = max_of(start, col), to = min_of(stop, end);
            if (from >= to) continue;
            if (to - from < stop - start) {
                leave_elements(row, start, from, to);
            } else {
                memcpy(copy + b * COLS, x + start, (stop - start) * sizeof(T));
                whole |= 1u << b;
            }
        }
        return whole;
    }

    // Columns [from, to) of a row, inside a block from column `start` on that other ranks own
    // elements of, too.
    void leave_elements(i64 row, i64 start, i64 from, i64 to) {
        const Candidates& candidates = shard_.candidates;
        i64 row_start = row * grid_.cols;
        i64 s = find(candidates.segments, candidates.segment_count, row_start + start);
        float* elements = candidates.elements + s * grid_.block_w - start;
        for (i64 c = from; c < to; c++)
            elements[c] = round_to<Rounded, Scalar>(value_of(master_[row_start + c]));
    }
};

// The errors of a segment, from the elements that its ranks put together.
template <class Numerics>
void segment_errors(const CastShard& shard, const Numerics& numerics, i64 cut, i64 segment) {
    const Grid& grid = shard.rowwise.grid;
    i64 start = shard.candidates.segments[segment];
    i64 row = start / grid.cols, block = start % grid.cols / grid.block_w;
    i64 width = min_of(grid.block_w, grid.cols - block * grid.block_w);
    const float* x = shard.candidates.elements + segment * grid.block_w;
    auto scales = numerics.template candidates<Scalar>(
        shard.rowwise.block_amax[row / grid.block_h * grid.blocks_w() + block]);
    auto sum = numerics.row_errors(scales, x, width);
    float* to = shard.candidates.errors_of(grid, cut, row % grid.block_h) + 2 * block;
    to[0] = sum.map4;
    to[1] = sum.map6;
}

// The choices of one row of blocks that is cut.
template <class Numerics>
void select_row(const CastShard& shard, const Numerics& numerics, i64 cut) {
    const Grid& grid = shard.rowwise.grid;
    const Candidates& candidates = shard.candidates;
    i64 block_row = candidates.cut[cut], blocks_w = grid.blocks_w();
    for (i64 s = 0; s < candidates.segment_count; s++) {
        if (candidates.segments[s] / grid.cols / grid.block_h == block_row)
            segment_errors(shard, numerics, cut, s);
    }
    RowErrors errors{};
    for (i64 first = 0; first < blocks_w; first += ACROSS) {
        i64 n = min_of(ACROSS, blocks_w - first);
        for (i64 r = 0; r < grid.block_h; r++) {
            const float* from = candidates.errors_of(grid, cut, r) + 2 * first;
            for (i64 b = 0; b < n; b++) {
                errors.map4[r][b] = from[2 * b];
                errors.map6[r][b] = from[2 * b + 1];
            }
        }
        errors.choose(0, n, candidates.choices + block_row * blocks_w + first);
    }
}

}  // namespace
}  // namespace ZEROCAST_ISA
}  // namespace zerocast

ZEROCAST_EXPORT(partial_select)(const void* numerics, const void* table, long long count,
                                long long threads) {
    using namespace zerocast;
    auto& numerics_table = *(const NumericsTable*)numerics;
    auto span = [](const CastShard& shard, i64) {
        return Span{shard.start, shard.end, shard.rowwise.grid.block_h * shard.rowwise.grid.cols};
    };
    bool streams = streams_codes((const CastShard*)table, count);
    auto piece = [&](const CastShard& shard, i64 begin, i64 end, i64) {
        with_errors(numerics_table, shard, [&](auto scaling) {
            with_rounded_master(shard, [&](auto* master, auto nominal) {
                PartialSelect(shard, master, nominal, scaling, streams)(begin, end);
            });
        });
        if (streams) stream_fence();
    };
    share_in_parallel<CastShard>(table, count, threads, span, piece);
}

ZEROCAST_EXPORT(select)(const void* numerics, const void* table, long long count,
                        long long threads) {
    using namespace zerocast;
    auto& numerics_table = *(const NumericsTable*)numerics;
    auto rows = [](const CastShard& shard, i64) {
        i64 row = shard.rowwise.grid.block_h * shard.rowwise.grid.cols;
        return Span{0, shard.candidates.cuts * row, row};
    };
    auto piece = [&](const CastShard& shard, i64 begin, i64 end, i64) {
        i64 row = rows(shard, 1).granule;
        with_errors(numerics_table, shard, [&](auto scaling) {
            for (i64 cut = begin / row; cut < end / row; cut++) select_row(shard, scaling, cut);
        });
    };
    share_in_parallel<CastShard>(table, count, threads, rows, piece);
}
