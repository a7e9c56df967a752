// partial_cast: round, scale and encode this rank's elements into their codes; every other nibble
// keeps its value.
#include "cpu/cast_shard.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {
namespace {

template <class Encoder>
void cast_encoded(const CastShard& shard, const BlockMultipliers& multipliers,
                  const Encoder& encoder, const Region& region) {
    with_rounded_master(shard, [&](auto* master, auto nominal) {
        cast_planes<decltype(nominal)>(shard, master, multipliers, encoder, region);
    });
}

void cast(const NumericsTable& table, const CastShard& shard, const Region& region) {
    if (region.begin >= region.end) return;
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
    });
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
        cast(numerics_table, shard, Region{begin, min_of(end, whole.begin)});
        cast(numerics_table, shard, Region{max_of(begin, whole.end), end});
    };
    share_in_parallel<CastShard>(table, count, threads, shard_span, piece);
}
