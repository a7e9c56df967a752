// The copies of codes into the buffer in which they travel, and out of it: a rank's own, or that of
// another process.
#pragma once

#include "arithmetic/lanes.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// Bytes of a weight's codes, and their place in the buffer in which they travel.
struct CopyTarget {
    u8* codes;
    i64 staged;  // their first byte in the buffer
    i64 bytes;
    i64 first;  // the place of the first in the whole weight's codes
    u64* sum;   // that their digest is added to, or null
};
static_assert(sizeof(CopyTarget) == 5 * sizeof(i64), "a row that Python writes");

// A buffer in the memory of another process, which holds the random number `token` at
// `token_address`. Another process that is found by the same number does not hold it there.
struct PeerBuffer {
    i64 process;
    u64 address;
    u64 token_address;
    u64 token;
    i64 error;  // written: 0, or the errno of what could not be read
};
static_assert(sizeof(PeerBuffer) == 5 * sizeof(i64), "a row that Python writes");

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
