// activation: a function of each element (relu, gelu, silu, swiglu, or nothing), rounded, and cast,
// rowwise and columnwise, in one pass.
#include "cuda/activation_kernels.h"

using namespace zerocast;

template <int HEIGHT>
struct ElementWise {
    ZEROCAST_FN void open(const ActivationTask&, const TilePosition<HEIGHT>&, bool) const {}

    // f of each element.
    template <class F>
    static ZEROCAST_FN void map(ThreadTile<HEIGHT>& elements, const F& f) {
        elements.for_each_row([&](int, const Vec4& x) {
            Vec4 y;
#pragma unroll
            for (int j = 0; j < THREAD_COLS; j++) y.x[j] = f(x.x[j]);
            return y;
        });
    }

    // Of row i of the thread, the vector of the source that stands `offset` columns further
    // right.
    static ZEROCAST_FN Vec4 load_row(const ActivationTask& task,
                                     const TilePosition<HEIGHT>& position, i64 offset, int i) {
        if (position.row(i) >= position.rows || position.left() == 0) return Vec4{};
        i64 at = position.row(i) * task.table.source_cols() + offset + position.col();
        return load_nominal(task.table.source, task.source_type, at, position.left());
    }

    // Every function is 0 of 0, so nothing comes of elements that the matrix does not have.
    ZEROCAST_FN ThreadTile<HEIGHT> elements(const ActivationTask& task,
                                            const TilePosition<HEIGHT>& position) const {
        ThreadTile<HEIGHT> x;
#pragma unroll
        for (int i = 0; i < TilePosition<HEIGHT>::ROWS; i++)
            x.row[i] = load_row(task, position, 0, i);
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
                x.for_each_row([&](int i, const Vec4& first) {
                    Vec4 second = load_row(task, position, position.cols, i), y;
#pragma unroll
                    for (int j = 0; j < THREAD_COLS; j++)
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

template <class Numerics, int HEIGHT>
__global__ void __launch_bounds__(TilePosition<HEIGHT>::THREADS, HEIGHT == TALL ? 1 : 3)
    activation(const __grid_constant__ ActivationTask task) {
    produce<ElementWise, Numerics, HEIGHT>(task);
}
