// partial_cast: round, scale and encode this rank's elements into their codes; every other nibble
// keeps its value.
//
// The multipliers of a tile's blocks are derived once a tile, into shared memory, while the masters
// are under way. Delayed scaling takes the amax of what it casts in the same pass.
#include "cuda/cast.h"

using namespace zerocast;

// The vectors of `whole`, each read and written at once. Calls derive(), which fills the
// multipliers and has a barrier, between the first reads and their use.
template <class Nominal, bool TAKES_AMAX, class T, class Encoder, class Derive>
static ZEROCAST_FN void cast_vectors(const CastShard& shard, const Tile& tile, const T* master,
                                     const ThreadVectors& vectors, u32 whole,
                                     const float* multipliers, const Encoder& encoder,
                                     const Derive& derive, i32& largest) {
    typedef typename Encoder::Format F;
    const T* from = master + vectors.element;
    bool aligned = vectors_aligned(master + tile.element, 4 * sizeof(T), tile, shard.rowwise.grid);
    bool aligned_codes = vectors_aligned(shard.rowwise.codes + byte_of<F>(shard, tile.element),
                                         F::BITS / 2, tile, shard.rowwise.grid);
    u8* to = shard.rowwise.codes + byte_of<F>(shard, vectors.element);
    i64 step = bytes_of<F>(vectors.step);
    bool one_block = tile.blocks == 1 || vectors.col_step == 0;
    float multiplier = 0;
#pragma unroll 1
    for (int first = 0; first < TILE_VECTORS; first += CAST_IN_FLIGHT) {
        Four<T> four[CAST_IN_FLIGHT];
        load_vectors(four, from, vectors.step, whole, aligned);
        if (first == 0) {
            derive();
            multiplier = multipliers[vectors.col < vectors.cols
                                         ? block_in_tile(tile, shard.rowwise.grid, vectors.col)
                                         : 0];
        }
#pragma unroll
        for (int k = 0; k < CAST_IN_FLIGHT; k++) {
            if (!(whole >> k & 1)) continue;
            Vec4 x = four[k].values();
            if constexpr (TAKES_AMAX) {
                i32 magnitude[4];
                magnitudes_of(x, magnitude);
                largest = Scalar::max(largest, largest_of(magnitude));
            }
            if (!one_block)
                multiplier =
                    multipliers[block_in_tile(tile, shard.rowwise.grid, vectors.col_of(first + k))];
            Vec4 scaled = round_vec4<Nominal>(x);
            for (int j = 0; j < 4; j++) scaled.x[j] *= multiplier;
            store_codes<F>(to + k * step, encoder.encode_vec4_at(vectors.at(first + k), scaled),
                           aligned_codes);
        }
        whole >>= CAST_IN_FLIGHT;
        from += CAST_IN_FLIGHT * vectors.step;
        to += CAST_IN_FLIGHT * step;
    }
}

// The elements of all other vectors.
template <class T, class Encoder>
static ZEROCAST_FN void cast_elements(const CastShard& shard, const Tile& tile, const T* master,
                                      const ThreadVectors& vectors, u32 whole,
                                      const float* multipliers, const Encoder& encoder,
                                      i32& largest) {
    typedef typename Encoder::Format F;
    auto code_of = [&](int i, int j) {
        float multiplier =
            multipliers[block_in_tile(tile, shard.rowwise.grid, vectors.col_of(i) + j)];
        i64 element = vectors.at(i) + j;
        float x = value_of(master[element]);
        largest = Scalar::max(largest, Scalar::bits(x) & MAGNITUDE_MASK);
        return encoder.encode_at(element, round_element(x, shard.round_to) * multiplier);
    };
#pragma unroll 1
    for (int at = 0; at < 4 * TILE_VECTORS; at += F::BITS == 4 ? 2 : 1) {
        if (!(whole >> at / 4 & 1))
            store_elements<F>(shard, shard.rowwise.codes, vectors, at, code_of);
    }
}

template <class Encoder, class Multipliers>
static ZEROCAST_FN void cast_tile(const CastShard& shard, const Tile& tile, const Encoder& encoder,
                                  const Multipliers& block_multiplier, float* multipliers) {
    auto derive = [&] {
        for (int b = threadIdx.x; b < tile.blocks; b += THREADS) {
            i64 block = tile.first_block + b;
            multipliers[b] = block_multiplier.of(shard, shard.rowwise.block_amax[block], block);
        }
        __syncthreads();
    };
    constexpr bool AMAX = Multipliers::TAKES_AMAX;
    ThreadVectors vectors(tile, shard.rowwise.grid, threadIdx.x);
    bool at_once = vectors_keep_to_blocks(tile, shard.rowwise.grid)
                   && encoder.takes_vectors(tile, shard.rowwise.grid);
    u32 whole =
        at_once ? whole_vectors(vectors, tile, shard.rowwise.grid, shard.start, shard.end) : 0;
    i32 largest = 0;
    with_rounded_master(shard, [&](auto* master, auto nominal) {
        cast_vectors<decltype(nominal), AMAX>(shard, tile, master, vectors, whole, multipliers,
                                              encoder, derive, largest);
    });
    if (whole != ALL_VECTORS) {
        with_master(shard, [&](auto* master) {
            cast_elements(shard, tile, master, vectors, whole, multipliers, encoder, largest);
        });
    }
    if constexpr (AMAX) {
        largest = __reduce_max_sync(ALL_LANES, largest);
        if (threadIdx.x % 32 == 0) {
            largest = rounded_amax(largest, shard.round_to);
            atomicMax(shard.rowwise.block_amax, largest);
            atomicMax(shard.tensor_amax, largest);
        }
    }
}

