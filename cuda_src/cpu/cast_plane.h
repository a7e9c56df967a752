// The codes of one shard over one grid of blocks: what partial_cast is made of.
#pragma once

#include <string.h>

#include "arithmetic/masters.h"
#include "cpu/encoders.h"
#include "cpu/numerics.h"
#include "cpu/strips.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// The size of a block that all elements of a piece are in.
constexpr int ONE_BLOCK = 1 << 30;

// Encodes by Encoder what was read as T, rounded to Rounded and multiplied.
template <class T, class Rounded, class Encoder>
class PlaneCast {
  public:
    PlaneCast(const CastShard& shard, const T* master, const CodePlane& plane,
              const BlockMultipliers& multipliers, const Encoder& encoder, i64 ahead,
              bool streams = false)
        : plane_(plane),
          choices_(shard.candidates.choices),
          codes_start_(shard.codes_start),
          master_(master),
          multipliers_(multipliers),
          encoder_(encoder),
          ahead_(ahead),
          streams_(streams) {}

    const Grid& grid() const { return plane_.grid; }

    void operator()(const Region& region) const {
        float multipliers[STRIP_BLOCKS];
        if (grid().num_blocks() == 1 && encoder_.spans_rows()) {
            bool positive = fill_multipliers(0, 1, multipliers);
            run(region.begin, master_ + region.begin, region.end - region.begin, *multipliers,
                positive);
            return;
        }
        bool positive = false;
        auto open = [&](const Strip& strip) {
            positive = fill_multipliers(strip.first_block, strip.blocks, multipliers);
        };
        auto work = [&](const Strip&, const Panel& panel) {
            const T* x = master_ + panel.element;
            for (i64 r = 0; r < panel.rows; r++) {
                cast_row(panel.element + r * grid().cols, x + r * grid().cols, panel.col,
                         panel.count, multipliers, positive);
            }
        };
        for_each_strip(grid(), region, open, work, [](const Strip&) {});
    }

    // What the elements of `count` blocks side by side are multiplied by. Returns whether all are
    // positive, neither NaN nor 0.
    bool fill_multipliers(i64 first_block, i64 count, float* multipliers) const {
        const u8* choices = choices_ ? choices_ + first_block : nullptr;
        return multipliers_.fill(plane_.block_amax + first_block, choices, count, multipliers);
    }

    // n elements from x on under one multiplier. `positive`: neither NaN nor 0.
    void run(i64 element, const T* x, i64 n, float multiplier, bool positive) const {
        i64 end = element + n;
        while (element < end && !encoder_.starts_group(element))
            single(element++, *x++, multiplier);
        i64 grouped = groups<ONE_BLOCK>(element, x, end - element, &multiplier, positive);
        element += grouped;
        x += grouped;
        u8* to = codes(element);
        i64 left = end - element;
        if (left > 1) {  // what is no whole group goes through buffers of one
            T last[GROUP] = {};
            u8 last_codes[GROUP];
            memcpy(last, x, left * sizeof(T));
            Native::Int code[4];
            group<ONE_BLOCK>(end - left, last, &multiplier, positive, code);
            store(last_codes, code);
            memcpy(to, last_codes, bytes(left));
        }
        if (left == 1 || bytes(left) * 8 != left * F::BITS)
            single(end - 1, x[left - 1], multiplier);
    }

    // count elements of one row from x on, the first of them col columns into the strip. `positive`
    // says that all multipliers are.
    void cast_row(i64 element, const T* x, i64 col, i64 count, const float* multipliers,
                  bool positive) const {
        i64 block_w = grid().block_w;
        const float* multiplier = multipliers + col / block_w;
        i64 in_block = col % block_w;
        if (in_block == 0 && encoder_.starts_group(element)) {  // except at the start of a shard
            i64 done = block_w == 16   ? groups<16>(element, x, count, multiplier, positive)
                       : block_w == 32 ? groups<32>(element, x, count, multiplier, positive)
                       : block_w == 1  ? groups<1>(element, x, count, multiplier, positive)
                                       : 0;
            multiplier += done / block_w;
            element += done;
            x += done;
            count -= done;
        }
        while (count > 0) {
            i64 n = min_of(block_w - in_block, count);
            run(element, x, n, *multiplier, positive);
            multiplier++;
            element += n;
            x += n;
            count -= n;
            in_block = 0;
        }
    }

    // GROUP elements from x on, the first of a block of BLOCK or in its middle.
    template <int BLOCK>
    ZEROCAST_FN void cast_group(i64 element, const T* x, const float* multiplier,
                                bool positive) const {
        Native::Int code[4];
        group<BLOCK>(element, x, multiplier, positive, code);
        u8* to = codes(element);
        store(to, code, streams(to));
    }

    // Codes of whole bytes, from this element on, to where they stay.
    template <class Word, int N>
    ZEROCAST_FN void put(i64 element, const Word (&made)[N]) const {
        u8* to = codes(element);
        for (int i = 0; i < N; i++, to += sizeof(Word))
            write(to, made[i], streams_ && (u64)to % sizeof(Word) == 0);
    }

