// The update of AdamW, element by element (docs/numerics.md, "AdamW").
//
// Where torch's vectorized kernel fuses a product and a sum, so does this, by fma; nothing else is
// contracted.
#pragma once

#include "arithmetic/tables.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// One step of one tensor.
template <class L>
class AdamW {
  public:
    typedef typename L::Float Float;

    explicit ZEROCAST_FN AdamW(const AdamWUpdate& u)
        : decay_(constant<L>((i32)u.decay)),
          sign_(constant<L>((i32)u.sign)),
          average_weight_(constant<L>((i32)u.average_weight)),
          square_decay_(constant<L>((i32)u.square_decay)),
          square_weight_(constant<L>((i32)u.square_weight)),
          correction_(constant<L>((i32)u.correction)),
          eps_(constant<L>((i32)u.eps)),
          step_(constant<L>((i32)u.step)),
          from_gradient_(u.from_gradient) {}

    // The averages of the gradient, `m`, and of its square, `v`.
    ZEROCAST_FN void average(Float gradient, Float& m, Float& v) const {
        Float g = gradient * sign_;
        m = L::fma(average_weight_, g - m, from_gradient_ ? g : m);
        v = L::fma(square_weight_ * g, g, square_decay_ * v);
    }

    // The largest `v` so far; a NaN stays.
    static ZEROCAST_FN Float larger(Float largest, Float v) {
        return L::template select<Float>((v > largest) | (v != v), v, largest);
    }

    // The element x, by the averages.
    ZEROCAST_FN Float stepped(Float x, Float m, Float v) const {
        Float denominator = L::divide(L::sqrt(v), correction_) + eps_;
        return x * decay_ + L::divide(step_ * m, denominator);
    }

  private:
    Float decay_, sign_, average_weight_, square_decay_, square_weight_, correction_, eps_, step_;
    bool from_gradient_;
};

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
