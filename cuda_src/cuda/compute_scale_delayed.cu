// compute_scale_delayed: close a cast under delayed scaling: the scale_inv of what was cast, then
// the history and the scale of the next cast.
//
// A thread block takes a weight. The history moves by one place, from its end on: what a thread
// writes, it has read before a barrier, and what it reads next is before all that was written.
#include "arithmetic/scaling.h"
#include "cuda/planes.h"

using namespace zerocast;

// Puts `newest` in front, drops the last; the largest that this thread has met.
static ZEROCAST_FN i32 take_into_history(const DelayedState& state, i32 newest) {
    i32 largest = newest;
    for (i64 first = (state.length - 1) / THREADS * THREADS; first >= 0; first -= THREADS) {
        i64 i = first + threadIdx.x;
        i32 value = newest;
        if (i > 0 && i < state.length) value = Scalar::bits(state.history[i - 1]);
        __syncthreads();
        if (i >= state.length) continue;
        state.history[i] = Scalar::value(value);
        largest = Scalar::max(largest, value);
    }
    return largest;
}

// The next scale is max * 2^-margin over the largest of the history, or over the newest amax; or
// the caller makes it, from the history (BY_CALLER).
template <bool BY_CALLER>
__global__ void __launch_bounds__(THREADS)
    compute_scale_delayed(const ScaleTarget* __restrict__ targets, i64 count,
                          const __grid_constant__ NumericsTable table) {
    __shared__ i32 largest;
    for (i64 w = blockIdx.x; w < count; w += gridDim.x) {
        const ScaleTarget& target = targets[w];
        const DelayedState& state = target.delayed;
        i32 amax_bits = *target.tensor_amax;
        bool enters = state.cast_scale && enters_history(amax_bits);
        if (threadIdx.x == 0) largest = 0;
        if (enters) {  // with a barrier, for `largest` too
            i32 value = take_into_history(state, amax_bits);
            atomicMax(&largest, table.most_recent ? amax_bits : value);
        }
        __syncthreads();
        if (threadIdx.x != 0) continue;

        // What a cast multiplied by belongs to its codes: it is kept before the next one is made.
        DelayedNumerics<E4M3> numerics{*state.scale};
        if (state.cast_scale) *state.cast_scale = numerics.scale;
        *(i32*)target.rowwise.scale_inv = numerics.stored<Scalar>(amax_bits);
        if (target.amax) *target.amax = amax_bits;
        if (enters && !BY_CALLER)
            *state.scale = next_scale(Scalar::value((i32)table.scaled_max), Scalar::value(largest),
                                      numerics.scale);
    }
}
