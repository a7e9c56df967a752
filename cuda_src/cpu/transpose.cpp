// transpose: the columnwise codes and scales from the gathered rowwise ones, padding included.
//
// Codes go through tiles of 64x64 bytes, so that both sides of the memory are touched a whole cache line at a time.
// Two rows of nibbles become two rows of bytes, one for the even and one for the odd columns, whose bytes already hold
// the two rows side by side: what is left is a transpose of bytes.
#include <string.h>

#include "launch.h"
#include "simd.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {
namespace {

constexpr int TILE = 64;  // bytes: a cache line
typedef u8 Quarter __attribute__((vector_size(16)));

struct alignas(64) Tile {
    u8 row[TILE][TILE];
};

// 16x16 bytes: four rounds of interleaving rows i and i + 8.
ZEROCAST_FN void transpose_16x16(const Tile& from, int row, int col, Tile& to) {
    Quarter a[16], b[16];
    for (int i = 0; i < 16; i++) memcpy(&a[i], &from.row[row + i][col], 16);
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < 8; i++) {
            b[2 * i] = __builtin_shufflevector(a[i], a[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            b[2 * i + 1] = __builtin_shufflevector(a[i], a[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14,
                                                   30, 15, 31);
        }
        for (int i = 0; i < 16; i++) a[i] = b[i];
    }
    for (int i = 0; i < 16; i++) memcpy(&to.row[col + i][row], &a[i], 16);
}

void transpose_tile(const Tile& from, Tile& to) {
    for (int row = 0; row < TILE; row += 16) {
        for (int col = 0; col < TILE; col += 16) transpose_16x16(from, row, col, to);
    }
}

// A matrix of bytes, and where its rows begin.
struct Bytes {
    const u8* data;
    i64 rows, cols, stride;
};

// 64 bytes of one row from column col on, zero where the matrix has none.
ZEROCAST_FN void load_line(const Bytes& from, i64 row, i64 col, u8* line) {
    const u8* at = from.data + row * from.stride + col;
    if (row < from.rows && col + TILE <= from.cols) {
        memcpy(line, at, TILE);
    } else {
        memset(line, 0, TILE);
        if (row < from.rows && col < from.cols) memcpy(line, at, from.cols - col);
    }
}

// Rows [first, last) of tile to `to`, rows of `size` bytes, `stride` apart.
ZEROCAST_FN void store_rows(const Tile& tile, i64 rows, i64 size, u8* to, i64 stride) {
    if (size == TILE) {
        for (i64 i = 0; i < rows; i++) memcpy(to + i * stride, tile.row[i], TILE);
    } else {
        for (i64 i = 0; i < rows; i++) memcpy(to + i * stride, tile.row[i], size);
    }
}

// to[c][r] = from[r][c] for columns [first, last) of `from`; rows of `to` are `stride` apart.
void transpose_bytes(const Bytes& from, i64 first, i64 last, u8* to, i64 stride) {
    Tile in, out;
    for (i64 col = first; col < last; col += TILE) {
        for (i64 row = 0; row < from.rows; row += TILE) {
            for (int i = 0; i < TILE; i++) load_line(from, row + i, col, in.row[i]);
            transpose_tile(in, out);
            store_rows(out, min_of(TILE, last - col), min_of(TILE, from.rows - row), to + col * stride + row, stride);
        }
    }
}

// The same for nibbles: columns [first, last) count elements, and first is even. Rows of `to` hold (rows + 1) / 2
// bytes; the last nibble of an odd number of rows is 0.
void transpose_nibbles(const Bytes& from, i64 first, i64 last, u8* to) {
    i64 stride = (from.rows + 1) / 2;
    Tile even, odd, out;
    for (i64 col = first; col < last; col += 2 * TILE) {
        i64 columns = min_of(2 * TILE, last - col);
        for (i64 row = 0; row < from.rows; row += 2 * TILE) {
            for (int i = 0; i < TILE; i++) {
                alignas(TILE) u8 a[TILE], b[TILE];
                load_line(from, row + 2 * i, col / 2, a);
                load_line(from, row + 2 * i + 1, col / 2, b);
                for (int j = 0; j < TILE; j++) {
                    even.row[i][j] = (a[j] & 0x0F) | b[j] << 4;
                    odd.row[i][j] = a[j] >> 4 | (b[j] & 0xF0);
                }
            }
            i64 size = min_of(TILE, stride - row / 2);
            u8* at = to + col * stride + row / 2;
            transpose_tile(even, out);
            store_rows(out, (columns + 1) / 2, size, at, 2 * stride);
            transpose_tile(odd, out);
            store_rows(out, columns / 2, size, at + stride, 2 * stride);
        }
    }
}

void codes(const TransposeTarget& t, i64 first, i64 last) {
    if (t.format == FORMAT_E2M1) {
        i64 row_bytes = (t.cols + 1) / 2;
        transpose_nibbles(Bytes{t.codes, t.rows, row_bytes, row_bytes}, first, last, t.columnwise_codes);
    } else {
        transpose_bytes(Bytes{t.codes, t.rows, t.cols, t.cols}, first, last, t.columnwise_codes, t.rows);
    }
}

template <class Stored>
void fill(Stored* to, i64 n, i64 padding) {
    for (i64 i = 0; i < n; i++) memcpy(to + i, &padding, sizeof *to);  // little-endian: the low bytes
}

// Columnwise scales of block columns [first, last): each is a row there, repeated.
template <class Stored>
void scales(const TransposeTarget& t, i64 first, i64 last) {
    auto from = (const Stored*)t.scale_inv;
    auto plane = (Stored*)t.columnwise_scale_inv;
    i64 from_stride = t.row_repeat * t.padded_cols, to_stride = t.columnwise_row_repeat * t.columnwise_padded_cols;
    if constexpr (sizeof(Stored) == 1) {
        transpose_bytes(Bytes{from, t.blocks_h, t.blocks_w, from_stride}, first, last, plane, to_stride);
    } else {
        for (i64 c = first; c < last; c++) {
            for (i64 r = 0; r < t.blocks_h; r++) plane[c * to_stride + r] = from[r * from_stride + c];
        }
    }
    for (i64 c = first; c < last; c++) {
        i64 row = c * t.columnwise_row_repeat, row_end = min_of(row + t.columnwise_row_repeat, t.columnwise_rows);
        Stored* to = plane + row * t.columnwise_padded_cols;
        fill(to + t.blocks_h, t.columnwise_padded_cols - t.blocks_h, t.padding);
        for (i64 r = row + 1; r < row_end; r++) {
            memcpy(plane + r * t.columnwise_padded_cols, to, t.columnwise_padded_cols * sizeof(Stored));
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
    auto elements = [](const TransposeTarget& t) { return Span{0, t.rows * t.cols, 2 * TILE * t.rows}; };
    auto scale_plane = [](const TransposeTarget& t) { return Span{0, t.blocks_h * t.blocks_w, TILE * max_of(t.blocks_h, 1)}; };
    i64 total = total_elements(targets, count, elements);
    i64 total_scales = total_elements(targets, count, scale_plane);
    in_parallel(total, threads, [&](i64 part, i64 parts) {
        share(targets, count, total, part, parts, elements, [](const TransposeTarget& t, i64 begin, i64 end) {
            codes(t, begin / t.rows, end / t.rows);
        });
        share(targets, count, total_scales, part, parts, scale_plane, [](const TransposeTarget& t, i64 begin, i64 end) {
            if (t.scale_bytes == 1) scales<u8>(t, begin / t.blocks_h, end / t.blocks_h);
            else scales<u32>(t, begin / t.blocks_h, end / t.blocks_h);
        });
    });
}
