// The amaxes of one shard over its grids of blocks: what partial_amax is made of.
#pragma once

#include <string.h>

#include "cpu/amax.h"
#include "cpu/strips.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// Below, a `master` is as if it were the whole weight, and before(begin, end) is called with the
// elements that are read next.

// What is done before elements are read as they are.
struct NoUpdate {
    ZEROCAST_FN void operator()(i64, i64) const {}
};

// Elements that are updated at a time, and then measured, from the nearest cache.
constexpr i64 UPDATED = 1024;

// A group of elements into the maxima of their blocks, BLOCK wide.
template <int BLOCK>
ZEROCAST_FN void raise_group(Native::Int* largest, const Native::Float (&x)[4]) {
    constexpr int TOGETHER = (BLOCK < GROUP ? BLOCK : GROUP) / Native::WIDTH;
    for (int i = 0; i < 4; i += TOGETHER, largest++) {
        Native::Int found = *largest;
        for (int k = i; k < i + TOGETHER; k++)
            found = Native::max(found, Native::bits(x[k]) & MAGNITUDE_MASK);
        *largest = found;
    }
}

// ROWS rows of a panel whose blocks are BLOCK wide and whole. More than one, so that a block's
// maxima are fetched and stored less often.
template <int BLOCK, int ROWS, class T>
ZEROCAST_FN void raise_rows(Native::Int* largest, const Grid& grid, const Panel& panel, const T* x,
                            i64 ahead) {
    for (i64 c = 0; c < panel.count; c += BLOCK) {
        Native::Int in_block = largest[c / BLOCK];
        for (int r = 0; r < ROWS; r++) {
            const T* at = x + r * grid.cols + c;
            for (int i = 0; i < BLOCK; i += 16) __builtin_prefetch(at + i + ahead / ROWS);
            in_block = raise(in_block, at, BLOCK);
        }
        largest[c / BLOCK] = in_block;
    }
}

// All rows of a panel whose blocks are BLOCK wide and whole.
template <int BLOCK, class T>
void raise_whole(Native::Int* largest, const Grid& grid, const Panel& panel, const T* x,
                 i64 ahead) {
    i64 r = 0;
    for (; r + 4 <= panel.rows; r += 4, x += 4 * grid.cols)
        raise_rows<BLOCK, 4>(largest, grid, panel, x, ahead);
    for (; r < panel.rows; r++, x += grid.cols)
        raise_rows<BLOCK, 1>(largest, grid, panel, x, ahead);
}

// The elements of one panel, into the maxima of the strip's blocks. `ahead`: how many elements
// ahead of the one that is read to prefetch.
template <class T>
void raise_panel(Native::Int* largest, const Grid& grid, const Panel& panel, const T* x,
                 i64 ahead) {
    i64 block = panel.col / grid.block_w, in_block = panel.col % grid.block_w;
    if (in_block == 0 && panel.count % grid.block_w == 0) {  // not at the ends of a shard
        if (grid.block_w == 16) return raise_whole<16>(largest + block, grid, panel, x, ahead);
        if (grid.block_w == 32) return raise_whole<32>(largest + block, grid, panel, x, ahead);
        if (grid.block_w == 128) return raise_whole<128>(largest + block, grid, panel, x, ahead);
    }
    for (i64 r = 0; r < panel.rows; r++, x += grid.cols) {
        i64 n = min_of(grid.block_w - in_block, panel.count);
        for (i64 c = 0, b = block; c < panel.count;
             c += n, b++, n = min_of(grid.block_w, panel.count - c)) {
            for (i64 i = 0; i < n; i += 16) __builtin_prefetch(x + c + i + ahead);
            largest[b] = raise(largest[b], x + c, n);
        }
    }
}

// The maxima of blocks side by side into the buffer, a register of blocks at a time; returns the
// largest of all, over the elements of a register.
ZEROCAST_FN Native::Int flush(const Native::Int* largest, i64 blocks, i32* slots, i64 nominal,
                              bool shared) {
    constexpr int W = Native::WIDTH;
    Native::Int all{};
    for (i64 b = 0; b < blocks; b += W) {
        Native::Int amax = rounded<Native>(reduce_max_each<Native>(largest + b), nominal);
        all = Native::max(all, amax);
        if (!shared && b + W <= blocks) {
            Native::store(slots + b, Native::max(Native::load_as<Native::Int>(slots + b), amax));
        } else {
            for (i64 i = 0; i < min_of(W, blocks - b); i++) raise_shared(slots + b + i, amax[i]);
        }
    }
    return all;
}

// Where the amaxes of one plane of codes go.
struct Slots {
    Grid grid;
    i32* block_amax;
    bool shared;  // another thread may raise them at the same time
};

