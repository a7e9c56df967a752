// The digest of bytes:
//
//     digest = sum over halfwords h of halfword[h] * key(h)   mod 2^64
//
// Halfwords are 16 bits, little-endian and signed, counted from the first byte of the whole tensor.
// docs/numerics.md says what it is good for.
#pragma once

#include "arithmetic/lanes.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// Bytes of a row of keys and of a line of it. A lane is what stands at the same four bytes of each
// line of a row: its halfwords are added up, plainly and weighted by 8 bits, which 32 bits hold;
// then it is multiplied by its factors, and the row by its own.
constexpr i64 DIGEST_ROW_BYTES = 4096, DIGEST_LINE_BYTES = 64;
constexpr int DIGEST_LINES = DIGEST_ROW_BYTES / DIGEST_LINE_BYTES, DIGEST_LANES = 16;

// The finalizer of SplitMix64 of number + 1 times the golden ratio's bits, with arithmetic shifts
// and one round less; odd.
ZEROCAST_FN constexpr u64 mixed(i64 number) {
    u64 bits = (u64)(number + 1) * 0x9E3779B97F4A7C15u;
    bits = (bits ^ (u64)((i64)bits >> 32)) * 0xBF58476D1CE4E5B9u;
    return (bits ^ (u64)((i64)bits >> 29)) | 1;
}

// key(h) is row_factor(row) * (plain_factor(lane) + halfword_weight(line, upper) *
// weighted_factor(lane)), an odd number.
ZEROCAST_FN constexpr u64 row_factor(i64 row) { return mixed(row); }
ZEROCAST_FN constexpr i32 plain_factor(i64 lane) {
    return (i32)(mixed(lane - DIGEST_LANES) >> 33) | 1;
}
ZEROCAST_FN constexpr i32 weighted_factor(i64 lane) {
    return (i32)(mixed(lane - 2 * DIGEST_LANES) >> 33) & ~1;
}

// Of the lower or upper halfword of every lane in a line of a row: another one for each halfword of
// a lane, -64 to 63.
ZEROCAST_FN constexpr i32 halfword_weight(i64 line, i64 upper) {
    i64 in_lane = 2 * line + upper;
    return (i32)(in_lane * (2 * in_lane + 1) % 128) - 64;
}

// What a byte at this place of the tensor is multiplied by, as a halfword.
ZEROCAST_FN u64 digest_key(i64 place) {
    i64 in_row = place % DIGEST_ROW_BYTES, lane = in_row % DIGEST_LINE_BYTES / 4;
    i64 weight = halfword_weight(in_row / DIGEST_LINE_BYTES, in_row / 2 % 2);
    i64 factor = plain_factor(lane) + weight * weighted_factor(lane);
    return row_factor(place / DIGEST_ROW_BYTES) * (u64)factor;
}

// What a byte at this place is in its halfword, whose upper byte is signed.
ZEROCAST_FN i64 in_halfword(u8 byte, i64 place) {
    return place % 2 ? (i64)(signed char)byte * 256 : byte;
}

// What a byte at this place of the tensor adds to the digest, if it stands there instead of
// another.
ZEROCAST_FN u64 digest_of_change(u8 byte, u8 instead_of, i64 place) {
    return (u64)(in_halfword(byte, place) - in_halfword(instead_of, place)) * digest_key(place);
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
