// activation: a function of each element (relu, gelu, silu, swiglu, or nothing), rounded, and cast,
// rowwise and columnwise, in one pass.
#include "cuda/activation_kernels.h"

using namespace zerocast;

template <int HEIGHT>
struct ElementWise {
    ZEROCAST_FN void open(const ActivationTask&, const Place<HEIGHT>&, bool) const {}

    // f(element) of the patch.
    template <class F>
    static ZEROCAST_FN void map(Patch<HEIGHT>& patch, const F& f) {
        patch.for_each_row([&](int, const Quad& x) {
            Quad y;
#pragma unroll
            for (int j = 0; j < PATCH_COLS; j++) y.x[j] = f(x.x[j]);
            return y;
        });
    }

    // Of row i of the patch, the quad of the source that stands `offset` columns further right.
    static ZEROCAST_FN Quad load_row(const ActivationTask& task, const Place<HEIGHT>& place,
                                     i64 offset, int i) {
        if (place.row(i) >= place.rows || place.left() == 0) return Quad{};
        i64 at = place.row(i) * task.table.source_cols() + offset + place.col();
        return load_nominal(task.table.source, task.source_type, at, place.left());
    }

    // Every function is 0 of 0, so nothing comes of elements that the matrix does not have.
    ZEROCAST_FN Patch<HEIGHT> patch(const ActivationTask& task, const Place<HEIGHT>& place) const {
        Patch<HEIGHT> x;
#pragma unroll
        for (int i = 0; i < Place<HEIGHT>::ROWS; i++) x.row[i] = load_row(task, place, 0, i);
        switch (task.table.function) {
            case FUNCTION_RELU:
                map(x, [](float v) { return relu<Scalar>(v); });
                break;
            case FUNCTION_GELU:
                map(x, [](float v) { return gelu<Scalar>(v); });
                break;
            case FUNCTION_GELU_TANH:
                map(x, [](float v) { return gelu_tanh<Scalar>(v); });
                break;
            case FUNCTION_SILU:
                map(x, [](float v) { return silu<Scalar>(v); });
                break;
            case FUNCTION_SWIGLU: {
                x.for_each_row([&](int i, const Quad& first) {
                    Quad second = load_row(task, place, place.cols, i), y;
#pragma unroll
                    for (int j = 0; j < PATCH_COLS; j++)
                        y.x[j] = swiglu<Scalar>(first.x[j], second.x[j]);
                    return y;
                });
                break;
            }
            default:
                break;
        }
        return x;
    }
};

ZEROCAST_ACTIVATION_KERNELS(activation, ElementWise, 3)
