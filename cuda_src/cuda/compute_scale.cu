// compute_scale: the stored scales of whole weights from reduced amaxes, padding and repeats
// included.
//
// A stored plane is cut into strips: all stored rows of a few rows of blocks, 256 columns of them.
// A thread makes the scales of four stored columns side by side and stores them in every row that
// repeats them, four entries at a time where the plane's rows are whole groups of four.
//
// A weight has one plane (number 0), or a second one with blocks of its own (number 1). The first
// strip of the first plane does what is done once a weight.
#include "arithmetic/scaling.h"
#include "cuda/planes.h"

using namespace zerocast;

// A plane as it is stored: rows and columns, repeats and blocks change places where it is stored
// transposed.
struct StoredPlane {
    i64 rows, cols;              // that hold scales
    i64 row_repeat, col_repeat;  // of one block
    i64 row_blocks, col_blocks;  // from one block to the next, in numbers of blocks

    explicit ZEROCAST_FN StoredPlane(const ScalePlane& plane) {
        bool transposed = plane.transposed;
        i64 blocks_w = plane.grid.blocks_w();
        rows = transposed ? plane.cols : plane.rows;
        cols = transposed ? plane.rows : plane.cols;
        row_repeat = transposed ? plane.col_repeat : plane.row_repeat;
        col_repeat = transposed ? plane.row_repeat : plane.col_repeat;
        row_blocks = transposed ? 1 : blocks_w;
        col_blocks = transposed ? blocks_w : 1;
    }
};

// stored_of(block) is the stored scale of a block, by its bit pattern.
template <class Stored, class StoredOf>
static ZEROCAST_FN void scale_strip(const ScalePlane& plane, const PlaneTile& tile,
                                    const StoredOf& stored_of) {
    StoredPlane stored(plane);
    i64 col = tile.col + threadIdx.x % STRIP_THREADS * 4;
    if (col >= plane.padded_cols) return;
    auto padding = (i32)plane.padding;
    for (i64 group = tile.row + threadIdx.x / STRIP_THREADS; group < tile.row_end;
         group += THREADS / STRIP_THREADS) {
        Entries scales = four_times(padding);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (col + k >= stored.cols || group * stored.row_repeat >= stored.rows) continue;
            i64 across = stored.col_repeat == 1 ? col + k : (col + k) / stored.col_repeat;
            scales.bits[k] = stored_of(group * stored.row_blocks + across * stored.col_blocks);
        }
        for (i64 r = 0; r < stored.row_repeat; r++) {
            i64 row = group * stored.row_repeat + r;
            if (row >= plane.padded_rows) break;
            auto to = (Stored*)plane.scale_inv + row * plane.padded_cols + col;
            store_entries(to, row < stored.rows ? scales : four_times(padding),
                          plane.padded_cols - col);
        }
    }
}

static ZEROCAST_FN void once_a_weight(const ScaleTarget& target) {
    if (target.amax) *target.amax = *target.tensor_amax;
    if (target.rounding_counter) target.rounding_counter[1]++;
}

template <class Numerics>
__global__ void __launch_bounds__(THREADS, Numerics::Format::BITS == 4 ? 8 : 0)
    compute_scale(const ScaleTarget* __restrict__ targets, const PlaneTile* __restrict__ tiles,
                  i64 count, const __grid_constant__ NumericsTable table) {
    for (i64 t = blockIdx.x; t < count; t += gridDim.x) {
        PlaneTile tile = tiles[t];
        const ScaleTarget& target = targets[tile.weight];
        const ScalePlane& plane = tile.plane == 0 ? target.rowwise : target.columnwise;
        auto numerics = numerics_of<Numerics>(table, target.tensor_amax, target.delayed);
        scale_strip<typename Numerics::Stored>(plane, tile, [&](i64 block) {
            if constexpr (Numerics::CHOOSES)
                return numerics.template stored<Scalar>(plane.block_amax[block],
                                                        target.choices[block]);
            else
                return numerics.template stored<Scalar>(plane.block_amax[block]);
        });
        if (tile.plane == 0 && tile.row == 0 && tile.col == 0 && threadIdx.x == 0)
            once_a_weight(target);
    }
}
