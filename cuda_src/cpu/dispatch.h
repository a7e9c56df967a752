// From the table of a scheme's numerics to the class that computes them.
#pragma once

#include "arithmetic/scaling.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// Calls work(numerics) with the numerics of one tensor.
template <class Work>
void with_numerics(const NumericsTable& table, const i32* tensor_amax, const DelayedState& delayed,
                   const Work& work) {
    auto with_format = [&](auto format) {
        typedef decltype(format) F;
        if (table.kind == NUMERICS_MXFP8)
            work(numerics_of<MXFP8Numerics<F>>(table, tensor_amax, delayed));
        else if (table.kind == NUMERICS_DELAYED)
            work(numerics_of<DelayedNumerics<F>>(table, tensor_amax, delayed));
        else
            work(numerics_of<Float8Numerics<F>>(table, tensor_amax, delayed));
    };
    if (table.four_over_six)
        work(numerics_of<FourOverSixNumerics>(table, tensor_amax, delayed));
    else if (table.kind == NUMERICS_NVFP4)
        work(numerics_of<NVFP4Numerics>(table, tensor_amax, delayed));
    else if (table.format == FORMAT_E4M3)
        with_format(E4M3{});
    else
        with_format(E5M2{});
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
