// Plans, made at the first call of their kind and kept for the life of the process. A lookup is a
// hash and a shared lock. Planning compiles kernels, so it never happens in a captured stream.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "float8/float8.h"
#include "python/shim/base/config.hpp"
#include "python/shim/base/tensors.hpp"

namespace float8_torch {

// Calls of kRows * i < M <= kRows * (i + 1) share a plan, and a saved buffer has that many rows:
// its size is then linear in the number of blocks, which torch.compile needs for a dynamic M.
inline constexpr int64_t kRows = 512;
[[nodiscard]] constexpr int64_t row_blocks(int64_t m) {
  return (m + kRows - 1) / kRows;
}
static_assert(row_blocks(0) == 0 && row_blocks(1) == 1 && row_blocks(kRows) == 1);

struct PlanKey {
  uint64_t config = 0;
  int64_t m_max = 0;
  int64_t n = 0;
  int64_t k = 0;
  int32_t device = 0;  // -1: emulated
  int8_t tensor_dtype = 0;
  int8_t grad_dtype = 0;       // of dw and db
  bool weight_shards = false;  // qt of the weight may lie in shards
  bool operator==(const PlanKey&) const = default;
};

struct Plan {
  float8_linear* linear = nullptr;  // null: weight_shards is asked for, and cannot be

