// transpose: the columnwise codes and scales from the gathered rowwise ones, padding included.
//
// Everything is a transpose of bytes, 4x4 in registers and the rest through shared memory, so that
// both sides of the memory are touched 16 bytes a thread and 128 bytes a row. Two rows of nibbles
// become two rows of bytes, one for the even and one for the odd columns, whose bytes already hold
// the two rows side by side.
//
// A weight has two planes: codes (number 0) in squares of 128x128 bytes, and scales (number 1),
// where every row is stored as often as it repeats.
#include "cuda/planes.h"

using namespace zerocast;

constexpr int SIDE = 128;            // bytes of a square
constexpr int SQUARE_THREADS = 256;  // each holds 4 rows of 16 bytes

struct Square {
    uint4 row[SIDE][SIDE / 16];  // 16 KiB; swizzled() says which 16 bytes are where
};

// Where bytes [16 * at, 16 * at + 16) of a row are: threads that fill one word of 32 rows each, and
// threads that read 16 bytes of a row, then touch all banks evenly.
static ZEROCAST_FN int swizzled(int row, int at) { return at ^ (row >> 4 & 7); }

// The thread's share of a square: rows 4 * group to 4 * group + 3, bytes 16 * at to 16 * at + 15.
struct ThreadShare {
    int group, at;
    ZEROCAST_FN explicit ThreadShare(int thread) : group(thread / 8), at(thread % 8) {}
};

// Puts the thread's share, four rows of four words, into the square's columns.
static ZEROCAST_FN void put_transposed(Square& square, const ThreadShare& share,
                                       const uint4 (&rows)[4]) {
    const u32 words[4][4] = {{rows[0].x, rows[1].x, rows[2].x, rows[3].x},
                             {rows[0].y, rows[1].y, rows[2].y, rows[3].y},
                             {rows[0].z, rows[1].z, rows[2].z, rows[3].z},
                             {rows[0].w, rows[1].w, rows[2].w, rows[3].w}};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 columns[4] = {words[j][0], words[j][1], words[j][2], words[j][3]};
        transpose_4x4(columns);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            int row = 16 * share.at + 4 * j + k;
            ((u32*)&square.row[row][swizzled(row, share.group / 4)])[share.group % 4] = columns[k];
        }
    }
}

// A matrix of bytes, rows `stride` apart.
template <class Byte>
struct Bytes {
    Byte* data;
    i64 rows, cols, stride;

    ZEROCAST_FN Byte* at(i64 row, i64 col) const { return data + row * stride + col; }
    // Whether 16 bytes at any multiple of 16 columns can be moved at once.
    ZEROCAST_FN bool aligned() const { return (u64)data % 16 == 0 && stride % 16 == 0; }
};

// 16 bytes from (row, col), zero where the matrix has none.
static ZEROCAST_FN uint4 load_16(const Bytes<const u8>& from, bool aligned, i64 row, i64 col) {
    if (row >= from.rows || col >= from.cols) return uint4{0, 0, 0, 0};
    if (aligned && col + 16 <= from.cols) return *(const uint4*)from.at(row, col);
    u32 word[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 16; i++) {
        if (col + i < from.cols) word[i / 4] |= (u32)*from.at(row, col + i) << 8 * (i % 4);
    }
    return uint4{word[0], word[1], word[2], word[3]};
}

static ZEROCAST_FN void store_16(const Bytes<u8>& to, bool aligned, i64 row, i64 col,
                                 const uint4& v) {
    if (row >= to.rows || col >= to.cols) return;
    if (aligned && col + 16 <= to.cols) {
        *(uint4*)to.at(row, col) = v;
        return;
    }
    const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 16; i++) {
        if (col + i < to.cols) *to.at(row, col + i) = (u8)(word[i / 4] >> 8 * (i % 4));
    }
}

// Rows first, first + step, ... of `to`, from column col on, are the rows of the square.
static ZEROCAST_FN void store_square(const Square& square, const Bytes<u8>& to, i64 first, int step,
                                     i64 col) {
    bool aligned = to.aligned();
#pragma unroll
    for (int i = threadIdx.x; i < SIDE * (SIDE / 16); i += SQUARE_THREADS) {
        int row = i / (SIDE / 16), at = i % (SIDE / 16);
        store_16(to, aligned, first + (i64)row * step, col + 16 * at,
                 square.row[row][swizzled(row, at)]);
    }
}