template <class MakeEncoder, class Multipliers>
static ZEROCAST_FN void cast_tiles(const CastShard* shards, const Tile* tiles, i64 count,
                                   const MakeEncoder& encoder_of,
                                   const Multipliers& block_multiplier, float* multipliers) {
    for (i64 t = blockIdx.x; t < count; t += gridDim.x) {
        Tile tile = tiles[t];
        const CastShard& shard = shards[tile.weight];
        cast_tile(shard, tile, encoder_of(shard), block_multiplier, multipliers);
        __syncthreads();  // before the next tile derives its multipliers
    }
}

// --- one kernel for each scheme's numerics ---

extern "C" __global__ void __launch_bounds__(THREADS, 6)
    partial_cast_float8_e4m3(const CastShard* __restrict__ shards, const Tile* __restrict__ tiles,
                             i64 count, i64 power_2_scale, i64 amax_epsilon) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    AmaxMultipliers<Float8Numerics<E4M3>> block_multiplier{
        {power_2_scale != 0, Scalar::value((i32)amax_epsilon)}};
    auto encoder_of = [](const CastShard&) { return NearestVec4<E4M3>{}; };
    cast_tiles(shards, tiles, count, encoder_of, block_multiplier, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 6)
    partial_cast_float8_e5m2(const CastShard* __restrict__ shards, const Tile* __restrict__ tiles,
                             i64 count, i64 power_2_scale, i64 amax_epsilon) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    AmaxMultipliers<Float8Numerics<E5M2>> block_multiplier{
        {power_2_scale != 0, Scalar::value((i32)amax_epsilon)}};
    auto encoder_of = [](const CastShard&) { return NearestVec4<E5M2>{}; };
    cast_tiles(shards, tiles, count, encoder_of, block_multiplier, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 6)
    partial_cast_mxfp8_e4m3(const CastShard* __restrict__ shards, const Tile* __restrict__ tiles,
                            i64 count) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    auto encoder_of = [](const CastShard&) { return NearestVec4<E4M3>{}; };
    cast_tiles(shards, tiles, count, encoder_of, AmaxMultipliers<MXFP8Numerics<E4M3>>{},
               multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 6)
    partial_cast_mxfp8_e5m2(const CastShard* __restrict__ shards, const Tile* __restrict__ tiles,
                            i64 count) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    auto encoder_of = [](const CastShard&) { return NearestVec4<E5M2>{}; };
    cast_tiles(shards, tiles, count, encoder_of, AmaxMultipliers<MXFP8Numerics<E5M2>>{},
               multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 6)
    partial_cast_delayed_e4m3(const CastShard* __restrict__ shards, const Tile* __restrict__ tiles,
                              i64 count) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    auto encoder_of = [](const CastShard&) { return NearestVec4<E4M3>{}; };
    cast_tiles(shards, tiles, count, encoder_of, DelayedMultipliers{}, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 6)
    partial_cast_delayed_e5m2(const CastShard* __restrict__ shards, const Tile* __restrict__ tiles,
                              i64 count) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    auto encoder_of = [](const CastShard&) { return NearestVec4<E5M2>{}; };
    cast_tiles(shards, tiles, count, encoder_of, DelayedMultipliers{}, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 6)
    partial_cast_nvfp4(const CastShard* __restrict__ shards, const Tile* __restrict__ tiles,
                       i64 count, i64 scale_max) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    auto encoder_of = [](const CastShard&) { return NearestVec4<E2M1>{}; };
    cast_tiles(shards, tiles, count, encoder_of, NVFP4Multipliers{scale_max}, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 5)
    partial_cast_nvfp4_drawn(const CastShard* __restrict__ shards, const Tile* __restrict__ tiles,
                             i64 count, i64 scale_max, i64 seed) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    auto encoder_of = [=](const CastShard& shard) { return StochasticVec4(shard, (u64)seed); };
    cast_tiles(shards, tiles, count, encoder_of, NVFP4Multipliers{scale_max}, multipliers);
}
