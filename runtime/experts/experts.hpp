// An expert linear: y_e = x_e w_e^T for each expert e, forward and backward, as so many linears
// compute it (runtime/linear/linear.hpp), bit for bit. A plan is immutable and shared between threads;
// the caller gives the tensors, a layout of the routing (group_layout.hpp), a workspace and a saved
// buffer.
#pragma once

#include <algorithm>
#include <array>
#include <memory>

#include "float8/experts.h"
#include "runtime/device/interval_arena.hpp"
#include "runtime/experts/group_cast.hpp"
#include "runtime/gemm/k_grouped.hpp"
#include "runtime/linear/linear.hpp"
#include "runtime/linear/plan/kernels.hpp"
#include "runtime/linear/tensors/fp8_tensor.hpp"
#include "runtime/quantize/delayed_scales.hpp"

namespace f8::runtime {

struct ExpertsDesc {
  Shape shape;  // m: the most rows of all experts
  int64_t experts = 1;
  Recipe recipe;
  Dtype tensor_dtype = Dtype::kBf16;
  Dtype grad_weight_dtype = Dtype::kBf16;
  bool accumulate_grad_weight = false;  // a call may add to the gradient that is there
  bool needs_grad_input = true;
  bool needs_grad_weight = true;  // false: frozen weights, dw is never wanted
  bool recompute_weight = false;  // backward is given w and casts it again
  bool recompute_input = false;   // and x
  kernels::RowSource input = kernels::RowSource::kMatrix;        // of x's rows
  kernels::RowSource grad_output = kernels::RowSource::kMatrix;  // of dy's
  // Ranks have other columns of x, or of dy, and calls are given the maxima of the whole.
  bool input_over_ranks = false;
  bool grad_output_over_ranks = false;
  // Each expert's rows of w are the first half of them in one tensor, and the others in another one; so are
  // those of dw.
  bool weight_pair = false;
  NonFinite non_finite = NonFinite::kPropagate;
  int sm_limit = 0;
  std::array<std::optional<GemmConfig>, 3> configs =
      {};  // indexed by Gemm; empty: choose_grouped()
};

using ExpertsForwardCall = float8_experts_forward_args;
using ExpertsBackwardCall = float8_experts_backward_args;

// What sources of rows read beside x and dy, and with recompute_input the forward's x. Of a pair of weights the
// second one, and its gradient.
struct ExpertsOperands {
  kernels::RowOperands input = {};
  kernels::RowOperands grad_output = {};
  float8_matrix x = {};
  float8_matrix second_w = {};
  float8_result second_dw = {};
};

// The blocks of memory that a call has for each tensor: the scratch of its cast, its q and its qt with their
// scales.
enum class CopyBlock : uint8_t { kScratch, kQ, kQt };
template <class T>
class OfBlocks {
 public:
  [[nodiscard]] T& at(Tensor tensor, CopyBlock block) {
    return all_[static_cast<size_t>(tensor)][static_cast<size_t>(block)];
  }
  [[nodiscard]] const T& at(Tensor tensor, CopyBlock block) const {
    return all_[static_cast<size_t>(tensor)][static_cast<size_t>(block)];
  }

 private:
  std::array<std::array<T, 3>, 3> all_ = {};
};
using BlockPlaces = OfBlocks<uint8_t*>;
// Blocks of a workspace: first their numbers in an arena, then their offsets. None: another buffer has it.
using BlockOffsets = OfBlocks<std::optional<size_t>>;
void place_blocks(BlockOffsets& blocks, const IntervalArena& arena);
void add_blocks(BlockPlaces& places, const BlockOffsets& blocks, const float8_buffer& workspace);

class Experts {
 public:
  // Chooses, compiles and loads the kernels.
  [[nodiscard]] static Result<std::shared_ptr<const Experts>> plan(
      const std::shared_ptr<Context>& context, const ExpertsDesc& desc);

