// How an amax becomes a scale: one class for each scheme's numerics.
//
// Each class computes two values for one block from the bit pattern of its amax: what is stored,
// and what its elements are multiplied by before they are encoded. A multiplier that is NaN says
// that every code is NaN's. A class that CHOOSES needs the block's choice, too; the others take one
// and ignore it, so that all are called alike.
#pragma once

#include "arithmetic/formats.h"
#include "arithmetic/tables.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

template <class L>
ZEROCAST_FN typename L::Float not_above_flt_max(typename L::Float x) {
    return L::select(x > constant<L>(FLT_MAX_BITS), constant<L>(FLT_MAX_BITS), x);  // NaN stays NaN
}

// FP8 with one FP32 scale a block; the tensor amax is not used.
template <class F>
struct Float8Numerics {
    typedef F Format;
    typedef float Stored;
    static constexpr bool CHOOSES = false;
    bool power_2_scale;
    float amax_epsilon;
    i64 formula;  // ScaleFormula

    template <class L>
    ZEROCAST_FN typename L::Float clamped_amax(typename L::Int amax_bits) const {
        typename L::Float amax = L::value(amax_bits);
        return L::select(amax < L::splat(amax_epsilon), L::splat(amax_epsilon), amax);
    }

    template <class L>
    ZEROCAST_FN typename L::Float multiplier(typename L::Int amax_bits,
                                             typename L::Int = L::splat(0)) const {
        typedef typename L::Float Float;
        Float clamped = clamped_amax<L>(amax_bits), scale;
        if (formula == SCALE_INVERSE_FIRST)
            scale = L::divide(L::splat(1.0f), L::divide(clamped, L::splat(F::MAX)));
        else
            scale = L::divide(L::splat(F::MAX), clamped);
        scale = not_above_flt_max<L>(scale);
        if (power_2_scale) scale = L::value(L::bits(scale) & ~((1 << MANTISSA_BITS) - 1));
        scale = L::select(clamped == L::splat(0.0f), L::splat(1.0f), scale);
        return L::select(amax_bits < INFINITY_BITS, scale, constant<L>(NAN_BITS));
    }

    // FP32 scale_inv, by its bit pattern.
    template <class L>
    ZEROCAST_FN typename L::Int stored(typename L::Int amax_bits,
                                       typename L::Int = L::splat(0)) const {
        typename L::Float inverse;
        if (formula == SCALE_RECIPROCAL) {
            inverse = L::divide(L::splat(1.0f), multiplier<L>(amax_bits));
        } else {
            typename L::Float clamped = clamped_amax<L>(amax_bits);
            inverse = L::divide(clamped, L::splat(F::MAX));
            inverse = L::select(clamped == L::splat(0.0f), L::splat(1.0f), inverse);
        }
        return L::select(amax_bits < INFINITY_BITS, L::bits(inverse), L::splat(NAN_BITS));
    }
};

// FP8 under the scale that earlier casts of the tensor left: made once a tensor, from that scale.
template <class F>
struct DelayedNumerics {
    typedef F Format;
    typedef float Stored;
    static constexpr bool CHOOSES = false;
    float scale;

    template <class L>
    ZEROCAST_FN typename L::Float multiplier(typename L::Int, typename L::Int = L::splat(0)) const {
        return L::splat(scale);
    }

    // FP32 scale_inv, by its bit pattern; the amax is that of what was cast.
    template <class L>
    ZEROCAST_FN typename L::Int stored(typename L::Int amax_bits,
                                       typename L::Int = L::splat(0)) const {
        typename L::Float inverse = L::divide(L::splat(1.0f), L::splat(scale));
        return L::select(amax_bits < INFINITY_BITS, L::bits(inverse), L::splat(NAN_BITS));
    }
};

// Whether delayed scaling takes an amax of these bits into its history.
ZEROCAST_FN bool enters_history(i32 amax_bits) {
    return amax_bits > 0 && amax_bits < INFINITY_BITS;
}

// The scale of the next cast, from the largest of the history (or the newest) and the scale so far;
// scaled_max is max * 2^-margin.
ZEROCAST_FN float next_scale(float scaled_max, float largest, float scale) {
    if (!enters_history(Scalar::bits(largest))) return scale;
    return not_above_flt_max<Scalar>(Scalar::divide(scaled_max, largest));
}

