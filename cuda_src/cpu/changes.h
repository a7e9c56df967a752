// Notes which elements of a tensor are changed.
#pragma once

#include <string.h>

#include "arithmetic/tables.h"
#include "cpu/column_factors.h"
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
    i64 digest_word = (first + at) / 4;
    if (BYTES % 8 == 0 && (first + at) % BYTES == 0) {  // whole words of one row of the digest
        i64 column = digest_word % DIGEST_ROW;
        auto add = [&](int k) {
            u64 now = Native::load_as<u32>(made + 4 * k),
                before = Native::load_as<u32>(held + 4 * k);
            digest += (now - before) * COLUMN_FACTORS.all[column + k];
        };
        if (__builtin_popcountll(changed) > FEW) {
            for (int k = 0; k < BYTES / 4; k++) add(k);
        } else {
            for (int k; changed; changed &= ~(15ull << 4 * k))
                add(k = __builtin_ctzll(changed) / 4);
        }
        return digest * row_factor(digest_word / DIGEST_ROW);
    }
    for (; changed; changed &= changed - 1) {
        int i = __builtin_ctzll(changed);
        digest += digest_of_change(made[i], held[i], first + at + i);
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
        constexpr int WORDS = Native::WIDTH / 2;  // of 32 bits, that are taken at a time
        typedef u32 Words __attribute__((vector_size(4 * WORDS)));
        auto wide = [](const void* from) {
            return __builtin_convertvector(Native::load_as<Words>(from), Native::Wide);
        };
        u64 digest = 0;
        i64 row = 0;
        Native::Wide sums{};
        auto close_row = [&] {
            u64 total = 0;
            for (int k = 0; k < WORDS; k++) total += sums[k];
            digest += total * row_factor(row);
        };
        for (int i = 0; i < count_; i++) {
            i64 word = (first + places_[i]) / 4;
            if (word / DIGEST_ROW != row) {
                close_row();
                row = word / DIGEST_ROW;
                sums = Native::Wide{};
            }
            const u8* made = made_[i];
            u8* held = codes + places_[i];
            for (int k = 0; k < BYTES / 4; k += WORDS) {
                i64 column = word % DIGEST_ROW + k;
                auto factors = wide(COLUMN_FACTORS.all + column);
                sums += (wide(made + 4 * k) - wide(held + 4 * k)) * factors;
            }
            memcpy(held, made, BYTES);
        }
        close_row();
        count_ = 0;
        return digest;
    }

  private:
    static constexpr int MOST = 64;

    alignas(64) u8 made_[MOST][BYTES];
    i64 places_[MOST];
    int count_ = 0;
};

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
