// partial_cast: round, scale and encode this rank's elements into their codes; every other nibble
// keeps its value.
//
// The multipliers of a tile's blocks are derived once a tile, into shared memory, while the masters
// are under way. Where a weight has a second plane, quantized independently over blocks of one
// column, that one is cast in the same pass over the masters. Delayed scaling takes the amax of
// what it casts in the same pass.
#include "cuda/cast.h"

using namespace zerocast;

// What elements are multiplied by, in shared memory.
struct Multipliers {
    float* rowwise;     // of the tile's blocks
    float* columnwise;  // of its columns, in the second plane
};

// The second plane, where the shape of tiles serves one and the weight has it.
template <class Numerics, class Shape>
static ZEROCAST_FN u8* second_plane(const CastShard& shard) {
    typedef typename Numerics::Format F;
    constexpr bool CASTS_TWO = F::BITS == 8 || SAME<Numerics, MXNumerics<F>>;
    return Shape::ROW_BLOCKS && CASTS_TWO ? shard.columnwise.codes : nullptr;
}

template <class Numerics>
constexpr bool TAKES_AMAX = SAME<Numerics, DelayedNumerics<typename Numerics::Format>>;

// What the elements of one block are multiplied by. NVFP4's numerics are made anew for each block,
// so that they take no registers from the casts.
template <class Numerics>
static ZEROCAST_FN float multiplier_of(const CastShard& shard, const NumericsTable& table,
                                       const CodePlane& plane, i64 block) {
    auto numerics = numerics_of<Numerics>(table, shard.tensor_amax, shard.delayed);
    i32 amax = TAKES_AMAX<Numerics> ? 0 : plane.block_amax[block];
    i32 choice = Numerics::CHOOSES ? shard.candidates.choices[block] : 0;
    return numerics.template multiplier<Scalar>(amax, choice);
}

// Fills the multipliers; a barrier is needed before they are read.
template <class Numerics, class Shape>
static ZEROCAST_FN void derive(const CastShard& shard, const NumericsTable& table,
                               const Shape& shape, const Multipliers& multipliers) {
    i64 blocks_w = shard.rowwise.grid.blocks_w();
#pragma unroll 1
    for (int b = threadIdx.x; b < shape.num_blocks(); b += THREADS) {
        i64 block = shape.first_block + shape.offset_of(b, blocks_w, 1);
        multipliers.rowwise[b] = multiplier_of<Numerics>(shard, table, shard.rowwise, block);
    }
    if constexpr (Shape::ROW_BLOCKS) {
        if (!second_plane<Numerics, Shape>(shard)) return;
        i64 first = shape.first_column(shard.rowwise.grid);
#pragma unroll 1
        for (int c = threadIdx.x; c < shape.cols; c += THREADS) {
            multipliers.columnwise[c] =
                multiplier_of<Numerics>(shard, table, shard.columnwise, first + c);
        }
    }
}

// The vectors of `whole`, each read at once, and written to all planes. Calls derive_all(), which
// fills the multipliers and has a barrier, between the first reads and their use.
template <class Numerics, class Nominal, class Shape, class T, class Encoder, class Derive>
static ZEROCAST_FN void cast_vectors(const CastShard& shard, const Shape& shape, const T* master,
                                     const ThreadVectors& vectors, u32 whole,
                                     const Multipliers& multipliers, const Encoder& encoder,
                                     const Derive& derive_all, i32& largest) {
    typedef typename Numerics::Format F;
    const Grid& grid = shard.rowwise.grid;
    Tile tile = shape.as_tile(grid);
    u8* second = second_plane<Numerics, Shape>(shard);
    const T* from = master + vectors.element;
    bool aligned = vectors_aligned(master + tile.element, 4 * sizeof(T), tile, grid);
    i64 at = byte_of<F>(shard, tile.element), step = bytes_of<F>(vectors.step);
    bool aligned_codes = vectors_aligned(shard.rowwise.codes + at, F::BITS / 2, tile, grid)
                         && (!second || (u64)(second + at) % (F::BITS / 2) == 0);
    u8* to = shard.rowwise.codes + byte_of<F>(shard, vectors.element);
    int block = Shape::ROW_BLOCKS ? shape.block_of(grid, 0, vectors.col) : 0;
    // Whether one multiplier serves all of the thread's vectors; delayed scaling has one a tensor.
    bool one_block =
        !Shape::ROW_BLOCKS && (TAKES_AMAX<Numerics> || tile.blocks == 1 || vectors.col_step == 0);
    float multiplier = 0, of_columns[4] = {};
#pragma unroll 1
    for (int first = 0; first < TILE_VECTORS; first += CAST_IN_FLIGHT) {
        Four<T> four[CAST_IN_FLIGHT];
        load_vectors(four, from, vectors.step, whole, aligned);
        if (first == 0) {
            derive_all();
            if (one_block)
                multiplier =
                    multipliers
                        .rowwise[vectors.col < vectors.cols ? shape.block_of(grid, 0, vectors.col)
                                                            : 0];
#pragma unroll
            for (int j = 0; j < 4; j++)
                of_columns[j] = second ? multipliers.columnwise[vectors.col + j] : 0;
        }
#pragma unroll
        for (int k = 0; k < CAST_IN_FLIGHT; k++) {
            if (!(whole >> k & 1)) continue;
            int i = first + k;
            Vec4 x = four[k].values();
            if constexpr (TAKES_AMAX<Numerics>) {
                i32 magnitude[4];
                magnitudes_of(x, magnitude);
                largest = Scalar::max(largest, largest_of(magnitude));
            }
            if (Shape::ROW_BLOCKS)
                multiplier = multipliers.rowwise[block + vectors.row_of(i) * tile.blocks];
            else if (!one_block)
                multiplier = multipliers.rowwise[shape.block_of(grid, 0, vectors.col_of(i))];
            Vec4 rounded = round_vec4<Nominal>(x), scaled;
            for (int j = 0; j < 4; j++) scaled.x[j] = rounded.x[j] * multiplier;
            store_codes<F>(to + k * step, encoder.encode_vec4_at(vectors.at(i), scaled),
                           aligned_codes);
            if (!second) continue;
            for (int j = 0; j < 4; j++) scaled.x[j] = rounded.x[j] * of_columns[j];
            store_codes<F>(to + (second - shard.rowwise.codes) + k * step,
                           encoder.encode_vec4_at(vectors.at(i), scaled), aligned_codes);
        }
        whole >>= CAST_IN_FLIGHT;
        from += CAST_IN_FLIGHT * vectors.step;
        to += CAST_IN_FLIGHT * step;
    }
}

