// What the arithmetic is written over: the lane type.
//
// Every formula of zerocast is a template over a lane type L, so that one text serves a CUDA thread
// (one element a lane: Scalar, below) and a CPU loop (a SIMD register: Simd in
// cuda_src/cpu/simd.h). A lane type has
//
//     L::Float, L::Int, L::Unsigned   what it computes on: 32 bits an element
//     L::bits(f), L::value(i)         bit patterns: Float -> Int and back
//     L::splat(c)                     the constant c in every element
//     L::select(mask, a, b)           a where the comparison held, b elsewhere
//     L::min(a, b), L::max(a, b)      of two Int
//     L::merge(mask, a, b)            a's bits where the constant mask has ones, b's elsewhere; of
//                                     two Int
//     L::divide(a, b)                 a / b, rounded once (IEEE)
//     L::sqrt(a)                      its square root, rounded once
//     L::fma(a, b, c)                 a * b + c, rounded once
//     L::to_float(i)                  an Int of magnitude at most 2^24 as a Float: exact
//     L::Wide                         64 bits an element, half as many of them where there are many
//     L::multiply_low(a, c)           the low half of each Wide times the 32-bit constant c
//
// and the operators of C on its three types. A comparison gives whatever select takes.
//
// The rules of the arithmetic: FP32, round to nearest even, no flush to zero, no contraction but by
// fma (-ffp-contract=off,
// --fmad=false, -ftz=false). Float to integer goes through bit patterns, never through a
// conversion.
//
// The files of this folder include nothing but each other: NVRTC has no <cstdint>.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define ZEROCAST_FN __host__ __device__ __forceinline__
#else
#define ZEROCAST_FN inline __attribute__((always_inline))
#endif

// Whether a device's own conversions are taken: cuda/conversions.h.
#if defined(__CUDA_ARCH__) && !defined(ZEROCAST_PORTABLE_CONVERSIONS)
#define ZEROCAST_CONVERTS
#endif

// The CPU library holds this code once an instruction set. Each copy has a separate namespace, or
// the linker would keep one of them for all, and the wrong one.
#ifndef ZEROCAST_ISA
#define ZEROCAST_ISA scalar
#endif

namespace zerocast {
inline namespace ZEROCAST_ISA {

typedef unsigned char u8;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

static_assert(sizeof(i32) == 4 && sizeof(i64) == 8, "the fixed widths that the names say");

template <class A, class B>
constexpr bool SAME = false;
template <class A>
constexpr bool SAME<A, A> = true;

// Bit patterns of FP32 magnitudes. They order like the integers they are.
constexpr i32 MAGNITUDE_MASK = 0x7FFFFFFF;
constexpr i32 EXPONENT_MASK = 0x7F800000;
constexpr i32 INFINITY_BITS = 0x7F800000;
constexpr i32 NAN_BITS = 0x7FC00000;  // the canonical NaN
constexpr i32 FLT_MAX_BITS = 0x7F7FFFFF;
constexpr int MANTISSA_BITS = 23;
constexpr int EXPONENT_BIAS = 127;

// One element a lane.
struct Scalar {
    static constexpr int WIDTH = 1;
    typedef float Float;
    typedef i32 Int;
    typedef u32 Unsigned;
    typedef u64 Wide;

    static ZEROCAST_FN Int bits(Float x) {
#ifdef __CUDA_ARCH__
        return __float_as_int(x);
#else
        Int i;
        __builtin_memcpy(&i, &x, sizeof i);
        return i;
#endif
    }
    static ZEROCAST_FN Float value(Int i) {
#ifdef __CUDA_ARCH__
        return __int_as_float(i);
#else
        Float x;
        __builtin_memcpy(&x, &i, sizeof x);
        return x;
#endif
    }
    static ZEROCAST_FN Float splat(float c) { return c; }
    static ZEROCAST_FN Int splat(i32 c) { return c; }
    template <class T>
    static ZEROCAST_FN T select(bool mask, T a, T b) {
        return mask ? a : b;
    }
    static ZEROCAST_FN Int min(Int a, Int b) { return a < b ? a : b; }
    static ZEROCAST_FN Int max(Int a, Int b) { return a > b ? a : b; }
    static ZEROCAST_FN Int merge(i32 mask, Int a, Int b) { return (a & mask) | (b & ~mask); }
    static ZEROCAST_FN Float divide(Float a, Float b) {
#ifdef __CUDA_ARCH__
        return __fdiv_rn(a, b);
#else
        return a / b;
#endif
    }
    static ZEROCAST_FN Float sqrt(Float a) {
#ifdef __CUDA_ARCH__
        return __fsqrt_rn(a);
#else
        return __builtin_sqrtf(a);
#endif
    }
    static ZEROCAST_FN Float fma(Float a, Float b, Float c) {
#ifdef __CUDA_ARCH__
        return __fmaf_rn(a, b, c);
#else
        return __builtin_fmaf(a, b, c);
#endif
    }
    static ZEROCAST_FN Float to_float(Int i) { return (Float)i; }
    static ZEROCAST_FN Wide multiply_low(Wide a, u32 c) {
#ifdef __CUDA_ARCH__
        u64 product;  // written in C, zero is added to its upper half
        asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"((u32)a), "r"(c));
        return product;
#else
        return (u64)(u32)a * c;
#endif
    }
};

// The FP32 value of a constant bit pattern, in every element.
template <class L>
ZEROCAST_FN typename L::Float constant(i32 bits) {
    return L::value(L::splat(bits));
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
