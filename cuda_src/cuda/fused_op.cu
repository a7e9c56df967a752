// fused_op: a function of each element (relu, gelu, silu, swiglu, or nothing) or a norm of each
// row, rounded.
//
// A warp takes a whole row of a norm, and a piece of one of any other function. Lane k / 4 % 32 has
// element k, four side by side, and reads DEPTH such vectors at a time.
#include "arithmetic/fused_op.h"
#include "cuda/conversions.h"
#include "cuda/tiles.h"

using namespace zerocast;

constexpr int LANES = 32, WARPS = THREADS / LANES, DEPTH = 4;
constexpr int ACROSS = 4 * LANES, PIECE = DEPTH * ACROSS;  // columns of one vector a lane, of DEPTH

// min(count, 4), and 0 for what is negative.
static ZEROCAST_FN int at_most_four(i64 count) {
    return count >= 4 ? 4 : count > 0 ? (int)count : 0;
}

// --- elements in memory ---

template <class T>
static ZEROCAST_FN Vec4 values_of(const Four& four, const T*) {
    return four.values<T>();
}

// N vectors of a lane, from element `at` on; of the `left` elements from there on those that exist,
// and zeros: zeros alone where nothing is to be read.
template <int N>
static ZEROCAST_FN void load_vectors(Vec4 (&q)[N], const void* data, i64 dtype, i64 at, i64 left) {
#pragma unroll
    for (int i = 0; i < N; i++) q[i] = Vec4{};
    if (!data) return;
    with_elements(data, dtype, [&](auto* elements) {
        auto from = elements + at;
        bool aligned = (u64)from % (4 * sizeof *from) == 0;
        Four four[N] = {};
#pragma unroll
        for (int i = 0; i < N; i++)
            four[i].load_at_once(from + i * ACROSS, aligned && left - i * ACROSS >= 4);
#pragma unroll
        for (int i = 0; i < N; i++) {
            int some = at_most_four(left - i * ACROSS);
            if (!aligned || some < 4) four[i].load_one_by_one(from + i * ACROSS, some);
            q[i] = values_of(four[i], from);
        }
    });
}

// Calls work(k, left, x, second) with this lane's vectors of a row of the source, of which columns
// k to k + left are there; second is what swiglu has beside x. By one copy of the code of `work`:
// vectors go round, because registers cannot be indexed.
template <class Work>
static ZEROCAST_FN void for_each_vector(const FusedTable& table, i64 row, i64 begin, i64 end,
                                        const Work& work) {
    const void* others = table.function == FUNCTION_SWIGLU ? table.source : nullptr;
#pragma unroll 1
    for (i64 k = begin + threadIdx.x % LANES * 4; k < end; k += PIECE) {
        i64 at = row * table.source_cols() + k;
        Vec4 x[DEPTH], second[DEPTH];
        load_vectors(x, table.source, table.source_type, at, end - k);
        load_vectors(second, others, table.source_type, at + table.cols, end - k);
#pragma unroll 1
        for (int i = 0; i < DEPTH; i++) {
            work(k + i * ACROSS, at_most_four(end - k - i * ACROSS), x[0], second[0]);
#pragma unroll
            for (int j = 1; j < DEPTH; j++) {
                x[j - 1] = x[j];
                second[j - 1] = second[j];
            }
        }
    }
}

ZEROCAST_FN void set(Fp32& to, float x) { to.value = x; }
ZEROCAST_FN void set(Bf16& to, float x) { to.bits = (unsigned short)(Scalar::bits(x) >> 16); }
ZEROCAST_FN void set(Fp16& to, float x) { to.bits = (unsigned short)to_fp16<Scalar>(x); }

template <class T>
struct alignas(4 * sizeof(T)) FourInMemory {
    T x[4];
};