// The elements of all other vectors.
template <class Numerics, class Shape, class T, class Encoder>
static ZEROCAST_FN void cast_elements(const CastShard& shard, const Shape& shape, const T* master,
                                      const ThreadVectors& vectors, u32 whole,
                                      const Multipliers& multipliers, const Encoder& encoder,
                                      i32& largest) {
    typedef typename Numerics::Format F;
    auto code_under = [&](int i, int j, float multiplier) {
        i64 element = vectors.at(i) + j;
        float x = value_of(master[element]);
        if (TAKES_AMAX<Numerics>) largest = Scalar::max(largest, Scalar::bits(x) & MAGNITUDE_MASK);
        return encoder.encode_at(element, round_element(x, shard.round_to) * multiplier);
    };
    auto rowwise = [&](int i, int j) {
        int block = shape.block_of(shard.rowwise.grid, vectors.row_of(i), vectors.col_of(i) + j);
        return code_under(i, j, multipliers.rowwise[block]);
    };
    auto columnwise = [&](int i, int j) {
        return code_under(i, j, multipliers.columnwise[vectors.col_of(i) + j]);
    };
    u8* second = second_plane<Numerics, Shape>(shard);
#pragma unroll 1
    for (int at = 0; at < 4 * TILE_VECTORS; at += F::BITS == 4 ? 2 : 1) {
        if (whole >> at / 4 & 1) continue;
        store_elements<F>(shard, shard.rowwise.codes, vectors, at, rowwise);
        if (second) store_elements<F>(shard, second, vectors, at, columnwise);
    }
}

template <class Numerics, class Encoder, class Shape>
static ZEROCAST_FN void cast_tile(const CastShard& shard, const Shape& shape,
                                  const NumericsTable& table, const Multipliers& multipliers) {
    const Grid& grid = shard.rowwise.grid;
    Tile tile = shape.as_tile(grid);
    Encoder encoder(shard, table);
    auto derive_all = [&] {
        derive<Numerics>(shard, table, shape, multipliers);
        __syncthreads();
    };
    ThreadVectors vectors = shape.vectors(grid, threadIdx.x);
    bool at_once = vectors_keep_to_blocks<Shape>(tile, grid) && encoder.takes_vectors(tile, grid);
    u32 whole = at_once ? whole_vectors(vectors, tile, grid, shard.start, shard.end) : 0;
    i32 largest = 0;
    with_rounded_master(shard, [&](auto* master, auto nominal) {
        cast_vectors<Numerics, decltype(nominal)>(shard, shape, master, vectors, whole, multipliers,
                                                  encoder, derive_all, largest);
    });
    if (whole != ALL_VECTORS) {
        with_master(shard, [&](auto* master) {
            cast_elements<Numerics>(shard, shape, master, vectors, whole, multipliers, encoder,
                                    largest);
        });
    }
    if constexpr (TAKES_AMAX<Numerics>) {
        largest = __reduce_max_sync(ALL_LANES, largest);
        if (threadIdx.x % 32 == 0) {
            largest = rounded_amax(largest, shard.round_to);
            atomicMax(shard.rowwise.block_amax, largest);
            atomicMax(shard.tensor_amax, largest);
        }
    }
}

// Thread blocks that share a multiprocessor's registers.
template <class Numerics, class Encoder, class Shape>
constexpr int RESIDENT = Shape::ROW_BLOCKS      ? 5
                         : TAKES_AMAX<Numerics> ? 9
                                                : Encoder::RESIDENT;

// The table is no __grid_constant__: stochastic rounding would take more registers, and spill some.
template <class Numerics, class Encoder, class Shape>
__global__ void __launch_bounds__(THREADS, RESIDENT<Numerics, Encoder, Shape>)
    partial_cast(const CastShard* __restrict__ shards, const Shape* __restrict__ tiles, i64 count,
                 NumericsTable table) {
    __shared__ float multipliers[MAX_TILE_BLOCKS + Shape::COLUMNS];
    for (i64 t = blockIdx.x; t < count; t += gridDim.x) {
        Shape shape = tiles[t];
        cast_tile<Numerics, Encoder>(shards[shape.weight], shape, table,
                                     Multipliers{multipliers, multipliers + MAX_TILE_BLOCKS});
        __syncthreads();  // before the next tile derives its multipliers
    }
}
