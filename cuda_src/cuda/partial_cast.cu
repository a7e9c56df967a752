// partial_cast: round, scale and encode this rank's elements into their codes; every other nibble
// keeps its value.
//
// The multipliers of a tile's blocks are derived once a tile, into shared memory, while the masters
// are loaded. Codes of four bits take longer; where a tile of them is this rank's, each thread
// derives that of its one block, so that no warp waits for another. Where a weight has a second
// plane, quantized independently over blocks of one column, that one is cast in the same pass over
// the masters. Delayed scaling takes the amax of what it casts in the same pass.
#include "cuda/cast.h"
#include "cuda/next_tile.h"

using namespace zerocast;

template <class Numerics>
constexpr bool TAKES_AMAX = SAME<Numerics, DelayedNumerics<typename Numerics::Format>>;

// Vectors that a thread has in flight, and thread blocks that share a multiprocessor's registers.
// Compiled for sm_120, six would spill; its memory is slower, and needs fewer.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int MANY = 4;
#else
constexpr int MANY = 6;
#endif
template <class Numerics, class Shape>
constexpr bool FEW_BLOCKS = Shape::ROW_BLOCKS || TAKES_AMAX<Numerics>;
template <class Numerics, class Shape>
constexpr int IN_FLIGHT = FEW_BLOCKS<Numerics, Shape> ? MANY : 4;
template <class Numerics, class Encoder, class Shape>
constexpr int RESIDENT = FEW_BLOCKS<Numerics, Shape> ? 5 : Encoder::RESIDENT;

// Whether threads derive their own multipliers, of a tile that is this rank's and cast at once.
template <class Numerics, class Shape>
constexpr bool ALONE = Numerics::Format::BITS == 4 && !Shape::ROW_BLOCKS;

// What elements are multiplied by, in shared memory, and the amax that delayed scaling takes.
struct TileMemory {
    float* rowwise;     // of the tile's blocks
    float* columnwise;  // of its columns, in the second plane
    i32* largest;       // the magnitude
};

// The second plane, where the shape of tiles serves one and the weight has it.
template <class Numerics, class Shape>
static ZEROCAST_FN u8* second_plane(const CastShard& shard) {
    typedef typename Numerics::Format F;
    constexpr bool CASTS_TWO = F::BITS == 8 || SAME<Numerics, MXNumerics<F>>;
    return Shape::ROW_BLOCKS && CASTS_TWO ? shard.columnwise.codes : nullptr;
}

// What the elements of one block are multiplied by. NVFP4's numerics are made again for each block,
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
                               const Shape& shape, const TileMemory& memory) {
    i64 blocks_w = shard.rowwise.grid.blocks_w();
#pragma unroll 1
    for (int b = threadIdx.x; b < shape.num_blocks(); b += THREADS) {
        i64 block = shape.first_block + shape.offset_of(b, blocks_w, 1);
        memory.rowwise[b] = multiplier_of<Numerics>(shard, table, shard.rowwise, block);
    }
    if constexpr (Shape::ROW_BLOCKS) {
        if (!second_plane<Numerics, Shape>(shard)) return;
        i64 first = shape.first_column(shard.rowwise.grid);
#pragma unroll 1
        for (int c = threadIdx.x; c < shape.cols; c += THREADS) {
            memory.columnwise[c] =
                multiplier_of<Numerics>(shard, table, shard.columnwise, first + c);
        }
    }
}

// How a thread casts its vectors.
template <class Numerics, class Shape, class Encoder>
class VectorCast {
  public:
    typedef typename Numerics::Format F;

    ZEROCAST_FN VectorCast(const CastShard& shard, const Shape& shape, const ThreadVectors& vectors,
                           const TileMemory& memory, const Encoder& encoder, i32& largest)
        : shard_(shard),
          shape_(shape),
          vectors_(vectors),
          memory_(memory),
          encoder_(encoder),
          largest_(largest),
          codes_(global(shard.rowwise.codes) + byte_of<F>(shard, vectors.element)),
          second_(second_plane<Numerics, Shape>(shard)),
          step_((u32)bytes_of<F>(vectors.step)) {
        if (!second_) return;
        second_ = global(second_) + byte_of<F>(shard, vectors.element);
#pragma unroll
        for (int j = 0; j < 4; j++) of_columns_[j] = memory.columnwise[vectors.col + j];
    }

