// The numerics of a launch, and what they multiply the elements of blocks side by side by.
#pragma once

#include "arithmetic/scaling.h"
#include "cpu/launch.h"
#include "cpu/simd.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// Calls work(numerics) with the numerics of one tensor.
template <class Work>
void with_numerics(const NumericsTable& table, const i32* tensor_amax, const DelayedState& delayed,
                   const Work& work) {
    auto with_format = [&](auto format) {
        typedef decltype(format) F;
        if (table.kind == NUMERICS_MX)
            work(numerics_of<MXNumerics<F>>(table, tensor_amax, delayed));
        else if (table.kind == NUMERICS_DELAYED)
            work(numerics_of<DelayedNumerics<F>>(table, tensor_amax, delayed));
        else
            work(numerics_of<Float8Numerics<F>>(table, tensor_amax, delayed));
    };
    if (table.four_over_six)
        work(numerics_of<FourOverSixNumerics>(table, tensor_amax, delayed));
    else if (table.kind == NUMERICS_NVFP4)
        work(numerics_of<NVFP4Numerics>(table, tensor_amax, delayed));
    else if (table.format == FORMAT_E2M1)
        work(numerics_of<MXNumerics<E2M1>>(table, tensor_amax, delayed));
    else if (table.format == FORMAT_E4M3)
        with_format(E4M3{});
    else
        with_format(E5M2{});
}

// Makes what elements are multiplied by: called once a strip, so that the loops over elements are
// compiled once for all numerics. Points to numerics that have to outlive it.
class BlockMultipliers {
  public:
    template <class Numerics>
    explicit BlockMultipliers(const Numerics& numerics)
        : numerics_(&numerics),
          fill_(fill_under<Numerics>),
          are_powers_of_two_(SAME<Numerics, MXNumerics<typename Numerics::Format>>) {}

    // Whether all are powers of two, except those of blocks with a NaN or an infinity.
    bool are_powers_of_two() const { return are_powers_of_two_; }

    // The numerics that make them, of F, where are_powers_of_two().
    template <class F>
    const MXNumerics<F>& of_powers_of_two() const {
        return *(const MXNumerics<F>*)numerics_;
    }

    // Those of blocks side by side. Returns whether all are positive, neither NaN nor 0: then what
    // they multiply stays a number, if it is one.
    bool fill(const i32* amax, const u8* choices, i64 count, float* multipliers) const {
        return fill_(numerics_, amax, choices, count, multipliers);
    }

  private:
    const void* numerics_;
    bool (*fill_)(const void*, const i32*, const u8*, i64, float*);
    bool are_powers_of_two_;

    template <class Numerics>
    static bool fill_under(const void* erased, const i32* amax, const u8* choices, i64 count,
                           float* multipliers) {
        const Numerics& numerics = *(const Numerics*)erased;
        Native::Int positive = Native::splat(-1);  // 0 where one is not positive
        for (i64 b = 0; b < count; b += Native::WIDTH) {
            i64 left = count - b;
            auto chosen = Native::splat(0);
            if constexpr (Numerics::CHOOSES) {
                auto bytes = load_some<Native::Bytes>(choices + b, left);
                chosen = __builtin_convertvector(bytes, Native::Int);
            }
            // Delayed scaling needs none, and other threads raise them.
            auto amaxes = Native::splat(0);
            if constexpr (!SAME<Numerics, DelayedNumerics<typename Numerics::Format>>)
                amaxes = load_some<Native::Int>(amax + b, left);
            auto made = numerics.template multiplier<Native>(amaxes, chosen);
            positive &= (Native::Int)(made > Native::splat(0.0f));
            store_some(multipliers + b, made, left);
        }
        return reduce_max<Native>(~positive & 1) == 0;
    }
};

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
