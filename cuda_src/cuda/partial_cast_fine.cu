// partial_cast_fine: partial_cast over fine tiles: blocks of one row, and where a weight has a
// second plane, quantized independently over blocks of one column, that one in the same pass over
// the masters.
#include "cuda/cast.h"

using namespace zerocast;

// The second plane, where there is one: codes of 4 bits have none.
template <class F>
static ZEROCAST_FN u8* second_plane(const CastShard& shard) {
    return F::BITS == 8 ? shard.columnwise.codes : nullptr;
}

// The multipliers of a tile's blocks.
struct TileMultipliers {
    float across[MAX_TILE_BLOCKS];  // [rows, blocks]
    float down[FINE_COLS];          // of the second plane
};

// The vectors of `whole`, each read at once, and written to both planes. Calls derive(), which
// fills the multipliers and has a barrier, between the first reads and their use.
template <class Nominal, class T, class Encoder, class Derive>
static ZEROCAST_FN void cast_vectors(const CastShard& shard, const Tile& tile, const T* master,
                                     const ThreadVectors& vectors, u32 whole,
                                     const TileMultipliers& multipliers, const Encoder& encoder,
                                     const Derive& derive) {
    typedef typename Encoder::Format F;
    u8* second = second_plane<F>(shard);
    const T* from = master + vectors.element;
    bool aligned = vectors_aligned(master + tile.element, 4 * sizeof(T), tile, shard.rowwise.grid);
    i64 at = byte_of<F>(shard, tile.element), step = bytes_of<F>(vectors.step);
    bool aligned_codes =
        vectors_aligned(shard.rowwise.codes + at, F::BITS / 2, tile, shard.rowwise.grid)
        && (!second || (u64)(second + at) % (F::BITS / 2) == 0);
    i64 first_byte = byte_of<F>(shard, vectors.element);
    int block = block_in_tile(tile, shard.rowwise.grid, vectors.col);
    float down[4] = {};
#pragma unroll 1
    for (int first = 0; first < TILE_VECTORS; first += CAST_IN_FLIGHT) {
        Four<T> four[CAST_IN_FLIGHT];
        load_vectors(four, from, vectors.step, whole, aligned);
        if (first == 0) {
            derive();
#pragma unroll
            for (int j = 0; j < 4; j++) down[j] = second ? multipliers.down[vectors.col + j] : 0;
        }
#pragma unroll
        for (int k = 0; k < CAST_IN_FLIGHT; k++) {
            if (!(whole >> k & 1)) continue;
            int i = first + k;
            float across = multipliers.across[vectors.row_of(i) * tile.blocks + block];
            Vec4 x = round_vec4<Nominal>(four[k].values()), scaled;
            for (int j = 0; j < 4; j++) scaled.x[j] = x.x[j] * across;
            store_codes<F>(shard.rowwise.codes + first_byte + k * step,
                           encoder.encode_vec4_at(vectors.at(i), scaled), aligned_codes);
            if (!second) continue;
            for (int j = 0; j < 4; j++) scaled.x[j] = x.x[j] * down[j];
            store_codes<F>(second + first_byte + k * step,
                           encoder.encode_vec4_at(vectors.at(i), scaled), aligned_codes);
        }
        whole >>= CAST_IN_FLIGHT;
        from += CAST_IN_FLIGHT * vectors.step;
        first_byte += CAST_IN_FLIGHT * step;
    }
}

// The elements of all other vectors.
template <class T, class Encoder>
static ZEROCAST_FN void cast_elements(const CastShard& shard, const Tile& tile, const T* master,
                                      const ThreadVectors& vectors, u32 whole,
                                      const TileMultipliers& multipliers, const Encoder& encoder) {
    typedef typename Encoder::Format F;
    auto code_under = [&](int i, int j, float multiplier) {
        i64 element = vectors.at(i) + j;
        return encoder.encode_at(
            element, round_element(value_of(master[element]), shard.round_to) * multiplier);
    };
    auto across = [&](int i, int j) {
        int block = block_in_tile(tile, shard.rowwise.grid, vectors.col_of(i) + j);
        return code_under(i, j, multipliers.across[vectors.row_of(i) * tile.blocks + block]);
    };
    auto down = [&](int i, int j) {
        return code_under(i, j, multipliers.down[vectors.col_of(i) + j]);
    };
#pragma unroll 1
    for (int at = 0; at < 4 * TILE_VECTORS; at += F::BITS == 4 ? 2 : 1) {
        if (whole >> at / 4 & 1) continue;
        store_elements<F>(shard, shard.rowwise.codes, vectors, at, across);
        if (u8* second = second_plane<F>(shard))
            store_elements<F>(shard, second, vectors, at, down);
    }
}

