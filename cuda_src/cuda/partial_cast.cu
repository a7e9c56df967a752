// partial_cast: round, scale and encode this rank's elements into their codes; every other nibble
// keeps its value.
//
// The multipliers of a tile's blocks are derived once a tile, into shared memory, while the masters
// are under way. Delayed scaling takes the amax of what it casts in the same pass.
#include "cuda/cast.h"

using namespace zerocast;

// The quads of `whole`, each read and written at once. Calls derive(), which fills the multipliers
// and has a barrier, between the first reads and their use.
template <class Nominal, bool TAKES_AMAX, class T, class Encoder, class Derive>
static ZEROCAST_FN void cast_quads(const CastShard& shard, const Tile& tile, const T* master,
                                   const Quads& quads, u32 whole, const float* multipliers,
                                   const Encoder& encoder, const Derive& derive, i32& largest) {
    typedef typename Encoder::Format F;
    const T* from = master + quads.element;
    bool aligned = quads_aligned(master + tile.element, 4 * sizeof(T), tile, shard.rowwise.grid);
    bool aligned_codes = quads_aligned(shard.rowwise.codes + place_of<F>(shard, tile.element),
                                       F::BITS / 2, tile, shard.rowwise.grid);
    u8* to = shard.rowwise.codes + place_of<F>(shard, quads.element);
    i64 step = bytes_of<F>(quads.step);
    bool one_block = tile.blocks == 1 || quads.col_step == 0;
    float multiplier = 0;
#pragma unroll 1
    for (int first = 0; first < TILE_QUADS; first += CAST_IN_FLIGHT) {
        Four<T> four[CAST_IN_FLIGHT];
        load_quads(four, from, quads.step, whole, aligned);
        if (first == 0) {
            derive();
            multiplier = multipliers[quads.col < quads.cols
                                         ? block_in_tile(tile, shard.rowwise.grid, quads.col)
                                         : 0];
        }
#pragma unroll
        for (int k = 0; k < CAST_IN_FLIGHT; k++) {
            if (!(whole >> k & 1)) continue;
            Quad x = four[k].values();
            if constexpr (TAKES_AMAX) {
                i32 magnitude[4];
                magnitudes_of(x, magnitude);
                largest = Scalar::max(largest, largest_of(magnitude));
            }
            if (!one_block)
                multiplier =
                    multipliers[block_in_tile(tile, shard.rowwise.grid, quads.col_of(first + k))];
            Quad scaled = round_quad<Nominal>(x);
            for (int j = 0; j < 4; j++) scaled.x[j] *= multiplier;
            store_codes<F>(to + k * step, encoder.encode_quad_at(quads.at(first + k), scaled),
                           aligned_codes);
        }
        whole >>= CAST_IN_FLIGHT;
        from += CAST_IN_FLIGHT * quads.step;
        to += CAST_IN_FLIGHT * step;
    }
}

// The elements of all other quads.
template <class T, class Encoder>
static ZEROCAST_FN void cast_elements(const CastShard& shard, const Tile& tile, const T* master,
                                      const Quads& quads, u32 whole, const float* multipliers,
                                      const Encoder& encoder, i32& largest) {
    typedef typename Encoder::Format F;
    auto code_of = [&](int i, int j) {
        float multiplier =
            multipliers[block_in_tile(tile, shard.rowwise.grid, quads.col_of(i) + j)];
        i64 element = quads.at(i) + j;
        float x = value_of(master[element]);
        largest = Scalar::max(largest, Scalar::bits(x) & MAGNITUDE_MASK);
        return encoder.encode_at(element, round_element(x, shard.round_to) * multiplier);
    };
#pragma unroll 1
    for (int at = 0; at < 4 * TILE_QUADS; at += F::BITS == 4 ? 2 : 1) {
        if (!(whole >> at / 4 & 1))
            store_elements<F>(shard, shard.rowwise.codes, quads, at, code_of);
    }
}

