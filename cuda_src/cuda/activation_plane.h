// A tile's part of one copy of the codes: amaxes of its blocks, their scales, and codes either way
// round.
#pragma once

#include "arithmetic/scaling.h"
#include "cuda/activation_tile.h"
#include "cuda/transpose.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// --- amaxes ---

template <int HEIGHT>
ZEROCAST_FN i32 largest_in_row(const ThreadTile<HEIGHT>& elements, int i) {
    i32 largest = 0;
#pragma unroll
    for (int j = 0; j < THREAD_COLS; j++)
        largest = Scalar::max(largest, magnitude_bits<Scalar>(elements.row[i].x[j]));
    return largest;
}

template <int HEIGHT>
ZEROCAST_FN i32 largest_in_column(const ThreadTile<HEIGHT>& elements, int j) {
    i32 largest = 0;
#pragma unroll
    for (int i = 0; i < TilePosition<HEIGHT>::ROWS; i++)
        largest = Scalar::max(largest, magnitude_bits<Scalar>(elements.row[i].x[j]));
    return largest;
}

template <int HEIGHT>
ZEROCAST_FN i32 largest_in(const ThreadTile<HEIGHT>& elements) {
    i32 largest = 0;
#pragma unroll
    for (int i = 0; i < TilePosition<HEIGHT>::ROWS; i++)
        largest = Scalar::max(largest, largest_in_row(elements, i));
    return largest;
}

// Of 2^log2_lanes lanes side by side.
ZEROCAST_FN i32 largest_of_lanes(i32 value, int log2_lanes) {
    for (int n = (1 << log2_lanes) / 2; n > 0; n /= 2)
        value = Scalar::max(value, __shfl_xor_sync(0xFFFFFFFFu, value, n));
    return value;
}

// The blocks of a plane as they lie in a tile.
template <int HEIGHT>
struct TileBlocks {
    int log2_h, log2_w, log2_across, count;
    int first_down, first_right;  // of the tile's first block, counted in the matrix

    ZEROCAST_FN TileBlocks(const CastPlane& plane, const TilePosition<HEIGHT>& position)
        : log2_h((int)plane.log2_h), log2_w((int)plane.log2_w), log2_across(7 - log2_w) {
        count = (HEIGHT >> log2_h) << log2_across;
        first_down = position.tile_row >> log2_h;
        first_right = position.tile_col >> log2_w;
    }

    // The block of an element, by its position in the tile.
    ZEROCAST_FN int of(int row, int col) const {
        return ((row >> log2_h) << log2_across) + (col >> log2_w);
    }
    ZEROCAST_FN int down(int block) const { return first_down + (block >> log2_across); }
    ZEROCAST_FN int right(int block) const {
        return first_right + (block & ((1 << log2_across) - 1));
    }
    ZEROCAST_FN bool exists(int block, const TilePosition<HEIGHT>& position) const {
        return down(block) << log2_h < position.rows && right(block) << log2_w < position.cols;
    }
};
static_assert(1 << 7 == TILE_COLS, "log2_across is 7 - log2_w");

// The amaxes of the tile's blocks, into memory.block. Blocks are one row or 16 and more high, one
// column or 16 and more wide.
template <int HEIGHT>
ZEROCAST_FN void take_amaxes(const TileBlocks<HEIGHT>& blocks, const TilePosition<HEIGHT>& position,
                             const ThreadTile<HEIGHT>& elements, TileMemory<HEIGHT>& memory) {
    for (int b = threadIdx.x; b < blocks.count; b += TilePosition<HEIGHT>::THREADS)
        memory.block[b] = 0;
    __syncthreads();
    int row = TilePosition<HEIGHT>::ROWS * position.warp, col = THREAD_COLS * position.lane;
    if (blocks.log2_w == 0) {
#pragma unroll
        for (int j = 0; j < THREAD_COLS; j++)
            atomicMax(&memory.block[blocks.of(row, col + j)], largest_in_column(elements, j));
    } else {
        int log2_lanes = blocks.log2_w - 2;
        bool leads = (position.lane & ((1 << log2_lanes) - 1)) == 0;
        if (blocks.log2_h == 0) {
#pragma unroll
            for (int i = 0; i < TilePosition<HEIGHT>::ROWS; i++) {
                i32 largest = largest_of_lanes(largest_in_row(elements, i), log2_lanes);
                if (leads) memory.block[blocks.of(row + i, col)] = largest;
            }
        } else {
            i32 largest = largest_of_lanes(largest_in(elements), log2_lanes);
            if (leads) atomicMax(&memory.block[blocks.of(row, col)], largest);
        }
    }
    __syncthreads();
}

template <int HEIGHT>
ZEROCAST_FN void raise_tensor_amax(i32* tensor_amax, const TilePosition<HEIGHT>& position,
                                   const ThreadTile<HEIGHT>& elements) {
    if (!tensor_amax) return;
    i32 largest = __reduce_max_sync(0xFFFFFFFFu, largest_in(elements));
    if (position.lane == 0 && largest > 0) atomicMax(tensor_amax, largest);
}

