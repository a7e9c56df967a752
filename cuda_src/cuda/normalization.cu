// normalization: layernorm or rmsnorm of each row, rounded, and cast, rowwise and columnwise, in
// one pass.
//
// A warp takes the statistics of its rows before the first tile, each in three readings (the
// largest magnitude, the mean, the squares), of which the first-level cache serves the later ones.
// Thread blocks that share a strip of rows take them once each: reading again is cheaper than
// waiting for each other.
#include "cuda/activation_kernels.h"

using namespace zerocast;

constexpr u32 ALL_LANES = 0xFFFFFFFFu;

// Element k of a row is part k % PARTIAL_SUMS of its sums: lane k / 4 % 32 has it.
static_assert(PARTIAL_SUMS == THREAD_COLS * LANES, "a lane keeps the sums of its four columns");

static ZEROCAST_FN float shuffle(float x, int lanes) {
    return Scalar::value(__shfl_xor_sync(ALL_LANES, Scalar::bits(x), lanes));
}

// One row as a warp reads it.
struct Row {
    const ActivationTask& task;
    i64 row;
    int lane;

    // Calls work(vector, left) for every vector of this lane; left of its elements exist.
    template <class Work>
    ZEROCAST_FN void for_each_vector(const Work& work) const {
        i64 cols = task.table.cols;
#pragma unroll 1
        for (i64 k = THREAD_COLS * lane; k < cols; k += PARTIAL_SUMS)
            work(load_nominal(task.table.source, task.source_type, row * cols + k,
                              at_most_four(cols - k)),
                 at_most_four(cols - k));
    }

    ZEROCAST_FN i32 largest() const {
        i32 largest = 0;
        for_each_vector([&](const Vec4& q, int) {
            i32 magnitude[4];
            magnitudes_of(q, magnitude);
            largest = Scalar::max(largest, largest_of(magnitude));
        });
        return __reduce_max_sync(ALL_LANES, largest);
    }

    ZEROCAST_FN Sum sum(float power) const {
        Sum part[4] = {};
        for_each_vector([&](const Vec4& q, int) {
#pragma unroll
            for (int j = 0; j < 4; j++) part[j].add(q.x[j] * power);
        });
#pragma unroll 1
        for (int n = LANES / 2; n > 0; n /= 2) {
#pragma unroll
            for (int j = 0; j < 4; j++)
                part[j].add(shuffle(part[j].high, n), shuffle(part[j].low, n));
        }
        part[0].add(part[2].high, part[2].low);
        part[1].add(part[3].high, part[3].low);
        part[0].add(part[1].high, part[1].low);
        return part[0];
    }

    ZEROCAST_FN float squares(const RowStatistics& statistics) const {
        float part[4] = {};
        for_each_vector([&](const Vec4& q, int left) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float distance = centered<Scalar>(statistics, q.x[j]);
                if (j < left) part[j] += distance * distance;
            }
        });
#pragma unroll 1
        for (int n = LANES / 2; n > 0; n /= 2) {
#pragma unroll
            for (int j = 0; j < 4; j++) part[j] += shuffle(part[j], n);
        }
        return (part[0] + part[2]) + (part[1] + part[3]);
    }

    ZEROCAST_FN RowStatistics statistics() const {
        const ActivationTable& table = task.table;
        RowStatistics made{RowStatistics::power_for(largest(), table.eps_value()), 0.0f, 0.0f,
                           0.0f};
        if (table.function == FUNCTION_LAYERNORM) made.set_mean(sum(made.power), table.cols);
        made.set_rstd(squares(made), table.cols, table.eps_value());
        return made;
    }
};

template <int HEIGHT>
struct Norm {
    RowStatistics* rows;  // of the strip

    ZEROCAST_FN Norm() {
        __shared__ RowStatistics shared[HEIGHT];
        rows = shared;
    }

    ZEROCAST_FN void open(const ActivationTask& task, const TilePosition<HEIGHT>& position,
                          bool writes) const {
        __syncwarp();  // the rows before have been read
#pragma unroll 1
        for (int i = 0; i < TilePosition<HEIGHT>::ROWS; i++) {
            if (position.row(i) >= position.rows) break;
            RowStatistics made = Row{task, position.row(i), position.lane}.statistics();
            if (position.lane != 0) continue;
            rows[TilePosition<HEIGHT>::ROWS * position.warp + i] = made;
            if (writes && task.table.mean) task.table.mean[position.row(i)] = made.plain_mean();
            if (writes && task.table.rstd) task.table.rstd[position.row(i)] = made.plain_rstd();
        }
        __syncwarp();
    }

    // Calls work(element, column of the thread) with the elements of rows that the matrix has.
    template <class Work>
    static ZEROCAST_FN void for_each_existing(const TilePosition<HEIGHT>& position,
                                              ThreadTile<HEIGHT>& elements, const Work& work) {
#pragma unroll
        for (int i = 0; i < TilePosition<HEIGHT>::ROWS; i++) {
            if (position.row(i) >= position.rows) continue;
#pragma unroll
            for (int j = 0; j < THREAD_COLS; j++) work(elements.row[i].x[j], j);
        }
    }

    ZEROCAST_FN ThreadTile<HEIGHT> elements(const ActivationTask& task,
                                            const TilePosition<HEIGHT>& position) const {
        const ActivationTable& table = task.table;
        ThreadTile<HEIGHT> elements{};
        int left = position.left();
        if (left == 0) return elements;
        elements.for_each_row([&](int i, const Vec4&) {
            Vec4 y{};
            if (position.row(i) >= position.rows) return y;
            RowStatistics row = rows[TilePosition<HEIGHT>::ROWS * position.warp + i];
            Vec4 x = load_nominal(table.source, task.source_type,
                                  (i64)position.row(i) * position.cols + position.col(), left);
#pragma unroll
            for (int j = 0; j < THREAD_COLS; j++) {
                if (j < left) y.x[j] = centered<Scalar>(row, x.x[j]) * row.rstd;
            }
            return y;
        });
        if (table.weight) {
            Vec4 weight = load_nominal(table.weight, task.weight_type, position.col(), left);
            for_each_existing(position, elements, [&](float& y, int j) {
                y = y * gamma_of<Scalar>(weight.x[j], table.zero_centered_gamma != 0);
            });
        }
        if (table.bias) {
            Vec4 bias = load_nominal(table.bias, task.bias_type, position.col(), left);
            for_each_existing(position, elements, [&](float& y, int j) { y = y + bias.x[j]; });
        }
        return elements;
    }
};

template <class Numerics, int HEIGHT>
__global__ void __launch_bounds__(TilePosition<HEIGHT>::THREADS, HEIGHT == TALL ? 1 : 2)
    normalization(const __grid_constant__ ActivationTask task) {
    produce<Norm, Numerics, HEIGHT>(task);
}
