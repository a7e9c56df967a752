// compute_scale: the stored scales of whole weights from reduced amaxes, padding and repeats
// included.
//
// A stored plane is cut into strips: all stored rows of a few rows of blocks, 256 columns of them.
// A thread makes the scales of four blocks side by side and stores them in every row that repeats
// them, four entries at a time where the plane's rows are whole groups of four.
#include <zerocast/planes.h>
#include <zerocast/scaling.h>

using namespace zerocast;

template <class Law>
static ZEROCAST_FN void scale_strip(const ScaleTarget& target, const PlaneTile& tile,
                                    const Law& law) {
    typedef typename Law::Stored Stored;
    const ScalePlane& plane = target.rowwise;
    i64 col = tile.col + threadIdx.x % STRIP_THREADS * 4;
    if (col >= plane.padded_cols) return;
    auto padding = (i32)plane.padding;
    for (i64 group = tile.row + threadIdx.x / STRIP_THREADS; group < tile.row_end;
         group += THREADS / STRIP_THREADS) {
        Entries scales = four_times(padding);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (col + k >= plane.cols || group * plane.row_repeat >= plane.rows) continue;
            scales.bits[k] =
                law.template stored<Scalar>(plane.block_amax[group * plane.cols + col + k]);
        }
        for (i64 r = 0; r < plane.row_repeat; r++) {
            i64 row = group * plane.row_repeat + r;
            if (row >= plane.padded_rows) break;
            auto to = (Stored*)plane.scale_inv + row * plane.padded_cols + col;
            store_entries(to, row < plane.rows ? scales : four_times(padding),
                          plane.padded_cols - col);
        }
    }
    if (target.amax && tile.row == 0 && tile.col == 0 && threadIdx.x == 0)
        *target.amax = *target.tensor_amax;
}

template <class MakeLaw>
static ZEROCAST_FN void scale_strips(const ScaleTarget* targets, const PlaneTile* tiles, i64 count,
                                     const MakeLaw& make_law) {
    for (i64 t = blockIdx.x; t < count; t += gridDim.x) {
        const ScaleTarget& target = targets[tiles[t].weight];
        scale_strip(target, tiles[t], make_law(target));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    compute_scale_e2m1(const ScaleTarget* __restrict__ targets, const PlaneTile* __restrict__ tiles,
                       i64 count, i64, i64) {
    scale_strips(targets, tiles, count,
                 [](const ScaleTarget& t) { return NVFP4Scaling(*t.tensor_amax, 448); });
}

extern "C" __global__ void __launch_bounds__(THREADS)
    compute_scale_e4m3(const ScaleTarget* __restrict__ targets, const PlaneTile* __restrict__ tiles,
                       i64 count, i64 power_2_scale, i64 amax_epsilon) {
    Float8Scaling<E4M3> law{power_2_scale != 0, Scalar::value((i32)amax_epsilon)};
    scale_strips(targets, tiles, count, [&](const ScaleTarget&) { return law; });
}

extern "C" __global__ void __launch_bounds__(THREADS)
    compute_scale_e5m2(const ScaleTarget* __restrict__ targets, const PlaneTile* __restrict__ tiles,
                       i64 count, i64 power_2_scale, i64 amax_epsilon) {
    Float8Scaling<E5M2> law{power_2_scale != 0, Scalar::value((i32)amax_epsilon)};
    scale_strips(targets, tiles, count, [&](const ScaleTarget&) { return law; });
}