// Codes under an E8M0 scale a block; the tensor amax is not used.
template <class F>
struct MXNumerics {
    typedef F Format;
    typedef u8 Stored;
    static constexpr bool CHOOSES = false;
    i64 rounding;  // ScaleRounding

    // The E8M0 code.
    template <class L>
    ZEROCAST_FN typename L::Int stored(typename L::Int amax_bits,
                                       typename L::Int = L::splat(0)) const {
        typename L::Int code;
        if (rounding == SCALE_UP) {
            constexpr float INVERSE_MAX = 1.0f / F::MAX;
            code = encode_e8m0<L>(L::value(amax_bits) * L::splat(INVERSE_MAX));
        } else {
            // To even: half of F's last place carries into the exponent.
            constexpr i32 HALF = 1 << (Derived<F>::DROPPED - 1);
            i32 carry = rounding == SCALE_EVEN ? HALF : 0;
            code = (typename L::Int)((typename L::Unsigned)(amax_bits + carry) >> MANTISSA_BITS);
            code = L::max(code - Derived<F>::MAX_EXPONENT, L::splat(0));
        }
        return L::select(amax_bits < INFINITY_BITS, code, L::splat(E8M0::NAN_CODE));
    }

    template <class L>
    ZEROCAST_FN typename L::Float multiplier(typename L::Int amax_bits,
                                             typename L::Int = L::splat(0)) const {
        return reciprocal_e8m0<L>(stored<L>(amax_bits));
    }
};

// NVFP4: an E4M3 scale a block under the tensor's amax. Made once a tensor.
struct NVFP4Numerics {
    typedef E2M1 Format;
    typedef u8 Stored;
    static constexpr bool CHOOSES = false;
    float encode_scale;  // S_enc
    float decode_scale;  // 1 / S_enc
    float block_factor;  // S_enc * fl(1/6)
    bool finite;

    // 2688 for the whole range of E4M3, exact.
    static ZEROCAST_FN float maxima(i64 scale_max) { return E2M1::MAX * (float)(i32)scale_max; }

    ZEROCAST_FN NVFP4Numerics(i32 tensor_amax_bits, i64 scale_max) {
        float amax = Scalar::value(tensor_amax_bits);
        encode_scale = not_above_flt_max<Scalar>(Scalar::divide(maxima(scale_max), amax));
        if (amax == 0.0f) encode_scale = 1.0f;
        decode_scale = Scalar::divide(1.0f, encode_scale);
        block_factor = encode_scale * (1.0f / 6.0f);
        finite = tensor_amax_bits < INFINITY_BITS;
    }

    // The E4M3 code.
    template <class L>
    ZEROCAST_FN typename L::Int stored(typename L::Int amax_bits,
                                       typename L::Int = L::splat(0)) const {
        if (!finite) return L::splat(E4M3::NAN_CODE);
        return encode<E4M3, L>(not_above_flt_max<L>(L::value(amax_bits) * L::splat(block_factor)));
    }

    template <class L>
    ZEROCAST_FN typename L::Float multiplier(typename L::Int amax_bits,
                                             typename L::Int = L::splat(0)) const {
        return multiplier_under<L>(stored<L>(amax_bits));
    }

    // The multiplier of a block whose stored scale is known.
    template <class L>
    ZEROCAST_FN typename L::Float multiplier_under(typename L::Int stored) const {
        if (!finite) return constant<L>(NAN_BITS);
        typename L::Float decoded = decode<E4M3, L>(stored);
        return not_above_flt_max<L>(L::divide(L::splat(1.0f), decoded * L::splat(decode_scale)));
    }
};

// Of both scales that 4-over-6 chooses between: their values, and what elements are multiplied by.
template <class L>
struct CandidateScales {
    typename L::Float map4, multiplier4, map6, multiplier6;
};

// Summed errors of one row inside a block, or of a whole block, under both scales.
template <class L>
struct Errors {
    typename L::Float map4, map6;
};

// NVFP4 with the better one of two scales a block, map4 and map6.
struct FourOverSixNumerics : NVFP4Numerics {
    static constexpr bool CHOOSES = true;
    float tensor_amax, largest;  // largest: 6 * scale_max

    ZEROCAST_FN FourOverSixNumerics(i32 tensor_amax_bits, i64 scale_max)
        : NVFP4Numerics(tensor_amax_bits, scale_max),
          tensor_amax(Scalar::value(tensor_amax_bits)),
          largest(maxima(scale_max)) {}

