// The casts of one operand apart from a linear: what a linear does to it, to the same bits, so that
// several linears, or ranks, share the result. Plan once, run often; a plan is immutable and shared
// between threads.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <utility>

#include "runtime/linear/plan/plan_launches.hpp"
#include "runtime/linear/tensors/cast_list.hpp"
#include "runtime/linear/tensors/computed_casts.hpp"
#include "runtime/linear/tensors/fp8_tensor.hpp"

namespace f8::runtime {

// What is cast: x, an activation's product with up, its gradients, what a norm makes of x, an activation,
// or its gradient.
enum class CastSource : uint8_t {
  kPlain,
  kGlu,
  kGluBackward,
  kRmsNorm,
  kActivation,
  kActivationBackward,
  kLayerNorm,
  kMergedGluBackward,
  kMergedGluBackwardUpFirst
};
[[nodiscard]] CastSource source_of(codegen::Computed computed);
[[nodiscard]] bool is_merged(CastSource source);       // gate and up in one tensor
[[nodiscard]] const char* name_of(CastSource source);  // in the C interface

struct QuantizerDesc {
  Tensor operand = Tensor::kInput;
  int64_t rows = 0;  // the most that a call has; of a weight, all calls'
  int64_t cols = 0;
  Recipe recipe;
  Dtype dtype = Dtype::kBf16;
  bool f32_source = false;  // x is in fp32, and is rounded to dtype as it is read
  NonFinite non_finite = NonFinite::kPropagate;
  bool count = false;
  bool q = true;  // the copies that are made, of those that the recipe has
  bool qt = true;
  bool scale_apart = false;  // of q alone: what a cast of qt takes of it lies in qt's place
  bool recast = false;       // of qt alone: by what such a q left
  bool over_ranks = false;   // calls cast shards, of up to `rows` rows, or of some columns
  int64_t whole_rows = 0;    // with over_ranks: of the whole tensor; 0: shards have whole blocks
  bool noop_flag = false;    // casts of a weight heed QuantizeCall::noop_flag
  CastSource source = CastSource::kPlain;
  codegen::Activation activation = codegen::Activation::kSilu;  // of a source that has one
  bool column_sums = false;     // of gradients: calls leave those of their columns
  bool less_workspace = false;  // of kGluBackward: the gradients are never in it
};

using QuantizeCall = float8_quantize_args;

// A cast that is one launch, for a kernel that makes it as it writes what is cast.
struct SinglePassCast {
  codegen::CastSpec cast;
  QuantizeOperand operand;
};

class Quantizer {
 public:
  // kUnsupported where the recipe makes no copy of the operand.
  [[nodiscard]] static Result<std::shared_ptr<const Quantizer>> plan(
      const std::shared_ptr<Context>& context, const QuantizerDesc& desc);

  // The layout of a tensor's copies, which follows from the description.
  [[nodiscard]] static Result<float8_layout> layout_of(const QuantizerDesc& desc, int64_t rows);

  // The bytes of all copies, and of qt's part, which may lie apart.
  [[nodiscard]] size_t tensor_bytes() const { return layout_.q_bytes + layout_.qt_bytes; }
  [[nodiscard]] size_t transposed_bytes() const { return layout_.qt_bytes; }
  // A first step of delayed scaling may need more than later ones.
  [[nodiscard]] size_t workspace_bytes(bool first_step = true) const {
    return desc_.source == CastSource::kPlain ? layout_.workspace_bytes
                                              : computed_.workspace_bytes(first_step);
  }
  [[nodiscard]] const QuantizerDesc& desc() const { return desc_; }
  [[nodiscard]] const Context& context() const { return *context_; }
  // True where the recipe has delayed scaling, so that calls need scale slots.
  [[nodiscard]] bool is_delayed() const { return !kernels_.slots.empty(); }

  // The words that calls of a quantizer over ranks take (cast_list.hpp), else 0.
  [[nodiscard]] int64_t amax_words() const { return words_.over_ranks; }
  [[nodiscard]] int64_t row_amax_words() const { return words_.rows; }
  // Finds the maxima of a shard: writes amax and row_amax of the call, and reads its x. Of a computed source it
  // reads all operands, and leaves in the workspace what run() reads there.
  [[nodiscard]] Status find_amax(const QuantizeCall& call, Stream stream) const;

  // The cast of a call of `name`, which is checked, apart from its launch. kUnsupported where that is not the
  // only one: maxima are found before, copies are cast apart, or scales are to be taken from a first step.
  [[nodiscard]] Result<SinglePassCast> single_pass(const char* name, const QuantizeCall& call,
                                                   Stream stream) const;

  // The view of what a run with these rows leaves in `tensor` and `transposed`.
  [[nodiscard]] Result<float8_tensor> view(const void* tensor, const void* transposed,
                                           int64_t rows) const;
  [[nodiscard]] Status run(const QuantizeCall& call, Stream stream,
                           AmaxReducer reduce = nullptr) const;

