// How scaled elements become codes: by rounding to nearest, or by stochastic rounding.
//
// An encoder takes GROUP elements in four registers, of one row and from one on at which
// starts_group(), or a single one.
#pragma once

#include "arithmetic/formats.h"
#include "arithmetic/philox.h"
#include "arithmetic/tables.h"
#include "cpu/simd.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

template <class F>
struct NearestGroup {
    typedef F Format;

    // Whether a group may begin with this element: whole bytes.
    ZEROCAST_FN bool starts_group(i64 element) const { return F::BITS == 8 || element % 2 == 0; }
    // Whether a group may go on from one row to the next.
    ZEROCAST_FN bool spans_rows() const { return true; }
    ZEROCAST_FN void group(i64, const Native::Float (&x)[4], Native::Int (&codes)[4]) const {
        for (int i = 0; i < 4; i++) codes[i] = encode<F, Native>(x[i]);
    }
    ZEROCAST_FN i32 single(i64, float x) const { return encode<F, Scalar>(x); }
};

struct StochasticGroup {
    typedef E2M1 Format;
    RandomWords random;
    RandomBits random_bits;

    // The words of four elements of the whole weight are made together.
    ZEROCAST_FN bool starts_group(i64 element) const {
        return random_bits.in_whole(element) % 4 == 0;
    }
    ZEROCAST_FN bool spans_rows() const { return !random_bits.skip; }

    ZEROCAST_FN void group(i64 element, const Native::Float (&x)[4],
                           Native::Int (&codes)[4]) const {
        typedef typename IndicesTo<Native::WIDTH>::Type All;
        u64 first = (u64)random_bits.in_whole(element) / 4;
        // WIDTH fours side by side; their number may carry into its high half on the way.
        Native::Unsigned low = counting(All{}) + (u32)first;
        Native::Unsigned carry = (Native::Unsigned)(low < (u32)first);  // -1 where it does
        Native::Unsigned words[4];
        random.of_four<Native>(low, (u32)(first >> 32) - carry, words);
        // Word k of four i belongs to element 4 * i + k.
        auto a = interleaved<Native, 0>(words[0], words[2], All{});
        auto b = interleaved<Native, 0>(words[1], words[3], All{});
        auto c = interleaved<Native, 1>(words[0], words[2], All{});
        auto d = interleaved<Native, 1>(words[1], words[3], All{});
        codes[0] = encode_e2m1_stochastic<Native>(x[0], interleaved<Native, 0>(a, b, All{}));
        codes[1] = encode_e2m1_stochastic<Native>(x[1], interleaved<Native, 1>(a, b, All{}));
        codes[2] = encode_e2m1_stochastic<Native>(x[2], interleaved<Native, 0>(c, d, All{}));
        codes[3] = encode_e2m1_stochastic<Native>(x[3], interleaved<Native, 1>(c, d, All{}));
    }
    ZEROCAST_FN i32 single(i64 element, float x) const {
        i64 index = random_bits.in_whole(element);
        u64 four = (u64)index / 4;
        u32 words[4];
        random.of_four<Scalar>((u32)four, (u32)(four >> 32), words);
        return encode_e2m1_stochastic<Scalar>(x, words[index % 4]);
    }

  private:
    template <int... I>
    static ZEROCAST_FN Native::Unsigned counting(Indices<I...>) {
        return Native::Unsigned{(u32)I...};
    }
};

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
