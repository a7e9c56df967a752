// The functions of layers: relu, gelu, silu, swiglu, and what layernorm and rmsnorm do to an
// element. The formulas are those of FusedOp in zerocast/numerics.
//
// Made of the operations that lanes.h allows (no fused multiply-add, no library), so they give the
// same bits in a CUDA thread and in a CPU loop. Far to the left gelu and silu fall below the
// smallest number in steps of a power of two: that power is kept apart until the end, so the last
// digits are right down to where the result is 0.
#pragma once

#include "arithmetic/formats.h"
#include "arithmetic/tables.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// What is computed; in the order of Function in zerocast/numerics.
enum FunctionId : i64 {
    FUNCTION_IDENTITY = 0,
    FUNCTION_RELU = 1,
    FUNCTION_GELU = 2,
    FUNCTION_GELU_TANH = 3,
    FUNCTION_SILU = 4,
    FUNCTION_SWIGLU = 5,
    FUNCTION_LAYERNORM = 6,
    FUNCTION_RMSNORM = 7,
};

// One tensor, and what is computed of it, and rounded.
struct FusedTable {
    i64 function;  // FunctionId
    i64 eps;       // FP32 bit pattern
    i64 zero_centered_gamma;
    i64 rows, cols;                           // of the result
    i64 round_to;                             // Nominal
    i64 source_type, weight_type, bias_type;  // Nominal
    const void* source;                       // [rows, cols], or [rows, 2 * cols] of swiglu
    const void* weight;                       // [cols] or null
    const void* bias;                         // [cols] or null
    void* output;                             // [rows, cols]
    float* mean;                              // [rows] or null
    float* rstd;                              // [rows] or null

    ZEROCAST_FN i64 source_cols() const { return function == FUNCTION_SWIGLU ? 2 * cols : cols; }
    ZEROCAST_FN float eps_value() const { return Scalar::value((i32)eps); }
};
static_assert(sizeof(FusedTable) == 15 * sizeof(i64), "a row that Python writes");

// mantissa * 2^exponent, exponent from LEAST_EXPONENT to 0. Where the value is below
// 2^LEAST_EXPONENT the mantissa is 0: times any finite number FP32 has no place for it.
template <class L>
struct Power {
    typename L::Float mantissa;
    typename L::Int exponent;
};

constexpr i32 LEAST_EXPONENT = -300;
constexpr i32 FACTOR_EXPONENT = -100;  // a factor 2^n is an FP32 number for n from here to 0

template <class L>
ZEROCAST_FN typename L::Float power_of_2(typename L::Int exponent) {
    return L::value((exponent + EXPONENT_BIAS) << MANTISSA_BITS);
}

// The part of 2^exponent that one factor holds; what is left stays in exponent.
template <class L>
ZEROCAST_FN typename L::Float take_factor(typename L::Int& exponent) {
    typename L::Int part = L::max(exponent, L::splat(FACTOR_EXPONENT));
    exponent = exponent - part;
    return power_of_2<L>(part);
}

// x * 2^exponent: at most the last of the products rounds, except subnormal ones.
template <class L>
ZEROCAST_FN typename L::Float times_power(typename L::Float x, typename L::Int exponent) {
    x = x * take_factor<L>(exponent);
    x = x * take_factor<L>(exponent);
    return x * take_factor<L>(exponent);
}

// first * x^n + ... + last, by Horner's rule.
template <class L, class... Coefficients>
ZEROCAST_FN typename L::Float polynomial(typename L::Float x, float first, Coefficients... others) {
    typename L::Float p = L::splat(first);
    ((p = p * x + L::splat(others)), ...);
    return p;
}

// e^-y for y >= 0; 0 for an infinite y, and for NaN.
//
// -y = n * ln 2 + r with |r| <= ln 2 / 2. Adding 1.5 * 2^23 leaves n in the last bits of the sum.
// ln 2 is split so that n times its larger part is exact. The polynomial is the minimax one in
// relative error, 2e-9.
template <class L>
ZEROCAST_FN Power<L> exp_of_minus(typename L::Float y) {
    typedef typename L::Float Float;
    constexpr float LOG2_E = 1.442695f, LN2_HIGH = 0.693359375f, LN2_LOW = -0.00021219444f;
    constexpr float FAR = 207.9f;             // below -LEAST_EXPONENT * ln 2
    constexpr i32 ROUNDER_BITS = 0x4B400000;  // 1.5 * 2^23
    Float near = L::select(y < L::splat(FAR), y, L::splat(FAR));
    Float shifted = constant<L>(ROUNDER_BITS) - near * L::splat(LOG2_E);
    Float n = shifted - constant<L>(ROUNDER_BITS);
    Float r = (L::splat(0.0f) - near - n * L::splat(LN2_HIGH)) - n * L::splat(LN2_LOW);
    Float p = polynomial<L>(r, 0.001383579f, 0.008375645f, 0.04166829f, 0.16666411f, 0.4999999f,
                            1.0f, 1.0f);
    return Power<L>{L::select(y < L::splat(FAR), p, L::splat(0.0f)),
                    L::bits(shifted) - L::splat(ROUNDER_BITS)};
}

