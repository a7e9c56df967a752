// The kernels of one producer of tiles: all tiles of a launch, under the numerics of the codes.
#pragma once

#include "cuda/activation_plane.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// Calls work(position, elements) with every tile of this thread block. A producer opens strips of
// rows and computes elements, not yet rounded.
template <int HEIGHT, class Producer, class Work>
ZEROCAST_FN void for_each_tile(const ActivationTask& task, const Producer& producer,
                               const Work& work) {
    const ActivationTable& table = task.table;
    u32 strips = (u32)((table.rows + HEIGHT - 1) / HEIGHT);
    u32 across = (u32)((table.cols + TILE_COLS - 1) / TILE_COLS);
    u32 per_unit = (u32)task.tiles_per_unit, groups = (across + per_unit - 1) / per_unit;
    for (u32 unit = blockIdx.x; unit < strips * groups; unit += gridDim.x) {
        u32 first = unit % groups * per_unit;
        u32 last = first + per_unit < across ? first + per_unit : across;
        TilePosition<HEIGHT> position(table, (int)(unit / groups));
        producer.open(task, position, first == 0);
        for (u32 tile = first; tile < last; tile++) {
            position.tile_col = (int)tile * TILE_COLS;
            ThreadTile<HEIGHT> elements = producer.elements(task, position);
            round_elements(elements, table.round_to);
            store_output(table, position, elements);
            work(position, elements);
        }
    }
}

// The rounded result, and amaxes.
template <template <int> class Producer>
ZEROCAST_FN void produce_values(const ActivationTask& task) {
    __shared__ TileMemory<LOW> memory;
    Producer<LOW> producer;
    for_each_tile<LOW>(task, producer,
                       [&](const TilePosition<LOW>& position, const ThreadTile<LOW>& elements) {
                           raise_tensor_amax(task.tensor_amax, position, elements);
#pragma unroll
                           for (int p = 0; p < 2; p++) {
                               if (task.planes[p].block_amax)
                                   raise_block_amaxes(task.planes[p], position, elements, memory);
                           }
                       });
}

// All that is wanted.
template <template <int> class Producer, int HEIGHT, class Scaling>
ZEROCAST_FN void produce_codes(const ActivationTask& task, const Scaling& scaling,
                               i32* raised_amax) {
    __shared__ TileMemory<HEIGHT> memory;
    Producer<HEIGHT> producer;
    for_each_tile<HEIGHT>(
        task, producer,
        [&](const TilePosition<HEIGHT>& position, const ThreadTile<HEIGHT>& elements) {
            raise_tensor_amax(raised_amax, position, elements);
#pragma unroll
            for (int p = 0; p < 2; p++) {
                if (task.planes[p].codes || task.planes[p].scale_inv)
                    cast_plane(task.planes[p], position, elements, scaling, memory);
            }
        });
}

template <template <int> class Producer, int HEIGHT, class F>
ZEROCAST_FN void produce_float8(const ActivationTask& task) {
    Float8Numerics<F> scaling{task.power_2_scale != 0, Scalar::value((i32)task.amax_epsilon)};
    produce_codes<Producer, HEIGHT>(task, scaling, task.tensor_amax);
}

template <template <int> class Producer, class F>
ZEROCAST_FN void produce_delayed(const ActivationTask& task) {
    produce_codes<Producer, LOW>(task, DelayedNumerics<F>{*task.scale}, task.tensor_amax);
}

template <template <int> class Producer, class F>
ZEROCAST_FN void produce_mxfp8(const ActivationTask& task) {
    produce_codes<Producer, LOW>(task, MXFP8Numerics<F>{}, task.tensor_amax);
}

template <template <int> class Producer>
ZEROCAST_FN void produce_nvfp4(const ActivationTask& task) {
    if (task.amax && blockIdx.x == 0 && threadIdx.x == 0) *task.amax = *task.tensor_amax;
    NVFP4Numerics scaling(*task.tensor_amax, task.scale_max);
    produce_codes<Producer, LOW>(task, scaling, nullptr);
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast

#define ZEROCAST_KERNEL(height, resident, name)                      \
    extern "C" __global__ void __launch_bounds__(                    \
        zerocast::TilePosition<zerocast::height>::THREADS, resident) \
        name(const __grid_constant__ zerocast::ActivationTask task)

// The kernels of one producer, by the numerics of the codes; registers are to do for `resident`
// thread blocks with low tiles.
#define ZEROCAST_ACTIVATION_KERNELS(name, Producer, resident)                                      \
    ZEROCAST_KERNEL(LOW, resident, name##_values) { produce_values<Producer>(task); }              \
    ZEROCAST_KERNEL(LOW, resident, name##_float8_e4m3) {                                           \
        produce_float8<Producer, LOW, E4M3>(task);                                                 \
    }                                                                                              \
    ZEROCAST_KERNEL(LOW, resident, name##_float8_e5m2) {                                           \
        produce_float8<Producer, LOW, E5M2>(task);                                                 \
    }                                                                                              \
    ZEROCAST_KERNEL(TALL, 1, name##_tall_e4m3) { produce_float8<Producer, TALL, E4M3>(task); }     \
    ZEROCAST_KERNEL(TALL, 1, name##_tall_e5m2) { produce_float8<Producer, TALL, E5M2>(task); }     \
    ZEROCAST_KERNEL(LOW, resident, name##_delayed_e4m3) { produce_delayed<Producer, E4M3>(task); } \
    ZEROCAST_KERNEL(LOW, resident, name##_delayed_e5m2) { produce_delayed<Producer, E5M2>(task); } \
    ZEROCAST_KERNEL(LOW, resident, name##_mxfp8_e4m3) { produce_mxfp8<Producer, E4M3>(task); }     \
    ZEROCAST_KERNEL(LOW, resident, name##_mxfp8_e5m2) { produce_mxfp8<Producer, E5M2>(task); }     \
    ZEROCAST_KERNEL(LOW, resident, name##_nvfp4_e2m1) { produce_nvfp4<Producer>(task); }