    // The E4M3 code of map4 where choice is not 0, of map6 where it is. Encoding saturates at 448.
    template <class L>
    ZEROCAST_FN typename L::Int stored(typename L::Int amax_bits, typename L::Int choice) const {
        if (!finite) return L::splat(E4M3::NAN_CODE);
        typename L::Float base =
            L::divide(L::value(amax_bits), L::splat(6.0f)) * L::splat(encode_scale);
        return encode<E4M3, L>(L::select(choice != 0, base * L::splat(1.5f), base));
    }

    template <class L>
    ZEROCAST_FN typename L::Float multiplier(typename L::Int amax_bits,
                                             typename L::Int choice) const {
        return multiplier_under<L>(stored<L>(amax_bits, choice));
    }

    // Both scales of blocks with these amaxes.
    template <class L>
    ZEROCAST_FN CandidateScales<L> candidates(typename L::Int amax_bits) const {
        auto stored4 = stored<L>(amax_bits, L::splat(1)),
             stored6 = stored<L>(amax_bits, L::splat(0));
        return {decode<E4M3, L>(stored4), multiplier_under<L>(stored4), decode<E4M3, L>(stored6),
                multiplier_under<L>(stored6)};
    }

    // Adds the errors of one more element, rounded, to those on its left.
    template <bool SQUARED, class L>
    ZEROCAST_FN void add_errors(const CandidateScales<L>& scales, typename L::Float x,
                                Errors<L>& sum) const {
        sum.map4 = sum.map4 + error<SQUARED, L>(x, scales.map4, scales.multiplier4);
        sum.map6 = sum.map6 + error<SQUARED, L>(x, scales.map6, scales.multiplier6);
    }

    // What a code of E2M1 means under a stored scale of the value `map`.
    template <class L>
    ZEROCAST_FN typename L::Float dequantized(typename L::Int code, typename L::Float map) const {
        typename L::Float value = decode<E2M1, L>(code) * map;
        return L::divide(value * L::splat(tensor_amax), L::splat(largest));
    }

    // How far x is from such a value, or the square of that.
    template <bool SQUARED, class L>
    static ZEROCAST_FN typename L::Float error(typename L::Float x, typename L::Float value) {
        typename L::Float difference = value - x;
        return SQUARED ? difference * difference : absolute<L>(difference);
    }

  private:
    // Of x, where it is multiplied by `multiplier`.
    template <bool SQUARED, class L>
    ZEROCAST_FN typename L::Float error(typename L::Float x, typename L::Float map,
                                        typename L::Float multiplier) const {
        typename L::Int code = encode<E2M1, L>(x * multiplier);
        return error<SQUARED, L>(x, dequantized<L>(code, map));
    }
};

// The amax that a tensor of NVFP4 is cast under and stores: its own, or, if that is finite, the
// one that makes its scale 1.
ZEROCAST_FN i32 effective_amax(const NumericsTable& table, i32 tensor_amax) {
    i32 fixed = (i32)table.one_level_amax;
    return fixed && tensor_amax < INFINITY_BITS ? fixed : tensor_amax;
}

// The numerics of one tensor.
template <class Numerics>
ZEROCAST_FN Numerics numerics_of(const NumericsTable& table, const i32* tensor_amax,
                                 const DelayedState& delayed) {
    typedef typename Numerics::Format F;
    if constexpr (SAME<Numerics, Float8Numerics<F>>)
        return {table.power_2_scale != 0, Scalar::value((i32)table.amax_epsilon), table.formula};
    else if constexpr (SAME<Numerics, DelayedNumerics<F>>)
        return {*delayed.scale};
    else if constexpr (SAME<Numerics, MXNumerics<F>>)
        return {table.scale_rounding};
    else
        return {effective_amax(table, *tensor_amax), table.scale_max};
}

// What a code is multiplied by when it is decoded: from the stored scale of its block, and the
// tensor's amax.
template <class L>
ZEROCAST_FN typename L::Float nvfp4_decode_multiplier(typename L::Int stored, float tensor_amax,
                                                      i64 scale_max) {
    float inverse_maxima = Scalar::divide(1.0f, NVFP4Numerics::maxima(scale_max));
    return (decode<E4M3, L>(stored) * L::splat(tensor_amax)) * L::splat(inverse_maxima);
}

// A decoded element; every NaN is the canonical one.
template <class L>
ZEROCAST_FN typename L::Float scaled(typename L::Float value, typename L::Float multiplier) {
    return with_canonical_nan<L>(value * multiplier);
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