// Raises the amaxes of blocks that do not fit into a tile. A thread clears what it alone has read,
// so one call may follow another without a barrier between them.
template <int HEIGHT>
ZEROCAST_FN void raise_block_amaxes(const CastPlane& plane, const TilePosition<HEIGHT>& position,
                                    const ThreadTile<HEIGHT>& elements,
                                    TileMemory<HEIGHT>& memory) {
    TileBlocks<HEIGHT> blocks(plane, position);
    take_amaxes(blocks, position, elements, memory);
    for (int b = threadIdx.x; b < blocks.count; b += TilePosition<HEIGHT>::THREADS) {
        if (!blocks.exists(b, position)) continue;
        i64 at = blocks.down(b) * plane.down + blocks.right(b) * plane.right;
        atomicMax(plane.block_amax + at, memory.block[b]);
    }
}

// --- scales ---

template <class Stored>
ZEROCAST_FN Stored stored_value(i32 bits) {
    if constexpr (sizeof(Stored) == 1)
        return (Stored)bits;
    else
        return Scalar::value(bits);
}

// What is stored of block b: by the tile in which the block begins.
template <class Numerics, int HEIGHT>
ZEROCAST_FN void store_scale(const CastPlane& plane, const TileBlocks<HEIGHT>& blocks,
                             const TilePosition<HEIGHT>& position, const Numerics& numerics, int b,
                             i32 amax) {
    typedef typename Numerics::Stored Stored;
    int down = blocks.down(b), right = blocks.right(b);
    bool begins = (plane.down || down == 0) && (plane.right || right == 0);
    if (!plane.scale_inv || !begins || !blocks.exists(b, position)) return;
    auto stored = stored_value<Stored>(numerics.template stored<Scalar>(amax));
    for (i64 r = down * plane.down_repeat;
         r < (down + 1) * plane.down_repeat && r < plane.down_entries; r++) {
        for (i64 c = right * plane.right_repeat;
             c < (right + 1) * plane.right_repeat && c < plane.right_entries; c++)
            ((Stored*)plane.scale_inv)[r * plane.down_stride + c * plane.right_stride] = stored;
    }
}

// Stored scales, and in memory.block the multipliers of the tile's blocks, by their bits.
template <class Numerics, int HEIGHT>
ZEROCAST_FN void derive_multipliers(const CastPlane& plane, const TileBlocks<HEIGHT>& blocks,
                                    const TilePosition<HEIGHT>& position,
                                    const ThreadTile<HEIGHT>& elements, const Numerics& numerics,
                                    TileMemory<HEIGHT>& memory) {
    __syncthreads();  // what was in memory has been read
    if (!plane.block_amax) take_amaxes(blocks, position, elements, memory);
    for (int b = threadIdx.x; b < blocks.count; b += TilePosition<HEIGHT>::THREADS) {
        i32 amax = 0;
        if (!plane.block_amax)
            amax = memory.block[b];
        else if (blocks.exists(b, position))
            amax = plane.block_amax[blocks.down(b) * plane.down + blocks.right(b) * plane.right];
        store_scale(plane, blocks, position, numerics, b, amax);
        memory.block[b] = Scalar::bits(numerics.template multiplier<Scalar>(amax));
    }
    __syncthreads();
}

// The scale of a tensor under DelayedNumerics, which no amax of this cast makes but a NaN unmakes:
// scale_inv, zero before the launch, is raised like an amax.
template <class F, int HEIGHT>
ZEROCAST_FN void raise_scale_inv(const CastPlane& plane, const TilePosition<HEIGHT>& position,
                                 const ThreadTile<HEIGHT>& elements,
                                 const DelayedNumerics<F>& numerics) {
    if (!plane.scale_inv) return;
    auto scale_inv = (i32*)plane.scale_inv;
    i32 largest = __reduce_max_sync(0xFFFFFFFFu, largest_in(elements));
    if (position.lane == 0 && largest >= INFINITY_BITS) atomicMax(scale_inv, NAN_BITS);
    if (position.first() && threadIdx.x == 0)
        atomicMax(scale_inv, numerics.template stored<Scalar>(0));
}

// --- codes ---

