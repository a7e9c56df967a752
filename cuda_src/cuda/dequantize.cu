// dequantize: decode whole weights to FP32.
//
// The tiles are those of a cast of the whole weight; the multipliers of a tile's blocks are made
// once a tile.
#include "arithmetic/scaling.h"
#include "cuda/tiles.h"
#include "cuda/vec4.h"

using namespace zerocast;

// Code j of four that lie side by side, in whole bytes.
template <class F>
static ZEROCAST_FN i32 code_of(const u8* codes, i64 element) {
    return F::BITS == 8 ? codes[element] : codes[element / 2] >> 4 * (element & 1) & 0xF;
}

template <class F>
static ZEROCAST_FN float value_of(u32 code, float multiplier) {
    return scaled<Scalar>(decode<F, Scalar>((i32)code), multiplier);
}

// multiplier_at(row, col) is that of an element of the tile; `by_vectors` says that the four
// elements of a vector share one.
template <class F, class MultiplierAt>
static ZEROCAST_FN void decode_tile(const DequantizeTarget& target, const Tile& tile,
                                    const ThreadVectors& vectors, bool by_vectors,
                                    const MultiplierAt& multiplier_at) {
    bool aligned = vectors_aligned(target.out + tile.element, 16, tile, target.plane.grid);
    bool aligned_codes = vectors_aligned(target.codes + tile.element * F::BITS / 8, F::BITS / 2,
                                         tile, target.plane.grid);
    i64 numel = target.plane.grid.numel();
    u32 whole = whole_vectors(vectors, tile, target.plane.grid, 0, numel);
#pragma unroll 2
    for (int i = 0; i < TILE_VECTORS; i++) {
        i64 e = vectors.at(i);
        int row = vectors.row_of(i), col = vectors.col_of(i);
        if (whole >> i & 1) {
            u32 codes = load_codes<F>(target.codes + e * F::BITS / 8, aligned_codes);
            float multiplier = multiplier_at(row, col);
            Vec4 q;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (!by_vectors) multiplier = multiplier_at(row, col + j);
                q.x[j] = value_of<F>(codes >> F::BITS * j & ((1u << F::BITS) - 1), multiplier);
            }
            store_vec4(target.out + e, q, aligned);
            continue;
        }
#pragma unroll 1
        for (int j = 0; j < 4; j++) {
            if (!owns(vectors, 0, numel, i, j)) continue;
            u32 code = (u32)code_of<F>(target.codes, e + j);
            target.out[e + j] = value_of<F>(code, multiplier_at(row, col + j));
        }
    }
}

// multiplier_of(target, at): from entry `at` of the stored plane of scales.
template <class F, class MultiplierOf>
static ZEROCAST_FN void decode_tiles(const DequantizeTarget* targets, const Tile* tiles, i64 count,
                                     const MultiplierOf& multiplier_of, float* multipliers) {
    for (i64 t = blockIdx.x; t < count; t += gridDim.x) {
        Tile tile = tiles[t];
        const DequantizeTarget& target = targets[tile.weight];
        i64 blocks_w = target.plane.grid.blocks_w();
        i64 down = target.plane.down(), right = target.plane.right();
        i64 first = tile.first_block / blocks_w * down + tile.first_block % blocks_w * right;
        for (int b = threadIdx.x; b < tile.blocks; b += THREADS)
            multipliers[b] = multiplier_of(target, first + b * right);
        __syncthreads();
        ThreadVectors vectors(tile, target.plane.grid, threadIdx.x);
        decode_tile<F>(
            target, tile, vectors, vectors_keep_to_blocks(tile, target.plane.grid),
            [&](int, int col) { return multipliers[block_in_tile(tile, target.plane.grid, col)]; });
        __syncthreads();  // before the next tile makes its multipliers
    }
}

