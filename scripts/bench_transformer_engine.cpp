// TransformerEngine's kernels over many weights, for scripts/bench_transformer_engine.py.
//
// This is our own text against the public C interface of a checkout that lies elsewhere; nothing of
// that project is in this repository. It calls the functions that its casts of sharded master
// weights come down to, in their order: one weight after the other, except where the library itself
// takes a list. The tensor handles are made beforehand, so what is timed is launches and kernels,
// without the bindings around them.

#include <transformer_engine/cast.h>
#include <transformer_engine/multi_tensor.h>
#include <transformer_engine/recipe.h>
#include <transformer_engine/transformer_engine.h>
#include <transformer_engine/transpose.h>

#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <string>
#include <vector>

namespace {

using i64 = std::int64_t;
using transformer_engine::DType;
using transformer_engine::TensorWrapper;

// One row of the table that Python makes: WEIGHT in bench_transformer_engine.py, all 64 bits wide.
struct Weight {
    i64 rows, cols;                  // the whole weight
    i64 start, owned;                // the elements that this rank casts
    void* master;                    // [owned]
    float* block_amax;               // [amax_rows, amax_cols]; per tensor [1, 1]
    float* block_scale;              // the same
    i64 amax_rows, amax_cols;        //
    float* tensor_amax;              // [1]; of all weights end to end
    float* tensor_scale;             // [1]; of all weights end to end
    void* scale_inv;                 // [scale_rows, scale_cols]; FP32, or E4M3 bytes for NVFP4
    i64 scale_rows, scale_cols;      //
    std::uint8_t* codes;             // of the owned elements
    std::uint8_t* gathered;          // the whole weight's codes, which the transpose reads
    std::uint8_t* gathered_scale;    // [scale_rows, scale_cols]; NVFP4 only
    std::uint8_t* columnwise;        // the transposed codes
    std::uint8_t* columnwise_scale;  // [columnwise_rows, columnwise_cols]; NVFP4 only
    i64 columnwise_rows, columnwise_cols;
};

enum Scheme : i64 { FP8, FP8_BLOCKWISE, NVFP4 };
enum Step : i64 { AMAX, SCALE, CAST, TRANSPOSE, STEPS };

constexpr float MAX_E4M3 = 448;
constexpr int CHUNK = 2048 * 32;  // elements of a thread block in the library's multi-tensor calls

using Call = std::function<void(cudaStream_t)>;

class Run {
  public:
    Run(Scheme scheme, const Weight* weights, i64 count, DType master_type, void* overflow)
        : master_type_(master_type) {
        for (const Weight* w = weights; w != weights + count; ++w) {
            if (scheme == NVFP4)
                add_nvfp4(*w);
            else
                add_fp8(*w, scheme == FP8_BLOCKWISE);
        }
        if (scheme == NVFP4) {
            const size_t n = count;
            NVTETensor amax = tensor(weights->tensor_amax, {n}, DType::kFloat32);
            NVTETensor scale = tensor(weights->tensor_scale, {n}, DType::kFloat32);
            calls_[SCALE].insert(calls_[SCALE].begin(), [=](cudaStream_t stream) {
                nvte_nvfp4_compute_global_scale(amax, scale, stream);
            });
        } else {
            NVTETensor flag = tensor(overflow, {1}, DType::kInt32);
            calls_[SCALE].push_back([this, flag](cudaStream_t stream) {
                NVTETensor* lists[] = {amaxes_.data(), scales_.data(), scale_invs_.data()};
                nvte_multi_tensor_compute_scale_and_scale_inv_cuda(
                    CHUNK, flag, lists, 3, amaxes_.size(), MAX_E4M3, scheme_power_2_, 0, stream);
            });
            scheme_power_2_ = scheme == FP8_BLOCKWISE;
        }
    }

    void step(Step step, cudaStream_t stream) const {
        for (const Call& call : calls_[step]) call(stream);
    }

  private:
    NVTETensor tensor(void* data, const std::vector<size_t>& shape, DType type) {
        return tensors_.emplace_back(data, shape, type).data();
    }

    void add_fp8(const Weight& w, bool blockwise) {
        const size_t rows = w.rows, cols = w.cols, start = w.start, owned = w.owned, wide = 128;
        const std::vector<size_t> blocks{size_t(w.amax_rows), size_t(w.amax_cols)};
        NVTETensor amax = tensor(w.block_amax, blocks, DType::kFloat32);
        NVTETensor scale = tensor(w.block_scale, blocks, DType::kFloat32);
        amaxes_.push_back(amax);
        scales_.push_back(scale);
        scale_invs_.push_back(tensor(w.scale_inv, blocks, DType::kFloat32));
        NVTETensor gathered = tensor(w.gathered, {rows, cols}, DType::kFloat8E4M3);
        NVTETensor columnwise = tensor(w.columnwise, {cols, rows}, DType::kFloat8E4M3);
        calls_[TRANSPOSE].push_back(
            [=](cudaStream_t stream) { nvte_transpose(gathered, columnwise, stream); });
        if (owned == 0) return;
        if (blockwise) {
            const size_t stride = w.amax_cols;
            NVTETensor master = tensor(w.master, {owned}, master_type_);
            NVTETensor codes = tensor(w.codes, {owned}, DType::kByte);
            calls_[AMAX].push_back([=](cudaStream_t stream) {
                nvte_fp8_block_scaling_compute_partial_amax(master, amax, rows, cols, stride, 1,
                                                            start, wide, stream);
            });
            calls_[CAST].push_back([=](cudaStream_t stream) {
                nvte_fp8_block_scaling_partial_cast(master, codes, scale, rows, cols, stride, 1,
                                                    start, wide, kNVTEFloat8E4M3, stream);
            });
        } else {
            NVTETensor master = tensor(w.master, {1, owned}, master_type_);
            // Where the amax is taken, and what the cast writes under its scale.
            NVTETensor taken = tensors_
                                   .emplace_back(nullptr, std::vector<size_t>{1, owned},
                                                 DType::kFloat32, w.block_amax)
                                   .data();
            NVTETensor codes =
                tensors_
                    .emplace_back(w.codes, std::vector<size_t>{1, owned}, DType::kFloat8E4M3,
                                  nullptr, w.block_scale, static_cast<float*>(w.scale_inv))
                    .data();
            calls_[AMAX].push_back(
                [=](cudaStream_t stream) { nvte_compute_amax(master, taken, stream); });
            calls_[CAST].push_back(
                [=](cudaStream_t stream) { nvte_quantize_v2(master, codes, nullptr, stream); });
        }
    }

