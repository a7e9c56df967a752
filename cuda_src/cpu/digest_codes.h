// The digests of codes that a cast has just written, while they are in a cache.
#pragma once

#include "cpu/digest_rows.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

ZEROCAST_FN bool takes_digests(const CastShard& shard) {
    return shard.rowwise.sum || shard.columnwise.sum;
}

// Adds those of elements [begin, end) of a shard, of the bytes that hold nothing else, where they
// are asked for.
template <class F>
void digest_elements(const CastShard& shard, i64 begin, i64 end) {
    constexpr i64 IN_BYTE = 8 / F::BITS;
    i64 first = shard.digest_start + shard.codes_start / IN_BYTE;
    i64 from = shard.digest_start + (begin + IN_BYTE - 1) / IN_BYTE;
    i64 to = shard.digest_start + end / IN_BYTE;
    const CodePlane* planes[] = {&shard.rowwise, &shard.columnwise};
    for (const CodePlane* plane : planes)
        if (plane->sum && from < to)
            add_to(plane->sum, digest_rows<IN_CACHE>(plane->codes, first, from, to));
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
