// partial_amax: raise block and tensor amaxes to the largest magnitudes of this rank's rounded
// elements; those of a second plane over blocks of one column in the same pass over the masters.
//
// A thread takes integer maxima of magnitudes, and each block's maximum is rounded once.
#include "cuda/next_tile.h"
#include "cuda/vec4.h"

using namespace zerocast;

// The largest magnitudes of a tile, in shared memory.
struct Largest {
    i32* rowwise;     // of its blocks
    i32* columnwise;  // of its columns, in the second plane
    i32* tile;        // of all its elements
};

// How a thread takes its vectors into the blocks. All vectors are in one block, or each is in one.
class VectorAmax {
  public:
    ZEROCAST_FN VectorAmax(const CastShard& shard, const Tile& tile, const ThreadVectors& vectors,
                           const Largest& to)
        : grid_(shard.rowwise.grid),
          tile_(tile),
          vectors_(vectors),
          to_(to),
          one_block(tile.blocks == 1 || vectors.col_step == 0) {}

    // Where all are in one. A vector that is not wanted changes nothing.
    ZEROCAST_FN void take_in_one(u32, const i32 (&magnitude)[4], u32) {
        value_ = Scalar::max(value_, largest_of(magnitude));
    }

    ZEROCAST_FN void take(u32 i, const i32 (&magnitude)[4], u32 wanted) {
        if (one_block)
            take_in_one(i, magnitude, wanted);
        else if (wanted)
            atomicMax(&to_.rowwise[tile_.block_of(grid_, 0, vectors_.col_of(i))],
                      largest_of(magnitude));
    }

    ZEROCAST_FN void close() {
        if (!one_block) return;
        if (tile_.blocks == 1) {  // the lanes agree first
            value_ = __reduce_max_sync(ALL_LANES, value_);
            if (threadIdx.x % 32 == 0) atomicMax(&to_.rowwise[0], value_);
        } else if (vectors_.col < vectors_.cols) {
            atomicMax(&to_.rowwise[tile_.block_of(grid_, 0, vectors_.col)], value_);
        }
    }

  private:
    const Grid& grid_;
    const Tile& tile_;
    const ThreadVectors& vectors_;
    Largest to_;
    i32 value_ = 0;

  public:
    const bool one_block;  // whether all vectors of the thread are in one
};

// The same of blocks of one row, and of columns.
class RowBlockAmax {
  public:
    static constexpr bool one_block = true;

    ZEROCAST_FN RowBlockAmax(const CastShard& shard, const Tile32x256& tile,
                             const ThreadVectors& vectors, const Largest& to)
        : tile_(tile),
          vectors_(vectors),
          to_(to),
          block_(tile.block_of(shard.rowwise.grid, 0, vectors.col)),
          others_(tile.blocks == 1 || shard.rowwise.grid.block_w >= 128
                      ? 31
                      : (int)shard.rowwise.grid.block_w / 4 - 1),
          columns_{} {}

    ZEROCAST_FN void take_in_one(u32 i, const i32 (&magnitude)[4], u32 wanted) {
        take(i, magnitude, wanted);
    }

    ZEROCAST_FN void take(u32 i, const i32 (&magnitude)[4], u32 wanted) {
        i32 value = wanted ? largest_of(magnitude) : 0;
        if (i % 2 == 0) {
            even_ = value;
            for (int j = 0; j < 4; j++) even_magnitude_[j] = magnitude[j];
        } else {
            raise(i - 1, value, magnitude);
        }
    }

    ZEROCAST_FN void close() {
        if (vectors_.count % 2) raise(vectors_.count - 1, 0, even_magnitude_);
#pragma unroll
        for (int j = 0; j < 4; j++) atomicMax(&to_.columnwise[vectors_.col + j], columns_[j]);
    }

  private:
    // The blocks of vector i, which is even, and of the next one: even lanes agree on the one and
    // odd lanes on the other.
    ZEROCAST_FN void raise(u32 i, i32 odd, const i32 (&odd_magnitude)[4]) {
        for (int j = 0; j < 4; j++) {
            i32 of_both = Scalar::max(even_magnitude_[j], odd_magnitude[j]);
            columns_[j] = Scalar::max(columns_[j], of_both);
        }
        u32 lane = threadIdx.x % 32;
        i32 mine = lane & 1 ? odd : even_, other = lane & 1 ? even_ : odd;
        i32 value = Scalar::max(mine, __shfl_xor_sync(ALL_LANES, other, 1));
#pragma unroll
        for (int apart = 2; apart < 32; apart *= 2)  // from beyond the block, a lane's own value
            value = Scalar::max(value, __shfl_xor_sync(ALL_LANES, value, apart & others_));
        // Past the tile's edge the value is 0, which changes nothing.
        if ((lane & others_) < 2)
            atomicMax(&to_.rowwise[block_ + vectors_.row_of(i + lane % 2) * tile_.blocks], value);
    }

    const Tile32x256& tile_;
    const ThreadVectors& vectors_;
    Largest to_;
    int block_;
    int others_;  // lanes beside this one whose vectors are in its block; with it a power of two
    i32 columns_[4], even_magnitude_[4] = {}, even_ = 0;
};

ZEROCAST_FN VectorAmax amax_of(const CastShard& shard, const Tile& tile,
                               const ThreadVectors& vectors, const Largest& to) {
    return {shard, tile, vectors, to};
}
ZEROCAST_FN RowBlockAmax amax_of(const CastShard& shard, const Tile32x256& tile,
                                 const ThreadVectors& vectors, const Largest& to) {
    return {shard, tile, vectors, to};
}