// Returns the largest of all.
template <class T, class Before>
i32 many_blocks(const CastShard& shard, const T* master, const Slots& slots, const Region& region,
                const Before& before) {
    Native::Int largest[STRIP_BLOCKS];  // by block; all that flush takes together are set, the last
                                        // ones unused
    Native::Int tensor{};
    auto open = [&](const Strip& strip) {
        for (i64 b = 0; b < min_of(STRIP_BLOCKS, strip.blocks + Native::WIDTH); b++)
            largest[b] = Native::Int{};
    };
    auto work = [&](const Strip&, const Panel& panel) {
        if constexpr (SAME<Before, NoUpdate>)
            return raise_panel(largest, slots.grid, panel, master + panel.element, region.ahead);
        for (i64 r = 0; r < panel.rows; r++) {
            i64 element = panel.element + r * slots.grid.cols;
            if constexpr (!SAME<Before, NoUpdate>) {
                if (slots.grid.block_w == 16 && panel.col % 16 == 0 && panel.count % GROUP == 0
                    && before.goes_in_groups()) {  // NVFP4, measured in registers
                    auto raise = [&](i64 i, const Native::Float(&x)[4]) {
                        raise_group<16>(largest + (panel.col + i) / 16, x);
                    };
                    before.template in_groups<ALL_LEVELS>(
                        element, element + panel.count, [](i64) {}, raise);
                    continue;
                }
            }
            for (i64 c = 0, n; c < panel.count; c += n) {
                n = min_of(UPDATED, panel.count - c);
                before(element + c, element + c + n);
                raise_panel(largest, slots.grid, Panel{element + c, panel.col + c, n, 1},
                            master + element + c, 0);
            }
        }
    };
    auto close = [&](const Strip& strip) {
        i32* at = slots.block_amax + strip.first_block;
        tensor =
            Native::max(tensor, flush(largest, strip.blocks, at, shard.round_to, slots.shared));
    };
    for_each_strip(slots.grid, region, open, work, close);
    return reduce_max<Native>(tensor);
}

constexpr i64 FLAT = 16;

// Whether a region is blocks of 1x16 alone, one after the other through all rows, and none of them
// is cut or shared.
ZEROCAST_FN bool is_flat(const Slots& slots, const Region& region) {
    const Grid& grid = slots.grid;
    return grid.block_h == 1 && grid.block_w == FLAT && grid.cols % FLAT == 0 && !slots.shared
           && region.begin % FLAT == 0 && region.end % FLAT == 0 && region.col == 0
           && region.col_end >= grid.cols;
}

// Returns the largest of all.
template <class T>
i32 flat_blocks(const CastShard& shard, const T* master, const Slots& slots, const Region& region) {
    constexpr int W = Native::WIDTH;
    Native::Int tensor{};
    i64 end = region.end / FLAT;
    for (i64 block = region.begin / FLAT; block < end; block += W) {
        i64 blocks = min_of(W, end - block);
        Native::Int largest[W] = {};
        const T* x = master + block * FLAT;
        for (i64 i = 0; i < blocks; i++) {
            __builtin_prefetch(x + i * FLAT + region.ahead);
            largest[i] = raise(largest[i], x + i * FLAT, FLAT);
        }
        tensor = Native::max(
            tensor, flush(largest, blocks, slots.block_amax + block, shard.round_to, false));
    }
    return reduce_max<Native>(tensor);
}

// So many rows, which are read together.
template <int N>
struct Rows {
    static constexpr int COUNT = N;
};

// n elements of each of ROWS rows into the maxima of their columns, and of the rows, over a
// register each. `ahead`: how many elements after one that is read another is asked for.
template <int ROWS, class T>
ZEROCAST_FN void raise_columns(i32* by_column, Native::Int (&by_row)[ROWS], const T* x, i64 cols,
                               i64 n, i64 ahead) {
    constexpr int W = Native::WIDTH;
    i64 c = 0;
    for (; c + W <= n; c += W) {
        auto largest = Native::load_as<Native::Int>(by_column + c);
        for (int r = 0; r < ROWS; r++) {
            const T* at = x + r * cols + c;
            if (c % 16 == 0) __builtin_prefetch(at + ahead);
            Native::Int found = magnitudes(at);
            largest = Native::max(largest, found);
            by_row[r] = Native::max(by_row[r], found);
        }
        Native::store(by_column + c, largest);
    }
    for (; c < n; c++) {
        for (int r = 0; r < ROWS; r++) {
            i32 found = magnitude(x[r * cols + c]);
            by_column[c] = Scalar::max(by_column[c], found);
            by_row[r][0] = Scalar::max(by_row[r][0], found);
        }
    }
}

// The maxima of columns side by side into the buffer.
inline void flush_columns(const i32* largest, i64 n, i32* slots, i64 nominal, bool shared) {
    constexpr int W = Native::WIDTH;
    i64 c = 0;
    for (; !shared && c + W <= n; c += W) {
        Native::Int amax = rounded<Native>(Native::load_as<Native::Int>(largest + c), nominal);
        Native::store(slots + c, Native::max(Native::load_as<Native::Int>(slots + c), amax));
    }
    for (; c < n; c++) raise_shared(slots + c, rounded<Scalar>(largest[c], nominal));
}

