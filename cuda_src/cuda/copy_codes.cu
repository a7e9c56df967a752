// copy_codes: codes between weights and the buffer that is sent, unchanged.
//
// A row is a range of whole bytes, or one byte of which two ranks have a nibble each: one thread
// combines both, so nothing is written twice. Bytes have any alignment: stores of 16 bytes are
// aligned; what is loaded may have to be shifted.
#include "cuda/planes.h"

using namespace zerocast;

constexpr int TILE_BYTES = 1 << 14;
constexpr int UNIT = 16;          // bytes stored at once
constexpr int UNITS_AT_ONCE = 4;  // loaded by a thread before it stores the first

struct CodeCopy {
    u8* codes;   // of the weight
    i64 staged;  // where they are in the buffer
    i64 bytes;   // 0 for a shared byte: its low nibble is that of `staged`,
    i64 high;    // and its high nibble that of `high`; -1 keeps the weight's own
};
static_assert(sizeof(CodeCopy) == 4 * sizeof(i64), "a row that Python writes");

// 16 bytes from an address that is a multiple of ALIGNED, or of nothing where it is 1: then the
// word around each end is read.
template <int ALIGNED>
ZEROCAST_FN int4 load_unit(const u8* from) {
    if constexpr (ALIGNED == 16) return *(const int4*)from;
    int shift = ALIGNED == 4 ? 0 : (int)((u64)from % 4);
    auto words = (const u32*)(from - shift);
    u32 w[5];
#pragma unroll
    for (int i = 0; i < 5; i++) w[i] = i < 4 || shift ? words[i] : 0;
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = (u32)((((u64)w[i + 1] << 32) | w[i]) >> (8 * shift));
    return int4{(i32)w[0], (i32)w[1], (i32)w[2], (i32)w[3]};
}

// Copies units [first, end) of 16 bytes from `from` to `to`, by all threads of the block.
template <int ALIGNED>
ZEROCAST_FN void copy_units(u8* to, const u8* from, int first, int end) {
    for (int u = first + threadIdx.x; u < end; u += UNITS_AT_ONCE * THREADS) {
        int4 units[UNITS_AT_ONCE];
#pragma unroll
        for (int i = 0; i < UNITS_AT_ONCE; i++) {
            int at = u + i * THREADS;
            if (at < end) units[i] = load_unit<ALIGNED>(from + (i64)at * UNIT);
        }
#pragma unroll
        for (int i = 0; i < UNITS_AT_ONCE; i++) {
            int at = u + i * THREADS;
            if (at < end) ((int4*)to)[at] = units[i];
        }
    }
}

ZEROCAST_FN void copy_bytes(u8* to, const u8* from, int first, int end) {
    for (int i = first + threadIdx.x; i < end; i += THREADS) to[i] = from[i];
}

ZEROCAST_FN void copy(u8* to, const u8* from, int count) {
    int head = (int)(-(u64)to % UNIT);
    if (head > count) head = count;
    int units = (count - head) / UNIT;
    const u8* source = from + head;
    int first = 0, end = units;
    if ((u64)source % UNIT == 0) {
        copy_units<16>(to + head, source, 0, units);
    } else if ((u64)source % 4 == 0) {
        copy_units<4>(to + head, source, 0, units);
    } else if (units >= 2) {
        // The words around the outer units may reach past what was given.
        first = 1, end = units - 1;
        copy_units<1>(to + head, source, first, end);
    } else {
        end = 0;
    }
    copy_bytes(to, from, 0, head + first * UNIT);
    copy_bytes(to, from, head + end * UNIT, count);
}

template <bool INTO_WEIGHTS>
__global__ void __launch_bounds__(THREADS, 6)
    copy_codes(const CodeCopy* __restrict__ rows, const PlaneTile* __restrict__ tiles, i64 count,
               u8* buffer) {
    for (i64 t = blockIdx.x; t < count; t += gridDim.x) {
        PlaneTile tile = tiles[t];
        CodeCopy row = rows[tile.weight];
        if (row.bytes) {
            u8 *codes = row.codes + tile.col, *staged = buffer + row.staged + tile.col;
            i64 left = row.bytes - tile.col;
            int size = left < TILE_BYTES ? (int)left : TILE_BYTES;
            copy(INTO_WEIGHTS ? codes : staged, INTO_WEIGHTS ? staged : codes, size);
        } else if (threadIdx.x == 0) {
            u8 low = row.staged < 0 ? *row.codes : buffer[row.staged];
            u8 high = row.high < 0 ? *row.codes : buffer[row.high];
            *row.codes = (u8)((low & 0x0F) | (high & 0xF0));
        }
    }
}
