// Codes of E2M1 as the kernels make them, against the text that they stand for: of every magnitude
// of FP32, infinity and NaN included, and of words of four; by stochastic rounding, of every one
// that is not rounded to the same code under all draws, under the two draws between which its code
// changes. Prints how many differ. Then, whether
// what 4-over-6 codes by two at a time is small enough for that: prints how many blocks' amaxes are
// not, and the largest.
#include <cstdio>

#include "arithmetic/scaling.h"
#include "cuda/conversions.h"

using namespace zerocast;

static bool differs(i32 bits) {
    float magnitude = Scalar::value(bits);
    i32 code = encode_magnitude<E2M1, Scalar>(magnitude) & E2M1::MAX_CODE;
    i32 first = Scalar::bits(FIRST);
    i32 unbounded = e2m1_unbounded(magnitude);
    return (e2m1_by_lines(magnitude) != first + code)
           | ((unbounded != first + code) & (magnitude < TwoCodes::UNLIMITED))
           | ((unbounded > first + 15) & (magnitude <= TwoCodes::LARGEST_OF_TWO));
}

// The largest draw under which a magnitude is rounded down.
static u32 last_below(float magnitude) {
    u32 draw = 0;
    i32 below = encode_e2m1_stochastic<Scalar>(magnitude, 0);
    for (u32 bit = 1 << 15; bit > 0; bit /= 2) {
        if (encode_e2m1_stochastic<Scalar>(magnitude, (i32)(draw | bit)) == below) draw |= bit;
    }
    return draw;
}

// Whether four elements differ, of two magnitudes and both signs, each under that draw and the
// next.
static bool differs_stochastically(const float (&magnitudes)[2]) {
    Vec4 q;
    u64 draws = 0;
    u32 codes = 0;
    for (int i = 0; i < 4; i++) {
        u32 draw = last_below(magnitudes[i / 2]);
        if (i % 2 && draw < 0xFFFF) draw++;
        draws |= (u64)draw << 16 * i;
        q.x[i] = i % 3 ? -magnitudes[i / 2] : magnitudes[i / 2];
        codes |= (u32)encode_e2m1_stochastic<Scalar>(q.x[i], (i32)draw) << 4 * i;
    }
    return encode_e2m1_stochastic_vec4(draws, q) != codes;
}

struct UnderBothScales {
    u64 too_large = 0, visited = 0;
    float largest = 0;

    // A block under a tensor's amax, both by their bits.
    void visit(i32 amax, i32 tensor_amax) {
        for (i64 scale_max = 256; scale_max <= 448; scale_max += 448 - 256) {
            FourOverSixNumerics numerics(tensor_amax, scale_max);
            for (i32 choice = 0; choice < 2; choice++) {
                i32 stored = numerics.stored<Scalar>(amax, choice);
                float map = decode<E4M3, Scalar>(stored);
                i32 least = Scalar::bits(numerics.dequantized<Scalar>(0, map));
                i32 most = Scalar::bits(numerics.dequantized<Scalar>(E2M1::MAX_CODE, map));
                if (least == most) continue;
                float scaled = Scalar::value(amax) * numerics.multiplier_under<Scalar>(stored);
                too_large += !(scaled <= TwoCodes::LARGEST_OF_TWO);
                visited++;
                if (scaled > largest) largest = scaled;
            }
        }
    }
};

// With an argument until something differs.
int main(int argc, char**) {
    constexpr i32 CHUNK = 1 << 12;
    u64 wrong = 0, visited = 0;
    for (u32 first = 0; first < 1u << 31 && (argc < 2 || !wrong);
         first += CHUNK, visited += CHUNK) {
        i32 here = 0;
        for (i32 i = 0; i < CHUNK; i++) here += differs((i32)first + i);
        wrong += here;
    }
    // Both signs of every tie, of what is beyond the last one and of NaN's bits, by fours.
    static const float VALUES[] = {0,    0.25f, 0.75f, 1.25f, 1.75f,
                                   2.5f, 3.5f,  5,     1e30f, Scalar::value(NAN_BITS)};
    for (int n = 0; n < 20 * 20 * 20 * 20; n++) {
        Vec4 q;
        u32 codes = 0;
        for (int i = 0, rest = n; i < 4; i++, rest /= 20) {
            q.x[i] = rest % 2 ? -VALUES[rest / 2 % 10] : VALUES[rest / 2 % 10];
            codes |= (u32)encode<E2M1, Scalar>(q.x[i]) << 4 * i;
        }
        wrong += encode_vec4<E2M1>(q) != codes;
    }
    printf("%llu of %llu magnitudes differ\n", wrong, visited);
    constexpr u32 ROUNDED = 0x33000000, SATURATES = 0x40E00000;  // 2^-25, 7
    wrong = 0;
    for (u32 bits = 0; bits < 1u << 31 && (argc < 2 || !wrong);) {
        u32 step = bits >= ROUNDED && bits < SATURATES ? 1 : 997;
        u32 next = bits + step < 1u << 31 ? bits + step : (u32)NAN_BITS;
        wrong += differs_stochastically({Scalar::value((i32)bits), Scalar::value((i32)next)});
        bits += 2 * step;
    }
    printf("%llu pairs of magnitudes differ by stochastic rounding\n", wrong);
    if (argc == 2) return 0;

    // Amaxes of tensors from 1 ulp to NaN, and of their blocks, at strides that have no factor
    // of 2.
    UnderBothScales all;
    for (i64 tensor = 1; tensor < 1ll << 31; tensor += tensor < 64 ? 1 : 5'000'011) {
        for (i64 block = 1; block <= tensor; block += block < 64 ? 1 : 1 + tensor / 4'001)
            all.visit((i32)block, (i32)tensor);
        all.visit((i32)tensor, (i32)tensor);
    }
    printf("%llu amaxes are too large, of some: %d, largest %g\n", all.too_large,
           all.visited > 1'000'000, all.largest);
}
