// What the bits mean: rounding to BF16 and FP16, codes of E4M3, E5M2 and E2M1, exponents of E8M0.
//
// Restates zerocast/numerics/codec.py for speed; the tests compare the two on every BF16 value, tie
// and neighbour.
#pragma once

#include "arithmetic/lanes.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// --- element formats: widths, and the codes that are reserved; everything else follows ---

// The value of a positive, normal code.
ZEROCAST_FN constexpr float value_of_code(i32 code, int exponent_bits, int mantissa_bits) {
    int exponent = (code >> mantissa_bits) - ((1 << (exponent_bits - 1)) - 1);  // 0 or more
    i32 significand = (code & ((1 << mantissa_bits) - 1)) | 1 << mantissa_bits;
    return (float)((i64)significand << exponent) / (float)(1 << mantissa_bits);
}

struct E4M3 {
    static constexpr int BITS = 8, EXPONENT_BITS = 4, MANTISSA = 3;
    static constexpr i32 MAX_CODE = 0b0'1111'110;
    static constexpr i32 NAN_CODE = 0b0'1111'111;
    static constexpr bool HAS_INFINITY = false;
    static constexpr float MAX = value_of_code(MAX_CODE, EXPONENT_BITS, MANTISSA);
};
static_assert(E4M3::MAX == 448.0f, "1.75 * 2^8");

struct E5M2 {
    static constexpr int BITS = 8, EXPONENT_BITS = 5, MANTISSA = 2;
    static constexpr i32 MAX_CODE = 0b0'11110'11;
    static constexpr i32 NAN_CODE = 0b0'11111'11;
    static constexpr bool HAS_INFINITY = true;  // 0b0'11111'00; encoding saturates instead
    static constexpr float MAX = value_of_code(MAX_CODE, EXPONENT_BITS, MANTISSA);
};
static_assert(E5M2::MAX == 57344.0f, "1.75 * 2^15");

struct E2M1 {
    static constexpr int BITS = 4, EXPONENT_BITS = 2, MANTISSA = 1;
    static constexpr i32 MAX_CODE = 0b0'11'1;
    static constexpr i32 NAN_CODE =
        MAX_CODE;  // there is no NaN: +6, and the block's scale says NaN
    static constexpr bool HAS_INFINITY = false;
    static constexpr float MAX = value_of_code(MAX_CODE, EXPONENT_BITS, MANTISSA);
};
static_assert(E2M1::MAX == 6.0f, "1.5 * 2^2");

template <class F>
struct Derived {
    static constexpr int BIAS = (1 << (F::EXPONENT_BITS - 1)) - 1;
    static constexpr int DROPPED =
        MANTISSA_BITS - F::MANTISSA;  // mantissa bits that FP32 has and F has not
    static constexpr i32 SIGN = 1 << (F::BITS - 1);
    static constexpr i32 MAX_EXPONENT = (F::MAX_CODE >> F::MANTISSA) - BIAS;
    // FP32 bit patterns of F's smallest normal magnitude, and of its largest.
    static constexpr i32 MIN_NORMAL_BITS = (EXPONENT_BIAS - BIAS + 1) << MANTISSA_BITS;
    static constexpr i32 MAX_BITS =
        (F::MAX_CODE << DROPPED) + ((EXPONENT_BIAS - BIAS) << MANTISSA_BITS);
};

// --- codes ---

// Round a magnitude that is no NaN to the nearest code of F, ties to even, saturating.
//
// With 2^e the magnitude's power of two, or the smallest normal where that is larger, adding 2^(e +
// DROPPED) leaves no mantissa bits below F's last place: the addition itself rounds, to even,
// normal and subnormal alike. The sum's mantissa then counts steps of that last place, and its
// exponent field, shifted down beside them, adds the steps of all smaller exponents. OFFSET, added
// with the power, makes the smallest normal's field count as none; it is even, so ties fall as
// before. Above the code's bits the result holds others.
template <class F, class L>
ZEROCAST_FN typename L::Int encode_magnitude(typename L::Float magnitude) {
    typedef Derived<F> D;
    typedef typename L::Unsigned Unsigned;
    constexpr i32 FIRST_FIELD = (D::MIN_NORMAL_BITS >> MANTISSA_BITS) + D::DROPPED;
    constexpr i32 OFFSET = -(FIRST_FIELD << F::MANTISSA) & ((1 << F::BITS) - 1);
    static_assert(OFFSET % 2 == 0, "an odd offset would send ties to odd codes");
    typename L::Int clamped = L::min(L::bits(magnitude), L::splat(D::MAX_BITS));
    typename L::Int power = L::max(clamped, L::splat(D::MIN_NORMAL_BITS)) & EXPONENT_MASK;
    constexpr i32 RAISE = (D::DROPPED << MANTISSA_BITS) + OFFSET;
    typename L::Int sum = L::bits(L::value(clamped) + L::value(power + RAISE));
    return sum + (typename L::Int)((Unsigned)sum >> D::DROPPED);
}

