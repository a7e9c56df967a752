// transpose: the columnwise codes and scales from the gathered rowwise ones, padding included.
//
// Codes go through tiles of 64x64 bytes, so that both sides of the memory are touched a whole cache
// line at a time. Two rows of nibbles become two rows of bytes, one for the even and one for the
// odd columns, whose bytes already hold the two rows side by side: what is left is a transpose of
// bytes.
#include <string.h>

#include "launch.h"
#include "simd.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {
namespace {

constexpr int TILE = 64;  // bytes: a cache line

// Launches of more elements write past the caches, as a copy of that size does: what they write
// would not stay there.
constexpr i64 STREAM_ELEMENTS = 1 << 23;

struct alignas(TILE) Tile {
    u8 row[TILE][TILE];
};

typedef Native::Bytes4 Bytes4;
constexpr int WIDE = sizeof(Bytes4);
typedef IndicesTo<WIDE>::Type Everywhere;

// Within each 16 bytes: the first halves of a and b interleaved (HALF 0), or their second halves
// (HALF 1).
template <int HALF, int... I>
ZEROCAST_FN Bytes4 interleave(Bytes4 a, Bytes4 b, Indices<I...>) {
    return __builtin_shufflevector(a, b, (I / 16 * 16 + I % 16 / 2 + 8 * HALF + I % 2 * WIDE)...);
}

// 16 rows from `row` on: in each 16 columns of them, byte (row r, column c) moves to (row c, column
// r). Four rounds of interleaving rows i and i + 8 do that.
ZEROCAST_FN void transpose_within_squares(Tile& tile, int row, int col) {
    Bytes4 a[16], b[16];
    for (int i = 0; i < 16; i++) memcpy(&a[i], &tile.row[row + i][col], WIDE);
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < 8; i++) {
            b[2 * i] = interleave<0>(a[i], a[i + 8], Everywhere{});
            b[2 * i + 1] = interleave<1>(a[i], a[i + 8], Everywhere{});
        }
        for (int i = 0; i < 16; i++) a[i] = b[i];
    }
    for (int i = 0; i < 16; i++) memcpy(&tile.row[row + i][col], &a[i], WIDE);
}

// Overwrites `from`.
void transpose_tile(Tile& from, Tile& to) {
    for (int row = 0; row < TILE; row += 16) {
        for (int col = 0; col < TILE; col += WIDE) transpose_within_squares(from, row, col);
    }
    // The squares themselves, 16 bytes a copy.
    for (int col = 0; col < TILE; col += 16) {
        for (int i = 0; i < 16; i++) {
            for (int row = 0; row < TILE; row += 16)
                memcpy(&to.row[col + i][row], &from.row[row + i][col], 16);
        }
    }
}

// A matrix of bytes, and where its rows begin.
struct Bytes {
    const u8* data;
    i64 rows, cols, stride;
};

// 64 bytes of one row from column col on: where they are or, where the matrix ends before them, a
// copy in `scratch` that is filled up with zeros. What the next tile to the right needs is asked
// for, into the second-level cache: rows that are a power of two apart would crowd each other out
// of the first.
ZEROCAST_FN const u8* line_of(const Bytes& from, i64 row, i64 col, u8* scratch) {
    const u8* at = from.data + row * from.stride + col;
    if (row < from.rows && col + TILE <= from.cols) {
        __builtin_prefetch(at + TILE, 0, 2);
        return at;
    }
    memset(scratch, 0, TILE);
    if (row < from.rows && col < from.cols) memcpy(scratch, at, from.cols - col);
    return scratch;
}

// The first `rows` rows of a tile, `size` bytes of each, to rows `stride` bytes apart. With
// `stream`, whole lines go to memory past the caches.
ZEROCAST_FN void store_rows(const Tile& tile, i64 rows, i64 size, u8* to, i64 stride, bool stream) {
    if (size == TILE && stream && ((u64)to | (u64)stride) % TILE == 0) {
        for (i64 i = 0; i < rows; i++) stream_line(to + i * stride, tile.row[i]);
    } else if (size == TILE) {
        for (i64 i = 0; i < rows; i++) memcpy(to + i * stride, tile.row[i], TILE);
    } else {
        for (i64 i = 0; i < rows; i++) memcpy(to + i * stride, tile.row[i], size);
    }
}

// Calls tile(row, col) for the tiles of rows [0, rows) and columns [first, last), square by square
// of SQUARE tiles a side: so the pages of both matrices that one square touches stay in the
// translation cache.
template <class Work>
void for_each_tile(i64 rows, i64 first, i64 last, i64 tile_rows, i64 tile_cols, const Work& work) {
    constexpr i64 SQUARE = 8;
    for (i64 top = 0; top < rows; top += SQUARE * tile_rows) {
        for (i64 left = first; left < last; left += SQUARE * tile_cols) {
            for (i64 row = top; row < min_of(rows, top + SQUARE * tile_rows); row += tile_rows) {
                for (i64 col = left; col < min_of(last, left + SQUARE * tile_cols);
                     col += tile_cols)
                    work(row, col);
            }
        }
    }
}

// to[c][r] = from[r][c] for columns [first, last) of `from`.
void transpose_bytes(const Bytes& from, i64 first, i64 last, u8* to, i64 stride, bool stream) {
    for_each_tile(from.rows, first, last, TILE, TILE, [&](i64 row, i64 col) {
        Tile in, out;
        for (int i = 0; i < TILE; i++)
            memcpy(in.row[i], line_of(from, row + i, col, out.row[0]), TILE);
        transpose_tile(in, out);
        u8* at = to + col * stride + row;
        store_rows(out, min_of(TILE, last - col), min_of(TILE, from.rows - row), at, stride,
                   stream);
    });
}

