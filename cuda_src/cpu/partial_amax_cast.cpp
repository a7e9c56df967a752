// partial_amax_cast: what partial_amax does, and in the same read of the master the codes of the
// rows of blocks that a shard holds whole, whose scales need no reduction.
//
// Such rows are divided into parts of whole blocks, small enough that the cast finds in a cache
// what the amax has read. The processor computes while it reads: the cast of one part, a few rows
// at a time, prefetches the same rows of the next one, and their amaxes are taken then. Parts are
// as wide as the matrix where they can be, because memory is fast where it is read in long runs.
//
// adamw_cast: a step of AdamW, and in the same pass over the masters what partial_amax_cast does;
// or under delayed scaling, whose scales are known before, what partial_cast does. The loop that
// updates a row of blocks also casts the one above it, whose elements wait, rounded, in a buffer:
// so the processor computes while it waits for four arrays, and these are read from end to end.
#include <stdlib.h>

#include "cpu/adamw.h"
#include "cpu/cast_rows.h"
#include "cpu/cast_rows_and_columns.h"
#include "cpu/cast_shard.h"
#include "cpu/plane_amax.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {
namespace {

// Elements of a part: the most, unless one block has more, and the fewest that are worth a separate
// part. Processors with AVX-512 have second-level caches that hold two parts of 256 KiB; of others,
// parts of 4 MiB stay in the third level.
constexpr i64 LARGEST = Native::WIDTH == 16 ? 1 << 16 : 1 << 20, SMALLEST = 1 << 16;

// Elements that are cast, and measured, at a time: of FP32 128 KiB of a second-level cache, or 256
// where every piece loads and stores the maxima of all columns.
constexpr i64 PIECE = 1 << 15, PIECE_OF_COLUMNS = 1 << 16;

// The same where elements are updated, of four arrays.
constexpr i64 PIECE_OF_UPDATES = 1 << 13;

// The columns below which no part is divided so that all threads have some.
constexpr i64 NARROW = 1024;

// Elements at most of a row of blocks that waits for its cast: of BF16 2 MiB.
constexpr i64 WAITING = 1 << 20;

// What a launch works on.
struct Shards {
    const CastShard* shards;
    const AdamWUpdate* updates;  // of each shard; null where masters are read as they are
    bool streams;                // whether codes go past the caches
};

// Raises the amaxes of a shard to those of a region of it, which is updated first.
template <class T>
void measure(const Shards& shards, const CastShard& shard, const T* master, const Region& region,
             bool shared) {
    if (region.begin >= region.end) return;
    if constexpr (SAME<T, float>) {
        if (shards.updates) {
            const AdamWUpdate& update = shards.updates[&shard - shards.shards];
            i64 width = min_of(region.col_end, shard.rowwise.grid.cols) - region.col;
            // Where a region is narrow, the next row is far.
            i64 ahead = width < PREFETCH_AHEAD ? shard.rowwise.grid.cols : PREFETCH_AHEAD;
            return raise_amaxes(shard, master, region, shared, Update(update, shard.start, ahead));
        }
    }
    raise_amaxes(shard, master, region, shared);
}

// Whether both planes go by CastRowsAndColumns, which takes lanes of 16 bits to be fast.
bool has_rows_and_columns(const CastShard& shard) {
    return in_rows_and_columns(shard) && Native::WIDTH > 4 && shard.rowwise.grid.block_w == 32
           && shard.columnwise.grid.block_h == 32;
}

// Whether cast_rows() or CastRowsAndColumns can do the cast.
bool goes_by_rows(const CastShard& shard, const AdamWUpdate* table) {
    const Grid& grid = shard.rowwise.grid;
    bool is_one_plane = !shard.columnwise.codes && grid.block_h == grid.block_w
                        && (grid.block_w == 32 || grid.block_w == 128);
    return (is_one_plane || has_rows_and_columns(shard)) && grid.cols % GROUP == 0
           && shard.round_to == NOMINAL_BF16 && shard.master->dtype == NOMINAL_FP32
           && (!table || Update(*table, shard.start).goes_in_groups());
}

// The parts of a shard, a row of blocks after the other.
class Parts {
  public:
    Parts(const CastShard& shard, i64 num_threads, bool updated, bool by_rows)
        : cols_(shard.rowwise.grid.cols),
          begin_(whole_rows(shard).begin),
          end_(whole_rows(shard).end) {
        i64 row = block_rows(shard), height = row / cols_, blocks = shard.rowwise.grid.block_w;
        if (shard.columnwise.codes) {
            i64 others = shard.columnwise.grid.block_w;
            blocks = others % blocks == 0   ? others
                     : blocks % others == 0 ? blocks
                                            : blocks * others;
        }
        piece_ = updated ? PIECE_OF_UPDATES : shard.columnwise.codes ? PIECE_OF_COLUMNS : PIECE;
        size_ = row * max_of(1, SMALLEST / row);
        width_ = cols_;
        while (width_ > NARROW && count() < 4 * num_threads) width_ = (width_ + 1) / 2;
        width_ = min_of(width_, (by_rows ? WAITING : LARGEST) / height);
        width_ = (width_ + blocks - 1) / blocks * blocks;
    }

