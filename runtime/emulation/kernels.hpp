// The kernels of codegen/kernels on the CPU, over the same arguments, built on the CPU reference.
// They look at every argument as a device would, and report those that it could not work with.
#pragma once

#include <string>
#include <vector>

#include "base/format.hpp"
#include "codegen/kernel_spec.hpp"
#include "codegen/kernels/cast/fingerprint_args.cuh"
#include "codegen/kernels/kernel_args.cuh"
#include "codegen/kernels/optimizer/adamw_args.cuh"
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
  unsigned long long matrices;  // 0: the map has two dimensions
  unsigned long long matrix_bytes;
};

// A loaded kernel: the driver's module and its function at once.
struct Module {
  codegen::KernelSpec spec;
  std::string key;
  int max_dynamic_smem = 48 << 10;
};

// True where a flag says that the launch has its results already, so it has nothing to do.
[[nodiscard]] inline bool is_noop(bool has_flag, const uint32_t* noop_flag) {
  return has_flag && noop_flag != nullptr && *noop_flag == 1;
}

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

// Does the launch's work on a device of `sm_count` SMs, or says in `faults` why it cannot be done.
void run(const Module& module, const Launch& launch, void* const* parameters, int sm_count,
         Faults& faults);

// What a kind's emulation is given.
struct Call {
  const Module& module;
  const Launch& launch;
  void* const* parameters;
  int sm_count;
  Faults& faults;

  template <class Args>
  [[nodiscard]] const Args& args(size_t parameter = 0) const {
    return *static_cast<const Args*>(parameters[parameter]);
  }
  template <class... Args>
  void fault(fmt::format_string<Args...> format, Args&&... values) const {
    faults.push_back(f8::format(format, std::forward<Args>(values)...));
  }
};

// The emulation of each kind of kernel.
void emulate(const codegen::AmaxSpec& spec, const Call& call);
void emulate(const codegen::CastSpec& spec, const Call& call);
void emulate(const codegen::GemmSpec& spec, const Call& call);
void emulate(const codegen::ScaleUpdateSpec& spec, const Call& call);
void emulate(const codegen::FoundInfSpec& spec, const Call& call);
void emulate(const codegen::FingerprintSpec& spec, const Call& call);
void emulate(const codegen::ColumnSumsSpec& spec, const Call& call);
void emulate(const codegen::BiasGradSpec& spec, const Call& call);
void emulate(const codegen::ComputedAmaxSpec& spec, const Call& call);
void emulate(const codegen::ComputedCastSpec& spec, const Call& call);
void emulate(const codegen::GroupLayoutSpec& spec, const Call& call);
void emulate(const codegen::RouteSpec& spec, const Call& call);
void emulate(const codegen::CombineSpec& spec, const Call& call);
void emulate(const codegen::AttentionForwardSpec& spec, const Call& call);
void emulate(const codegen::AttentionBackwardSpec& spec, const Call& call);
void emulate(const codegen::AttentionCastSpec& spec, const Call& call);
void emulate(const codegen::RotarySpec& spec, const Call& call);
void emulate(const codegen::RmsNormSpec& spec, const Call& call);
void emulate(const codegen::AdamwSpec& spec, const Call& call);
void emulate(const codegen::AdamwCastSpec& spec, const Call& call);
// Those of amax and cast kernels over groups of rows.
void emulate_groups(const codegen::AmaxSpec& spec, const Call& call);
void emulate_groups(const codegen::CastSpec& spec, const Call& call);

}  // namespace f8::runtime::emulation
