// partial_amax_cast: of the rows of blocks that a shard holds whole, what partial_amax does, and in
// the same read of the master the codes: their scales belong to blocks alone, and wait for nobody.
//
// A warp keeps a patch of the matrix in registers, eight vectors a lane, from when it measures them
// until they are encoded; as soon as one is, the warp asks for that of its next patch. Blocks are
// SIDE columns wide, and as high or one row high:
//
//     SIDE    a patch     blocks
//     32      32 x 32     32 x 32; or 1 x 32, and in a second plane 32 x 1
//     128     8 x 128     1 x 128; or 128 x 128, each of which the warps of a thread block share
#include "cuda/cast.h"

using namespace zerocast;

// Patches of one weight: columns of 2^log2_down of them, of as many as a thread block takes in so
// many steps. Where warps share a block, its rows are those of one row of blocks.
struct PatchTile {
    i32 weight;  // row of the table
    short log2_down, steps;
    i64 row, row_end, col;  // of the matrix
};
static_assert(sizeof(PatchTile) == 32, "four words of the table that Python makes");

constexpr int VECTORS = 8;  // of a lane in a patch, below each other

template <int SIDE, bool SQUARE>
struct Patch {
    static constexpr int ACROSS = SIDE / 4, DOWN = 32 / ACROSS;  // lanes
    static constexpr int ROWS = VECTORS * DOWN;
    static constexpr bool SHARES = SQUARE && ROWS < SIDE;  // whether warps share a block
    static constexpr int WARPS = SHARES ? SIDE / ROWS : 4;
    static constexpr int RESIDENT = SHARES ? 2 : 5;  // thread blocks of a multiprocessor
};

// The two or three lowest bits of i in the opposite order.
template <int BITS>
static ZEROCAST_FN int reversed(int i) {
    return BITS == 2 ? (i & 1) << 1 | (i >> 1 & 1) : (i & 1) << 2 | (i & 2) | (i >> 2 & 1);
}

// Of 2^BITS values, the largest among 2^BITS lanes: those whose numbers differ in the bits from
// that of `apart` on. The lane in which these bits are i gets that of value reversed<BITS>(i).
template <int BITS>
static ZEROCAST_FN i32 largest_of_lanes(i32 (&values)[1 << BITS], int apart) {
#pragma unroll
    for (int half = (1 << BITS) / 2; half > 0; half /= 2, apart *= 2) {
        bool upper = threadIdx.x & apart;
#pragma unroll
        for (int k = 0; k < half; k++) {
            i32 mine = upper ? values[k + half] : values[k];
            i32 other = upper ? values[k] : values[k + half];
            values[k] = Scalar::max(mine, __shfl_xor_sync(ALL_LANES, other, apart));
        }
    }
    return values[0];
}

// Where a lane's vectors of one patch are.
template <class P>
struct Place {
    i64 patch_row, row;    // of the patch, and of the lane's first vector
    int patch_col, col;    // of all its vectors
    int rows_left, count;  // rows of the tile from `row` on; vectors that start in the matrix

    ZEROCAST_FN Place(const PatchTile& tile, int cols, int patch) {
        int lane = threadIdx.x % 32;
        patch_row = tile.row + (patch & ((1 << tile.log2_down) - 1)) * P::ROWS;
        patch_col = (int)tile.col + (patch >> tile.log2_down) * (4 * P::ACROSS);
        row = patch_row + lane / P::ACROSS;
        col = patch_col + lane % P::ACROSS * 4;
        rows_left = patch_col < cols ? (int)(tile.row_end - row) : 0;
        count = col < cols && rows_left > 0 ? (rows_left + P::DOWN - 1) / P::DOWN : 0;
    }

    ZEROCAST_FN i64 row_of(int vector) const { return row + vector * P::DOWN; }
    ZEROCAST_FN bool has_row(int vector) const { return vector * P::DOWN < rows_left; }
};

template <class Numerics, int SIDE, bool SQUARE>
class PatchCast {
  public:
    typedef typename Numerics::Format F;
    typedef Patch<SIDE, SQUARE> P;

    ZEROCAST_FN PatchCast(const CastShard& shard, const PatchTile& tile, const NumericsTable& table,
                          i32 (*of_warps)[P::WARPS], int& turn)
        : shard_(shard),
          tile_(tile),
          numerics_(numerics_of<Numerics>(table, shard.tensor_amax, shard.delayed)),
          of_warps_(of_warps),
          turn_(turn),
          cols_((int)shard.rowwise.grid.cols),
          second_(SIDE == 32 && !SQUARE ? shard.columnwise.codes : nullptr) {}

    // Whether every vector can be read, and its codes written, at once.
    template <class T>
    ZEROCAST_FN bool takes_vectors(const T* master) const {
        i64 first = tile_.row * cols_ + tile_.col, code = byte_of<F>(shard_, first);
        return cols_ % 4 == 0 && (u64)(master + first) % (4 * sizeof *master) == 0
               && (u64)(shard_.rowwise.codes + code) % (F::BITS / 2) == 0
               && (!second_ || (u64)(second_ + code) % (F::BITS / 2) == 0);
    }

