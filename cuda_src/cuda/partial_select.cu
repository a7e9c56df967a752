// partial_select: 4-over-6, what this rank knows for the choice between two scales a block.
//
// A lane takes one row inside a block, sixteen elements from left to right, and the sixteen lanes
// of a block add up their rows. There are eight magnitudes of codes under two scales: each lane
// works out what one of them means, and elements fetch the meaning of theirs by a shuffle. Lanes 7
// to 15 all know the largest code's, so that codes need no upper limit: an element is not above its
// block's amax, and that one, though scales are rounded, lies far below LARGEST_OF_TWO under both,
// or all codes mean the same (tests/kernels/conversions.cpp).
//
// In a row of blocks that ranks share, a row inside a block that is whole leaves its errors, and
// one that is cut its elements, for select to put together.
#include "cuda/conversions.h"
#include "cuda/four_over_six.h"
#include "cuda/tiles.h"

using namespace zerocast;

constexpr int QUADS = CHOICE_SIDE / 4;                 // of a row inside a block
constexpr int MOST_BLOCKS = Tile::COLS / CHOICE_SIDE;  // of a tile
constexpr int AT_ONCE = THREADS / CHOICE_SIDE, STEP = AT_ONCE * CHOICE_SIDE;
constexpr int MOST_ROUNDS = Tile::COLS / STEP;

// Of each block of a tile, map4 and map6 side by side.
struct TileScales {
    float map[2 * MOST_BLOCKS], multiplier[2 * MOST_BLOCKS];
};

constexpr int ACROSS = 2 * QUADS, DOWN = 32 / ACROSS;  // lanes that read two blocks of a warp

// Two blocks, by which the lanes of a warp hand rows to each other. With one more quad a row, eight
// lanes touch all banks along a row and down a column.
struct WarpRows {
    float4 quads[CHOICE_SIDE][ACROSS + 1];
};

// What a thread does in a tile: row number lane_ inside the blocks first_ + AT_ONCE * n.
template <bool SQUARED>
class TileErrors {
  public:
    ZEROCAST_FN TileErrors(const CastShard& shard, const Tile& tile, TileScales& scales,
                           i64 scale_max)
        : shard_(shard),
          tile_(tile),
          scales_(scales),
          numerics_(*shard.tensor_amax, scale_max),
          lane_(threadIdx.x % CHOICE_SIDE),
          first_(threadIdx.x / CHOICE_SIDE),
          element_(tile.element + lane_ * shard.rowwise.grid.cols + first_ * CHOICE_SIDE) {
        const Grid& grid = shard.rowwise.grid;
        i64 blocks_w = grid.blocks_w(), block_row = tile.first_block / blocks_w;
        i64 block = tile.first_block + first_;
        i64 cut = find(shard.candidates.cut, shard.candidates.cuts, block_row);
        if (cut < 0)
            choices_ = shard.candidates.choices + block;
        else
            errors_ =
                shard.candidates.errors_of(grid, cut, lane_) + (block - block_row * blocks_w) * 2;
#pragma unroll
        for (int n = 0; n < MOST_ROUNDS; n++) {
            i64 element = element_ + n * STEP;
            if (lane_ >= tile.rows || width(n) <= 0) continue;
            if (element >= shard.start && element + width(n) <= shard.end)
                whole_ |= 1u << n;
            else if (element + width(n) > shard.start && element < shard.end)
                cut_ |= 1u << n;
        }
    }

    // Fills the scales; a barrier is needed before they are read.
    ZEROCAST_FN void derive() const {
        for (int i = threadIdx.x; i < 2 * tile_.blocks; i += THREADS) {
            i32 amax = shard_.rowwise.block_amax[tile_.first_block + i / 2];
            i32 stored = numerics_.template stored<Scalar>(amax, i % 2 == 0);
            scales_.map[i] = decode<E4M3, Scalar>(stored);
            scales_.multiplier[i] = numerics_.template multiplier_under<Scalar>(stored);
        }
    }

