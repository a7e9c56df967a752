// partial_amax: raise block and tensor amaxes to the largest magnitudes of this rank's rounded
// elements.
//
// Rounding is monotonic, so the largest rounded magnitude is the rounded largest: the loop takes
// integer maxima of magnitudes and nothing else (a NaN is the largest of all), and rounds once a
// block.
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
    for (; i + W <= n; i += W) largest = Native::max(largest, magnitudes(x + i));
    for (; i < n; i++) largest[0] = Scalar::max(largest[0], Scalar::bits(x[i]) & MAGNITUDE_MASK);
    return largest;
}

// One long run: four independent maxima, so that the loop waits for memory and not for itself.
ZEROCAST_FN i32 largest_of(const float* x, i64 n) {
    constexpr int W = Native::WIDTH;
    Int a{}, b{}, c{}, d{};
    i64 i = 0;
    for (; i + 4 * W <= n; i += 4 * W) {
        prefetch(x + i);
        a = Native::max(a, magnitudes(x + i));
        b = Native::max(b, magnitudes(x + i + W));
        c = Native::max(c, magnitudes(x + i + 2 * W));
        d = Native::max(d, magnitudes(x + i + 3 * W));
    }
    a = Native::max(Native::max(a, b), Native::max(c, d));
    return reduce_max<Native>(raise(a, x + i, n - i));
}

// What enters the buffer for a block whose largest magnitude has these bits.
template <class L>
ZEROCAST_FN typename L::Int rounded(typename L::Int magnitude, i64 nominal) {
    typename L::Float x = L::value(magnitude);
    if (nominal == NOMINAL_BF16) x = round_to<Bf16, L>(x);
    if (nominal == NOMINAL_FP16) x = round_to<Fp16, L>(x);
    return magnitude_bits<L>(x);
}

// Another thread may raise the same slot at the same time.
void raise_shared(i32* slot, i32 value) {
    i32 seen = __atomic_load_n(slot, __ATOMIC_RELAXED);
    while (seen < value
           && !__atomic_compare_exchange_n(slot, &seen, value, true, __ATOMIC_RELAXED,
                                           __ATOMIC_RELAXED)) {
    }
}

void one_block(const CastShard& shard, i64 begin, i64 end) {
    i32 amax = rounded<Scalar>(largest_of(*shard.master + (begin - shard.start), end - begin),
                               shard.round_to);
    raise_shared(shard.block_amax, amax);
    raise_shared(shard.tensor_amax, amax);
}

// ROWS rows of a panel whose blocks are 16 wide and whole. More than one, so that a block's maxima
// are fetched and stored less often.
template <int ROWS>
ZEROCAST_FN void raise_rows(Int* largest, const Grid& grid, const Panel& panel, const float* x) {
    for (i64 c = 0; c < panel.count; c += 16) {
        Int in_block = largest[c / 16];
        for (int r = 0; r < ROWS; r++) {
            const float* at = x + r * grid.cols + c;
            __builtin_prefetch(at + PREFETCH_AHEAD / ROWS);
            in_block = raise(in_block, at, 16);
        }
        largest[c / 16] = in_block;
    }
}

// The elements of one panel, into the maxima of the strip's blocks.
void raise_panel(Int* largest, const Grid& grid, const Panel& panel, const float* x) {
    i64 block = panel.col / grid.block_w, in_block = panel.col % grid.block_w;
    if (grid.block_w == 16 && in_block == 0
        && panel.count % 16 == 0) {  // NVFP4, but for the ends of a shard
        i64 r = 0;
        for (; r + 4 <= panel.rows; r += 4, x += 4 * grid.cols)
            raise_rows<4>(largest + block, grid, panel, x);
        for (; r < panel.rows; r++, x += grid.cols) raise_rows<1>(largest + block, grid, panel, x);
        return;
    }
    for (i64 r = 0; r < panel.rows; r++, x += grid.cols) {
        i64 n = min_of(grid.block_w - in_block, panel.count);
        for (i64 c = 0, b = block; c < panel.count;
             c += n, b++, n = min_of(grid.block_w, panel.count - c)) {
            largest[b] = raise(largest[b], x + c, n);
        }
    }
}

// The maxima of a strip's blocks into the buffer, a register of blocks at a time; returns the
// largest of all.
i32 flush(Int* largest, i64 blocks, i32* slots, i64 nominal, bool shared) {
    constexpr int W = Native::WIDTH;
    Int strip{};
    for (i64 b = 0; b < blocks; b += W) {
        Int amax = rounded<Native>(reduce_max_each<Native>(largest + b), nominal);
        strip = Native::max(strip, amax);
        if (!shared && b + W <= blocks) {
            Native::store(slots + b, Native::max(Native::load_as<Int>(slots + b), amax));
        } else {
            for (i64 i = 0; i < min_of(W, blocks - b); i++) raise_shared(slots + b + i, amax[i]);
        }
    }
    return reduce_max<Native>(strip);
}

void many_blocks(const CastShard& shard, i64 begin, i64 end, bool cut_in_blocks) {
    const float* master = *shard.master - shard.start;
    Int largest[STRIP_BLOCKS];  // by block; all that flush takes together are set, the last ones
                                // unused
    i32 tensor = 0;
    auto open = [&](const Strip& strip) {
        for (i64 b = 0; b < min_of(STRIP_BLOCKS, strip.blocks + Native::WIDTH); b++)
            largest[b] = Int{};
    };
    auto work = [&](const Strip&, const Panel& panel) {
        raise_panel(largest, shard.grid, panel, master + panel.element);
    };
    auto close = [&](const Strip& strip) {
        i32* slots = shard.block_amax + strip.first_block;
        tensor =
            Scalar::max(tensor, flush(largest, strip.blocks, slots, shard.round_to, cut_in_blocks));
    };
    for_each_strip(shard.grid, begin, end, open, work, close);
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
        share(shards, count, total, part, parts, span,
              [&](const CastShard& shard, i64 begin, i64 end) {
                  if (shard.grid.num_blocks() == 1) return one_block(shard, begin, end);
                  many_blocks(shard, begin, end, parts > 1 && !cut_between_blocks(shard, parts));
              });
    });
}
