// partial_amax: raise block and tensor amaxes to the largest magnitudes of this rank's rounded
// elements.
//
// A thread takes integer maxima of magnitudes, and each block's maximum is rounded once.
#include "cuda/quad.h"
#include "cuda/tiles.h"

using namespace zerocast;

// The quads of `whole`, each read at once.
template <class T>
static ZEROCAST_FN void take_quads(const CastShard& shard, const Tile& tile, const T* master,
                                   const Quads& quads, u32 whole, i32* largest) {
    bool aligned = quads_aligned(master + tile.element, 4 * sizeof(T), tile, shard.rowwise.grid);
    const T* from = master + quads.element;
    bool one_block = tile.blocks == 1 || quads.col_step == 0;  // of this thread's quads
    i32 value = 0;
#pragma unroll 1
    for (int first = 0; first < TILE_QUADS; first += AMAX_IN_FLIGHT) {
        Four<T> four[AMAX_IN_FLIGHT];
        load_quads(four, from, quads.step, whole, aligned);
#pragma unroll
        for (int k = 0; k < AMAX_IN_FLIGHT; k++) {
            i32 magnitude[4];
            magnitudes_of(four[k].values(), magnitude);
            value = Scalar::max(value, largest_of(magnitude));
            if (one_block || !(whole >> k & 1)) continue;
            atomicMax(&largest[block_in_tile(tile, shard.rowwise.grid, quads.col_of(first + k))],
                      value);
            value = 0;
        }
        whole >>= AMAX_IN_FLIGHT;
        from += AMAX_IN_FLIGHT * quads.step;
    }
    if (tile.blocks == 1) {  // the lanes agree first
        value = __reduce_max_sync(ALL_LANES, value);
        if (threadIdx.x % 32 == 0) atomicMax(&largest[0], value);
    } else if (one_block && quads.col < quads.cols) {
        atomicMax(&largest[block_in_tile(tile, shard.rowwise.grid, quads.col)], value);
    }
}

// The elements of all other quads, one by one.
template <class T>
static ZEROCAST_FN void take_elements(const CastShard& shard, const Tile& tile, const T* master,
                                      const Quads& quads, u32 whole, i32* largest) {
#pragma unroll 1
    for (int at = 0; at < 4 * TILE_QUADS; at++) {
        int i = at / 4, j = at % 4;
        if (whole >> i & 1 || !owns(quads, shard.start, shard.end, i, j)) continue;
        i32 value = Scalar::bits(value_of(master[quads.at(i) + j])) & MAGNITUDE_MASK;
        atomicMax(&largest[block_in_tile(tile, shard.rowwise.grid, quads.col_of(i) + j)], value);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 6)
    partial_amax(const CastShard* __restrict__ shards, const Tile* __restrict__ tiles, i64 count) {
    __shared__ i32 largest[MAX_TILE_BLOCKS];
    for (i64 t = blockIdx.x; t < count; t += gridDim.x) {
        Tile tile = tiles[t];
        const CastShard& shard = shards[tile.weight];
        for (int b = threadIdx.x; b < tile.blocks; b += THREADS) largest[b] = 0;
        __syncthreads();

        Quads quads(tile, shard.rowwise.grid, threadIdx.x);
        u32 whole = quads_keep_to_blocks(tile, shard.rowwise.grid)
                        ? whole_quads(quads, tile, shard.rowwise.grid, shard.start, shard.end)
                        : 0;
        with_master(shard, [&](auto* master) {
            take_quads(shard, tile, master, quads, whole, largest);
            if (whole != ALL_QUADS) take_elements(shard, tile, master, quads, whole, largest);
        });
        __syncthreads();

        // Each entry is read here by the thread that clears it for the next tile, so no barrier
        // stands between the two.
        for (int b = threadIdx.x; b < (tile.blocks + 31) / 32 * 32; b += THREADS) {
            i32 amax = b < tile.blocks ? rounded_amax(largest[b], shard.round_to) : 0;
            if (b < tile.blocks) atomicMax(&shard.rowwise.block_amax[tile.first_block + b], amax);
            amax = __reduce_max_sync(ALL_LANES, amax);
            if (b % 32 == 0) atomicMax(shard.tensor_amax, amax);
        }
    }
}