    // Whether every row is 16 elements wide in each block, this rank's, and can be read at once.
    template <class T>
    ZEROCAST_FN bool takes_vectors(const T* master) const {
        i64 cols = shard_.rowwise.grid.cols, last = (tile_.rows - 1) * cols + tile_.cols;
        return choices_ && tile_.cols % CHOICE_SIDE == 0 && tile_.element >= shard_.start
               && tile_.element + last <= shard_.end
               && vectors_aligned(master + tile_.element, 4 * sizeof *master, tile_,
                                  shard_.rowwise.grid);
    }

    // Where it takes vectors. A warp reads two blocks, four rows at a time so that lanes side by
    // side read what lies side by side, while the blocks before are worked on; each lane takes its
    // row out of shared memory.
    template <class Nominal, class T>
    ZEROCAST_FN void at_once(const T* master, WarpRows& rows) const {
        int lane = threadIdx.x % 32, across = lane % ACROSS, down = lane / ACROSS;
        i64 cols = shard_.rowwise.grid.cols;
        int col = (first_ & ~1) * CHOICE_SIDE + 4 * across;  // in the tile
        int reads = (tile_.cols - col + STEP - 1) / STEP;    // rounds in which there are columns
        const T* from[QUADS];
#pragma unroll
        for (int k = 0; k < QUADS; k++) {
            // A row that the matrix does not have is read from the last one.
            int row = Scalar::min(k * DOWN + down, tile_.rows - 1);
            from[k] = master + tile_.element + row * cols + col;
        }
        Four four[QUADS] = {};
        auto ask = [&](u32 wanted) {
#pragma unroll
            for (int k = 0; k < QUADS; k++) {
                four[k].load_at_once(from[k], wanted);
                from[k] += STEP;
            }
        };
        ask(reads > 0);
        for_each_block([&](int n) {
#pragma unroll
            for (int k = 0; k < QUADS; k++) {
                Vec4 q = round_vec4<Nominal>(four[k].template values<T>());
                rows.quads[k * DOWN + down][across] = float4{q.x[0], q.x[1], q.x[2], q.x[3]};
            }
            ask(n + 1 < reads);
            __syncwarp();
            BlockErrors errors(*this, n);
#pragma unroll
            for (int k = 0; k < QUADS; k++) {
                float4 x = rows.quads[lane_][lane / CHOICE_SIDE * QUADS + k];
                errors.add(Vec4{{x.x, x.y, x.z, x.w}});
            }
            __syncwarp();  // before the next blocks are written there
            decide(n, errors.sum);
        });
    }

