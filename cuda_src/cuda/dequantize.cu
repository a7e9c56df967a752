// dequantize: decode whole weights to FP32.
//
// The tiles are those of a cast of the whole weight; the multipliers of a tile's blocks are made
// once a tile.
#include "arithmetic/scaling.h"
#include "cuda/tiles.h"
#include "cuda/vec4.h"

using namespace zerocast;

// Code j of four adjacent ones, in whole bytes.
template <class F>
static ZEROCAST_FN i32 code_of(const u8* codes, i64 element) {
    return F::BITS == 8 ? codes[element] : codes[element / 2] >> 4 * (element & 1) & 0xF;
}

template <class F>
static ZEROCAST_FN float value_of(u32 code, float multiplier) {
    return scaled<Scalar>(decode<F, Scalar>((i32)code), multiplier);
}

// What codes are multiplied by, from entry `at` of the stored plane of scales.
template <class Numerics>
static ZEROCAST_FN float multiplier_from(const DequantizeTarget& target, i64 at, i64 scale_max) {
    auto stored = ((const typename Numerics::Stored*)target.plane.scale_inv)[at];
    if constexpr (SAME<Numerics, MXNumerics<typename Numerics::Format>>)
        return decode_e8m0<Scalar>(stored);
    else if constexpr (Numerics::Format::BITS == 4)
        return nvfp4_decode_multiplier<Scalar>(stored, *target.amax, scale_max);
    else
        return stored;
}

// multipliers: of the tile's blocks.
template <class F, class Shape>
static ZEROCAST_FN void decode_tile(const DequantizeTarget& target, const Shape& shape,
                                    const float* multipliers) {
    const Grid& grid = target.plane.grid;
    Tile tile = shape.as_tile(grid);
    ThreadVectors vectors = shape.vectors(grid, threadIdx.x);
    bool one_multiplier = vectors_keep_to_blocks<Shape>(tile, grid);  // of the elements of a vector
    bool aligned = vectors_aligned(target.out + tile.element, 16, tile, grid);
    bool aligned_codes =
        vectors_aligned(target.codes + tile.element * F::BITS / 8, F::BITS / 2, tile, grid);
    i64 numel = grid.numel();
    u32 whole = owned_vectors(vectors, tile, grid, 0, numel).whole;
#pragma unroll 2
    for (int i = 0; i < vectors.count; i++) {
        i64 e = vectors.at(i);
        int row = vectors.row_of(i), col = vectors.col_of(i);
        if (whole >> i & 1) {
            u32 codes = load_codes<F>(target.codes + e * F::BITS / 8, aligned_codes);
            float multiplier = multipliers[shape.block_of(grid, row, col)];
            Vec4 q;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (!one_multiplier) multiplier = multipliers[shape.block_of(grid, row, col + j)];
                q.x[j] = value_of<F>(codes >> F::BITS * j & ((1u << F::BITS) - 1), multiplier);
            }
            store_vec4(target.out + e, q, aligned);
            continue;
        }
#pragma unroll 1
        for (int j = 0; j < 4; j++) {
            if (!owns(vectors, 0, numel, i, j)) continue;
            u32 code = (u32)code_of<F>(target.codes, e + j);
            target.out[e + j] = value_of<F>(code, multipliers[shape.block_of(grid, row, col + j)]);
        }
    }
}

template <class Numerics, class Shape>
__global__ void __launch_bounds__(THREADS, 8)
    dequantize(const DequantizeTarget* __restrict__ targets, const Shape* __restrict__ tiles,
               i64 count, const __grid_constant__ NumericsTable table) {
    __shared__ float multipliers[MAX_TILE_BLOCKS];
    for (i64 t = blockIdx.x; t < count; t += gridDim.x) {
        Shape shape = tiles[t];
        const DequantizeTarget& target = targets[shape.weight];
        i64 blocks_w = target.plane.grid.blocks_w();
        i64 down = target.plane.down(), right = target.plane.right();
        i64 first = shape.first_block / blocks_w * down + shape.first_block % blocks_w * right;
        for (int b = threadIdx.x; b < shape.num_blocks(); b += THREADS) {
            i64 at = first + shape.offset_of(b, down, right);
            multipliers[b] = multiplier_from<Numerics>(target, at, table.scale_max);
        }
        __syncthreads();
        decode_tile<typename Numerics::Format>(target, shape, multipliers);
        __syncthreads();  // before the next tile makes its multipliers
    }
}
