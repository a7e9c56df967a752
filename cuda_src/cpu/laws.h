// From the table's description of a law to the type that computes it.
#pragma once

#include "arithmetic/scaling.h"
#include "arithmetic/tables.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

template <class F, class Work>
void with_float8_law(const LawTable& table, const DelayedState& delayed, const Work& work) {
    if (table.kind == LAW_MXFP8)
        work(MXFP8Scaling<F>{});
    else if (table.kind == LAW_DELAYED)
        work(DelayedScaling<F>{*delayed.scale});
    else
        work(Float8Scaling<F>{table.power_2_scale != 0, Scalar::value((i32)table.amax_epsilon)});
}

// Calls work(law) with the law of one tensor.
template <class Work>
void with_law(const LawTable& table, const i32* tensor_amax, const DelayedState& delayed,
              const Work& work) {
    if (table.four_over_six)
        work(FourOverSixScaling(*tensor_amax, table.scale_max));
    else if (table.kind == LAW_NVFP4)
        work(NVFP4Scaling(*tensor_amax, table.scale_max));
    else if (table.format == FORMAT_E4M3)
        with_float8_law<E4M3>(table, delayed, work);
    else
        with_float8_law<E5M2>(table, delayed, work);
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
