// partial_cast: round, scale and encode this rank's elements into their codes; every other nibble
// keeps its value. It adds the digests of these codes, where they are asked for.
#include "cpu/cast_shard.h"
#include "cpu/digest_codes.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {
namespace {

// Elements at most that are cast before the digest of their codes is taken from a cache.
constexpr i64 DIGESTED = 1 << 18;

template <class Encoder>
void cast_encoded(const CastShard& shard, const BlockMultipliers& multipliers,
                  const Encoder& encoder, const Region& region) {
    with_rounded_master(shard, [&](auto* master, auto nominal) {
        cast_planes<decltype(nominal)>(shard, master, multipliers, encoder, region);
    });
}

void cast(const NumericsTable& table, const CastShard& shard, const Region& region) {
    with_numerics(table, shard.tensor_amax, shard.delayed, [&](auto numerics) {
        typedef typename decltype(numerics)::Format F;
        BlockMultipliers multipliers(numerics);
        if (table.stochastic_rounding) {
            StochasticGroup stochastic{RandomDraws((u64)table.seed, shard.random_bits.counter),
                                       shard.random_bits};
            cast_encoded(shard, multipliers, stochastic, region);
        } else {
            cast_encoded(shard, multipliers, NearestGroup<F>{}, region);
        }
        digest_elements<F>(shard, region.begin, region.end);
    });
}

// Casts elements [begin, end), where digests are asked for piece by piece. No piece ends within a
// byte, as rows hold an even number of elements.
void cast_pieces(const NumericsTable& table, const CastShard& shard, i64 begin, i64 end) {
    i64 rows = block_rows(shard), piece = rows <= DIGESTED ? DIGESTED / rows * rows : DIGESTED;
    for (i64 next; begin < end; begin = next) {
        next = takes_digests(shard) ? min_of(end, (begin / piece + 1) * piece) : end;
        cast(table, shard, Region{begin, next});
    }
}

}  // namespace
}  // namespace ZEROCAST_ISA
}  // namespace zerocast

ZEROCAST_EXPORT(partial_cast)(const void* numerics, const void* table, long long count,
                              long long threads) {
    using namespace zerocast;
    auto piece = [&](const CastShard& shard, i64 begin, i64 end, i64) {
        auto& numerics_table = *(const NumericsTable*)numerics;
        Span whole = whole_rows(shard);
        cast_pieces(numerics_table, shard, begin, min_of(end, whole.begin));
        cast_pieces(numerics_table, shard, max_of(begin, whole.end), end);
    };
    share_in_parallel<CastShard>(table, count, threads, shard_span, piece);
}
