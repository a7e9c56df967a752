// Notes which elements of a tensor are changed.
#pragma once

#include <string.h>

#include "arithmetic/tables.h"
#include "cpu/digest_sum.h"
#include "cpu/simd.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// Adds to what changed so many elements, and what that changes of the digest.
inline void add_changes(const Changes& changes, u64 digest, u64 count) {
    if (!count) return;
    __atomic_fetch_add(changes.digest, digest, __ATOMIC_RELAXED);
    __atomic_fetch_add(changes.digest + 1, count, __ATOMIC_RELAXED);
}

// So many changed bytes take less time one by one than the whole of 64.
constexpr int FEW = 6;

// Notes the bytes `changed`, a bit each from byte `at` on of those that the flags stand for, of
// which the first is byte `first` of the tensor; returns what that changes of the digest. BYTES
// were cast together: a word of flags that stands for just them has no other thread.
template <int BYTES>
__attribute__((noinline)) u64 note_changes(const Changes& changes, i64 at, i64 first,
                                           const u8* made, const u8* held, u64 changed) {
    i64 shift = at % 64;
    u64* word = changes.flags + at / 64;
    if (BYTES == 64 && shift == 0) {
        *word = changed;
    } else {
        __atomic_fetch_or(word, changed << shift, __ATOMIC_RELAXED);
        u64 above = shift ? changed >> (64 - shift) : 0;
        if (above) __atomic_fetch_or(word + 1, above, __ATOMIC_RELAXED);
    }
    u64 digest = 0;
    i64 place = first + at;
    if (BYTES % 8 == 0 && place % BYTES == 0) {  // whole lanes of one line of the digest
        u64 in_row = in_digest_row(place);
        i64 weights[2];
        for (int i = 0; i < 2; i++) weights[i] = halfword_weight(in_row / LINE, i);
        i64 sum = 0;
        auto add = [&](int k) {
            i64 lane = in_row % LINE / 4 + k, plain = 0, weighted = 0;
            for (int i = 0; i < 2; i++) {
                i64 change = Native::load_as<short>(made + 4 * k + 2 * i)
                             - Native::load_as<short>(held + 4 * k + 2 * i);
                plain += change;
                weighted += change * weights[i];
            }
            sum += plain * DIGEST_KEYS.plain[lane] + weighted * DIGEST_KEYS.weighted[lane];
        };
        if (__builtin_popcountll(changed) > FEW) {
            for (int k = 0; k < BYTES / 4; k++) add(k);
        } else {
            for (int k; changed; changed &= ~(15ull << 4 * k))
                add(k = __builtin_ctzll(changed) / 4);
        }
        return (u64)sum * row_factor(place / DIGEST_ROW_BYTES);
    }
    for (; changed; changed &= changed - 1) {
        int i = __builtin_ctzll(changed);
        digest += digest_of_change(made[i], held[i], place + i);
    }
    return digest;
}

// Groups of BYTES bytes that a cast changes, up to MOST of them, flagged but not stored yet.
// Nothing tells which groups change, so a branch for each is guessed wrong as often as one does:
// here all go the same way, and those that change are digested and stored one after the other.
template <int BYTES>
class ChangedGroups {
  public:
    // Flags the bytes `changed` of the group made of byte `at` on, a multiple of BYTES; returns
    // whether there is no room for another one.
    ZEROCAST_FN bool add(const Changes& changes, i64 at, const u8* made, u64 changed) {
        memcpy((u8*)changes.flags + at / 8, &changed, BYTES / 8);
        memcpy(made_[count_], made, BYTES);
        places_[count_] = at;
        count_ += changed != 0;
        return count_ == MOST;
    }

    // Stores them; returns what that changes of the digest. Codes begin with byte `first` of the
    // tensor, a multiple of BYTES.
    __attribute__((noinline)) u64 store(u8* codes, i64 first) {
        Native::Wide digest{};
        i64 row = 0;
        DigestSum now, before;
        auto close_row = [&] { digest += now.digest(row) - before.digest(row); };
        for (int i = 0; i < count_; i++) {
            i64 place = first + places_[i];
            if (place / DIGEST_ROW_BYTES != row) {
                close_row();
                row = place / DIGEST_ROW_BYTES;
                now = before = DigestSum{};
            }
            const u8* made = made_[i];
            u8* held = codes + places_[i];
            add_group(now, made, place);
            add_group(before, held, place);
            memcpy(held, made, BYTES);
        }
        close_row();
        count_ = 0;
        return sum_of(digest);
    }

  private:
    static constexpr int MOST = 64;

    // Adds a group to the sum of a row, as what stands at its place in a line of zeros.
    ZEROCAST_FN static void add_group(DigestSum& sum, const u8* group, i64 place) {
        i64 in_line = place % LINE;
        alignas(LINE) Native::Int line[LINE_REGISTERS] = {};
#if defined(__AVX512F__)
        // At once: a load that takes what two stores wrote waits until both have left the core.
        auto lanes = (__mmask16)(((1u << BYTES / 4) - 1) << in_line / 4);
        line[0] = (Native::Int)_mm512_maskz_loadu_epi32(lanes, group - in_line);
#else
        memcpy((u8*)line + in_line, group, BYTES);
#endif
        sum.add(line, (i64)(in_digest_row(place) / LINE));
    }

    alignas(64) u8 made_[MOST][BYTES];
    i64 places_[MOST];
    int count_ = 0;
};

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
