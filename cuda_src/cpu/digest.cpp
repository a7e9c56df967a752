// digest: adds to a sum the digest of a range of a tensor's bytes.
//
// A thread takes whole rows of keys. A product of a word and a key of 64 bits is two products of 32
// bits, of which the upper one's sum is shifted into place once a row.
#include "arithmetic/digest.h"
#include "cpu/launch.h"
#include "cpu/simd.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {
namespace {

typedef Native::Int Int;
typedef Native::Wide Wide;
constexpr i64 REGISTER = sizeof(Int);  // bytes

// The factors of a row's columns: of even ones and of odd ones, as a register holds words.
struct Keys {
    u64 of[2][DIGEST_ROW / 2];

    constexpr Keys() : of() {
        for (i64 c = 0; c < DIGEST_ROW; c++) of[c % 2][c / 2] = column_factor(c);
    }
};
constexpr Keys KEYS;

// Bytes [at, end) of a row, one by one.
u64 digest_bytes(const u8* row, i64 at, i64 end) {
    u64 total = 0;
    for (; at < end; at++) total += ((u64)row[at] << at % 4 * 8) * KEYS.of[at / 4 % 2][at / 8];
    return total;
}

// Bytes [at, end) of a row, before its own factor.
u64 digest_row(const u8* row, i64 at, i64 end) {
    i64 head = min_of((at + REGISTER - 1) / REGISTER * REGISTER, end);
    i64 tail = max_of(end / REGISTER * REGISTER, head);
    Wide low{}, high{};
    for (i64 i = head; i < tail; i += REGISTER) {
        __builtin_prefetch(row + i + PREFETCH_AHEAD * 4, 0, 2);  // into L2, as the keys fill L1
        Wide words = (Wide)Native::load_as<Int>(row + i);
        for (int odd = 0; odd < 2; odd++) {
            Wide key = Native::load_as<Wide>(KEYS.of[odd] + i / 8);
            Wide word = odd ? words >> 32 : words;
            low += Native::multiply_low(word, key);
            high += Native::multiply_low(word, key >> 32);
        }
    }
    Wide both = low + (high << 32);
    u64 total = digest_bytes(row, at, head) + digest_bytes(row, tail, end);
    for (int i = 0; i < Native::WIDTH / 2; i++) total += both[i];
    return total;
}

}  // namespace
}  // namespace ZEROCAST_ISA
}  // namespace zerocast

ZEROCAST_EXPORT(digest)(const void* table, long long count, long long threads) {
    using namespace zerocast;
    auto places = [](const DigestTarget& target, i64) {
        return Span{target.first, target.first + target.bytes, DIGEST_ROW_BYTES};
    };
    auto piece = [](const DigestTarget& target, i64 begin, i64 end, i64) {
        u64 total = 0;
        for (i64 at = begin; at < end;) {
            i64 row = at / DIGEST_ROW_BYTES, first = row * DIGEST_ROW_BYTES;
            i64 stop = min_of(end, first + DIGEST_ROW_BYTES);
            const u8* data = target.data + (first - target.first);
            total += row_factor(row) * digest_row(data, at - first, stop - first);
            at = stop;
        }
        __atomic_fetch_add(target.sum, total, __ATOMIC_RELAXED);
    };
    share_in_parallel<DigestTarget>(table, count, threads, places, piece);
}
