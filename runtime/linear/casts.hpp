// The casts of a call, as a sequence of launches: for linear.cpp, which has the calls.
#pragma once

#include <utility>

#include "runtime/linear/state.hpp"
#include "runtime/quantize/quantize.hpp"

namespace f8::runtime {

inline double cast_bytes(const codegen::CastSpec& spec, double elements) {
  return elements *
         (static_cast<double>(size_bytes(spec.in)) + (spec.q ? 1 : 0) + (spec.qt ? 1 : 0));
}

// The matrices of a pass.
struct PassOperands {
  std::array<QuantizeOperand, kernels::kMaxTensors> list;
  size_t count = 0;
  int64_t tiles = 0;
  Launches launches = Launches::kTwo;

  PassOperands(const QuantizePass& pass, bool loaded_one, const std::array<Place, 3>& places,
               const ScaleSlots& scales, CastCounters* counters, int sm_count);
  [[nodiscard]] std::span<const QuantizeOperand> all() const { return {list.data(), count}; }
};

// Whether a pass may run beside the one before it: one launch each, of different tensors; and where
// blocks wait for each other, so small that all are resident.
[[nodiscard]] bool runs_beside(const QuantizePass& before, const PassOperands& operands_before,
                               const QuantizePass& pass, const PassOperands& operands,
                               int sm_count);

template <class Step>
Status Linear::State::quantize(Work work, bool first, const std::array<Place, 3>& places,
                               const ScaleSlots& scales, QuantizeScratch& scratch,
                               Step&& step) const {
  const bool from_tensors = first && !kernels.slots.empty();
  if (from_tensors && scratch.ranks.reduce != nullptr) {
    return quantize_over_ranks(work, places, scales, scratch, step);
  }
  const auto index = static_cast<size_t>(work);
  const Quantization& passes = (from_tensors ? kernels.first_works : kernels.works)[index];
  const std::vector<LoadedPass>& ready = (from_tensors ? first_loaded : loaded)[index];
  const auto operands_of = [&](size_t i) {
    return PassOperands(passes[i], ready[i].quantize != nullptr, places, scales, scratch.counters,
                        sm_count);
  };
  if (passes.empty()) return {};
  bool cleared = false;
  bool beside = false;  // the launch before
  int64_t tiles_before = 0;
  PassOperands next = operands_of(0);
  for (size_t i = 0; i < passes.size(); ++i) {
    const QuantizePass& pass = passes[i];
    const PassOperands own = next;
    bool next_beside = false;
    if (i + 1 < passes.size()) {
      next = operands_of(i + 1);
      next_beside = std::remove_cvref_t<Step>::kInOrder && !beside &&
                    runs_beside(pass, own, passes[i + 1], next, sm_count);
    }
    const int64_t blocks_beside = beside ? tiles_before : next_beside ? next.tiles : 0;
    const auto one_launch = [&](const std::string& name,
                                std::span<const QuantizeOperand> operands) {
      auto args = quantize_args(*pass.one_launch, sm_count, operands,
                                scratch.sync + (beside ? second_sync(sm_count) : 0));
      args.cast.overlap = beside ? 1 : 0;
      return step(name.c_str(), cast_bytes(pass.cast, elements_of(operands)),
                  [this, kernel = ready[i].quantize, args, blocks_beside](Stream stream) {
                    return launch_quantize(*driver, *kernel, args, programmatic, stream,
                                           blocks_beside);
                  });
    };
    if (own.launches == Launches::kOne) {
      F8_TRY(one_launch(pass.quantize_name, own.all()));
    } else if (own.launches == Launches::kOneEach) {
      for (size_t v = 0; v < own.count; ++v) {
        F8_TRY(one_launch(pass.visits[v].quantize_name, own.all().subspan(v, 1)));
      }
    } else {
      if (pass.amax && !cleared && raises_words(*pass.amax, own.all())) {
        cleared = true;
        F8_TRY(step("clear amax", 0.0, [this, scratch](Stream stream) {
          return set_words(scratch.first_word, 0, scratch.word_count, stream);
        }));
      }
      if (pass.amax) {
        auto args = amax_args(*pass.amax, sm_count, own.all());
        args.noop_flag = scratch.valid;
        F8_TRY(
            step(pass.amax_name.c_str(),
                 cast_bytes({.in = pass.cast.in, .q = false, .qt = false}, elements_of(own.all())),
                 [this, kernel = ready[i].amax, args](Stream stream) {
                   return launch_amax(*driver, *kernel, args, programmatic, stream);
                 }));
      }
      auto args = cast_args(pass.cast, sm_count, own.all());
      args.noop_flag = scratch.valid;
      args.overlap = beside ? 1 : 0;
      const Kernel* kernel = ready[i].cast;
      if (pass.summing && scratch.sums != nullptr) {
        kernel = ready[i].summing;
        args.sums = std::exchange(scratch.sums, nullptr);
      }
      F8_TRY(step(pass.cast_name.c_str(), cast_bytes(pass.cast, elements_of(own.all())),
                  [this, kernel, args, blocks_beside](Stream stream) {
                    return launch_cast(*driver, *kernel, args, programmatic, stream, blocks_beside);
                  }));
    }
    beside = next_beside;
    tiles_before = own.tiles;
  }
  return {};
}

template <class Step>
Status Linear::State::quantize_over_ranks(Work work, const std::array<Place, 3>& places,
                                          const ScaleSlots& scales, QuantizeScratch& scratch,
                                          Step&& step) const {
  const size_t count = kernels.slots.size();
  uint32_t* amax = scratch.first;
  F8_TRY(step("clear amax", 0.0, [this, amax, count](Stream stream) {
    return set_words(amax, 0, static_cast<int64_t>(kFirstWords * count), stream);
  }));
  QuantizeScratch recording = scratch;
  recording.counters = nullptr;
  recording.sums = nullptr;
  F8_TRY(quantize(work, false, places, {.amax = amax, .scale = scales.scale}, recording, step));
  F8_TRY(step("reduce amax", 0.0, [ranks = scratch.ranks, amax, count](Stream stream) {
    return ranks.reduce(ranks.ranks, amax, count, stream);
  }));
  const auto args = first_scale_args(amax, amax + count, count, scales, kernels.hold);
  F8_TRY(step("first scales", 0.0, [this, args](Stream stream) {
    return launch_scale_update(context->state(), *scale_update, args, stream);
  }));
  return quantize(work, false, places, scales, scratch, step);
}

}  // namespace f8::runtime
