// partial_amax_cast: of the rows of blocks that a shard holds whole, what partial_amax does, and in
// the same read of the master the codes: their scales depend on no other block and no other rank.
//
// A warp keeps a patch of the matrix in registers, 8 rows of 128 columns, from when it measures
// them until they are encoded. So it reads 512 bytes and writes 128 of FP8 side by side. Its next
// two patches are copied to shared memory meanwhile; where that has no room for them, it loads a
// vector of the next one as soon as one has been encoded. Blocks are SIDE columns wide, and
// as high or one row high; in a second plane SIDE rows high and one column wide. Those that are
// high are shared by as many warps of a thread block, one above the other, as they have patches:
//
//     SIDE    blocks                               warps
//     32      32 x 32, or 1 x 32 and 32 x 1        4
//     128     128 x 128                            16
//     128     1 x 128                              4, which share none
#include "cuda/async_copy.h"
#include "cuda/cast.h"

using namespace zerocast;

// Patches of one weight: columns of 2^log2_down of them, of as many as a thread block takes in so
// many steps. Where warps share blocks, they take in one step the rows of one row of blocks.
struct PatchTile {
    i32 weight;  // row of the table
    short log2_down, steps;
    i64 row, row_end, col;  // of the matrix
};
static_assert(sizeof(PatchTile) == 32, "four words of the table that Python makes");

constexpr int VECTORS = 8, LANES = 32, COLS = 4 * LANES;  // of a patch: one vector a lane and row

template <int SIDE, bool SQUARE>
struct Patch {
    static constexpr bool SECOND = SIDE == 32 && !SQUARE;  // whether there may be a second plane
    static constexpr bool SHARES = SQUARE || SECOND;       // whether warps share a block
    static constexpr int WARPS = SHARES ? SIDE / VECTORS : 4;
    static constexpr bool COPIES = WARPS == 4;  // whether shared memory has room for masters
    static constexpr int RESIDENT = WARPS > 4 ? 2 : 5;  // thread blocks of a multiprocessor
    static constexpr int ACROSS = SIDE / 4;             // lanes of a block
    // Magnitudes that a warp passes to the others: of its part of each block, or of each column.
    static constexpr int EXCHANGED = SECOND ? COLS : COLS / SIDE;
};

// What the warps of a thread block exchange.
template <class P>
struct alignas(16) Exchanged {
    i32 magnitudes[2][P::WARPS][P::EXCHANGED];  // of two steps: a warp may still read the older
    float multipliers[P::SECOND ? COLS : 1];
};

// Masters of two patches of each warp. A lane reads what it copied itself: no barrier is needed.
template <class P>
struct alignas(16) Copies {
    u8 bytes[2][P::COPIES ? P::WARPS : 1][P::COPIES ? VECTORS * LANES * 16 : 16];
};

// The three lowest bits of i in the opposite order.
static ZEROCAST_FN int reversed(int i) { return (i & 1) << 2 | (i & 2) | (i >> 2 & 1); }

