// partial_amax: raise block and tensor amaxes to the largest magnitudes of this rank's rounded
// elements.
//
// Rounding is monotonic, so the largest rounded magnitude is the rounded largest: a thread takes
// integer maxima of magnitudes, a NaN being the largest of all, and each block's maximum is rounded
// once.
#include <zerocast/quad.h>
#include <zerocast/tiles.h>

using namespace zerocast;

// Quads that a thread reads before it looks at the first: 96 KiB on their way to a multiprocessor
// of 768 threads.
constexpr int IN_FLIGHT = 8;

// The nominal dtype's rounding of a magnitude, and the pattern that enters an amax buffer.
static ZEROCAST_FN i32 rounded(i32 magnitude, i64 nominal) {
    float x = Scalar::value(magnitude);
    if (nominal == NOMINAL_BF16) x = round_to<Bf16, Scalar>(x);
    if (nominal == NOMINAL_FP16) x = round_to<Fp16, Scalar>(x);
    return magnitude_bits<Scalar>(x);
}

static ZEROCAST_FN i32 largest_of(const Quad& q) {
    i32 m[4];
    for (int j = 0; j < 4; j++) m[j] = Scalar::bits(q.x[j]) & MAGNITUDE_MASK;
    return Scalar::max(Scalar::max(m[0], m[1]), Scalar::max(m[2], m[3]));
}

// The quads of `whole`, each read at once.
static ZEROCAST_FN void take_quads(const CastShard& shard, const Tile& tile, const float* master,
                                   const Quads& quads, u32 whole, i32* largest) {
    const float* from = master + quads.element;
    bool one_block = tile.blocks == 1 || quads.col_step == 0;  // of this thread's quads
    i32 value = 0;
#pragma unroll 1
    for (int first = 0; first < TILE_QUADS; first += IN_FLIGHT) {
        Quad q[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            q[k] = whole >> k & 1 ? load_quad(from + k * quads.step) : Quad{};
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            value = Scalar::max(value, largest_of(q[k]));
            if (one_block || !(whole >> k & 1)) continue;
            atomicMax(&largest[block_in_tile(tile, shard.grid, quads.col_of(first + k))], value);
            value = 0;
        }
        whole >>= IN_FLIGHT;
        from += IN_FLIGHT * quads.step;
    }
    if (tile.blocks == 1) {  // the lanes agree first
        value = __reduce_max_sync(0xFFFFFFFFu, value);
        if (threadIdx.x % 32 == 0) atomicMax(&largest[0], value);
    } else if (one_block && quads.col < quads.cols) {
        atomicMax(&largest[block_in_tile(tile, shard.grid, quads.col)], value);
    }
}

// The elements of all other quads, one by one.
static ZEROCAST_FN void take_elements(const CastShard& shard, const Tile& tile, const float* master,
                                      const Quads& quads, u32 whole, i32* largest) {
#pragma unroll 1
    for (int at = 0; at < 4 * TILE_QUADS; at++) {
        int i = at / 4, j = at % 4;
        if (whole >> i & 1 || !owns(quads, shard.start, shard.end, i, j)) continue;
        i32 value = Scalar::bits(master[quads.at(i) + j]) & MAGNITUDE_MASK;
        atomicMax(&largest[block_in_tile(tile, shard.grid, quads.col_of(i) + j)], value);
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

        const float* master = *shard.master - shard.start;  // as if it were the whole weight
        Quads quads(tile, shard.grid, threadIdx.x);
        bool at_once = quads_aligned(master + tile.element, 16, tile, shard.grid)
                       && quads_keep_to_blocks(tile, shard.grid);
        u32 whole = at_once ? whole_quads(quads, tile, shard.grid, shard.start, shard.end) : 0;
        take_quads(shard, tile, master, quads, whole, largest);
        if (whole != ALL_QUADS) take_elements(shard, tile, master, quads, whole, largest);
        __syncthreads();

        // Each entry is read here by the thread that clears it for the next tile, so no barrier
        // stands between the two.
        for (int b = threadIdx.x; b < (tile.blocks + 31) / 32 * 32; b += THREADS) {
            i32 amax = b < tile.blocks ? rounded(largest[b], shard.round_to) : 0;
            if (b < tile.blocks) atomicMax(&shard.block_amax[tile.first_block + b], amax);
            amax = __reduce_max_sync(0xFFFFFFFFu, amax);
            if (b % 32 == 0) atomicMax(shard.tensor_amax, amax);
        }
    }
}
