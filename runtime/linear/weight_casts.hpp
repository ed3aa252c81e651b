// The weights of many linears cast in few launches: what Linear::cast_weight does for one, to the
// same bits, for a model's between two optimizer steps. Weights that are cast alike share launches
// (QuantizeList), whatever their shapes.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "runtime/linear/call_overlaps.hpp"
#include "runtime/linear/launches.hpp"
#include "runtime/linear/linear.hpp"
#include "runtime/quantize/quantize_list.hpp"

namespace f8::runtime {

// The calls of a run: structs of the version of float8.h that the caller has, which may be longer or
// shorter than this one's. All have the struct_size of the first.
struct WeightCalls {
  size_t count = 0;
  const WeightCall* first = nullptr;

  [[nodiscard]] const WeightCall* given(size_t i) const {
    return reinterpret_cast<const WeightCall*>(reinterpret_cast<const unsigned char*>(first) +
                                               i * first->struct_size);
  }
  [[nodiscard]] WeightCall at(size_t i) const {
    WeightCall call;
    std::memcpy(&call, given(i), std::min(first->struct_size, sizeof call));
    return call;
  }
};

class WeightCasts {
 public:
  // Linears of one context; those that never cast their weight are passed over.
  [[nodiscard]] static Result<WeightCasts> plan(
      const std::shared_ptr<Context>& context,
      std::span<const std::shared_ptr<const Linear>> linears);

  [[nodiscard]] size_t workspace_bytes() const { return workspace_bytes_; }
  // A call for each linear, in order. `first_step` and `ranks` are the same in all of them, and so
  // is `valid`: one flag for all of the weights, where all plans have LinearDesc::weight_flag.
  [[nodiscard]] Status run(const WeightCalls& calls, void* workspace, Stream stream,
                           AmaxReducer reduce = nullptr) const;
  [[nodiscard]] Status run(std::span<const WeightCall> calls, void* workspace, Stream stream,
                           AmaxReducer reduce = nullptr) const {
    return run(WeightCalls{calls.size(), calls.data()}, workspace, stream, reduce);
  }

 private:
  // A launch's matrix: which linear's weight, and what is done to it.
  struct Member {
    size_t linear;
    CastOperand operand;
  };
  struct Group {
    QuantizeList list;
    std::vector<Member> members;
  };
  WeightCasts() = default;
  [[nodiscard]] Result<std::vector<Group>> groups(const std::shared_ptr<Context>& context,
                                                  bool first) const;
  [[nodiscard]] Status check(const WeightCalls& calls, const WeightCall& common, void* workspace,
                             Stream stream, CallOverlaps& overlaps) const;
  // `recorded`: words in the order of first_slot_ where the maxima go, for nothing but these; null:
  // where the calls say.
  [[nodiscard]] Status run_groups(const WeightCalls& calls, bool first, void* workspace,
                                  uint32_t* recorded, Stream stream) const;
  [[nodiscard]] Status find_first_scales(const WeightCalls& calls, void* workspace, Stream stream,
                                         AmaxReducer reduce) const;

  std::vector<std::shared_ptr<const Linear>> linears_;
  std::vector<Group> groups_;
  std::vector<Group> first_groups_;  // with delayed scaling's first step; else empty
  std::vector<size_t> first_slot_;   // of each linear, all end to end; then their number
  std::unique_ptr<SharedOverlaps> overlaps_;
  const Kernel* scale_update_ = nullptr;
  size_t scratch_ = 0;      // where the lists' scratch begins in the workspace, in bytes
  size_t first_words_ = 0;  // where the words of a first step over ranks begin, in bytes
  size_t workspace_bytes_ = 0;
};

}  // namespace f8::runtime