// Of eight values, the largest among eight neighbouring lanes: lane i of them gets that of value
// reversed(i).
static ZEROCAST_FN i32 largest_of_eight(i32 (&values)[VECTORS]) {
#pragma unroll
    for (int half = VECTORS / 2, apart = 1; half > 0; half /= 2, apart *= 2) {
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

// The largest of so many neighbouring lanes.
template <int ACROSS>
static ZEROCAST_FN i32 largest_of_lanes(i32 largest) {
    if constexpr (ACROSS == LANES) return __reduce_max_sync(ALL_LANES, largest);
#pragma unroll
    for (int apart = 1; apart < ACROSS; apart *= 2)
        largest = Scalar::max(largest, __shfl_xor_sync(ALL_LANES, largest, apart));
    return largest;
}

// Where a lane's vectors of one patch are.
struct Place {
    i64 row;    // of the first of them
    int col;    // of all
    int rows;   // of the tile from `row` on; 0 or less where the patch has none
    int count;  // vectors that start in the matrix, or more

    ZEROCAST_FN Place(const PatchTile& tile, int cols, int patch) {
        row = tile.row + (patch & ((1 << tile.log2_down) - 1)) * VECTORS;
        col = (int)tile.col + (patch >> tile.log2_down) * COLS + threadIdx.x % LANES * 4;
        rows = (int)(tile.row_end - row);
        count = col < cols ? rows : 0;
    }
};

template <class Numerics, int SIDE, bool SQUARE, bool SCALES>
class PatchCast {
  public:
    typedef typename Numerics::Format F;
    typedef Patch<SIDE, SQUARE> P;

    ZEROCAST_FN PatchCast(const CastShard& shard, const PatchTile& tile, const NumericsTable& table,
                          Exchanged<P>& exchanged, Copies<P>& copies, int& half)
        : shard_(shard),
          tile_(tile),
          numerics_(numerics_of<Numerics>(table, shard.tensor_amax, shard.delayed)),
          exchanged_(exchanged),
          copies_(copies),
          half_(half),
          cols_((int)shard.rowwise.grid.cols),
          second_(P::SECOND ? shard.columnwise.codes : nullptr) {}

    // Whether every vector can be read, and its codes written, at once.
    template <class T>
    ZEROCAST_FN bool takes_vectors(const T* master) const {
        i64 first = tile_.row * cols_ + tile_.col, code = byte_of<F>(shard_, first);
        return cols_ % 4 == 0 && (u64)(master + first) % (4 * sizeof *master) == 0
               && (u64)(shard_.rowwise.codes + code) % (F::BITS / 2) == 0
               && (!second_ || (u64)(second_ + code) % (F::BITS / 2) == 0);
    }

    // The warp's patches. Past an edge, elements of the same block inside the matrix are read.
    template <class Nominal, class T>
    ZEROCAST_FN void at_once(const T* master) {
        Four four[VECTORS] = {};
        int patch = threadIdx.x / LANES, steps = tile_.steps;
        Place place(tile_, cols_, patch);
        const T* from;
        int last;
        auto find = [&] {
            i64 row = place.rows > 0 ? place.row : tile_.row_end - 1;
            last = place.rows > 0 ? place.rows - 1 : 0;
            from = master + row * cols_ + Scalar::min(place.col, cols_ - 4);
        };
        auto load = [&](int k) {
            four[k].load_at_once(ahead(from, cols_ * (u32)sizeof(T), Scalar::min(k, last)), steps);
        };
        find();
#pragma unroll
        for (int k = 0; k < VECTORS; k++) load(k);
#pragma unroll 1
        while (steps-- > 0) {
            measure<T>(place, four, [](i32 amax) { return rounded_amax<Nominal>(amax); });
#pragma unroll
            for (int k = 0; k < VECTORS; k++) four[k].forget_values();
            u8 *codes = of_codes(shard_.rowwise.codes, place), *second = of_codes(second_, place);
            int count = place.count;
            place = Place(tile_, cols_, patch += P::WARPS);
            find();
#pragma unroll
            for (int k = 0; k < VECTORS; k++) {
                Vec4 x = round_vec4<Nominal>(four[k].template values<T>());
                encode(k, x, [&](bool is_second, u32 word) {
                    u8* to = ahead(is_second ? second : codes, (u32)bytes_of<F>(cols_), k);
                    store_codes_at_once<F>(to, word, k < count);
                });
                load(k);
            }
        }
    }

    // The same where shared memory holds masters: those of a patch are worked on while those of the
    // next two are copied. Past an edge there are zeros.
    template <class Nominal, class T>
    ZEROCAST_FN void copied(const T* master) {
        constexpr int BYTES = 4 * sizeof(T);
        int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
        auto mine = [&](int step, int k) {
            return &copies_.bytes[step % 2][warp][(k * LANES + lane) * BYTES];
        };
        auto copy = [&](int step) {
            Place place(tile_, cols_, warp + step * P::WARPS);
            const T* from = master + place.row * cols_ + place.col;
            int count = step < tile_.steps ? place.count : 0;
#pragma unroll
            for (int k = 0; k < VECTORS; k++)
                copy_async<BYTES>(mine(step, k), ahead(from, cols_ * (u32)sizeof(T), k), k < count);
            end_copies();
        };
        copy(0);
        copy(1);
#pragma unroll 1
        for (int step = 0; step < tile_.steps; step++) {
            wait_for_copies<1>();
            Place place(tile_, cols_, warp + step * P::WARPS);
            Four four[VECTORS];
#pragma unroll
            for (int k = 0; k < VECTORS; k++) four[k].template load_shared<BYTES>(mine(step, k));
            measure<T>(place, four, [](i32 amax) { return rounded_amax<Nominal>(amax); });
#pragma unroll
            for (int k = 0; k < VECTORS; k++) four[k].forget_values();
            copy(step + 2);
            u8 *codes = of_codes(shard_.rowwise.codes, place), *second = of_codes(second_, place);
#pragma unroll
            for (int k = 0; k < VECTORS; k++) {
                Vec4 x = round_vec4<Nominal>(four[k].template values<T>());
                encode(k, x, [&](bool is_second, u32 word) {
                    u8* to = ahead(is_second ? second : codes, (u32)bytes_of<F>(cols_), k);
                    store_codes_at_once<F>(to, word, k < place.count);
                });
            }
        }
        wait_for_copies<0>();
    }

    // The same at any addresses. Vectors are rotated, because registers cannot be indexed.
    template <class T>
    ZEROCAST_FN void anywhere(const T* master) {
        constexpr int A_BYTE = 8 / F::BITS;
#pragma unroll 1
        for (int step = 0; step < tile_.steps; step++) {
            Place place(tile_, cols_, threadIdx.x / LANES + step * P::WARPS);
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
                    read.load_one_by_one(master + (place.row + k) * cols_ + place.col, left);
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
                             + bytes_of<F>(k * (i64)cols_);
                    for (int b = 0; b < F::BITS / 2; b++) {
                        if (k < place.count && b * A_BYTE < left) to[b] = (u8)(word >> 8 * b);
                    }
                });
            }
        }
    }

    // Raises the tensor's amax, after all patches, where there is one.
    ZEROCAST_FN void close() const {
        if (!shard_.tensor_amax) return;
        i32 largest = __reduce_max_sync(ALL_LANES, largest_);
        if (threadIdx.x % LANES == 0)
            atomicMax(global(shard_.tensor_amax), rounded_amax(largest, shard_.round_to));
    }

  private:
    // The code of the lane's first element in a patch.
    ZEROCAST_FN u8* of_codes(u8* plane, const Place& place) const {
        return global(plane) + byte_of<F>(shard_, place.row * cols_ + place.col);
    }

    // What the patch's elements are multiplied by, from the amaxes of its blocks, which are stored.
    // All threads take part. `round` is that of an amax.
    template <class T, class Round>
    ZEROCAST_FN void measure(const Place& place, const Four (&four)[VECTORS], const Round& round) {
        i32 of_vectors[VECTORS], down[4] = {};
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            i32 magnitude[4];
            magnitudes_of(four[k].template values<T>(), magnitude);
            of_vectors[k] = largest_of(magnitude);
            for (int j = 0; j < 4; j++) down[j] = Scalar::max(down[j], magnitude[j]);
        }
        const CodePlane& plane = shard_.rowwise;
        int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, block_col = place.col / SIDE;
        bool exists = block_col * SIDE < cols_;
        i64 blocks_w = (u32)(cols_ + SIDE - 1) / SIDE;
        if constexpr (SQUARE) {
            i32 largest = of_vectors[0];
#pragma unroll
            for (int k = 1; k < VECTORS; k++) largest = Scalar::max(largest, of_vectors[k]);
            largest = largest_of_lanes<P::ACROSS>(largest);
            auto& exchanged = exchanged_.magnitudes[half_ ^= 1];
            if (lane % P::ACROSS == 0) exchanged[warp][lane / P::ACROSS] = largest;
            __syncthreads();
            largest = largest_of_lanes<P::ACROSS>(exchanged[lane % P::WARPS][lane / P::ACROSS]);
            bool mine = warp == 0 && lane % P::ACROSS == 0 && place.rows > 0 && exists;
            i64 block = place.row / SIDE * blocks_w + block_col;
            multiplier_ = multiplier_under(plane, block, largest, round, mine);
            return;
        }
        i32 largest = largest_of_eight(of_vectors);
