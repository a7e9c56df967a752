// compute_scale: the stored scales of whole weights from reduced amaxes, padding and repeats
// included; and a weight's state of delayed scaling is brought up to date. expand_scales:
// the same stored scales from one of each block.
#include "cpu/encoders.h"
#include "cpu/numerics.h"
#include "cpu/scale_rows.h"

namespace zerocast {
inline namespace ZEROCAST_ISA {
namespace {

// Rows of blocks that are made before they are stored, where the plane is stored transposed: as
// many FP32 entries as a line of memory holds.
constexpr i64 TRANSPOSED_ROWS = 16;

// Stands for numerics where scales have been made before, one a block.
template <class Entry>
struct Made {
    typedef Entry Stored;
    static constexpr bool CHOOSES = false;
};

// One plane of one weight.
template <class Numerics>
class PlaneScales {
  public:
    PlaneScales(const ScalePlane& plane, const u8* choices, const Numerics& numerics)
        : plane_(plane), choices_(choices), numerics_(numerics) {}

    // Rows of blocks [first, last).
    void operator()(i64 first, i64 last) const {
        i64 blocks_w = plane_.grid.blocks_w();
        auto make = [&](i64 i, Stored* to) { scales(i * blocks_w, blocks_w, to); };
        if (plane_.transposed)
            transposed_rows(first, last);
        else
            store_rows<Stored>(plane_, first, last, make);
        if (last == plane_.grid.blocks_h()) pad_rows<Stored>(plane_);
    }

  private:
    typedef typename Numerics::Stored Stored;

    const ScalePlane& plane_;
    const u8* choices_;
    Numerics numerics_;

    // The scales of n blocks side by side.
    void scales(i64 block, i64 n, Stored* to) const {
        if constexpr (SAME<Numerics, Made<Stored>>)
            memcpy(to, (const Stored*)plane_.block_amax + block, n * sizeof(Stored));
        else
            compute(block, n, to);
    }

    void compute(i64 block, i64 n, Stored* to) const {
        const i32* amax = plane_.block_amax + block;
        const u8* choices = Numerics::CHOOSES ? choices_ + block : nullptr;
        i64 b = 0;
        for (; b + GROUP <= n; b += GROUP)
            group(amax + b, Numerics::CHOOSES ? choices + b : nullptr, to + b);
        if (b == n) return;
        i32 last_amaxes[GROUP] = {};
        u8 last_choices[GROUP] = {};
        Stored last[GROUP];
        memcpy(last_amaxes, amax + b, (n - b) * sizeof(i32));
        if (Numerics::CHOOSES) memcpy(last_choices, choices + b, n - b);
        group(last_amaxes, last_choices, last);
        memcpy(to + b, last, (n - b) * sizeof(Stored));
    }

    // Those of GROUP blocks: packing one register at a time takes several times as long.
    ZEROCAST_FN void group(const i32* amax, const u8* choices, Stored* to) const {
        Native::Int stored[4];
        for (int v = 0; v < 4; v++) {
            auto loaded = Native::load_as<Native::Int>(amax + v * Native::WIDTH);
            auto chosen = Numerics::CHOOSES ? load_bytes<Native>(choices + v * Native::WIDTH)
                                            : Native::splat(0);
            stored[v] = numerics_.template stored<Native>(loaded, chosen);
        }
        if constexpr (sizeof(Stored) == 1)
            Native::store(to, pack(stored));
        else
            memcpy(to, stored, sizeof stored);
    }

    void transposed_rows(i64 first, i64 last) const {
        auto entries = (Stored*)plane_.scale_inv;
        i64 blocks_w = plane_.grid.blocks_w(), stride = plane_.padded_cols;
        Stored made[TRANSPOSED_ROWS][GROUP];
        for (i64 i = first; i < last; i += TRANSPOSED_ROWS) {
            i64 n = min_of(TRANSPOSED_ROWS, last - i);
            for (i64 b = 0; b < blocks_w; b += GROUP) {
                i64 count = min_of(GROUP, blocks_w - b);
                for (i64 r = 0; r < n; r++) scales((i + r) * blocks_w + b, count, made[r]);
                for (i64 c = 0; c < count; c++) {
                    i64 row = (b + c) * plane_.col_repeat;
                    i64 row_end = min_of(row + plane_.col_repeat, plane_.cols);
                    for (; row < row_end; row++) {
                        if (plane_.row_repeat == 1) {  // or each entry would be a call of memset
                            Stored* to = entries + row * stride + i;
                            for (i64 r = 0; r < n; r++) to[r] = made[r][c];
                            continue;
                        }
                        for (i64 r = 0; r < n; r++) {
                            i64 col = (i + r) * plane_.row_repeat;
                            i64 col_end = min_of(col + plane_.row_repeat, plane_.rows);
                            for (; col < col_end; col++) entries[row * stride + col] = made[r][c];
                        }
                    }
                }
            }
        }
        if (last == plane_.grid.blocks_h()) {
            for (i64 row = 0; row < plane_.cols; row++)
                fill(entries + row * stride + plane_.rows, stride - plane_.rows, plane_.padding);
        }
    }
};

// Delayed scaling: the history takes the amax of what was cast, and the next cast's scale follows.
void advance(const DelayedState& state, i32 amax_bits, const NumericsTable& numerics) {
    float scale = *state.scale;
    *state.cast_scale = scale;
    if (!enters_history(amax_bits)) return;
    memmove(state.history + 1, state.history, (state.length - 1) * sizeof(float));
    state.history[0] = Scalar::value(amax_bits);
    float largest = state.history[0];
    for (i64 i = 1; !numerics.most_recent && i < state.length; i++) {
        if (state.history[i] > largest) largest = state.history[i];
    }
    *state.scale = next_scale(Scalar::value((i32)numerics.scaled_max), largest, scale);
}

// What is done once a weight, when all of its scales are there.
void finish(const ScaleTarget& target, const NumericsTable& numerics) {
    if (target.amax) *target.amax = effective_amax(numerics, *target.tensor_amax);
    if (target.delayed.cast_scale) advance(target.delayed, *target.tensor_amax, numerics);
    if (target.rounding_counter) target.rounding_counter[1]++;
}

// Stored scales of one plane, cut between rows of blocks.
Span plane_span(const ScalePlane& plane) {
    if (!plane.scale_inv) return Span{0, 0, 1};
    i64 row = plane.row_repeat * (plane.transposed ? plane.cols : plane.padded_cols);
    return Span{0, plane.grid.blocks_h() * row, row};
}

constexpr ScalePlane ScaleTarget::* PLANES[] = {&ScaleTarget::rowwise, &ScaleTarget::columnwise};

// Stores the planes of all weights: with(target, work) calls work with what makes their scales.
template <class With>
void store_planes(const ScaleTarget* targets, i64 count, i64 threads, const With& with) {
    i64 total = total_elements(targets, count, [](const ScaleTarget& target) {
        return Span{0, plane_span(target.rowwise).size() + plane_span(target.columnwise).size(), 1};
    });
    // Most stored scales are copies of the one above: sixteen are as much work as one element.
    in_parallel(total / 16, threads, [&](i64 thread, i64 num_threads) {
        for (ScalePlane ScaleTarget::* which : PLANES) {
            auto span = [&](const ScaleTarget& target) { return plane_span(target.*which); };
            share(targets, count, thread, num_threads, span,
                  [&](const ScaleTarget& target, i64 begin, i64 end) {
                      i64 row = span(target).granule;
                      with(target, [&](auto scaling) {
                          PlaneScales<decltype(scaling)> scales(target.*which, target.choices,
                                                                scaling);
                          scales(begin / row, end / row);
                      });
                  });
        }
    });
}

}  // namespace
}  // namespace ZEROCAST_ISA
}  // namespace zerocast

ZEROCAST_EXPORT(compute_scale)(const void* numerics, const void* table, long long count,
                               long long threads) {
    using namespace zerocast;
    auto& numerics_table = *(const NumericsTable*)numerics;
    auto targets = (const ScaleTarget*)table;
    store_planes(targets, count, threads, [&](const ScaleTarget& target, auto work) {
        with_numerics(numerics_table, target.tensor_amax, target.delayed, work);
    });
    in_parallel(count, 1, [&](i64, i64) {
        for (i64 i = 0; i < count; i++) finish(targets[i], numerics_table);
    });
}

ZEROCAST_EXPORT(expand_scales)(const void* numerics, const void* table, long long count,
                               long long threads) {
    using namespace zerocast;
    i64 kind = ((const NumericsTable*)numerics)->kind;
    store_planes((const ScaleTarget*)table, count, threads, [&](const ScaleTarget&, auto work) {
        if (kind == NUMERICS_FLOAT8)
            work(Made<float>{});
        else
            work(Made<u8>{});
    });
}
