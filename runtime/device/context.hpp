// A device and what is loaded on it. Creating a context resolves the driver (libcuda is opened
// here, not before), retains the device's primary context and opens the cubin cache. Thread-safe.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "base/error.hpp"
#include "codegen/kernel_spec.hpp"
#include "recipes/problem.hpp"
#include "runtime/device/device_info.hpp"
#include "tuning_db/estimate/tuning_table.hpp"

struct CUstream_st;
struct CUfunc_st;

namespace f8::runtime {

using Stream = CUstream_st*;

class Context;

struct ContextOptions {
  std::filesystem::path cache_dir = {};  // empty: environment().cache_dir
  bool programmatic_launch = true;       // let a kernel's start overlap its predecessor's end
  bool cooperative_launch = true;        // small tensors are quantized by a grid that synchronises
  bool check_pointers = false;           // ask the driver about every pointer and stream of a call
  // Begin with the built-in tuning table of this device, else of the nearest class. Without it, for
  // measurements of what the cost model chooses, there is none until set_table.
  bool builtin_table = true;
  bool moves_saved = false;  // forwards are not remembered by their saved buffers
  // A device in host memory instead of a GPU (runtime/emulation), which needs no driver, compiler
  // or cache: device pointers are host pointers, launches compute on the CPU before they return.
  // Plans are an H100's. For tests of what is built on the runtime; it is slow.
  bool emulate = false;
  // Not 0: the most milliseconds that a shape is measured for when it is planned first, on a device
  // that it was not measured on. `database` is the user's, and keeps the rows.
  int tune_on_first_use = 0;
  std::filesystem::path database = {};
  // What measures such a shape, and gives the context a table with its row; empty: float8-tune in a
  // process of its own (runtime/model/tune_program.hpp).
  std::function<Status(Context&, const Recipe&, Shape)> measure = {};
};

// A loaded kernel.
struct Kernel {
  codegen::KernelSpec spec;
  CUfunc_st* function = nullptr;
  int threads = 0;
  int smem_bytes = 0;
  int cluster_size = 1;
  int resident_clusters = 0;  // clusters that run at once, at most SMs / cluster_size
  bool cooperative = false;   // all blocks run at once, or the launch fails
  // The launch limits how many of its blocks fit an SM, so that all SMs get as many (launch.cpp).
  bool occupancy_limited = false;
  int static_smem_bytes = 0;  // of occupancy-limited kernels
  int registers = 0;
  int spill_bytes = 0;
};

class Context {
 public:
  // Refuses a device that is no Hopper (compute capability 9.0), naming what it is.
  [[nodiscard]] static Result<std::shared_ptr<Context>> create(int device,
                                                               const ContextOptions& options = {});
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  [[nodiscard]] const DeviceInfo& device() const;
  [[nodiscard]] const ContextOptions& options() const;
  [[nodiscard]] Status make_current() const;

  // Emits, compiles or takes from the cache, loads; allocates and waits, so not while a stream is
  // captured. The kernel lives as long as the context.
  [[nodiscard]] Result<const Kernel*> kernel(const codegen::KernelSpec& spec);
  // Compiles what the cache lacks of them side by side on `threads` (0: all cores), so that
  // kernel() only loads.
  [[nodiscard]] Status compile(std::span<const codegen::KernelSpec> specs, int threads = 0);

  // Plans made from now on choose kernels, and models their layers, by this table.
  void set_table(TuningTable table);
  [[nodiscard]] std::shared_ptr<const TuningTable> table() const;  // null: there is none

  struct State;
  [[nodiscard]] State& state() { return *state_; }

 private:
  explicit Context(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace f8::runtime