    bool are_whole_rows() const { return width_ >= cols_; }
    i64 count() const { return (end_ - begin_ + size_ - 1) / size_ * across(); }

    // Some rows of part number i: those that are cast or measured at a time.
    Region piece(i64 i, i64 number) const {
        i64 begin = begin_ + i / across() * size_, end = min_of(begin + size_, end_);
        i64 col = i % across() * width_, col_end = min_of(col + width_, cols_);
        i64 rows = max_of(1, piece_ / (col_end - col)) * cols_;
        begin = min_of(begin + number * rows, end);
        return Region{begin, min_of(begin + rows, end), col, col_end};
    }

    // How many elements after part i the next one begins.
    i64 to_next(i64 i) const {
        return (i + 1) % across() ? width_ : size_ - (across() - 1) * width_;
    }

  private:
    i64 cols_, begin_, end_;
    i64 size_, width_;  // elements of a row of parts, and columns of a part
    i64 piece_;

    i64 across() const { return (cols_ + width_ - 1) / width_; }
};

// Does what cast_rows() does of whole rows, where there is memory; returns whether there is.
template <class F>
bool cast_whole_rows(const CastShard& shard, const float* master, const AdamWUpdate* table,
                     const BlockMultipliers& multipliers, i64 begin, i64 end, bool streams) {
    const Grid& grid = shard.rowwise.grid;
    bool both = has_rows_and_columns(shard);
    if (both && !multipliers.are_powers_of_two()) return false;
    i64 blocks = grid.cols / grid.block_w + 2;
    i64 bytes = (blocks + Native::WIDTH) * sizeof(Native::Int) + blocks * sizeof(float)
                + block_rows(shard) * sizeof(Waiting);
    if (both) bytes = CastRowsAndColumns<32, F>::bytes(grid.cols);
    void* memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!memory) return false;
    Region region{begin, end};
    region.streams = streams;
    auto cast = [&](const auto& source) {
        if constexpr (Native::WIDTH > 4) {
            if (both) return CastRowsAndColumns<32, F>(shard, multipliers, region, memory)(source);
        }
        if (grid.block_w == 32)
            cast_rows<32, F>(shard, source, multipliers, region, memory);
        else
            cast_rows<128, F>(shard, source, multipliers, region, memory);
    };
    if (table)
        cast(Update(*table, shard.start));
    else
        cast(Read{master});
    free(memory);
    return true;
}

// Measures and casts parts [first, last) of a shard.
template <class F, class Rounded, class T>
void cast_parts(const Shards& shards, const CastShard& shard, const T* master,
                const BlockMultipliers& multipliers, const Parts& parts, i64 first, i64 last) {
    if constexpr (SAME<T, float> && SAME<Rounded, Bf16>) {
        const AdamWUpdate* update =
            shards.updates ? shards.updates + (&shard - shards.shards) : nullptr;
        if (parts.are_whole_rows() && goes_by_rows(shard, update)) {
            i64 begin = parts.piece(first, 0).begin, end = parts.piece(last, 0).begin;
            if (cast_whole_rows<F>(shard, master, update, multipliers, begin, end, shards.streams))
                return;
        }
    }
    for (i64 i = first - 1; i < last; i++) {
        bool any = true;
        for (i64 number = 0; any; number++) {
            Region cast{}, measured{};
            if (i >= first) cast = parts.piece(i, number);
            if (i + 1 < last) measured = parts.piece(i + 1, number);
            if (i >= first) {
                cast.ahead = i + 1 < last ? parts.to_next(i) : 0;
                measured.ahead = 0;
                cast.streams = shards.streams;
            }
            any = false;
            if (cast.begin < cast.end) {
                cast_planes<Rounded>(shard, master, multipliers, NearestGroup<F>{}, cast);
                any = true;
            }
            if (measured.begin < measured.end) {
                measure(shards, shard, master, measured, false);
                any = true;
            }
        }
    }
}

