// partial_amax: raise block and tensor amaxes to the largest magnitudes of this rank's rounded
// elements; those of a second plane over blocks of one column in the same pass over the masters.
//
// A thread takes integer maxima of magnitudes, and each block's maximum is rounded once.
#include "cuda/tiles.h"
#include "cuda/vec4.h"

using namespace zerocast;

// The largest magnitudes of a tile, in shared memory.
struct Largest {
    i32* rowwise;     // of its blocks
    i32* columnwise;  // of its columns, in the second plane
};

// Reads the vectors of `whole`, each at once, and calls work(i, read, magnitudes) for all vectors
// of the thread; those that are not `read` are 0.
template <class T, class Work>
static ZEROCAST_FN void for_each_vector(const Tile& tile, const Grid& grid, const T* master,
                                        const ThreadVectors& vectors, u32 whole, const Work& work) {
    bool aligned = vectors_aligned(master + tile.element, 4 * sizeof(T), tile, grid);
    const T* from = master + vectors.element;
#pragma unroll 1
    for (int first = 0; first < TILE_VECTORS; first += AMAX_IN_FLIGHT) {
        Four<T> four[AMAX_IN_FLIGHT];
        load_vectors(four, from, vectors.step, whole, aligned);
#pragma unroll
        for (int k = 0; k < AMAX_IN_FLIGHT; k++) {
            i32 magnitude[4];
            magnitudes_of(four[k].values(), magnitude);
            work(first + k, whole >> k & 1, magnitude);
        }
        whole >>= AMAX_IN_FLIGHT;
        from += AMAX_IN_FLIGHT * vectors.step;
    }
}

// The vectors of `whole`. A thread's vectors lie in one block, or in one each.
template <class T>
static ZEROCAST_FN void take_vectors(const CastShard& shard, const Tile& tile, const T* master,
                                     const ThreadVectors& vectors, u32 whole, const Largest& to) {
    const Grid& grid = shard.rowwise.grid;
    bool one_block = tile.blocks == 1 || vectors.col_step == 0;  // of this thread's vectors
    i32 value = 0;
    auto take = [&](int i, bool read, const i32(&magnitude)[4]) {
        value = Scalar::max(value, largest_of(magnitude));
        if (one_block || !read) return;
        atomicMax(&to.rowwise[tile.block_of(grid, 0, vectors.col_of(i))], value);
        value = 0;
    };
    for_each_vector(tile, grid, master, vectors, whole, take);
    if (tile.blocks == 1) {  // the lanes agree first
        value = __reduce_max_sync(ALL_LANES, value);
        if (threadIdx.x % 32 == 0) atomicMax(&to.rowwise[0], value);
    } else if (one_block && vectors.col < vectors.cols) {
        atomicMax(&to.rowwise[tile.block_of(grid, 0, vectors.col)], value);
    }
}

// The same in blocks of one row, and in columns.
template <class T>
static ZEROCAST_FN void take_vectors(const CastShard& shard, const Tile32x256& shape,
                                     const T* master, const ThreadVectors& vectors, u32 whole,
                                     const Largest& to) {
    const Grid& grid = shard.rowwise.grid;
    Tile tile = shape.as_tile(grid);
    int block = shape.block_of(grid, 0, vectors.col);
    // Neighbouring lanes whose vectors lie in one block, a power of two.
    int lanes = tile.blocks == 1 || grid.block_w >= 128 ? 32 : (int)grid.block_w / 4;
    i32 columns[4] = {0, 0, 0, 0};
    auto take = [&](int i, bool, const i32(&magnitude)[4]) {
#pragma unroll
        for (int j = 0; j < 4; j++) columns[j] = Scalar::max(columns[j], magnitude[j]);
        i32 value = largest_of(magnitude);
        for (int apart = 1; apart < lanes; apart *= 2)
            value = Scalar::max(value, __shfl_xor_sync(ALL_LANES, value, apart));
        // Past the tile's edge the value is 0, which changes nothing.
        if (threadIdx.x % lanes == 0)
            atomicMax(&to.rowwise[block + vectors.row_of(i) * tile.blocks], value);
    };
    for_each_vector(tile, grid, master, vectors, whole, take);
#pragma unroll
    for (int j = 0; j < 4; j++) atomicMax(&to.columnwise[vectors.col + j], columns[j]);
}

// The elements of all other vectors, one by one.
template <class Shape, class T>
static ZEROCAST_FN void take_elements(const CastShard& shard, const Shape& shape, const T* master,
                                      const ThreadVectors& vectors, u32 whole, const Largest& to) {
#pragma unroll 1
    for (int at = 0; at < 4 * TILE_VECTORS; at++) {
        int i = at / 4, j = at % 4;
        if (whole >> i & 1 || !owns(vectors, shard.start, shard.end, i, j)) continue;
        i32 value = Scalar::bits(value_of(master[vectors.at(i) + j])) & MAGNITUDE_MASK;
        int col = vectors.col_of(i) + j;
        atomicMax(&to.rowwise[shape.block_of(shard.rowwise.grid, vectors.row_of(i), col)], value);
        if (Shape::ROW_BLOCKS) atomicMax(&to.columnwise[col], value);
    }
}

template <class Shape>
__global__ void __launch_bounds__(THREADS, Shape::ROW_BLOCKS ? 5 : 6)
    partial_amax(const CastShard* __restrict__ shards, const Shape* __restrict__ tiles, i64 count) {
    __shared__ i32 largest[MAX_TILE_BLOCKS + Shape::COLUMNS];
    Largest to{largest, largest + MAX_TILE_BLOCKS};
    for (i64 t = blockIdx.x; t < count; t += gridDim.x) {
        Shape shape = tiles[t];
        const CastShard& shard = shards[shape.weight];
        const Grid& grid = shard.rowwise.grid;
        Tile tile = shape.as_tile(grid);
        int blocks = shape.num_blocks();
        for (int b = threadIdx.x; b < blocks; b += THREADS) to.rowwise[b] = 0;
        for (int c = threadIdx.x; c < Shape::COLUMNS; c += THREADS) to.columnwise[c] = 0;
        __syncthreads();

        ThreadVectors vectors = shape.vectors(grid, threadIdx.x);
        u32 whole = vectors_keep_to_blocks<Shape>(tile, grid)
                        ? whole_vectors(vectors, tile, grid, shard.start, shard.end)
                        : 0;
        with_master(shard, [&](auto* master) {
            take_vectors(shard, shape, master, vectors, whole, to);
            if (whole != ALL_VECTORS) take_elements(shard, shape, master, vectors, whole, to);
        });
        __syncthreads();

        // Each entry is read here by the thread that clears it for the next tile, so no barrier
        // stands between the two.
        i64 blocks_w = grid.blocks_w();
        for (int b = threadIdx.x; b < (blocks + 31) / 32 * 32; b += THREADS) {
            i32 amax = b < blocks ? rounded_amax(to.rowwise[b], shard.round_to) : 0;
            i32* to_block = shard.rowwise.block_amax + shape.first_block;
            if (b < blocks) atomicMax(to_block + shape.offset_of(b, blocks_w, 1), amax);
            amax = __reduce_max_sync(ALL_LANES, amax);
            if (b % 32 == 0) atomicMax(shard.tensor_amax, amax);
        }
        if constexpr (Shape::ROW_BLOCKS) {
            if (!shard.columnwise.block_amax) continue;
            i32* columns = shard.columnwise.block_amax + shape.first_column(grid);
            for (int c = threadIdx.x; c < tile.cols; c += THREADS)
                atomicMax(&columns[c], rounded_amax(to.columnwise[c], shard.round_to));
        }
    }
}
