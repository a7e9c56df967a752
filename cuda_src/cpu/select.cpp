// partial_select and select: which of two scales each block takes under 4-over-6, also where ranks
// share it.
//
// The errors of a row inside a block are summed from left to right, then the rows in a fixed order,
// so whoever adds them gets the same sum. A register holds the same column of as many rows when
// they are summed: no sum goes across it. They are the rows of one whole 16x16 block, which have
// one scale and one table, or else one row of as many blocks side by side.
//
// Under one scale the codes of a block mean 8 magnitudes. They are made once a block; an element's
// is looked up, by its code, in a register of them.
#include <string.h>

#include "arithmetic/masters.h"
#include "arithmetic/scaling.h"
#include "cpu/simd.h"
#include "cpu/strips.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {
namespace {

typedef Native::Int Int;
typedef Native::Float Float;
constexpr int W = Native::WIDTH;

// The largest blocks there are: 16 rows of 16 elements.
constexpr i64 ROWS = 16, COLS = 16;

// Blocks side by side whose errors and tables are kept together: 25 KiB.
constexpr i64 ACROSS = 128;

// How many columns ahead whole blocks are asked for: in ROWS rows PREFETCH_AHEAD elements.
constexpr i64 COLS_AHEAD = PREFETCH_AHEAD / ROWS;

// y times a power of two, plus c: rounded once, since the product is exact or vanishes beside c.
ZEROCAST_FN Float times_plus(Float y, float power, float c) {
    if constexpr (W > 4) return Native::fma(y, Native::splat(power), Native::splat(c));
    return y * Native::splat(power) + Native::splat(c);
}

// The errors of the rows inside blocks side by side, 0 of rows that there are not.
struct RowErrors {
    alignas(64) float map4[ROWS][ACROSS], map6[ROWS][ACROSS];

    // Whether the sum of map4 is the smaller one, of n blocks.
    void choose(i64 n, u8* choices) const {
        for (i64 b = 0; b < n; b += W) {
            Int chosen = sum(map4, b) < sum(map6, b) ? Native::splat(1) : Native::splat(0);
            store_some(choices + b, __builtin_convertvector(chosen, Native::Bytes), n - b);
        }
    }

  private:
    static ZEROCAST_FN Float sum(const float (&rows)[ROWS][ACROSS], i64 block) {
        Float sums[ROWS];
        for (int r = 0; r < ROWS; r++) sums[r] = Native::load(&rows[r][block]);
        for (int half = ROWS / 2; half > 0; half /= 2) {
            for (int r = 0; r < half; r++) sums[r] += sums[r + half];
        }
        return sums[0];
    }
};

// How many magnitudes E2M1 has.
constexpr int CODES = 8;

// Below these, elements of a block need not all be told apart that look_up() tells apart, under
// map4 and map6: no scale that is not subnormal is so far from amax / 4 or amax / 6.
constexpr float IN_RANGE[] = {4.5f, 7.0f};

// What codes mean and elements are multiplied by, of blocks side by side: under map4, then map6.
struct BlockTables {
    alignas(64) float values[ACROSS][2 * CODES];
    alignas(64) float multipliers[2][ACROSS];
    bool in_range[ACROSS / W];  // of WIDTH blocks: whether all elements are IN_RANGE

