// How a CUDA thread block computes a tile of a layer's result, casts it, and writes its codes both
// ways round: the operation Backend.activate of zerocast/ops.py.
//
// A tile is 128 columns wide and 32 rows high, or 128 (TALL) where FP8 blocks are: no block that is
// scaled by itself is larger. A thread holds a patch of 4x4 elements from the function to the
// codes; a warp four rows. So nothing in high precision touches memory, a tile's amaxes take one
// trip through shared memory, and so do codes that are stored transposed.
//
// Blocks that do not fit into a tile (the whole tensor, a row, a column) have their amaxes taken by
// a launch of its own, activation_values, before the one that casts.
#pragma once

#include "activation.h"
#include "quad.h"
#include "scaling.h"
#include "transpose.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

constexpr int TILE_COLS = 128, LOW = 32, TALL = 128;
constexpr int PATCH_COLS = 4;  // of a thread; it has as many rows, or twice as many in a tall tile
constexpr int LANES = 32;
static_assert(TILE_COLS == PATCH_COLS * LANES, "a warp is as wide as a tile");

// One copy of the codes. A block is seen within the tile: of one that does not fit, the tile's
// part.
struct CastPlane {
    u8* codes;        // or null
    void* scale_inv;  // or null
    i32* block_amax;  // of blocks that do not fit into a tile; else null
    i64 transposed;   // codes are [cols, rows]
    i64 log2_h, log2_w;
    i64 down, right;  // 0 where all blocks of a column, of a row, are one; else 1
    // Stored scales: a block has repeats of them, as far as there are entries.
    i64 down_repeat, right_repeat;
    i64 down_entries, right_entries;
    i64 down_stride, right_stride;
};

// A launch's only argument.
struct ActivationTask {
    ActivationTable table;
    i64 source_type, weight_type, bias_type;  // Nominal
    i64 tiles_per_unit;                       // side by side, by one thread block
    i64 power_2_scale, amax_epsilon;          // of Float8Scaling
    i64 scale_max;                            // of NVFP4Scaling
    const float* scale;                       // [1] of DelayedScaling
    i32* tensor_amax;                         // [1] or null; NVFP4Scaling reads it, others raise it
    i32* amax;                                // FP32 [1] by its bits, or null
    CastPlane planes[2];
};

// min(count, 4), and 0 for what is negative.
ZEROCAST_FN int at_most_four(i64 count) { return count >= 4 ? 4 : count > 0 ? (int)count : 0; }

// Where a thread's patch lies in the matrix, and its block's tile, HEIGHT rows high.
template <int HEIGHT>
struct Place {
    static constexpr int ROWS = HEIGHT == TALL ? 8 : 4;  // of a thread
    static constexpr int THREADS = HEIGHT / ROWS * LANES;
    int tile_row, tile_col;  // of the tile's first element; Python keeps matrices below 2^30
    int rows, cols;          // of the matrix
    int warp, lane;

    ZEROCAST_FN Place(const ActivationTable& table, int strip)
        : tile_row(strip * HEIGHT),
          tile_col(0),
          rows((int)table.rows),
          cols((int)table.cols),
          warp(threadIdx.x / LANES),
          lane(threadIdx.x % LANES) {}

    ZEROCAST_FN int row(int i) const { return tile_row + ROWS * warp + i; }
    ZEROCAST_FN int col() const { return tile_col + PATCH_COLS * lane; }
    // Columns of the patch that the matrix has.
    ZEROCAST_FN int left() const { return at_most_four(cols - col()); }
    ZEROCAST_FN bool first() const { return tile_row == 0 && tile_col == 0; }
};

template <int HEIGHT>
struct Patch {
    static constexpr int ROWS = Place<HEIGHT>::ROWS;
    Quad row[ROWS];  // 0 where the matrix has no element

    // row[i] = f(i, row[i]) for each i, by one copy of the code of f: rows go round, because
    // registers cannot be indexed.
    template <class F>
    ZEROCAST_FN void for_each_row(const F& f) {
#pragma unroll 1
        for (int i = 0; i < ROWS; i++) {
            Quad made = f(i, row[0]);
#pragma unroll
            for (int k = 1; k < ROWS; k++) row[k - 1] = row[k];
            row[ROWS - 1] = made;
        }
    }
};