    // Masters are read and codes written four at a time, under the multiplier of `block`: that of
    // all vectors, or where blocks are rows of the tile's first row.
    template <class Nominal, class T, class Draws>
    ZEROCAST_FN void at_once(const T* master, VectorStream<IN_FLIGHT<Numerics, Shape>>& stream,
                             Draws draws, int block, float multiplier) {
        stream.for_each_at_once(master, [&](u32 i, const Vec4& x, u32 wanted) {
            take(x);  // one that is not wanted changes nothing
            if (Shape::ROW_BLOCKS)
                multiplier = memory_.rowwise[block + vectors_.row_of(i) * shape_.blocks];
            cast(i, round_vec4<Nominal>(x), multiplier, draws.of(i),
                 [&](u8* to, u32 word) { store_codes_at_once<F>(to, word, wanted); });
        });
    }

    // The same at any addresses, under any multipliers.
    template <class T>
    ZEROCAST_FN void anywhere(const T* master, VectorStream<IN_FLIGHT<Numerics, Shape>>& stream) {
        stream.for_each(master, [&](u32 i, const Vec4& x, u32 wanted) {
            if (!wanted) return;
            take(x);
            Vec4 rounded;
            with_nominal(shard_.round_to,
                         [&](auto nominal) { rounded = round_vec4<decltype(nominal)>(x); });
            cast(i, rounded, memory_.rowwise[block_of(i)], encoder_.draws_at(vectors_.at(i)),
                 [&](u8* to, u32 word) { store_codes<F>(to, word, false); });
        });
    }

  private:
    ZEROCAST_FN int block_of(u32 i) const {
        return shape_.block_of(shard_.rowwise.grid, vectors_.row_of(i), vectors_.col_of(i));
    }

    ZEROCAST_FN void take(const Vec4& x) const {
        if constexpr (!TAKES_AMAX<Numerics>) return;
        i32 magnitude[4];
        magnitudes_of(x, magnitude);
        largest_ = Scalar::max(largest_, largest_of(magnitude));
    }

    template <class Drawn, class Store>
    ZEROCAST_FN void cast(u32 i, const Vec4& x, float multiplier, Drawn drawn,
                          const Store& store) const {
        Vec4 scaled;
        for (int j = 0; j < 4; j++) scaled.x[j] = x.x[j] * multiplier;
        store(ahead(codes_, step_, i), encoder_.encode_vec4_by(drawn, scaled));
        if (!second_) return;
        for (int j = 0; j < 4; j++) scaled.x[j] = x.x[j] * of_columns_[j];
        store(ahead(second_, step_, i), encoder_.encode_vec4_by(drawn, scaled));
    }

    const CastShard& shard_;
    const Shape& shape_;
    const ThreadVectors& vectors_;
    const TileMemory& memory_;
    const Encoder& encoder_;
    i32& largest_;
    u8 *codes_, *second_;
    u32 step_;
    float of_columns_[4];
};

// The owned elements of the vectors of `rest`.
template <class Numerics, class Shape, class T, class Encoder>
static ZEROCAST_FN void cast_elements(const CastShard& shard, const Shape& shape, const T* master,
                                      const ThreadVectors& vectors, u32 rest,
                                      const TileMemory& memory, const Encoder& encoder,
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
        return code_under(i, j, memory.rowwise[block]);
    };
    auto columnwise = [&](int i, int j) {
        return code_under(i, j, memory.columnwise[vectors.col_of(i) + j]);
    };
    u8 *codes = global(shard.rowwise.codes), *second = second_plane<Numerics, Shape>(shard);
    if (second) second = global(second);
#pragma unroll 1
    for (int at = 0; rest; at += 4, rest >>= 1) {
        if (!(rest & 1)) continue;
#pragma unroll 1
        for (int j = 0; j < 4; j += F::BITS == 4 ? 2 : 1) {
            store_elements<F>(shard, codes, vectors, at + j, rowwise);
            if (second) store_elements<F>(shard, second, vectors, at + j, columnwise);
        }
    }
}

