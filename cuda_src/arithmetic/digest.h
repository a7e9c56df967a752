// The digest of bytes:
//
//     digest = sum over words w of word[w] * key(w)   mod 2^64
//
// Words are 32 bits, little-endian and unsigned, counted from the first byte of the whole tensor;
// keys are odd, 64 bits of a word's place. docs/NUMERICS.md says what it is good for.
#pragma once

#include "arithmetic/lanes.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// Words in a row: their keys differ by the column's factor, those of two rows by the rows'.
constexpr i64 DIGEST_ROW = 1024;
constexpr i64 DIGEST_ROW_BYTES = 4 * DIGEST_ROW;

// The finalizer of SplitMix64 of number + 1 times the golden ratio's bits, with arithmetic shifts
// and one round less; odd.
ZEROCAST_FN constexpr u64 mixed(i64 number) {
    u64 bits = (u64)(number + 1) * 0x9E3779B97F4A7C15u;
    bits = (bits ^ (u64)((i64)bits >> 32)) * 0xBF58476D1CE4E5B9u;
    return (bits ^ (u64)((i64)bits >> 29)) | 1;
}

// key(w) is row_factor(w / DIGEST_ROW) * column_factor(w % DIGEST_ROW). Of columns 32 bits are
// taken: a product with a word is one multiplication then.
ZEROCAST_FN constexpr u64 row_factor(i64 row) { return mixed(row); }
ZEROCAST_FN constexpr u32 column_factor(i64 column) {
    return (u32)(mixed(column - DIGEST_ROW) >> 32) | 1;
}

// What a byte at this place of the tensor adds to the digest, if it stands there instead of
// another.
ZEROCAST_FN u64 digest_of_change(u8 byte, u8 instead_of, i64 place) {
    i64 word = place / 4;
    u64 key = row_factor(word / DIGEST_ROW) * column_factor(word % DIGEST_ROW);
    return ((u64)((i64)byte - instead_of) << place % 4 * 8) * key;
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
