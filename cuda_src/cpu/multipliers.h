// What elements are multiplied by before they are encoded, whatever the scheme.
#pragma once

#include <string.h>

#include "arithmetic/scaling.h"
#include "cpu/launch.h"
#include "cpu/simd.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// Makes the multipliers of blocks side by side: called once a strip, so that the loops over
// elements are compiled once for all numerics. Points to numerics that have to outlive it.
class BlockMultipliers {
  public:
    template <class Numerics>
    explicit BlockMultipliers(const Numerics& numerics)
        : numerics_(&numerics), fill_(fill_under<Numerics>) {}

    // choices: of the same blocks, where the numerics CHOOSE. Returns whether all are positive,
    // neither NaN nor 0: then what they multiply stays a number, if it is one.
    bool fill(const i32* amax, const u8* choices, i64 count, float* multipliers) const {
        return fill_(numerics_, amax, choices, count, multipliers);
    }

  private:
    static constexpr int W = Native::WIDTH;
    const void* numerics_;
    bool (*fill_)(const void*, const i32*, const u8*, i64, float*);

    template <class Numerics>
    static bool fill_under(const void* erased, const i32* amax, const u8* choices, i64 count,
                           float* multipliers) {
        const Numerics& numerics = *(const Numerics*)erased;
        Native::Int positive = Native::splat(-1);  // 0 where one is not positive
        auto fill = [&](const i32* amaxes, const u8* chosen, float* to) {
            auto loaded = Native::load_as<Native::Int>(amaxes);
            Native::Float made;
            if constexpr (Numerics::CHOOSES)
                made = numerics.template multiplier<Native>(loaded, load_bytes<Native>(chosen));
            else
                made = numerics.template multiplier<Native>(loaded);
            positive &= (Native::Int)(made > Native::splat(0.0f));
            Native::store(to, made);
        };
        i64 b = 0;
        for (; b + W <= count; b += W)
            fill(amax + b, Numerics::CHOOSES ? choices + b : nullptr, multipliers + b);
        if (b < count) {
            i32 last_amaxes[W] = {};
            u8 last_choices[W] = {};
            float last[W];
            memcpy(last_amaxes, amax + b, (count - b) * sizeof(i32));
            if (Numerics::CHOOSES) memcpy(last_choices, choices + b, count - b);
            fill(last_amaxes, last_choices, last);
            memcpy(multipliers + b, last, (count - b) * sizeof(float));
        }
        return reduce_max<Native>(~positive & 1) == 0;
    }
};

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
