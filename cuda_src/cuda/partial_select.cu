// partial_select: 4-over-6, what this rank knows for the choice between two scales a block; and of
// rows of blocks that are whole, in the same read of the master, the codes.
//
// A lane takes one row inside a block, sixteen elements from left to right, and the sixteen lanes
// of a block add up their rows. There are eight magnitudes of codes under two scales: what each of
// them means is worked out once a block, and elements fetch the meaning of theirs by a shuffle.
// Lanes 7 to 15 all know the largest code's, so that codes need no upper limit: an element is not
// above its block's amax, and that one, though scales are rounded, is far below LARGEST_OF_TWO
// under both, or all codes mean the same (tests/kernels/conversions.cpp). Codes that are written
// need one: a block whose amax comes to UNLIMITED or more, or is a NaN, is encoded once more.
//
// In a row of blocks that ranks share, a row inside a block that is whole leaves its errors, and
// one that is cut its elements, for select to put together.
#include "cuda/async_copy.h"
#include "cuda/cast.h"
#include "cuda/four_over_six.h"
#include "cuda/next_tile.h"

using namespace zerocast;

typedef E2M1 F;

constexpr int QUADS = CHOICE_SIDE / 4;  // of a row inside a block
constexpr int AT_ONCE = THREADS / CHOICE_SIDE, STEP = AT_ONCE * CHOICE_SIDE;
constexpr int MOST_ROUNDS = Tile::COLS / STEP;
constexpr int A_WARP = 32 / CHOICE_SIDE, MOST_BLOCKS = A_WARP * MOST_ROUNDS;  // of a warp
constexpr int MAGNITUDES = F::MAX_CODE + 1;
constexpr int ACROSS = A_WARP * QUADS, DOWN = 32 / ACROSS;  // lanes that copy a round's blocks

// What one block is measured by under one of its scales.
struct Candidate {
    float map, multiplier, values[MAGNITUDES];  // what each magnitude of a code means
    bool limited;  // no element is coded by a number above the largest code
};

// What the lanes of a warp hand to each other.
struct WarpMemory {
    Candidate candidates[MOST_BLOCKS][2];  // round by round, under map4 and map6
    alignas(16) Four vectors[MOST_ROUNDS][CHOICE_SIDE][ACROSS];

    // The elements of a round. The rows are in different orders, so that eight lanes touch all
    // banks along a row and down a column.
    ZEROCAST_FN Four& vector(int round, int row, int across) {
        return vectors[round][row][across ^ row % ACROSS];
    }
};

// The codes of a row inside a block under both scales, as its elements come.
struct RowCodes {
    static constexpr u32 NONE = 0u - TwoCodes::ABOVE * 0x11111111u;
    u32 map4[2] = {NONE, NONE}, map6[2] = {NONE, NONE}, signs[2];
    u32 even = 0, odd = 0;  // of a vector: the highest bytes of elements 0 and 2, and of 1 and 3

    // The magnitudes of element j of vector k.
    ZEROCAST_FN void add(int k, int j, const TwoCodes& codes) {
        u32 place = 1u << (16 * (k % 2) + 4 * j);
        map4[k / 2] += codes.low * place;
        map6[k / 2] += codes.high * place;
    }

    // The signs of vector k, after those of the one before.
    ZEROCAST_FN void add_signs(int k, const Vec4& q) {
        u32 even_before = even, odd_before = odd;
        even = __byte_perm(Scalar::bits(q.x[0]), Scalar::bits(q.x[2]), 0x0073);
        odd = __byte_perm(Scalar::bits(q.x[1]), Scalar::bits(q.x[3]), 0x0073);
        if (k % 2 == 0) return;
        signs[k / 2] = (__byte_perm(odd_before, odd, 0x5410) & 0x80808080u)
                       | (__byte_perm(even_before, even, 0x5410) >> 4 & 0x08080808u);
    }

    // Eight of them, in order.
    ZEROCAST_FN u32 word(int w, bool by_map4) const {
        return signs[w] | (by_map4 ? map4[w] : map6[w]);
    }
};

