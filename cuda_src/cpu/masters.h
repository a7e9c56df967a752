// Reading masters, a register of elements at a time.
#pragma once

#include "arithmetic/masters.h"
#include "cpu/simd.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

ZEROCAST_FN Native::Float load(const float* from) { return Native::load(from); }
ZEROCAST_FN Native::Float load(const Bf16* from) {
    return from_bf16<Native>(load_halves<Native>(from));
}
ZEROCAST_FN Native::Float load(const Fp16* from) {
    return from_fp16<Native>(load_halves<Native>(from));
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
