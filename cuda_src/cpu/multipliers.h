// What elements are multiplied by before they are encoded, whatever the law.
#pragma once

#include <string.h>

#include <zerocast/scaling.h>

#include "launch.h"
#include "simd.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// Makes the multipliers of blocks side by side: called once a strip, so that the loops over
// elements are compiled once for all laws. Points to a law that has to outlive it.
class Multipliers {
  public:
    template <class Law>
    explicit Multipliers(const Law& law) : law_(&law), fill_(fill_under<Law>) {}

    // choices: of the same blocks, where the law CHOOSES.
    void fill(const i32* amax, const u8* choices, i64 count, float* multipliers) const {
        fill_(law_, amax, choices, count, multipliers);
    }

  private:
    static constexpr int W = Native::WIDTH;
    const void* law_;
    void (*fill_)(const void*, const i32*, const u8*, i64, float*);

    template <class Law>
    static void fill_under(const void* erased, const i32* amax, const u8* choices, i64 count,
                           float* multipliers) {
        const Law& law = *(const Law*)erased;
        for (i64 b = 0; b < count; b += W) {
            i64 n = min_of(W, count - b);
            Native::Int amaxes{};
            memcpy(&amaxes, amax + b, n * sizeof(i32));
            Native::Float made;
            if constexpr (Law::CHOOSES) {
                u8 chosen[W] = {};
                memcpy(chosen, choices + b, n);
                made = law.template multiplier<Native>(amaxes, load_bytes<Native>(chosen));
            } else {
                made = law.template multiplier<Native>(amaxes);
            }
            memcpy(multipliers + b, &made, n * sizeof(float));
        }
    }
};

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
