// The lane type of a CPU loop: a SIMD register, by the vector extension that GCC and Clang share.
//
// Only what the compiler does not find by itself is spelled with an instruction of one machine; the
// generic form beside it says what it does.
#pragma once

#include "arithmetic/formats.h"

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace zerocast {
inline namespace ZEROCAST_ISA {

template <int... I>
struct Indices {};

// Indices<0, 1, ..., N - 1>. (The standard library's would bring its headers along, once an
// instruction set.)
template <int N, int... I>
struct IndicesTo : IndicesTo<N - 1, N - 1, I...> {};
template <int... I>
struct IndicesTo<0, I...> {
    typedef Indices<I...> Type;
};

template <int W>
struct Simd {
    static constexpr int WIDTH = W;
    typedef float Float __attribute__((vector_size(4 * W)));
    typedef i32 Int __attribute__((vector_size(4 * W)));
    typedef u32 Unsigned __attribute__((vector_size(4 * W)));
    typedef u8 Bytes __attribute__((vector_size(W)));  // one an element
    typedef u8 HalfBytes __attribute__((vector_size(W / 2)));
    typedef unsigned short Halves __attribute__((vector_size(2 * W)));  // 16 bits an element
    typedef short Shorts __attribute__((vector_size(4 * W)));  // a whole register of 16 bits each
    typedef u64 Wide __attribute__((vector_size(4 * W)));      // half as many, 64 bits each
    typedef i64 Signed __attribute__((vector_size(4 * W)));
    typedef u8 Bytes4 __attribute__((vector_size(4 * W)));  // a whole register of them

    static ZEROCAST_FN Int bits(Float x) { return (Int)x; }
    static ZEROCAST_FN Float value(Int i) { return (Float)i; }
    static ZEROCAST_FN Float splat(float c) { return c - Float{}; }
    static ZEROCAST_FN Int splat(i32 c) { return c - Int{}; }
    template <class T>
    static ZEROCAST_FN T select(Int mask, T a, T b) {
        return mask ? a : b;
    }
    static ZEROCAST_FN Int min(Int a, Int b) {
#if defined(__AVX512F__)
        return (Int)_mm512_min_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
        return (Int)_mm256_min_epi32((__m256i)a, (__m256i)b);
#else
        return a < b ? a : b;
#endif
    }
    static ZEROCAST_FN Int max(Int a, Int b) {
#if defined(__AVX512F__)
        return (Int)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
        return (Int)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
        return a > b ? a : b;
#endif
    }
    template <class T>  // Shorts
    static ZEROCAST_FN T max(T a, T b) {
#if defined(__AVX512BW__)
        return (T)_mm512_max_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
        return (T)_mm256_max_epi16((__m256i)a, (__m256i)b);
#else
        return a > b ? a : b;
#endif
    }
    static ZEROCAST_FN Int merge(i32 mask, Int a, Int b) {
#if defined(__AVX512F__)
        return (Int)_mm512_ternarylogic_epi32((__m512i)splat(mask), (__m512i)a, (__m512i)b, 0xCA);
#else
        return (a & mask) | (b & ~mask);
#endif
    }
    static ZEROCAST_FN Float divide(Float a, Float b) { return a / b; }
    template <class T>  // Float
    static ZEROCAST_FN T sqrt(T a) {
#if defined(__AVX512F__)
        return (T)_mm512_sqrt_ps((__m512)a);
#elif defined(__AVX2__)
        return (T)_mm256_sqrt_ps((__m256)a);
#elif defined(__ARM_NEON)
        return (T)vsqrtq_f32((float32x4_t)a);
#else
        for (int i = 0; i < W; i++) a[i] = __builtin_sqrtf(a[i]);
        return a;
#endif
    }
    template <class T>  // Float
    static ZEROCAST_FN T fma(T a, T b, T c) {
#if defined(__AVX512F__)
        return (T)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
        return (T)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
        return (T)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
        for (int i = 0; i < W; i++) a[i] = __builtin_fmaf(a[i], b[i], c[i]);
        return a;
#endif
    }
    template <class T>  // Int: GCC forgets that it is a vector while Simd is not instantiated
    static ZEROCAST_FN Float to_float(T i) {
        return __builtin_convertvector(i, Float);
    }
    // The low halves of a and b, multiplied.
    static ZEROCAST_FN Wide multiply_low(Wide a, Wide b) {
#if defined(__AVX512F__)
        return (Wide)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
        return (Wide)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
        return (Wide)_mm_mul_epu32((__m128i)a, (__m128i)b);
#elif defined(__ARM_NEON)
        return (Wide)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
#else
        return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu);
#endif
    }
    static ZEROCAST_FN Wide multiply_low(Wide a, u32 c) { return multiply_low(a, Wide{} + c); }
    // As multiply_low(), of signed numbers.
    static ZEROCAST_FN Wide multiply_low_signed(Wide a, Wide b) {
#if defined(__AVX512F__)
        return (Wide)_mm512_mul_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
        return (Wide)_mm256_mul_epi32((__m256i)a, (__m256i)b);
#elif defined(__ARM_NEON)
        return (Wide)vmull_s32(vmovn_s64((int64x2_t)a), vmovn_s64((int64x2_t)b));
#else
        auto low = [](Wide x) { return (Wide)((Signed)(x << 32) >> 32); };
        return low(a) * low(b);
#endif
    }
    // The sum and the products of the signed halves of 32 bits, of a and b.
    static ZEROCAST_FN Int add_products(Int sum, Int a, Int b) {
#if defined(__AVX512VNNI__)
        return (Int)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
        return sum + (Int)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
        return sum + (Int)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
        auto low = [](Int x) { return (Int)((Unsigned)x << 16) >> 16; };
        return sum + low(a) * low(b) + (a >> 16) * (b >> 16);
#endif
    }

    template <class T>
    static ZEROCAST_FN T load_as(const void* from) {
        T x;
        __builtin_memcpy(&x, from, sizeof x);
        return x;
    }
    static ZEROCAST_FN Float load(const float* from) { return load_as<Float>(from); }
    template <class T>
    static ZEROCAST_FN void store(void* to, T x) {
        __builtin_memcpy(to, &x, sizeof x);
    }
};

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) \
    && defined(__AVX512DQ__) && defined(__AVX512VNNI__)
