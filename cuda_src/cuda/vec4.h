// Four elements side by side in the registers of one CUDA thread: how they are read and written.
// conversions.h rounds and encodes them.
#pragma once

#include "arithmetic/masters.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

struct Vec4 {
    float x[4];
};

// Vectors that a thread has in flight in an amax.
constexpr int AMAX_IN_FLIGHT = 8;

// An address from a table. It is in global memory, which the compiler cannot know; with this hint
// it emits global stores and atomics, which nothing waits for.
template <class T>
ZEROCAST_FN T* global(T* address) {
#ifdef __CUDA_ARCH__
    __builtin_assume(__isGlobal(address));
#endif
    return address;
}

// from + k * step, in bytes. One multiply-add for a loop whose integer pipe has enough to do;
// written in C, it becomes several additions.
template <class T>
ZEROCAST_FN T* ahead(T* from, u32 step, u32 k) {
#ifdef __CUDA_ARCH__
    u64 at;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(at) : "r"(step), "r"(k), "l"(from));
    return global((T*)at);
#else
    return (T*)((u64)from + (u64)step * k);
#endif
}

// 16 bytes from an address that is a multiple of 16, which no thread of the launch writes; `to` as
// it was where `wanted` is 0.
ZEROCAST_FN void load_16_bytes(u32 (&to)[4], const void* from, u32 wanted = 1) {
#ifdef __CUDA_ARCH__
    // Read once and not again: it need not take a place in the first-level cache. Volatile, so
    // that the compiler does not move one read after the use of another.
    asm volatile(
        "{.reg .pred wanted;\n"
        "setp.ne.u32 wanted, %5, 0;\n"
        "@wanted ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];}"
        : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
        : "l"(__cvta_generic_to_global(from)), "r"(wanted));
#else
    if (wanted) __builtin_memcpy(to, __builtin_assume_aligned(from, 16), 16);
#endif
}

// Four elements of any type as they are stored in memory.
struct Four {
    u32 word[4];

    template <class T>
    ZEROCAST_FN Vec4 values() const {
        Vec4 q;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if constexpr (SAME<T, float>)
                q.x[j] = Scalar::value((i32)word[j]);
            else
                q.x[j] = value_of(T{(unsigned short)(word[j / 2] >> 16 * (j % 2))});
        }
        return q;
    }

    // From an address that is a multiple of the bytes of four elements, where `wanted`.
    template <class T>
    ZEROCAST_FN void load_at_once(const T* from, u32 wanted) {
        if constexpr (SAME<T, float>) {
            load_16_bytes(word, from, wanted);
        } else if (wanted) {
            u64 bits = *(const u64*)global(from);
            word[0] = (u32)bits;
            word[1] = (u32)(bits >> 32);
        }
    }

    // From shared memory, at a multiple of so many BYTES of four elements.
    template <int BYTES>
    ZEROCAST_FN void load_shared(const void* from) {
        if constexpr (BYTES == 16) {
            uint4 bits = *(const uint4*)from;
            word[0] = bits.x, word[1] = bits.y, word[2] = bits.z, word[3] = bits.w;
        } else {
            u64 bits = *(const u64*)from;
            word[0] = (u32)bits, word[1] = (u32)(bits >> 32);
        }
    }

    // Let values be made again where they are used again: kept, they would take more registers.
    ZEROCAST_FN void forget_values() {
#ifdef __CUDA_ARCH__
        asm volatile("" : "+r"(word[0]), "+r"(word[1]), "+r"(word[2]), "+r"(word[3]));
#endif
    }

    // The first `count`, or all.
    template <class T>
    ZEROCAST_FN void load_one_by_one(const T* from, int count = 4) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j >= count) continue;
            if constexpr (SAME<T, float>)
                word[j] = (u32)Scalar::bits(global(from)[j]);
            else
                word[j / 2] = (j % 2 ? word[j / 2] : 0) | (u32)global(from)[j].bits << 16 * (j % 2);
        }
    }
};

// The first `count` vectors of a thread, as far as they are `wanted`, in order. request() loads
// DEPTH of them, and another one is loaded as soon as one has been worked on.
template <int DEPTH>
class VectorStream {
  public:
    // step: elements from one vector to the next. Python keeps it below 2^30.
    ZEROCAST_FN VectorStream(i64 step, u32 wanted, int count)
        : step_((u32)step), wanted_(wanted), count_((u32)count), four_{} {}

