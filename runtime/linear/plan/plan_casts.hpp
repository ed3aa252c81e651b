// Listing the casts of a call: which of amax, cast and one-launch kernels make its copies, for
// which m.
#pragma once

#include <map>
#include <span>
#include <utility>

#include "runtime/linear/plan/plan_launches.hpp"

namespace f8::runtime {

// The operand of a cast of a tensor with these buffers. `recorded` is where the amaxes of delayed
// scaling go.
[[nodiscard]] CastOperand cast_operand(const FusedCast& fused, const TensorBuffers& at,
                                       Ref recorded);

// The clear of the words of an amax buffer from `begin` to `end`, and of one for each of `rows`
// more (0: the call's m).
[[nodiscard]] ClearWords clear_amax(Ref begin, Ref end, int64_t rows);

// A part of a list that casts tensors.
struct CastSection {
  const CallTensors& tensors;
  ClearWords clear;        // of its amax buffer
  bool sums = false;       // a cast of dy leaves column sums where it can
  bool recording = false;  // casts are only for the maxima of a first step over ranks
};

class CastPlanner {
 public:
  // The parts of the workspace that casts of several tensors share.
  struct Shared {
    Ref sync, first, sums;
  };
  CastPlanner(Context& context, int64_t m_max, const LinearKernels& kernels, const Shared& shared)
      : context_(context), m_max_(m_max), kernels_(kernels), shared_(shared) {}

  // Lists what makes `copies` in a call of this kind. An empty batch has no casts.
  [[nodiscard]] Result<LaunchList> plan(const CastSection& section, CopySet copies, CallKind kind);

 private:
  // A kernel pass with its kernels.
  struct Pass {
    KernelPass spec;
    const Kernel* amax = nullptr;
    const Kernel* cast = nullptr;
    const Kernel* quantize = nullptr;  // null: never in one launch
    const Kernel* summing = nullptr;
  };
  // How a pass goes at some m. Each part of it changes once at most as m grows.
  struct Choice {
    Launches launches = Launches::kTwo;
    bool overlapped = false;   // with the pass before
    unsigned tile_amaxes = 0;  // a bit for each cast whose amaxes are per-tile partials
    bool operator==(const Choice&) const = default;
  };
  [[nodiscard]] Result<std::span<const Pass>> load(CopySet copies, bool first_step);
  [[nodiscard]] std::vector<Choice> choose(std::span<const Pass> passes, const CallTensors& tensors,
                                           int64_t m) const;
  [[nodiscard]] std::vector<CastOperand> operands(const CastSection& section, const Pass& pass,
                                                  const Choice& choice) const;
  void add(LaunchRange& range, const CastSection& section, std::span<const Pass> passes,
           std::span<const Choice> choices) const;
  [[nodiscard]] Status add_first_step(LaunchRange& range, const CastSection& section,
                                      std::span<const Pass> passes,
                                      std::span<const Choice> choices) const;

  Context& context_;
  int64_t m_max_;
  const LinearKernels& kernels_;
  Shared shared_;
  std::map<std::pair<CopySet, bool>, std::vector<Pass>> passes_;
};

}  // namespace f8::runtime