#pragma unroll
        for (int apart = VECTORS; apart < P::ACROSS; apart *= 2)
            largest = Scalar::max(largest, __shfl_xor_sync(ALL_LANES, largest, apart));
        int vector = reversed(lane);
        bool mine = lane % P::ACROSS < VECTORS && vector < place.rows && exists;
        i64 block = (place.row + vector) * blocks_w + block_col;
        multiplier_ = multiplier_under(plane, block, largest, round, mine);
        if (!second_) return;
        auto& exchanged = exchanged_.magnitudes[half_ ^= 1];
        *(int4*)&exchanged[warp][4 * lane] = int4{down[0], down[1], down[2], down[3]};
        __syncthreads();
        // A thread makes the multiplier of one column for all.
        static_assert(!P::SECOND || P::WARPS * LANES == COLS,
                      "there are as many threads as columns");
        int column = threadIdx.x, col = place.col - 4 * lane + column;
        largest = exchanged[0][column];
#pragma unroll
        for (int w = 1; w < P::WARPS; w++) largest = Scalar::max(largest, exchanged[w][column]);
        i64 block_row = place.row / SIDE;
        mine = block_row * SIDE < tile_.row_end && col < cols_;
        exchanged_.multipliers[column] =
            multiplier_under(shard_.columnwise, block_row * cols_ + col, largest, round, mine);
        __syncthreads();
        float4 of_columns = *(const float4*)&exchanged_.multipliers[4 * lane];
        of_columns_ = Vec4{{of_columns.x, of_columns.y, of_columns.z, of_columns.w}};
    }

    // Of a block whose elements have this magnitude at most. Where it is `mine`, its amax is
    // stored, or with SCALES its scale.
    template <class Round>
    ZEROCAST_FN float multiplier_under(const CodePlane& plane, i64 block, i32 largest,
                                       const Round& round, bool mine) {
        largest_ = Scalar::max(largest_, largest);
        i32 amax = round(largest);
        constexpr bool BYTES = SCALES && sizeof(typename Numerics::Stored) == 1;
        i32 kept = SCALES ? numerics_.template stored<Scalar>(amax) : amax;
        if (mine && BYTES) global((u8*)plane.block_amax)[block] = (u8)kept;
        if (mine && !BYTES) global(plane.block_amax)[block] = kept;
        return numerics_.template multiplier<Scalar>(amax);
    }

    // Vector k, rounded, in all planes: calls store(whether in the second one, four codes).
    template <class Store>
    ZEROCAST_FN void encode(int k, const Vec4& x, const Store& store) const {
        float multiplier =
            SQUARE ? multiplier_ : __shfl_sync(ALL_LANES, multiplier_, reversed(k), VECTORS);
        Vec4 scaled;
        for (int j = 0; j < 4; j++) scaled.x[j] = x.x[j] * multiplier;
        store(false, encode_vec4<F>(scaled));
        if (!second_) return;
        for (int j = 0; j < 4; j++) scaled.x[j] = x.x[j] * of_columns_.x[j];
        store(true, encode_vec4<F>(scaled));
    }

    const CastShard& shard_;
    const PatchTile& tile_;
    Numerics numerics_;
    Exchanged<P>& exchanged_;
    Copies<P>& copies_;
    int& half_;
    int cols_;
    u8* second_;
    float multiplier_;  // of the lane's block: where they are rows, that of one vector
    Vec4 of_columns_;   // in the second plane
    i32 largest_ = 0;   // magnitude so far
};

