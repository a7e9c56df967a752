// adamw: one step of AdamW on this rank's masters, element by element.
#include "arithmetic/adamw.h"
#include "cuda/tiles.h"

using namespace zerocast;

// A tensor is seen as one row. The threads of a warp read 128 consecutive bytes of each array.
__global__ void __launch_bounds__(THREADS)
    adamw(const AdamWUpdate* __restrict__ updates, const Tile* __restrict__ tiles, i64 count) {
    for (i64 t = blockIdx.x; t < count; t += gridDim.x) {
        Tile tile = tiles[t];
        const AdamWUpdate& u = updates[tile.weight];
        AdamW<Scalar> by(u);
#pragma unroll 2
        for (int c = threadIdx.x; c < tile.cols; c += THREADS) {
            i64 i = tile.element + c;
            float gradient = u.gradient[i], x = u.master[i], m = u.exp_avg[i], v = u.exp_avg_sq[i];
            by.average(gradient, m, v);
            u.exp_avg[i] = m;
            u.exp_avg_sq[i] = v;
            if (u.max_exp_avg_sq) {
                v = by.larger(u.max_exp_avg_sq[i], v);
                u.max_exp_avg_sq[i] = v;
            }
            u.master[i] = by.stepped(x, m, v);
        }
    }
}
