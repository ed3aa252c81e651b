// The kernels of codegen/kernels as plain loops over the same arguments, built on the scalar
// functions of the CPU reference. They look at every argument as the device would, and report what
// it would choke on.
#pragma once

#include <string>
#include <vector>

#include "codegen/kernel_spec.hpp"
#include "codegen/kernels/kernel_args.cuh"

namespace f8::runtime::testing {

// A tensor map as the fake driver encodes it: what the real one is told, readable again.
struct FakeTensorMap {
  void* base;
  unsigned long long cols;
  unsigned long long rows;
  unsigned long long ld_bytes;
  unsigned box_cols;
  unsigned box_rows;
  unsigned element_bytes;
  bool f16;
};

// Args: of a launch, or of a list's.
template <class Args>
void emulate_amax(const codegen::AmaxSpec& spec, const Args& args, unsigned grid,
                  std::vector<std::string>& faults);
// Amax and cast; the blocks must fit a device of `sm_count` SMs at once.
void emulate_quantize(const codegen::CastSpec& spec, const kernels::QuantizeArgs& args,
                      unsigned grid, int sm_count, std::vector<std::string>& faults);
template <class Args>
void emulate_cast(const codegen::CastSpec& spec, const Args& args, unsigned grid,
                  std::vector<std::string>& faults);
void emulate_scale_update(const kernels::ScaleUpdateArgs& args, unsigned grid,
                          std::vector<std::string>& faults);
// One of a launch's products.
void emulate_gemm(const codegen::GemmSpec& spec, const FakeTensorMap& a, const FakeTensorMap& b,
                  const FakeTensorMap& d, const kernels::GemmProblem& args,
                  std::vector<std::string>& faults);

}  // namespace f8::runtime::testing
