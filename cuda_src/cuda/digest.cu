// digest: adds to sums the digests of ranges of bytes.
//
// A tile is some whole rows of keys, of which a range may begin or end inside one. A thread takes
// the same halfwords of each row, so it makes their weights and factors once.
#include "arithmetic/digest.h"
#include "cuda/planes.h"

using namespace zerocast;

constexpr int TILE_BYTES = 1 << 14;
constexpr int UNIT = 4;  // words that a thread reads side by side
constexpr int UNITS = (int)(DIGEST_ROW_BYTES / (4 * UNIT * THREADS));  // of a thread in a row
static_assert(UNIT * THREADS % DIGEST_LANES == 0, "all units of a thread are of the same lanes");
static_assert(DIGEST_LANES % UNIT == 0, "a unit is of one line");

// Four words at `at`, of which bytes [begin, end) of `data` count; the others are zeros.
ZEROCAST_FN void load_words(u32 (&words)[UNIT], const u8* data, i64 at, i64 begin, i64 end) {
    const u8* from = data + at;
    bool whole = at >= begin && at + 4 * UNIT <= end;
    if (whole && (u64)from % 16 == 0) {
        int4 unit = *(const int4*)from;
        words[0] = (u32)unit.x, words[1] = (u32)unit.y;
        words[2] = (u32)unit.z, words[3] = (u32)unit.w;
        return;
    }
#pragma unroll
    for (int k = 0; k < UNIT; k++) {
        words[k] = 0;
        for (int i = 4 * k; i < 4 * k + 4; i++) {
            if (at + i >= begin && at + i < end) words[k] |= (u32)from[i] << 8 * (i - 4 * k);
        }
    }
}

// The sum over the threads of a warp.
ZEROCAST_FN u64 sum_of_warp(u64 mine) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) {
        u32 low = (u32)__shfl_xor_sync(0xFFFFFFFFu, (i32)(u32)mine, lane);
        u32 high = (u32)__shfl_xor_sync(0xFFFFFFFFu, (i32)(u32)(mine >> 32), lane);
        mine += (u64)high << 32 | low;
    }
    return mine;
}

__global__ void __launch_bounds__(THREADS, 8)
    digest(const DigestTarget* __restrict__ targets, const PlaneTile* __restrict__ tiles,
           i64 count) {
    i32 plain[UNIT], weighted[UNIT], weights[UNITS][2];
#pragma unroll
    for (int k = 0; k < UNIT; k++) {
        plain[k] = plain_factor((threadIdx.x * UNIT + k) % DIGEST_LANES);
        weighted[k] = weighted_factor((threadIdx.x * UNIT + k) % DIGEST_LANES);
    }
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        i64 line = (u * THREADS + threadIdx.x) * UNIT / DIGEST_LANES;
        for (int i = 0; i < 2; i++) weights[u][i] = halfword_weight(line, i);
    }
    for (i64 t = blockIdx.x; t < count; t += gridDim.x) {
        PlaneTile tile = tiles[t];
        const DigestTarget& target = targets[tile.weight];
        // Tiles are counted from the row in which the range begins.
        i64 lead = target.first % DIGEST_ROW_BYTES, row = target.first / DIGEST_ROW_BYTES;
        const u8* data = target.data - lead;
        i64 end = lead + target.bytes, stop = tile.col + TILE_BYTES;
        u64 total = 0;
        for (i64 first = tile.col; first < (end < stop ? end : stop); first += DIGEST_ROW_BYTES) {
            i64 sum = 0;
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                u32 words[UNIT];
                i64 at = first + (u * THREADS + threadIdx.x) * (4 * UNIT);
                load_words(words, data, at, lead, end);
#pragma unroll
                for (int k = 0; k < UNIT; k++) {
                    i32 low = (short)words[k], high = (i32)words[k] >> 16;
                    i32 of_weights = low * weights[u][0] + high * weights[u][1];
                    sum += (i64)(low + high) * plain[k] + (i64)of_weights * weighted[k];
                }
            }
            total += (u64)sum * row_factor(row + first / DIGEST_ROW_BYTES);
        }
        total = sum_of_warp(total);
        if (threadIdx.x % 32 == 0) atomicAdd(target.sum, total);
    }
}
