// partial_amax: raise block and tensor amaxes to the largest magnitudes of this rank's rounded
// elements.
//
// A thread takes integer maxima of magnitudes, and each block's maximum is rounded once.
#include "cuda/tiles.h"
#include "cuda/vec4.h"

using namespace zerocast;

// The vectors of `whole`, each read at once.
template <class T>
static ZEROCAST_FN void take_vectors(const CastShard& shard, const Tile& tile, const T* master,
                                     const ThreadVectors& vectors, u32 whole, i32* largest) {
    bool aligned = vectors_aligned(master + tile.element, 4 * sizeof(T), tile, shard.rowwise.grid);
    const T* from = master + vectors.element;
    bool one_block = tile.blocks == 1 || vectors.col_step == 0;  // of this thread's vectors
    i32 value = 0;
#pragma unroll 1
    for (int first = 0; first < TILE_VECTORS; first += AMAX_IN_FLIGHT) {
        Four<T> four[AMAX_IN_FLIGHT];
        load_vectors(four, from, vectors.step, whole, aligned);
#pragma unroll
        for (int k = 0; k < AMAX_IN_FLIGHT; k++) {
            i32 magnitude[4];
            magnitudes_of(four[k].values(), magnitude);
            value = Scalar::max(value, largest_of(magnitude));
            if (one_block || !(whole >> k & 1)) continue;
            atomicMax(&largest[block_in_tile(tile, shard.rowwise.grid, vectors.col_of(first + k))],
                      value);
            value = 0;
        }
        whole >>= AMAX_IN_FLIGHT;
        from += AMAX_IN_FLIGHT * vectors.step;
    }
    if (tile.blocks == 1) {  // the lanes agree first
        value = __reduce_max_sync(ALL_LANES, value);
        if (threadIdx.x % 32 == 0) atomicMax(&largest[0], value);
    } else if (one_block && vectors.col < vectors.cols) {
        atomicMax(&largest[block_in_tile(tile, shard.rowwise.grid, vectors.col)], value);
    }
}

// The elements of all other vectors, one by one.
template <class T>
static ZEROCAST_FN void take_elements(const CastShard& shard, const Tile& tile, const T* master,
                                      const ThreadVectors& vectors, u32 whole, i32* largest) {
#pragma unroll 1
    for (int at = 0; at < 4 * TILE_VECTORS; at++) {
        int i = at / 4, j = at % 4;
        if (whole >> i & 1 || !owns(vectors, shard.start, shard.end, i, j)) continue;
        i32 value = Scalar::bits(value_of(master[vectors.at(i) + j])) & MAGNITUDE_MASK;
        atomicMax(&largest[block_in_tile(tile, shard.rowwise.grid, vectors.col_of(i) + j)], value);
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

        ThreadVectors vectors(tile, shard.rowwise.grid, threadIdx.x);
        u32 whole = vectors_keep_to_blocks(tile, shard.rowwise.grid)
                        ? whole_vectors(vectors, tile, shard.rowwise.grid, shard.start, shard.end)
                        : 0;
        with_master(shard, [&](auto* master) {
            take_vectors(shard, tile, master, vectors, whole, largest);
            if (whole != ALL_VECTORS) take_elements(shard, tile, master, vectors, whole, largest);
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