    // Of WIDTH blocks from number b on, with these amaxes.
    ZEROCAST_FN void make(const FourOverSixNumerics& numerics, Int amax, i64 b) {
        auto scales = numerics.template candidates<Native>(amax);
        Native::store(&multipliers[0][b], scales.multiplier4);
        Native::store(&multipliers[1][b], scales.multiplier6);
        Float largest4 = Native::value(amax) * scales.multiplier4;
        Float largest6 = Native::value(amax) * scales.multiplier6;
        Int beyond = ~((Int)(largest4 < Native::splat(IN_RANGE[0]))
                       & (Int)(largest6 < Native::splat(IN_RANGE[1])));
        in_range[b / W] = reduce_max<Native>(beyond & 1) == 0;
        Float by_code[2 * CODES];
        for (int code = 0; code < CODES; code++) {
            Int codes = Native::splat(code);
            by_code[code] = numerics.template dequantized<Native>(codes, scales.map4);
            by_code[CODES + code] = numerics.template dequantized<Native>(codes, scales.map6);
        }
        for (int code = 0; code < 2 * CODES; code += W) {
            transpose_lanes<Native>(by_code + code);
            for (int i = 0; i < W; i++) Native::store(&values[b + i][code], by_code[code + i]);
        }
    }
};

// Of magnitudes, by the code of y, what it means in one of a block's tables: that of map4 (MAP 0)
// or of map6 (MAP 1).
//
// Codes lie 0.5 apart up to 2, 1 apart up to 4 and then 2. Where floats lie 1 apart, adding rounds
// to whole steps, to even; the smallest of the three sums counts the steps that there are. All y
// that are below IN_RANGE are at most the code 7, and under map4 below the last steps. The sums are
// positive, so they order like their bits, which most processors compare faster.
template <int MAP, bool ALL_IN_RANGE>
ZEROCAST_FN Float look_up(const float* values, Float y) {
    constexpr float BASE = 1.5f * (1 << MANTISSA_BITS) + MAP * CODES;
    auto below = [](Int a, Float b) { return Native::min(a, Native::bits(b)); };
    Int place = below(Native::bits(times_plus(y, 2.0f, BASE)), y + Native::splat(BASE + 2));
    if (!ALL_IN_RANGE || MAP == 1) place = below(place, times_plus(y, 0.5f, BASE + 4));
    if (!ALL_IN_RANGE) place = below(place, Native::splat(BASE + 7));
#if defined(__AVX512F__)
    return (Float)_mm512_permutexvar_ps((__m512i)place, _mm512_load_ps(values));
#elif defined(__AVX2__)
    return (Float)_mm256_permutevar8x32_ps(_mm256_load_ps(values + MAP * CODES), (__m256i)place);
#else
    Float found;
    for (int i = 0; i < W; i++) found[i] = values[MAP * CODES + place[i] % CODES];
    return found;
#endif
}

// Sums errors, or their squares: of all elements of one row inside blocks.
template <bool SQUARED>
struct ErrorNumerics : FourOverSixNumerics {
    using FourOverSixNumerics::FourOverSixNumerics;

    // Of one block.
    ZEROCAST_FN Errors<Scalar> row_errors(const CandidateScales<Scalar>& scales, const float* x,
                                          i64 count) const {
        Errors<Scalar> sum{};
        for (i64 c = 0; c < count; c++) add_errors<SQUARED>(scales, x[c], sum);
        return sum;
    }

    // Of WIDTH blocks from number b on, under one of the scales; `x` are the magnitudes of their
    // rows, COLS a block.
    template <int MAP>
    static ZEROCAST_FN Float row_errors(const BlockTables& tables, i64 b, const Float* x) {
        Float sum{};
        for (int c = 0; c < COLS / W; c++) {
            Float errors[W];
            for (int i = 0; i < W; i++) {
                Float of_block = x[i * (COLS / W) + c];
                Float y = of_block * Native::splat(tables.multipliers[MAP][b + i]);
                Float value = look_up<MAP, false>(tables.values[b + i], y);
                errors[i] = error<SQUARED, Native>(of_block, value);
            }
            transpose_lanes<Native>(errors);
            for (int i = 0; i < W; i++) sum = sum + errors[i];
        }
        return sum;
    }

    // Of WIDTH rows inside block number b, under one of the scales; a register of `x` are the
    // magnitudes of one of their columns.
    template <int MAP, bool ALL_IN_RANGE>
    static ZEROCAST_FN Float errors_of_rows(const BlockTables& tables, i64 b,
                                            const Float (&x)[COLS]) {
        Float sum{}, multiplier = Native::splat(tables.multipliers[MAP][b]);
        for (int c = 0; c < COLS; c++) {
            Float value = look_up<MAP, ALL_IN_RANGE>(tables.values[b], x[c] * multiplier);
            sum = sum + error<SQUARED, Native>(x[c], value);
        }
        return sum;
    }
};

// Calls work(numerics) with those of one tensor.
template <class Work>
void with_errors(const NumericsTable& table, const CastShard& shard, const Work& work) {
    if (table.four_over_six == ERROR_MSE)
        work(ErrorNumerics<true>(*shard.tensor_amax, table.scale_max));
    else
        work(ErrorNumerics<false>(*shard.tensor_amax, table.scale_max));
}

// One shard's part of the decision.
template <class T, class Rounded, class Numerics>
class PartialSelect {
  public:
    PartialSelect(const CastShard& shard, const T* master, Rounded, const Numerics& numerics)
        : shard_(shard), grid_(shard.rowwise.grid), numerics_(numerics), master_(master) {}