typedef Simd<16> Native;
#elif defined(__AVX2__)
typedef Simd<8> Native;
#else
typedef Simd<4> Native;
#endif

// Whether Native::fma() is an instruction.
#if defined(__FMA__) || defined(__ARM_NEON)
constexpr bool HAS_FMA = true;
#else
constexpr bool HAS_FMA = false;
#endif

// Elements that a loop takes at a time: those whose codes are packed together.
constexpr int GROUP = 4 * Native::WIDTH;

// How far ahead a pass over memory prefetches what it reads next: the processor's hardware
// prefetcher does not reach far enough for the memory's latency.
//
// The distance counts elements: 8 KiB. Measured on a Zen 5 with one thread, on rows of 16x16 blocks
// one at a time: 1024 was as fast, 4096 3 % slower, 512 and 8192 a tenth, none at all 15 % and 256
// more than that. One long run is as fast with any of them, and without.
constexpr int PREFETCH_AHEAD = 2048;

// Into which caches a line is prefetched: all, or the nearest alone, where the second-level cache
// has no room for what is read once.
enum Prefetched { FIRST_LEVEL = 0, ALL_LEVELS = 3 };

// Prefetches GROUP elements, `ahead` of x.
template <Prefetched INTO = ALL_LEVELS, class T>
ZEROCAST_FN void prefetch(const T* x, i64 ahead = PREFETCH_AHEAD) {
    constexpr int LINE = 64 / sizeof(T);
    for (int i = 0; i < GROUP; i += LINE) __builtin_prefetch(x + ahead + i, 0, INTO);
}

// Whether any of GROUP elements is a NaN.
ZEROCAST_FN bool any_nan(const Native::Float (&x)[4]) {
#if defined(__AVX512F__)
    // One comparison looks at two registers.
    return _mm512_cmp_ps_mask((__m512)x[0], (__m512)x[1], _CMP_UNORD_Q)
           | _mm512_cmp_ps_mask((__m512)x[2], (__m512)x[3], _CMP_UNORD_Q);
#elif defined(__AVX__)
    return _mm256_movemask_ps(
        _mm256_or_ps(_mm256_cmp_ps((__m256)x[0], (__m256)x[1], _CMP_UNORD_Q),
                     _mm256_cmp_ps((__m256)x[2], (__m256)x[3], _CMP_UNORD_Q)));
#elif defined(__SSE2__)
    return _mm_movemask_ps(_mm_or_ps(_mm_cmpunord_ps((__m128)x[0], (__m128)x[1]),
                                     _mm_cmpunord_ps((__m128)x[2], (__m128)x[3])));
#else
    Native::Int nan = (x[0] != x[0]) | (x[1] != x[1]) | (x[2] != x[2]) | (x[3] != x[3]);
    auto wide = (Native::Wide)nan;  // fewer words leave the register
    u64 any = 0;
    for (int i = 0; i < Native::WIDTH / 2; i++) any |= wide[i];
    return any;
#endif
}

