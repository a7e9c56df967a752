// The next tile of a thread block that stays, fetched while the present one is worked on.
//
// A tile begins with three reads, each at an address that the one before has found: its row of the
// table, its shard, its master. Then it waits for the first elements. One warp follows these reads
// for the next tile where it waits for masters anyway, and asks for that tile's elements and
// amaxes. So the next tile finds its rows in the first-level cache and the rest in the second.
// Registers have no room for elements of two tiles: the casts fill those of their thread blocks.
#pragma once

#include "cuda/tiles.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// Asks for the bytes from `from` to `end`, of which parts of 16 at the edges may be left out. Only
// devices that copy in bulk are asked.
ZEROCAST_FN void prefetch(const void* from, const void* end) {
    u64 first = ((u64)from + 15) / 16 * 16, last = (u64)end / 16 * 16;
    if (first >= last) return;
#if !defined(__CUDA_ARCH__)
    emulation::prefetch((const void*)first, last - first);
#elif __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(
                     __cvta_generic_to_global((const void*)first)),
                 "r"((u32)(last - first))
                 : "memory");
#endif
}

// Tile number `t` of `count`; nothing unless AHEAD.
template <class Shape, bool AHEAD>
struct NextTile {
    const CastShard* shards;
    const Shape* tiles;
    i64 t, count;

    ZEROCAST_FN void fetch() const {
        if constexpr (!AHEAD) return;
        int lane = threadIdx.x;
        if (lane >= LANES || t >= count) return;
        Shape shape = tiles[t];
        const CastShard& shard = shards[shape.weight];
        Tile tile = shape.as_tile(shard.rowwise.grid);
        // A lane asks for a row, or for a piece of the only one.
        static_assert(LANES >= Shape::ROWS, "there are as many lanes as rows");
        constexpr int PIECE = Tile::LONG_COLS / LANES;
        bool alone = tile.rows == 1;
        int col = alone ? lane * PIECE : 0, width = alone ? PIECE : tile.cols;
        i64 begin = tile.element + (alone ? col : lane * shard.rowwise.grid.cols);
        i64 end = begin + Scalar::min(width, tile.cols - col);
        if (!alone && lane >= tile.rows) end = begin;
        if (begin < shard.start) begin = shard.start;
        if (end > shard.end) end = shard.end;
        const Master& master = *shard.master;
        int bytes = master.dtype == NOMINAL_FP32 ? 4 : 2;
        auto data = (const u8*)master.data - shard.start * bytes;
        if (begin < end) prefetch(data + begin * bytes, data + end * bytes);
        const i32* amax = shard.rowwise.block_amax + shape.first_block;
        if (!Shape::ROW_BLOCKS && lane == LANES - 1) prefetch(amax, amax + shape.num_blocks());
    }

  private:
    static constexpr int LANES = 32;
};

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