    // Rows of blocks, as far as they are in [begin, end).
    void operator()(i64 begin, i64 end) {
        auto open = [&](const Strip& strip) {
            for (i64 b = 0; b < strip.blocks; b += W) {
                const i32* amax = shard_.rowwise.block_amax + strip.first_block + b;
                tables_.make(numerics_, load_some<Int>(amax, strip.blocks - b), b);
            }
            memset(&errors_, 0, sizeof errors_);
            cut_ = find(shard_.candidates.cut, shard_.candidates.cuts,
                        strip.first_block / grid_.blocks_w());
        };
        auto work = [&](const Strip& strip, const Panel& panel) {
            if (cut_ < 0 && panel.rows == ROWS && grid_.block_w == COLS
                && panel.count % (W * COLS) == 0) {
                for (i64 at = 0; at < strip.blocks; at += W) {
                    const T* x = master_ + panel.element + at * COLS;
                    if (tables_.in_range[at / W])
                        add_blocks<true>(at, x);
                    else
                        add_blocks<false>(at, x);
                }
                return;
            }
            i64 row = panel.element / grid_.cols, col = strip.col + panel.col;
            for (i64 r = row; r < row + panel.rows; r++) {
                // Registers begin at multiples of WIDTH blocks, as the candidates' scales do.
                for (i64 at = panel.col / grid_.block_w / W * W;
                     at * grid_.block_w < panel.col + panel.count; at += W)
                    add_row(strip, at, r, col, col + panel.count);
            }
        };
        auto close = [&](const Strip& strip) {
            if (cut_ < 0)
                errors_.choose(strip.blocks, shard_.candidates.choices + strip.first_block);
        };
        for_each_strip(grid_, Region{begin, end}, open, work, close, ACROSS);
    }

  private:
    const CastShard& shard_;
    const Grid& grid_;
    Numerics numerics_;
    const T* master_;  // as if it were the whole weight
    i64 cut_;          // the strip's place among the rows of blocks that are cut, or -1
    BlockTables tables_;
    RowErrors errors_;

    static ZEROCAST_FN Float magnitudes(const T* x) {
        Int bits = Native::bits(Rounding<Rounded, Native>::of_number(load(x)));
        return Native::value(bits & MAGNITUDE_MASK);
    }

    // The errors of all rows inside WIDTH whole blocks, from number `at` of the strip on; `x` is
    // where they begin.
    template <bool ALL_IN_RANGE>
    ZEROCAST_FN void add_blocks(i64 at, const T* x) {
        for (i64 row = 0; row < ROWS; row += W, x += W * grid_.cols) {
            Float map4[W], map6[W];
            for (i64 b = 0; b < W; b++) {
                Float columns[COLS];
                for (int r = 0; r < W; r++) {
                    const T* from = x + r * grid_.cols + b * COLS;
                    __builtin_prefetch(from + COLS_AHEAD, 0, 2);  // to L2: rows may share L1's sets
                    for (int c = 0; c < COLS; c += W) columns[c + r] = magnitudes(from + c);
                }
                for (int c = 0; c < COLS; c += W) transpose_lanes<Native>(columns + c);
                map4[b] =
                    Numerics::template errors_of_rows<0, ALL_IN_RANGE>(tables_, at + b, columns);
                map6[b] =
                    Numerics::template errors_of_rows<1, ALL_IN_RANGE>(tables_, at + b, columns);
            }
            transpose_lanes<Native>(map4);
            transpose_lanes<Native>(map6);
            for (int r = 0; r < W; r++) {
                Native::store(&errors_.map4[row + r][at], map4[r]);
                Native::store(&errors_.map6[row + r][at], map6[r]);
            }
        }
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
        Float magnitude[COLS];
        for (int i = 0; i < COLS; i++) magnitude[i] = magnitudes(x + i * W);
        Float map4 = Numerics::template row_errors<0>(tables_, at, magnitude);
        Float map6 = Numerics::template row_errors<1>(tables_, at, magnitude);
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

    // The same row from column `first` on to a place of its own, COLS elements a block; zeros for
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
        errors.choose(n, candidates.choices + block_row * blocks_w + first);
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
    auto piece = [&](const CastShard& shard, i64 begin, i64 end, i64) {
        with_errors(numerics_table, shard, [&](auto scaling) {
            if (!scaling.finite) return;  // everything is NaN whatever is chosen
            with_rounded_master(shard, [&](auto* master, auto nominal) {
                PartialSelect(shard, master, nominal, scaling)(begin, end);
            });
        });
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
