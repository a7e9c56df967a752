// What all casts of a tile share: where codes lie, and how they are made.
#pragma once

#include "arithmetic/philox.h"
#include "arithmetic/scaling.h"
#include "cuda/conversions.h"
#include "cuda/tiles.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

template <class F>
ZEROCAST_FN i64 bytes_of(i64 elements) {
    return F::BITS == 4 ? elements / 2 : elements;
}

// The byte of a plane that holds an element's code.
template <class F>
ZEROCAST_FN i64 byte_of(const CastShard& shard, i64 element) {
    i64 at =
        element - shard.codes_start;  // negative for elements of the tile that are not of the shard
    return F::BITS == 4 ? at >> 1 : at;
}

// --- encoders: the code of a scaled element, which is element number `element` of its matrix ---

// By rounding to nearest.
template <class F>
struct NearestVec4 {
    static constexpr int RESIDENT = 6;  // thread blocks that share a multiprocessor's registers

    ZEROCAST_FN NearestVec4(const CastShard&, const NumericsTable&) {}

    // Whether vectors may be encoded at once.
    ZEROCAST_FN bool takes_vectors(const Tile&, const Grid&) const { return true; }
    ZEROCAST_FN u32 encode_vec4_at(i64, const Vec4& scaled) const { return encode_vec4<F>(scaled); }
    ZEROCAST_FN u32 encode_at(i64, float scaled) const { return (u32)encode<F, Scalar>(scaled); }
};

// By stochastic rounding.
struct StochasticVec4 {
    static constexpr int RESIDENT = 5;
    RandomDraws draws;
    const RandomBits& random_bits;

    ZEROCAST_FN StochasticVec4(const CastShard& shard, const NumericsTable& numerics)
        : draws((u64)numerics.seed, shard.random_bits.counter), random_bits(shard.random_bits) {}

    // The four elements of a vector are among the eight of one call of Philox where the weight's
    // elements are counted so.
    ZEROCAST_FN bool takes_vectors(const Tile& tile, const Grid& grid) const {
        return tile.element % 4 == 0 && (tile.rows == 1 || grid.cols % 4 == 0)
               && random_bits.keeps_fours();
    }

    // The bits of the four elements of the whole weight that element `index` is one of.
    ZEROCAST_FN u64 draw(i64 index) const {
        u64 eight[2];
        draws.of_eight<Scalar>((u64)index / 8, eight);
        return index & 4 ? eight[1] : eight[0];
    }

    ZEROCAST_FN u32 encode_vec4_at(i64 element, const Vec4& scaled) const {
        u32 codes = 0;
        u64 drawn = draw(random_bits.in_whole(element));
#pragma unroll
        for (int i = 0; i < 4; i++)
            codes |= (u32)encode_e2m1_stochastic<Scalar>(scaled.x[i], (i32)draw_of(drawn, i))
                     << 4 * i;
        return codes;
    }

    ZEROCAST_FN u32 encode_at(i64 element, float scaled) const {
        i64 index = random_bits.in_whole(element);
        u32 mine = draw_of(draw(index), index % 4);
        return (u32)encode_e2m1_stochastic<Scalar>(scaled, (i32)mine);
    }
};

// --- elements at the edges of a shard ---

// Element `at` (and, of nibbles, the next) of a thread's vectors: code_of(i, j) is the code of
// element j of vector i, and is asked for owned ones only. A byte of two nibbles is written by one
// thread, so a byte that this rank shares is read and written by that one.
template <class F, class CodeOf>
ZEROCAST_FN void store_elements(const CastShard& shard, u8* plane, const ThreadVectors& vectors,
                                int at, const CodeOf& code_of) {
    constexpr int AT_ONCE = F::BITS == 4 ? 2 : 1;
    int i = at / 4, j = at % 4;
    u32 code[AT_ONCE];
    bool mine[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
        mine[k] = owns(vectors, shard.start, shard.end, i, j + k);
        if (mine[k]) code[k] = code_of(i, j + k);
    }
    u8* to = plane + byte_of<F>(shard, vectors.at(i) + j);
    if constexpr (F::BITS == 8) {
        if (mine[0]) *to = (u8)code[0];
    } else if (mine[0] || mine[1]) {
        u32 low = mine[0] ? code[0] : *to & 0x0Fu;
        u32 high = mine[1] ? code[1] << 4 : *to & 0xF0u;
        *to = (u8)(low | high);
    }
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