    // Rows of any width, anywhere. What lies beyond is 0, and so is its error.
    template <class T>
    ZEROCAST_FN void anywhere(const T* master) const {
        for_each_block([&](int n) {
            int wanted = whole_ >> n & 1 ? width(n) : 0;
            BlockErrors errors(*this, n);
#pragma unroll 1
            for (int at = 0; at < CHOICE_SIDE; at += 4) {
                Vec4 x{};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    if (at + j < wanted)
                        x.x[j] = round_element(value_of(master[element_ + n * STEP + at + j]),
                                               shard_.round_to);
                }
                errors.add(x);
            }
            if (choices_)
                decide(n, errors.sum);
            else
                leave_errors(n, errors.sum);
        });
    }

    // Leaves the owned elements of rows that are cut.
    template <class T>
    ZEROCAST_FN void leave_elements(const T* master) const {
        const Candidates& candidates = shard_.candidates;
#pragma unroll 1
        for (int n = 0; cut_ >> n; n++) {
            if (!(cut_ >> n & 1)) continue;
            i64 element = element_ + n * STEP, end = element + width(n);
            i64 segment = find(candidates.segments, candidates.segment_count, element);
            float* to = candidates.elements + segment * CHOICE_SIDE - element;
            if (end > shard_.end) end = shard_.end;
            for (i64 e = element > shard_.start ? element : shard_.start; e < end; e++)
                to[e] = round_element(value_of(master[e]), shard_.round_to);
        }
    }

  private:
    // The errors of the row inside block n. All lanes of the warp take part.
    struct BlockErrors {
        float value4, value6, multiplier4, multiplier6;
        Errors<Scalar> sum{};

        ZEROCAST_FN BlockErrors(const TileErrors& tile, int n) {
            int b = tile.first_ + n * AT_ONCE;
            float map = tile.scales_.map[2 * b + tile.lane_ / 8];
            float value = tile.numerics_.template dequantized<Scalar>(tile.lane_ % 8, map);
            int last = tile.lane_ < E2M1::MAX_CODE ? tile.lane_ : E2M1::MAX_CODE;
            value4 = __shfl_sync(ALL_LANES, value, last, CHOICE_SIDE);
            value6 = __shfl_sync(ALL_LANES, value, last + 8, CHOICE_SIDE);
            multiplier4 = tile.scales_.multiplier[2 * b];
            multiplier6 = tile.scales_.multiplier[2 * b + 1];
        }

        ZEROCAST_FN void add(const Vec4& q) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float x = absolute<Scalar>(q.x[j]);
                TwoCodes code(x * multiplier4, x * multiplier6);
                float of4 = __shfl_sync(ALL_LANES, value4, (int)code.low, CHOICE_SIDE);
                float of6 = __shfl_sync(ALL_LANES, value6, (int)code.high, CHOICE_SIDE);
                sum.map4 = sum.map4 + FourOverSixNumerics::error<SQUARED, Scalar>(x, of4);
                sum.map6 = sum.map6 + FourOverSixNumerics::error<SQUARED, Scalar>(x, of6);
            }
        }
    };

    // Calls work(n) as long as a lane of the warp has a block.
    template <class Work>
    ZEROCAST_FN void for_each_block(const Work& work) const {
#pragma unroll 1
        for (int n = 0; (first_ & ~1) + n * AT_ONCE < tile_.blocks; n++) work(n);
    }

    // Columns of block n.
    ZEROCAST_FN int width(int n) const {
        int left = tile_.cols - first_ * CHOICE_SIDE - n * STEP;
        return left < CHOICE_SIDE ? left : CHOICE_SIDE;
    }

    ZEROCAST_FN void decide(int n, Errors<Scalar> errors) const {
        if (!(whole_ >> n & 1)) errors = {};
        u8 choice = choose(errors);
        if (lane_ == 0 && first_ + n * AT_ONCE < tile_.blocks)
            global(choices_)[n * AT_ONCE] = choice;
    }

    ZEROCAST_FN void leave_errors(int n, const Errors<Scalar>& errors) const {
        if (!(whole_ >> n & 1)) return;
        float* to = global(errors_) + 2 * n * AT_ONCE;
        to[0] = errors.map4;
        to[1] = errors.map6;
    }

    const CastShard& shard_;
    const Tile& tile_;
    TileScales& scales_;
    FourOverSixNumerics numerics_;
    int lane_, first_;
    i64 element_;              // flat index of the first one in block first_
    u32 whole_ = 0, cut_ = 0;  // bit n: whether this rank owns all or some of the row in block n
    u8* choices_ = nullptr;    // of blocks from first_ on, or
    float* errors_ = nullptr;  // of the row in them, where ranks share it
};

template <bool SQUARED>
__global__ void __launch_bounds__(THREADS, 5)
    partial_select(const CastShard* __restrict__ shards, const Tile* __restrict__ tiles, i64 count,
                   const __grid_constant__ NumericsTable table) {
    __shared__ TileScales scales;
    __shared__ WarpRows rows[THREADS / 32];
    for (i64 t = blockIdx.x; t < count; t += gridDim.x) {
        Tile tile = tiles[t];
        const CastShard& shard = shards[tile.weight];
        TileErrors<SQUARED> errors(shard, tile, scales, table.scale_max);
        errors.derive();
        __syncthreads();
        with_rounded_master(shard, [&](auto* master, auto nominal) {
            if (errors.takes_vectors(master))
                errors.template at_once<decltype(nominal)>(master, rows[threadIdx.x / 32]);
            else
                errors.anywhere(master);
            errors.leave_elements(master);
        });
        __syncthreads();  // before the next tile derives its scales
    }
}
