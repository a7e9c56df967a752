// partial_amax: raise block and tensor amaxes to the largest magnitudes of this rank's rounded elements.
//
// Rounding is monotonic, so the largest rounded magnitude is the rounded largest: the loop takes integer maxima of
// magnitudes and nothing else (a NaN is the largest of all), and rounds once a block.
#include <zerocast/scaling.h>

#include "simd.h"
#include "strips.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {
namespace {

typedef Native::Int Int;

Int magnitudes(const float* x) { return Native::load_as<Int>(x) & MAGNITUDE_MASK; }

// The largest magnitude of x[0, n) and of `largest`, element by element of a register.
ZEROCAST_FN Int raise(Int largest, const float* x, i64 n) {
    constexpr int W = Native::WIDTH;
    i64 i = 0;
    for (; i + W <= n; i += W) largest = max_bits<Native>(largest, magnitudes(x + i));
    for (; i < n; i++) largest[0] = max_bits<Scalar>(largest[0], Scalar::bits(x[i]) & MAGNITUDE_MASK);
    return largest;
}

// One long run: four independent maxima, so that the loop waits for memory and not for itself.
ZEROCAST_FN i32 largest_of(const float* x, i64 n) {
    constexpr int W = Native::WIDTH;
    Int a{}, b{}, c{}, d{};
    i64 i = 0;
    for (; i + 4 * W <= n; i += 4 * W) {
        a = max_bits<Native>(a, magnitudes(x + i));
        b = max_bits<Native>(b, magnitudes(x + i + W));
        c = max_bits<Native>(c, magnitudes(x + i + 2 * W));
        d = max_bits<Native>(d, magnitudes(x + i + 3 * W));
    }
    a = max_bits<Native>(max_bits<Native>(a, b), max_bits<Native>(c, d));
    return reduce_max<Native>(raise(a, x + i, n - i));
}

i32 rounded(i32 magnitude, i64 nominal) {
    float x = Scalar::value(magnitude);
    if (nominal == NOMINAL_BF16) x = round_to<Bf16, Scalar>(x);
    if (nominal == NOMINAL_FP16) x = round_to<Fp16, Scalar>(x);
    return magnitude_bits<Scalar>(x);
}

// Another thread may raise the same slot at the same time.
void raise_shared(i32* slot, i32 value) {
    i32 seen = __atomic_load_n(slot, __ATOMIC_RELAXED);
    while (seen < value
           && !__atomic_compare_exchange_n(slot, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

void one_block(const CastShard& shard, i64 begin, i64 end) {
    i32 amax = rounded(largest_of(*shard.master + (begin - shard.start), end - begin), shard.round_to);
    raise_shared(shard.block_amax, amax);
    raise_shared(shard.tensor_amax, amax);
}

void many_blocks(const CastShard& shard, i64 begin, i64 end, bool cut_in_blocks) {
    const float* master = *shard.master - shard.start;
    const Grid& grid = shard.grid;
    alignas(64) Int largest[STRIP_BLOCKS];
    i32 tensor = 0;
    auto open = [&](const Strip& strip) {
        for (i64 b = 0; b < strip.blocks; b++) largest[b] = Int{};
    };
    auto row = [&](const Strip& strip, i64 element, i64 col, i64 count) {
        const float* x = master + element;
        i64 block = (col - strip.col) / grid.block_w;
        i64 in_block = (col - strip.col) % grid.block_w;
        while (count > 0) {
            i64 n = min_of(grid.block_w - in_block, count);
            if (grid.block_w == 16 && n == 16) {  // NVFP4: a run of whole blocks
                i64 whole = count / 16;
                for (i64 b = 0; b < whole; b++) largest[block + b] = raise(largest[block + b], x + 16 * b, 16);
                block += whole;
                n = 16 * whole;
            } else {
                largest[block] = raise(largest[block], x, n);
                block++;
            }
            x += n;
            count -= n;
            in_block = 0;
        }
    };
    auto close = [&](const Strip& strip) {
        for (i64 b = 0; b < strip.blocks; b++) {
            i32 amax = rounded(reduce_max<Native>(largest[b]), shard.round_to);
            i32* slot = shard.block_amax + strip.first_block + b;
            if (cut_in_blocks) raise_shared(slot, amax);
            else *slot = max_bits<Scalar>(*slot, amax);
            tensor = max_bits<Scalar>(tensor, amax);
        }
    };
    for_each_strip(grid, begin, end, open, row, close);
    raise_shared(shard.tensor_amax, tensor);
}

}  // namespace
}  // namespace ZEROCAST_ISA
}  // namespace zerocast

ZEROCAST_EXPORT(partial_amax)(const void* table, long long count, long long threads) {
    using namespace zerocast;
    auto shards = (const CastShard*)table;
    auto whole = [](const CastShard& shard) { return shard_span(shard, 1); };
    i64 total = total_elements(shards, count, whole);
    if (total == 0) return;
    in_parallel(total, threads, [&](i64 part, i64 parts) {
        auto span = [&](const CastShard& shard) { return shard_span(shard, parts); };
        share(shards, count, total, part, parts, span, [&](const CastShard& shard, i64 begin, i64 end) {
            if (shard.grid.num_blocks() == 1) return one_block(shard, begin, end);
            many_blocks(shard, begin, end, parts > 1 && span(shard).granule == 128);
        });
    });
}