// A magnitude's code, and the sign of x, which has these bits: the code is all that the result
// holds.
template <class F, class L>
ZEROCAST_FN typename L::Int with_sign(typename L::Int code, typename L::Int bits) {
    auto sign = (typename L::Int)((typename L::Unsigned)bits >> (32 - F::BITS));
    return L::merge(Derived<F>::SIGN - 1, code, sign);
}

// Round what is no NaN to the nearest code of F.
template <class F, class L>
ZEROCAST_FN typename L::Int encode_number(typename L::Float x) {
    typename L::Int bits = L::bits(x);
    auto magnitude = L::value(bits & MAGNITUDE_MASK);
    return with_sign<F, L>(encode_magnitude<F, L>(magnitude), bits);
}

// Round to the nearest code of F. A NaN has to be positive, as round_to leaves it: where the
// largest code is NaN's too (E2M1), saturating does it all.
template <class F, class L>
ZEROCAST_FN typename L::Int encode(typename L::Float x) {
    typename L::Int code = encode_number<F, L>(x);
    if constexpr (F::NAN_CODE == F::MAX_CODE) return code;
    return L::select((L::bits(x) & MAGNITUDE_MASK) > INFINITY_BITS, L::splat(F::NAN_CODE), code);
}

// The FP32 value of a code: exact.
template <class F, class L>
ZEROCAST_FN typename L::Float decode(typename L::Int code) {
    typedef Derived<F> D;
    typename L::Int magnitude = code & (D::SIGN - 1);
    // Read as FP32 the fields mean a value too small by a power of two (a subnormal where F's is):
    // multiply it out.
    typename L::Float value = L::value(magnitude << D::DROPPED)
                              * constant<L>((2 * EXPONENT_BIAS - D::BIAS) << MANTISSA_BITS);
    typename L::Int sign = (code & D::SIGN) << (32 - F::BITS);
    if constexpr (F::BITS == 8) {
        if constexpr (F::HAS_INFINITY) {
            value = L::select(magnitude == F::MAX_CODE + 1, constant<L>(INFINITY_BITS), value);
        }
        constexpr i32 LAST = F::MAX_CODE + (F::HAS_INFINITY ? 1 : 0);
        typename L::Int signed_bits = L::bits(value) | sign;
        return L::value(L::select(magnitude > LAST, L::splat(NAN_BITS), signed_bits));
    } else {
        return L::value(L::bits(value) | sign);
    }
}

// --- E8M0: the exponent of a block scale that is a power of two ---

struct E8M0 {
    static constexpr i32 NAN_CODE = 0xFF;
    static constexpr i32 MAX_CODE = 0xFE;  // 2^127
};

// The code of a non-negative, finite value, rounded up to a power of two: 2^-127 at least, and at
// most 2^127, since nothing rounds up into NaN's code.
template <class L>
ZEROCAST_FN typename L::Int encode_e8m0(typename L::Float x) {
    typedef typename L::Unsigned Unsigned;
    typename L::Int bits = L::bits(x);
    // Adding all of the mantissa carries into the exponent where any of its bits is set. Up to
    // 2^-127, half the smallest normal, the code is 0.
    Unsigned carried = ((Unsigned)bits + ((1u << MANTISSA_BITS) - 1)) >> MANTISSA_BITS;
    typename L::Int up = L::min((typename L::Int)carried, L::splat(E8M0::MAX_CODE));
    constexpr i32 SMALLEST = 1 << (MANTISSA_BITS - 1);  // 2^-127, a subnormal
    return L::select(bits > SMALLEST, up, L::splat(0));
}