    // `at_once`: the address of each vector is a multiple of its bytes.
    template <class T>
    ZEROCAST_FN void request(const T* from, bool at_once) {
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            if (at_once)
                four_[k].load_at_once(vector(from, k), wanted_ & 1u << k);
            else if (wanted_ >> k & 1)
                four_[k].load_one_by_one(vector(from, k));
        }
    }

    // Calls work(i, vector i, wanted), after request() of the same, `count` times or somewhat more
    // often. Where `wanted` is 0, the vector is one that came before, or zeros.
    template <class T, class Work>
    ZEROCAST_FN void for_each_at_once(const T* from, const Work& work) {
#pragma unroll 1
        for (u32 first = 0; first < count_; first += DEPTH) {
            from = vector(from, DEPTH);
#pragma unroll
            for (u32 k = 0; k < DEPTH; k++) {
                work(first + k, four_[k].template values<T>(), wanted_ & 1u << k);
                four_[k].load_at_once(vector(from, k), wanted_ & 1u << (k + DEPTH));
            }
            wanted_ >>= DEPTH;
        }
    }

    // The same of vectors anywhere, by one copy of the code of `work`: vectors go round, because
    // registers cannot be indexed.
    template <class T, class Work>
    ZEROCAST_FN void for_each(const T* from, const Work& work) {
#pragma unroll 1
        for (u32 i = 0; i < count_; i++, wanted_ >>= 1) {
            work(i, four_[0].template values<T>(), wanted_ & 1);
#pragma unroll
            for (int k = 1; k < DEPTH; k++) four_[k - 1] = four_[k];
            if (wanted_ >> DEPTH & 1) four_[DEPTH - 1].load_one_by_one(vector(from, i + DEPTH));
        }
    }

  private:
    template <class T>
    ZEROCAST_FN const T* vector(const T* from, u32 k) const {
        return ahead(from, step_ * (u32)sizeof(T), k);
    }

    u32 step_, wanted_, count_;
    Four four_[DEPTH];
};

ZEROCAST_FN void store_vec4(float* to, const Vec4& q, bool aligned) {
    if (aligned) {
        *(float4*)to = float4{q.x[0], q.x[1], q.x[2], q.x[3]};
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) to[i] = q.x[i];
    }
}

// --- rounding and magnitudes ---

// One element, by the number of its nominal dtype.
ZEROCAST_FN float round_element(float x, i64 nominal) {
    if (nominal == NOMINAL_BF16) return round_to<Bf16, Scalar>(x);
    if (nominal == NOMINAL_FP16) return round_to<Fp16, Scalar>(x);
    return round_to<Fp32, Scalar>(x);
}

// Bit patterns of the four magnitudes; they order like integers, a NaN being the largest.
ZEROCAST_FN void magnitudes_of(const Vec4& q, i32 (&magnitude)[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) magnitude[j] = Scalar::bits(q.x[j]) & MAGNITUDE_MASK;
}

ZEROCAST_FN i32 largest_of(const i32 (&m)[4]) {
    return Scalar::max(Scalar::max(m[0], m[1]), Scalar::max(m[2], m[3]));
}

// What enters an amax buffer for elements whose largest magnitude has these bits: rounding is
// monotonic, so the largest rounded magnitude is the rounded largest.
template <class Nominal>
ZEROCAST_FN i32 rounded_amax(i32 magnitude) {
    return magnitude_bits<Scalar>(round_to<Nominal, Scalar>(Scalar::value(magnitude)));
}
ZEROCAST_FN i32 rounded_amax(i32 magnitude, i64 nominal) {
    return magnitude_bits<Scalar>(round_element(Scalar::value(magnitude), nominal));
}

// --- codes ---

// Four codes, to an address that is a multiple of their 4 or 2 bytes, unless `wanted` is 0. What
// they are made of is not left out for that: it would take a jump.
template <class F>
ZEROCAST_FN void store_codes_at_once(u8* to, u32 word, u32 wanted) {
#ifdef __CUDA_ARCH__
    if constexpr (F::BITS == 8)
        asm volatile(
            "{.reg .pred wanted; setp.ne.u32 wanted, %2, 0; @wanted st.global.b32 [%0], %1;}" ::"l"(
                __cvta_generic_to_global(to)),
            "r"(word), "r"(wanted)
            : "memory");
    else
        asm volatile(
            "{.reg .pred wanted; setp.ne.u32 wanted, %2, 0; @wanted st.global.b16 [%0], %1;}" ::"l"(
                __cvta_generic_to_global(to)),
            "h"((unsigned short)word), "r"(wanted)
            : "memory");
#else
    if (wanted) __builtin_memcpy(__builtin_assume_aligned(to, F::BITS / 2), &word, F::BITS / 2);
#endif
}

// Four codes, at once where the address allows it.
template <class F>
ZEROCAST_FN void store_codes(u8* to, u32 word, bool aligned) {
    if (aligned) return store_codes_at_once<F>(to, word, 1);
#pragma unroll
    for (int i = 0; i < F::BITS / 2; i++) to[i] = (u8)(word >> 8 * i);
}

template <class F>
ZEROCAST_FN u32 load_codes(const u8* from, bool aligned) {
    u32 word = 0;
    if (!aligned) {
#pragma unroll
        for (int i = 0; i < F::BITS / 2; i++) word |= (u32)from[i] << 8 * i;
    } else if constexpr (F::BITS == 8) {
        word = *(const u32*)from;
    } else {
        word = *(const unsigned short*)from;
    }
    return word;
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
