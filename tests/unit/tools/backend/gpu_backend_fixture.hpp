// A GpuBackend on a driver of plain loops. It computes what the backend launches, and its clock is
// the number of launches. The work of libraries' stand-ins, which is not launched, counts in graphs.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "runtime/device/emulated_driver.hpp"
#include "runtime/emulation/stream.hpp"
#include "tests/unit/runtime/fake_cublaslt.hpp"
#include "tests/unit/runtime/fake_cuda.hpp"
#include "tools/tuner/backend/gpu/gpu_backend.hpp"
#include "tools/tuner/search/gemm_candidates.hpp"

namespace f8::tuner::testing {

using runtime::testing::FakeCublasLt;
using runtime::testing::FakeCuda;

struct Fakes {
  int captures = 0, graphs = 0, graph_launches = 0, allocations = 0, frees = 0;
  CUresult capture_result = CUDA_SUCCESS;
  CUresult sync_result = CUDA_SUCCESS;
  CUresult alloc_result = CUDA_SUCCESS;
  std::vector<size_t> launches_of_graph;  // by graph
  size_t launches_before = 0;
  bool one_scale = false;  // a small copy to the device repeats its first float
  int change_copy =
      0;  // the last byte of this copy to the host, counted from now, changes; 0: none
  double clock_ms = 0;
  std::map<CUevent, double> recorded;
};
inline Fakes g_fakes;
inline FakeCuda* g_cuda = nullptr;
inline FakeCublasLt* g_library = nullptr;

inline size_t launched() {
  return g_cuda->launches.size() + static_cast<size_t>(g_library->matmuls);
}

inline runtime::Driver complete(const runtime::Driver& table) {
  runtime::Driver d = table;
  d.ctx_synchronize = [] { return g_fakes.sync_result; };
  d.mem_get_info = [](size_t* free_bytes, size_t* total) {
    *free_bytes = *total = size_t{1} << 30;
    return CUDA_SUCCESS;
  };
  d.mem_alloc = [](CUdeviceptr* out, size_t bytes) {
    if (g_fakes.alloc_result != CUDA_SUCCESS) return g_fakes.alloc_result;
    ++g_fakes.allocations;
    *out = reinterpret_cast<CUdeviceptr>(std::aligned_alloc(1024, (bytes + 1023) / 1024 * 1024));
    return CUDA_SUCCESS;
  };
  d.mem_free = [](CUdeviceptr at) {
    ++g_fakes.frees;
    std::free(reinterpret_cast<void*>(at));
    return CUDA_SUCCESS;
  };
  d.memcpy_htod = [](CUdeviceptr to, const void* from, size_t bytes) {
    std::memcpy(reinterpret_cast<void*>(to), from, bytes);
    if (g_fakes.one_scale && bytes <= 8192) {
      auto* scales = reinterpret_cast<float*>(to);
      std::fill_n(scales, bytes / sizeof(float), scales[0]);
    }
    return CUDA_SUCCESS;
  };
  d.memcpy_dtoh = [](void* to, CUdeviceptr from, size_t bytes) {
    std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
    if (g_fakes.change_copy > 0 && --g_fakes.change_copy == 0)
      static_cast<uint8_t*>(to)[bytes - 1] ^= 1;
    return CUDA_SUCCESS;
  };
  d.memcpy_dtod_async = [](CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream) {
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
    return CUDA_SUCCESS;
  };
  d.memset_d8 = [](CUdeviceptr to, unsigned char value, size_t bytes) {
    std::memset(reinterpret_cast<void*>(to), value, bytes);
    return CUDA_SUCCESS;
  };
  static const runtime::Driver& streams = runtime::emulation::driver();
  d.stream_create = streams.stream_create;
  d.stream_destroy = streams.stream_destroy;
  d.stream_synchronize = [](CUstream) { return g_fakes.sync_result; };
  d.stream_begin_capture = [](CUstream stream, CUstreamCaptureMode mode) {
    ++g_fakes.captures;
    g_fakes.launches_before = launched();
    return streams.stream_begin_capture(stream, mode);
  };
  d.stream_end_capture = [](CUstream stream, CUgraph* out) {
    CUgraph of_libraries = nullptr;
    if (const CUresult ended = streams.stream_end_capture(stream, &of_libraries);
        ended != CUDA_SUCCESS) {
      return ended;
    }
    g_fakes.launches_of_graph.push_back(
        launched() - g_fakes.launches_before +
        reinterpret_cast<const runtime::emulation::Graph*>(of_libraries)->operations.size());
    streams.graph_destroy(of_libraries);
    *out = reinterpret_cast<CUgraph>(g_fakes.launches_of_graph.size());
    return g_fakes.capture_result;
  };
  d.graph_instantiate = [](CUgraphExec* out, CUgraph graph, unsigned long long) {
    ++g_fakes.graphs;
    *out = reinterpret_cast<CUgraphExec>(graph);
    return CUDA_SUCCESS;
  };
  d.graph_destroy = [](CUgraph) { return CUDA_SUCCESS; };
  d.graph_exec_destroy = [](CUgraphExec) {
    --g_fakes.graphs;
    return CUDA_SUCCESS;
  };
  // A launch of a graph takes a hundredth of a millisecond.
  d.graph_launch = [](CUgraphExec graph, CUstream) {
    ++g_fakes.graph_launches;
    g_fakes.clock_ms +=
        0.01 * static_cast<double>(g_fakes.launches_of_graph[reinterpret_cast<size_t>(graph) - 1]);
    return CUDA_SUCCESS;
  };
  d.event_create = [](CUevent* out, unsigned) {
    static uintptr_t next = 0;
    *out = reinterpret_cast<CUevent>(++next);
    return CUDA_SUCCESS;
  };
  d.event_destroy = [](CUevent) { return CUDA_SUCCESS; };
  d.event_record = [](CUevent event, CUstream) {
    g_fakes.recorded[event] = g_fakes.clock_ms + 0.01 * static_cast<double>(launched());
    return CUDA_SUCCESS;
  };
  d.event_synchronize = [](CUevent) { return g_fakes.sync_result; };
  d.event_elapsed_time = [](float* ms, CUevent from, CUevent to) {
    *ms = static_cast<float>(g_fakes.recorded[to] - g_fakes.recorded[from]);
    return CUDA_SUCCESS;
  };
  return d;
}

// Puts the stand-in of cuDNN into plans that are made from now on.
inline void give_cudnn(runtime::Context& context) {
  context.state().info.emulated = true;
}

class GpuBackendTest : public ::testing::Test {
 protected:
  void SetUp() override {
    g_fakes = {};
    g_cuda = &cuda_;
    g_library = &library_;
    cuda_.launches.reserve(1 << 16);
    driver_ = complete(cuda_.table());
    runtime::set_driver_for_testing(&driver_);
    auto backend = GpuBackend::create(cuda_.context(),
                                      {.max_sets = 3, .copy_bytes = 1 << 16, .cache_dir = {}});
    ASSERT_TRUE(backend) << backend.error().message;
    backend_ = std::move(*backend);
  }
  void TearDown() override {
    backend_.reset();
    EXPECT_EQ(g_fakes.graphs, 0) << "a graph was not destroyed";
    EXPECT_EQ(g_fakes.allocations, g_fakes.frees) << "device memory was not freed";
  }
  static Problem problem(Op op, const char* recipe, Shape shape) {
    return Problem::make(op, *find_recipe(recipe), shape).value();
  }
  static Candidate generated(const Problem& problem, size_t which = 0) {
    const auto configs = codegen::gemm_candidates(gemm_spec(problem).value());
    return {.impl = Impl::kGenerated, .config = key(configs.at(which))};
  }

  FakeCuda cuda_;
  FakeCublasLt library_;
  runtime::Driver driver_;
  std::unique_ptr<GpuBackend> backend_;
};

}  // namespace f8::tuner::testing
