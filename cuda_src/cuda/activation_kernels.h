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
template <template <int> class Producer, class Numerics, int HEIGHT>
ZEROCAST_FN void produce_codes(const ActivationTask& task) {
    // NVFP4's scales are made from the amax that an earlier launch has raised.
    constexpr bool RAISES = !SAME<Numerics, NVFP4Numerics>;
    __shared__ TileMemory<HEIGHT> memory;
    if (!RAISES && task.amax && blockIdx.x == 0 && threadIdx.x == 0) *task.amax = *task.tensor_amax;
    auto numerics = numerics_of<Numerics>(task.numerics, task.tensor_amax, task.delayed);
    Producer<HEIGHT> producer;
    for_each_tile<HEIGHT>(
        task, producer,
        [&](const TilePosition<HEIGHT>& position, const ThreadTile<HEIGHT>& elements) {
            if (RAISES) raise_tensor_amax(task.tensor_amax, position, elements);
#pragma unroll
            for (int p = 0; p < 2; p++) {
                if (task.planes[p].codes || task.planes[p].scale_inv)
                    cast_plane(task.planes[p], position, elements, numerics, memory);
            }
        });
}

// Instead of numerics: the rounded result and amaxes only.
struct NoNumerics {};

template <template <int> class Producer, class Numerics, int HEIGHT>
ZEROCAST_FN void produce(const ActivationTask& task) {
    if constexpr (SAME<Numerics, NoNumerics>)
        produce_values<Producer>(task);
    else
        produce_codes<Producer, Numerics, HEIGHT>(task);
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
