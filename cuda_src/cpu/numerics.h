// The numerics of a launch, and what they make of the amaxes of blocks side by side.
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

// A register of blocks at a time: calls work(b, n, amaxes, choices) for the n blocks from number b
// on. choices: of all blocks; read where the Numerics CHOOSE, and 0 for others.
template <class Numerics, class Work>
ZEROCAST_FN void for_each_register(const i32* amax, const u8* choices, i64 count,
                                   const Work& work) {
    typedef Native::Int Int;
    constexpr i64 W = Native::WIDTH;
    auto read = [&](i64 b, i64 n) {
        Int chosen{};
        if constexpr (Numerics::CHOOSES) {
            auto bytes = load_some<Native::Bytes>(choices + b, n);
            chosen = __builtin_convertvector(bytes, Int);
        }
        work(b, n, load_some<Int>(amax + b, n), chosen);
    };
    i64 b = 0;
    for (; b + W <= count; b += W) read(b, W);
    if (b < count) read(b, count - b);
}

// Makes what elements are multiplied by: called once a strip, so that the loops over elements are
// compiled once for all numerics. Points to numerics that have to outlive it.
class BlockMultipliers {
  public:
    template <class Numerics>
    explicit BlockMultipliers(const Numerics& numerics)
        : numerics_(&numerics), fill_(fill_under<Numerics>) {}

    // Those of blocks side by side. Returns whether all are positive, neither NaN nor 0: then what
    // they multiply stays a number, if it is one.
    bool fill(const i32* amax, const u8* choices, i64 count, float* multipliers) const {
        return fill_(numerics_, amax, choices, count, multipliers);
    }

  private:
    const void* numerics_;
    bool (*fill_)(const void*, const i32*, const u8*, i64, float*);

    template <class Numerics>
    static bool fill_under(const void* erased, const i32* amax, const u8* choices, i64 count,
                           float* multipliers) {
        const Numerics& numerics = *(const Numerics*)erased;
        Native::Int positive = Native::splat(-1);  // 0 where one is not positive
        auto fill = [&](i64 b, i64 n, Native::Int amaxes, Native::Int chosen) {
            auto made = numerics.template multiplier<Native>(amaxes, chosen);
            positive &= (Native::Int)(made > Native::splat(0.0f));
            store_some(multipliers + b, made, n);
        };
        for_each_register<Numerics>(amax, choices, count, fill);
        return reduce_max<Native>(~positive & 1) == 0;
    }
};

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