// Blocks of one row and blocks of one column, in one pass over the master. Returns the largest of
// all.
template <class T, class Before>
i32 rows_and_columns(const CastShard& shard, const T* master, const Slots& rows,
                     const Slots& columns, const Region& region, const Before& before) {
    constexpr int W = Native::WIDTH;
    const Grid& grid = rows.grid;
    i64 block_w = grid.block_w;
    alignas(64) i32 by_column[STRIP_COLUMNS];
    Native::Int tensor{};
    auto open = [&](const Strip& strip) { memset(by_column, 0, strip.blocks * sizeof(i32)); };
    // `count` elements of each of some rows.
    auto piece = [&](auto rows_at_once, i64 element, i64 col, i64 count, i32* of_columns) {
        constexpr int ROWS = decltype(rows_at_once)::COUNT;
        i32* slot = rows.block_amax + element / grid.cols * grid.blocks_w() + col / block_w;
        const T* x = master + element;
        for (int r = 0; r < ROWS; r++)
            before(element + r * grid.cols, element + r * grid.cols + count);
        for (i64 c = 0, n; c < count; slot += W) {  // a register of blocks at a time
            Native::Int largest[ROWS][W] = {};
            i64 blocks = 0;
            for (; blocks < W && c < count; blocks++, c += n) {
                n = min_of(block_w - (col + c) % block_w, count - c);
                Native::Int by_row[ROWS] = {};
                if (block_w == 32 && n == 32)
                    raise_columns(of_columns + c, by_row, x + c, grid.cols, 32, region.ahead);
                else
                    raise_columns(of_columns + c, by_row, x + c, grid.cols, n, region.ahead);
                for (int r = 0; r < ROWS; r++) largest[r][blocks] = by_row[r];
            }
            for (int r = 0; r < ROWS; r++) {
                i32* at = slot + r * grid.blocks_w();
                tensor =
                    Native::max(tensor, flush(largest[r], blocks, at, shard.round_to, rows.shared));
            }
        }
    };
    auto work = [&](const Strip& strip, const Panel& panel) {
        i64 r = 0;
        auto some = [&](auto rows_at_once) {
            constexpr int ROWS = decltype(rows_at_once)::COUNT;
            for (; r + ROWS <= panel.rows; r += ROWS) {
                piece(rows_at_once, panel.element + r * grid.cols, strip.col + panel.col,
                      panel.count, by_column + panel.col);
            }
        };
        if constexpr (SAME<Before, NoUpdate>) some(Rows<4>{});
        some(Rows<1>{});
    };
    auto close = [&](const Strip& strip) {
        flush_columns(by_column, strip.blocks, columns.block_amax + strip.first_block,
                      shard.round_to, columns.shared);
    };
    for_each_strip(columns.grid, region, open, work, close, STRIP_COLUMNS);
    return reduce_max<Native>(tensor);
}

// Raises the amaxes of a shard to those of a region of it; `shared`: another thread may raise the
// same blocks at the same time.
template <class T, class Before = NoUpdate>
void raise_amaxes(const CastShard& shard, const T* master, const Region& region, bool shared,
                  const Before& before = {}) {
    if (!shard.columnwise.codes && shard.rowwise.grid.num_blocks() == 1) {
        i64 piece = SAME<Before, NoUpdate> ? region.end - region.begin : UPDATED;
        i32 largest = 0;
        for (i64 at = region.begin, n; at < region.end; at += n) {
            n = min_of(piece, region.end - at);
            before(at, at + n);
            largest = Scalar::max(largest, largest_of(master + at, n));
        }
        return raise_one_block(shard, largest);
    }
    Slots rows{shard.rowwise.grid, shard.rowwise.block_amax, shared};
    if (!shard.columnwise.codes) {
        if constexpr (SAME<Before, NoUpdate>) {
            if (is_flat(rows, region))
                return raise_tensor(shard, flat_blocks(shard, master, rows, region));
        }
        return raise_tensor(shard, many_blocks(shard, master, rows, region, before));
    }
    Slots columns{shard.columnwise.grid, shard.columnwise.block_amax, shared};
    i32 tensor;
    if (in_rows_and_columns(shard)) {
        tensor = rows_and_columns(shard, master, rows, columns, region, before);
    } else {
        tensor = many_blocks(shard, master, rows, region, before);
        many_blocks(shard, master, columns, region, NoUpdate{});
    }
    raise_tensor(shard, tensor);
}

// Whether threads that cut a shard by shard_span share blocks.
ZEROCAST_FN bool share_blocks(const CastShard& shard, i64 num_threads) {
    return num_threads > 1 && !cut_between_blocks(shard, num_threads);
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
