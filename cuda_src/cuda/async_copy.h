// Asynchronous copies from global into shared memory. They take no registers while they are in
// flight, so that more of them can be.
#pragma once

#include "arithmetic/lanes.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// Begins to copy BYTES, 16 or 8, between addresses that are multiples of that, of what no thread of
// the launch writes; to zeros where they are not `wanted`.
template <int BYTES>
ZEROCAST_FN void copy_async(void* to_shared, const void* from, bool wanted) {
    static_assert(BYTES == 16 || BYTES == 8, "what one instruction copies");
#ifdef __CUDA_ARCH__
    u32 to = (u32)__cvta_generic_to_shared(to_shared);
    u64 global = __cvta_generic_to_global(from);
    if constexpr (BYTES == 16)  // past the first-level cache, as only this many bytes may go
        asm volatile(
            "{.reg .pred ignored; setp.eq.u32 ignored, %2, 0;\n"
            "cp.async.cg.shared.global [%0], [%1], 16, ignored;}" ::"r"(to),
            "l"(global), "r"((u32)wanted)
            : "memory");
    else
        asm volatile(
            "{.reg .pred ignored; setp.eq.u32 ignored, %2, 0;\n"
            "cp.async.ca.shared.global [%0], [%1], 8, ignored;}" ::"r"(to),
            "l"(global), "r"((u32)wanted)
            : "memory");
#else
    emulation::copy_async(to_shared, from, BYTES, wanted);
#endif
}

// Ends a group of this thread's copies.
ZEROCAST_FN void end_copies() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    emulation::end_copies();
#endif
}

// Waits for this thread's groups, all but the latest LATER. Other threads see what they copied
// after a barrier.
template <int LATER>
ZEROCAST_FN void wait_for_copies() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
#else
    emulation::wait_for_copies(LATER);
#endif
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