// The same for nibbles: columns [first, last) count elements, and first is even. Rows of `to` hold
// (rows + 1) / 2 bytes; the last nibble of an odd number of rows is 0.
void transpose_nibbles(const Bytes& from, i64 first, i64 last, u8* to, bool stream) {
    i64 stride = (from.rows + 1) / 2;
    for_each_tile(from.rows, first, last, 2 * TILE, 2 * TILE, [&](i64 row, i64 col) {
        Tile even, odd, out;
        for (int i = 0; i < TILE; i++) {
            const u8* upper = line_of(from, row + 2 * i, col / 2, out.row[0]);
            const u8* lower = line_of(from, row + 2 * i + 1, col / 2, out.row[1]);
            for (int j = 0; j < TILE; j += WIDE) {
                auto a = Native::load_as<Native::Unsigned>(upper + j);
                auto b = Native::load_as<Native::Unsigned>(lower + j);
                Native::store(&even.row[i][j], (a & 0x0F0F0F0Fu) | (b & 0x0F0F0F0Fu) << 4);
                Native::store(&odd.row[i][j], (a >> 4 & 0x0F0F0F0Fu) | (b & 0xF0F0F0F0u));
            }
        }
        i64 columns = min_of(2 * TILE, last - col), size = min_of(TILE, stride - row / 2);
        u8* at = to + col * stride + row / 2;
        transpose_tile(even, out);
        store_rows(out, (columns + 1) / 2, size, at, 2 * stride, stream);
        transpose_tile(odd, out);
        store_rows(out, columns / 2, size, at + stride, 2 * stride, stream);
    });
}

void codes(const TransposeTarget& t, i64 first, i64 last, bool stream) {
    if (t.format == FORMAT_E2M1) {
        i64 row_bytes = (t.cols + 1) / 2;
        transpose_nibbles(Bytes{t.codes, t.rows, row_bytes, row_bytes}, first, last,
                          t.columnwise_codes, stream);
    } else {
        transpose_bytes(Bytes{t.codes, t.rows, t.cols, t.cols}, first, last, t.columnwise_codes,
                        t.rows, stream);
    }
}

template <class Stored>
void fill(Stored* to, i64 n, i64 padding) {
    for (i64 i = 0; i < n; i++)
        memcpy(to + i, &padding, sizeof *to);  // little-endian: the low bytes
}

// Columnwise scales of block columns [first, last): each is a row there, repeated.
template <class Stored>
void scales(const TransposeTarget& t, i64 first, i64 last) {
    auto from = (const Stored*)t.scale_inv;
    auto plane = (Stored*)t.columnwise_scale_inv;
    i64 from_stride = t.row_repeat * t.padded_cols,
        to_stride = t.columnwise_row_repeat * t.columnwise_padded_cols;
    if constexpr (sizeof(Stored) == 1) {
        transpose_bytes(Bytes{from, t.blocks_h, t.blocks_w, from_stride}, first, last, plane,
                        to_stride, false);
    } else {
        for (i64 c = first; c < last; c++) {
            for (i64 r = 0; r < t.blocks_h; r++)
                plane[c * to_stride + r] = from[r * from_stride + c];
        }
    }
    for (i64 c = first; c < last; c++) {
        i64 row = c * t.columnwise_row_repeat,
            row_end = min_of(row + t.columnwise_row_repeat, t.columnwise_rows);
        Stored* to = plane + row * t.columnwise_padded_cols;
        fill(to + t.blocks_h, t.columnwise_padded_cols - t.blocks_h, t.padding);
        for (i64 r = row + 1; r < row_end; r++) {
            memcpy(plane + r * t.columnwise_padded_cols, to,
                   t.columnwise_padded_cols * sizeof(Stored));
        }
    }
    if (last == t.blocks_w) {
        i64 used = t.columnwise_rows * t.columnwise_padded_cols;
        fill(plane + used, t.columnwise_padded_rows * t.columnwise_padded_cols - used, t.padding);
    }
}

}  // namespace
}  // namespace ZEROCAST_ISA
}  // namespace zerocast

ZEROCAST_EXPORT(transpose)(const void* table, long long count, long long threads) {
    using namespace zerocast;
    auto targets = (const TransposeTarget*)table;
    // Cut between tiles of columns, which are whole rows of the columnwise copy.
    auto elements = [](const TransposeTarget& t) {
        return Span{0, t.rows * t.cols, 2 * TILE * t.rows};
    };
    auto scale_plane = [](const TransposeTarget& t) {
        return Span{0, t.blocks_h * t.blocks_w, TILE * max_of(t.blocks_h, 1)};
    };
    i64 total = total_elements(targets, count, elements);
    bool stream = total > STREAM_ELEMENTS;
    i64 total_scales = total_elements(targets, count, scale_plane);
    in_parallel(total, threads, [&](i64 part, i64 parts) {
        share(targets, count, total, part, parts, elements,
              [&](const TransposeTarget& t, i64 begin, i64 end) {
                  codes(t, begin / t.rows, end / t.rows, stream);
              });
        share(targets, count, total_scales, part, parts, scale_plane,
              [](const TransposeTarget& t, i64 begin, i64 end) {
                  if (t.scale_bytes == 1)
                      scales<u8>(t, begin / t.blocks_h, end / t.blocks_h);
                  else
                      scales<u32>(t, begin / t.blocks_h, end / t.blocks_h);
              });
        if (stream) stream_fence();
    });
}
