// Planning the launches of a linear's calls from its kernels, its GEMMs and the layout of its buffers:
// a list for every set of casts that a call may have, and one for every set of results.
#pragma once

#include "runtime/linear/plan/kernels.hpp"
#include "runtime/linear/plan/launches.hpp"
#include "runtime/linear/plan/layout.hpp"

namespace f8::runtime {

struct LinearGemms {
  std::array<GemmPlanPtr, 3> all, adding;        // indexed by Gemm; null: not wanted
  std::shared_ptr<const GroupedGemm> gradients;  // both in one launch, where their choices allow it
};

// The kind of a call decides with m which casts it has: bits of an index into its lists.
using CallKind = unsigned;
inline constexpr CallKind kFirstStep = 1;  // delayed scales are taken from the tensors
inline constexpr CallKind kOverRanks = 2;  // with kFirstStep: over the tensors of all ranks

// x and w are given in fp8; in backward these bits are set where it recomputes alone.
inline constexpr CallKind kGivenX = kXq, kGivenW = kWq;

inline constexpr CallKind kForwardSaved = 16;
inline constexpr size_t kForwardKinds = 32;

// The casts of dy: its copies, and the sums of its columns.
inline constexpr CallKind kGradOutputQ = kDyq, kGradOutputQt = kDyqt, kGradOutputSums = 64;
// dy and x are given in fp8, and w is cast again. It is without the bits of their copies.
inline constexpr CallKind kWeightAlone = 128;
inline constexpr size_t kBackwardKinds = 256;

// The results of a backward, as bits of an index into the lists of its GEMMs.
using Results = unsigned;
inline constexpr Results kDx = 1, kDw = 2, kDb = 4;
inline constexpr Results kAddDx = 8, kAddDw = 16;  // with those
inline constexpr size_t kResults = 32;

struct LinearLaunches {
  std::array<LaunchList, kForwardKinds> forward_casts;
  LaunchList output;
  std::array<LaunchList, kBackwardKinds> backward_casts;
  std::array<LaunchList, kResults> gradients;
};

// The launches of one call: its casts, then its GEMMs, which read what the call binds to the slots of
// x, w and dy in fp8, wherever it is from.
using CallLaunches = std::array<const LaunchList*, 2>;

[[nodiscard]] Result<LinearLaunches> plan_launches(const std::shared_ptr<Context>& context,
                                                   const LinearDesc& desc,
                                                   const LinearKernels& kernels,
                                                   const LinearGemms& gemms,
                                                   const LinearLayout& layout);

}  // namespace f8::runtime