    void add_nvfp4(const Weight& w) {
        const size_t rows = w.rows, cols = w.cols, start = w.start, owned = w.owned, wide = 16;
        const size_t blocks_h = w.amax_rows, blocks_w = w.amax_cols, padded = w.scale_rows;
        const std::vector<size_t> blocks{blocks_h, blocks_w};
        const std::vector<size_t> plane{padded, size_t(w.scale_cols)};
        const std::vector<size_t> other{size_t(w.columnwise_rows), size_t(w.columnwise_cols)};
        NVTETensor amax = tensor(w.block_amax, blocks, DType::kFloat32);
        NVTETensor scale = tensor(w.block_scale, blocks, DType::kFloat32);
        NVTETensor tensor_amax = tensor(w.tensor_amax, {1}, DType::kFloat32);
        NVTETensor tensor_scale = tensor(w.tensor_scale, {1}, DType::kFloat32);
        NVTETensor scale_inv = tensor(w.scale_inv, plane, DType::kByte);
        // The copy of the tensor's amax that a weight keeps goes back to where it came from.
        calls_[SCALE].push_back([=](cudaStream_t stream) {
            nvte_nvfp4_fused_scale(amax, tensor_amax, scale, scale_inv, tensor_amax, blocks_h,
                                   blocks_w, padded, wide, stream);
        });
        NVTETensor gathered = tensor(w.gathered, {rows, cols / 2}, DType::kByte);
        NVTETensor columnwise = tensor(w.columnwise, {cols, rows / 2}, DType::kByte);
        NVTETensor gathered_scale = tensor(w.gathered_scale, plane, DType::kByte);
        NVTETensor columnwise_scale = tensor(w.columnwise_scale, other, DType::kByte);
        calls_[TRANSPOSE].push_back([=](cudaStream_t stream) {
            nvte_nvfp4_data_transpose(gathered, columnwise, stream);
            nvte_nvfp4_scale_transpose(gathered_scale, columnwise_scale, blocks_h, blocks_w,
                                       stream);
        });
        if (owned == 0) return;
        NVTETensor master = tensor(w.master, {owned}, master_type_);
        NVTETensor taken =
            tensors_
                .emplace_back(nullptr, std::vector<size_t>{owned}, DType::kFloat32, w.tensor_amax)
                .data();
        NVTETensor codes = tensor(w.codes, {(owned + 1) / 2}, DType::kByte);
        calls_[AMAX].push_back([=](cudaStream_t stream) {
            nvte_nvfp4_2d_compute_partial_amax(master, amax, rows, cols, blocks_w, 1, start, wide,
                                               stream);
            nvte_compute_amax(master, taken, stream);
        });
        calls_[CAST].push_back([=](cudaStream_t stream) {
            nvte_nvfp4_2d_partial_cast(master, codes, scale, tensor_scale, rows, cols, blocks_w, 1,
                                       start, wide, stream);
        });
    }

    DType master_type_;
    int scheme_power_2_ = 0;
    std::deque<TensorWrapper> tensors_;  // a deque: the handles stay where they are
    std::vector<NVTETensor> amaxes_, scales_, scale_invs_;
    std::vector<Call> calls_[STEPS];
};

std::string error;

}  // namespace

extern "C" {

// Why the last call failed.
const char* bench_error() { return error.c_str(); }

// The launches of `count` weights, or null.
void* bench_prepare(i64 scheme, const Weight* weights, i64 count, i64 bf16, void* overflow) {
    try {
        return new Run(Scheme(scheme), weights, count, bf16 ? DType::kBFloat16 : DType::kFloat32,
                       overflow);
    } catch (const std::exception& e) {
        error = e.what();
        return nullptr;
    }
}

// One step of all weights on `stream`; false where the library raised.
bool bench_step(const void* run, i64 step, cudaStream_t stream) {
    try {
        static_cast<const Run*>(run)->step(Step(step), stream);
        return true;
    } catch (const std::exception& e) {
        error = e.what();
        return false;
    }
}

void bench_release(void* run) { delete static_cast<Run*>(run); }
}
