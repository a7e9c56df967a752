// partial_amax: raise block and tensor amaxes to the largest magnitudes of this rank's rounded
// elements.
#include "amax.h"
#include "strips.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {
namespace {

typedef Native::Int Int;

void one_block(const CastShard& shard, i64 begin, i64 end) {
    i32 amax = rounded<Scalar>(largest_of(*shard.master + (begin - shard.start), end - begin),
                               shard.round_to);
    raise_shared(shard.block_amax, amax);
    raise_shared(shard.tensor_amax, amax);
}

// ROWS rows of a panel whose blocks are 16 wide and whole. More than one, so that a block's maxima
// are fetched and stored less often.
template <int ROWS>
ZEROCAST_FN void raise_rows(Int* largest, const Grid& grid, const Panel& panel, const float* x) {
    for (i64 c = 0; c < panel.count; c += 16) {
        Int in_block = largest[c / 16];
        for (int r = 0; r < ROWS; r++) {
            const float* at = x + r * grid.cols + c;
            __builtin_prefetch(at + PREFETCH_AHEAD / ROWS);
            in_block = raise(in_block, at, 16);
        }
        largest[c / 16] = in_block;
    }
}

// The elements of one panel, into the maxima of the strip's blocks.
void raise_panel(Int* largest, const Grid& grid, const Panel& panel, const float* x) {
    i64 block = panel.col / grid.block_w, in_block = panel.col % grid.block_w;
    if (grid.block_w == 16 && in_block == 0
        && panel.count % 16 == 0) {  // NVFP4, but for the ends of a shard
        i64 r = 0;
        for (; r + 4 <= panel.rows; r += 4, x += 4 * grid.cols)
            raise_rows<4>(largest + block, grid, panel, x);
        for (; r < panel.rows; r++, x += grid.cols) raise_rows<1>(largest + block, grid, panel, x);
        return;
    }
    for (i64 r = 0; r < panel.rows; r++, x += grid.cols) {
        i64 n = min_of(grid.block_w - in_block, panel.count);
        for (i64 c = 0, b = block; c < panel.count;
             c += n, b++, n = min_of(grid.block_w, panel.count - c)) {
            for (i64 i = 0; i < n; i += 16) __builtin_prefetch(x + c + i + PREFETCH_AHEAD);
            largest[b] = raise(largest[b], x + c, n);
        }
    }
}

// The maxima of a strip's blocks into the buffer, a register of blocks at a time; returns the
// largest of all.
i32 flush(Int* largest, i64 blocks, i32* slots, i64 nominal, bool shared) {
    constexpr int W = Native::WIDTH;
    Int strip{};
    for (i64 b = 0; b < blocks; b += W) {
        Int amax = rounded<Native>(reduce_max_each<Native>(largest + b), nominal);
        strip = Native::max(strip, amax);
        if (!shared && b + W <= blocks) {
            Native::store(slots + b, Native::max(Native::load_as<Int>(slots + b), amax));
        } else {
            for (i64 i = 0; i < min_of(W, blocks - b); i++) raise_shared(slots + b + i, amax[i]);
        }
    }
    return reduce_max<Native>(strip);
}

// Where the amaxes of one plane of codes go.
struct Slots {
    Grid grid;
    i32* block_amax;
    bool shared;  // another thread may raise them at the same time
};

// Returns the largest of all.
i32 many_blocks(const CastShard& shard, const Slots& slots, i64 begin, i64 end) {
    const float* master = *shard.master - shard.start;
    Int largest[STRIP_BLOCKS];  // by block; all that flush takes together are set, the last ones
                                // unused
    i32 tensor = 0;
    auto open = [&](const Strip& strip) {
        for (i64 b = 0; b < min_of(STRIP_BLOCKS, strip.blocks + Native::WIDTH); b++)
            largest[b] = Int{};
    };
    auto work = [&](const Strip&, const Panel& panel) {
        raise_panel(largest, slots.grid, panel, master + panel.element);
    };
    auto close = [&](const Strip& strip) {
        i32* at = slots.block_amax + strip.first_block;
        tensor =
            Scalar::max(tensor, flush(largest, strip.blocks, at, shard.round_to, slots.shared));
    };
    for_each_strip(slots.grid, begin, end, open, work, close);
    return tensor;
}

// The elements of a piece of a row into the maxima of their columns. Those below are asked for.
ZEROCAST_FN void raise_columns(i32* largest, const float* x, i64 n, i64 row) {
    constexpr int W = Native::WIDTH;
    i64 c = 0;
    for (; c + GROUP <= n; c += GROUP) {
        for (int i = 0; i < GROUP; i += 16) __builtin_prefetch(x + c + i + row);
        for (int i = 0; i < GROUP; i += W) {
            Int raised = Native::max(Native::load_as<Int>(largest + c + i), magnitudes(x + c + i));
            Native::store(largest + c + i, raised);
        }
    }
    for (; c < n; c++) largest[c] = Scalar::max(largest[c], Scalar::bits(x[c]) & MAGNITUDE_MASK);
}

// The maxima of columns side by side into the buffer.
void flush_columns(const i32* largest, i64 n, i32* slots, i64 nominal, bool shared) {
    constexpr int W = Native::WIDTH;
    i64 c = 0;
    for (; !shared && c + W <= n; c += W) {
        Int amax = rounded<Native>(Native::load_as<Int>(largest + c), nominal);
        Native::store(slots + c, Native::max(Native::load_as<Int>(slots + c), amax));
    }
    for (; c < n; c++) raise_shared(slots + c, rounded<Scalar>(largest[c], nominal));
}

// Blocks of one row and blocks of one column, in one pass over the master: a strip holds columns,
// and each piece of a row in it is read from the nearest cache the second time.
i32 rows_and_columns(const CastShard& shard, const Slots& rows, const Slots& columns, i64 begin,
                     i64 end) {
    const float* master = *shard.master - shard.start;
    const Grid& grid = rows.grid;
    alignas(64) i32 by_column[STRIP_COLUMNS];
    Int by_block[STRIP_COLUMNS / ROW_BLOCK + 2 + Native::WIDTH];
    i32 tensor = 0;
    auto open = [&](const Strip& strip) {
        for (i64 c = 0; c < strip.blocks; c++) by_column[c] = 0;
    };
    auto work = [&](const Strip& strip, const Panel& panel) {
        i64 row = panel.element / grid.cols, col = strip.col + panel.col;
        i64 first = col / grid.block_w, last = (col + panel.count - 1) / grid.block_w;
        for (i64 r = 0; r < panel.rows; r++) {
            Panel piece{panel.element + r * grid.cols, col % grid.block_w, panel.count, 1};
            raise_columns(by_column + panel.col, master + piece.element, panel.count, grid.cols);
            for (i64 b = 0; b <= last - first + Native::WIDTH; b++) by_block[b] = Int{};
            raise_panel(by_block, grid, piece, master + piece.element);
            i32* at = rows.block_amax + (row + r) * grid.blocks_w() + first;
            tensor = Scalar::max(
                tensor, flush(by_block, last - first + 1, at, shard.round_to, rows.shared));
        }
    };
    auto close = [&](const Strip& strip) {
        flush_columns(by_column, strip.blocks, columns.block_amax + strip.first_block,
                      shard.round_to, columns.shared);
    };
    for_each_strip(columns.grid, begin, end, open, work, close, STRIP_COLUMNS);
    return tensor;
}

void amaxes(const CastShard& shard, i64 begin, i64 end, i64 parts) {
    if (!shard.columnwise_codes && shard.grid.num_blocks() == 1)
        return one_block(shard, begin, end);
    bool shared = parts > 1 && !cut_between_blocks(shard, parts);
    Slots rows{shard.grid, shard.block_amax, shared};
    if (!shard.columnwise_codes)
        return raise_shared(shard.tensor_amax, many_blocks(shard, rows, begin, end));
    Slots columns{shard.columnwise_grid, shard.columnwise_block_amax, shared};
    i32 tensor;
    if (in_rows_and_columns(shard)) {
        tensor = rows_and_columns(shard, rows, columns, begin, end);
    } else {
        tensor = many_blocks(shard, rows, begin, end);
        many_blocks(shard, columns, begin, end);
    }
    raise_shared(shard.tensor_amax, tensor);
}

}  // namespace
}  // namespace ZEROCAST_ISA
}  // namespace zerocast

ZEROCAST_EXPORT(partial_amax)(const void* table, long long count, long long threads) {
    using namespace zerocast;
    auto shards = (const CastShard*)table;
    auto whole = [](const CastShard& shard) { return shard_span(shard, 1); };
    i64 total = total_elements(shards, count, whole);
    if (total == 0) return;
    in_parallel(total, threads, [&](i64 part, i64 parts) {
        auto span = [&](const CastShard& shard) { return shard_span(shard, parts); };
        share(
            shards, count, total, part, parts, span,
            [&](const CastShard& shard, i64 begin, i64 end) { amaxes(shard, begin, end, parts); });
    });
}
