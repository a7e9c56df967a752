// transpose: the columnwise codes and scales from the gathered rowwise ones, padding included.
//
// Bytes are transposed in three steps, which touch both sides of the memory in whole cache lines
// and long runs: 16 rows at a time, squares of 16x16 bytes are transposed within the registers; a
// block of them is collected in the nearest caches; then the rows of `to` leave the block, the
// squares put side by side on the way out. Nibbles take the same steps: two rows of them are
// combined between the first step and the second.
#include <string.h>

#include "cpu/scale_rows.h"
#include "cpu/simd.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {
namespace {

// --- 64x64 bytes in the registers: first the squares of 16x16 bytes within themselves, then the
// squares among each other ---

constexpr int TILE = 64;    // bytes: a cache line
constexpr int SQUARE = 16;  // bytes: as far as a shuffle of bytes reaches

typedef u8 Line[TILE];
typedef Native::Bytes4 Bytes4;
constexpr int WIDE = sizeof(Bytes4);
typedef IndicesTo<WIDE>::Type Everywhere;

// Within each 16 bytes: the first halves of a and b interleaved (HALF 0), or their second halves
// (HALF 1).
template <int HALF, int... I>
ZEROCAST_FN Bytes4 interleave(Bytes4 a, Bytes4 b, Indices<I...>) {
    return __builtin_shufflevector(a, b, (I / 16 * 16 + I % 16 / 2 + 8 * HALF + I % 2 * WIDE)...);
}

// a and b end to end, every second 16 bytes of them: from the first on (FIRST 0), or the second.
template <int FIRST, int... I>
ZEROCAST_FN Bytes4 every_second_square(Bytes4 a, Bytes4 b, Indices<I...>) {
    return __builtin_shufflevector(a, b, (I / 16 * 32 + FIRST * 16 + I % 16)...);
}

// 16 lines: in each 16 columns of them, byte (row r, column c) moves to (row c, column r). Four
// rounds of interleaving rows i and i + 8 do that. (GCC 12 makes all of it a tenth slower where
// this is not called inline.)
inline void transpose_squares(const u8* from, i64 stride, Line* to) {
    for (int col = 0; col < TILE; col += WIDE) {
        Bytes4 a[SQUARE], b[SQUARE];
        for (int i = 0; i < SQUARE; i++) memcpy(&a[i], from + i * stride + col, WIDE);
        for (int round = 0; round < 4; round++) {
            for (int i = 0; i < 8; i++) {
                b[2 * i] = interleave<0>(a[i], a[i + 8], Everywhere{});
                b[2 * i + 1] = interleave<1>(a[i], a[i + 8], Everywhere{});
            }
            for (int i = 0; i < SQUARE; i++) a[i] = b[i];
        }
        for (int i = 0; i < SQUARE; i++) memcpy(&to[i][col], &a[i], WIDE);
    }
}

// Rows i, 16 + i, 32 + i and 48 + i of the transpose of a tile, whose squares are transposed within
// themselves: a register holds pieces of so many rows, and rounds of taking every second one sort
// them.
ZEROCAST_FN void rows_of(const Line* tile, int i, Line* rows) {
    constexpr int N = WIDE / SQUARE, REGISTERS = TILE / WIDE;
    for (int across = 0; across < REGISTERS; across++) {
        for (int down = 0; down < REGISTERS; down++) {
            Bytes4 a[N], b[N];
            for (int k = 0; k < N; k++)
                memcpy(&a[k], &tile[(down * N + k) * SQUARE + i][across * WIDE], WIDE);
            for (int round = 1; round < N; round *= 2) {
                for (int k = 0; k < N / 2; k++) {
                    b[k] = every_second_square<0>(a[2 * k], a[2 * k + 1], Everywhere{});
                    b[k + N / 2] = every_second_square<1>(a[2 * k], a[2 * k + 1], Everywhere{});
                }
                for (int k = 0; k < N; k++) a[k] = b[k];
            }
            for (int k = 0; k < N; k++) memcpy(&rows[across * N + k][down * WIDE], &a[k], WIDE);
        }
    }
}

// --- matrices ---

// A block is so many tiles of `from`: two lines side by side are read of each of its rows, and four
// side by side are written to each row of `to`. With one thread, on matrices far larger than the
// caches, single tiles reached about 70 % of this speed and two by two 80 to 90 %; four by four
// brought nothing more.
constexpr int TILES_DOWN = 4, TILES_ACROSS = 2;
constexpr i64 BLOCK_ROWS = TILES_DOWN * TILE, BLOCK_COLS = TILES_ACROSS * TILE;

// Lines are asked for so many rows before they are transposed: half a block, for two whole ones of
// rows that are a power of two apart crowd each other out of the second-level cache, too.
// 8192x8192, two threads: 69 to 89 % of the copy rate for nibbles, 72 to 82 % for bytes; 32 rows
// gain less.
constexpr i64 ROWS_AHEAD = 128;

// Launches of more elements write past the caches, as a copy of that size does: what they write
// would not stay there.
constexpr i64 STREAM_ELEMENTS = 1 << 23;

// The first `rows` rows that tiles below each other become, `size` bytes of each, to rows `stride`
// bytes apart. STREAM needs whole tiles and aligned lines.
template <bool WHOLE, bool STREAM>
void store_rows(const Line* tiles, i64 rows, i64 size, u8* to, i64 stride) {
    for (int i = 0; i < SQUARE; i++) {
        for (i64 from = 0; from < size; from += TILE) {
            alignas(TILE) Line lines[TILE / SQUARE];
            rows_of(tiles + from, i, lines);
            for (int k = 0; k < TILE / SQUARE; k++) {
                u8* at = to + (k * SQUARE + i) * stride + from;
                if (STREAM)
                    stream_line(at, lines[k]);
                else if (WHOLE)
                    memcpy(at, lines[k], TILE);
                else if (k * SQUARE + i < rows)
                    memcpy(at, lines[k], min_of(TILE, size - from));
            }
        }
    }
}

void store_rows(const Line* tiles, i64 rows, i64 size, u8* to, i64 stride, bool stream) {
    if (rows < TILE || size % TILE)
        store_rows<false, false>(tiles, rows, size, to, stride);
    else if (stream && ((u64)to | (u64)stride) % TILE == 0)
        store_rows<true, true>(tiles, rows, size, to, stride);
    else
        store_rows<true, false>(tiles, rows, size, to, stride);
}

// A matrix of bytes, and where its rows begin.
struct Bytes {
    const u8* data;
    i64 rows, cols, stride;
};

// Lines of a matrix below each other: `at` and what follows it every `stride` bytes.
struct Lines {
    const u8* at;
    i64 stride;
};

// COUNT lines from (row, col) on: where they are or, where the matrix ends before them, a copy in
// `scratch` that is filled up with zeros. Those `ahead` bytes further are asked for, into the
// second-level cache: rows that are a power of two apart would crowd each other out of the first.
template <int COUNT>
ZEROCAST_FN Lines lines_of(const Bytes& from, i64 row, i64 col, i64 ahead, Line* scratch) {
    const u8* at = from.data + row * from.stride + col;
    i64 rows = min_of(COUNT, from.rows - row), cols = min_of(TILE, from.cols - col);
    if (rows == COUNT && cols == TILE) {
        for (i64 i = 0; i < COUNT; i++) __builtin_prefetch(at + i * from.stride + ahead, 0, 2);
        return Lines{at, from.stride};
    }
    memset(scratch, 0, COUNT * TILE);
    for (i64 i = 0; i < rows; i++) memcpy(scratch[i], at + i * from.stride, cols);
    return Lines{scratch[0], TILE};
}

// Goes through columns [first, last) of `from` block by block, to the right and then down. Calls
//     transpose(lines, c, r)     for ROWS * 16 lines, which make 16 bytes of each row of `to`: in
//                                tile c across the block, from byte r down it on
//     store(row, col, rows, c)   when tile c is complete, all `rows` bytes down it: it began at row
//                                `row` and column `col` of the matrix
template <int ROWS, class Transpose, class Store>
void for_each_block(const Bytes& from, i64 first, i64 last, const Transpose& transpose,
                    const Store& store) {
    alignas(TILE) Line scratch[ROWS * SQUARE];
    i64 height = ROWS * BLOCK_ROWS * from.stride;
    for (i64 row = 0; row < from.rows; row += ROWS * BLOCK_ROWS) {
        i64 rows = min_of(BLOCK_ROWS, (from.rows - row + ROWS - 1) / ROWS);
        for (i64 col = first; col < last; col += BLOCK_COLS) {
            i64 down = min_of(ROWS_AHEAD, rows);
            // How far ahead of row r stands what is asked for: further down, or in the next block.
            auto ahead = [&](i64 r) {
                if (r + down < rows) return down * ROWS * from.stride;
                i64 next = col + BLOCK_COLS < last ? BLOCK_COLS : height - (col - first);
                return (down - rows) * ROWS * from.stride + next;
            };
            for (i64 r = 0; r < rows; r += SQUARE) {
                for (i64 c = 0; c < min_of(BLOCK_COLS, last - col); c += TILE) {
                    constexpr int COUNT = ROWS * SQUARE;
                    auto lines = lines_of<COUNT>(from, row + ROWS * r, col + c, ahead(r), scratch);
                    transpose(lines, c / TILE, r);
                }
            }
            for (i64 c = 0; c < min_of(BLOCK_COLS, last - col); c += TILE)
                store(row, col + c, rows, c / TILE);
        }
    }
}

// to[c][r] = from[r][c] for columns [first, last) of `from`.
void transpose_bytes(const Bytes& from, i64 first, i64 last, u8* to, i64 stride, bool stream) {
    alignas(TILE) Line tiles[TILES_ACROSS][BLOCK_ROWS];
    auto transpose = [&](const Lines& lines, i64 c, i64 r) {
        transpose_squares(lines.at, lines.stride, &tiles[c][r]);
    };
    auto store = [&](i64 row, i64 col, i64 rows, i64 c) {
        store_rows(tiles[c], min_of(TILE, last - col), rows, to + col * stride + row, stride,
                   stream);
    };
    for_each_block<1>(from, first, last, transpose, store);
}

// The same for nibbles: columns [first, last) count elements, and first is even. Rows of `to` hold
// (rows + 1) / 2 bytes; the last nibble of an odd number of rows is 0.
void transpose_nibbles(const Bytes& from, i64 first, i64 last, u8* to, bool stream) {
    alignas(TILE) Line even[TILES_ACROSS][BLOCK_ROWS], odd[TILES_ACROSS][BLOCK_ROWS];
    alignas(TILE) Line upper[SQUARE], lower[SQUARE];
    i64 stride = (from.rows + 1) / 2;
    auto transpose = [&](const Lines& lines, i64 c, i64 r) {
        transpose_squares(lines.at, 2 * lines.stride, upper);
        transpose_squares(lines.at + lines.stride, 2 * lines.stride, lower);
        for (int i = 0; i < SQUARE; i++) {
            for (int j = 0; j < TILE; j += WIDE) {
                auto a = Native::load_as<Native::Unsigned>(&upper[i][j]);
                auto b = Native::load_as<Native::Unsigned>(&lower[i][j]);
                Native::store(&even[c][r + i][j], (a & 0x0F0F0F0Fu) | (b & 0x0F0F0F0Fu) << 4);
                Native::store(&odd[c][r + i][j], (a >> 4 & 0x0F0F0F0Fu) | (b & 0xF0F0F0F0u));
            }
        }
    };
    auto store = [&](i64 row, i64 col, i64 size, i64 c) {
        i64 columns = min_of(2 * TILE, last - 2 * col);
        u8* at = to + 2 * col * stride + row / 2;
        store_rows(even[c], (columns + 1) / 2, size, at, 2 * stride, stream);
        store_rows(odd[c], columns / 2, size, at + stride, 2 * stride, stream);
    };
    for_each_block<2>(from, first / 2, (last + 1) / 2, transpose, store);
}

void codes(const TransposeTarget& t, i64 first, i64 last, bool stream) {
    const Grid& grid = t.rowwise.grid;
    bool nibbles = t.format == FORMAT_E2M1;
    i64 row_bytes = nibbles ? (grid.cols + 1) / 2 : grid.cols;
    Bytes from{t.codes, grid.rows, row_bytes, row_bytes};
    if (nibbles)
        transpose_nibbles(from, first, last, t.columnwise_codes, stream);
    else
        transpose_bytes(from, first, last, t.columnwise_codes, grid.rows, stream);
}

// Columnwise scales of block columns [first, last): each is a row there, repeated.
template <class Stored>
void scales(const TransposeTarget& t, i64 first, i64 last) {
    auto from = (const Stored*)t.rowwise.scale_inv;
    i64 from_stride = t.rowwise.down();
    i64 blocks_h = t.rowwise.grid.blocks_h(), blocks_w = t.rowwise.grid.blocks_w();
    if constexpr (sizeof(Stored) == 1) {
        transpose_bytes(Bytes{from, blocks_h, blocks_w, from_stride}, first, last,
                        (u8*)t.columnwise.scale_inv, t.columnwise.down(), false);
    }
    store_rows<Stored>(t.columnwise, first, last, [&](i64 c, Stored* to) {
        if (sizeof(Stored) == 1) return;  // they are there
        for (i64 r = 0; r < blocks_h; r++) to[r] = from[r * from_stride + c];
    });
    if (last == blocks_w) pad_rows<Stored>(t.columnwise);
}

}  // namespace
}  // namespace ZEROCAST_ISA
}  // namespace zerocast

