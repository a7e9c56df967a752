// expand_scales: the stored scales of whole weights from one of each block, padding and repeats
// included.
#include "cuda/planes.h"

using namespace zerocast;

template <class Stored>
__global__ void __launch_bounds__(THREADS, 8)
    expand_scales(const ScaleTarget* __restrict__ targets, const PlaneTile* __restrict__ tiles,
                  i64 count) {
    for (i64 t = blockIdx.x; t < count; t += gridDim.x) {
        PlaneTile tile = tiles[t];
        const ScaleTarget& target = targets[tile.weight];
        const ScalePlane& plane = tile.plane == 0 ? target.rowwise : target.columnwise;
        // Blocks from one row to the next, and from one column to the next, as they are stored.
        i64 down = plane.transposed ? 1 : plane.grid.blocks_w();
        i64 right = plane.transposed ? plane.grid.blocks_w() : 1;
        store_scales<Stored, THREADS>(plane, tile, (const Stored*)plane.block_amax, down, right,
                                      [](i32 bits, i64) { return bits; });
    }
}
