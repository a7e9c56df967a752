// Conversions by other means than the shared text of formats.h: the instructions of a device, and
// codes of E2M1 by three lines. Each gives the bits of the text that it stands for;
// docs/numerics.md lists them. A kernel compiled with ZEROCAST_PORTABLE_CONVERSIONS has none.
//
// A compiler that is no CUDA compiler sees the portable forms, and the lines.
#pragma once

#include "arithmetic/philox.h"
#include "cuda/vec4.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// --- rounding ---

#ifdef ZEROCAST_CONVERTS
// A NaN may become another NaN here, which changes no code: its scale is NaN. What is stored in
// high precision goes through store_rounded (fused_op.cu).
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

// --- encoding: four codes in one word, the first element's in the low bits ---

#ifdef ZEROCAST_CONVERTS
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

ZEROCAST_FN float fused_multiply_add(float a, float b, float c) {
#ifdef __CUDA_ARCH__
    return __fmaf_rn(a, b, c);
#else
    return __builtin_fmaf(a, b, c);
#endif
}

// b where a is a NaN.
ZEROCAST_FN float smaller(float a, float b) {
#ifdef __CUDA_ARCH__
    return fminf(a, b);
#else
    return a < b ? a : b;
#endif
}

// FIRST + n has the bits of FIRST, plus n: its last place is 1.
constexpr float FIRST = 1.5f * (1 << MANTISSA_BITS);
constexpr u32 BITS_OF_FIRST =
    (EXPONENT_BIAS + MANTISSA_BITS) << MANTISSA_BITS | 1u << (MANTISSA_BITS - 1);

// FIRST's bits and the code of a magnitude of E2M1, added up, without a largest code. Up to 2 the
// codes count halves, up to 4 ones and beyond twos: each of three lines is right in its range and
// too large elsewhere. Added to FIRST, a line is rounded as it is made, to even.
ZEROCAST_FN i32 e2m1_unbounded(float magnitude) {
    i32 halves = Scalar::bits(fused_multiply_add(magnitude, 2.0f, FIRST));
    i32 ones = Scalar::bits(fused_multiply_add(magnitude, 1.0f, FIRST + 2.0f));
    i32 twos = Scalar::bits(fused_multiply_add(magnitude, 0.5f, FIRST + 4.0f));
    return Scalar::min(Scalar::min(halves, ones), twos);
}

// FIRST's bits and the code of a magnitude. A NaN's code is the largest.
ZEROCAST_FN i32 e2m1_by_lines(float magnitude) {
    return Scalar::min(e2m1_unbounded(magnitude), Scalar::bits(FIRST) + E2M1::MAX_CODE);
}

// Four codes of E2M1.
ZEROCAST_FN u32 encode_e2m1_by_lines(const Vec4& q) {
    u32 word = 0;
#pragma unroll
    for (int i = 3; i >= 0; i--) {
        i32 bits = Scalar::bits(q.x[i]);
        word = word << 1 | (u32)bits >> 31;
        // FIRST's bits are above those of four codes.
        word = (word << 3) + (u32)e2m1_by_lines(absolute<Scalar>(q.x[i]));
    }
    return word & 0xFFFFu;
}

// The upper four bits of `low` behind those of `high`.
ZEROCAST_FN u32 shift_in(u32 high, u32 low) {
#ifdef __CUDA_ARCH__
    return __funnelshift_l(low, high, 4);
#else
    return high << 4 | low >> 28;
#endif
}

// A magnitude's bits, of which the highest does not count, with the sign of x.
ZEROCAST_FN u32 with_sign_of(float x, u32 magnitude) {
    u32 bits = (u32)Scalar::bits(x);
#ifdef __CUDA_ARCH__  // one instruction; the compiler may find two
    asm("lop3.b32 %0, %0, %1, %2, 0xE4;" : "+r"(magnitude) : "r"(bits), "n"(MAGNITUDE_MASK));
    return magnitude;
#else
    return (magnitude & MAGNITUDE_MASK) | (bits & ~(u32)MAGNITUDE_MASK);
#endif
}