// --- codes ---

static ZEROCAST_FN void transpose_bytes(const TransposeTarget& target, const PlaneTile& tile,
                                        Square& square) {
    i64 height = target.rowwise.grid.rows, width = target.rowwise.grid.cols;
    Bytes<const u8> from{target.codes, height, width, width};
    ThreadShare share(threadIdx.x);
    bool aligned = from.aligned();
    uint4 rows[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        rows[i] = load_16(from, aligned, tile.row + 4 * share.group + i, tile.col + 16 * share.at);
    put_transposed(square, share, rows);
    __syncthreads();
    store_square(square, Bytes<u8>{target.columnwise_codes, width, height, height}, tile.col, 1,
                 tile.row);
}

// Low nibbles of a and b to one word, high ones to another; in each byte a's nibble is the low one.
static ZEROCAST_FN void split_nibbles(u32 a, u32 b, u32& even, u32& odd) {
    even = (a & 0x0F0F0F0Fu) | (b & 0x0F0F0F0Fu) << 4;
    odd = (a >> 4 & 0x0F0F0F0Fu) | (b & 0xF0F0F0F0u);
}

// tile.row and tile.col count bytes of the columnwise copy and of the rows: two rows, two columns a
// byte.
static ZEROCAST_FN void transpose_nibbles(const TransposeTarget& target, const PlaneTile& tile,
                                          Square& even, Square& odd) {
    i64 height = target.rowwise.grid.rows, width = target.rowwise.grid.cols;
    Bytes<const u8> from{target.codes, height, (width + 1) / 2, (width + 1) / 2};
    ThreadShare share(threadIdx.x);
    bool aligned = from.aligned();
    uint4 evens[4], odds[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        i64 row = 2 * (tile.row + 4 * share.group + i), col = tile.col + 16 * share.at;
        uint4 a = load_16(from, aligned, row, col), b = load_16(from, aligned, row + 1, col);
        split_nibbles(a.x, b.x, evens[i].x, odds[i].x);
        split_nibbles(a.y, b.y, evens[i].y, odds[i].y);
        split_nibbles(a.z, b.z, evens[i].z, odds[i].z);
        split_nibbles(a.w, b.w, evens[i].w, odds[i].w);
    }
    put_transposed(even, share, evens);
    put_transposed(odd, share, odds);
    __syncthreads();
    i64 stride = (height + 1) / 2;
    Bytes<u8> to{target.columnwise_codes, width, stride, stride};
    store_square(even, to, 2 * tile.col, 2, tile.row);
    store_square(odd, to, 2 * tile.col + 1, 2, tile.row);
}

// --- scales ---

template <class Stored>
static ZEROCAST_FN void transpose_scales(const TransposeTarget& target, const PlaneTile& tile) {
    store_scales<Stored, SQUARE_THREADS>(target.columnwise, tile,
                                         (const Stored*)target.rowwise.scale_inv, 1,
                                         target.rowwise.down(), [](i32 bits, i64) { return bits; });
}

static ZEROCAST_FN void scales_of(const TransposeTarget& target, const PlaneTile& tile) {
    if (target.scale_bytes == 1)
        transpose_scales<u8>(target, tile);
    else
        transpose_scales<i32>(target, tile);
}

template <int BITS>
__global__ void __launch_bounds__(SQUARE_THREADS, BITS == 4 ? 3 : 0)
    transpose(const TransposeTarget* __restrict__ targets, const PlaneTile* __restrict__ tiles,
              i64 count) {
    __shared__ Square squares[8 / BITS];
    for (i64 t = blockIdx.x; t < count; t += gridDim.x) {
        const TransposeTarget& target = targets[tiles[t].weight];
        if (tiles[t].plane == 1)
            scales_of(target, tiles[t]);
        else if constexpr (BITS == 4)
            transpose_nibbles(target, tiles[t], squares[0], squares[1]);
        else
            transpose_bytes(target, tiles[t], squares[0]);
        __syncthreads();  // before the next tile fills the squares
    }
}