// The first `left` of four elements of the result, rounded. round_vec4 leaves the NaNs of an
// instruction.
static ZEROCAST_FN void store_rounded(const FusedTable& table, i64 at, const Vec4& y, int left) {
    with_nominal(table.round_to, [&](auto zero) {
        typedef decltype(zero) T;
        Vec4 q = round_vec4<T>(y);
        FourInMemory<T> four;
#pragma unroll
        for (int j = 0; j < 4; j++) set(four.x[j], with_canonical_nan<Scalar>(q.x[j]));
        T* to = (T*)table.output + at;
        if (left == 4 && (u64)to % sizeof four == 0) {
            *(FourInMemory<T>*)to = four;
            return;
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j < left) to[j] = four.x[j];
        }
    });
}

// --- functions of one element ---

static ZEROCAST_FN void element_wise(const FusedTable& table, i64 row, i64 col) {
    i64 end = table.cols - col < PIECE ? table.cols : col + PIECE;
    with_function<Scalar>(table.function, [&](auto f) {
        for_each_vector(table, row, col, end, [&](i64 k, int left, const Vec4& x, const Vec4& z) {
            Vec4 y;
#pragma unroll
            for (int j = 0; j < 4; j++) y.x[j] = f(x.x[j], z.x[j]);
            store_rounded(table, row * table.cols + k, y, left);
        });
    });
}

// --- norms ---

static ZEROCAST_FN float shuffled(float x, int lanes) {
    return Scalar::value(__shfl_xor_sync(ALL_LANES, Scalar::bits(x), lanes));
}
static ZEROCAST_FN Sum shuffled(const Sum& x, int lanes) {
    return Sum{shuffled(x.high, lanes), shuffled(x.low, lanes)};
}

// One row as a warp reads it, three times: caches serve the second and the third.
struct WarpRow {
    static constexpr int PARTS = PARTIAL_SUMS / LANES;
    static_assert(PARTS == 4, "a lane keeps the sums of its four columns");
    const FusedTable& table;
    i64 row;

    template <class Work>
    ZEROCAST_FN void for_each(const Work& work) const {
        for_each_vector(table, row, 0, table.cols, [&](i64, int left, const Vec4& q, const Vec4&) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (j < left) work(j, q.x[j]);
            }
        });
    }

    ZEROCAST_FN i32 reduce_max(i32 largest) const { return __reduce_max_sync(ALL_LANES, largest); }

    // Addition commutes, that of a Sum, too: all lanes have the same.
    template <class Part>
    ZEROCAST_FN void add_others(Part (&part)[PARTS]) const {
#pragma unroll 1
        for (int n = LANES / 2; n > 0; n /= 2) {
#pragma unroll
            for (int j = 0; j < PARTS; j++) add(part[j], shuffled(part[j], n));
        }
    }
};

static ZEROCAST_FN void norm(const FusedTable& table, i64 row) {
    RowStatistics statistics = statistics_of(table, WarpRow{table, row});
    if (threadIdx.x % LANES == 0) {
        if (table.mean) table.mean[row] = statistics.plain_mean();
        if (table.rstd) table.rstd[row] = statistics.plain_rstd();
    }
    auto finish = [&](i64 k, int left, const Vec4& x, const Vec4&) {
        Vec4 y, weight[1], bias[1];
        load_vectors(weight, table.weight, table.weight_type, k, left);
        load_vectors(bias, table.bias, table.bias_type, k, left);
#pragma unroll
        for (int j = 0; j < 4; j++)
            y.x[j] = normalized<Scalar>(table, statistics, x.x[j], weight[0].x[j], bias[0].x[j]);
        store_rounded(table, row * table.cols + k, y, left);
    };
    for_each_vector(table, row, 0, table.cols, finish);
}

// --- the kernel ---

template <bool IS_NORM>
__global__ void __launch_bounds__(THREADS, IS_NORM ? 8 : 6)
    fused_op(const __grid_constant__ FusedTable table) {
    i64 pieces = IS_NORM ? 1 : (table.cols + PIECE - 1) / PIECE, units = table.rows * pieces;
    i64 first = (i64)blockIdx.x * WARPS + threadIdx.x / LANES, step = (i64)gridDim.x * WARPS;
    for (i64 unit = first; unit < units; unit += step) {
        if constexpr (IS_NORM)
            norm(table, unit);
        else
            element_wise(table, unit / pieces, unit % pieces * PIECE);
    }
}
