// fused_op: the function of a layer, and its rounding, of one matrix.
#include "arithmetic/fused_op.h"
#include "arithmetic/masters.h"
#include "cpu/launch.h"
#include "cpu/simd.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {
namespace {

constexpr int W = Native::WIDTH;
typedef Native::Float Floats;

// The first n elements, and zeros.
template <class T>
ZEROCAST_FN Floats load_first(const T* from, i64 n) {
    if (n >= W) return load(from);
    T cut[W] = {};
    __builtin_memcpy(cut, from, n * sizeof(T));
    return load(cut);
}

// Those from element `at` on; zeros where there is no tensor.
ZEROCAST_FN Floats load_at(const void* from, i64 dtype, i64 at, i64 n) {
    Floats x{};
    if (from) with_elements(from, dtype, [&](auto* elements) { x = load_first(elements + at, n); });
    return x;
}

// The first n elements, rounded.
ZEROCAST_FN void store_rounded(const FusedTable& table, i64 at, Floats x, i64 n) {
    if (table.round_to == NOMINAL_FP32)
        return store_some((float*)table.output + at, round_to<Fp32, Native>(x), n);
    Native::Int bits = table.round_to == NOMINAL_BF16
                           ? Native::bits(round_to<Bf16, Native>(x)) >> 16
                           : to_fp16<Native>(round_to<Fp16, Native>(x));
    auto to = (unsigned short*)table.output + at;
    store_some(to, __builtin_convertvector(bits, Native::Halves), n);
}

void element_wise(const FusedTable& table, i64 row) {
    i64 first = row * table.source_cols(), to = row * table.cols;
    bool has_second = table.function == FUNCTION_SWIGLU;
    with_function<Native>(table.function, [&](auto f) {
        for (i64 k = 0; k < table.cols; k += W) {
            i64 n = table.cols - k, at = first + k;
            Floats second{};
            if (has_second) second = load_at(table.source, table.source_type, at + table.cols, n);
            Floats x = load_at(table.source, table.source_type, at, n);
            store_rounded(table, to + k, f(x, second), n);
        }
    });
}

// --- norms ---

template <class T>
struct Row {
    static constexpr int PARTS = PARTIAL_SUMS;
    const T* x;
    i64 cols;

    Row(const T* from, i64 count) : x(from), cols(count) {}

    template <class Work>
    ZEROCAST_FN void for_each(const Work& work) const {
        i64 k = 0;
        for (; k + PARTS <= cols; k += PARTS) {
            float values[PARTS];
            for (int i = 0; i < PARTS; i += W) Native::store(values + i, load(x + k + i));
            for (int i = 0; i < PARTS; i++) work(i, values[i]);
        }
        for (int i = 0; k + i < cols; i++) work(i, value_of(x[k + i]));
    }
    ZEROCAST_FN i32 reduce_max(i32 largest) const { return largest; }
    template <class Part>
    ZEROCAST_FN void add_others(Part (&)[PARTS]) const {}
};

void norm(const FusedTable& table, i64 index) {
    i64 first = index * table.cols;
    RowStatistics row;
    with_elements(table.source, table.source_type,
                  [&](auto* x) { row = statistics_of(table, Row(x + first, table.cols)); });
    if (table.mean) table.mean[index] = row.plain_mean();
    if (table.rstd) table.rstd[index] = row.plain_rstd();
    for (i64 k = 0; k < table.cols; k += W) {
        i64 n = table.cols - k;
        Floats y =
            normalized<Native>(table, row, load_at(table.source, table.source_type, first + k, n),
                               load_at(table.weight, table.weight_type, k, n),
                               load_at(table.bias, table.bias_type, k, n));
        store_rounded(table, first + k, y, n);
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
            if (table.function >= FUNCTION_LAYERNORM)
                norm(table, row);
            else
                element_wise(table, row);
        }
    });
}