// What a thread block shares; one plane at a time.
template <int HEIGHT>
struct TileMemory {
    // Amaxes of the tile's blocks, then multipliers: of 16 elements, at least.
    i32 block[HEIGHT * TILE_COLS / 16];
    // Codes of a column; one more word, so that threads which fill a row touch more banks.
    u32 column[TILE_COLS][HEIGHT / 4 + 1];
};

// --- elements in memory ---

// Elements [at, at + 4) of a matrix, zeros past the first `left`.
ZEROCAST_FN Quad load_nominal(const void* from, i64 type, i64 at, int left) {
    Quad q{};
    if (type == NOMINAL_FP32) {
        const float* x = (const float*)from + at;
        if (left == 4 && (u64)x % 16 == 0) return load_quad(x);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j < left) q.x[j] = x[j];
        }
        return q;
    }
    auto x = (const unsigned short*)from + at;
    i32 half[4] = {};
    if (left == 4 && (u64)x % 8 == 0) {
        u64 all = *(const u64*)x;
#pragma unroll
        for (int j = 0; j < 4; j++) half[j] = (i32)(all >> 16 * j & 0xFFFF);
    } else {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j < left) half[j] = x[j];
        }
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        q.x[j] = type == NOMINAL_BF16 ? Scalar::value((i32)((u32)half[j] << 16))
                                      : from_fp16<Scalar>(half[j]);
    }
    return q;
}

// The first `left` of four rounded elements, to element `at` of a matrix.
ZEROCAST_FN void store_nominal(void* to, i64 type, i64 at, int left, const Quad& q) {
    if (type == NOMINAL_FP32) {
        float* x = (float*)to + at;
        if (left == 4 && (u64)x % 16 == 0) return store_quad(x, q, true);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j < left) x[j] = q.x[j];
        }
        return;
    }
    auto x = (unsigned short*)to + at;
    u64 all = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 half =
            type == NOMINAL_BF16 ? (u32)Scalar::bits(q.x[j]) >> 16 : (u32)to_fp16<Scalar>(q.x[j]);
        all |= (u64)half << 16 * j;
    }
    if (left == 4 && (u64)x % 8 == 0) {
        *(u64*)x = all;
        return;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (j < left) x[j] = (unsigned short)(all >> 16 * j);
    }
}

template <int HEIGHT>
ZEROCAST_FN void round_patch(Patch<HEIGHT>& patch, i64 nominal) {
#pragma unroll
    for (int i = 0; i < Place<HEIGHT>::ROWS; i++) {
        if (nominal == NOMINAL_BF16)
            patch.row[i] = round_quad<Bf16>(patch.row[i]);
        else if (nominal == NOMINAL_FP16)
            patch.row[i] = round_quad<Fp16>(patch.row[i]);
        else
            patch.row[i] = round_quad<Fp32>(patch.row[i]);
    }
}

template <int HEIGHT>
ZEROCAST_FN void store_patch(const ActivationTable& table, const Place<HEIGHT>& place,
                             const Patch<HEIGHT>& patch) {
    if (!table.output || place.left() == 0) return;
#pragma unroll
    for (int i = 0; i < Place<HEIGHT>::ROWS; i++) {
        if (place.row(i) >= place.rows) continue;
        store_nominal(table.output, table.round_to, (i64)place.row(i) * place.cols + place.col(),
                      place.left(), patch.row[i]);
    }
}

// --- amaxes ---

template <int HEIGHT>
ZEROCAST_FN i32 largest_in_row(const Patch<HEIGHT>& patch, int i) {
    i32 largest = 0;
#pragma unroll
    for (int j = 0; j < PATCH_COLS; j++)
        largest = Scalar::max(largest, magnitude_bits<Scalar>(patch.row[i].x[j]));
    return largest;
}

template <int HEIGHT>
ZEROCAST_FN i32 largest_in_column(const Patch<HEIGHT>& patch, int j) {
    i32 largest = 0;
#pragma unroll
    for (int i = 0; i < Place<HEIGHT>::ROWS; i++)
        largest = Scalar::max(largest, magnitude_bits<Scalar>(patch.row[i].x[j]));
    return largest;
}

