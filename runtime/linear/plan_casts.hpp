// Listing the casts of a call: which of amax, cast and one-launch kernels make its copies, for
// which m. That depends on m by limits alone, which are found once.
#pragma once

#include <map>
#include <utility>

#include "runtime/linear/plan_launches.hpp"

namespace f8::runtime {

// Clears the words of an amax buffer from `begin` to `end`, and one for each of `rows` more (0: the
// call's m; none: nothing more).
[[nodiscard]] Launch clear_amax(Ref begin, Ref end, std::optional<int64_t> rows);

// A part of a list that casts tensors.
struct CastSection {
  LaunchList& list;
  const CallTensors& tensors;
  Launch clear;                // of its amax buffer
  bool sums = false;           // a cast of dy leaves column sums where it can
  int64_t summed_above_m = 0;  // set: for larger m one has
  bool recording = false;      // casts are only for the maxima of a first step over ranks
  int64_t cleared_above_m = 0;
};

class CastPlanner {
 public:
  // The parts of the workspace that casts of several tensors share.
  struct Shared {
    Ref sync, first, sums;
  };
  CastPlanner(Context& context, int64_t m_max, const LinearKernels& kernels, const Shared& shared)
      : context_(context), m_max_(m_max), kernels_(kernels), shared_(shared) {}

  // Appends what makes `copies` in a call of this kind.
  [[nodiscard]] Status add(CastSection& section, CopySet copies, CallKind kind);

 private:
  // A kernel pass with its kernels and, in a section, its operands.
  struct Pass {
    KernelPass spec;
    const Kernel* amax = nullptr;
    const Kernel* cast = nullptr;
    const Kernel* quantize = nullptr;  // null: never in one launch
    const Kernel* summing = nullptr;
    std::vector<CastOperand> operands = {};
    int64_t one_launch_up_to_m = 0;
  };
  [[nodiscard]] Result<std::vector<Pass>> passes(CopySet copies, bool first_step);
  [[nodiscard]] Status add_passes(CastSection& section, CopySet copies, bool first_step);
  void add_pass(CastSection& section, Pass& pass, const Pass* before) const;
  void add_clear(CastSection& section, const Pass& pass, int64_t above_m) const;
  void set_operands(Pass& pass, const CastSection& section) const;
  [[nodiscard]] int64_t largest_m(const Pass& pass, Launches launches) const;
  [[nodiscard]] int64_t overlaps_up_to(const Pass& before, const Pass& pass) const;
  template <class Holds>
  [[nodiscard]] int64_t largest_m(Holds&& holds) const;

  Context& context_;
  int64_t m_max_;
  const LinearKernels& kernels_;
  Shared shared_;
  std::map<std::pair<CopySet, bool>, std::vector<Pass>> passes_;
};

}  // namespace f8::runtime