template <class Numerics, class Encoder, class Shape, class Next>
static ZEROCAST_FN void cast_tile(const CastShard& shard, const Shape& shape,
                                  const NumericsTable& table, const TileMemory& memory,
                                  const Next& next) {
    typedef typename Numerics::Format F;
    const Grid& grid = shard.rowwise.grid;
    Tile tile = shape.as_tile(grid);
    Encoder encoder(shard, table);
    ThreadVectors vectors = shape.vectors(grid, threadIdx.x);
    OwnedVectors owned = owned_vectors(vectors, tile, grid, shard.start, shard.end);
    bool vectors_serve =
        vectors_keep_to_blocks<Shape>(tile, grid) && encoder.takes_vectors(tile, grid);
    if (!vectors_serve) owned.whole = 0;
    u32 rest = owned.some & ~owned.whole;
    bool one_block = Shape::ROW_BLOCKS || TAKES_AMAX<Numerics> || tile.blocks == 1
                     || vectors.col_step == 0;  // of a thread's vectors
    u8* second = second_plane<Numerics, Shape>(shard);
    i64 code = byte_of<F>(shard, tile.element);
    bool at_once = one_block && encoder.takes_pairs(tile, grid)
                   && (u64)(shard.rowwise.codes + code) % (F::BITS / 2) == 0
                   && (!second || (u64)(second + code) % (F::BITS / 2) == 0);
    i32 largest = 0;
    int count = owned.whole ? vectors.count : 0;
    if constexpr (Encoder::EXCHANGES) count = __reduce_max_sync(ALL_LANES, count);
    VectorStream<IN_FLIGHT<Numerics, Shape>> stream(vectors.step, owned.whole, count);
    with_master(shard, [&](auto* master) {
        at_once = at_once && vectors_aligned(master + tile.element, 4 * sizeof *master, tile, grid);
        stream.request(master + vectors.element, at_once);
    });
    next.fetch();
    typedef VectorCast<Numerics, Shape, Encoder> Cast;
    int block = shape.block_of(grid, 0, vectors.col < vectors.cols ? vectors.col : 0);
    auto cast_at_once = [&](Cast& cast, float multiplier) {
        with_rounded_master(shard, [&](auto* master, auto nominal) {
            cast.template at_once<decltype(nominal)>(
                master + vectors.element, stream, encoder.draws(tile, vectors), block, multiplier);
        });
    };
    // Said by a vote, the compiler knows that a warp stays together, and lets draws be exchanged
    // without a wait for the masters that were asked for.
    at_once = __all_sync(ALL_LANES, at_once);
    bool all = vectors_serve && owns_all(tile, grid, shard.start, shard.end);
    if (ALONE<Numerics, Shape> && at_once && all) {
        float multiplier =
            multiplier_of<Numerics>(shard, table, shard.rowwise, shape.first_block + block);
        Cast cast(shard, shape, vectors, memory, encoder, largest);
        return cast_at_once(cast, multiplier);
    }
    derive<Numerics>(shard, table, shape, memory);
    __syncthreads();
    Cast cast(shard, shape, vectors, memory, encoder, largest);
    if (at_once) {
        cast_at_once(cast, memory.rowwise[block]);
    } else {
        with_master(shard, [&](auto* master) { cast.anywhere(master + vectors.element, stream); });
    }
    if (rest) {
        with_master(shard, [&](auto* master) {
            cast_elements<Numerics>(shard, shape, master, vectors, rest, memory, encoder, largest);
        });
    }
    if constexpr (TAKES_AMAX<Numerics>) {
        largest = __reduce_max_sync(ALL_LANES, largest);
        if (threadIdx.x % 32 == 0) atomicMax(memory.largest, largest);
    }
}

// Raises the tensor's amax, which is that of its one block.
static ZEROCAST_FN void raise_amax(const CastShard& shard, i32 largest) {
    largest = rounded_amax(largest, shard.round_to);
    i32 *block = global(shard.rowwise.block_amax), *tensor = global(shard.tensor_amax);
    atomicMax(block, largest);
    if (tensor != block) atomicMax(tensor, largest);
}

// The table is no __grid_constant__: stochastic rounding would take more registers, and spill some.
template <class Numerics, class Encoder, class Shape, bool AHEAD = false>
__global__ void __launch_bounds__(THREADS, RESIDENT<Numerics, Encoder, Shape>)
    partial_cast(const CastShard* __restrict__ shards, const Shape* __restrict__ tiles, i64 count,
                 NumericsTable table) {
    __shared__ float multipliers[MAX_TILE_BLOCKS + Shape::COLUMNS];
    __shared__ i32 largest;
    TileMemory memory{multipliers, multipliers + MAX_TILE_BLOCKS, &largest};
    for (i64 t = blockIdx.x; t < count; t += gridDim.x) {
        Shape shape = tiles[t];
        const CastShard& shard = shards[shape.weight];
        if (TAKES_AMAX<Numerics> && threadIdx.x == 0) largest = 0;  // before a barrier
        NextTile<Shape, AHEAD> next{shards, tiles, t + gridDim.x, count};
        cast_tile<Numerics, Encoder>(shard, shape, table, memory, next);
        __syncthreads();  // before the next tile derives its multipliers
        if (TAKES_AMAX<Numerics> && threadIdx.x == 0) raise_amax(shard, largest);
    }
}