// Over fine tiles: multipliers is [rows, blocks].
template <class F, class MultiplierOf>
static ZEROCAST_FN void decode_fine_tiles(const DequantizeTarget* targets, const FineTile* tiles,
                                          i64 count, const MultiplierOf& multiplier_of,
                                          float* multipliers) {
    for (i64 t = blockIdx.x; t < count; t += gridDim.x) {
        FineTile fine = tiles[t];
        const DequantizeTarget& target = targets[fine.weight];
        Tile tile = fine.as_tile(target.plane.grid);
        i64 down = target.plane.down(), right = target.plane.right();
        i64 first = fine.row * down + fine.first_block % target.plane.grid.blocks_w() * right;
        for (int b = threadIdx.x; b < tile.rows * tile.blocks; b += THREADS) {
            int row = b / tile.blocks, block = b % tile.blocks;
            multipliers[b] = multiplier_of(target, first + row * down + block * right);
        }
        __syncthreads();
        decode_tile<F>(
            target, tile, ThreadVectors::of_fine(tile, target.plane.grid, threadIdx.x), true,
            [&](int row, int col) {
                return multipliers[row * tile.blocks + block_in_tile(tile, target.plane.grid, col)];
            });
        __syncthreads();  // before the next tile makes its multipliers
    }
}

// --- what is stored as a scale ---

static ZEROCAST_FN float fp32_at(const DequantizeTarget& target, i64 at) {
    return ((const float*)target.plane.scale_inv)[at];
}

static ZEROCAST_FN float e8m0_at(const DequantizeTarget& target, i64 at) {
    return decode_e8m0<Scalar>(((const u8*)target.plane.scale_inv)[at]);
}

// --- one kernel for each scheme's numerics and shape of tiles ---

extern "C" __global__ void __launch_bounds__(THREADS, 8)
    dequantize_float8_e4m3(const DequantizeTarget* __restrict__ targets,
                           const Tile* __restrict__ tiles, i64 count) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    decode_tiles<E4M3>(targets, tiles, count, fp32_at, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 8)
    dequantize_float8_e5m2(const DequantizeTarget* __restrict__ targets,
                           const Tile* __restrict__ tiles, i64 count) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    decode_tiles<E5M2>(targets, tiles, count, fp32_at, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 8)
    dequantize_mxfp8_e4m3(const DequantizeTarget* __restrict__ targets,
                          const Tile* __restrict__ tiles, i64 count) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    decode_tiles<E4M3>(targets, tiles, count, e8m0_at, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 8)
    dequantize_mxfp8_e5m2(const DequantizeTarget* __restrict__ targets,
                          const Tile* __restrict__ tiles, i64 count) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    decode_tiles<E5M2>(targets, tiles, count, e8m0_at, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 8)
    dequantize_nvfp4(const DequantizeTarget* __restrict__ targets, const Tile* __restrict__ tiles,
                     i64 count, i64 scale_max) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    auto e4m3_at = [=](const DequantizeTarget& target, i64 at) {
        u8 stored = ((const u8*)target.plane.scale_inv)[at];
        return nvfp4_decode_multiplier<Scalar>(stored, *target.amax, scale_max);
    };
    decode_tiles<E2M1>(targets, tiles, count, e4m3_at, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 8)
    dequantize_fine_float8_e4m3(const DequantizeTarget* __restrict__ targets,
                                const FineTile* __restrict__ tiles, i64 count) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    decode_fine_tiles<E4M3>(targets, tiles, count, fp32_at, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 8)
    dequantize_fine_float8_e5m2(const DequantizeTarget* __restrict__ targets,
                                const FineTile* __restrict__ tiles, i64 count) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    decode_fine_tiles<E5M2>(targets, tiles, count, fp32_at, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 8)
    dequantize_fine_mxfp8_e4m3(const DequantizeTarget* __restrict__ targets,
                               const FineTile* __restrict__ tiles, i64 count) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    decode_fine_tiles<E4M3>(targets, tiles, count, e8m0_at, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 8)
    dequantize_fine_mxfp8_e5m2(const DequantizeTarget* __restrict__ targets,
                               const FineTile* __restrict__ tiles, i64 count) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    decode_fine_tiles<E5M2>(targets, tiles, count, e8m0_at, multipliers);
}

extern "C" __global__ void __launch_bounds__(THREADS, 8)
    dequantize_fine_nvfp4(const DequantizeTarget* __restrict__ targets,
                          const FineTile* __restrict__ tiles, i64 count, i64 scale_max) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    auto e4m3_at = [=](const DequantizeTarget& target, i64 at) {
        u8 stored = ((const u8*)target.plane.scale_inv)[at];
        return nvfp4_decode_multiplier<Scalar>(stored, *target.amax, scale_max);
    };
    decode_fine_tiles<E2M1>(targets, tiles, count, e4m3_at, multipliers);
}
