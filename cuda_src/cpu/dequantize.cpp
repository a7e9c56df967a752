// dequantize: decode whole weights to FP32.
#include <zerocast/scaling.h>

#include "launch.h"
#include "simd.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {
namespace {

// Rows [first, last) of a weight whose codes are of format F; multiplier(block row, block column)
// decodes one block.
template <class F, class Multiplier>
void rows(const DequantizeTarget& target, i64 first, i64 last, const Multiplier& multiplier) {
    const Grid& grid = target.grid;
    constexpr int W = Native::WIDTH;
    i64 row_bytes = F::BITS == 4 ? (grid.cols + 1) / 2 : grid.cols;
    for (i64 r = first; r < last; r++) {
        const u8* codes = target.codes + r * row_bytes;
        float* out = target.out + r * grid.cols;
        for (i64 begin = 0, b = 0; begin < grid.cols; begin += grid.block_w, b++) {
            float by = multiplier(r / grid.block_h, b);
            i64 end = min_of(begin + grid.block_w, grid.cols), c = begin;
            if constexpr (F::BITS == 8) {
                for (; c + W <= end; c += W) {
                    auto value = decode<F, Native>(load_bytes<Native>(codes + c));
                    Native::store(out + c, scaled<Native>(value, Native::splat(by)));
                }
            }
            for (; c < end; c++) {
                i32 code = F::BITS == 8 ? codes[c] : codes[c / 2] >> 4 * (c & 1) & 0xF;
                out[c] = scaled<Scalar>(decode<F, Scalar>(code), by);
            }
        }
    }
}

template <class F>
void float8_rows(const DequantizeTarget& target, i64 first, i64 last) {
    auto plane = (const float*)target.scale_inv;
    rows<F>(target, first, last,
            [&](i64 i, i64 b) { return plane[i * target.row_repeat * target.padded_cols + b]; });
}

void nvfp4_rows(const DequantizeTarget& target, i64 first, i64 last) {
    auto plane = (const u8*)target.scale_inv;
    rows<E2M1>(target, first, last, [&](i64 i, i64 b) {
        return nvfp4_decode_multiplier<Scalar>(
            plane[i * target.row_repeat * target.padded_cols + b], *target.amax);
    });
}

}  // namespace
}  // namespace ZEROCAST_ISA
}  // namespace zerocast

ZEROCAST_EXPORT(dequantize)(const void* law, const void* table, long long count,
                            long long threads) {
    using namespace zerocast;
    auto targets = (const DequantizeTarget*)table;
    i64 format = ((const LawTable*)law)->format;
    auto elements = [](const DequantizeTarget& t) { return Span{0, t.grid.numel(), t.grid.cols}; };
    i64 total = total_elements(targets, count, elements);
    in_parallel(total, threads, [&](i64 part, i64 parts) {
        share(targets, count, total, part, parts, elements,
              [&](const DequantizeTarget& target, i64 begin, i64 end) {
                  i64 first = begin / target.grid.cols, last = end / target.grid.cols;
                  if (format == FORMAT_E2M1)
                      nvfp4_rows(target, first, last);
                  else if (format == FORMAT_E4M3)
                      float8_rows<E4M3>(target, first, last);
                  else
                      float8_rows<E5M2>(target, first, last);
              });
    });
}