// 64 bytes to an address that is a multiple of 64, past the caches. stream_fence() makes them
// visible to other threads.
ZEROCAST_FN void stream_line(u8* to, const u8* line) {
#if defined(__AVX512F__)
    _mm512_stream_si512((__m512i*)to, _mm512_load_si512(line));
#elif defined(__SSE2__)
    for (int i = 0; i < 64; i += 16)
        _mm_stream_si128((__m128i*)(to + i), _mm_load_si128((const __m128i*)(line + i)));
#else
    __builtin_memcpy(to, line, 64);
#endif
}

// BYTES bytes from a register's place to an address that is a multiple of BYTES, past the caches.
template <int BYTES>
ZEROCAST_FN void stream(u8* to, const u8* from) {
#if defined(__AVX512F__)
    if constexpr (BYTES == 64) return _mm512_stream_si512((__m512i*)to, _mm512_load_si512(from));
#endif
#if defined(__AVX__)
    if constexpr (BYTES == 32)
        return _mm256_stream_si256((__m256i*)to, _mm256_load_si256((const __m256i*)from));
#endif
#if defined(__SSE2__)
    if constexpr (BYTES == 16)
        return _mm_stream_si128((__m128i*)to, _mm_load_si128((const __m128i*)from));
#endif
    __builtin_memcpy(to, from, BYTES);
}

ZEROCAST_FN void stream_fence() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

// Read one byte an element: WIDTH bytes.
template <class L>
ZEROCAST_FN typename L::Int load_bytes(const u8* from) {
#if defined(__ARM_NEON)  // where four bytes are no vector
    u32 bytes;
    __builtin_memcpy(&bytes, from, sizeof bytes);
    typename L::Unsigned each = typename L::Unsigned{} + bytes;
    return (typename L::Int)(each >> typename L::Unsigned{0, 8, 16, 24} & 0xFF);
#else
    typename L::Bytes bytes;
    __builtin_memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, typename L::Int);
#endif
}

// Read 16 bits an element.
template <class L>
ZEROCAST_FN typename L::Int load_halves(const void* from) {
    return __builtin_convertvector(L::template load_as<typename L::Halves>(from), typename L::Int);
}

// Read a register of a master's elements.
ZEROCAST_FN Native::Float load(const float* from) { return Native::load(from); }
ZEROCAST_FN Native::Float load(const Bf16* from) {
    return from_bf16<Native>(load_halves<Native>(from));
}
ZEROCAST_FN Native::Float load(const Fp16* from) {
    return from_fp16<Native>(load_halves<Native>(from));
}

// Register i of a group of a master's elements.
template <class T>
ZEROCAST_FN Native::Float load_of(const T* group, int i) {
    return load(group + i * Native::WIDTH);
}

// A group of BF16 elements that wait in a cache: those of two registers share 32 bits, the first
// one's the low half, so that none moves to another place of its register.
struct Waiting {
    unsigned short bits;
};
ZEROCAST_FN Native::Float load_of(const Waiting* group, int i) {
    auto two = Native::load_as<Native::Unsigned>(group + i / 2 * 2 * Native::WIDTH);
    return Native::value((Native::Int)(i % 2 ? two & 0xFFFF0000u : two << 16));
}
// Two registers of numbers as they wait, rounded.
ZEROCAST_FN Native::Int rounded_waiting(Native::Float a, Native::Float b) {
    typedef Rounding<Bf16, Native> Rounds;
    return Native::merge(0xFFFF, (Native::Int)(Rounds::carried(a) >> 16),
                         (Native::Int)Rounds::carried(b));
}

// Read one nibble an element, the even element from the low one: WIDTH / 2 bytes.
template <class L>
ZEROCAST_FN typename L::Int load_nibbles(const u8* from) {
#if defined(__ARM_NEON)
    unsigned short bytes;
    __builtin_memcpy(&bytes, from, sizeof bytes);
    typename L::Unsigned each = typename L::Unsigned{} + bytes;
    return (typename L::Int)(each >> typename L::Unsigned{0, 4, 8, 12} & 0xF);
#else
    typename L::HalfBytes bytes;
    __builtin_memcpy(&bytes, from, sizeof bytes);
    // A byte in 64 bits, two elements: its high nibble goes up to the odd one.
    auto pairs = __builtin_convertvector(bytes, typename L::Wide);
    return (typename L::Int)(pairs | pairs << 28) & 0xF;
#endif
}

// Read the first n elements of a vector, or all where it has fewer; zeros for the others. A
// cut vector goes through a buffer; a whole one stays in a register.
template <class Vector, class T>
ZEROCAST_FN Vector load_some(const T* from, i64 n) {
    i64 size = n * sizeof(T);
    if (size >= (i64)sizeof(Vector)) return Native::load_as<Vector>(from);
    Vector cut{};
    __builtin_memcpy(&cut, from, size);
    return cut;
}

