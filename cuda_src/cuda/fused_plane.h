// A tile's part of one copy of the codes: amaxes of its blocks, their scales, and codes either way
// round.
#pragma once

#include "arithmetic/scaling.h"
#include "cuda/fused_tile.h"
#include "cuda/planes.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// Instead of numerics: the rounded result and amaxes only.
struct NoNumerics {};

// Four codes in the low bits of a word, as far as the matrix has elements.
template <class F>
ZEROCAST_FN u32 existing(u32 word, int left) {
    return left == 4 ? word : word & ((1u << F::BITS * left) - 1);
}

template <class F>
ZEROCAST_FN i64 row_bytes(i64 elements) {
    return (elements * F::BITS + 7) / 8;
}

ZEROCAST_FN void store_bytes(u8* to, u32 word, int bytes) {
    if (bytes == 4 && (u64)to % 4 == 0) {
        *(u32*)to = word;
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (i < bytes) to[i] = (u8)(word >> 8 * i);
    }
}

// The blocks of a plane as they lie in a tile. They are one row or 16 and more high, one column or
// 16 and more wide; of one that does not fit, the tile has a part.
template <int HEIGHT>
class PlaneOfTile {
  public:
    ZEROCAST_FN PlaneOfTile(const FusedPlane& plane, const FusedTile<HEIGHT>& tile)
        : plane_(plane), tile_(tile) {}

    // Raises the amaxes of blocks that do not fit into a tile. A thread clears what it alone has
    // read, so one call may follow another without a barrier between them.
    ZEROCAST_FN void cast(NoNumerics) const {
        if (!plane_.scales.block_amax) return;
        take_amaxes();
        for_each_block([&](int b) {
            if (exists(b)) atomicMax((i32*)wide_amax(b), block(b));
        });
    }

    // Scales and codes.
    template <class Numerics>
    ZEROCAST_FN void cast(const Numerics& numerics) const {
        typedef typename Numerics::Format F;
        constexpr bool DELAYED = SAME<Numerics, DelayedNumerics<F>>;
        if (!plane_.codes && !plane_.scales.scale_inv) return;
        __syncthreads();  // what was in memory has been read
        if constexpr (DELAYED)
            raise_scale_inv(numerics);
        else
            derive_multipliers(numerics);
        if (!plane_.codes) return;
        u32 word[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            Vec4 scaled;
#pragma unroll
            for (int j = 0; j < THREAD_COLS; j++) {
                float multiplier =
                    DELAYED ? numerics.template multiplier<Scalar>(0)
                            : Scalar::value(block(block_of(i, plane_.log2_w == 0 ? j : 0)));
                scaled.x[j] = tile_.elements[i].x[j] * multiplier;
            }
            word[i] = tile_.has_row(i) ? existing<F>(encode_vec4<F>(scaled), tile_.left()) : 0;
        }
        if (plane_.transposed)
            store_columns<F>(word);
        else
            store_rows<F>(word);
    }

  private:
    static constexpr int ROWS = FusedTile<HEIGHT>::ROWS;
    const FusedPlane& plane_;
    const FusedTile<HEIGHT>& tile_;

    ZEROCAST_FN int log2_h() const {
        return Scalar::min((int)plane_.log2_h, HEIGHT == TALL ? 7 : 5);
    }
    ZEROCAST_FN int log2_w() const { return Scalar::min((int)plane_.log2_w, LOG2_COLS); }
    ZEROCAST_FN int log2_across() const { return LOG2_COLS - log2_w(); }
    ZEROCAST_FN i32& block(int b) const { return tile_.memory.block[b]; }
    // The block of an element of this thread.
    ZEROCAST_FN int block_of(int i, int j) const {
        return ((tile_.first_row + i >> log2_h()) << log2_across())
               + (tile_.first_col + j >> log2_w());
    }
    // The place of a block of the tile among those of the matrix.
    ZEROCAST_FN int down(int b) const {
        return (tile_.tile_row >> plane_.log2_h) + (b >> log2_across());
    }
    ZEROCAST_FN int right(int b) const {
        return (tile_.tile_col >> plane_.log2_w) + (b & ((1 << log2_across()) - 1));
    }
    ZEROCAST_FN bool exists(int b) const {
        return down(b) << plane_.log2_h < tile_.rows && right(b) << plane_.log2_w < tile_.cols;
    }
    // Whether the tile holds the first element of its blocks.
    ZEROCAST_FN bool begins() const {
        return (tile_.tile_row & ((1 << plane_.log2_h) - 1)) == 0
               && (tile_.tile_col & ((1 << plane_.log2_w) - 1)) == 0;
    }
    // Of a block that spans the matrix one way at least.
    ZEROCAST_FN const i32* wide_amax(int b) const {
        return plane_.scales.block_amax + down(b) + right(b);
    }

    // Calls work(b) for this thread's share of the tile's blocks.
    template <class Work>
    ZEROCAST_FN void for_each_block(const Work& work) const {
        int count = (HEIGHT >> log2_h()) << log2_across();
        for (int b = threadIdx.x; b < count; b += FusedTile<HEIGHT>::THREADS) work(b);
    }

    // --- amaxes ---