template <class Encoder, class Multipliers>
static ZEROCAST_FN void cast_tile(const CastShard& shard, const Tile& tile, const Encoder& encoder,
                                  const Multipliers& law, float* multipliers) {
    auto derive = [&] {
        for (int b = threadIdx.x; b < tile.blocks; b += THREADS) {
            i64 block = tile.first_block + b;
            multipliers[b] = law.of(shard, shard.rowwise.block_amax[block], block);
        }
        __syncthreads();
    };
    constexpr bool AMAX = Multipliers::TAKES_AMAX;
    Quads quads(tile, shard.rowwise.grid, threadIdx.x);
    bool at_once = quads_keep_to_blocks(tile, shard.rowwise.grid)
                   && encoder.takes_quads(tile, shard.rowwise.grid);
    u32 whole = at_once ? whole_quads(quads, tile, shard.rowwise.grid, shard.start, shard.end) : 0;
    i32 largest = 0;
    with_rounded_master(shard, [&](auto* master, auto nominal) {
        cast_quads<decltype(nominal), AMAX>(shard, tile, master, quads, whole, multipliers, encoder,
                                            derive, largest);
    });
    if (whole != ALL_QUADS) {
        with_master(shard, [&](auto* master) {
            cast_elements(shard, tile, master, quads, whole, multipliers, encoder, largest);
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
                                   const MakeEncoder& encoder_of, const Multipliers& law,
                                   float* multipliers) {
    for (i64 t = blockIdx.x; t < count; t += gridDim.x) {
        Tile tile = tiles[t];
        const CastShard& shard = shards[tile.weight];
        cast_tile(shard, tile, encoder_of(shard), law, multipliers);
        __syncthreads();  // before the next tile derives its multipliers
    }
}

// --- one kernel a law ---

extern "C" __global__ void __launch_bounds__(THREADS, 6)
    partial_cast_float8_e4m3(const CastShard* __restrict__ shards, const Tile* __restrict__ tiles,
                             i64 count, i64 power_2_scale, i64 amax_epsilon) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    Multipliers<Float8Scaling<E4M3>> law{{power_2_scale != 0, Scalar::value((i32)amax_epsilon)}};
    auto encoder_of = [](const CastShard&) { return Nearest<E4M3>{}; };
    cast_tiles(shards, tiles, count, encoder_of, law, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 6)
    partial_cast_float8_e5m2(const CastShard* __restrict__ shards, const Tile* __restrict__ tiles,
                             i64 count, i64 power_2_scale, i64 amax_epsilon) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    Multipliers<Float8Scaling<E5M2>> law{{power_2_scale != 0, Scalar::value((i32)amax_epsilon)}};
    auto encoder_of = [](const CastShard&) { return Nearest<E5M2>{}; };
    cast_tiles(shards, tiles, count, encoder_of, law, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 6)
    partial_cast_mxfp8_e4m3(const CastShard* __restrict__ shards, const Tile* __restrict__ tiles,
                            i64 count) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    auto encoder_of = [](const CastShard&) { return Nearest<E4M3>{}; };
    cast_tiles(shards, tiles, count, encoder_of, Multipliers<MXFP8Scaling<E4M3>>{}, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 6)
    partial_cast_mxfp8_e5m2(const CastShard* __restrict__ shards, const Tile* __restrict__ tiles,
                            i64 count) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    auto encoder_of = [](const CastShard&) { return Nearest<E5M2>{}; };
    cast_tiles(shards, tiles, count, encoder_of, Multipliers<MXFP8Scaling<E5M2>>{}, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 6)
    partial_cast_delayed_e4m3(const CastShard* __restrict__ shards, const Tile* __restrict__ tiles,
                              i64 count) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    auto encoder_of = [](const CastShard&) { return Nearest<E4M3>{}; };
    cast_tiles(shards, tiles, count, encoder_of, DelayedMultipliers{}, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 6)
    partial_cast_delayed_e5m2(const CastShard* __restrict__ shards, const Tile* __restrict__ tiles,
                              i64 count) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    auto encoder_of = [](const CastShard&) { return Nearest<E5M2>{}; };
    cast_tiles(shards, tiles, count, encoder_of, DelayedMultipliers{}, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 6)
    partial_cast_nvfp4(const CastShard* __restrict__ shards, const Tile* __restrict__ tiles,
                       i64 count, i64 scale_max) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    auto encoder_of = [](const CastShard&) { return Nearest<E2M1>{}; };
    cast_tiles(shards, tiles, count, encoder_of, NVFP4Multipliers{scale_max}, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 5)
    partial_cast_nvfp4_drawn(const CastShard* __restrict__ shards, const Tile* __restrict__ tiles,
                             i64 count, i64 scale_max, i64 seed) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    auto encoder_of = [=](const CastShard& shard) { return Drawn(shard, (u64)seed); };
    cast_tiles(shards, tiles, count, encoder_of, NVFP4Multipliers{scale_max}, multipliers);
}