// Four codes in the low bits of a word, as far as the matrix has elements.
template <class F>
ZEROCAST_FN u32 existing(u32 word, int left) {
    return left == 4 ? word : word & ((1u << F::BITS * left) - 1);
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

template <class F>
ZEROCAST_FN i64 row_bytes(i64 elements) {
    return (elements * F::BITS + 7) / 8;
}

template <class F, int HEIGHT>
ZEROCAST_FN void store_rows(const CastPlane& plane, const TilePosition<HEIGHT>& position,
                            const u32 (&word)[TilePosition<HEIGHT>::ROWS]) {
    i64 stride = row_bytes<F>(position.cols), first = (i64)position.col() * F::BITS / 8;
#pragma unroll
    for (int i = 0; i < TilePosition<HEIGHT>::ROWS; i++) {
        if (position.row(i) >= position.rows || position.left() == 0) continue;
        u8* to = plane.codes + position.row(i) * stride + first;
        if (position.left() == THREAD_COLS)
            store_codes<F>(to, word[i], (u64)to % (THREAD_COLS * F::BITS / 8) == 0);
        else
            store_bytes(to, word[i], (int)row_bytes<F>(position.left()));
    }
}

template <class F, int HEIGHT>
ZEROCAST_FN void store_columns(const CastPlane& plane, const TilePosition<HEIGHT>& position,
                               u32 (&word)[TilePosition<HEIGHT>::ROWS],
                               TileMemory<HEIGHT>& memory) {
    constexpr int SQUARES = TilePosition<HEIGHT>::ROWS / 4;
#pragma unroll
    for (int n = 0; n < SQUARES; n++) {
        u32 square[4] = {word[4 * n], word[4 * n + 1], word[4 * n + 2], word[4 * n + 3]};
        if constexpr (F::BITS == 8)
            transpose_4x4(square);
        else
            transpose_4x4_nibbles(square);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32* column = memory.column[THREAD_COLS * position.lane + j];
            int at = SQUARES * position.warp + n;
            if constexpr (F::BITS == 8)
                column[at] = square[j];
            else
                ((unsigned short*)column)[at] = (unsigned short)square[j];
        }
    }
    __syncthreads();
    i64 stride = row_bytes<F>(position.rows), first = (i64)position.tile_row * F::BITS / 8;
    constexpr int WORDS = HEIGHT * F::BITS / 32;  // of a column
    for (int at = threadIdx.x; at < TILE_COLS * WORDS; at += TilePosition<HEIGHT>::THREADS) {
        int column = at / WORDS, k = at % WORDS;
        int bytes = at_most_four(stride - (first + 4 * k));
        if (position.tile_col + column >= position.cols || bytes == 0) continue;
        store_bytes(plane.codes + (position.tile_col + column) * stride + first + 4 * k,
                    memory.column[column][k], bytes);
    }
}

template <class F, int HEIGHT>
ZEROCAST_FN void store_plane(const CastPlane& plane, const TilePosition<HEIGHT>& position,
                             u32 (&word)[TilePosition<HEIGHT>::ROWS], TileMemory<HEIGHT>& memory) {
#pragma unroll
    for (int i = 0; i < TilePosition<HEIGHT>::ROWS; i++)
        word[i] = position.row(i) < position.rows ? existing<F>(word[i], position.left()) : 0;
    if (plane.transposed)
        store_columns<F>(plane, position, word, memory);
    else
        store_rows<F>(plane, position, word);
}

// --- a plane of a tile ---

template <class Numerics, int HEIGHT>
ZEROCAST_FN void cast_plane(const CastPlane& plane, const TilePosition<HEIGHT>& position,
                            const ThreadTile<HEIGHT>& elements, const Numerics& numerics,
                            TileMemory<HEIGHT>& memory) {
    typedef typename Numerics::Format F;
    TileBlocks<HEIGHT> blocks(plane, position);
    derive_multipliers(plane, blocks, position, elements, numerics, memory);
    if (!plane.codes) return;
    u32 word[TilePosition<HEIGHT>::ROWS];
#pragma unroll
    for (int i = 0; i < TilePosition<HEIGHT>::ROWS; i++) {
        int row = TilePosition<HEIGHT>::ROWS * position.warp + i, col = THREAD_COLS * position.lane;
        Vec4 scaled;
#pragma unroll
        for (int j = 0; j < THREAD_COLS; j++) {
            int block = blocks.of(row, col + (blocks.log2_w == 0 ? j : 0));
            scaled.x[j] = elements.row[i].x[j] * Scalar::value(memory.block[block]);
        }
        word[i] = encode_vec4<F>(scaled);
    }
    store_plane<F>(plane, position, word, memory);
}

template <class F, int HEIGHT>
ZEROCAST_FN void cast_plane(const CastPlane& plane, const TilePosition<HEIGHT>& position,
                            const ThreadTile<HEIGHT>& elements, const DelayedNumerics<F>& numerics,
                            TileMemory<HEIGHT>& memory) {
    raise_scale_inv(plane, position, elements, numerics);
    if (!plane.codes) return;
    __syncthreads();  // what was in memory has been read
    u32 word[TilePosition<HEIGHT>::ROWS];
#pragma unroll
    for (int i = 0; i < TilePosition<HEIGHT>::ROWS; i++) {
        Vec4 scaled;
#pragma unroll
        for (int j = 0; j < THREAD_COLS; j++) scaled.x[j] = elements.row[i].x[j] * numerics.scale;
        word[i] = encode_vec4<F>(scaled);
    }
    store_plane<F>(plane, position, word, memory);
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
