// digest: adds to a sum the digest of a range of a tensor's bytes.
// total_digests: of each tensor, the total of such sums.
// stage_codes, store_codes: copy codes into the buffer in which they travel, and from there, and
// add their digest where it is wanted: what passes through the registers anyway is not read again.
// read_codes: copies codes from the buffer of another process, and adds their digest.
//
// A thread takes whole rows of keys.
#include <errno.h>
#if defined(__linux__)
#include <sys/uio.h>
#endif

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
            auto copy = lines ? digest_rows<STREAMED> : digest_rows<COPIED>;
            add_to(target.sum, copy(from, target.first, begin, end, to));
        } else {
            i64 at = begin - target.first;
            copy_bytes(from + at, to + at, end - begin, stream);
        }
        if (stream) stream_fence();
    };
    share_in_parallel<CopyTarget>(table, count, threads, span_of<CopyTarget>, piece);
}

// Bytes that are read from another process at once, and digested while they are in a cache. Of
// 42 MB between two processes, each on its core of an Emerald Rapids, 16 KiB took 15.0 ms, 64 KiB
// 12.4 and 128 KiB 12.1; without digests 12.5, 11.3 and 11.5. Later, of two processes that each
// read so much of their own memory, 128 KiB took 14.8 ms, 256 KiB 14.5, 512 KiB 14.8 and 1 MiB
// 15.6; without digests 13.9, 13.8, 13.7 and 14.1.
constexpr i64 READ_BYTES = 1 << 18;

// Reads `bytes` bytes at `from` in another process; returns 0 or an errno.
int read_process(i64 process, u64 from, void* to, i64 bytes) {
#if defined(__linux__)
    while (bytes > 0) {
        iovec local{to, (size_t)bytes}, remote{(void*)from, (size_t)bytes};
        ssize_t done = process_vm_readv((pid_t)process, &local, 1, &remote, 1, 0);
        if (done <= 0) return done < 0 ? errno : EFAULT;
        to = (u8*)to + done, from += done, bytes -= done;
    }
    return 0;
#else
    return ENOSYS;
#endif
}

// Copies bytes [begin, end) of the target's tensor from `peer`; returns 0 or an errno.
int read_codes(const CopyTarget& target, i64 begin, i64 end, const PeerBuffer& peer) {
    u64 digest = 0;
    for (i64 stop; begin < end; begin = stop) {
        stop = min_of(end, begin + READ_BYTES);
        i64 at = begin - target.first;
        u64 from = peer.address + target.staged + at;
        if (int error = read_process(peer.process, from, target.codes + at, stop - begin))
            return error;
        if (target.sum) digest += digest_rows<IN_CACHE>(target.codes, target.first, begin, stop);
    }
    if (target.sum) add_to(target.sum, digest);
    return 0;
}

}  // namespace
}  // namespace ZEROCAST_ISA
}  // namespace zerocast

ZEROCAST_EXPORT(digest)(const void* table, long long count, long long threads) {
    using namespace zerocast;
    auto piece = [](const DigestTarget& target, i64 begin, i64 end, i64) {
        add_to(target.sum, digest_rows<IN_MEMORY>(target.data, target.first, begin, end));
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

// `buffer`: a table of one, a PeerBuffer. After an error not all codes are there, or all digests.
ZEROCAST_EXPORT(read_codes)(const void* table, long long count, void* buffer, long long threads) {
    using namespace zerocast;
    PeerBuffer& peer = *(PeerBuffer*)buffer;
    u64 token = 0;
    i64 error = read_process(peer.process, peer.token_address, &token, sizeof token);
    if (!error && token != peer.token) error = ESRCH;
    if (!error) {
        auto piece = [&](const CopyTarget& target, i64 begin, i64 end, i64) {
            if (int its = read_codes(target, begin, end, peer))
                __atomic_store_n(&error, its, __ATOMIC_RELAXED);
        };
        share_in_parallel<CopyTarget>(table, count, threads, span_of<CopyTarget>, piece);
    }
    peer.error = error;
}