// Four codes of E2M1 by stochastic rounding, under four draws of 16 bits: encode_e2m1_stochastic's
// sum as far left as the code may go, below the sign. What a magnitude is spread to is twice as
// large, so that its exponent ends in zeros and nothing is subtracted for the first code.
ZEROCAST_FN u32 encode_e2m1_stochastic_vec4(u64 draws, const Vec4& q) {
#ifdef ZEROCAST_PORTABLE_CONVERSIONS
    u32 codes = 0;
    for (int i = 0; i < 4; i++) {
        i32 draw = (i32)draw_of(draws, i);
        codes |= (u32)encode_e2m1_stochastic<Scalar>(q.x[i], draw) << 4 * i;
    }
    return codes;
#else
    typedef Derived<E2M1> D;
    constexpr int UP = 31 - 3 - D::DROPPED, DRAW = D::DROPPED - 16 + UP;
    constexpr u32 MASK = 0xFFFFu << DRAW, HALF = 1u << (DRAW - 1);
    const float largest = Scalar::value(D::MAX_BITS);
    u32 codes = 0, two[2] = {(u32)draws, (u32)(draws >> 32)};
#pragma unroll
    for (int i = 3; i >= 0; i--) {
        float y = smaller(absolute<Scalar>(q.x[i]), largest);  // of a NaN, the largest
        float below = fused_multiply_add(y, 2.0f, 2.0f), above = y * 4.0f;
        u32 spread = (u32)Scalar::max(Scalar::bits(below), Scalar::bits(above));
        u32 draw = i % 2 ? two[i / 2] >> (16 - DRAW) : two[i / 2] << DRAW;
        u32 sum = (spread << UP) + ((draw & MASK) | HALF);
        codes = shift_in(codes, with_sign_of(q.x[i], sum));
    }
    return codes;
#endif
}

// ABOVE and, in the low four bits, the code of E2M1 of a magnitude. From UNLIMITED on it may be a
// larger number, for the largest code; of what is above LARGEST_OF_TWO, anything.
struct TwoCodes {
    static constexpr float UNLIMITED = 7.0f, LARGEST_OF_TWO = 22.0f;
#if defined(ZEROCAST_CONVERTS_E2M1) || defined(ZEROCAST_PORTABLE_CONVERSIONS)
    static constexpr u32 ABOVE = 0;
#else
    static constexpr u32 ABOVE = BITS_OF_FIRST;
#endif
    u32 low, high;

    ZEROCAST_FN TwoCodes(float low_magnitude, float high_magnitude) {
#if defined(ZEROCAST_CONVERTS_E2M1)
        asm("{.reg .b8 both; cvt.rn.satfinite.e2m1x2.f32 both, %1, %2; mov.b32 %0, {both, 0, 0, "
            "0};}"
            : "=r"(low)
            : "f"(high_magnitude), "f"(low_magnitude));
        high = low >> 4;
        low &= 15;
#elif !defined(ZEROCAST_PORTABLE_CONVERSIONS)
        low = (u32)e2m1_unbounded(low_magnitude);
        high = (u32)e2m1_unbounded(high_magnitude);
#else
        low = (u32)encode<E2M1, Scalar>(low_magnitude);
        high = (u32)encode<E2M1, Scalar>(high_magnitude);
#endif
    }
};

template <class F>
ZEROCAST_FN u32 encode_vec4(const Vec4& q) {
    u32 word = 0;
#ifdef ZEROCAST_CONVERTS_E2M1
    if constexpr (F::BITS == 4) {
        asm("{.reg .b8 low, high;\n"
            "cvt.rn.satfinite.e2m1x2.f32 low, %2, %1;\n"
            "cvt.rn.satfinite.e2m1x2.f32 high, %4, %3;\n"
            "mov.b32 %0, {low, high, 0, 0};}"
            : "=r"(word)
            : "f"(q.x[0]), "f"(q.x[1]), "f"(q.x[2]), "f"(q.x[3]));
        return word;
    } else
#elif !defined(ZEROCAST_PORTABLE_CONVERSIONS)
    if constexpr (F::BITS == 4)
        return encode_e2m1_by_lines(q);
    else
#endif
#ifdef ZEROCAST_CONVERTS_FP8
        if constexpr (F::BITS == 8) {
        unsigned short low = convert_two<F>(q.x[0], q.x[1]), high = convert_two<F>(q.x[2], q.x[3]);
        asm("mov.b32 %0, {%1, %2};" : "=r"(word) : "h"(low), "h"(high));
        return word;
    } else
#endif
    {
        for (int i = 0; i < 4; i++) word |= (u32)encode<F, Scalar>(q.x[i]) << F::BITS * i;
        return word;
    }
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
