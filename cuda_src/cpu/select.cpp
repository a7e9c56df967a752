// partial_select and select: which of two scales each block takes under 4-over-6, also where ranks
// share it.
//
// The errors of a row inside a block are summed from left to right, then the rows in a fixed order,
// so whoever adds them gets the same sum. A register holds the same column of as many blocks side
// by side: no sum goes across it.
#include <string.h>

#include "arithmetic/scaling.h"
#include "cpu/masters.h"
#include "cpu/strips.h"
#include "cpu/transpose_lanes.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {
namespace {

typedef Native::Int Int;
typedef Native::Float Float;
constexpr int W = Native::WIDTH;

// The largest blocks there are: 16 rows of 16 elements.
constexpr i64 ROWS = 16, COLS = 16;

// Blocks side by side whose errors are kept together: 16 KiB.
constexpr i64 ACROSS = 128;

// The value of the stored scale, and the multiplier, of both candidates of WIDTH blocks.
struct CandidateScales {
    Float map4, multiplier4, map6, multiplier6;

    CandidateScales() = default;
    CandidateScales(const FourOverSixNumerics& numerics, Int amax) {
        Int stored4 = numerics.stored<Native>(amax, Native::splat(1));
        Int stored6 = numerics.stored<Native>(amax, Native::splat(0));
        map4 = decode<E4M3, Native>(stored4);
        map6 = decode<E4M3, Native>(stored6);
        multiplier4 = numerics.multiplier_under<Native>(stored4);
        multiplier6 = numerics.multiplier_under<Native>(stored6);
    }
};

// n amaxes of blocks side by side, and 0 beyond.
ZEROCAST_FN Int load_amaxes(const i32* amax, i64 n) {
    Int amaxes{};
    memcpy(&amaxes, amax, min_of(n, W) * sizeof(i32));
    return amaxes;
}

// The summed errors of one row inside WIDTH blocks, of rounded elements x [WIDTH, COLS].
template <bool SQUARED>
ZEROCAST_FN void row_errors(const FourOverSixNumerics& numerics, const CandidateScales& scales,
                            const Float (&x)[COLS], Float& map4, Float& map6) {
    for (int c = 0; c < COLS; c++) {
        Float error4 = numerics.error<SQUARED, Native>(x[c], scales.map4, scales.multiplier4);
        Float error6 = numerics.error<SQUARED, Native>(x[c], scales.map6, scales.multiplier6);
        map4 = c == 0 ? error4 : map4 + error4;
        map6 = c == 0 ? error6 : map6 + error6;
    }
}

// Column c of WIDTH blocks side by side in register c, rounded.
template <class Rounded, class T>
ZEROCAST_FN void load_columns(const T* x, Float (&columns)[COLS]) {
    for (int c = 0; c < COLS; c += W) {
        for (int b = 0; b < W; b++) columns[c + b] = load(x + b * COLS + c);
        transpose_lanes<Native>(columns + c);
    }
    for (int c = 0; c < COLS; c++) columns[c] = round_to<Rounded, Native>(columns[c]);
}

// Whether the sum of map4 is the smaller one, from the sums of the ROWS rows of WIDTH blocks:
// rows[candidate][row], `stride` registers' worth of floats apart. Overwrites them.
ZEROCAST_FN Int choose(float (*rows)[ROWS][ACROSS], i64 block) {
    Float sums[2];
    for (int k = 0; k < 2; k++) {
        Float sum[ROWS];
        for (int r = 0; r < ROWS; r++) sum[r] = Native::load(&rows[k][r][block]);
        for (int half = ROWS / 2; half > 0; half /= 2) {
            for (int r = 0; r < half; r++) sum[r] += sum[r + half];
        }
        sums[k] = sum[0];
    }
    return Native::select(sums[0] < sums[1], Native::splat(1), Native::splat(0));
}

// One shard's part of the decision.
template <class T, class Rounded, bool SQUARED>
class PartialSelect {
  public:
    PartialSelect(const CastShard& shard, const T* master, const FourOverSixNumerics& numerics)
        : shard_(shard), grid_(shard.rowwise.grid), numerics_(numerics), master_(master) {}

    // Rows of blocks, as far as they are in [begin, end).
    void operator()(i64 begin, i64 end) {
        auto open = [&](const Strip& strip) {
            for (i64 b = 0; b < strip.blocks; b += W) {
                const i32* amax = shard_.rowwise.block_amax + strip.first_block + b;
                scales_[b / W] = CandidateScales(numerics_, load_amaxes(amax, strip.blocks - b));
            }
            memset(errors_, 0, sizeof errors_);
            cut_ = find(shard_.candidates.cut, shard_.candidates.cuts,
                        strip.first_block / grid_.blocks_w());
        };
        auto work = [&](const Strip& strip, const Panel& panel) {
            for (i64 r = 0; r < panel.rows; r++)
                row(strip, panel.element + r * grid_.cols, panel.count);
        };
        auto close = [&](const Strip& strip) {
            if (cut_ < 0) choose_strip(strip);
        };
        for_each_strip(grid_, begin, end, open, work, close, ACROSS);
    }