template <int HEIGHT>
ZEROCAST_FN i32 largest_in(const Patch<HEIGHT>& patch) {
    i32 largest = 0;
#pragma unroll
    for (int i = 0; i < Place<HEIGHT>::ROWS; i++)
        largest = Scalar::max(largest, largest_in_row(patch, i));
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

    ZEROCAST_FN TileBlocks(const CastPlane& plane, const Place<HEIGHT>& place)
        : log2_h((int)plane.log2_h), log2_w((int)plane.log2_w), log2_across(7 - log2_w) {
        count = (HEIGHT >> log2_h) << log2_across;
        first_down = place.tile_row >> log2_h;
        first_right = place.tile_col >> log2_w;
    }

    // The block of an element, by its place in the tile.
    ZEROCAST_FN int of(int row, int col) const {
        return ((row >> log2_h) << log2_across) + (col >> log2_w);
    }
    ZEROCAST_FN int down(int block) const { return first_down + (block >> log2_across); }
    ZEROCAST_FN int right(int block) const {
        return first_right + (block & ((1 << log2_across) - 1));
    }
    ZEROCAST_FN bool exists(int block, const Place<HEIGHT>& place) const {
        return down(block) << log2_h < place.rows && right(block) << log2_w < place.cols;
    }
};
static_assert(1 << 7 == TILE_COLS, "log2_across is 7 - log2_w");

// The amaxes of the tile's blocks, into memory.block. Blocks are one row or 16 and more high, one
// column or 16 and more wide.
template <int HEIGHT>
ZEROCAST_FN void take_amaxes(const TileBlocks<HEIGHT>& blocks, const Place<HEIGHT>& place,
                             const Patch<HEIGHT>& patch, TileMemory<HEIGHT>& memory) {
    for (int b = threadIdx.x; b < blocks.count; b += Place<HEIGHT>::THREADS) memory.block[b] = 0;
    __syncthreads();
    int row = Place<HEIGHT>::ROWS * place.warp, col = PATCH_COLS * place.lane;
    if (blocks.log2_w == 0) {
#pragma unroll
        for (int j = 0; j < PATCH_COLS; j++)
            atomicMax(&memory.block[blocks.of(row, col + j)], largest_in_column(patch, j));
    } else {
        int log2_lanes = blocks.log2_w - 2;
        bool leads = (place.lane & ((1 << log2_lanes) - 1)) == 0;
        if (blocks.log2_h == 0) {
#pragma unroll
            for (int i = 0; i < Place<HEIGHT>::ROWS; i++) {
                i32 largest = largest_of_lanes(largest_in_row(patch, i), log2_lanes);
                if (leads) memory.block[blocks.of(row + i, col)] = largest;
            }
        } else {
            i32 largest = largest_of_lanes(largest_in(patch), log2_lanes);
            if (leads) atomicMax(&memory.block[blocks.of(row, col)], largest);
        }
    }
    __syncthreads();
}

template <int HEIGHT>
ZEROCAST_FN void raise_tensor_amax(i32* tensor_amax, const Place<HEIGHT>& place,
                                   const Patch<HEIGHT>& patch) {
    if (!tensor_amax) return;
    i32 largest = __reduce_max_sync(0xFFFFFFFFu, largest_in(patch));
    if (place.lane == 0 && largest > 0) atomicMax(tensor_amax, largest);
}

