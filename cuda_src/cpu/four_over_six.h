// The errors of 4-over-6 under both scales, and the codes, of many elements at a time.
//
// The errors of a row inside a block are summed from left to right, then the rows in a fixed order,
// so every rank gets the same sum. A register holds the same column of as many rows when
// they are summed: no sum goes across it. They are the rows of one whole 16x16 block, which have
// one scale and one table, or else one row of as many blocks side by side.
//
// Under one scale the codes of a block mean 8 magnitudes. They are made once a block; an element's
// is looked up, by its code, in a register of them. Blocks of one row have too few elements for
// that: a lane takes one block, and works out what each of its codes means.
#pragma once

#include <string.h>

#include "arithmetic/masters.h"
#include "arithmetic/scaling.h"
#include "cpu/simd.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {
namespace four_over_six {

typedef Native::Int Int;
typedef Native::Unsigned Unsigned;
typedef Native::Float Float;
constexpr int W = Native::WIDTH;

// The largest blocks there are: 16 rows of 16 elements.
constexpr i64 ROWS = 16, COLS = 16;

// Blocks side by side whose errors and tables are kept together: 25 KiB.
constexpr i64 ACROSS = 128;

// y times a power of two, plus c: rounded once, since the product is exact or vanishes beside c.
ZEROCAST_FN Float times_plus(Float y, float power, float c) {
    if constexpr (HAS_FMA) return Native::fma(y, Native::splat(power), Native::splat(c));
    return y * Native::splat(power) + Native::splat(c);
}

// The errors of the rows inside blocks side by side, 0 of rows that there are not.
struct RowErrors {
    alignas(64) float map4[ROWS][ACROSS], map6[ROWS][ACROSS];

    // Of the first `rows` rows; the others are 0 from the start.
    void clear(i64 rows) {
        memset(map4, 0, rows * sizeof *map4);
        memset(map6, 0, rows * sizeof *map6);
    }

    // Whether the sum of map4 is the smaller one, of blocks [first, n).
    void choose(i64 first, i64 n, u8* choices) const {
        for (i64 b = first; b < n; b += W) {
            Int chosen = sum(map4, b) < sum(map6, b) ? Native::splat(1) : Native::splat(0);
            store_some(choices + b, __builtin_convertvector(chosen, Native::Bytes), n - b);
        }
    }

  private:
    static ZEROCAST_FN Float sum(const float (&rows)[ROWS][ACROSS], i64 block) {
        Float sums[ROWS];
        for (int r = 0; r < ROWS; r++) sums[r] = Native::load(&rows[r][block]);
        for (int half = ROWS / 2; half > 0; half /= 2) {
            for (int r = 0; r < half; r++) sums[r] += sums[r + half];
        }
        return sums[0];
    }
};

// How many magnitudes E2M1 has, and how many codes a word of 32 bits.
constexpr int CODES = 8, WORD = 8;

// Where places in a table are counted from: floats are 1 apart there, and so are their bits.
constexpr float FIRST_PLACE = 1.5f * (1 << MANTISSA_BITS);
constexpr u32 FIRST_PLACE_BITS = 0x4B400000;

// The sum of WORD places, each four bits higher than the one before, if all codes are 0.
template <int MAP>
constexpr u32 places_of_zeros() {
    u32 sum = 0;
    for (int i = 0; i < WORD; i++) sum += (FIRST_PLACE_BITS + MAP * CODES) << (4 * i);
    return sum;
}

// Below these bounds, under map4 and map6, place_of() need not distinguish all codes of a block's
// elements: no scale that is not subnormal is so far from amax / 4 or amax / 6.
constexpr float IN_RANGE[] = {4.5f, 7.0f};

// Whether all elements of blocks with these amaxes are IN_RANGE.
ZEROCAST_FN bool all_in_range(const CandidateScales<Native>& scales, Int amax) {
    Float largest4 = Native::value(amax) * scales.multiplier4;
    Float largest6 = Native::value(amax) * scales.multiplier6;
    Int beyond = ~((Int)(largest4 < Native::splat(IN_RANGE[0]))
                   & (Int)(largest6 < Native::splat(IN_RANGE[1])));
    return reduce_max<Native>(beyond & 1) == 0;
}

// What codes mean and elements are multiplied by, of blocks side by side: under map4, then map6.
struct BlockTables {
    alignas(64) float values[ACROSS][2 * CODES];
    alignas(64) float multipliers[2][ACROSS];
    bool in_range[ACROSS / W];  // of WIDTH blocks: whether all elements are IN_RANGE

