// What a planned linear keeps, and the places of a call's tensors: shared by planning
// (linear_plan.cpp), the checks of a call (linear_check.cpp) and its launches (linear.cpp).
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "codegen/kernels/kernel_args.cuh"
#include "runtime/device/call_memory.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/memory.hpp"
#include "runtime/gemm/provider.hpp"
#include "runtime/linear/kernels.hpp"
#include "runtime/linear/layout.hpp"
#include "runtime/linear/linear.hpp"
#include "runtime/quantize/quantize.hpp"

namespace f8::runtime {

// A tensor of a call and the places of what is made of it.
struct Place {
  const void* x = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t ld = 0;  // of x
  uint8_t* q = nullptr;
  uint8_t* qt = nullptr;
  float* q_scale = nullptr;
  float* qt_scale = nullptr;
  uint32_t* partials = nullptr;
  uint16_t* lines = nullptr;  // null: never taken
  uint32_t* words = nullptr;
  WordLayout word{};
};

// A quantization's parts of the workspace beside the places of its tensors.
struct QuantizeScratch {
  uint8_t* sync;         // of one-launch kernels
  uint32_t* first_word;  // the amax words to clear, where a launch raises some
  int64_t word_count;
  CastCounters* counters = nullptr;  // the linear's
  const uint32_t* valid = nullptr;   // the weight's flag
  float* sums = nullptr;  // where the column sums of dy are wanted; null once a cast leaves them
  AmaxReduction ranks = {};
  uint32_t* first = nullptr;  // words of a first step over ranks
};

// What a visit does to a tensor, for its launch.
[[nodiscard]] QuantizeOperand operand_of(const Visit& visit, const Place& place,
                                         const ScaleSlots& slots);

// The inverse scales of a copy for the matmul.
inline const float* inverse_of(const CastSetting& setting, const float* scale) {
  return setting.granularity == Granularity::kTensor ? scale + kernels::kInverse : scale;
}

struct Linear::State {
  struct LoadedPass {
    const Kernel* amax = nullptr;
    const Kernel* cast = nullptr;
    const Kernel* quantize = nullptr;  // null: never in one launch
    const Kernel* summing = nullptr;   // the cast that leaves column sums too
  };
  using Loaded = std::array<std::vector<LoadedPass>, kWorks>;  // beside the kernels' works

  std::shared_ptr<Context> context;
  LinearDesc desc;
  LinearKernels kernels;
  const Driver* driver = nullptr;
  CUcontext primary = nullptr;
  bool programmatic = false;
  int sm_count = 0;
  Loaded loaded;
  Loaded first_loaded;
  const Kernel* column_sums = nullptr;  // null: no gradient of a bias
  const Kernel* bias_grad = nullptr;
  const Kernel* scale_update = nullptr;  // null: no delayed scaling
  std::array<GemmPlanPtr, 3> gemms;      // null: not wanted
  GemmPlanPtr add_grad_weight;
  std::shared_ptr<const GemmPair> gradients;  // both in one launch, where their choices allow it
  LinearLayout layout;

  [[nodiscard]] const GemmPlan& gemm(Gemm g) const { return *gemms[static_cast<size_t>(g)]; }
  [[nodiscard]] bool is_fp8(Gemm g) const { return desc.recipe.at(g).is_fp8(); }

  [[nodiscard]] Status check(const ForwardCall& call, const void* workspace) const;
  [[nodiscard]] Status check(const BackwardCall& call, const void* workspace) const;
  [[nodiscard]] Status check(const WeightCall& call) const;
  [[nodiscard]] Status check(const WeightCall& call, const void* workspace) const;
  template <class Call>
  [[nodiscard]] Status check_counters(const Call& call) const;
  template <class Call>
  [[nodiscard]] Status check_scales(const Call& call) const;
  // Compare a call with earlier ones (CallRecords).
  [[nodiscard]] Status check_records(const ForwardCall& call) const;
  [[nodiscard]] Status check_records(const BackwardCall& call) const;
  [[nodiscard]] Status check_records(const WeightCall& call) const;
  template <class Call>
  [[nodiscard]] Status check_fresh_scales(const Call& call) const;

