// dequantize: decode whole weights to FP32.
#include "arithmetic/scaling.h"
#include "cpu/simd.h"
#include "cpu/strips.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {
namespace {

// Columns [begin, end) of one row. ONE multiplier serves all of them, or each has its own.
template <class F, bool ONE>
ZEROCAST_FN void decode_run(const u8* codes, i64 begin, i64 end, const float* multipliers,
                            float* out) {
    constexpr int W = Native::WIDTH;
    i64 c = begin;
    if (F::BITS == 8 || c % 2 == 0) {
        for (; c + W <= end; c += W) {
            Native::Int code;
            if constexpr (F::BITS == 4) {
                code = load_nibbles<Native>(codes + c / 2);
            } else {
                code = load_bytes<Native>(codes + c);
            }
            auto multiplier =
                ONE ? Native::splat(multipliers[0]) : Native::load(multipliers + c - begin);
            Native::store(out + c, scaled<Native>(decode<F, Native>(code), multiplier));
        }
    }
    for (; c < end; c++) {
        i32 code = F::BITS == 8 ? codes[c] : codes[c / 2] >> 4 * (c & 1) & 0xF;
        out[c] = scaled<Scalar>(decode<F, Scalar>(code), multipliers[ONE ? 0 : c - begin]);
    }
}

// Whole rows of a weight: elements [begin, end). multiplier(stored scale) decodes one block.
template <class F, class Stored, class Multiplier>
void decode_rows(const DequantizeTarget& target, i64 begin, i64 end, const Multiplier& multiplier) {
    const Grid& grid = target.plane.grid;
    i64 down = target.plane.down(), right = target.plane.right();
    i64 row_bytes = (grid.cols * F::BITS + 7) / 8, blocks_w = grid.blocks_w();
    float multipliers[STRIP_BLOCKS];
    auto open = [&](const Strip& strip) {
        i64 row = strip.first_block / blocks_w, col = strip.first_block % blocks_w;
        auto stored = (const Stored*)target.plane.scale_inv + row * down;
        for (i64 b = 0; b < strip.blocks; b++)
            multipliers[b] = multiplier(stored[(col + b) * right]);
    };
    auto work = [&](const Strip& strip, const Panel& panel) {
        i64 row = panel.element / grid.cols;
        for (i64 r = row; r < row + panel.rows; r++) {
            const u8* codes = target.codes + r * row_bytes;
            float* out = target.out + r * grid.cols;
            if (grid.block_w == 1) {
                decode_run<F, false>(codes, strip.col, strip.col_end, multipliers, out);
                continue;
            }
            i64 c = strip.col;
            for (i64 b = 0; b < strip.blocks; b++, c += grid.block_w) {
                i64 c_end = min_of(c + grid.block_w, grid.cols);
                decode_run<F, true>(codes, c, c_end, multipliers + b, out);
            }
        }
    };
    for_each_strip(grid, Region{begin, end}, open, work, [](const Strip&) {});
}

template <class F>
void mx_rows(const DequantizeTarget& target, i64 begin, i64 end) {
    decode_rows<F, u8>(target, begin, end, [](u8 stored) { return decode_e8m0<Scalar>(stored); });
}

template <class F>
void float8_rows(const DequantizeTarget& target, bool e8m0, i64 begin, i64 end) {
    if (e8m0)
        mx_rows<F>(target, begin, end);
    else
        decode_rows<F, float>(target, begin, end, [](float scale_inv) { return scale_inv; });
}

void nvfp4_rows(const DequantizeTarget& target, i64 scale_max, i64 begin, i64 end) {
    float amax = *target.amax;
    decode_rows<E2M1, u8>(target, begin, end, [=](u8 stored) {
        return nvfp4_decode_multiplier<Scalar>(stored, amax, scale_max);
    });
}

}  // namespace
}  // namespace ZEROCAST_ISA
}  // namespace zerocast

ZEROCAST_EXPORT(dequantize)(const void* numerics, const void* table, long long count,
                            long long threads) {
    using namespace zerocast;
    auto& numerics_table = *(const NumericsTable*)numerics;
    bool e8m0 = numerics_table.kind == NUMERICS_MX;
    auto elements = [](const DequantizeTarget& t, i64) {
        return Span{0, t.plane.grid.numel(), t.plane.grid.cols};
    };
    share_in_parallel<DequantizeTarget>(
        table, count, threads, elements,
        [&](const DequantizeTarget& target, i64 begin, i64 end, i64) {
            if (numerics_table.kind == NUMERICS_NVFP4)
                nvfp4_rows(target, numerics_table.scale_max, begin, end);
            else if (numerics_table.format == FORMAT_E2M1)
                mx_rows<E2M1>(target, begin, end);
            else if (numerics_table.format == FORMAT_E4M3)
                float8_rows<E4M3>(target, e8m0, begin, end);
            else
                float8_rows<E5M2>(target, e8m0, begin, end);
        });
}