template <class Encoder, class Multipliers>
static ZEROCAST_FN void cast_tile(const CastShard& shard, const FineTile& fine,
                                  const Encoder& encoder, const Multipliers& block_multiplier,
                                  TileMultipliers& multipliers) {
    Tile tile = fine.as_tile(shard.rowwise.grid);
    auto derive = [&] {
        i64 blocks_w = shard.rowwise.grid.blocks_w();
        for (int b = threadIdx.x; b < tile.rows * tile.blocks; b += THREADS) {
            i64 block = fine.first_block + b / tile.blocks * blocks_w + b % tile.blocks;
            multipliers.across[b] =
                block_multiplier.of(shard, shard.rowwise.block_amax[block], block);
        }
        if (second_plane<typename Encoder::Format>(shard)) {
            i64 first = fine.columnwise_block_row * shard.rowwise.grid.cols + fine.col;
            for (int c = threadIdx.x; c < tile.cols; c += THREADS) {
                i64 block = first + c;
                multipliers.down[c] =
                    block_multiplier.of(shard, shard.columnwise.block_amax[block], block);
            }
        }
        __syncthreads();
    };
    ThreadVectors vectors = ThreadVectors::of_fine(tile, shard.rowwise.grid, threadIdx.x);
    bool at_once = encoder.takes_vectors(tile, shard.rowwise.grid);
    u32 whole =
        at_once ? whole_vectors(vectors, tile, shard.rowwise.grid, shard.start, shard.end) : 0;
    with_rounded_master(shard, [&](auto* master, auto nominal) {
        cast_vectors<decltype(nominal)>(shard, tile, master, vectors, whole, multipliers, encoder,
                                        derive);
    });
    if (whole != ALL_VECTORS) {
        with_master(shard, [&](auto* master) {
            cast_elements(shard, tile, master, vectors, whole, multipliers, encoder);
        });
    }
}

template <class MakeEncoder, class Multipliers>
static ZEROCAST_FN void cast_tiles(const CastShard* shards, const FineTile* tiles, i64 count,
                                   const MakeEncoder& encoder_of,
                                   const Multipliers& block_multiplier,
                                   TileMultipliers& multipliers) {
    for (i64 t = blockIdx.x; t < count; t += gridDim.x) {
        FineTile tile = tiles[t];
        const CastShard& shard = shards[tile.weight];
        cast_tile(shard, tile, encoder_of(shard), block_multiplier, multipliers);
        __syncthreads();  // before the next tile derives its multipliers
    }
}

// --- one kernel for each scheme's numerics ---

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    partial_cast_fine_float8_e4m3(const CastShard* __restrict__ shards,
                                  const FineTile* __restrict__ tiles, i64 count, i64 power_2_scale,
                                  i64 amax_epsilon) {
    __shared__ TileMultipliers multipliers;
    AmaxMultipliers<Float8Numerics<E4M3>> block_multiplier{
        {power_2_scale != 0, Scalar::value((i32)amax_epsilon)}};
    auto encoder_of = [](const CastShard&) { return NearestVec4<E4M3>{}; };
    cast_tiles(shards, tiles, count, encoder_of, block_multiplier, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    partial_cast_fine_float8_e5m2(const CastShard* __restrict__ shards,
                                  const FineTile* __restrict__ tiles, i64 count, i64 power_2_scale,
                                  i64 amax_epsilon) {
    __shared__ TileMultipliers multipliers;
    AmaxMultipliers<Float8Numerics<E5M2>> block_multiplier{
        {power_2_scale != 0, Scalar::value((i32)amax_epsilon)}};
    auto encoder_of = [](const CastShard&) { return NearestVec4<E5M2>{}; };
    cast_tiles(shards, tiles, count, encoder_of, block_multiplier, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    partial_cast_fine_mxfp8_e4m3(const CastShard* __restrict__ shards,
                                 const FineTile* __restrict__ tiles, i64 count) {
    __shared__ TileMultipliers multipliers;
    auto encoder_of = [](const CastShard&) { return NearestVec4<E4M3>{}; };
    cast_tiles(shards, tiles, count, encoder_of, AmaxMultipliers<MXFP8Numerics<E4M3>>{},
               multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    partial_cast_fine_mxfp8_e5m2(const CastShard* __restrict__ shards,
                                 const FineTile* __restrict__ tiles, i64 count) {
    __shared__ TileMultipliers multipliers;
    auto encoder_of = [](const CastShard&) { return NearestVec4<E5M2>{}; };
    cast_tiles(shards, tiles, count, encoder_of, AmaxMultipliers<MXFP8Numerics<E5M2>>{},
               multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    partial_cast_fine_nvfp4(const CastShard* __restrict__ shards,
                            const FineTile* __restrict__ tiles, i64 count, i64 scale_max) {
    __shared__ TileMultipliers multipliers;
    auto encoder_of = [](const CastShard&) { return NearestVec4<E2M1>{}; };
    cast_tiles(shards, tiles, count, encoder_of, NVFP4Multipliers{scale_max}, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    partial_cast_fine_nvfp4_drawn(const CastShard* __restrict__ shards,
                                  const FineTile* __restrict__ tiles, i64 count, i64 scale_max,
                                  i64 seed) {
    __shared__ TileMultipliers multipliers;
    auto encoder_of = [=](const CastShard& shard) { return StochasticVec4(shard, (u64)seed); };
    cast_tiles(shards, tiles, count, encoder_of, NVFP4Multipliers{scale_max}, multipliers);
}