    // Of WIDTH blocks from number b on, with these amaxes.
    ZEROCAST_FN void make(const FourOverSixNumerics& numerics, Int amax, i64 b) {
        auto scales = numerics.template candidates<Native>(amax);
        Native::store(&multipliers[0][b], scales.multiplier4);
        Native::store(&multipliers[1][b], scales.multiplier6);
        in_range[b / W] = all_in_range(scales, amax);
        Float by_code[2 * CODES];
        for (int code = 0; code < CODES; code++) {
            Int codes = Native::splat(code);
            by_code[code] = numerics.template dequantized<Native>(codes, scales.map4);
            by_code[CODES + code] = numerics.template dequantized<Native>(codes, scales.map6);
        }
        for (int code = 0; code < 2 * CODES; code += W) {
            transpose_lanes<Native>(by_code + code);
            for (int i = 0; i < W; i++) Native::store(&values[b + i][code], by_code[code + i]);
        }
    }
};

// The codes of magnitudes y, multiplied under map4 (MAP 0) or map6 (MAP 1): their places in a
// block's table, counted from FIRST_PLACE.
//
// Codes are 0.5 apart up to 2, 1 apart up to 4 and then 2. Where floats are 1 apart, adding rounds
// to whole steps, to even; the smallest of the three sums counts the steps that there are. All y
// that are below IN_RANGE are at most the code 7, and under map4 below the last steps. The sums are
// positive, so they order like their bits, which most processors compare faster.
template <int MAP, bool ALL_IN_RANGE>
ZEROCAST_FN Int place_of(Float y) {
    constexpr float BASE = FIRST_PLACE + MAP * CODES;
    auto below = [](Int a, Float b) { return Native::min(a, Native::bits(b)); };
    Int place = below(Native::bits(times_plus(y, 2.0f, BASE)), y + Native::splat(BASE + 2));
    if (!ALL_IN_RANGE || MAP == 1) place = below(place, times_plus(y, 0.5f, BASE + 4));
    if (!ALL_IN_RANGE) place = below(place, Native::splat(BASE + 7));
    return place;
}

// What the codes at these places mean, of a block.
template <int MAP>
ZEROCAST_FN Float value_at(const float* values, Int place) {
#if defined(__AVX512F__)
    return (Float)_mm512_permutexvar_ps((__m512i)place, _mm512_load_ps(values));
#elif defined(__AVX2__)
    return (Float)_mm256_permutevar8x32_ps(_mm256_load_ps(values + MAP * CODES), (__m256i)place);
#elif defined(__ARM_NEON)
    Int bytes = (place & (CODES - 1)) * 0x04040404 + 0x03020100;  // the four of each value
    return (Float)vqtbl2q_u8(vld1q_u8_x2((const u8*)(values + MAP * CODES)), (uint8x16_t)bytes);
#else
    Float found;
    for (int i = 0; i < W; i++) found[i] = values[MAP * CODES + place[i] % CODES];
    return found;
#endif
}

// The magnitudes of codes, twice, as value_at() reads them.
alignas(64) inline constexpr float MAGNITUDES[2 * CODES] = {0, .5f, 1, 1.5f, 2, 3, 4, 6,
                                                            0, .5f, 1, 1.5f, 2, 3, 4, 6};

// For tensor amaxes from the first to below the second, quotients by 6 * scale_max are exact by
// two multiply-adds: nothing overflows, and no remainder is rounded.
constexpr float DIVIDES_BY_INVERSE[] = {0x1p-80f, 0x1p110f};

// The codes of WIDTH rows inside a block, or only their signs: a register of each word of a row.
struct RowCodes {
    Unsigned words[COLS / WORD];
};

// Sums errors, or their squares: of all elements of one row inside blocks.
template <bool SQUARED>
struct ErrorNumerics : FourOverSixNumerics {
    using FourOverSixNumerics::FourOverSixNumerics;

