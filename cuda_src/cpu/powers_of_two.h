// BF16 elements under scales that are powers of two, in lanes of 16 bits: twice as many in a
// register as of FP32, and rounded once for any number of scales.
//
// What a normal magnitude is rounded to at a mantissa bit does not depend on the power of two that
// it is multiplied by: that adds to its exponent field. So a code is the rounded magnitude, shifted
// down to the code's fields, plus the step of the block's scale, wherever the code is normal.
#pragma once

#include "cpu/encoders.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// Elements as Waiting keeps them: in a lane of 32 bits one of each of two registers of FP32.
typedef Native::Shorts Shorts;

// What the amaxes of blocks have to be for PowerOfTwoCodes, where they are not 0: at least 2^-90,
// so that all that is subnormal in BF16 becomes 0, and finite.
constexpr i32 LEAST_AMAX = (EXPONENT_BIAS - 90) << MANTISSA_BITS;

// A group of elements.
template <class F>
class PowerOfTwoCodes {
  public:
    explicit ZEROCAST_FN PowerOfTwoCodes(const Waiting* group)
        : elements_{Native::load_as<Shorts>(group), Native::load_as<Shorts>(group + PAIR)} {
        for (int i = 0; i < 2; i++) {
            magnitude_[i] = elements_[i] & 0x7FFF;
            Shorts odd = magnitude_[i] >> DROPPED & 1;
            rounded_[i] = (magnitude_[i] + (short)(HALF_LESS_ONE - FROM) + odd) >> DROPPED;
        }
    }

    // The steps of blocks that have these scales, of E8M0. That of a block of zeros, which no step
    // may raise, is as low as those of others can be.
    static ZEROCAST_FN Native::Int steps(Native::Int scale) {
        constexpr i32 BIASES = (2 * EXPONENT_BIAS - Derived<F>::BIAS) << M;
        Native::Int exponent = (E8M0::MAX_CODE - scale) << M;  // of what multiplies the elements
        Native::Int step = Native::min(exponent - BIASES, Native::splat(-BELOW)) + RAISE;
        return (step << FINER) + FROM;
    }
    // Those of as many columns, in the order of Waiting.
    static ZEROCAST_FN Shorts in_lanes(Native::Int low, Native::Int high) {
        return (Shorts)Native::merge(0xFFFF, low, high << 16);
    }

    // The codes under these steps, in the order of saturated(). Where one of E4M3 or E5M2 is
    // subnormal, it is wrong, and `irregular`, which starts as NONE, is_irregular() then.
    ZEROCAST_FN Packed under(Shorts first, Shorts second, Packed& irregular) const {
        Packed codes = saturated(rounded_[0] + (first >> FINER), rounded_[1] + (second >> FINER));
        if constexpr (SAME<F, E2M1>) {
            codes = larger(codes, below_one(first, second));
        } else {
            irregular = smaller(irregular, codes - 1);
            codes = less(codes, Packed{} + (u8)BELOW);
        }
        codes = smaller(codes, Packed{} + (u8)F::MAX_CODE);
        constexpr int SHIFT = 16 - F::BITS;
        auto signs = saturated((Shorts)((UnsignedShorts)elements_[0] >> SHIFT),
                               (Shorts)((UnsignedShorts)elements_[1] >> SHIFT));
        constexpr i32 CODE = (Derived<F>::SIGN - 1) * 0x01010101;
        return (Packed)Native::merge(CODE, (Native::Int)codes, (Native::Int)signs);
    }
    static constexpr u8 NONE = 255;
    static constexpr bool MAY_BE_IRREGULAR = !SAME<F, E2M1>;
    static ZEROCAST_FN bool is_irregular(Packed irregular) {
        return MAY_BE_IRREGULAR && any_below(irregular, BELOW + (1 << M) - 1);
    }

  private:
    static constexpr int BF16_MANTISSA = 7, PAIR = 2 * Native::WIDTH;
    static constexpr int M = F::MANTISSA, DROPPED = BF16_MANTISSA - M;
    static constexpr short HALF_LESS_ONE = (1 << (DROPPED - 1)) - 1;

    // Where a magnitude plus a step is at most -BELOW, it rounds to 0; from 1 << M on it is a
    // normal code. Steps of E4M3 and E5M2 are raised, so that values in between are positive.
    static constexpr i32 BELOW = (M << M) + 1, RAISE = SAME<F, E2M1> ? 0 : BELOW;

    // Steps of E2M1 count in the units of a magnitude that is not rounded yet, from a quarter on:
    // so they serve below_one(), too.
    static constexpr short OCTAVE = 1 << BF16_MANTISSA;  // from a quarter to a half
    static constexpr int FINER = SAME<F, E2M1> ? DROPPED : 0, FROM = SAME<F, E2M1> ? OCTAVE : 0;

    typedef unsigned short UnsignedShorts __attribute__((vector_size(sizeof(Shorts))));

    Shorts elements_[2], magnitude_[2], rounded_[2];

    // The codes of E2M1 below 1, and 2 above: 0.5 begins behind 0.25, which ties, and 1 at 0.75.
    ZEROCAST_FN Packed below_one(Shorts first, Shorts second) const {
        Packed from_quarter = saturated(magnitude_[0] + first, magnitude_[1] + second);
        constexpr u8 THREE_QUARTERS = OCTAVE + OCTAVE / 2;
        Packed from_three_quarters = less(from_quarter, Packed{} + (u8)(THREE_QUARTERS - 1));
        return smaller(from_quarter, Packed{} + 1) + smaller(from_three_quarters, Packed{} + 1);
    }
};

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
