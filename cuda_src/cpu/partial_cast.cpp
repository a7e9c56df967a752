// partial_cast: round, scale and encode this rank's elements into their codes; every other nibble
// keeps its value.
#include <string.h>

#include <zerocast/scaling.h>

#include "laws.h"
#include "pack.h"
#include "strips.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {
namespace {

// One shard under one law: F is the format of the codes, Rounded what the master is rounded to.
template <class Law, class Rounded>
class Cast {
  public:
    Cast(const CastShard& shard, const Law& law)
        : shard_(shard), law_(law), master_(*shard.master - shard.start) {}

    void operator()(i64 begin, i64 end) const {
        if (shard_.grid.num_blocks() == 1) {
            run(begin, end - begin, law_.template multiplier<Scalar>(shard_.block_amax[0]));
            return;
        }
        float multipliers[STRIP_BLOCKS];
        auto open = [&](const Strip& strip) { fill_multipliers(strip, multipliers); };
        auto work = [&](const Strip&, const Panel& panel) {
            for (i64 r = 0; r < panel.rows; r++) {
                cast_row(panel.element + r * shard_.grid.cols, panel.col, panel.count, multipliers);
            }
        };
        for_each_strip(shard_.grid, begin, end, open, work, [](const Strip&) {});
    }

  private:
    typedef typename Law::Format F;
    static constexpr int W = Native::WIDTH;

    const CastShard& shard_;
    Law law_;
    const float* master_;  // as if it were the whole weight

    void fill_multipliers(const Strip& strip, float* multipliers) const {
        const i32* amax = shard_.block_amax + strip.first_block;
        i64 b = 0;
        for (; b + W <= strip.blocks; b += W) {
            Native::store(multipliers + b,
                          law_.template multiplier<Native>(Native::load_as<Native::Int>(amax + b)));
        }
        for (; b < strip.blocks; b++) multipliers[b] = law_.template multiplier<Scalar>(amax[b]);
    }

    // count elements of one row, the first of them col columns into the strip.
    ZEROCAST_FN void cast_row(i64 element, i64 col, i64 count, const float* multipliers) const {
        i64 block_w = shard_.grid.block_w;
        const float* multiplier = multipliers + col / block_w;
        i64 in_block = col % block_w;
        if (block_w == 16 && in_block == 0
            && whole_bytes(element)) {  // NVFP4, but for the start of a shard
            i64 grouped = count / GROUP * GROUP;
            const float* x = master_ + element;
            u8* to = codes(element);
            for (i64 i = 0; i < grouped; i += GROUP) {
                prefetch(x + i);
                group<16>(x + i, multiplier + i / 16, to + bytes(i));
            }
            multiplier += grouped / 16;
            element += grouped;
            count -= grouped;
        }
        while (count > 0) {
            i64 n = min_of(block_w - in_block, count);
            run(element, n, *multiplier);
            multiplier++;
            element += n;
            count -= n;
            in_block = 0;
        }
    }

    // n elements under one multiplier.
    ZEROCAST_FN void run(i64 element, i64 n, float multiplier) const {
        i64 end = element + n;
        if (!whole_bytes(element) && element < end) single(element++, multiplier);
        const float* x = master_ + element;
        u8* to = codes(element);
        i64 left = end - element;
        for (; left >= GROUP; left -= GROUP, x += GROUP, to += bytes(GROUP)) {
            prefetch(x);
            group<GROUP>(x, &multiplier, to);
        }
        if (left > 1) {  // what is no whole group goes through buffers of one
            float last[GROUP] = {};
            u8 last_codes[GROUP];
            memcpy(last, x, left * sizeof(float));
            group<GROUP>(last, &multiplier, last_codes);
            memcpy(to, last_codes, bytes(left));
        }
        if (left == 1 || bytes(left) * 8 != left * F::BITS) single(end - 1, multiplier);
    }

    // GROUP elements, a multiplier for each BLOCK of them.
    template <int BLOCK>
    ZEROCAST_FN static void group(const float* x, const float* multiplier, u8* to) {
        Native::Int code[4];
        for (int i = 0; i < 4; i++) {
            auto rounded = round_to<Rounded, Native>(Native::load(x + i * W));
            code[i] = encode<F, Native>(rounded * Native::splat(multiplier[i * W / BLOCK]));
        }
        if constexpr (F::BITS == 4)
            store_nibbles(to, code);
        else
            store_bytes(to, code);
    }

    ZEROCAST_FN void single(i64 element, float multiplier) const {
        u8 code = (u8)encode<F, Scalar>(round_to<Rounded, Scalar>(master_[element]) * multiplier);
        u8* to = codes(element);
        if constexpr (F::BITS == 4) {
            bool odd = (element - shard_.codes_start) & 1;
            code = odd ? (*to & 0x0F) | code << 4 : (*to & 0xF0) | code;
        }
        *to = code;
    }

    ZEROCAST_FN bool whole_bytes(i64 element) const {
        return F::BITS == 8 || ((element - shard_.codes_start) & 1) == 0;
    }
    ZEROCAST_FN static i64 bytes(i64 elements) { return F::BITS == 4 ? elements >> 1 : elements; }
    ZEROCAST_FN u8* codes(i64 element) const {
        return shard_.codes + bytes(element - shard_.codes_start);
    }
};

}  // namespace
}  // namespace ZEROCAST_ISA
}  // namespace zerocast

ZEROCAST_EXPORT(partial_cast)(const void* law, const void* table, long long count,
                              long long threads) {
    using namespace zerocast;
    auto shards = (const CastShard*)table;
    auto whole = [](const CastShard& shard) { return shard_span(shard, 1); };
    i64 total = total_elements(shards, count, whole);
    if (total == 0) return;
    in_parallel(total, threads, [&](i64 part, i64 parts) {
        auto span = [&](const CastShard& shard) { return shard_span(shard, parts); };
        share(shards, count, total, part, parts, span,
              [&](const CastShard& shard, i64 begin, i64 end) {
                  with_law(*(const LawTable*)law, shard.tensor_amax, [&](auto law) {
                      typedef decltype(law) Law;
                      if (shard.round_to == NOMINAL_BF16)
                          Cast<Law, Bf16>(shard, law)(begin, end);
                      else if (shard.round_to == NOMINAL_FP16)
                          Cast<Law, Fp16>(shard, law)(begin, end);
                      else
                          Cast<Law, Fp32>(shard, law)(begin, end);
                  });
              });
    });
}
