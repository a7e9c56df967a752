// select: 4-over-6, the choices in rows of blocks that ranks share, from the exchanged errors and
// elements; the same on every rank.
//
// A lane takes one row inside a block, and the sixteen lanes of a block add up their rows, of which
// blocks of 1x16 have one.
#include "cuda/four_over_six.h"
#include "cuda/planes.h"

using namespace zerocast;

constexpr int BLOCKS_AT_ONCE = THREADS / CHOICE_SIDE;

// The errors of a row that was cut, from its elements.
template <bool SQUARED>
static ZEROCAST_FN Errors<Scalar> errors_of(const CastShard& shard, i64 segment, i64 width,
                                            i64 block, const FourOverSixNumerics& numerics) {
    auto scales = numerics.candidates<Scalar>(shard.rowwise.block_amax[block]);
    const float* elements = shard.candidates.elements + segment * CHOICE_SIDE;
    Errors<Scalar> sum{};
#pragma unroll 1
    for (int j = 0; j < width; j++) numerics.add_errors<SQUARED>(scales, elements[j], sum);
    return sum;
}

// Row tile.row of the cut rows of blocks; its blocks from tile.col on, BLOCKS_AT_ONCE of them.
template <bool SQUARED>
static ZEROCAST_FN void select_blocks(const CastShard& shard, const PlaneTile& tile,
                                      i64 scale_max) {
    const Grid& grid = shard.rowwise.grid;
    const Candidates& candidates = shard.candidates;
    i64 blocks_w = grid.blocks_w(), block_row = candidates.cut[tile.row];
    i64 b = tile.col + threadIdx.x / CHOICE_SIDE, r = threadIdx.x % CHOICE_SIDE;
    i64 row = block_row * grid.block_h + r, block = block_row * blocks_w + b;
    Errors<Scalar> errors{};
    if (b < blocks_w && r < grid.block_h && row < grid.rows) {
        float* stored = candidates.errors_of(grid, tile.row, r) + 2 * b;
        i64 col = b * CHOICE_SIDE, width = grid.cols - col;
        i64 segment = find(candidates.segments, candidates.segment_count, row * grid.cols + col);
        if (segment >= 0) {
            FourOverSixNumerics numerics(*shard.tensor_amax, scale_max);
            errors = errors_of<SQUARED>(shard, segment, width < CHOICE_SIDE ? width : CHOICE_SIDE,
                                        block, numerics);
            stored[0] = errors.map4;
            stored[1] = errors.map6;
        } else {
            errors = {stored[0], stored[1]};
        }
    }
    u8 choice = choose(errors);
    if (b < blocks_w && r == 0) candidates.choices[block] = choice;
}

template <bool SQUARED>
__global__ void __launch_bounds__(THREADS)
    select(const CastShard* __restrict__ shards, const PlaneTile* __restrict__ tiles, i64 count,
           const __grid_constant__ NumericsTable table) {
    for (i64 t = blockIdx.x; t < count; t += gridDim.x)
        select_blocks<SQUARED>(shards[tiles[t].weight], tiles[t], table.scale_max);
}