  private:
    const CastShard& shard_;
    const Grid& grid_;
    FourOverSixNumerics numerics_;
    const T* master_;  // as if it were the whole weight
    i64 cut_;          // the strip's place among the rows of blocks that are cut, or -1
    CandidateScales scales_[ACROSS / W];
    alignas(64) float errors_[2][ROWS][ACROSS];  // of map4 and of map6

    // count elements of one row of the matrix, inside the strip.
    void row(const Strip& strip, i64 element, i64 count) {
        i64 row = element / grid_.cols, col = element % grid_.cols, end = col + count;
        i64 row_start = row * grid_.cols;
        i64 first = (col + grid_.block_w - 1) / grid_.block_w;  // the first block that is whole
        i64 last = end == grid_.cols ? grid_.blocks_w() : end / grid_.block_w;
        if (first > last) return segment(row_start, col, end);  // begins and ends inside one block
        if (col < first * grid_.block_w) segment(row_start, col, first * grid_.block_w);
        i64 strip_block = strip.col / grid_.block_w;
        for (i64 b = first; b < last;) {
            // Registers begin at multiples of WIDTH blocks, as the candidates' scales do.
            i64 at = b - strip_block, n = min_of(W - at % W, last - b);
            blocks(row, b, at, n);
            b += n;
        }
        if (last * grid_.block_w < end) segment(row_start, last * grid_.block_w, end);
    }

    // n blocks of one row from block column `block` on, which is number `at` of the strip; they lie
    // in one register.
    void blocks(i64 row, i64 block, i64 at, i64 n) {
        const T* x = master_ + row * grid_.cols + block * grid_.block_w;
        alignas(64) T copy[W * COLS];
        if (n < W || grid_.block_w < COLS || (block + n) * COLS > grid_.cols) {
            memset(copy, 0, sizeof copy);
            for (i64 b = 0; b < n; b++) {
                i64 width = min_of(grid_.block_w, grid_.cols - (block + b) * grid_.block_w);
                memcpy(copy + (at % W + b) * COLS, x + b * grid_.block_w, width * sizeof(T));
            }
            x = copy;
        } else {
            for (i64 i = 0; i < W * COLS; i += 16) __builtin_prefetch(x + i + PREFETCH_AHEAD);
        }
        Float columns[COLS], map4, map6;
        load_columns<Rounded>(x, columns);
        row_errors<SQUARED>(numerics_, scales_[at / W], columns, map4, map6);
        i64 in_block = row % grid_.block_h;
        if (cut_ < 0) {
            memcpy(&errors_[0][in_block][at / W * W], &map4, sizeof map4);
            memcpy(&errors_[1][in_block][at / W * W], &map6, sizeof map6);
            return;
        }
        float* to = shard_.candidates.errors_of(grid_, cut_, in_block) + 2 * block;
        for (i64 b = 0; b < n; b++) {
            to[2 * b] = map4[at % W + b];
            to[2 * b + 1] = map6[at % W + b];
        }
    }

    // Columns [col, end) of a row, inside one block that other ranks own elements of, too.
    void segment(i64 row_start, i64 col, i64 end) {
        i64 first = col / grid_.block_w * grid_.block_w;
        const Candidates& candidates = shard_.candidates;
        i64 s = find(candidates.segments, candidates.segment_count, row_start + first);
        float* to = candidates.elements + s * grid_.block_w - first;
        for (i64 c = col; c < end; c++)
            to[c] = round_to<Rounded, Scalar>(value_of(master_[row_start + c]));
    }

