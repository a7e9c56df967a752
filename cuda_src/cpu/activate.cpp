// activate: the function of a layer, and its rounding, of one FP32 matrix; the casts read the
// result.
#include <string.h>

#include "arithmetic/activation.h"
#include "cpu/launch.h"
#include "cpu/simd.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {
namespace {

constexpr int W = Native::WIDTH;
typedef Native::Float Floats;

// The first n elements, and zeros.
ZEROCAST_FN Floats load_some(const float* from, i64 n) {
    if (n >= W) return Native::load(from);
    float some[W] = {};
    memcpy(some, from, n * sizeof(float));
    return Native::load(some);
}

ZEROCAST_FN void store_some(float* to, Floats x, i64 n) {
    if (n >= W)
        Native::store(to, x);
    else
        memcpy(to, &x, n * sizeof(float));
}

ZEROCAST_FN Floats rounded(Floats x, i64 nominal) {
    if (nominal == NOMINAL_BF16) return round_to<Bf16, Native>(x);
    if (nominal == NOMINAL_FP16) return round_to<Fp16, Native>(x);
    return round_to<Fp32, Native>(x);
}

// to[i] = f(from[i], second[i]), rounded; `second` is read by functions of two arguments only.
template <class F>
ZEROCAST_FN void map(const F& f, const float* from, const float* second, float* to, i64 n,
                     i64 nominal) {
    for (i64 i = 0; i < n; i += W) {
        Floats y = f(load_some(from + i, n - i), second ? load_some(second + i, n - i) : Floats{});
        store_some(to + i, rounded(y, nominal), n - i);
    }
}

void element_wise(const ActivationTable& table, i64 row) {
    const float* x = (const float*)table.source + row * table.source_cols();
    float* to = (float*)table.output + row * table.cols;
    i64 n = table.cols, nominal = table.round_to;
    switch (table.function) {
        case FUNCTION_RELU:
            return map([](Floats v, Floats) { return relu<Native>(v); }, x, 0, to, n, nominal);
        case FUNCTION_GELU:
            return map([](Floats v, Floats) { return gelu<Native>(v); }, x, 0, to, n, nominal);
        case FUNCTION_GELU_TANH:
            return map([](Floats v, Floats) { return gelu_tanh<Native>(v); }, x, 0, to, n, nominal);
        case FUNCTION_SILU:
            return map([](Floats v, Floats) { return silu<Native>(v); }, x, 0, to, n, nominal);
        case FUNCTION_SWIGLU:
            return map([](Floats v, Floats u) { return swiglu<Native>(v, u); }, x, x + n, to, n,
                       nominal);
        default:
            return map([](Floats v, Floats) { return v; }, x, 0, to, n, nominal);
    }
}

// --- norms ---

// Calls work(part, element) for every element of a row, scaled by `power`.
template <class Work>
ZEROCAST_FN void for_each(const float* x, i64 cols, float power, const Work& work) {
    i64 k = 0;
    for (; k + PARTIAL_SUMS <= cols; k += PARTIAL_SUMS) {
        for (int i = 0; i < PARTIAL_SUMS; i++) work(i, x[k + i] * power);
    }
    for (int i = 0; k + i < cols; i++) work(i, x[k + i] * power);
}

Sum sum_of(const float* x, i64 cols, float power) {
    float high[PARTIAL_SUMS] = {}, low[PARTIAL_SUMS] = {};
    for_each(x, cols, power, [&](int i, float element) {
        Sum sum{high[i], low[i]};
        sum.add(element);
        high[i] = sum.high;
        low[i] = sum.low;
    });
    for (int n = PARTIAL_SUMS / 2; n > 0; n /= 2) {
        for (int i = 0; i < n; i++) {
            Sum sum{high[i], low[i]};
            sum.add(high[i + n], low[i + n]);
            high[i] = sum.high;
            low[i] = sum.low;
        }
    }
    return Sum{high[0], low[0]};
}

float squares_of(const float* x, i64 cols, const RowStatistics& row) {
    float squares[PARTIAL_SUMS] = {};
    for_each(x, cols, row.power, [&](int i, float element) {
        float distance = (element - row.mean) - row.mean_low;
        squares[i] += distance * distance;
    });
    for (int n = PARTIAL_SUMS / 2; n > 0; n /= 2) {
        for (int i = 0; i < n; i++) squares[i] += squares[i + n];
    }
    return squares[0];
}

RowStatistics statistics_of(const ActivationTable& table, const float* x) {
    i32 largest = 0;
    for (i64 k = 0; k < table.cols; k++) {
        i32 magnitude = Scalar::bits(x[k]) & MAGNITUDE_MASK;
        largest = magnitude > largest ? magnitude : largest;
    }
    RowStatistics row{RowStatistics::power_for(largest, table.eps_value()), 0.0f, 0.0f, 0.0f};
    if (table.function == FUNCTION_LAYERNORM)
        row.set_mean(sum_of(x, table.cols, row.power), table.cols);
    row.set_rstd(squares_of(x, table.cols, row), table.cols, table.eps_value());
    return row;
}

void norm(const ActivationTable& table, i64 index) {
    const float* x = (const float*)table.source + index * table.cols;
    auto weight = (const float*)table.weight, bias = (const float*)table.bias;
    float* to = (float*)table.output + index * table.cols;
    RowStatistics row = statistics_of(table, x);
    if (table.mean) table.mean[index] = row.plain_mean();
    if (table.rstd) table.rstd[index] = row.plain_rstd();
    for (i64 k = 0; k < table.cols; k += W) {
        i64 n = table.cols - k;
        Floats y = centered<Native>(row, load_some(x + k, n)) * Native::splat(row.rstd);
        if (weight)
            y = y * gamma_of<Native>(load_some(weight + k, n), table.zero_centered_gamma != 0);
        if (bias) y = y + load_some(bias + k, n);
        store_some(to + k, rounded(y, table.round_to), n);
    }
}

}  // namespace
}  // namespace ZEROCAST_ISA
}  // namespace zerocast

ZEROCAST_EXPORT(activate)(const void* tables, long long, long long threads) {
    using namespace zerocast;
    auto& table = *(const ActivationTable*)tables;
    bool is_norm = table.function >= FUNCTION_LAYERNORM;
    in_parallel(table.rows * table.source_cols(), threads, [&](i64 thread, i64 num_threads) {
        i64 first = table.rows * thread / num_threads,
            last = table.rows * (thread + 1) / num_threads;
        for (i64 row = first; row < last; row++) {
            if (is_norm)
                norm(table, row);
            else
                element_wise(table, row);
        }
    });
}
