// partial_cast: round, scale and encode this rank's elements into their codes; every other nibble
// keeps its value.
//
// The multipliers of a tile's blocks are derived once a tile, into shared memory, while the masters
// are under way. A byte of two nibbles is written by one thread, so a byte that this rank shares is
// read and written by that one.
#include <zerocast/quad.h>
#include <zerocast/scaling.h>
#include <zerocast/tiles.h>

using namespace zerocast;

// Quads that a thread reads before it writes the first: 48 KiB on their way to a multiprocessor of
// 768 threads.
constexpr int IN_FLIGHT = 4;

template <class F>
static ZEROCAST_FN i64 bytes_of(i64 elements) {
    return F::BITS == 4 ? elements / 2 : elements;
}

template <class F>
static ZEROCAST_FN u8* codes_of(const CastShard& shard, i64 element) {
    i64 at =
        element - shard.codes_start;  // negative for elements of the tile that are not of the shard
    return shard.codes + (F::BITS == 4 ? at >> 1 : at);
}

static ZEROCAST_FN float rounded(float x, i64 nominal) {
    if (nominal == NOMINAL_BF16) return round_to<Bf16, Scalar>(x);
    if (nominal == NOMINAL_FP16) return round_to<Fp16, Scalar>(x);
    return x;
}

// The quads of `whole`, each read and written at once. Calls derive(), which fills the multipliers
// and has a barrier, between the first reads and their use.
template <class F, class Nominal, class Derive>
static ZEROCAST_FN void cast_quads(const CastShard& shard, const Tile& tile, const float* master,
                                   const Quads& quads, u32 whole, const float* multipliers,
                                   const Derive& derive) {
    const float* from = master + quads.element;
    u8* to = codes_of<F>(shard, quads.element);
    i64 step = bytes_of<F>(quads.step);
    bool one_block = tile.blocks == 1 || quads.col_step == 0;
    float multiplier = 0;
#pragma unroll 1
    for (int first = 0; first < TILE_QUADS; first += IN_FLIGHT) {
        Quad q[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            q[k] = whole >> k & 1 ? load_quad(from + k * quads.step) : Quad{};
        }
        if (first == 0) {
            derive();
            multiplier =
                multipliers[quads.col < quads.cols ? block_in_tile(tile, shard.grid, quads.col)
                                                   : 0];
        }
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            if (!(whole >> k & 1)) continue;
            if (!one_block)
                multiplier = multipliers[block_in_tile(tile, shard.grid, quads.col_of(first + k))];
            Quad scaled = round_quad<Nominal>(q[k]);
            for (int j = 0; j < 4; j++) scaled.x[j] *= multiplier;
            store_codes<F>(to + k * step, encode_quad<F>(scaled));
        }
        whole >>= IN_FLIGHT;
        from += IN_FLIGHT * quads.step;
        to += IN_FLIGHT * step;
    }
}

// The elements of all other quads, one by one, nibbles two by two.
template <class F>
static ZEROCAST_FN void cast_elements(const CastShard& shard, const Tile& tile, const float* master,
                                      const Quads& quads, u32 whole, const float* multipliers) {
    constexpr int AT_ONCE = F::BITS == 4 ? 2 : 1;
#pragma unroll 1
    for (int at = 0; at < 4 * TILE_QUADS; at += AT_ONCE) {
        int i = at / 4, j = at % 4;
        if (whole >> i & 1) continue;
        u32 code[AT_ONCE];
        bool mine[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            mine[k] = owns(quads, shard.start, shard.end, i, j + k);
            if (!mine[k]) continue;
            float multiplier =
                multipliers[block_in_tile(tile, shard.grid, quads.col_of(i) + j + k)];
            float x = rounded(master[quads.at(i) + j + k], shard.round_to);
            code[k] = (u32)encode<F, Scalar>(x * multiplier);
        }
        u8* to = codes_of<F>(shard, quads.at(i) + j);
        if constexpr (F::BITS == 8) {
            if (mine[0]) *to = (u8)code[0];
        } else if (mine[0] || mine[1]) {
            u32 low = mine[0] ? code[0] : *to & 0x0Fu;
            u32 high = mine[1] ? code[1] << 4 : *to & 0xF0u;
            *to = (u8)(low | high);
        }
    }
}

template <class F, class Law>
static ZEROCAST_FN void cast_tile(const CastShard& shard, const Tile& tile, const Law& law,
                                  float* multipliers) {
    auto derive = [&] {
        for (int b = threadIdx.x; b < tile.blocks; b += THREADS) {
            multipliers[b] =
                law(shard).template multiplier<Scalar>(shard.block_amax[tile.first_block + b]);
        }
        __syncthreads();
    };
    const float* master = *shard.master - shard.start;  // as if it were the whole weight
    Quads quads(tile, shard.grid, threadIdx.x);
    bool at_once = quads_aligned(master + tile.element, 16, tile, shard.grid)
                   && quads_aligned(codes_of<F>(shard, tile.element), F::BITS / 2, tile, shard.grid)
                   && quads_keep_to_blocks(tile, shard.grid);
    u32 whole = at_once ? whole_quads(quads, tile, shard.grid, shard.start, shard.end) : 0;
    if (shard.round_to == NOMINAL_BF16) {
        cast_quads<F, Bf16>(shard, tile, master, quads, whole, multipliers, derive);
    } else if (shard.round_to == NOMINAL_FP16) {
        cast_quads<F, Fp16>(shard, tile, master, quads, whole, multipliers, derive);
    } else {
        cast_quads<F, Fp32>(shard, tile, master, quads, whole, multipliers, derive);
    }
    if (whole != ALL_QUADS) cast_elements<F>(shard, tile, master, quads, whole, multipliers);
}

template <class F, class Law>
static ZEROCAST_FN void cast_tiles(const CastShard* __restrict__ shards,
                                   const Tile* __restrict__ tiles, i64 count, const Law& law,
                                   float* multipliers) {
    for (i64 t = blockIdx.x; t < count; t += gridDim.x) {
        Tile tile = tiles[t];
        cast_tile<F>(shards[tile.weight], tile, law, multipliers);
        __syncthreads();  // before the next tile derives its multipliers
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 6)
    partial_cast_e2m1(const CastShard* __restrict__ shards, const Tile* __restrict__ tiles,
                      i64 count, i64, i64) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    auto law = [](const CastShard& shard) { return NVFP4Scaling(*shard.tensor_amax, 448); };
    cast_tiles<E2M1>(shards, tiles, count, law, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 6)
    partial_cast_e4m3(const CastShard* __restrict__ shards, const Tile* __restrict__ tiles,
                      i64 count, i64 power_2_scale, i64 amax_epsilon) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    Float8Scaling<E4M3> scaling{power_2_scale != 0, Scalar::value((i32)amax_epsilon)};
    cast_tiles<E4M3>(shards, tiles, count, [&](const CastShard&) { return scaling; }, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 6)
    partial_cast_e5m2(const CastShard* __restrict__ shards, const Tile* __restrict__ tiles,
                      i64 count, i64 power_2_scale, i64 amax_epsilon) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    Float8Scaling<E5M2> scaling{power_2_scale != 0, Scalar::value((i32)amax_epsilon)};
    cast_tiles<E5M2>(shards, tiles, count, [&](const CastShard&) { return scaling; }, multipliers);
}
