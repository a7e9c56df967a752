// The lane type of a CPU loop: a SIMD register, by the vector extension that GCC and Clang share.
//
// Only what the extension cannot say well is spelled with an instruction of one machine: narrowing 32-bit codes to
// stored bytes and nibbles. Its law is the generic form beside it.
#pragma once

#include <zerocast/lanes.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace zerocast {
inline namespace ZEROCAST_ISA {

template <int W>
struct Simd {
    static constexpr int WIDTH = W;
    typedef float Float __attribute__((vector_size(4 * W)));
    typedef i32 Int __attribute__((vector_size(4 * W)));
    typedef u32 Unsigned __attribute__((vector_size(4 * W)));
    typedef u64 Pairs __attribute__((vector_size(4 * W)));  // two elements each
    typedef u8 Bytes __attribute__((vector_size(W)));

    static ZEROCAST_FN Int bits(Float x) { return (Int)x; }
    static ZEROCAST_FN Float value(Int i) { return (Float)i; }
    static ZEROCAST_FN Float splat(float c) { return c - Float{}; }
    static ZEROCAST_FN Int splat(i32 c) { return c - Int{}; }
    template <class T>
    static ZEROCAST_FN T select(Int mask, T a, T b) {
        return mask ? a : b;
    }
    static ZEROCAST_FN Float divide(Float a, Float b) { return a / b; }

    template <class T>
    static ZEROCAST_FN T load_as(const void* from) {
        T x;
        __builtin_memcpy(&x, from, sizeof x);
        return x;
    }
    static ZEROCAST_FN Float load(const float* from) { return load_as<Float>(from); }
    static ZEROCAST_FN void store(void* to, Float x) { __builtin_memcpy(to, &x, sizeof x); }
    static ZEROCAST_FN void store(void* to, Int x) { __builtin_memcpy(to, &x, sizeof x); }
};

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
typedef Simd<16> Native;
#elif defined(__AVX2__)
typedef Simd<8> Native;
#else
typedef Simd<4> Native;
#endif

// Store one code of 8 bits an element: WIDTH bytes.
template <class L>
ZEROCAST_FN void store_bytes(u8* to, typename L::Int codes) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (L::WIDTH == 8) {
        __m128i words = _mm_packus_epi32(_mm256_castsi256_si128((__m256i)codes),
                                         _mm256_extracti128_si256((__m256i)codes, 1));
        _mm_storel_epi64((__m128i*)to, _mm_packus_epi16(words, words));
        return;
    }
#endif
    auto bytes = __builtin_convertvector(codes, typename L::Bytes);
    __builtin_memcpy(to, &bytes, sizeof bytes);
}

// Store one code of 4 bits an element, the even element in the low nibble: WIDTH / 2 bytes.
template <class L>
ZEROCAST_FN void store_nibbles(u8* to, typename L::Int codes) {
    // In each 64-bit pair the odd code comes down beside the even one; the low byte is what is stored.
    typedef typename L::Pairs Pairs;
    Pairs pairs = (Pairs)codes | (Pairs)codes >> 28;
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (L::WIDTH == 8) {
        __m128i low = _mm256_castsi256_si128((__m256i)pairs), high = _mm256_extracti128_si256((__m256i)pairs, 1);
        __m128i both = _mm_castps_si128(
            _mm_shuffle_ps(_mm_castsi128_ps(low), _mm_castsi128_ps(high), _MM_SHUFFLE(2, 0, 2, 0)));
        i32 bytes = _mm_cvtsi128_si32(_mm_shuffle_epi8(both, _mm_set1_epi32(0x0C080400)));
        __builtin_memcpy(to, &bytes, sizeof bytes);
        return;
    }
#endif
    if constexpr (L::WIDTH == 16) {
        typedef u8 Bytes __attribute__((vector_size(8)));
        Bytes bytes = __builtin_convertvector(pairs, Bytes);
        __builtin_memcpy(to, &bytes, sizeof bytes);
        return;
    }
    for (int i = 0; i < L::WIDTH / 2; i++) to[i] = (u8)pairs[i];
}

// Read one byte an element: WIDTH bytes.
template <class L>
ZEROCAST_FN typename L::Int load_bytes(const u8* from) {
    typename L::Bytes bytes;
    __builtin_memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, typename L::Int);
}

// The largest element.
template <class L>
ZEROCAST_FN i32 reduce_max(typename L::Int x) {
    i32 largest = x[0];
    for (int i = 1; i < L::WIDTH; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