// x / (1 + e^-z), as a Power: what is left of 2^exponent is to be multiplied in.
template <class L>
ZEROCAST_FN Power<L> gate(typename L::Float x, typename L::Float z) {
    Power<L> e = exp_of_minus<L>(L::value(L::bits(z) & MAGNITUDE_MASK));
    typename L::Int left = e.exponent;
    typename L::Float small = e.mantissa * take_factor<L>(left);  // beside 1 it is enough
    typename L::Float over = L::select(z < L::splat(0.0f), x * e.mantissa, x);
    return Power<L>{L::divide(over, L::splat(1.0f) + small),
                    L::select(z < L::splat(0.0f), e.exponent, L::splat(0))};
}

template <class L>
ZEROCAST_FN typename L::Float relu(typename L::Float x) {
    return L::select(x < L::splat(0.0f), L::splat(0.0f), x);
}

template <class L>
ZEROCAST_FN typename L::Float silu(typename L::Float x) {
    Power<L> g = gate<L>(x, x);
    return times_power<L>(g.mantissa, g.exponent);
}

// silu(x) * y, where silu(x) alone may be too small for FP32.
template <class L>
ZEROCAST_FN typename L::Float swiglu(typename L::Float x, typename L::Float y) {
    Power<L> g = gate<L>(x, x);
    typename L::Float first = take_factor<L>(g.exponent);
    return times_power<L>(g.mantissa * first * y, g.exponent);
}

template <class L>
ZEROCAST_FN typename L::Float gelu_tanh(typename L::Float x) {
    // 2 * sqrt(2 / pi), and the same times 0.044715
    constexpr float LINEAR = 1.5957691f, CUBIC = 0.07135481f;
    Power<L> g = gate<L>(x, x * (L::splat(LINEAR) + L::splat(CUBIC) * (x * x)));
    return times_power<L>(g.mantissa, g.exponent);
}

// With t = |x|, Phi(-t) = e^(-t^2 / 2) * tail(t), where tail(t) = e^(t^2 / 2) * erfc(t / sqrt(2)) /
// 2 falls slowly, from 1/2 to about 0.4 / t: a polynomial in s = 1 / (1 + 0.3 t), minimax in
// relative error, 6e-8, as far as t = 14.6, where the product is below the smallest number.
template <class L>
ZEROCAST_FN typename L::Float gelu(typename L::Float x) {
    typedef typename L::Float Float;
    Float t = L::value(L::bits(x) & MAGNITUDE_MASK);
    Power<L> e = exp_of_minus<L>(t * t * L::splat(0.5f));
    Float s = L::divide(L::splat(1.0f), L::splat(1.0f) + L::splat(0.3f) * t);
    Float tail = polynomial<L>(s, 0.03841215f, -0.16933045f, 0.22899896f, -0.07689324f, 0.14280199f,
                               0.094570376f, 0.12194919f, 0.119483665f, 7.403887e-06f);
    Float left = e.mantissa * tail;
    typename L::Int exponent = e.exponent;
    Float right = L::splat(1.0f) - left * take_factor<L>(exponent);
    Float below = times_power<L>(x * left, e.exponent);
    return L::select(x < L::splat(0.0f), below, x * right);
}

// Calls work(f) with a function that is no norm: f(x, second) is an element of the result. Of all
// but swiglu x alone counts.
template <class L, class Work>
ZEROCAST_FN void with_function(i64 function, const Work& work) {
    typedef typename L::Float Float;
    if (function == FUNCTION_RELU)
        work([](Float x, Float) { return relu<L>(x); });
    else if (function == FUNCTION_GELU)
        work([](Float x, Float) { return gelu<L>(x); });
    else if (function == FUNCTION_GELU_TANH)
        work([](Float x, Float) { return gelu_tanh<L>(x); });
    else if (function == FUNCTION_SILU)
        work([](Float x, Float) { return silu<L>(x); });
    else if (function == FUNCTION_SWIGLU)
        work([](Float x, Float second) { return swiglu<L>(x, second); });
    else
        work([](Float x, Float) { return x; });
}

// --- rows of the norms ---

// The sum of many numbers, kept in two: as if in twice the precision (Knuth's exact addition).
struct Sum {
    float high, low;

    ZEROCAST_FN void add(float x, float x_low = 0.0f) {
        float sum = high + x, grown = sum - high;
        float error = (high - (sum - grown)) + (x - grown);
        high = sum;
        low = (low + x_low) + error;
    }
};

// a * b in two numbers (Dekker's exact product, from halves of 12 bits).
ZEROCAST_FN Sum exact_product(float a, float b) {
    constexpr float SPLITTER = 4097.0f;  // 2^12 + 1
    float a_shifted = SPLITTER * a, b_shifted = SPLITTER * b;
    float a_high = a_shifted - (a_shifted - a), a_low = a - a_high;
    float b_high = b_shifted - (b_shifted - b), b_low = b - b_high;
    float high = a * b;
    float low = ((a_high * b_high - high) + a_high * b_low + a_low * b_high) + a_low * b_low;
    return Sum{high, low};
}