    // Whether GROUP elements from this one on can be encoded together.
    ZEROCAST_FN bool starts_group(i64 element) const { return encoder_.starts_group(element); }
    ZEROCAST_FN static i64 bytes(i64 elements) { return F::BITS == 4 ? elements >> 1 : elements; }
    ZEROCAST_FN u8* codes(i64 element) const {
        return plane_.codes + bytes(element - codes_start_);
    }
    ZEROCAST_FN const T* master(i64 element) const { return master_ + element; }
    ZEROCAST_FN i64 ahead() const { return ahead_; }
    // Whether codes from this place on, a multiple of GROUP of them, go past the caches.
    ZEROCAST_FN bool streams(const u8* to) const { return streams_ && (u64)to % BYTES == 0; }
    // GROUP codes that start with a whole byte.
    ZEROCAST_FN static void store(u8* to, const Native::Int (&codes)[4], bool streams = false) {
        if constexpr (F::BITS == 4) {
            Nibbles nibbles;
            store_nibbles((u8*)&nibbles, pack(codes));
            write(to, nibbles, streams);
        } else {
            write(to, pack(codes), streams);
        }
    }
    template <class Word>
    ZEROCAST_FN static void write(u8* to, Word bytes, bool streams) {
        if (streams)
            stream<sizeof bytes>(to, (const u8*)&bytes);
        else
            Native::store(to, bytes);
    }

  private:
    typedef typename Encoder::Format F;
    static constexpr int W = Native::WIDTH, BYTES = GROUP * F::BITS / 8;

    // Whether groups without a NaN have a separate path: of E2M1 it would hardly be faster.
    static constexpr bool SKIPS_NAN = F::BITS == 8;

    CodePlane plane_;
    const u8* choices_;
    i64 codes_start_;
    const T* master_;  // as if it were the whole weight
    BlockMultipliers multipliers_;
    Encoder encoder_;
    i64 ahead_;  // how many elements after one that is read another is asked for
    bool streams_;

    // The whole groups of a row; returns how many elements they hold.
    template <int BLOCK>
    ZEROCAST_FN i64 groups(i64 element, const T* x, i64 count, const float* multiplier,
                           bool positive) const {
        i64 grouped = count / GROUP * GROUP;
        for (i64 i = 0; i < grouped; i += GROUP) {
            if (positive || !SKIPS_NAN)
                i += groups_of_numbers<BLOCK>(element + i, x + i, grouped - i,
                                              multiplier + i / BLOCK);
            if (i == grouped) break;
            prefetch(x + i, ahead_);
            Native::Int code[4];
            group<BLOCK>(element + i, x + i, multiplier + i / BLOCK, positive, code);
            store(codes(element + i), code);
        }
        return grouped;
    }

    // The whole groups under positive multipliers, up to the first NaN if SKIPS_NAN; returns how
    // many elements they hold. The loop calls no function, so that constants stay in registers.
    template <int BLOCK>
    ZEROCAST_FN i64 groups_of_numbers(i64 element, const T* x, i64 count,
                                      const float* multiplier) const {
        u8* to = codes(element);
        i64 i = 0, ahead = ahead_;
        for (; i < count; i += GROUP) {
            prefetch(x + i, ahead);
            Native::Int code[4];
            if constexpr (SKIPS_NAN) {
                if (!encode_numbers<BLOCK>(x + i, multiplier + i / BLOCK, code)) break;
            } else {
                encode_any<BLOCK>(element + i, x + i, multiplier + i / BLOCK, code);
            }
            store(to + bytes(i), code);
        }
        return i;
    }

    // What register i of a group is multiplied by, with a multiplier for each BLOCK elements.
    template <int BLOCK>
    static ZEROCAST_FN Native::Float multipliers_of(const float* multiplier, int i) {
        return BLOCK == 1 ? Native::load(multiplier + i * W)
                          : Native::splat(multiplier[i * W / BLOCK]);
    }

    // The codes of GROUP elements under positive multipliers; returns whether there are any: not
    // where one element is a NaN.
    template <int BLOCK>
    static ZEROCAST_FN bool encode_numbers(const T* x, const float* multiplier,
                                           Native::Int (&code)[4]) {
        Native::Float loaded[4];
        for (int i = 0; i < 4; i++) loaded[i] = load_of(x, i);
        if (any_nan(loaded)) return false;
        for (int i = 0; i < 4; i++) {
            auto rounded = Rounding<Rounded, Native>::of_number(loaded[i]);
            code[i] = encode_number<F, Native>(rounded * multipliers_of<BLOCK>(multiplier, i));
        }
        return true;
    }

    // The codes of GROUP elements.
    template <int BLOCK>
    ZEROCAST_FN void group(i64 element, const T* x, const float* multiplier, bool positive,
                           Native::Int (&code)[4]) const {
        if constexpr (SKIPS_NAN) {
            if (positive && encode_numbers<BLOCK>(x, multiplier, code)) return;
        }
        encode_any<BLOCK>(element, x, multiplier, code);
    }

    // The codes of GROUP elements, whatever they and the multipliers are.
    template <int BLOCK>
    ZEROCAST_FN void encode_any(i64 element, const T* x, const float* multiplier,
                                Native::Int (&code)[4]) const {
        Native::Float scaled[4];
        for (int i = 0; i < 4; i++) {
            auto rounded = round_to<Rounded, Native>(load_of(x, i));
            scaled[i] = rounded * multipliers_of<BLOCK>(multiplier, i);
        }
        encoder_.group(element, scaled, code);
    }

    ZEROCAST_FN void single(i64 element, T master, float multiplier) const {
        float x = round_to<Rounded, Scalar>(value_of(master));
        u8 code = (u8)encoder_.single(element, x * multiplier);
        u8* to = codes(element);
        if constexpr (F::BITS == 4) {
            bool odd = (element - codes_start_) & 1;
            code = odd ? (*to & 0x0F) | code << 4 : (*to & 0xF0) | code;
        }
        *to = code;
    }
};

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
