// The casts of the weights of all experts apart from an expert linear: what its calls do to them, to the
// same bits, so that ranks, or the micro-batches of a step, share the result. A plan is immutable and
// shared between threads.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "float8/expert_quantizer.h"
#include "runtime/device/calls/call_memory.hpp"
#include "runtime/experts/group_cast.hpp"
#include "runtime/linear/plan/kernels.hpp"

namespace f8::runtime {

struct ExpertQuantizerDesc {
  int64_t experts = 1;
  int64_t rows = 0;  // of each expert's matrix, or of a rank's part of it
  int64_t cols = 0;
  Recipe recipe;
  Dtype dtype = Dtype::kBf16;
  bool f32_source = false;  // the weights are in fp32, and are rounded to dtype as they are read
  NonFinite non_finite = NonFinite::kPropagate;
  bool over_ranks = false;  // ranks have other rows of each matrix
  bool noop_flag = false;   // casts heed the flag of a call
  // Half of each expert's rows are in one tensor, and the others in another one.
  bool two_tensors = false;
};

using ExpertQuantizeCall = float8_expert_quantize_args;

class ExpertQuantizer {
 public:
  [[nodiscard]] static Result<std::shared_ptr<const ExpertQuantizer>> plan(
      const std::shared_ptr<Context>& context, const ExpertQuantizerDesc& desc);
  // The layout of the copies, which follows from the description.
  [[nodiscard]] static Result<float8_layout> layout_of(const ExpertQuantizerDesc& desc);

  [[nodiscard]] const float8_layout& layout() const { return layout_; }
  [[nodiscard]] size_t workspace_bytes() const { return workspace_bytes_; }
  // Over ranks: writes amax and row_amax of the call. The last word of amax is that of delayed scales.
  [[nodiscard]] Status find_amax(const ExpertQuantizeCall& call, Stream stream) const;
  [[nodiscard]] Status run(const ExpertQuantizeCall& call, Stream stream) const;

 private:
  struct CastDesc {
    codegen::CastSpec spec;
    int slot;  // of the delayed scales, or -1
  };
  struct Cast {
    GroupCastPlan plan;
    int slot;
    size_t first;  // the place of a first step's scale in the workspace
  };

  ExpertQuantizer(std::shared_ptr<Context> context, ExpertQuantizerDesc desc)
      : context_(std::move(context)), desc_(std::move(desc)) {}
  [[nodiscard]] int64_t rows() const { return desc_.experts * desc_.rows; }
  // The rows of each expert that one tensor has.
  [[nodiscard]] int64_t rows_of_tensor() const { return desc_.rows / (desc_.two_tensors ? 2 : 1); }
  // All of a plan that needs no device.
  [[nodiscard]] Status lay_out();
  [[nodiscard]] Status check_sizes() const;
  [[nodiscard]] Status check_copies() const;
  void place_copies();
  void count_words();
  [[nodiscard]] Status plan_casts();
  // A cast whose maximum is that of the weights of all experts; none without delayed scales.
  [[nodiscard]] std::optional<codegen::CastSpec> with_one_maximum() const;
  [[nodiscard]] bool is_delayed() const {
    return std::ranges::any_of(descs_, [](const CastDesc& cast) { return cast.slot >= 0; });
  }
  // Writes that maximum.
  [[nodiscard]] Status find_maximum(const ExpertQuantizeCall& call, uint32_t* amax,
                                    Stream stream) const;
  // Leaves in the workspace the scale of a first step.
  [[nodiscard]] Result<const float*> first_scale(const Cast& cast, const ExpertQuantizeCall& call,
                                                 Stream stream) const;
  // The part of a call that casts read, whose weights are that many groups of rows.
  [[nodiscard]] GroupCastCall rows_of(const ExpertQuantizeCall& call, int64_t groups) const;
  // Calls `work` with each cast and its part of a call.
  template <class Work>
  [[nodiscard]] Status each(const ExpertQuantizeCall& call, const Work& work) const;
  [[nodiscard]] Status check(const char* name, const ExpertQuantizeCall& call, bool cast,
                             Stream stream) const;

  std::shared_ptr<Context> context_;
  ExpertQuantizerDesc desc_;
  Copies copies_;
  std::vector<DelayedSlot> slots_;
  std::vector<CastDesc> descs_;
  std::vector<Cast> casts_;
  std::optional<GroupCastPlan> maximum_;  // with delayed scales
  const Kernel* scale_update_ = nullptr;
  float8_layout layout_ = {};
  size_t q_scales_ = 0, qt_scales_ = 0;  // places in `tensor` and `transposed`
  size_t workspace_bytes_ = 0;
};

}  // namespace f8::runtime