  // What a call touches of what it was given.
  [[nodiscard]] CallMemory memory(const ForwardCall& call, const void* workspace) const;
  [[nodiscard]] CallMemory memory(const BackwardCall& call, const void* workspace) const;
  [[nodiscard]] CallMemory memory(const WeightCall& call, const void* workspace) const;
  template <class Call>
  void add_scales(CallMemory& memory, const Call& call) const;
  // Does what only a context that checks pointers, or an emulated one, does.
  template <class Call>
  [[nodiscard]] Status check_device(const char* name, const Call& call, const void* workspace,
                                    Stream stream) const {
    if (!context->state().keeps_records()) [[likely]] {
      return {};
    }
    F8_TRY(check(call, workspace));
    F8_TRY(check_records(call));
    return memory(call, workspace).check_device(name, *context, stream);
  }

  [[nodiscard]] Place input_place(const ForwardCall& call, uint8_t* work, uint8_t* saved) const;
  [[nodiscard]] Place weight_place(const void* w, int64_t ld, uint8_t* work) const;
  // With the copies in a weight cache.
  [[nodiscard]] Place cached_weight(const void* w, int64_t ld, const void* cache,
                                    uint8_t* work) const;
  // Of x or w in backward's workspace, qt alone.
  [[nodiscard]] Place place_again(const Place& tensor, const LinearLayout::Again& at,
                                  const CopyLayout& copy, uint8_t* work) const;
  // The inverse scales of q, which a visit that also wrote qt may have left with it.
  [[nodiscard]] const float* inverse_q(Tensor tensor, const Place& place, bool with_qt) const {
    const Copies& copies = kernels.of(tensor);
    return inverse_of(*copies.q, with_qt && copies.share_scale() ? place.qt_scale : place.q_scale);
  }
  [[nodiscard]] const float* inverse_qt(Tensor tensor, const Place& place) const {
    return inverse_of(*kernels.of(tensor).qt, place.qt_scale);
  }

  // `step(name, bytes, launch)` is given each launch in order; launch(Stream) returns a Status.
  // Step::kInOrder says that they run in this order and no other, on one stream: then some work
  // beside the one before.
  // `places` are indexed by Tensor.
  template <class Step>
  [[nodiscard]] Status quantize(Work work, bool first, const std::array<Place, 3>& places,
                                const ScaleSlots& scales, QuantizeScratch& scratch,
                                Step&& step) const;
  // A first step over ranks: the casts of later steps, first for the maxima that they record, then
  // with the scales of these over all ranks.
  template <class Step>
  [[nodiscard]] Status quantize_over_ranks(Work work, const std::array<Place, 3>& places,
                                           const ScaleSlots& scales, QuantizeScratch& scratch,
                                           Step&& step) const;
  // `summed`: a cast left the column sums.
  template <class Step>
  [[nodiscard]] Status bias_gradient(const BackwardCall& call, const float* sums, bool summed,
                                     Step&& step) const;
  template <class Step>
  [[nodiscard]] Status empty_backward(const BackwardCall& call, Step&& step) const;
  template <class Step>
  [[nodiscard]] Status forward(const ForwardCall& call, void* workspace, Step&& step) const;
  template <class Step>
  [[nodiscard]] Status backward(const BackwardCall& call, void* workspace, Step&& step) const;
  template <class Step>
  [[nodiscard]] Status cast_weight(const WeightCall& call, void* workspace, Step&& step) const;

  [[nodiscard]] Status set_words(uint32_t* words, uint32_t value, int64_t count,
                                 Stream stream) const {
    return driver->check(driver->memset_d32_async(reinterpret_cast<CUdeviceptr>(words), value,
                                                  static_cast<size_t>(count), stream),
                         "cuMemsetD32Async");
  }
};

}  // namespace f8::runtime
