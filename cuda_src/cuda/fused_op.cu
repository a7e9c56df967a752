// fused_op: a function of each element (relu, gelu, silu, swiglu, or nothing) or a norm of each
// row, rounded, and cast, rowwise and columnwise, in one pass.
//
// Blocks that do not fit into a tile (the whole tensor, a row, a column) have their amaxes taken by
// a launch of its own, with NoNumerics, before the one that casts.
#include "cuda/fused_plane.h"

using namespace zerocast;

struct ElementWise {
    static constexpr int RESIDENT = 3;  // thread blocks that share a multiprocessor's registers

    template <int HEIGHT>
    static ZEROCAST_FN void open(const FusedTile<HEIGHT>&, bool) {}

    // Every function is 0 of 0, so nothing comes of elements that the matrix does not have.
    template <int HEIGHT>
    static ZEROCAST_FN void fill(FusedTile<HEIGHT>& tile) {
        i64 function = tile.table.function;
#pragma unroll
        for (int i = 0; i < FusedTile<HEIGHT>::ROWS; i++) tile.elements[i] = tile.load(i);
        with_function<Scalar>(function, [&](auto f) {
            tile.for_each_row([&](int i, const Vec4& x) {
                Vec4 second{}, y;
                if (function == FUNCTION_SWIGLU) second = tile.load(i, tile.cols);
#pragma unroll
                for (int j = 0; j < 4; j++) y.x[j] = f(x.x[j], second.x[j]);
                return y;
            });
        });
    }
};

// --- norms ---

static ZEROCAST_FN float shuffled(float x, int lanes) {
    return Scalar::value(__shfl_xor_sync(ALL_LANES, Scalar::bits(x), lanes));
}
static ZEROCAST_FN Sum shuffled(const Sum& x, int lanes) {
    return Sum{shuffled(x.high, lanes), shuffled(x.low, lanes)};
}

// One row as a warp reads it: lane k / 4 % 32 has element k.
struct WarpRow {
    static constexpr int PARTS = PARTIAL_SUMS / LANES;
    static_assert(PARTS == THREAD_COLS, "a lane keeps the sums of its four columns");
    const FusedTable& table;
    i64 row;

    template <class Work>
    ZEROCAST_FN void for_each(const Work& work) const {
#pragma unroll 1
        for (i64 k = threadIdx.x % LANES * 4; k < table.cols; k += PARTIAL_SUMS) {
            int left = at_most_four(table.cols - k);
            Vec4 q = load_some(table.source, table.source_type, row * table.cols + k, left);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (j < left) work(j, q.x[j]);
            }
        }
    }

    ZEROCAST_FN i32 reduce_max(i32 largest) const { return __reduce_max_sync(ALL_LANES, largest); }

    template <class Part>
    ZEROCAST_FN void add_others(Part (&part)[PARTS]) const {
#pragma unroll 1
        for (int n = LANES / 2; n > 0; n /= 2) {
#pragma unroll
            for (int j = 0; j < PARTS; j++) add(part[j], shuffled(part[j], n));
        }
    }
};

// A warp takes the statistics of its rows before the first tile, each in three readings (the
// largest magnitude, the mean, the squares), of which the first-level cache serves the later ones.
// Thread blocks that share a strip of rows take them once each: reading again is cheaper than
// waiting for each other.
struct Norm {
    static constexpr int RESIDENT = 2;

    template <int HEIGHT>
    static ZEROCAST_FN void open(const FusedTile<HEIGHT>& tile, bool writes) {
        const FusedTable& table = tile.table;
        __syncwarp();  // the rows before have been read
#pragma unroll 1
        for (int i = 0; i < FusedTile<HEIGHT>::ROWS; i++) {
            if (!tile.has_row(i)) break;
            auto made = statistics_of(table, WarpRow{table, tile.row(i)});
            if (threadIdx.x % LANES != 0) continue;
            tile.memory.rows[tile.first_row + i] = made;
            if (writes && table.mean) table.mean[tile.row(i)] = made.plain_mean();
            if (writes && table.rstd) table.rstd[tile.row(i)] = made.plain_rstd();
        }
        __syncwarp();
    }

    template <int HEIGHT>
    static ZEROCAST_FN void fill(FusedTile<HEIGHT>& tile) {
        const FusedTable& table = tile.table;
        int left = tile.left();
        Vec4 weight{}, bias{};
        if (table.weight) weight = load_some(table.weight, table.weight_type, tile.col(), left);
        if (table.bias) bias = load_some(table.bias, table.bias_type, tile.col(), left);
        tile.for_each_row([&](int i, const Vec4&) {
            Vec4 y{};
            if (!tile.has_row(i)) return y;
            RowStatistics row = tile.memory.rows[tile.first_row + i];
            Vec4 x = tile.load(i);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (j < left)
                    y.x[j] = normalized<Scalar>(table, row, x.x[j], weight.x[j], bias.x[j]);
            }
            return y;
        });
    }
};

// --- the kernel ---

// Calls work() with every tile of this thread block, filled and rounded.
template <class Function, int HEIGHT, class Work>
static ZEROCAST_FN void for_each_tile(FusedTile<HEIGHT>& tile, i64 tiles_per_unit,
                                      const Work& work) {
    u32 strips = (u32)(tile.rows + HEIGHT - 1) / HEIGHT;
    u32 across = (u32)(tile.cols + TILE_COLS - 1) / TILE_COLS;
    u32 per_unit = (u32)tiles_per_unit, groups = (across + per_unit - 1) / per_unit;
    for (u32 unit = blockIdx.x; unit < strips * groups; unit += gridDim.x) {
        u32 first = unit % groups * per_unit;
        u32 last = first + per_unit < across ? first + per_unit : across;
        tile.tile_row = (int)(unit / groups) * HEIGHT;
        Function::open(tile, first == 0);
        for (u32 n = first; n < last; n++) {
            tile.tile_col = (int)n * TILE_COLS;
            Function::fill(tile);
            tile.round();
            work();
        }
    }
}

template <class Numerics>
static ZEROCAST_FN Numerics numerics_of_task(const FusedTask& task) {
    if constexpr (SAME<Numerics, NoNumerics>)
        return {};
    else
        return numerics_of<Numerics>(task.numerics, task.tensor_amax, task.delayed);
}

template <class Function, class Numerics, int HEIGHT>
__global__ void __launch_bounds__(FusedTile<HEIGHT>::THREADS,
                                  HEIGHT == TALL ? 1 : Function::RESIDENT)
    fused_op(const __grid_constant__ FusedTask task) {
    // NVFP4's scales are made from the amax that an earlier launch has raised.
    constexpr bool RAISES = !SAME<Numerics, NVFP4Numerics>;
    __shared__ TileMemory<HEIGHT> memory;
    if (!RAISES && task.amax && blockIdx.x == 0 && threadIdx.x == 0) *task.amax = *task.tensor_amax;
    auto numerics = numerics_of_task<Numerics>(task);
    FusedTile<HEIGHT> tile(task.table, memory);
    for_each_tile<Function>(tile, task.tiles_per_unit, [&] {
        if (RAISES && task.tensor_amax) {
            i32 largest = __reduce_max_sync(ALL_LANES, tile.largest());
            if (threadIdx.x % LANES == 0 && largest > 0)
                atomicMax(task.tensor_amax, rounded_amax(largest, NOMINAL_FP32));
        }
#pragma unroll
        for (int p = 0; p < 2; p++) PlaneOfTile<HEIGHT>(task.planes[p], tile).cast(numerics);
    });
}
