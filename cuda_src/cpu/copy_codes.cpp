// stage_codes, store_codes: copy codes into the buffer in which they travel, and from there.
#include "cpu/launch.h"
#include "cpu/simd.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {
namespace {

constexpr i64 LINE = 64;

// Launches of more bytes write past the caches: what they write would not stay there.
constexpr i64 STREAM_BYTES = 1 << 22;

void copy_bytes(const u8* from, u8* to, i64 bytes, bool stream) {
    i64 i = 0;
    if (stream) {
        i = min_of(bytes, (i64)(-(u64)to % LINE));
        __builtin_memcpy(to, from, i);
        for (; i + LINE <= bytes; i += LINE) {
            __builtin_prefetch(from + i + PREFETCH_AHEAD * 4, 0, 2);
            alignas(LINE) u8 line[LINE];
            __builtin_memcpy(line, from + i, LINE);
            stream_line(to + i, line);
        }
    }
    __builtin_memcpy(to + i, from + i, bytes - i);
}

// Copies codes into `buffer`, or from it into the weights.
void copy_codes(const void* table, i64 count, u8* buffer, i64 threads, bool into_weights) {
    auto targets = (const CopyTarget*)table;
    auto span = [](const CopyTarget& target, i64 = 1) { return Span{0, target.bytes, 4096}; };
    bool stream = total_elements(targets, count, span) > STREAM_BYTES;
    auto piece = [&](const CopyTarget& target, i64 begin, i64 end, i64) {
        u8 *codes = target.codes + begin, *staged = buffer + target.staged + begin;
        if (into_weights)
            copy_bytes(staged, codes, end - begin, stream);
        else
            copy_bytes(codes, staged, end - begin, stream);
        if (stream) stream_fence();
    };
    share_in_parallel<CopyTarget>(table, count, threads, span, piece);
}

}  // namespace
}  // namespace ZEROCAST_ISA
}  // namespace zerocast

// `buffer`: a table of one, its address.
ZEROCAST_EXPORT(stage_codes)(const void* table, long long count, const void* buffer,
                             long long threads) {
    zerocast::copy_codes(table, count, *(zerocast::u8* const*)buffer, threads, false);
}

ZEROCAST_EXPORT(store_codes)(const void* table, long long count, const void* buffer,
                             long long threads) {
    zerocast::copy_codes(table, count, *(zerocast::u8* const*)buffer, threads, true);
}
