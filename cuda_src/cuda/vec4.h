// Four elements side by side in the registers of one CUDA thread: read, rounded, encoded, written.
//
// formats.h says what the codes are. Where the device converts by an instruction of its own, that
// instruction stands here, beside the portable form that it has to agree with; a compiler that is
// no CUDA compiler sees the portable form only.
#pragma once

#include "arithmetic/masters.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

struct Vec4 {
    float x[4];
};

// 16 bytes from an address that is a multiple of 16, which no thread of the launch writes.
ZEROCAST_FN Vec4 load_vec4(const float* from) {
#ifdef __CUDA_ARCH__
    // Read once and not again: it need not take a place in the first-level cache. Volatile, so
    // that the compiler does not move one read after the use of another.
    Vec4 q;
    asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(q.x[0]), "=f"(q.x[1]), "=f"(q.x[2]), "=f"(q.x[3])
                 : "l"(__cvta_generic_to_global(from)));
    return q;
#else
    float4 v = *(const float4*)from;
    return Vec4{{v.x, v.y, v.z, v.w}};
#endif
}

// From any address of a float.
ZEROCAST_FN Vec4 load_elements(const float* from) {
    return Vec4{{from[0], from[1], from[2], from[3]}};
}

// Four elements as they lie in memory.
template <class T>
struct Four {
    u64 bits;  // 16 an element, the first one's lowest

    ZEROCAST_FN Vec4 values() const {
        Vec4 q;
#pragma unroll
        for (int j = 0; j < 4; j++) q.x[j] = value_of(T{(unsigned short)(bits >> 16 * j)});
        return q;
    }
};
template <>
struct Four<float> {
    Vec4 q;

    ZEROCAST_FN Vec4 values() const { return q; }
};

// The N fours at `from` and every `step` elements on, as far as their bits of `wanted` are set, all
// asked for before the first one is there; zeros for the others. `aligned`: to their bytes, all.
template <int N>
ZEROCAST_FN void load_vectors(Four<float> (&four)[N], const float* from, i64 step, u32 wanted,
                              bool aligned) {
    if (aligned) {
#pragma unroll
        for (int k = 0; k < N; k++)
            four[k].q = wanted >> k & 1 ? load_vec4(from + k * step) : Vec4{};
    } else {
#pragma unroll
        for (int k = 0; k < N; k++)
            four[k].q = wanted >> k & 1 ? load_elements(from + k * step) : Vec4{};
    }
}

template <int N, class T>
ZEROCAST_FN void load_vectors(Four<T> (&four)[N], const T* from, i64 step, u32 wanted,
                              bool aligned) {
    if (aligned) {
#pragma unroll
        for (int k = 0; k < N; k++)
            four[k].bits = wanted >> k & 1 ? *(const u64*)(from + k * step) : 0;
        return;
    }
#pragma unroll
    for (int k = 0; k < N; k++) four[k].bits = 0;
    // One element of each four a round: all of them together would take too many registers.
#pragma unroll 1
    for (int j = 0; j < 4; j++, from++) {
#pragma unroll
        for (int k = 0; k < N; k++) {
            u64 element = wanted >> k & 1 ? from[k * step].bits : 0;
            four[k].bits = four[k].bits >> 16 | element << 48;
        }
    }
}

ZEROCAST_FN void store_vec4(float* to, const Vec4& q, bool aligned) {
    if (aligned) {
        *(float4*)to = float4{q.x[0], q.x[1], q.x[2], q.x[3]};
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) to[i] = q.x[i];
    }
}

// --- rounding ---

#ifdef __CUDA_ARCH__
// A NaN becomes another NaN here, which no code shows: it lies under a scale that is NaN.
template <class Nominal>
ZEROCAST_FN Vec4 round_vec4(Vec4 q) {
    return q;
}
template <>
ZEROCAST_FN Vec4 round_vec4<Bf16>(Vec4 q) {
    for (int i = 0; i < 4; i += 2) {
        u32 pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(q.x[i + 1]), "f"(q.x[i]));
        q.x[i] = Scalar::value((i32)(pair << 16));
        q.x[i + 1] = Scalar::value((i32)(pair & 0xFFFF0000u));
    }
    return q;
}
template <>
ZEROCAST_FN Vec4 round_vec4<Fp16>(Vec4 q) {
    for (int i = 0; i < 4; i++) {
        asm("{.reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(q.x[i]) : "f"(q.x[i]));
    }
    return q;
}
#else
template <class Nominal>
ZEROCAST_FN Vec4 round_vec4(Vec4 q) {
    for (int i = 0; i < 4; i++) q.x[i] = round_to<Nominal, Scalar>(q.x[i]);
    return q;
}
#endif

// One element, by the number of its nominal dtype.
ZEROCAST_FN float round_element(float x, i64 nominal) {
    if (nominal == NOMINAL_BF16) return round_to<Bf16, Scalar>(x);
    if (nominal == NOMINAL_FP16) return round_to<Fp16, Scalar>(x);
    return round_to<Fp32, Scalar>(x);
}

// --- magnitudes ---

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
ZEROCAST_FN i32 rounded_amax(i32 magnitude, i64 nominal) {
    return magnitude_bits<Scalar>(round_element(Scalar::value(magnitude), nominal));
}

// --- encoding: four codes in one word, the first element's in the low bits ---

#ifdef __CUDA_ARCH__
#if __CUDA_ARCH__ >= 890
#define ZEROCAST_CONVERTS_FP8
#endif
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL) \
    || defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL)
#define ZEROCAST_CONVERTS_E2M1
#endif
#endif

#ifdef ZEROCAST_CONVERTS_FP8
// Two codes of 8 bits.
template <class F>
ZEROCAST_FN unsigned short convert_two(float first, float second) {
    unsigned short codes;
    if constexpr (SAME<F, E4M3>)
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(codes) : "f"(first), "f"(second));
    else
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %2, %1;" : "=h"(codes) : "f"(first), "f"(second));
    return codes;
}
#endif

template <class F>
ZEROCAST_FN u32 encode_vec4(const Vec4& q) {
    u32 word = 0;
#ifdef ZEROCAST_CONVERTS_FP8
    if constexpr (F::BITS == 8) {
        unsigned short low = convert_two<F>(q.x[0], q.x[1]), high = convert_two<F>(q.x[2], q.x[3]);
        asm("mov.b32 %0, {%1, %2};" : "=r"(word) : "h"(low), "h"(high));
        return word;
    }
#endif
#ifdef ZEROCAST_CONVERTS_E2M1
    if constexpr (F::BITS == 4) {
        asm("{.reg .b8 low, high;\n"
            "cvt.rn.satfinite.e2m1x2.f32 low, %2, %1;\n"
            "cvt.rn.satfinite.e2m1x2.f32 high, %4, %3;\n"
            "mov.b32 %0, {low, high, 0, 0};}"
            : "=r"(word)
            : "f"(q.x[0]), "f"(q.x[1]), "f"(q.x[2]), "f"(q.x[3]));
        return word;
    }
#endif
    for (int i = 0; i < 4; i++) word |= (u32)encode<F, Scalar>(q.x[i]) << F::BITS * i;
    return word;
}

// Four codes, at once where the address is a multiple of their 4 or 2 bytes.
template <class F>
ZEROCAST_FN void store_codes(u8* to, u32 word, bool aligned) {
    if (!aligned) {
#pragma unroll
        for (int i = 0; i < F::BITS / 2; i++) to[i] = (u8)(word >> 8 * i);
    } else if constexpr (F::BITS == 8) {
        *(u32*)to = word;
    } else {
        *(unsigned short*)to = (unsigned short)word;
    }
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
