// partial_select_flat: partial_select of blocks of 1x16. A thread takes one block at a time, whose
// sixteen elements it keeps until the scale is chosen and, in rows that are whole, the codes are
// written.
#include "cuda/cast.h"
#include "cuda/four_over_six.h"

using namespace zerocast;

typedef E2M1 F;

constexpr int SIDE = CHOICE_SIDE, QUADS = SIDE / 4;

// One block of the tile, and what this rank owns of it.
template <bool SQUARED>
class FlatBlock {
  public:
    ZEROCAST_FN FlatBlock(const CastShard& shard, const Tile& tile, int number)
        : shard_(shard), block_(tile.first_block + number), start_(tile.element + number * SIDE) {
        int left = tile.cols - number * SIDE;
        width_ = left < SIDE ? left : SIDE;
        begin_ = start_ > shard.start ? start_ : shard.start;
        end_ = start_ + width_ < shard.end ? start_ + width_ : shard.end;
    }

    // Chooses and casts, or leaves what ranks exchange. `cut`: the row's place among those that are
    // cut, or -1.
    template <class Nominal, class T>
    ZEROCAST_FN void work(const T* master, const FourOverSixNumerics& numerics, i64 cut) const {
        if (begin_ >= end_) return;
        if (end_ - begin_ < width_) return leave_elements<Nominal>(master);
        Vec4 x[QUADS];
        load<Nominal>(master + start_, x);
        auto scales = numerics.candidates<Scalar>(shard_.rowwise.block_amax[block_]);
        Errors<Scalar> sum{};
#pragma unroll
        for (int at = 0; at < SIDE; at++) {
            // Elements beyond the matrix are 0, and so are their errors.
            numerics.add_errors<SQUARED>(scales, x[at / 4].x[at % 4], sum);
        }
        if (cut >= 0) {
            i64 blocks_w = shard_.rowwise.grid.blocks_w();
            float* to = shard_.candidates.errors_of(shard_.rowwise.grid, cut, 0);
            to += block_ % blocks_w * 2;
            global(to)[0] = sum.map4;
            global(to)[1] = sum.map6;
            return;
        }
        bool by_map4 = sum.map4 < sum.map6;
        global(shard_.candidates.choices)[block_] = by_map4;
        if (start_ >= shard_.whole_begin && start_ < shard_.whole_end)
            store(x, by_map4 ? scales.multiplier4 : scales.multiplier6);
    }

  private:
    template <class Nominal, class T>
    ZEROCAST_FN void load(const T* from, Vec4 (&x)[QUADS]) const {
        bool at_once = width_ == SIDE && (u64)from % (4 * sizeof *from) == 0;
#pragma unroll
        for (int k = 0; k < QUADS; k++) {
            Four four{};
            if (at_once)
                four.load_at_once(from + 4 * k, 1);
            else
                four.load_one_by_one(from + 4 * k, width_ - 4 * k);
            x[k] = round_vec4<Nominal>(four.values<T>());
        }
    }

    // The codes of the whole block.
    ZEROCAST_FN void store(Vec4 (&x)[QUADS], float multiplier) const {
        u8* to = global(shard_.rowwise.codes) + byte_of<F>(shard_, start_);
        bool at_once = width_ == SIDE && (u64)to % (SIDE / 2) == 0;
        u64 codes = 0;
#pragma unroll
        for (int k = 0; k < QUADS; k++) {
#pragma unroll
            for (int j = 0; j < 4; j++) x[k].x[j] = x[k].x[j] * multiplier;
            codes |= (u64)encode_vec4<F>(x[k]) << 16 * k;
        }
        if (at_once) {
            *(u64*)to = codes;
            return;
        }
#pragma unroll 1
        for (int at = 0; at < width_; at += 2) to[at / 2] = (u8)(codes >> 4 * at);
    }

    // This rank's elements of a block that ranks share.
    template <class Nominal, class T>
    ZEROCAST_FN void leave_elements(const T* master) const {
        const Candidates& candidates = shard_.candidates;
        i64 segment = find(candidates.segments, candidates.segment_count, start_);
        float* to = candidates.elements + segment * SIDE - start_;
        for (i64 e = begin_; e < end_; e++)
            to[e] = round_element(value_of(master[e]), shard_.round_to);
    }

    const CastShard& shard_;
    i64 block_, start_, begin_, end_;  // its number; its first element; this rank's elements
    int width_;                        // its elements
};

template <bool SQUARED>
__global__ void __launch_bounds__(THREADS)
    partial_select_flat(const CastShard* __restrict__ shards, const Tile* __restrict__ tiles,
                        i64 count, const __grid_constant__ NumericsTable table) {
    for (i64 t = blockIdx.x; t < count; t += gridDim.x) {
        Tile tile = tiles[t];
        const CastShard& shard = shards[tile.weight];
        FourOverSixNumerics numerics(*shard.tensor_amax, table.scale_max);
        i64 row = tile.first_block / shard.rowwise.grid.blocks_w();
        i64 cut = find(shard.candidates.cut, shard.candidates.cuts, row);
        with_rounded_master(shard, [&](auto* master, auto nominal) {
#pragma unroll 1
            for (int b = threadIdx.x; b < tile.blocks; b += THREADS) {
                FlatBlock<SQUARED>(shard, tile, b)
                    .template work<decltype(nominal)>(master, numerics, cut);
            }
        });
    }
}
