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
    RandomDraws random;
    RandomBits random_bits;

    // The bits of eight elements of the whole weight are drawn together.
    ZEROCAST_FN bool starts_group(i64 element) const {
        return random_bits.in_whole(element) % 8 == 0;
    }
    ZEROCAST_FN bool spans_rows() const { return !random_bits.skip; }

    ZEROCAST_FN void group(i64 element, const Native::Float (&x)[4],
                           Native::Int (&codes)[4]) const {
        typedef typename IndicesTo<Native::WIDTH / 2>::Type Eights;
        alignas(64) Native::Wide draws[2], in_order[2];
        random.of_eight<Native>(counting(Eights{}) + (u64)random_bits.in_whole(element) / 8, draws);
        in_order[0] = alternating<0>(draws[0], draws[1], Eights{});
        in_order[1] = alternating<1>(draws[0], draws[1], Eights{});
        auto halves = (const unsigned short*)in_order;
        for (int i = 0; i < 4; i++) {
            auto draw = load_halves<Native>(halves + i * Native::WIDTH);
            codes[i] = encode_e2m1_stochastic<Native>(x[i], draw);
        }
    }
    ZEROCAST_FN i32 single(i64 element, float x) const {
        i64 index = random_bits.in_whole(element);
        u64 draws[2];
        random.of_eight<Scalar>((u64)index / 8, draws);
        return encode_e2m1_stochastic<Scalar>(x, (i32)draw_of(draws[index / 4 % 2], index % 4));
    }

  private:
    template <int... I>
    static ZEROCAST_FN Native::Wide counting(Indices<I...>) {
        return Native::Wide{(u64)I...};
    }
    // The elements of a and b, interleaved: the first half of them, or (HALF 1) the second.
    template <int HALF, int... I>
    static ZEROCAST_FN Native::Wide alternating(Native::Wide a, Native::Wide b, Indices<I...>) {
        constexpr int N = sizeof...(I);
        return __builtin_shufflevector(a, b, (I / 2 + HALF * N / 2 + I % 2 * N)...);
    }
};

// --- codes to memory: those of a group together, because narrowing one register at a time would
// take more instructions than encoding ---

typedef Native::Bytes4 Packed;  // GROUP bytes

// GROUP codes below 256, of 32 bits each.
ZEROCAST_FN Packed pack(const Native::Int (&codes)[4]) {
#if defined(__AVX512BW__)
    // Packing works within each 128-bit lane: dword (lane, register) of the result belongs at
    // (register, lane).
    __m512i bytes = _mm512_packus_epi16(_mm512_packus_epi32((__m512i)codes[0], (__m512i)codes[1]),
                                        _mm512_packus_epi32((__m512i)codes[2], (__m512i)codes[3]));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return (Packed)_mm512_permutexvar_epi32(order, bytes);
#elif defined(__AVX2__)
    __m256i bytes = _mm256_packus_epi16(_mm256_packus_epi32((__m256i)codes[0], (__m256i)codes[1]),
                                        _mm256_packus_epi32((__m256i)codes[2], (__m256i)codes[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return (Packed)_mm256_permutevar8x32_epi32(bytes, order);
#elif defined(__SSE2__)
    return (Packed)_mm_packus_epi16(_mm_packs_epi32((__m128i)codes[0], (__m128i)codes[1]),
                                    _mm_packs_epi32((__m128i)codes[2], (__m128i)codes[3]));
#else
    Packed bytes;
    for (int i = 0; i < GROUP; i++) bytes[i] = (u8)codes[i / Native::WIDTH][i % Native::WIDTH];
    return bytes;
#endif
}

// GROUP numbers of 16 bits, as Waiting keeps elements, as bytes that saturate: 0 to 255.
// in_order() brings them into the order of the elements.
ZEROCAST_FN Packed saturated(Native::Shorts a, Native::Shorts b) {
#if defined(__AVX512BW__)
    return (Packed)_mm512_packus_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (Packed)_mm256_packus_epi16((__m256i)a, (__m256i)b);
#else
    Packed bytes;
    for (int i = 0; i < GROUP; i++) {
        short x = i < GROUP / 2 ? a[i] : b[i - GROUP / 2];
        bytes[i] = (u8)(x < 0 ? 0 : x > 255 ? 255 : x);
    }
    return bytes;
#endif
}
#if defined(__AVX512BW__)
// In each 128-bit lane there are four elements of each of four registers of 32 bits, of two
// interleaved; by_fours() separates these, and then codes are ordered as in pack().
ZEROCAST_FN __m512i by_fours(Packed bytes) {
    const __m128i fours = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    return _mm512_shuffle_epi8((__m512i)bytes, _mm512_broadcast_i32x4(fours));
}
#endif
ZEROCAST_FN Packed in_order(Packed bytes) {
#if defined(__AVX512BW__)
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return (Packed)_mm512_permutexvar_epi32(order, by_fours(bytes));
#elif defined(__AVX2__)
    // As with AVX-512, of half as many.
    const __m128i fours = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    __m256i grouped = _mm256_shuffle_epi8((__m256i)bytes, _mm256_broadcastsi128_si256(fours));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return (Packed)_mm256_permutevar8x32_epi32(grouped, order);
#else
    constexpr int W = Native::WIDTH;
    Packed ordered;
    for (int i = 0; i < GROUP; i++) {
        int half = i / (2 * W), in_half = i % (2 * W);
        ordered[i] = bytes[half * 2 * W + in_half % W * 2 + in_half / W];
    }
    return ordered;
#endif
}

// The nibbles of GROUP codes.
typedef u8 Nibbles __attribute__((vector_size(GROUP / 2)));

// GROUP codes below 16 to GROUP / 2 bytes, the even element in the low nibble.
ZEROCAST_FN void store_nibbles(u8* to, Packed bytes) {
#if defined(__AVX512BW__)
    __m512i pairs =
        _mm512_maddubs_epi16((__m512i)bytes, _mm512_set1_epi16(0x1001));  // even + 16 * odd
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi16_epi8(pairs));
#elif defined(__AVX2__)
    __m256i pairs = _mm256_maddubs_epi16((__m256i)bytes, _mm256_set1_epi16(0x1001));
    __m256i narrow = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0x08);
    _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(narrow));
#elif defined(__SSE2__)
    __m128i words = (__m128i)bytes;
    __m128i pairs =
        _mm_and_si128(_mm_or_si128(words, _mm_srli_epi16(words, 4)), _mm_set1_epi16(0xFF));
    _mm_storel_epi64((__m128i*)to, _mm_packus_epi16(pairs, pairs));
#else
    typedef unsigned short Pairs __attribute__((vector_size(GROUP)));
    auto pairs = (Pairs)bytes;
    Native::store(to, __builtin_convertvector(pairs | pairs >> 4, Nibbles));
#endif
}