// The vectors of `whole`, each of which is in one block.
template <class Shape, class T, class Next>
static ZEROCAST_FN void take_vectors(const CastShard& shard, const Shape& shape, const T* master,
                                     const ThreadVectors& vectors, u32 whole, const Largest& to,
                                     const Next& next) {
    const Grid& grid = shard.rowwise.grid;
    Tile tile = shape.as_tile(grid);
    auto amax = amax_of(shard, shape, vectors, to);
    bool at_once =
        amax.one_block && vectors_aligned(master + tile.element, 4 * sizeof *master, tile, grid);
    VectorStream<AMAX_IN_FLIGHT> stream(vectors.step, whole, vectors.count);
    stream.request(master + vectors.element, at_once);
    next.fetch();
    i32 magnitude[4];
    if (at_once) {
        stream.for_each_at_once(master + vectors.element, [&](u32 i, const Vec4& x, u32 wanted) {
            magnitudes_of(x, magnitude);
            amax.take_in_one(i, magnitude, wanted);
        });
    } else {
        stream.for_each(master + vectors.element, [&](u32 i, const Vec4& x, u32 wanted) {
            magnitudes_of(x, magnitude);
            amax.take(i, magnitude, wanted);
        });
    }
    amax.close();
}

// The owned elements of the vectors of `rest`, one by one.
template <class Shape, class T>
static ZEROCAST_FN void take_elements(const CastShard& shard, const Shape& shape, const T* master,
                                      const ThreadVectors& vectors, u32 rest, const Largest& to) {
#pragma unroll 1
    for (int i = 0; rest; i++, rest >>= 1) {
        if (!(rest & 1)) continue;
#pragma unroll 1
        for (int j = 0; j < 4; j++) {
            if (!owns(vectors, shard.start, shard.end, i, j)) continue;
            i32 value = Scalar::bits(value_of(master[vectors.at(i) + j])) & MAGNITUDE_MASK;
            int row = vectors.row_of(i), col = vectors.col_of(i) + j;
            atomicMax(&to.rowwise[shape.block_of(shard.rowwise.grid, row, col)], value);
            if (Shape::ROW_BLOCKS) atomicMax(&to.columnwise[col], value);
        }
    }
}

// Raises the amaxes of whole weights, by a thread's share of the tile's.
template <class Shape>
static ZEROCAST_FN void raise_blocks(const CastShard& shard, const Shape& shape,
                                     const Largest& from) {
    const Grid& grid = shard.rowwise.grid;
    i64 blocks_w = grid.blocks_w();
    i32 *to = global(shard.rowwise.block_amax) + shape.first_block, largest = 0;
    int blocks = shape.num_blocks(), last = (blocks + 31) / 32 * 32;
    for (int b = threadIdx.x; b < last; b += THREADS) {
        i32 value = b < blocks ? from.rowwise[b] : 0;
        if (b < blocks)
            atomicMax(to + shape.offset_of(b, blocks_w, 1), rounded_amax(value, shard.round_to));
        largest = __reduce_max_sync(ALL_LANES, Scalar::max(largest, value));
    }
    if (threadIdx.x % 32 == 0 && largest > 0) atomicMax(from.tile, largest);
    if constexpr (Shape::ROW_BLOCKS) {
        if (!shard.columnwise.block_amax) return;
        i32* columns = global(shard.columnwise.block_amax) + shape.first_column(grid);
        for (int c = threadIdx.x; c < shape.cols; c += THREADS)
            atomicMax(&columns[c], rounded_amax(from.columnwise[c], shard.round_to));
    }
}

template <class Shape, bool AHEAD = false>
__global__ void __launch_bounds__(THREADS, Shape::ROW_BLOCKS ? 5 : 6)
    partial_amax(const CastShard* __restrict__ shards, const Shape* __restrict__ tiles, i64 count) {
    __shared__ i32 largest[MAX_TILE_BLOCKS + Shape::COLUMNS + 1];
    Largest to{largest, largest + MAX_TILE_BLOCKS, largest + MAX_TILE_BLOCKS + Shape::COLUMNS};
    for (i64 t = blockIdx.x; t < count; t += gridDim.x) {
        Shape shape = tiles[t];
        const CastShard& shard = shards[shape.weight];
        const Grid& grid = shard.rowwise.grid;
        Tile tile = shape.as_tile(grid);
        // Each entry is cleared by the thread that has read it for the tile before, so no barrier
        // stands between the two.
        for (int b = threadIdx.x; b < shape.num_blocks(); b += THREADS) to.rowwise[b] = 0;
        for (int c = threadIdx.x; c < Shape::COLUMNS; c += THREADS) to.columnwise[c] = 0;
        if (threadIdx.x == 0) *to.tile = 0;
        __syncthreads();

        ThreadVectors vectors = shape.vectors(grid, threadIdx.x);
        OwnedVectors owned = owned_vectors(vectors, tile, grid, shard.start, shard.end);
        if (!vectors_keep_to_blocks<Shape>(tile, grid)) owned.whole = 0;
        u32 rest = owned.some & ~owned.whole;
        NextTile<Shape, AHEAD> next{shards, tiles, t + gridDim.x, count};
        with_master(shard, [&](auto* master) {
            take_vectors(shard, shape, master, vectors, owned.whole, to, next);
            if (rest) take_elements(shard, shape, master, vectors, rest, to);
        });
        __syncthreads();

        raise_blocks(shard, shape, to);
        __syncthreads();
        // The tensor's may be that of its block where it has one. Where it has more, block_amax is
        // where block 0 would be, which this rank may not keep: then the address is not its own.
        i32* tensor = shard.tensor_amax;
        if (threadIdx.x == 0 && tensor
            && (grid.num_blocks() > 1 || tensor != shard.rowwise.block_amax))
            atomicMax(global(tensor), rounded_amax(*to.tile, shard.round_to));
    }
}
