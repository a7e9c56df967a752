// partial_select: 4-over-6, what this rank knows for the choice between two scales a block.
//
// A lane takes one row inside a block, sixteen elements from left to right, and the sixteen lanes
// of a block add up their rows. In a row of blocks that ranks share, a row inside a block that is
// whole leaves its errors, and one that is cut its elements, for select to put together.
#include "cuda/four_over_six.h"
#include "cuda/tiles.h"
#include "cuda/vec4.h"

using namespace zerocast;

// One row inside a block, as far as this rank owns it.
struct Row {
    i64 element;     // flat index of its first element
    i64 begin, end;  // owned elements
    int width;

    ZEROCAST_FN Row(const CastShard& shard, i64 element, int width)
        : element(element),
          begin(element > shard.start ? element : shard.start),
          end(element + width < shard.end ? element + width : shard.end),
          width(width) {}
    ZEROCAST_FN bool whole() const { return end - begin == width; }
};

// `master` is as if it were the whole weight.
template <bool SQUARED, class T>
static ZEROCAST_FN Errors<Scalar> errors_of(const CastShard& shard, const T* master, const Row& row,
                                            const FourOverSixNumerics& numerics, i64 block) {
    auto scales = numerics.candidates<Scalar>(shard.rowwise.block_amax[block]);
    Errors<Scalar> sum{};
#pragma unroll 1
    for (int first = 0; first < row.width; first += 4) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (first + j >= row.width) continue;
            float x = round_element(value_of(master[row.element + first + j]), shard.round_to);
            numerics.add_errors<SQUARED>(scales, x, sum);
        }
    }
    return sum;
}

template <class T>
static ZEROCAST_FN void leave_elements(const CastShard& shard, const T* master, const Row& row) {
    const Candidates& candidates = shard.candidates;
    i64 segment = find(candidates.segments, candidates.segment_count, row.element);
    float* to = candidates.elements + segment * CHOICE_SIDE - row.element;
    for (i64 e = row.begin; e < row.end; e++)
        to[e] = round_element(value_of(master[e]), shard.round_to);
}

template <bool SQUARED, class T>
static ZEROCAST_FN void select_tile(const CastShard& shard, const T* master, const Tile& tile,
                                    i64 scale_max) {
    const Grid& grid = shard.rowwise.grid;
    i64 blocks_w = grid.blocks_w(), block_row = tile.first_block / blocks_w;
    i64 cut = find(shard.candidates.cut, shard.candidates.cuts, block_row);
    int r = threadIdx.x % CHOICE_SIDE;
    // All lanes of a warp go on as long as one of them has a block.
    for (int first = threadIdx.x / 32 * 2; first < tile.blocks; first += THREADS / CHOICE_SIDE) {
        int b = first + threadIdx.x % 32 / CHOICE_SIDE, col = b * CHOICE_SIDE;
        int width = tile.cols - col < CHOICE_SIDE ? tile.cols - col : CHOICE_SIDE;
        i64 block = tile.first_block + b;
        Row row(shard, tile.element + r * grid.cols + col, width);
        Errors<Scalar> errors{};
        if (b < tile.blocks && r < tile.rows && row.begin < row.end) {
            if (row.whole()) {
                FourOverSixNumerics numerics(*shard.tensor_amax, scale_max);
                errors = errors_of<SQUARED>(shard, master, row, numerics, block);
            } else {
                leave_elements(shard, master, row);
            }
            if (cut >= 0 && row.whole()) {
                float* to = shard.candidates.errors_of(grid, cut, r);
                to += (block - block_row * blocks_w) * 2;
                to[0] = errors.map4;
                to[1] = errors.map6;
            }
        }
        u8 choice = choose(errors);
        if (cut < 0 && r == 0 && b < tile.blocks) shard.candidates.choices[block] = choice;
    }
}

template <bool SQUARED>
__global__ void __launch_bounds__(THREADS, 6)
    partial_select(const CastShard* __restrict__ shards, const Tile* __restrict__ tiles, i64 count,
                   const __grid_constant__ NumericsTable table) {
    for (i64 t = blockIdx.x; t < count; t += gridDim.x) {
        Tile tile = tiles[t];
        const CastShard& shard = shards[tile.weight];
        with_master(shard, [&](auto* master) {
            select_tile<SQUARED>(shard, master, tile, table.scale_max);
        });
    }
}
