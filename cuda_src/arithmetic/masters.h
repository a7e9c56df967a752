// Masters as they are stored in memory: elements of FP32, BF16 and FP16, each read as the FP32
// value that it exactly is.
#pragma once

#include "arithmetic/formats.h"
#include "arithmetic/tables.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

ZEROCAST_FN float value_of(float x) { return x; }
ZEROCAST_FN float value_of(Fp32 x) { return x.value; }
ZEROCAST_FN float value_of(Bf16 x) { return from_bf16<Scalar>(x.bits); }
ZEROCAST_FN float value_of(Fp16 x) {
#ifdef ZEROCAST_CONVERTS
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
    return value;
#else
    return from_fp16<Scalar>(x.bits);
#endif
}

// Calls work(Bf16{}), say, with an element of a nominal dtype.
template <class Work>
ZEROCAST_FN void with_nominal(i64 nominal, const Work& work) {
    if (nominal == NOMINAL_BF16)
        work(Bf16{});
    else if (nominal == NOMINAL_FP16)
        work(Fp16{});
    else
        work(Fp32{});
}

// Calls work(elements) with a pointer to them in their dtype, the number of a nominal one.
template <class Work>
ZEROCAST_FN void with_elements(const void* data, i64 dtype, const Work& work) {
    if (dtype == NOMINAL_BF16)
        work((const Bf16*)data);
    else if (dtype == NOMINAL_FP16)
        work((const Fp16*)data);
    else
        work((const float*)data);
}

// Calls work(master) with the shard's master, a pointer to its elements, as if it were the whole
// weight.
template <class Work>
ZEROCAST_FN void with_master(const CastShard& shard, const Work& work) {
    const Master& master = *shard.master;
    with_elements(master.data, master.dtype, [&](auto* x) { work(x - shard.start); });
}

// As with_master, and says what the elements are rounded to: work(master, Bf16{}), say. That is
// FP32, which changes nothing, where they are in the nominal dtype already.
template <class Work>
ZEROCAST_FN void with_rounded_master(const CastShard& shard, const Work& work) {
    with_master(shard, [&](auto* master) {
        typedef decltype(master) Pointer;
        if constexpr (!SAME<Pointer, const Bf16*>) {
            if (shard.round_to == NOMINAL_BF16) return work(master, Bf16{});
        }
        if constexpr (!SAME<Pointer, const Fp16*>) {
            if (shard.round_to == NOMINAL_FP16) return work(master, Fp16{});
        }
        work(master, Fp32{});
    });
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