// 1 / the value of a code: what elements under it are multiplied by. Exact; NaN for NaN's code.
template <class L>
ZEROCAST_FN typename L::Float reciprocal_e8m0(typename L::Int code) {
    typedef typename L::Unsigned Unsigned;
    auto bits = (typename L::Int)((Unsigned)(E8M0::MAX_CODE - code) << MANTISSA_BITS);
    constexpr i32 SMALLEST = 1 << (MANTISSA_BITS - 1);  // of 2^127: 2^-127, a subnormal
    bits = L::select(code == E8M0::MAX_CODE, L::splat(SMALLEST), bits);
    return L::value(L::select(code == E8M0::NAN_CODE, L::splat(NAN_BITS), bits));
}

// The FP32 value of a code: exact.
template <class L>
ZEROCAST_FN typename L::Float decode_e8m0(typename L::Int code) {
    constexpr i32 SMALLEST = 1 << (MANTISSA_BITS - 1);
    auto normal = (typename L::Int)((typename L::Unsigned)code << MANTISSA_BITS);
    typename L::Int bits = L::select(code == 0, L::splat(SMALLEST), normal);
    return L::value(L::select(code == E8M0::NAN_CODE, L::splat(NAN_BITS), bits));
}

// --- stochastic rounding ---

// The code of E2M1 below x or the one above, by 16 random bits: above with the probability of x's
// distance from the one below, to the nearest 2^-16. Saturates; what NaN becomes is as for encode.
//
// Codes are 0.5 apart below the smallest normal, 1, and so are those from 1 to 2: 1 more (or, from
// 1 on, twice as much) is a number whose mantissa bits below E2M1's are the distance, and the draw,
// added to them, carries into the code or not.
template <class L>
ZEROCAST_FN typename L::Int encode_e2m1_stochastic(typename L::Float x, typename L::Int draw) {
    typedef Derived<E2M1> D;
    typename L::Int bits = L::bits(x);
    typename L::Float y = L::value(L::min(bits & MAGNITUDE_MASK, L::splat(D::MAX_BITS)));
    typename L::Int spread = L::max(L::bits(y + L::splat(1.0f)), L::bits(y + y));
    constexpr int BELOW = D::DROPPED - 16;                 // bits of the distance below the draw's
    constexpr i32 FIRST = EXPONENT_BIAS << MANTISSA_BITS;  // what 0 is spread to: 1
    constexpr i32 HALF = 1 << (BELOW - 1);                 // of the draw's last place
    typename L::Int sum = spread + (draw << BELOW) - (FIRST - HALF);
    return with_sign<E2M1, L>(sum >> D::DROPPED, bits);
}

// --- nominal dtypes: what a master element is rounded to first; every NaN becomes the canonical,
// positive one ---

struct Fp32 {
    float value;
};
struct Bf16 {
    unsigned short bits;
};
struct Fp16 {
    unsigned short bits;
};

template <class Nominal, class L>
struct Rounding;  // of_number(x): of anything but NaN

template <class L>
struct Rounding<Fp32, L> {
    static ZEROCAST_FN typename L::Float of_number(typename L::Float x) { return x; }
};

template <class L>
struct Rounding<Bf16, L> {
    // The result's bits, and others below them.
    static ZEROCAST_FN typename L::Unsigned carried(typename L::Float x) {
        // Half of the last place that stays, less one where that place is even: the carry rounds,
        // into infinity too.
        typename L::Unsigned bits = (typename L::Unsigned)L::bits(x);
        return bits + 0x7FFFu + ((bits >> 16) & 1u);
    }
    static ZEROCAST_FN typename L::Float of_number(typename L::Float x) {
        return L::value((typename L::Int)(carried(x) & 0xFFFF0000u));
    }
};

