// The machine's memory, for scripts/bench_cast.py: what a launch that reads, writes or copies and
// does nothing else takes, with the threads and the registers of the casts.
#include "cpu/launch.h"
#include "cpu/simd.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {
namespace {

typedef Native::Int Int;
constexpr i64 STEP = 4 * sizeof(Int);

// [begin, end) of this thread, in steps; bytes that make no whole step are left out.
struct Share {
    i64 begin, end;
    Share(i64 bytes, i64 thread, i64 num_threads)
        : begin(bytes / STEP * thread / num_threads * STEP),
          end(bytes / STEP * (thread + 1) / num_threads * STEP) {}
};

}  // namespace
}  // namespace ZEROCAST_ISA
}  // namespace zerocast

ZEROCAST_EXPORT(probe_read)(const unsigned char* from, long long bytes, long long threads) {
    using namespace zerocast;
    in_parallel(bytes, threads, [&](i64 thread, i64 num_threads) {
        Share mine(bytes, thread, num_threads);
        Int a{}, b{}, c{}, d{};
        for (i64 i = mine.begin; i < mine.end; i += STEP) {
            prefetch((const float*)(from + i));  // as the casts do: the best that is known here
            a |= Native::load_as<Int>(from + i);
            b |= Native::load_as<Int>(from + i + STEP / 4);
            c |= Native::load_as<Int>(from + i + STEP / 2);
            d |= Native::load_as<Int>(from + i + 3 * STEP / 4);
        }
        Int all = (a | b) | (c | d);
        asm volatile("" : : "r"(reduce_max<Native>(all)));  // or the loop would be deleted
    });
}

ZEROCAST_EXPORT(probe_write)(unsigned char* to, long long bytes, long long threads) {
    using namespace zerocast;
    in_parallel(bytes, threads, [&](i64 thread, i64 num_threads) {
        Share mine(bytes, thread, num_threads);
        __builtin_memset(to + mine.begin, (int)thread, mine.end - mine.begin);
    });
}

ZEROCAST_EXPORT(probe_copy)(unsigned char* to, const unsigned char* from, long long bytes,
                            long long threads) {
    using namespace zerocast;
    in_parallel(bytes, threads, [&](i64 thread, i64 num_threads) {
        Share mine(bytes, thread, num_threads);
        __builtin_memcpy(to + mine.begin, from + mine.begin, mine.end - mine.begin);
    });
}