    ZEROCAST_FN void take_amaxes() const {
        for_each_block([&](int b) { block(b) = 0; });
        __syncthreads();
        if (plane_.log2_w == 0) {
#pragma unroll
            for (int j = 0; j < THREAD_COLS; j++)
                atomicMax(&block(block_of(0, j)), tile_.largest_in_column(j));
        } else if (plane_.log2_h == 0) {
#pragma unroll
            for (int i = 0; i < ROWS; i++) raise_by_lanes(block_of(i, 0), tile_.largest_in_row(i));
        } else {
            raise_by_lanes(block_of(0, 0), tile_.largest());
        }
        __syncthreads();
    }

    // The lanes of a block agree on its largest first.
    ZEROCAST_FN void raise_by_lanes(int b, i32 largest) const {
        int lanes = (1 << log2_w()) / THREAD_COLS;
        for (int n = lanes / 2; n > 0; n /= 2)
            largest = Scalar::max(largest, __shfl_xor_sync(ALL_LANES, largest, n));
        if (threadIdx.x % lanes == 0) atomicMax(&block(b), largest);
    }

    // --- scales ---

    // Stored scales, and in memory.block the multipliers of the tile's blocks, by their bits.
    template <class Numerics>
    ZEROCAST_FN void derive_multipliers(const Numerics& numerics) const {
        bool is_wide = plane_.scales.block_amax;
        if (!is_wide) take_amaxes();
        for_each_block([&](int b) {
            i32 amax = !is_wide ? block(b) : exists(b) ? *wide_amax(b) : 0;
            if (plane_.scales.scale_inv && begins() && exists(b))
                store_scale<typename Numerics::Stored>(b, numerics.template stored<Scalar>(amax));
            block(b) = Scalar::bits(numerics.template multiplier<Scalar>(amax));
        });
        __syncthreads();
    }

    // Every entry of a block's scale, from its bits.
    template <class Stored>
    ZEROCAST_FN void store_scale(int b, i32 bits) const {
        const ScalePlane& scales = plane_.scales;
        i64 i = plane_.transposed ? right(b) : down(b), j = plane_.transposed ? down(b) : right(b);
        for (i64 r = i * scales.row_repeat; r < (i + 1) * scales.row_repeat && r < scales.rows;
             r++) {
            for (i64 c = j * scales.col_repeat; c < (j + 1) * scales.col_repeat && c < scales.cols;
                 c++) {
                i64 at =
                    scales.transposed ? c * scales.padded_cols + r : r * scales.padded_cols + c;
                store_entries((Stored*)scales.scale_inv + at, four_times(bits), 1);
            }
        }
    }

    // The scale of a tensor under DelayedNumerics, which no amax of this cast makes but a NaN
    // unmakes: scale_inv, zero before the launch, is raised like an amax.
    template <class Numerics>
    ZEROCAST_FN void raise_scale_inv(const Numerics& numerics) const {
        auto scale_inv = (i32*)plane_.scales.scale_inv;
        if (!scale_inv) return;
        i32 largest = __reduce_max_sync(ALL_LANES, tile_.largest());
        if (threadIdx.x % LANES == 0 && largest >= INFINITY_BITS) atomicMax(scale_inv, NAN_BITS);
        if (begins() && threadIdx.x == 0) atomicMax(scale_inv, numerics.template stored<Scalar>(0));
    }

    // --- codes ---

    template <class F>
    ZEROCAST_FN void store_rows(const u32 (&word)[ROWS]) const {
        i64 stride = row_bytes<F>(tile_.cols), first = row_bytes<F>(tile_.col());
        int left = tile_.left();
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (!tile_.has_row(i)) continue;
            u8* to = plane_.codes + tile_.row(i) * stride + first;
            if (left == THREAD_COLS)
                store_codes<F>(to, word[i], (u64)to % (THREAD_COLS * F::BITS / 8) == 0);
            else
                store_bytes(to, word[i], (int)row_bytes<F>(left));
        }
    }

    template <class F>
    ZEROCAST_FN void store_columns(const u32 (&word)[ROWS]) const {
        constexpr int SQUARES = ROWS / 4;
#pragma unroll
        for (int n = 0; n < SQUARES; n++) {
            u32 square[4] = {word[4 * n], word[4 * n + 1], word[4 * n + 2], word[4 * n + 3]};
            if constexpr (F::BITS == 8)
                transpose_4x4(square);
            else
                transpose_4x4_nibbles(square);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32* column = tile_.memory.column[tile_.first_col + j];
                int at = tile_.first_row / 4 + n;
                if constexpr (F::BITS == 8)
                    column[at] = square[j];
                else
                    ((unsigned short*)column)[at] = (unsigned short)square[j];
            }
        }
        __syncthreads();
        i64 stride = row_bytes<F>(tile_.rows), first = row_bytes<F>(tile_.tile_row);
        constexpr int WORDS = HEIGHT * F::BITS / 32;  // of a column
        for (int at = threadIdx.x; at < TILE_COLS * WORDS; at += FusedTile<HEIGHT>::THREADS) {
            int column = at / WORDS, k = at % WORDS;
            if (tile_.tile_col + column >= tile_.cols) continue;
            store_bytes(plane_.codes + (tile_.tile_col + column) * stride + first + 4 * k,
                        tile_.memory.column[column][k], at_most_four(stride - (first + 4 * k)));
        }
    }
};

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