ZEROCAST_EXPORT(transpose)(const void* table, long long count, long long threads) {
    using namespace zerocast;
    auto targets = (const TransposeTarget*)table;
    // Cut between tiles of columns, which are whole rows of the columnwise copy.
    auto elements = [](const TransposeTarget& t) {
        const Grid& grid = t.rowwise.grid;
        return Span{0, grid.numel(), 2 * TILE * grid.rows};
    };
    auto scale_plane = [](const TransposeTarget& t) {
        const Grid& grid = t.rowwise.grid;
        return Span{0, t.columnwise.scale_inv ? grid.num_blocks() : 0, TILE * grid.blocks_h()};
    };
    i64 total = total_elements(targets, count, elements);
    bool stream = total > STREAM_ELEMENTS;
    in_parallel(total, threads, [&](i64 thread, i64 num_threads) {
        share(targets, count, thread, num_threads, elements,
              [&](const TransposeTarget& t, i64 begin, i64 end) {
                  i64 rows = t.rowwise.grid.rows;
                  codes(t, begin / rows, end / rows, stream);
              });
        share(targets, count, thread, num_threads, scale_plane,
              [](const TransposeTarget& t, i64 begin, i64 end) {
                  i64 blocks_h = t.rowwise.grid.blocks_h();
                  if (t.scale_bytes == 1)
                      scales<u8>(t, begin / blocks_h, end / blocks_h);
                  else
                      scales<u32>(t, begin / blocks_h, end / blocks_h);
              });
        if (stream) stream_fence();
    });
}