// Write them.
template <class Vector, class T>
ZEROCAST_FN void store_some(T* to, Vector x, i64 n) {
    i64 size = n * sizeof(T);
    if (size >= (i64)sizeof x) return Native::store(to, x);
    Vector cut = x;
    __builtin_memcpy(to, &cut, size);
}

// Pieces of N elements of two registers. In each 128 bits of both, the first half of the pieces
// interleaved (HALF 0) or the second half.
template <class L, int N, int HALF, class T, int... I>
ZEROCAST_FN T interleaved(T a, T b, Indices<I...>) {
    constexpr int W = L::WIDTH;
    return __builtin_shufflevector(
        a, b, (I / 4 * 4 + HALF * 2 + I % 4 / (2 * N) * N + I % N + I / N % 2 * W)...);
}
// Of two registers end to end every second 128 bits: the even ones (FIRST 0) or the odd ones.
template <class L, int FIRST, class T, int... I>
ZEROCAST_FN T every_second_quad(T a, T b, Indices<I...>) {
    return __builtin_shufflevector(a, b, (I / 4 * 8 + FIRST * 4 + I % 4)...);
}

// Transposes a square: element c of register r goes to element r of register c. First the squares
// of four by four, each in 128 bits of four registers, then these among one another: most moves
// stay inside of 128 bits, which some processors do twice as fast.
template <class L, class T>
ZEROCAST_FN void transpose_lanes(T* x) {
    typedef typename IndicesTo<L::WIDTH>::Type All;
    constexpr int W = L::WIDTH, SQUARES = W / 4;
    for (int r = 0; r < W; r += 4) {
        T low = interleaved<L, 1, 0>(x[r], x[r + 1], All{});
        T high = interleaved<L, 1, 1>(x[r], x[r + 1], All{});
        T low_next = interleaved<L, 1, 0>(x[r + 2], x[r + 3], All{});
        T high_next = interleaved<L, 1, 1>(x[r + 2], x[r + 3], All{});
        x[r] = interleaved<L, 2, 0>(low, low_next, All{});
        x[r + 1] = interleaved<L, 2, 1>(low, low_next, All{});
        x[r + 2] = interleaved<L, 2, 0>(high, high_next, All{});
        x[r + 3] = interleaved<L, 2, 1>(high, high_next, All{});
    }
    // A round moves one bit of a register's number among the squares into the place of the square.
    T y[W];
    for (int round = 1; round < SQUARES; round *= 2) {
        for (int i = 0; i < W; i++) {
            int square = i / 4, pair = square % (SQUARES / 2) * 2;
            T a = x[pair * 4 + i % 4], b = x[(pair + 1) * 4 + i % 4];
            y[i] = square < SQUARES / 2 ? every_second_quad<L, 0>(a, b, All{})
                                        : every_second_quad<L, 1>(a, b, All{});
        }
        for (int i = 0; i < W; i++) x[i] = y[i];
    }
}

// What `max` makes of all elements of each of WIDTH registers: inside of 128 bits first, as
// transpose_lanes().
template <class L, class Max>
ZEROCAST_FN typename L::Int reduce_each(typename L::Int* x, const Max& max) {
    typedef typename IndicesTo<L::WIDTH>::Type All;
    int n = L::WIDTH / 2;
    for (int i = 0; i < n; i++)
        x[i] = max(interleaved<L, 1, 0>(x[2 * i], x[2 * i + 1], All{}),
                   interleaved<L, 1, 1>(x[2 * i], x[2 * i + 1], All{}));
    n /= 2;
    for (int i = 0; i < n; i++)
        x[i] = max(interleaved<L, 2, 0>(x[2 * i], x[2 * i + 1], All{}),
                   interleaved<L, 2, 1>(x[2 * i], x[2 * i + 1], All{}));
    while ((n /= 2) > 0) {
        for (int i = 0; i < n; i++)
            x[i] = max(every_second_quad<L, 0>(x[2 * i], x[2 * i + 1], All{}),
                       every_second_quad<L, 1>(x[2 * i], x[2 * i + 1], All{}));
    }
    return x[0];
}

// The largest element of each of WIDTH registers.
template <class L>
ZEROCAST_FN typename L::Int reduce_max_each(const typename L::Int* from) {
    typename L::Int x[L::WIDTH];  // stays in registers
    for (int i = 0; i < L::WIDTH; i++) x[i] = from[i];
    return reduce_each<L>(x, [](typename L::Int a, typename L::Int b) { return L::max(a, b); });
}

// The largest element.
template <class L>
ZEROCAST_FN i32 reduce_max(typename L::Int x) {
    i32 largest = x[0];
    for (int i = 1; i < L::WIDTH; i++) largest = Scalar::max(largest, x[i]);
    return largest;
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