  [[nodiscard]] size_t layout_bytes() const;
  [[nodiscard]] size_t workspace_bytes() const { return workspace_bytes_; }
  [[nodiscard]] size_t saved_bytes() const { return saved_bytes_; }
  [[nodiscard]] Status forward(const ExpertsForwardCall& call, Stream stream) const;
  [[nodiscard]] Status backward(const ExpertsBackwardCall& call, Stream stream) const;
  // The parts of a call, as a set of bits; a weight or input that backward casts again counts to its
  // GEMM.
  static constexpr unsigned kCastX = 1, kCastW = 2, kCastDy = 4, kGemm = 8;  // kGemm << Gemm
  static constexpr unsigned kAllParts = ~0U;
  static constexpr unsigned part_of(Gemm gemm) { return kGemm << static_cast<unsigned>(gemm); }
  // The copies that a call makes of a tensor, as a set of bits.
  static constexpr unsigned kQ = 1, kQt = 2;
  // The same for a caller that has checked the call, of m > 0, and has operands and memory of its own; a
  // backward has a gradient to compute. `made`: the copies of dy that its parts make or read.
  [[nodiscard]] Status run_forward(const ExpertsForwardCall& call, const ExpertsOperands& operands,
                                   const BlockPlaces& places, Stream stream,
                                   unsigned parts = kAllParts) const;
  [[nodiscard]] Status run_backward(const ExpertsBackwardCall& call,
                                    const ExpertsOperands& operands, const BlockPlaces& places,
                                    unsigned made, Stream stream, unsigned parts = kAllParts) const;
  // Add to an arena what parts of a call, whose launches begin with `launch`, have in a workspace, and
  // return the numbers of the blocks. `given_weight`: the call is given the weight in fp8. Where parts of
  // a backward are apart, dy's copies live between them, and are the caller's.
  [[nodiscard]] BlockOffsets add_forward(IntervalArena& arena, int launch, bool given_weight) const;
  [[nodiscard]] BlockOffsets add_backward(IntervalArena& arena, int launch, bool given_weight,
                                          unsigned parts = kAllParts) const;
  // The launches that these count: casts of x and w and a GEMM; of dy, w, and x with a GEMM behind.
  static constexpr int kForwardLaunches = 3, kBackwardLaunches = 5;
  // The bytes of a block, of a tensor that a call casts.
  [[nodiscard]] size_t block_bytes(runtime::Tensor tensor, CopyBlock block) const {
    return block_bytes_.at(tensor, block);
  }
  // Adds the copies that forward saves.
  void add_saved(BlockPlaces& places, const float8_buffer& saved) const;
  // The same work as forward() and backward(), cast by cast and GEMM by GEMM, for measuring. Steps are
  // good for as long as the expert linear; the call's is not checked.
  [[nodiscard]] std::vector<Step> forward_steps(const ExpertsForwardCall& call) const;
  [[nodiscard]] std::vector<Step> backward_steps(const ExpertsBackwardCall& call) const;
  // Check a weight in fp8 that a forward, or a backward, is given, and list its memory.
  [[nodiscard]] Status check_given(const char* args, const char* name, const float8_tensor& weight,
                                   bool forward, bool saves) const;
  void add_given(CallMemory& memory, const char* name, const float8_tensor& weight,
                 bool forward) const;
  // Check a call's slots of a scale state, where the recipe has delayed scaling, and list their memory.
  [[nodiscard]] Status check_scales(const char* args, const char* name,
                                    const float8_scale_slots& scales,
                                    const float8_step& step) const;
  void add_scales(CallMemory& memory, const float8_scale_slots& scales) const;
  // Enqueues zeros as the gradient of weights that have no rows, or of one of a pair of them.
  [[nodiscard]] Status zero_grad_weight(const float8_result& dw, Stream stream) const;
  // The rows of w that one tensor has of each expert.
  [[nodiscard]] int64_t weight_rows() const { return desc_.shape.n / (desc_.weight_pair ? 2 : 1); }

  [[nodiscard]] const ExpertsDesc& desc() const { return desc_; }
  [[nodiscard]] const std::shared_ptr<Context>& context() const { return context_; }
  // Of delayed scaling, as those of a linear; empty: the recipe has none.
  [[nodiscard]] const std::vector<DelayedSlot>& scale_slots() const { return slots_; }
  [[nodiscard]] const GemmConfig& config(Gemm gemm) const;

 private:
  [[nodiscard]] BlockPlaces forward_places(const ExpertsForwardCall& call) const;
  [[nodiscard]] BlockPlaces backward_places(const ExpertsBackwardCall& call) const;
  [[nodiscard]] double cast_bytes(runtime::Tensor tensor, int64_t rows) const;

  // The casts of x, w or dy, and where their results lie in their blocks.
  struct Cast {
    GroupCastPlan plan;
    int slot;  // of the delayed scales, or -1
  };
  struct Tensor {
    Copies copies = {};
    std::array<std::vector<Cast>, 4> casts = {};      // indexed by the copies that they make
    int64_t rows = 0, cols = 0;                       // the most rows, of all groups
    size_t words = 0, first = 0;                      // of the scratch
    size_t q = 0, q_scale = 0, row_inverse = 0;       // of the block of q
    size_t qt = 0, qt_scale = 0, column_inverse = 0;  // of that of qt
  };
  // The memory of a call that casts have.
  struct Buffers {
    BlockPlaces places;
    // Of delayed scaling.
    ScaleSlots scales = {};
    bool first_step = false;
    template <class T>
    [[nodiscard]] T* at(runtime::Tensor tensor, CopyBlock block, size_t offset) const {
      return reinterpret_cast<T*>(places.at(tensor, block) + offset);
    }
  };
  // What a cast reads.
  struct Elements {
    float8_matrix matrix = {};
    kernels::RowOperands source = {};
    // The maxima of groups and of rows over ranks, of a tensor whose columns they share; of delayed scales that
    // of the whole tensor.
    const uint32_t* amax = nullptr;
    const uint32_t* row_amax = nullptr;
  };
  // What a GEMM reads of a tensor.
  struct Operand {
    const void* elements;
    const float* inverse_scale;
    int64_t ld = 0;  // of a tensor itself
  };