    void choose_strip(const Strip& strip) {
        for (i64 b = 0; b < strip.blocks; b += W) {
            Int chosen = choose(errors_, b);
            u8* to = shard_.candidates.choices + strip.first_block + b;
            for (i64 i = 0; i < min_of(W, strip.blocks - b); i++) to[i] = (u8)chosen[i];
        }
    }
};

template <class Rounded, bool SQUARED, class T>
void select_rounded(const CastShard& shard, const T* master, const FourOverSixNumerics& numerics,
                    i64 begin, i64 end) {
    PartialSelect<T, Rounded, SQUARED>(shard, master, numerics)(begin, end);
}

template <bool SQUARED>
void partial_select(const CastShard& shard, const FourOverSixNumerics& numerics, i64 begin,
                    i64 end) {
    with_rounded_master(shard, [&](auto* master, auto nominal) {
        select_rounded<decltype(nominal), SQUARED>(shard, master, numerics, begin, end);
    });
}

// The errors of a segment, from the elements that its ranks put together.
void segment_errors(const CastShard& shard, const NumericsTable& table,
                    const FourOverSixNumerics& numerics, i64 cut, i64 segment) {
    const Grid& grid = shard.rowwise.grid;
    i64 start = shard.candidates.segments[segment];
    i64 row = start / grid.cols, block = start % grid.cols / grid.block_w;
    i64 width = min_of(grid.block_w, grid.cols - block * grid.block_w);
    Float x[COLS] = {}, map4, map6;  // in the first element of each register
    for (i64 c = 0; c < width; c++) x[c][0] = shard.candidates.elements[segment * grid.block_w + c];
    const i32* amax = shard.rowwise.block_amax + row / grid.block_h * grid.blocks_w() + block;
    CandidateScales scales(numerics, load_amaxes(amax, 1));
    if (table.four_over_six == ERROR_MSE)
        row_errors<true>(numerics, scales, x, map4, map6);
    else
        row_errors<false>(numerics, scales, x, map4, map6);
    float* to = shard.candidates.errors_of(grid, cut, row % grid.block_h) + 2 * block;
    to[0] = map4[0];
    to[1] = map6[0];
}

// The choices of one row of blocks that is cut.
void select_row(const CastShard& shard, const NumericsTable& table, i64 cut) {
    const Grid& grid = shard.rowwise.grid;
    const Candidates& candidates = shard.candidates;
    i64 block_row = candidates.cut[cut], blocks_w = grid.blocks_w();
    u8* choices = candidates.choices + block_row * blocks_w;
    FourOverSixNumerics numerics(*shard.tensor_amax, table.scale_max);
    if (!numerics.finite) {
        memset(choices, 0, blocks_w);
        return;
    }
    for (i64 s = 0; s < candidates.segment_count; s++) {
        if (candidates.segments[s] / grid.cols / grid.block_h == block_row)
            segment_errors(shard, table, numerics, cut, s);
    }
    alignas(64) float errors[2][ROWS][ACROSS];
    for (i64 first = 0; first < blocks_w; first += ACROSS) {
        i64 n = min_of(ACROSS, blocks_w - first);
        memset(errors, 0, sizeof errors);
        for (i64 r = 0; r < grid.block_h; r++) {
            const float* from = candidates.errors_of(grid, cut, r) + 2 * first;
            for (i64 b = 0; b < n; b++) {
                errors[0][r][b] = from[2 * b];
                errors[1][r][b] = from[2 * b + 1];
            }
        }
        for (i64 b = 0; b < n; b += W) {
            Int chosen = choose(errors, b);
            for (i64 i = 0; i < min_of(W, n - b); i++) choices[first + b + i] = (u8)chosen[i];
        }
    }
}

}  // namespace
}  // namespace ZEROCAST_ISA
}  // namespace zerocast

ZEROCAST_EXPORT(partial_select)(const void* numerics, const void* table, long long count,
                                long long threads) {
    using namespace zerocast;
    auto& numerics_table = *(const NumericsTable*)numerics;
    auto shards = (const CastShard*)table;
    auto span = [](const CastShard& shard) {
        return Span{shard.start, shard.end, shard.rowwise.grid.block_h * shard.rowwise.grid.cols};
    };
    i64 total = total_elements(shards, count, span);
    in_parallel(total, threads, [&](i64 thread, i64 num_threads) {
        share(shards, count, total, thread, num_threads, span,
              [&](const CastShard& shard, i64 begin, i64 end) {
                  FourOverSixNumerics numerics(*shard.tensor_amax, numerics_table.scale_max);
                  if (!numerics.finite) return;  // everything is NaN whatever is chosen
                  if (numerics_table.four_over_six == ERROR_MSE)
                      partial_select<true>(shard, numerics, begin, end);
                  else
                      partial_select<false>(shard, numerics, begin, end);
              });
    });
}

ZEROCAST_EXPORT(select)(const void* numerics, const void* table, long long count,
                        long long threads) {
    using namespace zerocast;
    auto shards = (const CastShard*)table;
    auto rows = [](const CastShard& shard) {
        i64 row = shard.rowwise.grid.block_h * shard.rowwise.grid.cols;
        return Span{0, shard.candidates.cuts * row, row};
    };
    i64 total = total_elements(shards, count, rows);
    in_parallel(total, threads, [&](i64 thread, i64 num_threads) {
        share(shards, count, total, thread, num_threads, rows,
              [&](const CastShard& shard, i64 begin, i64 end) {
                  i64 row = rows(shard).granule;
                  for (i64 cut = begin / row; cut < end / row; cut++)
                      select_row(shard, *(const NumericsTable*)numerics, cut);
              });
    });
}
