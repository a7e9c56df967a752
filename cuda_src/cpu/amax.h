// The largest magnitude of elements, and how it enters an amax buffer.
//
// Rounding is monotonic, so the largest rounded magnitude is the rounded largest: the loops take
// integer maxima of magnitudes and nothing else (a NaN is the largest of all), and what they find
// is rounded once a block.
#pragma once

#include "arithmetic/masters.h"
#include "cpu/simd.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

template <class T>
ZEROCAST_FN Native::Int magnitudes(const T* x) {
    return Native::bits(load(x)) & MAGNITUDE_MASK;
}

template <class T>
ZEROCAST_FN i32 magnitude(T x) {
    return Scalar::bits(value_of(x)) & MAGNITUDE_MASK;
}

// The largest magnitude of x[0, n) and of `largest`, element by element of a register.
template <class T>
ZEROCAST_FN Native::Int raise(Native::Int largest, const T* x, i64 n) {
    constexpr int W = Native::WIDTH;
    i64 i = 0;
    for (; i + W <= n; i += W) largest = Native::max(largest, magnitudes(x + i));
    for (; i < n; i++) largest[0] = Scalar::max(largest[0], magnitude(x[i]));
    return largest;
}

// One long run: four independent maxima, so that the loop waits for memory and not for itself.
template <class T>
ZEROCAST_FN i32 largest_of(const T* x, i64 n) {
    constexpr int W = Native::WIDTH;
    Native::Int a{}, b{}, c{}, d{};
    i64 i = 0;
    for (; i + 4 * W <= n; i += 4 * W) {
        prefetch(x + i);
        a = Native::max(a, magnitudes(x + i));
        b = Native::max(b, magnitudes(x + i + W));
        c = Native::max(c, magnitudes(x + i + 2 * W));
        d = Native::max(d, magnitudes(x + i + 3 * W));
    }
    a = Native::max(Native::max(a, b), Native::max(c, d));
    return reduce_max<Native>(raise(a, x + i, n - i));
}

// What enters the buffer for a block whose largest magnitude has these bits.
template <class L>
ZEROCAST_FN typename L::Int rounded(typename L::Int magnitude, i64 nominal) {
    typename L::Float x = L::value(magnitude);
    if (nominal == NOMINAL_BF16) x = round_to<Bf16, L>(x);
    if (nominal == NOMINAL_FP16) x = round_to<Fp16, L>(x);
    return magnitude_bits<L>(x);
}

// Another thread may raise the same slot at the same time.
inline void raise_shared(i32* slot, i32 value) {
    i32 seen = __atomic_load_n(slot, __ATOMIC_RELAXED);
    while (seen < value
           && !__atomic_compare_exchange_n(slot, &seen, value, true, __ATOMIC_RELAXED,
                                           __ATOMIC_RELAXED)) {
    }
}

// The tensor's amax, where there is one.
inline void raise_tensor(const CastShard& shard, i32 value) {
    if (shard.tensor_amax) raise_shared(shard.tensor_amax, value);
}

// Takes the largest magnitude of a shard into its amaxes, of one block and of the tensor.
ZEROCAST_FN void raise_one_block(const CastShard& shard, i32 largest) {
    i32 amax = rounded<Scalar>(largest, shard.round_to);
    raise_shared(shard.rowwise.block_amax, amax);
    raise_tensor(shard, amax);
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
