// Planning the launches of a linear's calls: a list for every kind of call, from its kernels, its
// GEMMs and the layout of its buffers.
#pragma once

#include "runtime/linear/plan/kernels.hpp"
#include "runtime/linear/plan/launches.hpp"
#include "runtime/linear/plan/layout.hpp"

namespace f8::runtime {

struct LinearGemms {
  std::array<GemmPlanPtr, 3> all, adding;        // indexed by Gemm; null: not wanted
  std::shared_ptr<const GroupedGemm> gradients;  // both in one launch, where their choices allow it
};

// The kind of a call decides, beside m, which launches it has: bits of an index into its lists.
using CallKind = unsigned;
inline constexpr CallKind kFirstStep = 1;  // delayed scales are taken from the tensors
inline constexpr CallKind kOverRanks = 2;  // with kFirstStep: over the tensors of all ranks

// x and w are given in fp8; in backward these bits are set where it recomputes alone.
inline constexpr CallKind kGivenX = kXq, kGivenW = kWq;

inline constexpr CallKind kForwardSaved = 16;
inline constexpr size_t kForwardKinds = 32;

inline constexpr CallKind kBackwardDx = 16, kBackwardDw = 32, kBackwardDb = 64;
inline constexpr CallKind kBackwardAddDx = 128, kBackwardAddDw = 256;  // with those
inline constexpr size_t kBackwardKinds = 512;

// The kinds of a backward that is given dy in fp8, without the bits that decide about casts.
inline constexpr CallKind kGradientShift = 4;
inline constexpr size_t kGradientKinds = kBackwardKinds >> kGradientShift;
static_assert(kBackwardDx == 1U << kGradientShift);

struct LinearLaunches {
  std::array<LaunchList, kForwardKinds> forward;
  std::array<LaunchList, kBackwardKinds> backward;
  std::array<LaunchList, kGradientKinds> gradients;  // of a dy in fp8
};

[[nodiscard]] Result<LinearLaunches> plan_launches(const std::shared_ptr<Context>& context,
                                                   const LinearDesc& desc,
                                                   const LinearKernels& kernels,
                                                   const LinearGemms& gemms,
                                                   const LinearLayout& layout);

}  // namespace f8::runtime
