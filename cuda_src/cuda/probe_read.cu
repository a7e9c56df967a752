// probe_read: reads memory and does next to nothing with it: what a kernel could reach that only
// reads. For scripts/bench_cuda.py.
#include "cuda/tiles.h"
#include "cuda/vec4.h"

using namespace zerocast;

constexpr int IN_FLIGHT = 8;

// from: 128 KiB for each of count pieces. to: [1], is written only if a value is the smallest NaN
// pattern, so that the reads cannot be left out.
__global__ void __launch_bounds__(256)
    probe_read(const float* __restrict__ from, u32* __restrict__ to, i64 count) {
    for (i64 piece = blockIdx.x; piece < count; piece += gridDim.x) {
        const float* at = from + piece * 32768 + threadIdx.x * 4;
        u32 smallest = 0xFFFFFFFFu;
#pragma unroll 1
        for (int first = 0; first < 32; first += IN_FLIGHT) {
            Four four[IN_FLIGHT];
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; k++)
                load_16_bytes(four[k].word, at + (first + k) * 1024);
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; k++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    u32 distance = four[k].word[j] - 0x7F800001u;
                    smallest = distance < smallest ? distance : smallest;
                }
            }
        }
        if (smallest == 0) *to = 1;
    }
}
