// write_words: put a small table, given with the launch itself, where later kernels read it.
//
// A copy from the host would need memory of the host that outlives a CUDA graph which repeats it.
// The arguments of a launch belong to the launch.
#include "cuda/tiles.h"

using namespace zerocast;

constexpr int WORDS = 120;

struct Words {
    i64 word[WORDS];
};

__global__ void __launch_bounds__(THREADS)
    write_words(i64* to, i64 count, const __grid_constant__ Words words) {
    if (threadIdx.x < count) to[threadIdx.x] = words.word[threadIdx.x];
}
