// How an amax becomes a scale: the laws of zerocast/ops.py.
//
// A law answers two questions about one block, given the bit pattern of its amax: what is stored,
// and what its elements are multiplied by before they are encoded. A multiplier that is NaN says
// that every code is NaN's.
#pragma once

#include "formats.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

template <class L>
ZEROCAST_FN typename L::Float not_above_flt_max(typename L::Float x) {
    return L::select(x > constant<L>(FLT_MAX_BITS), constant<L>(FLT_MAX_BITS), x);  // NaN stays NaN
}

// FP8 with one FP32 scale a block; the tensor amax is not used.
template <class F>
struct Float8Scaling {
    typedef F Format;
    typedef float Stored;
    bool power_2_scale;
    float amax_epsilon;

    template <class L>
    ZEROCAST_FN typename L::Float multiplier(typename L::Int amax_bits) const {
        typedef typename L::Float Float;
        Float amax = L::value(amax_bits);
        Float clamped = L::select(amax < L::splat(amax_epsilon), L::splat(amax_epsilon), amax);
        Float scale = not_above_flt_max<L>(L::divide(L::splat(F::MAX), clamped));
        if (power_2_scale) scale = L::value(L::bits(scale) & ~((1 << MANTISSA_BITS) - 1));
        scale = L::select(clamped == L::splat(0.0f), L::splat(1.0f), scale);
        return L::select(amax_bits < INFINITY_BITS, scale, constant<L>(NAN_BITS));
    }

    // FP32 scale_inv, by its bit pattern.
    template <class L>
    ZEROCAST_FN typename L::Int stored(typename L::Int amax_bits) const {
        typename L::Float inverse = L::divide(L::splat(1.0f), multiplier<L>(amax_bits));
        return L::select(amax_bits < INFINITY_BITS, L::bits(inverse), L::splat(NAN_BITS));
    }
};

// NVFP4: an E4M3 scale a block under the tensor's amax. Made once a tensor.
struct NVFP4Scaling {
    typedef E2M1 Format;
    typedef u8 Stored;
    float block_factor;  // S_enc * fl(1/6)
    float decode_scale;  // 1 / S_enc
    bool finite;

    static constexpr float MAXIMA = E2M1::MAX * E4M3::MAX;  // 2688, exact

    explicit ZEROCAST_FN NVFP4Scaling(i32 tensor_amax_bits) {
        float amax = Scalar::value(tensor_amax_bits);
        float encode_scale = not_above_flt_max<Scalar>(Scalar::divide(MAXIMA, amax));
        if (amax == 0.0f) encode_scale = 1.0f;
        block_factor = encode_scale * (1.0f / 6.0f);
        decode_scale = Scalar::divide(1.0f, encode_scale);
        finite = tensor_amax_bits < INFINITY_BITS;
    }

    // The E4M3 code.
    template <class L>
    ZEROCAST_FN typename L::Int stored(typename L::Int amax_bits) const {
        if (!finite) return L::splat(E4M3::NAN_CODE);
        return encode<E4M3, L>(not_above_flt_max<L>(L::value(amax_bits) * L::splat(block_factor)));
    }

    template <class L>
    ZEROCAST_FN typename L::Float multiplier(typename L::Int amax_bits) const {
        if (!finite) return constant<L>(NAN_BITS);
        typename L::Float decoded = decode<E4M3, L>(stored<L>(amax_bits));
        return not_above_flt_max<L>(L::divide(L::splat(1.0f), decoded * L::splat(decode_scale)));
    }
};

// What a code is multiplied by when it is decoded: from the stored scale of its block, and the
// tensor's amax.
template <class L>
ZEROCAST_FN typename L::Float nvfp4_decode_multiplier(typename L::Int stored, float tensor_amax) {
    constexpr float INVERSE_MAXIMA = 1.0f / NVFP4Scaling::MAXIMA;
    return (decode<E4M3, L>(stored) * L::splat(tensor_amax)) * L::splat(INVERSE_MAXIMA);
}

// A decoded element; every NaN is the canonical one, whatever the machine makes of infinity times
// zero.
template <class L>
ZEROCAST_FN typename L::Float scaled(typename L::Float value, typename L::Float multiplier) {
    typename L::Float product = value * multiplier;
    return L::select(product == product, product, constant<L>(NAN_BITS));
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
