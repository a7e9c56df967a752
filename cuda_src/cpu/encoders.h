// How scaled elements become codes in memory: by rounding to nearest or by stochastic rounding, and
// then packed, a byte or a nibble each.
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

// --- codes of 32 bits an element to memory: four registers together, because narrowing one at a
// time would take more instructions than encoding ---

// GROUP codes below 256 to GROUP bytes.
ZEROCAST_FN void store_bytes(u8* to, const Native::Int (&codes)[4]) {
#if defined(__AVX512BW__)
    // Packing works within each 128-bit lane: dword (lane, register) of the result belongs at
    // (register, lane).
    __m512i bytes = _mm512_packus_epi16(_mm512_packus_epi32((__m512i)codes[0], (__m512i)codes[1]),
                                        _mm512_packus_epi32((__m512i)codes[2], (__m512i)codes[3]));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, bytes));
#elif defined(__AVX2__)
    __m256i bytes = _mm256_packus_epi16(_mm256_packus_epi32((__m256i)codes[0], (__m256i)codes[1]),
                                        _mm256_packus_epi32((__m256i)codes[2], (__m256i)codes[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32(bytes, order));
#elif defined(__SSE2__)
    __m128i bytes = _mm_packus_epi16(_mm_packs_epi32((__m128i)codes[0], (__m128i)codes[1]),
                                     _mm_packs_epi32((__m128i)codes[2], (__m128i)codes[3]));
    _mm_storeu_si128((__m128i*)to, bytes);
#else
    for (int i = 0; i < GROUP; i++) to[i] = (u8)codes[i / Native::WIDTH][i % Native::WIDTH];
#endif
}

// GROUP codes below 16 to GROUP / 2 bytes, the even element in the low nibble.
ZEROCAST_FN void store_nibbles(u8* to, const Native::Int (&codes)[4]) {
    alignas(64) u8 bytes[GROUP];  // stays in a register
    store_bytes(bytes, codes);
#if defined(__AVX512BW__)
    __m512i pairs = _mm512_maddubs_epi16(_mm512_load_si512(bytes),
                                         _mm512_set1_epi16(0x1001));  // even + 16 * odd
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi16_epi8(pairs));
#elif defined(__AVX2__)
    __m256i pairs =
        _mm256_maddubs_epi16(_mm256_load_si256((__m256i*)bytes), _mm256_set1_epi16(0x1001));
    __m256i narrow = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0x08);
    _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(narrow));
#elif defined(__SSE2__)
    __m128i words = _mm_load_si128((__m128i*)bytes);
    __m128i pairs =
        _mm_and_si128(_mm_or_si128(words, _mm_srli_epi16(words, 4)), _mm_set1_epi16(0xFF));
    _mm_storel_epi64((__m128i*)to, _mm_packus_epi16(pairs, pairs));
#else
    for (int i = 0; i < GROUP; i += 2) to[i / 2] = (u8)(bytes[i] | bytes[i + 1] << 4);
#endif
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