  // The bytes of `saved` of a call that is given x, or the weight, in fp8.
  [[nodiscard]] size_t saved_bytes(bool x_given, bool weight_given) const {
    return saved[(x_given ? 1 : 0) + (weight_given ? 2 : 0)];
  }
  // A call needs these bytes of workspace.
  [[nodiscard]] size_t workspace_bytes(const float8_forward_args& args) const {
    return float8_linear_forward_workspace_bytes(linear, args.x.fp8 != nullptr,
                                                 args.w.fp8 != nullptr);
  }
  [[nodiscard]] size_t workspace_bytes(const float8_backward_args& args) const {
    const bool x = args.x.fp8 != nullptr && args.x.fp8->qt != nullptr;
    return float8_linear_backward_workspace_bytes(linear, x, args.w.fp8 != nullptr,
                                                  args.dy.fp8 != nullptr);
  }
  std::array<size_t, 4> saved = {};
};

// The casts of an operand apart from a linear.
struct QuantizerKey {
  uint64_t config = 0;  // Config::of_casts()
  int64_t rows_max = 0;
  int64_t cols = 0;
  int32_t device = 0;  // -1: emulated
  int8_t operand = 0;  // a float8_operand
  int8_t dtype = 0;
  int8_t copies = FLOAT8_Q_ALONE;  // a float8_copies
  bool over_ranks = false;         // calls cast shards of up to rows_max rows
  bool noop_flag = false;          // casts look at a weight's flag
  int64_t whole_rows = 0;          // with over_ranks: of the whole, where shards may cut its blocks
  bool f32_source = false;         // the operand is in fp32, and is rounded to dtype as it is read
  int8_t source = FLOAT8_PLAIN;    // a float8_source
  int8_t activation = FLOAT8_SILU;  // a float8_activation, of sources that have one
  bool column_sums = false;         // calls leave those of a gradient
  bool less_workspace = false;      // calls compute the gradients of a GLU twice
  bool operator==(const QuantizerKey&) const = default;
};

// Throws where the number is no float8_operand.
[[nodiscard]] float8_operand operand_of(int64_t operand);

// The copies of a cast for a forward that is followed by a backward, or is not.
[[nodiscard]] inline float8_copies copies_of(Config config, float8_operand operand, bool backward) {
  if (!backward) return FLOAT8_Q_ALONE;
  return operand == FLOAT8_INPUT && config.recompute() ? FLOAT8_Q_FOR_RECOMPUTE
                                                       : FLOAT8_BOTH_COPIES;
}

[[nodiscard]] int8_t checked_copies(int64_t copies);  // throws for what is no float8_copies

struct Quantizer {
  float8_quantizer* quantizer = nullptr;
  float8_context* context = nullptr;
  size_t workspace_bytes = 0;  // of any call
  size_t q_bytes = 0;
  size_t qt_bytes = 0;
  int64_t amax_words = 0;
  int64_t row_amax_words = 0;
};

// The casts of many operands in few launches.
struct QuantizerList {
  float8_quantizer_list* list = nullptr;
  size_t workspace_bytes = 0;
};

// One GEMM over operands in fp8.
struct GemmKey {
  uint64_t config = 0;  // Config::of_casts()
  int64_t m_max = 0;
  int64_t n = 0;
  int64_t k = 0;
  int32_t device = 0;  // -1: emulated
  int8_t kind = 0;     // a float8_gemm_kind
  int8_t dtype = 0;    // of d
  bool bias = false;
  bool accumulate = false;
  int16_t sm_limit = 0;  // the most SMs that it takes; 0: all
  bool operator==(const GemmKey&) const = default;
};

struct GemmPlan {
  float8_gemm_plan* plan = nullptr;
  size_t workspace_bytes = 0;
};

// The rows of all experts are another number in each step where ranks exchange tokens, and a plan serves
// any number up to its m_max. Calls of kExpertRows * i < M <= kExpertRows * (i + 1) share one, so that
// plans are few, and at most so many rows of its buffers are not used. The sizes of a layout and of a
// saved buffer are linear in the number of blocks, which torch.compile needs for a dynamic M: the rows
// are whole tiles of 64, 128, 192 and 256, and no fewer than there are experts.
inline constexpr int64_t kExpertRows = 3072;
static_assert(kExpertRows % 768 == 0 && kExpertRows >= FLOAT8_MAX_EXPERTS);
[[nodiscard]] constexpr int64_t expert_row_blocks(int64_t m) {
  return (m + kExpertRows - 1) / kExpertRows;
}

// A linear of each expert.
struct ExpertsKey {
  uint64_t config = 0;  // Config::of_experts()
  int64_t m_max = 0;    // of all experts
  int64_t n = 0;
  int64_t k = 0;
  int32_t experts = 0;
  int32_t device = 0;  // -1: emulated
  int8_t tensor_dtype = 0;
  int8_t grad_dtype = 0;  // of dw
  // Ranks have other columns of x, or of dy.
  bool x_over_ranks = false;
  bool dy_over_ranks = false;
  bool operator==(const ExpertsKey&) const = default;
};

struct ExpertsPlan {
  float8_experts* experts = nullptr;
  size_t workspace_bytes = 0;
  size_t saved_bytes = 0;
};

// The casts of the weights of all experts.
struct ExpertQuantizerKey {
  uint64_t config = 0;  // Config::of_casts()
  int64_t n = 0;
  int64_t k = 0;
  int32_t experts = 0;
  int32_t device = 0;        // -1: emulated
  int8_t dtype = 0;          // what the weights are in, or rounded to
  bool f32_source = false;   // they are in fp32, and are rounded as they are read
  bool over_ranks = false;   // ranks have other rows of each expert
  bool noop_flag = false;    // casts look at a weight's flag
  bool two_tensors = false;  // each has half of an expert's rows
  bool operator==(const ExpertQuantizerKey&) const = default;
};

struct ExpertQuantizer {
  float8_expert_quantizer* quantizer = nullptr;
  float8_context* context = nullptr;
  size_t workspace_bytes = 0;
  float8_layout layout = {};
};

// The MLP of SwiGLU experts: n is its F, and k its D.
struct MoeKey {
  ExpertsKey linear;
  bool rows_in_place = false;
  bool w3_apart = false;
  bool operator==(const MoeKey&) const = default;
};

struct MoePlan {
  float8_moe* moe = nullptr;
};

// The layout of a routing.
struct GroupLayoutKey {
  int64_t m_max = 0;
  int32_t experts = 0;
  int32_t device = 0;  // -1: emulated
  bool operator==(const GroupLayoutKey&) const = default;
};

struct GroupLayoutPlan {
  float8_group_layout_plan* plan = nullptr;
  size_t bytes = 0;
};

// The routing of a mixture of experts, and the sums over its rows, for as many tokens as there may be.
struct RouteKey {
  int32_t top_k = 0;
  int32_t experts = 0;
  int32_t device = 0;  // -1: emulated
  bool long_ids = false;
  bool operator==(const RouteKey&) const = default;
};

struct RoutePlan {
  float8_moe_route_plan* plan = nullptr;
  size_t workspace_bytes = 0;
};

struct CombineKey {
  int64_t cols = 0;
  int32_t top_k = 0;
  int32_t experts = 0;
  int32_t device = 0;  // -1: emulated
  int32_t dtype = 0;   // of rows and tokens
  bool operator==(const CombineKey&) const = default;
};

struct CombinePlan {
  float8_moe_combine_plan* plan = nullptr;
};

struct AttentionKey {
  int64_t heads_q = 0;
  int64_t heads_kv = 0;
  int64_t head_dim = 0;
  float scale = 0;     // of the scores; 0: the head's own
  int32_t device = 0;  // -1: emulated
  bool causal = false;
  int64_t window = 0;  // 0: none
  bool packed = false;
  int32_t recipe = FLOAT8_ATTENTION_FP8_FORWARD;
  bool operator==(const AttentionKey&) const = default;
};

struct AttentionPlan {
  float8_attention* attention = nullptr;
};

// The device and its stream that a call's work goes to.
struct Place {
  Device device = {};
  bool emulated = false;
  float8_stream stream = nullptr;
  bool capturing = false;

