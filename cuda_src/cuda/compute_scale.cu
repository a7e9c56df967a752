// compute_scale: the stored scales of whole weights from reduced amaxes, padding and repeats
// included.
//
// A weight has one plane (number 0), or a second one with other blocks (number 1). The first
// tile of the first plane does what is done once a weight.
#include "arithmetic/scaling.h"
#include "cuda/planes.h"

using namespace zerocast;

static ZEROCAST_FN void once_a_weight(const ScaleTarget& target, const NumericsTable& table) {
    if (target.amax) *target.amax = effective_amax(table, *target.tensor_amax);
    if (target.rounding_counter) target.rounding_counter[1]++;
}

// Thread blocks that share a multiprocessor's registers: with two scales a block, compiled for
// sm_80, eight would spill.
template <class Numerics>
constexpr int RESIDENT = Numerics::CHOOSES ? 7 : 8;

template <class Numerics>
__global__ void __launch_bounds__(THREADS, RESIDENT<Numerics>)
    compute_scale(const ScaleTarget* __restrict__ targets, const PlaneTile* __restrict__ tiles,
                  i64 count, const __grid_constant__ NumericsTable table) {
    for (i64 t = blockIdx.x; t < count; t += gridDim.x) {
        PlaneTile tile = tiles[t];
        const ScaleTarget& target = targets[tile.weight];
        const ScalePlane& plane = tile.plane == 0 ? target.rowwise : target.columnwise;
        auto numerics = numerics_of<Numerics>(table, target.tensor_amax, target.delayed);
        // Blocks from one row to the next, and from one column to the next, as they are stored.
        i64 down = plane.transposed ? 1 : plane.grid.blocks_w();
        i64 right = plane.transposed ? plane.grid.blocks_w() : 1;
        auto stored = [&](i32 amax, i64 block) {
            i32 choice = Numerics::CHOOSES ? target.choices[block] : 0;
            return numerics.template stored<Scalar>(amax, choice);
        };
        if (plane.scale_inv)
            store_scales<typename Numerics::Stored, THREADS>(plane, tile, plane.block_amax, down,
                                                             right, stored);
        if (tile.plane == 0 && tile.row == 0 && tile.col == 0 && threadIdx.x == 0)
            once_a_weight(target, table);
    }
}