// Updates, measures and casts elements [begin, end) of a shard under delayed scaling.
void cast_delayed(const NumericsTable& table, const AdamWUpdate& update, const CastShard& shard,
                  i64 begin, i64 end) {
    with_numerics(table, shard.tensor_amax, shard.delayed, [&](auto scaling) {
        typedef decltype(scaling) Numerics;
        typedef typename Numerics::Format F;
        if constexpr (SAME<Numerics, DelayedNumerics<F>>) {
            BlockMultipliers multipliers(scaling);
            with_rounded_master(shard, [&](auto* master, auto nominal) {
                Update step(update, shard.start);
                for (i64 at = begin, next; at < end; at = next) {
                    next = min_of(at + CHUNK, end);
                    step(at, next);
                    cast_planes<decltype(nominal)>(shard, master, multipliers, NearestGroup<F>{},
                                                   Region{at, next});
                }
            });
        }
    });
}

void launch(const NumericsTable& numerics_table, const CastShard* shards,
            const AdamWUpdate* updates, i64 count, i64 threads) {
    bool updated = updates;
    i64 total = total_elements(shards, count, [](const CastShard& s) { return shard_span(s, 1); });
    Shards table{shards, updates, streams_codes(shards, count)};
    auto whole = [&](const CastShard& shard, const Parts& parts, i64 first, i64 last) {
        with_numerics(numerics_table, shard.tensor_amax, shard.delayed, [&](auto scaling) {
            typedef decltype(scaling) Numerics;
            typedef typename Numerics::Format F;
            if constexpr (SAME<Numerics, Float8Numerics<F>> || SAME<Numerics, MXNumerics<F>>) {
                BlockMultipliers multipliers(scaling);
                with_rounded_master(shard, [&](auto* master, auto nominal) {
                    cast_parts<F, decltype(nominal)>(table, shard, master, multipliers, parts,
                                                     first, last);
                });
            }
        });
    };
    auto rest = [&](const CastShard& shard, i64 begin, i64 end, i64 num_threads) {
        if (shard.delayed.scale) {
            const AdamWUpdate& update = table.updates[&shard - table.shards];
            return cast_delayed(numerics_table, update, shard, begin, end);
        }
        bool shared = share_blocks(shard, num_threads);
        with_master(shard, [&](auto* master) {
            Span whole = whole_rows(shard);
            Region before{begin, min_of(end, whole.begin)};
            Region behind{max_of(begin, whole.end), end};
            measure(table, shard, master, before, shared);
            measure(table, shard, master, behind, shared);
        });
    };
    in_parallel(total, threads, [&](i64 thread, i64 num_threads) {
        // Weights of few elements have few parts, and each as many as its elements are worth.
        auto parts = [&](const CastShard& shard) {
            const AdamWUpdate* update = updated ? table.updates + (&shard - table.shards) : nullptr;
            return Parts(shard, num_threads, updated, goes_by_rows(shard, update));
        };
        auto numbers = [&](const CastShard& shard) { return Span{0, parts(shard).count(), 1}; };
        auto span = [&](const CastShard& shard) { return shard_span(shard, num_threads); };
        share(table.shards, count, thread, num_threads, numbers,
              [&](const CastShard& shard, i64 first, i64 last) {
                  whole(shard, parts(shard), first, last);
              });
        share(table.shards, count, thread, num_threads, span,
              [&](const CastShard& shard, i64 begin, i64 end) {
                  rest(shard, begin, end, num_threads);
              });
        if (table.streams) stream_fence();
    });
}

}  // namespace
}  // namespace ZEROCAST_ISA
}  // namespace zerocast

ZEROCAST_EXPORT(partial_amax_cast)(const void* numerics, const void* table, long long count,
                                   long long threads) {
    using namespace zerocast;
    auto shards = (const CastShard*)table;
    launch(*(const NumericsTable*)numerics, shards, nullptr, count, threads);
}

ZEROCAST_EXPORT(adamw_cast)(const void* numerics, const void* table, long long count,
                            const void* updates, long long threads) {
    using namespace zerocast;
    auto shards = (const CastShard*)table;
    launch(*(const NumericsTable*)numerics, shards, (const AdamWUpdate*)updates, count, threads);
}