    // The warp's patches. What would lie past an edge is read from inside, of the same block.
    template <class Nominal, class T>
    ZEROCAST_FN void at_once(const T* master) {
        Four four[VECTORS] = {};
        u32 step = (u32)(P::DOWN * cols_);
        int patch = threadIdx.x / 32, steps = tile_.steps;
        Place<P> place(tile_, cols_, patch);
        const T* from;
        int last;
        auto find = [&] {
            i64 row = place.rows_left > 0 ? place.row : tile_.row_end - 1;
            last = place.rows_left > 0 ? (place.rows_left - 1) / P::DOWN : 0;
            from = master + row * cols_ + Scalar::min(place.col, cols_ - 4);
        };
        auto ask = [&](int k) {
            four[k].load_at_once(ahead(from, step * (u32)sizeof(T), Scalar::min(k, last)), steps);
        };
        find();
#pragma unroll
        for (int k = 0; k < VECTORS; k++) ask(k);
#pragma unroll 1
        while (steps-- > 0) {
            measure<T>(place, four, [](i32 amax) { return rounded_amax<Nominal>(amax); });
#pragma unroll
            for (int k = 0; k < VECTORS; k++) four[k].forget_values();
            u8 *codes = of_codes(shard_.rowwise.codes, place), *second = of_codes(second_, place);
            int count = place.count;
            place = Place<P>(tile_, cols_, patch += P::WARPS);
            find();
#pragma unroll
            for (int k = 0; k < VECTORS; k++) {
                Vec4 x = round_vec4<Nominal>(four[k].template values<T>());
                encode(k, x, [&](bool is_second, u32 word) {
                    u8* to = ahead(is_second ? second : codes, (u32)bytes_of<F>(step), k);
                    store_codes_at_once<F>(to, word, k < count);
                });
                ask(k);
            }
        }
    }

    // The same at any addresses. Vectors go round, because registers cannot be indexed.
    template <class T>
    ZEROCAST_FN void anywhere(const T* master) {
        constexpr int A_BYTE = 8 / F::BITS;
#pragma unroll 1
        for (int step = 0; step < tile_.steps; step++) {
            Place<P> place(tile_, cols_, threadIdx.x / 32 + step * P::WARPS);
            Four four[VECTORS] = {};
            auto next = [&](Four last) {
                Four first = four[0];
#pragma unroll
                for (int k = 1; k < VECTORS; k++) four[k - 1] = four[k];
                four[VECTORS - 1] = last;
                return first;
            };
            int left = place.count ? cols_ - place.col : 0;
#pragma unroll 1
            for (int k = 0; k < VECTORS; k++) {
                Four read{};
                if (k < place.count)
                    read.load_one_by_one(master + place.row_of(k) * cols_ + place.col, left);
                next(read);
            }
            measure<T>(place, four, [&](i32 amax) { return rounded_amax(amax, shard_.round_to); });
#pragma unroll 1
            for (int k = 0; k < VECTORS; k++) {
                Vec4 x = next(Four{}).template values<T>(), rounded;
                with_nominal(shard_.round_to,
                             [&](auto nominal) { rounded = round_vec4<decltype(nominal)>(x); });
                encode(k, rounded, [&](bool is_second, u32 word) {
                    u8* to = of_codes(is_second ? second_ : shard_.rowwise.codes, place)
                             + bytes_of<F>(k * P::DOWN * (i64)cols_);
                    for (int b = 0; b < F::BITS / 2; b++) {
                        if (k < place.count && b * A_BYTE < left) to[b] = (u8)(word >> 8 * b);
                    }
                });
            }
        }
    }

    // Raises the tensor's amax, after all patches, where somebody asks for it.
    ZEROCAST_FN void close() const {
        if (!shard_.tensor_amax) return;
        i32 largest = __reduce_max_sync(ALL_LANES, largest_);
        if (threadIdx.x % 32 == 0)
            atomicMax(global(shard_.tensor_amax), rounded_amax(largest, shard_.round_to));
    }

  private:
    // The code of the lane's first element in a patch.
    ZEROCAST_FN u8* of_codes(u8* plane, const Place<P>& place) const {
        return global(plane) + byte_of<F>(shard_, place.row * cols_ + place.col);
    }