// The sums of a row are taken in PARTIAL_SUMS parts, element k into part k % PARTIAL_SUMS, then
// part i takes part i + n for n = PARTIAL_SUMS / 2, ..., 2, 1: by any number of threads the same.
constexpr int PARTIAL_SUMS = 128;

// What makes an element of a row: ((x * power - mean) - mean_low) * rstd. The power of two keeps
// the squares of very large elements, and of very small ones where no eps covers them, inside of
// FP32, and the differences of very small ones out of its subnormal numbers; nearly always it is 1.
struct RowStatistics {
    float power, mean, mean_low, rstd;

    // Of the largest magnitude of a row.
    static ZEROCAST_FN float power_for(i32 largest_bits, float eps) {
        constexpr i32 LARGE = (EXPONENT_BIAS + 50) << MANTISSA_BITS;
        constexpr i32 SMALL = (EXPONENT_BIAS - 50) << MANTISSA_BITS;
        constexpr float NO_EPS = 1e-30f;
        if (largest_bits >= LARGE) return power_of_2<Scalar>(-80);
        if (largest_bits >= SMALL || eps >= 1.0f) return 1.0f;
        return power_of_2<Scalar>(eps < NO_EPS ? 80 : 40);
    }

    // The sum divided by the number of terms; mean_low is the rounding error of the quotient.
    ZEROCAST_FN void set_mean(const Sum& sum, i64 cols) {
        float n = (float)cols;
        mean = Scalar::divide(sum.high, n);
        Sum product = exact_product(mean, n);
        mean_low = Scalar::divide(((sum.high - product.high) - product.low) + sum.low, n);
    }

    // From the sum of squares of centered elements.
    ZEROCAST_FN void set_rstd(float squares, i64 cols, float eps) {
        float variance = Scalar::divide(squares, (float)cols) + eps * power * power;
        // Of equal elements only eps is left, and of very large ones eps * power * power is 0.
        bool equal = squares == 0.0f;
        if (equal) variance = eps;
        float root = Scalar::sqrt(variance);
        if (equal) root = root * power;
        rstd = Scalar::divide(1.0f, root);
    }

    // Of the row as it is; every NaN is the canonical one.
    ZEROCAST_FN float plain_mean() const {
        float rounded = mean + mean_low;  // NaN for an infinite mean
        return with_canonical_nan<Scalar>(
            Scalar::divide(rounded == rounded ? rounded : mean, power));
    }
    ZEROCAST_FN float plain_rstd() const { return with_canonical_nan<Scalar>(rstd * power); }
};

template <class L>
ZEROCAST_FN typename L::Float centered(const RowStatistics& row, typename L::Float x) {
    return (x * L::splat(row.power) - L::splat(row.mean)) - L::splat(row.mean_low);
}

ZEROCAST_FN void add(float& to, float x) { to += x; }
ZEROCAST_FN void add(Sum& to, const Sum& x) { to.add(x.high, x.low); }

// Adds up the parts of all threads.
template <class Row, class Part, int PARTS>
ZEROCAST_FN Part sum_of(const Row& row, Part (&part)[PARTS]) {
    row.add_others(part);
    for (int n = PARTS / 2; n > 0; n /= 2) {
        for (int i = 0; i < n; i++) add(part[i], part[i + n]);
    }
    return part[0];
}

// The statistics of a row. A Row says what one thread reads of it, PARTS of the PARTIAL_SUMS:
//     for_each(work)       calls work(part, element) for its elements
//     reduce_max(largest)  the largest of all threads
//     add_others(part)     adds to its parts those that other threads have
template <class Row>
ZEROCAST_FN RowStatistics statistics_of(const FusedTable& table, const Row& row) {
    i32 largest = 0;
    row.for_each(
        [&](int, float x) { largest = Scalar::max(largest, Scalar::bits(x) & MAGNITUDE_MASK); });
    float eps = table.eps_value();
    float power = RowStatistics::power_for(row.reduce_max(largest), eps);
    RowStatistics made{power, 0.0f, 0.0f, 0.0f};
    if (table.function == FUNCTION_LAYERNORM) {
        Sum part[Row::PARTS] = {};
        row.for_each([&](int i, float x) { part[i].add(x * power); });
        made.set_mean(sum_of(row, part), table.cols);
    }
    float part[Row::PARTS] = {};
    row.for_each([&](int i, float x) {
        float distance = centered<Scalar>(made, x);
        part[i] += distance * distance;
    });
    made.set_rstd(sum_of(row, part), table.cols, eps);
    return made;
}

// An element of the result, with its column's weight and bias where there are such.
template <class L>
ZEROCAST_FN typename L::Float normalized(const FusedTable& table, const RowStatistics& row,
                                         typename L::Float x, typename L::Float weight,
                                         typename L::Float bias) {
    typename L::Float y = centered<L>(row, x) * L::splat(row.rstd);
    if (table.weight) y = y * (table.zero_centered_gamma ? L::splat(1.0f) + weight : weight);
    return table.bias ? y + bias : y;
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