    // Of one block.
    ZEROCAST_FN Errors<Scalar> row_errors(const CandidateScales<Scalar>& scales, const float* x,
                                          i64 count) const {
        Errors<Scalar> sum{};
        for (i64 c = 0; c < count; c++) add_errors<SQUARED>(scales, x[c], sum);
        return sum;
    }

    // Of WIDTH blocks from number b on, under one of the scales; `x` are the magnitudes of their
    // rows, COLS a block.
    template <int MAP>
    static ZEROCAST_FN Float row_errors(const BlockTables& tables, i64 b, const Float* x) {
        Float sum{};
        for (int c = 0; c < COLS / W; c++) {
            Float errors[W];
            for (int i = 0; i < W; i++) {
                Float of_block = x[i * (COLS / W) + c];
                Float y = of_block * Native::splat(tables.multipliers[MAP][b + i]);
                Float value = value_at<MAP>(tables.values[b + i], place_of<MAP, false>(y));
                errors[i] = error<SQUARED, Native>(of_block, value);
            }
            transpose_lanes<Native>(errors);
            for (int i = 0; i < W; i++) sum = sum + errors[i];
        }
        return sum;
    }

    // Of WIDTH rows inside block number b, under one of the scales, and their codes without signs;
    // a register of `x` are the magnitudes of one of their columns.
    template <int MAP, bool ALL_IN_RANGE>
    static ZEROCAST_FN Float errors_of_rows(const BlockTables& tables, i64 b,
                                            const Float (&x)[COLS], RowCodes& codes) {
        Float sum{}, multiplier = Native::splat(tables.multipliers[MAP][b]);
        for (int word = 0; word < COLS / WORD; word++) {
            Unsigned made = Unsigned{} - places_of_zeros<MAP>();
            for (int i = 0; i < WORD; i++) {
                Float column = x[word * WORD + i];
                Int place = place_of<MAP, ALL_IN_RANGE>(column * multiplier);
                made += (Unsigned)place << (4 * i);
                Float value = value_at<MAP>(tables.values[b], place);
                sum = sum + error<SQUARED, Native>(column, value);
            }
            codes.words[word] = made;
        }
        return sum;
    }

    // Of WIDTH blocks of one row, under one of the scales, and their codes without signs; a
    // register of `x` are the magnitudes of one column of all these blocks. USUAL: no element is
    // beyond IN_RANGE, and quotients are exact by the inverse.
    template <int MAP, bool USUAL>
    ZEROCAST_FN Float errors_of_blocks(Float map, Float multiplier, const Float (&x)[COLS],
                                       RowCodes& codes) const {
        Float sum{};
        for (int word = 0; word < COLS / WORD; word++) {
            Unsigned made = Unsigned{} - places_of_zeros<MAP>();
            for (int i = 0; i < WORD; i++) {
                Float column = x[word * WORD + i];
                Int place = place_of<MAP, USUAL>(column * multiplier);
                made += (Unsigned)place << (4 * i);
                Float value = value_at<MAP>(MAGNITUDES, place) * map * Native::splat(tensor_amax);
                sum = sum + error<SQUARED, Native>(column, quotient<USUAL>(value));
            }
            codes.words[word] = made;
        }
        return sum;
    }

    // Whether errors_of_blocks() may take blocks with these amaxes as usual.
    ZEROCAST_FN bool is_usual(const CandidateScales<Native>& scales, Int amax) const {
        return HAS_FMA && tensor_amax >= DIVIDES_BY_INVERSE[0]
               && tensor_amax < DIVIDES_BY_INVERSE[1] && all_in_range(scales, amax);
    }

  private:
    // value / largest. BY_INVERSE follows Markstein, IBM J. Res. Dev. 34 (1990).
    template <bool BY_INVERSE>
    ZEROCAST_FN Float quotient(Float value) const {
        if constexpr (!BY_INVERSE) return Native::divide(value, Native::splat(largest));
        Float inverse = Native::splat(1.0f / largest), near = value * inverse;
        Float remainder = Native::fma(near, Native::splat(-largest), value);
        return Native::fma(remainder, inverse, near);
    }
};

}  // namespace four_over_six
}  // namespace ZEROCAST_ISA
}  // namespace zerocast