template <class L>
struct Rounding<Fp16, L> {
    static ZEROCAST_FN typename L::Float of_number(typename L::Float x) {
        typename L::Int bits = L::bits(x);
        typename L::Int magnitude = bits & MAGNITUDE_MASK;
        // Normal: as for BF16, with 10 mantissa bits, unsigned since a NaN may carry past the sign.
        // From 65520, half way past the largest, the result is infinity.
        typename L::Unsigned number = (typename L::Unsigned)magnitude;
        typename L::Unsigned carried = (number + 0xFFFu + ((number >> 13) & 1u)) & ~0x1FFFu;
        typename L::Int normal = (typename L::Int)carried;
        constexpr i32 OVERFLOW_BITS = 0x477FF000;  // 65520
        normal = L::select(magnitude >= OVERFLOW_BITS, L::splat(INFINITY_BITS), normal);
        // Subnormal, below 2^-14: the last place of [0.5, 1) is FP16's step 2^-24, so adding 0.5
        // rounds to it.
        typename L::Float half = L::splat(0.5f);
        typename L::Int subnormal = L::bits((L::value(magnitude) + half) - half);
        constexpr i32 MIN_NORMAL = (EXPONENT_BIAS - 14) << MANTISSA_BITS;
        typename L::Int rounded = L::select(magnitude < MIN_NORMAL, subnormal, normal);
        return L::value(rounded | (bits & ~MAGNITUDE_MASK));
    }
};

template <class Nominal, class L>
ZEROCAST_FN typename L::Float round_to(typename L::Float x) {
    return L::select(x == x, Rounding<Nominal, L>::of_number(x), constant<L>(NAN_BITS));
}

// x, and the canonical NaN for every other one: what machines make of infinity times zero, say, and
// what their conversions make of a NaN, differs in sign and payload.
template <class L>
ZEROCAST_FN typename L::Float with_canonical_nan(typename L::Float x) {
    return round_to<Fp32, L>(x);
}

// |x|, of a NaN too.
template <class L>
ZEROCAST_FN typename L::Float absolute(typename L::Float x) {
#ifdef __CUDA_ARCH__
    return fabsf(x);  // folded into an addition or a product
#else
    return L::value(L::bits(x) & MAGNITUDE_MASK);
#endif
}

// The bit pattern that enters an amax buffer: of the magnitude, every NaN canonical.
template <class L>
ZEROCAST_FN typename L::Int magnitude_bits(typename L::Float x) {
    typename L::Int magnitude = L::bits(x) & MAGNITUDE_MASK;
    return L::select(magnitude > INFINITY_BITS, L::splat(NAN_BITS), magnitude);
}

// --- nominal dtypes in memory ---

// The value of BF16 bits, in the low half of each element: exact.
template <class L>
ZEROCAST_FN typename L::Float from_bf16(typename L::Int half) {
    return L::value((typename L::Int)((typename L::Unsigned)half << 16));
}

// The value of FP16 bits, in the low half of each element: exact.
template <class L>
ZEROCAST_FN typename L::Float from_fp16(typename L::Int half) {
    typename L::Int magnitude = half & 0x7FFF;
    typename L::Int sign = (half & 0x8000) << 16;
    // The mantissa moves up and the exponent gets FP32's bias; infinity's and NaN's becomes the
    // largest. A subnormal counts steps of 2^-24. (No FP32 subnormal is met, which some CPUs
    // multiply slowly.)
    typename L::Int normal = (magnitude << 13) + (112 << MANTISSA_BITS);
    typename L::Int special = (magnitude << 13) | EXPONENT_MASK;
    typename L::Int subnormal = L::bits(L::to_float(magnitude) * L::splat(1.0f / (1 << 24)));
    typename L::Int bits = L::select(magnitude >= 0x7C00, special, normal);
    return L::value(L::select(magnitude < 0x400, subnormal, bits) | sign);
}

// The FP16 bits of a value that round_to<Fp16> made: exact.
template <class L>
ZEROCAST_FN typename L::Int to_fp16(typename L::Float x) {
    typename L::Int bits = L::bits(x), magnitude = bits & MAGNITUDE_MASK;
    constexpr i32 MIN_NORMAL = (EXPONENT_BIAS - 14) << MANTISSA_BITS;
    // The last place of [0.5, 1) is FP16's subnormal step, 2^-24.
    typename L::Int subnormal = L::bits(L::value(magnitude) + L::splat(0.5f)) & 0x7FF;
    typename L::Int normal = (magnitude - (112 << MANTISSA_BITS)) >> 13;
    typename L::Int special = (magnitude >> 13 & 0x3FF) | 0x7C00;
    typename L::Int half = L::select(magnitude < MIN_NORMAL, subnormal, normal);
    half = L::select(magnitude >= INFINITY_BITS, special, half);
    return half | (bits >> 16 & 0x8000);
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
