// The kernels of codegen/kernels on the CPU, over the same arguments, built on the CPU reference.
// They look at every argument as a device would, and report those that it could not work with.
#pragma once

#include <string>
#include <vector>

#include "codegen/kernel_spec.hpp"
#include "codegen/kernels/fingerprint_args.cuh"
#include "codegen/kernels/kernel_args.cuh"
#include "recipes/fp8_layout.hpp"
#include "runtime/device/driver.hpp"

namespace f8::runtime::emulation {

using Faults = std::vector<std::string>;

// A tensor map as the emulated driver encodes it: the arguments of the real one, readable again.
struct TensorMap {
  void* base;
  unsigned long long cols;
  unsigned long long rows;
  unsigned long long ld_bytes;
  unsigned box_cols;
  unsigned box_rows;
  CUtensorMapDataType type;
};

// A loaded kernel: the driver's module and its function at once.
struct Module {
  codegen::KernelSpec spec;
  std::string key;
  int max_dynamic_smem = 48 << 10;
};

// The number of tiles of the row, column and cast kernels.
[[nodiscard]] inline unsigned cast_tiles(int64_t rows, int64_t cols) {
  return static_cast<unsigned>(ceil_div(rows, kernels::kCastTile) *
                               ceil_div(cols, kernels::kCastTile));
}

struct Launch {
  unsigned grid = 0;
  unsigned threads = 0;
  unsigned smem_bytes = 0;
  unsigned cluster = 1;
  bool programmatic = false;
  bool cooperative = false;
};
[[nodiscard]] Launch read_launch(const CUlaunchConfig& config);

// The bytes of the kernel's parameters, in order; 0: there are no more.
struct ParameterSizes {
  size_t first = 0;
  size_t second = 0;
};
[[nodiscard]] ParameterSizes parameter_sizes(const codegen::KernelSpec& spec);

// Does the launch's work on a device of `sm_count` SMs, or says in `faults` why it cannot be done.
void run(const Module& module, const Launch& launch, void* const* parameters, int sm_count,
         Faults& faults);

// Args are those of a launch or of a list's.
template <class Args>
void run_amax(const codegen::AmaxSpec& spec, const Args& args, unsigned grid, Faults& faults);
template <class Args>
void run_cast(const codegen::CastSpec& spec, const Args& args, unsigned grid, Faults& faults);
// Takes the amaxes and casts; the blocks must fit a device of `sm_count` SMs at once.
void run_quantize(const codegen::CastSpec& spec, const kernels::QuantizeArgs& args, unsigned grid,
                  int sm_count, Faults& faults);
void run_scale_update(const kernels::ScaleUpdateArgs& args, unsigned grid, Faults& faults);
void run_found_inf(const kernels::FoundInfArgs& args, unsigned grid, Faults& faults);
void run_fingerprint(const kernels::FingerprintArgs& args, unsigned grid, Faults& faults);
void run_column_sums(const codegen::ColumnSumsSpec& spec, const kernels::ColumnSumsArgs& args,
                     unsigned grid, Faults& faults);
void run_bias_grad(const codegen::BiasGradSpec& spec, const kernels::BiasGradArgs& args,
                   unsigned grid, Faults& faults);
// Computes one of a launch's GEMMs.
void run_gemm(const codegen::GemmSpec& spec, const TensorMap& a, const TensorMap& b,
              const TensorMap& d, const kernels::GemmProblem& args, Faults& faults);

}  // namespace f8::runtime::emulation