// What a thread does in a tile: row number lane_ inside the blocks first_ + AT_ONCE * n.
template <bool SQUARED>
class TileErrors {
  public:
    ZEROCAST_FN TileErrors(const CastShard& shard, const Tile& tile, WarpMemory& memory,
                           i64 scale_max)
        : shard_(shard),
          tile_(tile),
          memory_(memory),
          numerics_(*shard.tensor_amax, scale_max),
          lane_(threadIdx.x % CHOICE_SIDE),
          first_(threadIdx.x / CHOICE_SIDE),
          element_(tile.element + lane_ * shard.rowwise.grid.cols + first_ * CHOICE_SIDE),
          owns_all_(owns_all(tile, shard.rowwise.grid, shard.start, shard.end)),
          casts_(tile.element >= shard.whole_begin && tile.element < shard.whole_end) {
        choices_ = shard.candidates.choices + tile.first_block + first_;
        if (owns_all_ && lane_ < tile.rows) whole_ = first_bits(rounds());
        if (casts_ && owns_all_) return;  // shared with nobody
        const Grid& grid = shard.rowwise.grid;
        i64 blocks_w = grid.blocks_w(), block_row = tile.first_block / blocks_w;
        i64 cut = find(shard.candidates.cut, shard.candidates.cuts, block_row);
        if (cut >= 0) {
            i64 block = tile.first_block + first_ - block_row * blocks_w;
            errors_ = shard.candidates.errors_of(grid, cut, lane_) + 2 * block;
        }
#pragma unroll 1
        for (int n = 0; !owns_all_ && n < rounds(); n++) {
            i64 element = element_ + n * STEP;
            if (element >= shard.start && element + width(n) <= shard.end)
                whole_ |= 1u << n;
            else if (element + width(n) > shard.start && element < shard.end)
                cut_ |= 1u << n;
        }
    }

    // Whether every row is 16 elements wide in each block and this rank's, and can be read, and its
    // codes written, at once.
    template <class T>
    ZEROCAST_FN bool takes_vectors(const T* master) const {
        const Grid& grid = shard_.rowwise.grid;
        const u8* codes = shard_.rowwise.codes + byte_of<F>(shard_, tile_.element);
        return !errors_ && owns_all_ && tile_.cols % CHOICE_SIDE == 0
               && vectors_aligned(master + tile_.element, 4 * sizeof *master, tile_, grid)
               && (!casts_ || (grid.cols % CHOICE_SIDE == 0 && (u64)codes % 8 == 0));
    }

    // Where it takes vectors. A warp copies all its rounds of two blocks to shared memory, so that
    // adjacent lanes read adjacent addresses, and each lane takes its rows out of that.
    template <class Nominal, class T, class Next>
    ZEROCAST_FN void at_once(const T* master, const Next& next) const {
        int across = threadIdx.x % ACROSS, down = threadIdx.x % 32 / ACROSS;
        i64 cols = shard_.rowwise.grid.cols;
        int col = first_ / A_WARP * A_WARP * CHOICE_SIDE + 4 * across;  // in the tile
        const T* from = master + tile_.element + down * cols + col;
#pragma unroll
        for (int n = 0; n < MOST_ROUNDS; n++) {
#pragma unroll
            for (int row = 0; row < CHOICE_SIDE; row += DOWN)
                copy_async<4 * sizeof(T)>(&memory_.vector(n, row + down, across),
                                          from + row * cols + n * STEP,
                                          row + down < tile_.rows && col + n * STEP < tile_.cols);
            end_copies();
        }
        next.fetch();
        derive();
        u8* codes_of_row = codes_of(0);
        for_each_block([&](int n) {
            wait_for_copies<MOST_ROUNDS - 1>();
            end_copies();  // an empty group, so that this round's is the earliest but the next time
            __syncwarp();
            auto vector = [&](int k) {
                Four four;
                four.load_shared<4 * sizeof(T)>(
                    &memory_.vector(n, lane_, first_ % A_WARP * QUADS + k));
                return round_vec4<Nominal>(four.values<T>());
            };
            BlockErrors errors(*this, n);
            RowCodes codes;
#pragma unroll
            for (int k = 0; k < QUADS; k++) {
                Vec4 q = vector(k);
                errors.add(q, [&](int j, const TwoCodes& both) { codes.add(k, j, both); });
                codes.add_signs(k, q);
            }
            bool by_map4 = decide(n, errors.sum);
            if (!casts_ || !(whole_ >> n & 1)) return;
            const Candidate& candidate = candidate_of(n, by_map4);
            u8* to = codes_of_row + n * bytes_of<F>(STEP);
            if (candidate.limited) {
                *(u64*)to = codes.word(0, by_map4) | (u64)codes.word(1, by_map4) << 32;
                return;
            }
#pragma unroll 1
            for (int k = 0; k < QUADS; k++) {
                Vec4 q = vector(k);
                for (int j = 0; j < 4; j++) q.x[j] = q.x[j] * candidate.multiplier;
                store_codes_at_once<F>(to + 2 * k, encode_vec4<F>(q), 1);
            }
        });
        wait_for_copies<0>();
    }

