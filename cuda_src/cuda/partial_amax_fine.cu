// partial_amax_fine: partial_amax over fine tiles: blocks of one row, and where a weight has a
// second plane, quantized independently over blocks of one column, that one in the same pass over
// the masters.
#include "cuda/tiles.h"
#include "cuda/vec4.h"

using namespace zerocast;

// The vectors of `whole`. across: [rows, blocks], the rowwise blocks; down: [columns], the second
// plane's.
template <class T>
static ZEROCAST_FN void take_vectors(const CastShard& shard, const Tile& tile, const T* master,
                                     const ThreadVectors& vectors, u32 whole, i32* across,
                                     i32* down) {
    bool aligned = vectors_aligned(master + tile.element, 4 * sizeof(T), tile, shard.rowwise.grid);
    const T* from = master + vectors.element;
    int block = block_in_tile(tile, shard.rowwise.grid, vectors.col);
    // Neighbouring lanes whose vectors lie in one block, a power of two.
    int lanes = tile.blocks == 1 || shard.rowwise.grid.block_w >= 128
                    ? 32
                    : (int)shard.rowwise.grid.block_w / 4;
    i32 columns[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int first = 0; first < TILE_VECTORS; first += AMAX_IN_FLIGHT) {
        Four<T> four[AMAX_IN_FLIGHT];
        load_vectors(four, from, vectors.step, whole, aligned);
#pragma unroll
        for (int k = 0; k < AMAX_IN_FLIGHT; k++) {
            i32 magnitude[4];
            magnitudes_of(four[k].values(), magnitude);
#pragma unroll
            for (int j = 0; j < 4; j++) columns[j] = Scalar::max(columns[j], magnitude[j]);
            i32 value = largest_of(magnitude);
            for (int apart = 1; apart < lanes; apart *= 2)
                value = Scalar::max(value, __shfl_xor_sync(ALL_LANES, value, apart));
            // Past the tile's edge the value is 0, which changes nothing.
            if (threadIdx.x % lanes == 0)
                atomicMax(&across[vectors.row_of(first + k) * tile.blocks + block], value);
        }
        whole >>= AMAX_IN_FLIGHT;
        from += AMAX_IN_FLIGHT * vectors.step;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) atomicMax(&down[vectors.col + j], columns[j]);
}

template <class T>
static ZEROCAST_FN void take_elements(const CastShard& shard, const Tile& tile, const T* master,
                                      const ThreadVectors& vectors, u32 whole, i32* across,
                                      i32* down) {
#pragma unroll 1
    for (int at = 0; at < 4 * TILE_VECTORS; at++) {
        int i = at / 4, j = at % 4;
        if (whole >> i & 1 || !owns(vectors, shard.start, shard.end, i, j)) continue;
        i32 value = Scalar::bits(value_of(master[vectors.at(i) + j])) & MAGNITUDE_MASK;
        int col = vectors.col_of(i) + j;
        atomicMax(
            &across[vectors.row_of(i) * tile.blocks + block_in_tile(tile, shard.rowwise.grid, col)],
            value);
        atomicMax(&down[col], value);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 5)
    partial_amax_fine(const CastShard* __restrict__ shards, const FineTile* __restrict__ tiles,
                      i64 count) {
    __shared__ i32 across[MAX_TILE_BLOCKS];
    __shared__ i32 down[FINE_COLS];
    for (i64 t = blockIdx.x; t < count; t += gridDim.x) {
        FineTile fine = tiles[t];
        const CastShard& shard = shards[fine.weight];
        Tile tile = fine.as_tile(shard.rowwise.grid);
        int blocks = tile.rows * tile.blocks;
        for (int b = threadIdx.x; b < blocks; b += THREADS) across[b] = 0;
        for (int c = threadIdx.x; c < FINE_COLS; c += THREADS) down[c] = 0;
        __syncthreads();

        ThreadVectors vectors = ThreadVectors::of_fine(tile, shard.rowwise.grid, threadIdx.x);
        u32 whole = whole_vectors(vectors, tile, shard.rowwise.grid, shard.start, shard.end);
        with_master(shard, [&](auto* master) {
            take_vectors(shard, tile, master, vectors, whole, across, down);
            if (whole != ALL_VECTORS)
                take_elements(shard, tile, master, vectors, whole, across, down);
        });
        __syncthreads();

        // Each entry is read here by the thread that clears it for the next tile, so no barrier
        // stands between the two.
        i64 blocks_w = shard.rowwise.grid.blocks_w();
        for (int b = threadIdx.x; b < (blocks + 31) / 32 * 32; b += THREADS) {
            i32 amax = b < blocks ? rounded_amax(across[b], shard.round_to) : 0;
            i64 block = fine.first_block + b / tile.blocks * blocks_w + b % tile.blocks;
            if (b < blocks) atomicMax(&shard.rowwise.block_amax[block], amax);
            amax = __reduce_max_sync(ALL_LANES, amax);
            if (b % 32 == 0) atomicMax(shard.tensor_amax, amax);
        }
        if (!shard.columnwise.block_amax) continue;
        i32* columns = shard.columnwise.block_amax
                       + fine.columnwise_block_row * shard.rowwise.grid.cols + fine.col;
        for (int c = threadIdx.x; c < tile.cols; c += THREADS)
            atomicMax(&columns[c], rounded_amax(down[c], shard.round_to));
    }
}
