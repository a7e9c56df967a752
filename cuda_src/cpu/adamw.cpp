// adamw: one step of AdamW on this rank's masters.
#include "cpu/adamw.h"

ZEROCAST_EXPORT(adamw)(const void* table, long long count, long long threads) {
    using namespace zerocast;
    auto piece = [](const AdamWUpdate& update, i64 begin, i64 end, i64) {
        Update(update, 0)(begin, end);
    };
    auto whole = [](const AdamWUpdate& update, i64) { return Span{0, update.count, 64}; };
    share_in_parallel<AdamWUpdate>(table, count, threads, whole, piece);
}