struct NibblesOfTwo {
    Nibbles a, b;
};

// Those of two groups at once, whose codes are in the order of saturated().
ZEROCAST_FN NibblesOfTwo nibbles_in_order(Packed a, Packed b) {
#if defined(__AVX512BW__)
    // As in_order(), but two codes are a byte before registers change places.
    auto pairs = [](Packed codes) {  // even + 16 * odd
        return _mm512_maddubs_epi16(by_fours(codes), _mm512_set1_epi16(0x1001));
    };
    const Native::Shorts order = {0, 8,  16, 24, 1, 9,  17, 25, 2, 10, 18, 26, 3, 11, 19, 27,
                                  4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31};
    __m512i both =
        _mm512_permutexvar_epi16((__m512i)order, _mm512_packus_epi16(pairs(a), pairs(b)));
    return {(Nibbles)_mm512_castsi512_si256(both), (Nibbles)_mm512_extracti64x4_epi64(both, 1)};
#else
    NibblesOfTwo made;
    store_nibbles((u8*)&made.a, in_order(a));
    store_nibbles((u8*)&made.b, in_order(b));
    return made;
#endif
}

// Of two registers of bytes: the larger ones, the smaller ones, and a less b or 0.
ZEROCAST_FN Packed larger(Packed a, Packed b) {
#if defined(__AVX512BW__)
    return (Packed)_mm512_max_epu8((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (Packed)_mm256_max_epu8((__m256i)a, (__m256i)b);
#else
    return a > b ? a : b;
#endif
}
ZEROCAST_FN Packed smaller(Packed a, Packed b) {
#if defined(__AVX512BW__)
    return (Packed)_mm512_min_epu8((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (Packed)_mm256_min_epu8((__m256i)a, (__m256i)b);
#else
    return a < b ? a : b;
#endif
}
ZEROCAST_FN Packed less(Packed a, Packed b) {
#if defined(__AVX512BW__)
    return (Packed)_mm512_subs_epu8((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (Packed)_mm256_subs_epu8((__m256i)a, (__m256i)b);
#else
    return a > b ? a - b : Packed{};
#endif
}

// Whether any byte is below this one.
ZEROCAST_FN bool any_below(Packed bytes, u8 bound) {
#if defined(__AVX512BW__)
    return _mm512_cmplt_epu8_mask((__m512i)bytes, _mm512_set1_epi8((char)bound));
#elif defined(__AVX2__)
    __m256i above = _mm256_max_epu8((__m256i)bytes, _mm256_set1_epi8((char)bound));
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(above, (__m256i)bytes)) != -1;
#else
    bool any = false;
    for (int i = 0; i < GROUP; i++) any |= bytes[i] < bound;
    return any;
#endif
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
