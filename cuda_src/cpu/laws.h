// From the table's description of a law, and of a format, to the type that computes it.
#pragma once

#include <zerocast/scaling.h>
#include <zerocast/tables.h>

namespace zerocast {
inline namespace ZEROCAST_ISA {

// Calls work(law) with the law of one tensor.
template <class Work>
void with_law(const LawTable& table, const i32* tensor_amax, const Work& work) {
    bool power_2 = table.power_2_scale != 0;
    float epsilon = Scalar::value((i32)table.amax_epsilon);
    if (table.format == FORMAT_E2M1)
        work(NVFP4Scaling(*tensor_amax, table.scale_max));
    else if (table.format == FORMAT_E4M3)
        work(Float8Scaling<E4M3>{power_2, epsilon});
    else
        work(Float8Scaling<E5M2>{power_2, epsilon});
}

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
