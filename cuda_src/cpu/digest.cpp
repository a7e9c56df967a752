// digest: adds to a sum the digest of a range of a tensor's bytes.
// total_digests: of each tensor, the total of such sums.
// stage_codes, store_codes: copy codes into the buffer in which they travel, and from there, and
// add their digest where it is wanted: what passes through the registers anyway is not read again.
//
// A thread takes whole rows of keys.
#include "cpu/copies.h"
#include "cpu/digest_rows.h"
#include "cpu/launch.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {
namespace {

// Launches of more bytes write past the caches: what they write would not stay there.
constexpr i64 STREAM_BYTES = 1 << 22;

void copy_bytes(const u8* from, u8* to, i64 bytes, bool stream) {
    i64 i = 0;
    if (stream) {
        i = min_of(bytes, (i64)(-(u64)to % LINE));
        __builtin_memcpy(to, from, i);
        for (; i + LINE <= bytes; i += LINE) {
            __builtin_prefetch(from + i + PREFETCH_AHEAD * 4, 0, 2);
            alignas(LINE) Native::Int line[LINE_REGISTERS];
            load_line(line, from + i);
            stream_line(to + i, (const u8*)line);
        }
    }
    __builtin_memcpy(to + i, from + i, bytes - i);
}

template <class Target>
Span span_of(const Target& target, i64) {
    return Span{target.first, target.first + target.bytes, DIGEST_ROW_BYTES};
}

// Copies codes into `buffer`, or from it into the weights.
void copy_codes(const void* table, i64 count, u8* buffer, i64 threads, bool into_weights) {
    auto targets = (const CopyTarget*)table;
    i64 total = 0;
    for (i64 i = 0; i < count; i++) total += targets[i].bytes;
    bool stream = total > STREAM_BYTES;
    auto piece = [&](const CopyTarget& target, i64 begin, i64 end, i64) {
        u8 *from = buffer + target.staged, *to = target.codes;
        if (!into_weights) {
            from = target.codes;
            to = buffer + target.staged;
        }
        if (target.sum) {
            bool lines = stream && (u64)(to - target.first) % LINE == 0;
            auto copy = lines ? digest_rows<STREAMED> : digest_rows<CACHED>;
            add_to(target.sum, copy(from, target.first, begin, end, to));
        } else {
            i64 at = begin - target.first;
            copy_bytes(from + at, to + at, end - begin, stream);
        }
        if (stream) stream_fence();
    };
    share_in_parallel<CopyTarget>(table, count, threads, span_of<CopyTarget>, piece);
}

}  // namespace
}  // namespace ZEROCAST_ISA
}  // namespace zerocast

ZEROCAST_EXPORT(digest)(const void* table, long long count, long long threads) {
    using namespace zerocast;
    auto piece = [](const DigestTarget& target, i64 begin, i64 end, i64) {
        add_to(target.sum, digest_rows<NONE>(target.data, target.first, begin, end));
    };
    share_in_parallel<DigestTarget>(table, count, threads, span_of<DigestTarget>, piece);
}

ZEROCAST_EXPORT(total_digests)(const void* table, long long count, long long) {
    using namespace zerocast;
    auto parts = (const DigestPart*)table;
    for (i64 i = 0; i < count; i++) *parts[i].total = 0;
    for (i64 i = 0; i < count; i++) *parts[i].total += *parts[i].sum;
}

// `buffer`: a table of one, its address.
ZEROCAST_EXPORT(stage_codes)(const void* table, long long count, const void* buffer,
                             long long threads) {
    zerocast::copy_codes(table, count, *(zerocast::u8* const*)buffer, threads, false);
}

ZEROCAST_EXPORT(store_codes)(const void* table, long long count, const void* buffer,
                             long long threads) {
    zerocast::copy_codes(table, count, *(zerocast::u8* const*)buffer, threads, true);
}