  Experts(std::shared_ptr<Context> context, ExpertsDesc desc, kernels::GroupLayout layout)
      : context_(std::move(context)), desc_(std::move(desc)), layout_(layout) {}
  [[nodiscard]] Status plan_casts(const LinearKernels& linear);
  [[nodiscard]] Status plan_gemms(const LinearKernels& linear);
  [[nodiscard]] GroupedDesc grouped(const GemmDesc& gemm) const;
  [[nodiscard]] Result<GemmConfig> choose(const GroupedDesc& desc) const;
  void lay_out();
  // The inverse scales of q and of qt that are not a tensor's.
  [[nodiscard]] int64_t row_scales(const Tensor& tensor) const;
  [[nodiscard]] int64_t column_scales(const Tensor& tensor) const;
  // The GEMM multiplies the tensors as they are.
  [[nodiscard]] bool reads_tensors(Gemm gemm) const { return !desc_.recipe.at(gemm).is_fp8(); }
  // Backward casts the tensor again, for the copy that its GEMM reads; else forward saves that copy.
  [[nodiscard]] bool recomputes(runtime::Tensor tensor) const {
    return is_recomputed(tensor) && at(tensor).copies.qt.has_value();
  }
  [[nodiscard]] bool saves(runtime::Tensor tensor) const {
    return !is_recomputed(tensor) && at(tensor).copies.qt.has_value();
  }
  [[nodiscard]] bool is_recomputed(runtime::Tensor tensor) const;
  [[nodiscard]] bool is_over_ranks(runtime::Tensor tensor) const;
  [[nodiscard]] Status check_over_ranks() const;
  [[nodiscard]] Tensor& at(runtime::Tensor tensor) { return tensors_[static_cast<size_t>(tensor)]; }
  [[nodiscard]] const Tensor& at(runtime::Tensor tensor) const {
    return tensors_[static_cast<size_t>(tensor)];
  }
  [[nodiscard]] kernels::GroupsOf groups_of(const float8_buffer& layout) const;
  [[nodiscard]] kernels::GroupsOf weights() const;
  [[nodiscard]] Status cast(runtime::Tensor which, unsigned made, const kernels::GroupsOf& groups,
                            const Elements& from, int64_t rows, const Buffers& to,
                            Stream stream) const;
  // Leaves in the workspace the scale that the tensors of a first step have by themselves.
  [[nodiscard]] Result<const float*> first_scale(const Cast& cast, GroupCastCall call,
                                                 uint32_t* words, const Buffers& to,
                                                 const uint32_t* over_ranks, Stream stream) const;
  [[nodiscard]] Operand q_of(runtime::Tensor which, unsigned made, const Buffers& in) const;
  [[nodiscard]] Elements elements_of_weight(const float8_matrix& w, const ExpertsOperands& operands,
                                            const uint32_t* amax) const;
  [[nodiscard]] static Operand itself(const float8_matrix& tensor);
  [[nodiscard]] Operand qt_of(runtime::Tensor which, const Buffers& in) const;
  template <class Call>
  [[nodiscard]] Status check_common(const char* args, const Call& call) const;
  // `records`: the call raises the amaxes of the state.
  template <class Call>
  [[nodiscard]] Buffers buffers_of(const Call& call, const BlockPlaces& places, bool records) const;
  [[nodiscard]] Status grad_input(const ExpertsBackwardCall& call, const ExpertsOperands& operands,
                                  const Buffers& buffers, unsigned made, Stream stream) const;
  [[nodiscard]] Status grad_weight(const ExpertsBackwardCall& call, const ExpertsOperands& operands,
                                   const Buffers& buffers, Stream stream) const;
  // Check the maxima over ranks of a tensor, and list their memory.
  [[nodiscard]] Status add_maxima(CallMemory& memory, const char* args, runtime::Tensor tensor,
                                  const uint32_t* amax, const uint32_t* row_amax, int64_t m,
                                  const float8_step& step) const;
  [[nodiscard]] Status check(const ExpertsForwardCall& call, Stream stream) const;
  [[nodiscard]] Status check(const ExpertsBackwardCall& call, Stream stream) const;

  std::shared_ptr<Context> context_;
  ExpertsDesc desc_;
  kernels::GroupLayout layout_;
  std::vector<DelayedSlot> slots_;
  const Kernel* scale_update_ = nullptr;                    // with slots
  std::array<Tensor, 3> tensors_;                           // indexed by runtime::Tensor
  std::array<std::optional<MGroupedGemm>, 2> gemms_;        // output and grad_input
  std::array<std::optional<KGroupedGemm>, 2> grad_weight_;  // which writes, which adds
  OfBlocks<size_t> block_bytes_;
  BlockOffsets forward_, backward_;  // of the workspace
  size_t workspace_bytes_ = 0;
  size_t saved_weight_ = 0, saved_bytes_ = 0;  // the input's copy comes first
};

}  // namespace f8::runtime