    // What the patch's elements are multiplied by, from the amaxes of its blocks, which are stored.
    // All lanes take part. `round` is that of an amax.
    template <class T, class Round>
    ZEROCAST_FN void measure(const Place<P>& place, const Four (&four)[VECTORS],
                             const Round& round) {
        i32 of_vectors[VECTORS], of_columns[4] = {};
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            i32 magnitude[4];
            magnitudes_of(four[k].template values<T>(), magnitude);
            of_vectors[k] = largest_of(magnitude);
            for (int j = 0; j < 4; j++) of_columns[j] = Scalar::max(of_columns[j], magnitude[j]);
        }
        const CodePlane& plane = shard_.rowwise;
        i64 blocks_w = (u32)(cols_ + SIDE - 1) / SIDE, block_col = place.patch_col / SIDE;
        int lane = threadIdx.x % 32;
        if constexpr (SQUARE) {
            i32 largest = largest_of_all(of_vectors);
            bool mine = lane == 0 && place.count > 0 && (!P::SHARES || threadIdx.x == 0);
            i64 block = place.patch_row / SIDE * blocks_w + block_col;
            multiplier_ = multiplier_under(plane, block, largest, round, mine);
            return;
        }
        i32 largest = largest_of_lanes<3>(of_vectors, 1);
#pragma unroll
        for (int apart = 8; apart < P::ACROSS; apart *= 2)
            largest = Scalar::max(largest, __shfl_xor_sync(ALL_LANES, largest, apart));
        int vector = reversed<3>(lane);
        bool mine = lane % P::ACROSS < 8 && place.has_row(vector);
        i64 block = place.row_of(vector) * blocks_w + block_col;
        multiplier_ = multiplier_under(plane, block, largest, round, mine);
        if (!second_) return;
        largest = largest_of_lanes<2>(of_columns, 8);
        int col = place.col + reversed<2>(lane / 8);
        mine = col < cols_ && place.patch_row < tile_.row_end;
        float multiplier = multiplier_under(shard_.columnwise, place.patch_row / SIDE * cols_ + col,
                                            largest, round, mine);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            of_columns_[j] = __shfl_sync(ALL_LANES, multiplier, lane % 8 + 8 * reversed<2>(j), 32);
        }
    }

    // The largest in the warp, or in the thread block.
    ZEROCAST_FN i32 largest_of_all(const i32 (&of_vectors)[VECTORS]) {
        i32 largest = of_vectors[0];
#pragma unroll
        for (int k = 1; k < VECTORS; k++) largest = Scalar::max(largest, of_vectors[k]);
        largest = __reduce_max_sync(ALL_LANES, largest);
        if constexpr (P::SHARES) {
            // Two in turn, so that none is written anew before all have read it.
            i32* of_warps = of_warps_[turn_ ^= 1];
            if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
            __syncthreads();
            largest = __reduce_max_sync(ALL_LANES, of_warps[threadIdx.x % P::WARPS]);
        }
        return largest;
    }

    // Of a block whose elements have this magnitude at most. Its amax is stored where it is `mine`.
    template <class Round>
    ZEROCAST_FN float multiplier_under(const CodePlane& plane, i64 block, i32 largest,
                                       const Round& round, bool mine) {
        largest_ = Scalar::max(largest_, largest);
        i32 amax = round(largest);
        if (mine) global(plane.block_amax)[block] = amax;
        return numerics_.template multiplier<Scalar>(amax);
    }

    // Vector k, rounded, in all planes: calls store(whether in the second one, four codes).
    template <class Store>
    ZEROCAST_FN void encode(int k, const Vec4& x, const Store& store) const {
        float multiplier =
            SQUARE ? multiplier_ : __shfl_sync(ALL_LANES, multiplier_, reversed<3>(k), 8);
        Vec4 scaled;
        for (int j = 0; j < 4; j++) scaled.x[j] = x.x[j] * multiplier;
        store(false, encode_vec4<F>(scaled));
        if (!second_) return;
        for (int j = 0; j < 4; j++) scaled.x[j] = x.x[j] * of_columns_[j];
        store(true, encode_vec4<F>(scaled));
    }

    const CastShard& shard_;
    const PatchTile& tile_;
    Numerics numerics_;
    i32 (*of_warps_)[P::WARPS];
    int& turn_;
    int cols_;
    u8* second_;
    float multiplier_;     // of the lane's block: where they are rows, that of one vector
    float of_columns_[4];  // in the second plane
    i32 largest_ = 0;      // magnitude so far
};

template <class Numerics, int SIDE, bool SQUARE>
__global__ void __launch_bounds__(32 * Patch<SIDE, SQUARE>::WARPS, Patch<SIDE, SQUARE>::RESIDENT)
    partial_amax_cast(const CastShard* __restrict__ shards, const PatchTile* __restrict__ tiles,
                      i64 count, const __grid_constant__ NumericsTable table) {
    __shared__ i32 of_warps[2][Patch<SIDE, SQUARE>::WARPS];
    __shared__ CastShard shard;  // read at each patch, and where it would take registers
    constexpr int WORDS = sizeof(CastShard) / sizeof(i64);
    int turn = 0;
    for (i64 t = blockIdx.x; t < count; t += gridDim.x) {
        PatchTile tile = tiles[t];
        __syncthreads();  // nobody reads that of the tile before
        if (threadIdx.x < WORDS)
            ((i64*)&shard)[threadIdx.x] = ((const i64*)&shards[tile.weight])[threadIdx.x];
        __syncthreads();
        PatchCast<Numerics, SIDE, SQUARE> cast(shard, tile, table, of_warps, turn);
        bool at_once = false;
        with_master(shard, [&](auto* master) { at_once = cast.takes_vectors(master); });
        if (at_once) {
            with_rounded_master(shard, [&](auto* master, auto nominal) {
                cast.template at_once<decltype(nominal)>(master);
            });
        } else {
            with_master(shard, [&](auto* master) { cast.anywhere(master); });
        }
        cast.close();
    }
}
