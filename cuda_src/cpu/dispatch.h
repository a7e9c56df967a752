// From the table of a scheme's numerics to the class that computes them.
#pragma once

#include "arithmetic/scaling.h"
#include "arithmetic/tables.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

template <class F, class Work>
void with_float8_numerics(const NumericsTable& table, const DelayedState& delayed,
                          const Work& work) {
    if (table.kind == NUMERICS_MXFP8)
        work(MXFP8Numerics<F>{});
    else if (table.kind == NUMERICS_DELAYED)
        work(DelayedNumerics<F>{*delayed.scale});
    else
        work(Float8Numerics<F>{table.power_2_scale != 0, Scalar::value((i32)table.amax_epsilon)});
}

// Calls work(numerics) with the numerics of one tensor.
template <class Work>
void with_numerics(const NumericsTable& table, const i32* tensor_amax, const DelayedState& delayed,
                   const Work& work) {
    if (table.four_over_six)
        work(FourOverSixNumerics(*tensor_amax, table.scale_max));
    else if (table.kind == NUMERICS_NVFP4)
        work(NVFP4Numerics(*tensor_amax, table.scale_max));
    else if (table.format == FORMAT_E4M3)
        with_float8_numerics<E4M3>(table, delayed, work);
    else
        with_float8_numerics<E5M2>(table, delayed, work);
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
