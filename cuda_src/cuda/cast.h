// What all casts of a tile share: where codes are stored, and how they are made.
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

// What rounding to nearest draws.
struct NoDraws {
    ZEROCAST_FN NoDraws of(u32) const { return {}; }
};

// By rounding to nearest.
template <class F>
struct NearestVec4 {
    static constexpr int RESIDENT = 6;  // thread blocks that share a multiprocessor's registers
    static constexpr bool EXCHANGES = false;  // whether the lanes of a warp go on together

    ZEROCAST_FN NearestVec4(const CastShard&, const NumericsTable&) {}

    // Whether vectors may be encoded at once, and whether draws() serves them.
    ZEROCAST_FN bool takes_vectors(const Tile&, const Grid&) const { return true; }
    ZEROCAST_FN bool takes_pairs(const Tile&, const Grid&) const { return true; }

    ZEROCAST_FN NoDraws draws(const Tile&, const ThreadVectors&) const { return {}; }
    ZEROCAST_FN NoDraws draws_at(i64) const { return {}; }
    ZEROCAST_FN u32 encode_vec4_by(NoDraws, const Vec4& scaled) const {
        return encode_vec4<F>(scaled);
    }
    ZEROCAST_FN u32 encode_at(i64, float scaled) const { return (u32)encode<F, Scalar>(scaled); }
};

// The draws of a thread's vectors, in order. Two lanes side by side hold the eight elements of one
// call of Philox: of every two vectors each lane makes the call for one, and they exchange halves.
class PairedDraws {
  public:
    // index: of the first vector's first element in the whole weight; step: to the next vector's.
    ZEROCAST_FN PairedDraws(const RandomDraws& draws, i64 index, i64 step)
        : draws_(draws),
          odd_(threadIdx.x % 2),
          call_((u64)(index + (odd_ ? step : 0)) / 8),
          two_vectors_((u64)step / 4) {}

    // Those of vector i. All lanes of the warp call it for every vector.
    ZEROCAST_FN u64 of(u32 i) {
        if (i % 2) return next_;
        u64 half[2];
        draws_.of_eight<Scalar>(call_, half);
        call_ += two_vectors_;
        u64 theirs = odd_ ? half[0] : half[1];
        u32 low = (u32)__shfl_xor_sync(ALL_LANES, (i32)(u32)theirs, 1);
        theirs = low | (u64)(u32)__shfl_xor_sync(ALL_LANES, (i32)(u32)(theirs >> 32), 1) << 32;
        next_ = odd_ ? half[1] : theirs;
        return odd_ ? theirs : half[0];
    }

  private:
    const RandomDraws& draws_;
    bool odd_;
    u64 call_, two_vectors_;
    u64 next_ = 0;
};

// By stochastic rounding.
struct StochasticVec4 {
    static constexpr int RESIDENT = 5;
    static constexpr bool EXCHANGES = true;
    RandomDraws random;
    const RandomBits& random_bits;

    ZEROCAST_FN StochasticVec4(const CastShard& shard, const NumericsTable& numerics)
        : random((u64)numerics.seed, shard.random_bits.counter), random_bits(shard.random_bits) {}

    // The four elements of a vector are among the eight of one call of Philox where the weight's
    // elements are counted so.
    ZEROCAST_FN bool takes_vectors(const Tile& tile, const Grid& grid) const {
        return tile.element % 4 == 0 && (tile.rows == 1 || grid.cols % 4 == 0)
               && random_bits.keeps_fours();
    }

    // Two lanes hold the eight of one call where every row of the tile begins with such eight.
    ZEROCAST_FN bool takes_pairs(const Tile& tile, const Grid& grid) const {
        i64 skip = random_bits.skip;
        return (!skip || random_bits.cols == grid.cols)
               && random_bits.in_whole(tile.element) % 8 == 0
               && (tile.rows == 1 || (grid.cols + skip) % 8 == 0);
    }

    ZEROCAST_FN PairedDraws draws(const Tile& tile, const ThreadVectors& vectors) const {
        i64 skip = random_bits.skip, behind = vectors.element - tile.element + vectors.row * skip;
        return {random, random_bits.in_whole(tile.element) + behind,
                vectors.step + vectors.row_step * skip};
    }

    // The bits of the four elements of the whole weight that element `index` is one of.
    ZEROCAST_FN u64 draw(i64 index) const {
        u64 eight[2];
        random.of_eight<Scalar>((u64)index / 8, eight);
        return index & 4 ? eight[1] : eight[0];
    }
    ZEROCAST_FN u64 draws_at(i64 element) const { return draw(random_bits.in_whole(element)); }

    ZEROCAST_FN u32 encode_vec4_by(u64 drawn, const Vec4& scaled) const {
        return encode_e2m1_stochastic_vec4(drawn, scaled);
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