 private:
  friend class QuantizerList;
  static constexpr const char* kArgs = "float8_quantize_args";

  Quantizer(std::shared_ptr<Context> context, QuantizerDesc desc)
      : context_(std::move(context)), desc_(std::move(desc)) {}
  // All of a plan that needs no device, whose SMs size the workspace alone.
  [[nodiscard]] Status lay_out(int sm_count);
  [[nodiscard]] std::vector<codegen::KernelSpec> kernel_specs() const;
  [[nodiscard]] Status plan_launches();
  [[nodiscard]] Status lay_out_shards();
  [[nodiscard]] Status plan_shards();
  [[nodiscard]] Status plan_computed();
  [[nodiscard]] ComputedCall computed_call(const QuantizeCall& call) const;
  [[nodiscard]] Status find_computed(const QuantizeCall& call, Stream stream) const;
  // The call that casts up's gradient, of one that casts both.
  [[nodiscard]] static QuantizeCall of_up(const QuantizeCall& call);
  // What a list's plan reads of the tensors that calls cast.
  [[nodiscard]] ListedTensor listed() const;
  // qt follows q where it has no place of its own.
  void set_single_pass();
  void set_copies(const void* tensor, const void* transposed, CallArguments& to) const;
  void bind(const QuantizeCall& call, CallArguments& to) const;
  // Sets the flag of a call behind its casts.
  [[nodiscard]] Status set_noop_flag(uint32_t* flag, Stream stream) const;
  [[nodiscard]] Status check_whole() const;
  [[nodiscard]] Status check_source() const;
  [[nodiscard]] Status check_flag() const;
  [[nodiscard]] Status check_scale_apart() const;
  // Tells whether a call takes what forward's cast left for it: the tensor's scale, or the maxima of columns.
  [[nodiscard]] bool reads_kept() const {
    return kernels_.keeps_scale(desc_.operand) || (kernels_.keeps_column_amax && desc_.recast);
  }
  [[nodiscard]] Status check_kept_scale(const QuantizeCall& call) const;
  [[nodiscard]] Status check_computed() const;
  [[nodiscard]] bool activates() const;  // what is cast is an activation, or a gradient of one
  [[nodiscard]] bool casts_gradients() const;  // that are computed
  // Tells whether a call takes its first scales from all ranks' tensors, and so writes them.
  [[nodiscard]] static bool over_ranks(const QuantizeCall& call);
  // Check what of a call is of a computed source alone: of one that casts, or that finds maxima.
  [[nodiscard]] Status check_factors(const QuantizeCall& call, bool cast) const;
  [[nodiscard]] size_t needed_workspace(const QuantizeCall& call) const {
    return workspace_bytes(step_of(call).first_step != 0);
  }
  [[nodiscard]] Status check_workspace(const QuantizeCall& call) const;
  [[nodiscard]] Status check_slots(const QuantizeCall& call, const char* name,
                                   const float8_scale_slots& scales) const;
  [[nodiscard]] Status check_rows(const char* name, int64_t rows) const;
  [[nodiscard]] Status check_first_row(const QuantizeCall& call) const;
  // Check all of a call but its memory. `name` is the function of the C interface.
  [[nodiscard]] Status check_cast(const char* name, const QuantizeCall& call) const;
  [[nodiscard]] Status check_find(const char* name, const QuantizeCall& call) const;
  [[nodiscard]] Status check_amax(const char* name, const QuantizeCall& call, bool cast) const;
  // List the memory that a call touches.
  [[nodiscard]] CallMemory cast_memory(const QuantizeCall& call) const;
  [[nodiscard]] CallMemory find_memory(const QuantizeCall& call) const;
  void add_amax(CallMemory& memory, const QuantizeCall& call, Access access) const;
  struct CopyNames {
    const char *tensor, *transposed, *counters;
  };
  void add_copies(CallMemory& memory, const CopyNames& names, const QuantizeCall& call) const;
  void add_launch_counts(CallMemory& memory, const QuantizeCall& call) const;
  // Adds x, and what a computed source reads beside it.
  void add_operands(CallMemory& memory, const QuantizeCall& call) const;

  std::shared_ptr<Context> context_;
  QuantizerDesc desc_;
  LinearKernels kernels_;
  int64_t whole_rows_ = 0;  // not 0: of the whole tensor, whose 128x128 blocks shards may cut
  QuantizerLayout layout_;
  std::optional<std::pair<codegen::CastSpec, CastOperand>>
      single_pass_;                     // of a cast that is one launch
  std::array<LaunchList, 4> launches_;  // indexed by kFirstStep and kOverRanks
  ShardWords words_;
  std::optional<CastList> shards_;  // of the tensor alone, in place of launches_: over ranks
  ComputedCasts computed_;          // of a source that is no kPlain, in place of launches_
};

}  // namespace f8::runtime