// Raises the amaxes of blocks that do not fit into a tile. A thread clears what it alone has read, so
// one call may follow another without a barrier between them.
template <int HEIGHT>
ZEROCAST_FN void raise_block_amaxes(const CastPlane& plane, const Place<HEIGHT>& place,
                                    const Patch<HEIGHT>& patch, TileMemory<HEIGHT>& memory) {
    TileBlocks<HEIGHT> blocks(plane, place);
    take_amaxes(blocks, place, patch, memory);
    for (int b = threadIdx.x; b < blocks.count; b += Place<HEIGHT>::THREADS) {
        if (!blocks.exists(b, place)) continue;
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
template <class Scaling, int HEIGHT>
ZEROCAST_FN void store_scale(const CastPlane& plane, const TileBlocks<HEIGHT>& blocks,
                             const Place<HEIGHT>& place, const Scaling& scaling, int b, i32 amax) {
    typedef typename Scaling::Stored Stored;
    int down = blocks.down(b), right = blocks.right(b);
    bool begins = (plane.down || down == 0) && (plane.right || right == 0);
    if (!plane.scale_inv || !begins || !blocks.exists(b, place)) return;
    auto stored = stored_value<Stored>(scaling.template stored<Scalar>(amax));
    for (i64 r = down * plane.down_repeat;
         r < (down + 1) * plane.down_repeat && r < plane.down_entries; r++) {
        for (i64 c = right * plane.right_repeat;
             c < (right + 1) * plane.right_repeat && c < plane.right_entries; c++)
            ((Stored*)plane.scale_inv)[r * plane.down_stride + c * plane.right_stride] = stored;
    }
}

// Stored scales, and in memory.block the multipliers of the tile's blocks, by their bits.
template <class Scaling, int HEIGHT>
ZEROCAST_FN void derive_multipliers(const CastPlane& plane, const TileBlocks<HEIGHT>& blocks,
                                    const Place<HEIGHT>& place, const Patch<HEIGHT>& patch,
                                    const Scaling& scaling, TileMemory<HEIGHT>& memory) {
    __syncthreads();  // what was in memory has been read
    if (!plane.block_amax) take_amaxes(blocks, place, patch, memory);
    for (int b = threadIdx.x; b < blocks.count; b += Place<HEIGHT>::THREADS) {
        i32 amax = 0;
        if (!plane.block_amax)
            amax = memory.block[b];
        else if (blocks.exists(b, place))
            amax = plane.block_amax[blocks.down(b) * plane.down + blocks.right(b) * plane.right];
        store_scale(plane, blocks, place, scaling, b, amax);
        memory.block[b] = Scalar::bits(scaling.template multiplier<Scalar>(amax));
    }
    __syncthreads();
}

// The scale of a tensor under DelayedScaling, which no amax of this cast makes but a NaN unmakes:
// scale_inv, zero before the launch, is raised like an amax.
template <class F, int HEIGHT>
ZEROCAST_FN void raise_scale_inv(const CastPlane& plane, const Place<HEIGHT>& place,
                                 const Patch<HEIGHT>& patch, const DelayedScaling<F>& scaling) {
    if (!plane.scale_inv) return;
    auto scale_inv = (i32*)plane.scale_inv;
    i32 largest = __reduce_max_sync(0xFFFFFFFFu, largest_in(patch));
    if (place.lane == 0 && largest >= INFINITY_BITS) atomicMax(scale_inv, NAN_BITS);
    if (place.first() && threadIdx.x == 0) atomicMax(scale_inv, scaling.template stored<Scalar>(0));
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
ZEROCAST_FN void store_rows(const CastPlane& plane, const Place<HEIGHT>& place,
                            const u32 (&word)[Place<HEIGHT>::ROWS]) {
    i64 stride = row_bytes<F>(place.cols), first = (i64)place.col() * F::BITS / 8;
#pragma unroll
    for (int i = 0; i < Place<HEIGHT>::ROWS; i++) {
        if (place.row(i) >= place.rows || place.left() == 0) continue;
        u8* to = plane.codes + place.row(i) * stride + first;
        if (place.left() == PATCH_COLS)
            store_codes<F>(to, word[i], (u64)to % (PATCH_COLS * F::BITS / 8) == 0);
        else
            store_bytes(to, word[i], (int)row_bytes<F>(place.left()));
    }
}

template <class F, int HEIGHT>
ZEROCAST_FN void store_columns(const CastPlane& plane, const Place<HEIGHT>& place,
                               u32 (&word)[Place<HEIGHT>::ROWS], TileMemory<HEIGHT>& memory) {
    constexpr int SQUARES = Place<HEIGHT>::ROWS / 4;
#pragma unroll
    for (int n = 0; n < SQUARES; n++) {
        u32 square[4] = {word[4 * n], word[4 * n + 1], word[4 * n + 2], word[4 * n + 3]};
        if constexpr (F::BITS == 8)
            transpose_4x4(square);
        else
            transpose_4x4_nibbles(square);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32* column = memory.column[PATCH_COLS * place.lane + j];
            int at = SQUARES * place.warp + n;
            if constexpr (F::BITS == 8)
                column[at] = square[j];
            else
                ((unsigned short*)column)[at] = (unsigned short)square[j];
        }
    }
    __syncthreads();
    i64 stride = row_bytes<F>(place.rows), first = (i64)place.tile_row * F::BITS / 8;
    constexpr int WORDS = HEIGHT * F::BITS / 32;  // of a column
    for (int at = threadIdx.x; at < TILE_COLS * WORDS; at += Place<HEIGHT>::THREADS) {
        int column = at / WORDS, k = at % WORDS;
        int bytes = at_most_four(stride - (first + 4 * k));
        if (place.tile_col + column >= place.cols || bytes == 0) continue;
        store_bytes(plane.codes + (place.tile_col + column) * stride + first + 4 * k,
                    memory.column[column][k], bytes);
    }
}

template <class F, int HEIGHT>
ZEROCAST_FN void store_plane(const CastPlane& plane, const Place<HEIGHT>& place,
                             u32 (&word)[Place<HEIGHT>::ROWS], TileMemory<HEIGHT>& memory) {
#pragma unroll
    for (int i = 0; i < Place<HEIGHT>::ROWS; i++)
        word[i] = place.row(i) < place.rows ? existing<F>(word[i], place.left()) : 0;
    if (plane.transposed)
        store_columns<F>(plane, place, word, memory);
    else
        store_rows<F>(plane, place, word);
}

// --- a plane of a tile ---

template <class Scaling, int HEIGHT>
ZEROCAST_FN void cast_plane(const CastPlane& plane, const Place<HEIGHT>& place,
                            const Patch<HEIGHT>& patch, const Scaling& scaling,
                            TileMemory<HEIGHT>& memory) {
    typedef typename Scaling::Format F;
    TileBlocks<HEIGHT> blocks(plane, place);
    derive_multipliers(plane, blocks, place, patch, scaling, memory);
    if (!plane.codes) return;
    u32 word[Place<HEIGHT>::ROWS];
#pragma unroll
    for (int i = 0; i < Place<HEIGHT>::ROWS; i++) {
        int row = Place<HEIGHT>::ROWS * place.warp + i, col = PATCH_COLS * place.lane;
        Quad scaled;
#pragma unroll
        for (int j = 0; j < PATCH_COLS; j++) {
            int block = blocks.of(row, col + (blocks.log2_w == 0 ? j : 0));
            scaled.x[j] = patch.row[i].x[j] * Scalar::value(memory.block[block]);
        }
        word[i] = encode_quad<F>(scaled);
    }
    store_plane<F>(plane, place, word, memory);
}

template <class F, int HEIGHT>
ZEROCAST_FN void cast_plane(const CastPlane& plane, const Place<HEIGHT>& place,
                            const Patch<HEIGHT>& patch, const DelayedScaling<F>& scaling,
                            TileMemory<HEIGHT>& memory) {
    raise_scale_inv(plane, place, patch, scaling);
    if (!plane.codes) return;
    __syncthreads();  // what was in memory has been read
    u32 word[Place<HEIGHT>::ROWS];
#pragma unroll
    for (int i = 0; i < Place<HEIGHT>::ROWS; i++) {
        Quad scaled;
#pragma unroll
        for (int j = 0; j < PATCH_COLS; j++) scaled.x[j] = patch.row[i].x[j] * scaling.scale;
        word[i] = encode_quad<F>(scaled);
    }
    store_plane<F>(plane, place, word, memory);
}

// --- a launch ---

// Calls work(place, patch) with every tile of this thread block. A producer opens strips of rows
// and computes patches, not yet rounded.
template <int HEIGHT, class Producer, class Work>
ZEROCAST_FN void for_each_tile(const ActivationTask& task, const Producer& producer,
                               const Work& work) {
    const ActivationTable& table = task.table;
    u32 strips = (u32)((table.rows + HEIGHT - 1) / HEIGHT);
    u32 across = (u32)((table.cols + TILE_COLS - 1) / TILE_COLS);
    u32 per_unit = (u32)task.tiles_per_unit, groups = (across + per_unit - 1) / per_unit;
    for (u32 unit = blockIdx.x; unit < strips * groups; unit += gridDim.x) {
        u32 first = unit % groups * per_unit;
        u32 last = first + per_unit < across ? first + per_unit : across;
        Place<HEIGHT> place(table, (int)(unit / groups));
        producer.open(task, place, first == 0);
        for (u32 tile = first; tile < last; tile++) {
            place.tile_col = (int)tile * TILE_COLS;
            Patch<HEIGHT> patch = producer.patch(task, place);
            round_patch(patch, table.round_to);
            store_patch(table, place, patch);
            work(place, patch);
        }
    }
}

// The rounded result, and amaxes.
template <template <int> class Producer>
ZEROCAST_FN void produce_values(const ActivationTask& task) {
    __shared__ TileMemory<LOW> memory;
    Producer<LOW> producer;
    for_each_tile<LOW>(task, producer, [&](const Place<LOW>& place, const Patch<LOW>& patch) {
        raise_tensor_amax(task.tensor_amax, place, patch);
#pragma unroll
        for (int p = 0; p < 2; p++) {
            if (task.planes[p].block_amax) raise_block_amaxes(task.planes[p], place, patch, memory);
        }
    });
}

// All that is wanted.
template <template <int> class Producer, int HEIGHT, class Scaling>
ZEROCAST_FN void produce_codes(const ActivationTask& task, const Scaling& scaling,
                               i32* raised_amax) {
    __shared__ TileMemory<HEIGHT> memory;
    Producer<HEIGHT> producer;
    for_each_tile<HEIGHT>(task, producer,
                          [&](const Place<HEIGHT>& place, const Patch<HEIGHT>& patch) {
                              raise_tensor_amax(raised_amax, place, patch);
#pragma unroll
                              for (int p = 0; p < 2; p++) {
                                  if (task.planes[p].codes || task.planes[p].scale_inv)
                                      cast_plane(task.planes[p], place, patch, scaling, memory);
                              }
                          });
}

template <template <int> class Producer, int HEIGHT, class F>
ZEROCAST_FN void produce_float8(const ActivationTask& task) {
    Float8Scaling<F> scaling{task.power_2_scale != 0, Scalar::value((i32)task.amax_epsilon)};
    produce_codes<Producer, HEIGHT>(task, scaling, task.tensor_amax);
}

template <template <int> class Producer, class F>
ZEROCAST_FN void produce_delayed(const ActivationTask& task) {
    produce_codes<Producer, LOW>(task, DelayedScaling<F>{*task.scale}, task.tensor_amax);
}

template <template <int> class Producer, class F>
ZEROCAST_FN void produce_mxfp8(const ActivationTask& task) {
    produce_codes<Producer, LOW>(task, MXFP8Scaling<F>{}, task.tensor_amax);
}

template <template <int> class Producer>
ZEROCAST_FN void produce_nvfp4(const ActivationTask& task) {
    if (task.amax && blockIdx.x == 0 && threadIdx.x == 0) *task.amax = *task.tensor_amax;
    NVFP4Scaling scaling(*task.tensor_amax, task.scale_max);
    produce_codes<Producer, LOW>(task, scaling, nullptr);
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast

#define ZEROCAST_KERNEL(height, resident, name)                                              \
    extern "C" __global__ void __launch_bounds__(zerocast::Place<zerocast::height>::THREADS, \
                                                 resident)                                   \
        name(const __grid_constant__ zerocast::ActivationTask task)

// The kernels of one producer, by the law of the codes; registers are to do for `resident` thread
// blocks with low tiles.
#define ZEROCAST_ACTIVATION_KERNELS(name, Producer, resident)                                      \
    ZEROCAST_KERNEL(LOW, resident, name##_values) { produce_values<Producer>(task); }              \
    ZEROCAST_KERNEL(LOW, resident, name##_float8_e4m3) {                                           \
        produce_float8<Producer, LOW, E4M3>(task);                                                 \
    }                                                                                              \
    ZEROCAST_KERNEL(LOW, resident, name##_float8_e5m2) {                                           \
        produce_float8<Producer, LOW, E5M2>(task);                                                 \
    }                                                                                              \
    ZEROCAST_KERNEL(TALL, 1, name##_tall_e4m3) { produce_float8<Producer, TALL, E4M3>(task); }     \
    ZEROCAST_KERNEL(TALL, 1, name##_tall_e5m2) { produce_float8<Producer, TALL, E5M2>(task); }     \
    ZEROCAST_KERNEL(LOW, resident, name##_delayed_e4m3) { produce_delayed<Producer, E4M3>(task); } \
    ZEROCAST_KERNEL(LOW, resident, name##_delayed_e5m2) { produce_delayed<Producer, E5M2>(task); } \
    ZEROCAST_KERNEL(LOW, resident, name##_mxfp8_e4m3) { produce_mxfp8<Producer, E4M3>(task); }     \
    ZEROCAST_KERNEL(LOW, resident, name##_mxfp8_e5m2) { produce_mxfp8<Producer, E5M2>(task); }     \
    ZEROCAST_KERNEL(LOW, resident, name##_nvfp4_e2m1) { produce_nvfp4<Producer>(task); }
