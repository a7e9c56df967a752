// fused_op: the function of a layer, and its rounding, of one FP32 matrix; the casts read the
// result.
#include <string.h>

#include "arithmetic/fused_op.h"
#include "cpu/launch.h"
#include "cpu/simd.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {
namespace {

constexpr int W = Native::WIDTH;
typedef Native::Float Floats;

// The first n elements, and zeros; zeros alone where there is no row.
ZEROCAST_FN Floats load_some(const float* from, i64 n) {
    if (!from) return Floats{};
    if (n >= W) return Native::load(from);
    float some[W] = {};
    memcpy(some, from, n * sizeof(float));
    return Native::load(some);
}

// The first n elements, rounded.
ZEROCAST_FN void store_rounded(float* to, Floats x, i64 n, i64 nominal) {
    if (nominal == NOMINAL_BF16)
        x = round_to<Bf16, Native>(x);
    else if (nominal == NOMINAL_FP16)
        x = round_to<Fp16, Native>(x);
    else
        x = round_to<Fp32, Native>(x);
    if (n >= W)
        Native::store(to, x);
    else
        memcpy(to, &x, n * sizeof(float));
}

void element_wise(const FusedTable& table, const float* x, float* to) {
    const float* second = table.function == FUNCTION_SWIGLU ? x + table.cols : nullptr;
    with_function<Native>(table.function, [&](auto f) {
        for (i64 k = 0; k < table.cols; k += W) {
            i64 n = table.cols - k;
            Floats y = f(load_some(x + k, n), load_some(second ? second + k : nullptr, n));
            store_rounded(to + k, y, n, table.round_to);
        }
    });
}

// --- norms ---

struct Row {
    static constexpr int PARTS = PARTIAL_SUMS;
    const float* x;
    i64 cols;

    template <class Work>
    ZEROCAST_FN void for_each(const Work& work) const {
        i64 k = 0;
        for (; k + PARTS <= cols; k += PARTS) {
            for (int i = 0; i < PARTS; i++) work(i, x[k + i]);
        }
        for (int i = 0; k + i < cols; i++) work(i, x[k + i]);
    }
    ZEROCAST_FN i32 reduce_max(i32 largest) const { return largest; }
    template <class Part>
    ZEROCAST_FN void add_others(Part (&)[PARTS]) const {}
};

void norm(const FusedTable& table, i64 index, const float* x, float* to) {
    auto weight = (const float*)table.weight, bias = (const float*)table.bias;
    auto row = statistics_of(table, Row{x, table.cols});
    if (table.mean) table.mean[index] = row.plain_mean();
    if (table.rstd) table.rstd[index] = row.plain_rstd();
    for (i64 k = 0; k < table.cols; k += W) {
        i64 n = table.cols - k;
        Floats y = normalized<Native>(table, row, load_some(x + k, n),
                                      load_some(weight ? weight + k : nullptr, n),
                                      load_some(bias ? bias + k : nullptr, n));
        store_rounded(to + k, y, n, table.round_to);
    }
}

}  // namespace
}  // namespace ZEROCAST_ISA
}  // namespace zerocast

ZEROCAST_EXPORT(fused_op)(const void* tables, long long, long long threads) {
    using namespace zerocast;
    auto& table = *(const FusedTable*)tables;
    in_parallel(table.rows * table.source_cols(), threads, [&](i64 thread, i64 num_threads) {
        i64 last = table.rows * (thread + 1) / num_threads;
        for (i64 row = table.rows * thread / num_threads; row < last; row++) {
            const float* x = (const float*)table.source + row * table.source_cols();
            float* to = (float*)table.output + row * table.cols;
            if (table.function >= FUNCTION_LAYERNORM)
                norm(table, row, x, to);
            else
                element_wise(table, x, to);
        }
    });
}
