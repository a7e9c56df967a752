// Codes in registers to codes in memory: one code of 32 bits an element becomes a byte or a nibble.
//
// Four registers are packed together, because narrowing one at a time would take more instructions
// than encoding.
#pragma once

#include "cpu/simd.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// GROUP codes below 256 to GROUP bytes.
ZEROCAST_FN void store_bytes(u8* to, const Native::Int (&codes)[4]) {
#if defined(__AVX512BW__)
    // Packing works within each 128-bit lane: dword (lane, register) of the result belongs at
    // (register, lane).
    auto c = (const __m512i*)codes;
    __m512i bytes =
        _mm512_packus_epi16(_mm512_packus_epi32(c[0], c[1]), _mm512_packus_epi32(c[2], c[3]));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, bytes));
#elif defined(__AVX2__)
    auto c = (const __m256i*)codes;
    __m256i bytes =
        _mm256_packus_epi16(_mm256_packus_epi32(c[0], c[1]), _mm256_packus_epi32(c[2], c[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32(bytes, order));
#elif defined(__SSE2__)
    auto c = (const __m128i*)codes;
    __m128i bytes = _mm_packus_epi16(_mm_packs_epi32(c[0], c[1]), _mm_packs_epi32(c[2], c[3]));
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