    // Rows of any width, anywhere. Elements beyond the matrix are 0, and so are their errors.
    template <class T>
    ZEROCAST_FN void anywhere(const T* master) const {
        derive();
        for_each_block([&](int n) {
            int wanted = whole_ >> n & 1 ? width(n) : 0;
            auto element = [&](int at) {
                float x = value_of(master[element_ + n * STEP + at]);
                return round_element(x, shard_.round_to);
            };
            BlockErrors errors(*this, n);
#pragma unroll 1
            for (int at = 0; at < CHOICE_SIDE; at += 4) {
                Vec4 x{};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    if (at + j < wanted) x.x[j] = element(at + j);
                }
                errors.add(x, [](int, const TwoCodes&) {});
            }
            if (errors_) return leave_errors(n, errors.sum);
            float multiplier = candidate_of(n, decide(n, errors.sum)).multiplier;
            if (!casts_) return;
            u8* to = codes_of(n);
#pragma unroll 1
            for (int at = 0; at < wanted; at += 2) {
                u32 low = (u32)encode<F, Scalar>(element(at) * multiplier);
                to[at / 2] = (u8)(low | (u32)encode<F, Scalar>(element(at + 1) * multiplier) << 4);
            }
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
            const Candidate &map4 = tile.candidate_of(n, true), &map6 = tile.candidate_of(n, false);
            int last = tile.lane_ < F::MAX_CODE ? tile.lane_ : F::MAX_CODE;
            value4 = map4.values[last];
            value6 = map6.values[last];
            multiplier4 = map4.multiplier;
            multiplier6 = map6.multiplier;
        }

        // Calls with_codes(j, those of element j under both scales).
        template <class WithCodes>
        ZEROCAST_FN void add(const Vec4& q, const WithCodes& with_codes) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float x = absolute<Scalar>(q.x[j]);
                TwoCodes code(x * multiplier4, x * multiplier6);
                with_codes(j, code);
                float of4 = __shfl_sync(ALL_LANES, value4, (int)code.low, CHOICE_SIDE);
                float of6 = __shfl_sync(ALL_LANES, value6, (int)code.high, CHOICE_SIDE);
                sum.map4 = sum.map4 + FourOverSixNumerics::error<SQUARED, Scalar>(x, of4);
                sum.map6 = sum.map6 + FourOverSixNumerics::error<SQUARED, Scalar>(x, of6);
            }
        }
    };

    // The number in the tile of the warp's block b, and whether there is one.
    ZEROCAST_FN int of_tile(int b) const {
        return first_ / A_WARP * A_WARP + b / A_WARP * AT_ONCE + b % A_WARP;
    }
    ZEROCAST_FN bool exists(int b) const { return of_tile(b) < tile_.blocks; }

    // Works out both candidates of the warp's blocks.
    ZEROCAST_FN void derive() const {
        int lane = threadIdx.x % 32;
        if (lane < 2 * MOST_BLOCKS && exists(lane / 2)) {
            i32 amax = shard_.rowwise.block_amax[tile_.first_block + of_tile(lane / 2)];
            i32 stored = numerics_.template stored<Scalar>(amax, lane % 2 == 0);
            Candidate& candidate = memory_.candidates[lane / 2][lane % 2];
            candidate.map = decode<E4M3, Scalar>(stored);
            candidate.multiplier = numerics_.template multiplier_under<Scalar>(stored);
            candidate.limited = Scalar::value(amax) * candidate.multiplier < TwoCodes::UNLIMITED;
        }
        __syncwarp();
        int code = lane % MAGNITUDES, under = lane / MAGNITUDES % 2;
        constexpr int SIDE_BY_SIDE = 32 / (2 * MAGNITUDES);
#pragma unroll 1
        for (int b = lane / (2 * MAGNITUDES); b < MOST_BLOCKS && exists(b); b += SIDE_BY_SIDE) {
            Candidate& candidate = memory_.candidates[b][under];
            // 0 would be divided slowly, and stays what it is.
            float zero = 0.0f * candidate.map * numerics_.tensor_amax;
            float other =
                numerics_.template dequantized<Scalar>(Scalar::max(code, 1), candidate.map);
            candidate.values[code] = code == 0 ? zero : other;
        }
        __syncwarp();
    }

    // Of the block that this lane's row is in, in round n.
    ZEROCAST_FN const Candidate& candidate_of(int n, bool map4) const {
        return memory_.candidates[A_WARP * n + first_ % A_WARP][map4 ? 0 : 1];
    }

    ZEROCAST_FN u8* codes_of(int n) const {
        return global(shard_.rowwise.codes) + byte_of<F>(shard_, element_ + n * STEP);
    }

    // Calls work(n) as long as a lane of the warp has a block.
    template <class Work>
    ZEROCAST_FN void for_each_block(const Work& work) const {
#pragma unroll 1
        for (int n = 0; exists(A_WARP * n); n++) work(n);
    }

    // In which the tile has columns of this lane's blocks.
    ZEROCAST_FN int rounds() const {
        int left = tile_.cols - first_ * CHOICE_SIDE;
        return left > 0 ? (left + STEP - 1) / STEP : 0;
    }

    // Columns of block n.
    ZEROCAST_FN int width(int n) const {
        int left = tile_.cols - first_ * CHOICE_SIDE - n * STEP;
        return left < CHOICE_SIDE ? left : CHOICE_SIDE;
    }

    // Writes whether the block is scaled by map4, and returns it.
    ZEROCAST_FN bool decide(int n, Errors<Scalar> errors) const {
        if (!(whole_ >> n & 1)) errors = {};
        bool by_map4 = choose(errors);
        if (lane_ == 0 && first_ + n * AT_ONCE < tile_.blocks)
            global(choices_)[n * AT_ONCE] = by_map4;
        return by_map4;
    }

    ZEROCAST_FN void leave_errors(int n, const Errors<Scalar>& errors) const {
        if (!(whole_ >> n & 1)) return;
        float* to = global(errors_) + 2 * n * AT_ONCE;
        to[0] = errors.map4;
        to[1] = errors.map6;
    }

    const CastShard& shard_;
    const Tile& tile_;
    WarpMemory& memory_;
    FourOverSixNumerics numerics_;
    int lane_, first_;
    i64 element_;              // flat index of the first one in block first_
    bool owns_all_, casts_;    // whether the tile is this rank's, and codes are written
    u32 whole_ = 0, cut_ = 0;  // bit n: whether this rank owns all or some of the row in block n
    u8* choices_;              // of blocks from first_ on
    float* errors_ = nullptr;  // of the row in them, where ranks share that
};

template <bool SQUARED, bool AHEAD = false>
__global__ void __launch_bounds__(THREADS, 6)
    partial_select(const CastShard* __restrict__ shards, const Tile* __restrict__ tiles, i64 count,
                   const __grid_constant__ NumericsTable table) {
    __shared__ WarpMemory memory[THREADS / 32];
    // Tiles are fewer than 2^31; a number of 64 bits would take a register too many.
    for (u32 t = blockIdx.x; t < count; t += gridDim.x) {
        Tile tile = tiles[t];
        const CastShard& shard = shards[tile.weight];
        TileErrors<SQUARED> errors(shard, tile, memory[threadIdx.x / 32], table.scale_max);
        with_rounded_master(shard, [&](auto* master, auto nominal) {
            if (__all_sync(ALL_LANES, errors.takes_vectors(master))) {
                NextTile<Tile, AHEAD> next{shards, tiles, t + gridDim.x, count};
                errors.template at_once<decltype(nominal)>(master, next);
            } else {
                errors.anywhere(master);
                errors.leave_elements(master);
            }
        });
        __syncwarp();  // before the next tile's candidates are worked out
    }
}
