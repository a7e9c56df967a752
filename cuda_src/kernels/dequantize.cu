// dequantize: decode whole weights to FP32.
//
// The tiles are those of a cast of the whole weight; the multipliers of a tile's blocks are made
// once a tile.
#include <zerocast/quad.h>
#include <zerocast/scaling.h>
#include <zerocast/tiles.h>

using namespace zerocast;

// Code j of four that lie side by side, in whole bytes.
template <class F>
static ZEROCAST_FN i32 code_of(const u8* codes, i64 element) {
    return F::BITS == 8 ? codes[element] : codes[element / 2] >> 4 * (element & 1) & 0xF;
}

template <class F>
static ZEROCAST_FN u32 load_codes(const u8* codes, i64 element) {
    if constexpr (F::BITS == 8)
        return *(const u32*)(codes + element);
    else
        return *(const unsigned short*)(codes + element / 2);
}

template <class F>
static ZEROCAST_FN float value_of(u32 code, float multiplier) {
    return scaled<Scalar>(decode<F, Scalar>((i32)code), multiplier);
}

template <class F, class Multiplier>
static ZEROCAST_FN void decode_tiles(const DequantizeTarget* targets, const Tile* tiles, i64 count,
                                     const Multiplier& multiplier_of, float* multipliers) {
    for (i64 t = blockIdx.x; t < count; t += gridDim.x) {
        Tile tile = tiles[t];
        const DequantizeTarget& target = targets[tile.weight];
        i64 blocks_w = target.grid.blocks_w();
        for (int b = threadIdx.x; b < tile.blocks; b += THREADS) {
            i64 block = tile.first_block + b;
            i64 at = block / blocks_w * target.scale_row + block % blocks_w * target.scale_col;
            multipliers[b] = multiplier_of(target, at);
        }
        __syncthreads();

        Quads quads(tile, target.grid, threadIdx.x);
        bool at_once = quads_aligned(target.out + tile.element, 16, tile, target.grid)
                       && quads_aligned(target.codes + tile.element * F::BITS / 8, F::BITS / 2,
                                        tile, target.grid)
                       && quads_keep_to_blocks(tile, target.grid);
        i64 numel = target.grid.numel();
        u32 whole = at_once ? whole_quads(quads, tile, target.grid, 0, numel) : 0;
#pragma unroll 2
        for (int i = 0; i < TILE_QUADS; i++) {
            i64 e = quads.at(i);
            if (whole >> i & 1) {
                u32 codes = load_codes<F>(target.codes, e);
                float multiplier = multipliers[block_in_tile(tile, target.grid, quads.col_of(i))];
                Quad q;
                for (int j = 0; j < 4; j++) {
                    q.x[j] = value_of<F>(codes >> F::BITS * j & ((1u << F::BITS) - 1), multiplier);
                }
                store_quad(target.out + e, q);
                continue;
            }
#pragma unroll 1
            for (int j = 0; j < 4; j++) {
                if (!owns(quads, 0, numel, i, j)) continue;
                float multiplier =
                    multipliers[block_in_tile(tile, target.grid, quads.col_of(i) + j)];
                target.out[e + j] = value_of<F>((u32)code_of<F>(target.codes, e + j), multiplier);
            }
        }
        __syncthreads();  // before the next tile makes its multipliers
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    dequantize_e2m1(const DequantizeTarget* __restrict__ targets, const Tile* __restrict__ tiles,
                    i64 count) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    auto multiplier_of = [](const DequantizeTarget& t, i64 at) {
        return nvfp4_decode_multiplier<Scalar>(((const u8*)t.scale_inv)[at], *t.amax, 448);
    };
    decode_tiles<E2M1>(targets, tiles, count, multiplier_of, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    dequantize_e4m3(const DequantizeTarget* __restrict__ targets, const Tile* __restrict__ tiles,
                    i64 count) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    auto multiplier_of = [](const DequantizeTarget& t, i64 at) {
        return ((const float*)t.scale_inv)[at];
    };
    decode_tiles<E4M3>(targets, tiles, count, multiplier_of, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    dequantize_e5m2(const DequantizeTarget* __restrict__ targets, const Tile* __restrict__ tiles,
                    i64 count) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    auto multiplier_of = [](const DequantizeTarget& t, i64 at) {
        return ((const float*)t.scale_inv)[at];
    };
    decode_tiles<E5M2>(targets, tiles, count, multiplier_of, multipliers);
}
