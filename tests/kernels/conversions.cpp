// Codes of E2M1 as the kernels make them, against the text that they stand for: of every magnitude
// of FP32, infinity and NaN included, and of words of four. Prints how many differ.
#include <cstdio>

#include "cuda/conversions.h"

using namespace zerocast;

static bool differs(i32 bits) {
    float magnitude = Scalar::value(bits);
    i32 code = encode_magnitude<E2M1, Scalar>(magnitude) & E2M1::MAX_CODE;
    i32 first = Scalar::bits(FIRST) + code;
    return (e2m1_by_lines(magnitude, FIRST) != first)
           | (e2m1_by_lines(magnitude, FIRST + 8) != first + 8);
}

int main() {
    constexpr i32 CHUNK = 1 << 12;
    u64 wrong = 0, visited = 0;
    for (u32 first = 0; first < 1u << 31; first += CHUNK, visited += CHUNK) {
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
}