  [[nodiscard]] int32_t key() const { return emulated ? -1 : device.index; }
};

// Throws for a CPU tensor without an emulated config. A GPU's tensors are staged before (staging.hpp).
[[nodiscard]] Place place_of(const Tensor& tensor, Config config);

// The plan, made where there is none. The reference is good for ever.
[[nodiscard]] const Plan& plan_for(const PlanKey& key, const Place& place);
[[nodiscard]] const Quantizer& quantizer_for(const QuantizerKey& key, const Place& place);
[[nodiscard]] const QuantizerList& quantizer_list_for(
    const std::vector<const Quantizer*>& quantizers, const Place& place);
[[nodiscard]] const GemmPlan& gemm_for(const GemmKey& key, const Place& place);
[[nodiscard]] const ExpertsPlan& experts_for(const ExpertsKey& key, const Place& place);
[[nodiscard]] const ExpertQuantizer& expert_quantizer_for(const ExpertQuantizerKey& key,
                                                          const Place& place);
// The layout of the copies that it makes, without a plan.
[[nodiscard]] float8_layout expert_layout(const ExpertQuantizerKey& key);
[[nodiscard]] const MoePlan& moe_for(const MoeKey& key, const Place& place);
[[nodiscard]] const GroupLayoutPlan& group_layout_for(const GroupLayoutKey& key,
                                                      const Place& place);

[[nodiscard]] const RoutePlan& route_plan_for(const RouteKey& key, const Place& place);
[[nodiscard]] const CombinePlan& combine_plan_for(const CombineKey& key, const Place& place);
[[nodiscard]] const AttentionPlan& attention_plan_for(const AttentionKey& key, const Place& place);

// Makes the plans of these keys, which differ in n and k alone. Their kernels are compiled side by
// side, each once.
void plan_all(const std::vector<PlanKey>& keys, const Place& place);

// A plan of a recipe: of a linear, or of an expert linear, which has as many delayed scales.
struct AnyPlan {
  const float8_linear* linear = nullptr;
  const float8_experts* experts = nullptr;

  [[nodiscard]] bool is_there() const { return linear != nullptr || experts != nullptr; }
};
// Any plan of that recipe on the device, none where no call has made one; on the emulated device one is
// made then. `config` is Config::of_casts().
[[nodiscard]] AnyPlan any_plan(uint64_t config, int32_t device);

// All plans on the device (-1: emulated) so far.
[[nodiscard]] std::vector<const float8_linear*> all_plans(int32_t device);

// Makes the contexts of GPUs, none of which is there yet, tune for so long a shape.
void tune_on_first_use(int64_t milliseconds, std::string database);
// The context of a device, made where there is none.
[[nodiscard]] float8_context* context_of(int32_t device);

// The bytes of buffers, without a GPU.
[[nodiscard]] int64_t saved_bytes(int64_t m, int64_t n, int64_t k, Config config, bool x_given,
                                  bool weight_given);
struct QuantizedBytes {
  int64_t q = 0;
  int64_t qt = 0;
};
// `whole_rows`: those of a shard of up to `rows` rows, which may cut blocks of the whole; else 0.
// `of_activation`: of an input that is an activation, computed as it is cast.
[[nodiscard]] QuantizedBytes quantized_bytes(int64_t rows, int64_t cols, Config config,
                                             int64_t operand, bool backward, int64_t whole_rows = 0,
                                             bool of_activation = false);

// The places of a quantizer's copies in their buffers, in bytes. `scales_in_qt`: q's inverse scale
// is in qt's buffer. A copy that is not made has a pitch of 0.
struct CopyLayout {
  int64_t q_pitch = 0;
  int64_t q_scales = 0;
  bool scales_in_qt = false;
  int64_t qt_pitch = 0;
  int64_t qt_scales = 0;
  int64_t amax_words = 0;  // with over_ranks, as in Quantizer
  int64_t row_amax_words = 0;
};
[[nodiscard]] CopyLayout copy_layout(const QuantizerKey& key, int64_t rows);

// The bytes of a scale state of so many linears of the config's recipe.
[[nodiscard]] int64_t scale_state_bytes(uint64_t config, size_t count, int32_t history);

}  // namespace float8_torch
