// partial_amax: raise block and tensor amaxes to the largest magnitudes of this rank's rounded
// elements.
#include "cpu/plane_amax.h"

ZEROCAST_EXPORT(partial_amax)(const void* table, long long count, long long threads) {
    using namespace zerocast;
    auto piece = [](const CastShard& shard, i64 begin, i64 end, i64 num_threads) {
        with_master(shard, [&](auto* master) {
            raise_amaxes(shard, master, Region{begin, end}, share_blocks(shard, num_threads));
        });
    };
    share_in_parallel<CastShard>(table, count, threads, shard_span, piece);
}