template <class Numerics, int SIDE, bool SQUARE, bool SCALES = false>
__global__ void __launch_bounds__(Patch<SIDE, SQUARE>::WARPS* LANES, Patch<SIDE, SQUARE>::RESIDENT)
    partial_amax_cast(const CastShard* __restrict__ shards, const PatchTile* __restrict__ tiles,
                      i64 count, const __grid_constant__ NumericsTable table) {
    __shared__ Exchanged<Patch<SIDE, SQUARE>> exchanged;
    __shared__ Copies<Patch<SIDE, SQUARE>> copies;
    __shared__ CastShard shard;  // read at each patch, and where it would take registers
    constexpr int WORDS = sizeof(CastShard) / sizeof(i64);
    int half = 0;
    for (i64 t = blockIdx.x; t < count; t += gridDim.x) {
        PatchTile tile = tiles[t];
        __syncthreads();  // all have read that of the tile before
        if (threadIdx.x < WORDS)
            ((i64*)&shard)[threadIdx.x] = ((const i64*)&shards[tile.weight])[threadIdx.x];
        __syncthreads();
        PatchCast<Numerics, SIDE, SQUARE, SCALES> cast(shard, tile, table, exchanged, copies, half);
        bool at_once = false;
        with_master(shard, [&](auto* master) { at_once = cast.takes_vectors(master); });
        if (at_once) {
            with_rounded_master(shard, [&](auto* master, auto nominal) {
                if constexpr (Patch<SIDE, SQUARE>::COPIES)
                    cast.template copied<decltype(nominal)>(master);
                else
                    cast.template at_once<decltype(nominal)>(master);
            });
        } else {
            with_master(shard, [&](auto* master) { cast.anywhere(master); });
        }
        cast.close();
    }
}
