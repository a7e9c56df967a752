// The update of AdamW over a run of elements: what adamw and adamw_cast are made of.
#pragma once

#include "arithmetic/adamw.h"
#include "cpu/launch.h"
#include "cpu/simd.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {

// The update of one tensor, whose first element is number `start`.
class Update {
  public:
    // `ahead`: how many elements after one that is read another is asked for.
    Update(const AdamWUpdate& table, i64 start, i64 ahead = PREFETCH_AHEAD)
        : table_(table), start_(start), by_(table), ahead_(ahead) {}

    // Elements [begin, end).
    void operator()(i64 begin, i64 end) const {
        if (!table_.master) return;
        if (table_.max_exp_avg_sq)
            run<true>(begin - start_, end - start_);
        else
            run<false>(begin - start_, end - start_);
    }

    typedef Native::Float Floats;

    // Elements [begin, end), whole groups of them: calls before(i) with each group's first, counted
    // from `begin`, and after(i, x) with its updated ones.
    template <Prefetched INTO, class Before, class After>
    ZEROCAST_FN void in_groups(i64 begin, i64 end, const Before& before, const After& after) const {
        AdamWUpdate table = table_;
        AdamW<Native> by = by_;
        i64 first = begin - start_;
        for (i64 i = 0; i < end - begin; i += GROUP) {
            before(i);
            for (int k = 0; k < GROUP; k += 16) prefetch_line<INTO>(table, first + i + k + ahead_);
            Floats x[4];
            for (int k = 0; k < 4; k++) x[k] = some<false>(table, by, first + i + k * W, W);
            after(i, x);
        }
    }

    // Whether in_groups() does what is asked for.
    bool goes_in_groups() const { return table_.master && !table_.max_exp_avg_sq; }

  private:
    static constexpr int W = Native::WIDTH;

    const AdamWUpdate& table_;
    i64 start_;
    AdamW<Native> by_;
    i64 ahead_;

    template <bool AMSGRAD>
    void run(i64 i, i64 end) const {
        // Local copies, so that the compiler knows that no store changes them.
        AdamWUpdate table = table_;
        AdamW<Native> by = by_;
        for (; i + W <= end; i += W) {
            if (W == 16 || i % 16 == 0) prefetch_line<ALL_LEVELS>(table, i + ahead_);
            some<AMSGRAD>(table, by, i, W);
        }
        if (i < end) some<AMSGRAD>(table, by, i, end - i);
    }

    // Prefetches what is read of element i and of those after it in a cache line.
    template <Prefetched INTO>
    static ZEROCAST_FN void prefetch_line(const AdamWUpdate& table, i64 i) {
        __builtin_prefetch(table.master + i, 0, INTO);
        __builtin_prefetch(table.gradient + i, 0, INTO);
        __builtin_prefetch(table.exp_avg + i, 0, INTO);
        __builtin_prefetch(table.exp_avg_sq + i, 0, INTO);
    }

    // n elements, at most a register of them; returns them.
    template <bool AMSGRAD>
    static ZEROCAST_FN Floats some(const AdamWUpdate& table, const AdamW<Native>& by, i64 i,
                                   i64 n) {
        Floats gradient = load_some<Floats>(table.gradient + i, n);
        Floats x = load_some<Floats>(table.master + i, n);
        Floats m = load_some<Floats>(table.exp_avg + i, n);
        Floats v = load_some<Floats>(table.exp_avg_sq + i, n);
        by.average(gradient, m, v);
        store_some(table.exp_avg + i, m, n);
        store_some(table.exp_avg_sq + i, v, n);
        if constexpr (AMSGRAD) {
            v = by.larger(load_some<Floats>(table.max_exp_avg_sq + i, n), v);
            store_some(table.max_exp_avg_sq + i, v, n);
        }
        x = by.stepped(x, m, v);
        store_some(table.master + i, x, n);
        return x;
    }
};

}  // namespace ZEROCAST_ISA
}  // namespace zerocast
