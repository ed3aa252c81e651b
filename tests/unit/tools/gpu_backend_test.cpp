// The real backend on a driver of plain loops: what it lays out, launches and checks is computed,
// so a wrong stride, scale or reference shows without a GPU. Its clock is the number of launches.
#include "tools/tuner/gpu_backend.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "base/file.hpp"
#include "tests/unit/runtime/fake_cublaslt.hpp"
#include "tests/unit/runtime/fake_cuda.hpp"
#include "tools/tuner/bench.hpp"
#include "tools/tuner/group.hpp"
#include "tools/tuner/search.hpp"

namespace f8::tuner {
namespace {

using runtime::testing::FakeCublasLt;
using runtime::testing::FakeCuda;

struct Fakes {
  int captures = 0, graphs = 0, graph_launches = 0, allocations = 0, frees = 0;
  CUresult capture_result = CUDA_SUCCESS;
  CUresult sync_result = CUDA_SUCCESS;
  CUresult alloc_result = CUDA_SUCCESS;
  std::vector<size_t> launches_of_graph;  // by graph
  size_t launches_before = 0;
  bool one_scale = false;  // what is copied to the device in a few bytes is its first float, often
  double clock_ms = 0;
  std::map<CUevent, double> recorded;
};
Fakes g;
FakeCuda* g_cuda = nullptr;
FakeCublasLt* g_library = nullptr;

size_t launched() {
  return g_cuda->launches.size() + static_cast<size_t>(g_library->matmuls);
}

runtime::Driver complete(const runtime::Driver& table) {
  runtime::Driver d = table;
  d.ctx_synchronize = [] { return g.sync_result; };
  d.mem_get_info = [](size_t* free_bytes, size_t* total) {
    *free_bytes = *total = size_t{1} << 30;
    return CUDA_SUCCESS;
  };
  d.mem_alloc = [](CUdeviceptr* out, size_t bytes) {
    if (g.alloc_result != CUDA_SUCCESS) return g.alloc_result;
    ++g.allocations;
    *out = reinterpret_cast<CUdeviceptr>(std::aligned_alloc(1024, (bytes + 1023) / 1024 * 1024));
    return CUDA_SUCCESS;
  };
  d.mem_free = [](CUdeviceptr at) {
    ++g.frees;
    std::free(reinterpret_cast<void*>(at));
    return CUDA_SUCCESS;
  };
  d.memcpy_htod = [](CUdeviceptr to, const void* from, size_t bytes) {
    std::memcpy(reinterpret_cast<void*>(to), from, bytes);
    if (g.one_scale && bytes <= 8192) {
      auto* scales = reinterpret_cast<float*>(to);
      std::fill_n(scales, bytes / sizeof(float), scales[0]);
    }
    return CUDA_SUCCESS;
  };
  d.memcpy_dtoh = [](void* to, CUdeviceptr from, size_t bytes) {
    std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
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
  d.stream_create = [](CUstream* out, unsigned) {
    *out = reinterpret_cast<CUstream>(uintptr_t{0x2000});
    return CUDA_SUCCESS;
  };
  d.stream_destroy = [](CUstream) { return CUDA_SUCCESS; };
  d.stream_synchronize = [](CUstream) { return g.sync_result; };
  d.stream_begin_capture = [](CUstream, CUstreamCaptureMode) {
    ++g.captures;
    g.launches_before = launched();
    return CUDA_SUCCESS;
  };
  d.stream_end_capture = [](CUstream, CUgraph* out) {
    g.launches_of_graph.push_back(launched() - g.launches_before);
    *out = reinterpret_cast<CUgraph>(g.launches_of_graph.size());
    return g.capture_result;
  };
  d.graph_instantiate = [](CUgraphExec* out, CUgraph graph, unsigned long long) {
    ++g.graphs;
    *out = reinterpret_cast<CUgraphExec>(graph);
    return CUDA_SUCCESS;
  };
  d.graph_destroy = [](CUgraph) { return CUDA_SUCCESS; };
  d.graph_exec_destroy = [](CUgraphExec) {
    --g.graphs;
    return CUDA_SUCCESS;
  };
  // A launch of a graph takes a hundredth of a millisecond.
  d.graph_launch = [](CUgraphExec graph, CUstream) {
    ++g.graph_launches;
    g.clock_ms +=
        0.01 * static_cast<double>(g.launches_of_graph[reinterpret_cast<size_t>(graph) - 1]);
    return CUDA_SUCCESS;
  };
  d.event_create = [](CUevent* out, unsigned) {
    static uintptr_t next = 0;
    *out = reinterpret_cast<CUevent>(++next);
    return CUDA_SUCCESS;
  };
  d.event_destroy = [](CUevent) { return CUDA_SUCCESS; };
  d.event_record = [](CUevent event, CUstream) {
    g.recorded[event] = g.clock_ms + 0.01 * static_cast<double>(launched());
    return CUDA_SUCCESS;
  };
  d.event_synchronize = [](CUevent) { return g.sync_result; };
  d.event_elapsed_time = [](float* ms, CUevent from, CUevent to) {
    *ms = static_cast<float>(g.recorded[to] - g.recorded[from]);
    return CUDA_SUCCESS;
  };
  return d;
}

class GpuBackendTest : public ::testing::Test {
 protected:
  void SetUp() override {
    g = {};
    g_cuda = &cuda_;
    g_library = &library_;
    cuda_.launches.reserve(1 << 16);
    driver_ = complete(cuda_.table());
    runtime::set_driver_for_testing(&driver_);
    auto backend = GpuBackend::create(cuda_.context(), {.max_sets = 3, .cache_dir = {}});
    ASSERT_TRUE(backend) << backend.error().message;
    backend_ = std::move(*backend);
  }
  void TearDown() override {
    backend_.reset();
    EXPECT_EQ(g.graphs, 0) << "a graph was not destroyed";
    EXPECT_EQ(g.allocations, g.frees) << "device memory was not freed";
  }
  static Problem problem(Op op, const char* recipe, Shape shape) {
    return Problem::make(op, *find_recipe(recipe), shape).value();
  }
  static Subject generated(const Problem& problem, size_t which = 0) {
    const auto configs = codegen::gemm_candidates(gemm_spec(problem).value());
    return {.impl = "generated", .config = codegen::key(configs.at(which))};
  }

  FakeCuda cuda_;
  FakeCublasLt library_;
  runtime::Driver driver_;
  std::unique_ptr<GpuBackend> backend_;
};

TEST_F(GpuBackendTest, EveryGemmOfEveryProviderIsRight) {
  for (const Recipe& recipe : builtin_recipes()) {
    for (const Op op : {Op::kOutput, Op::kGradInput, Op::kGradWeight}) {
      const bool fp8 = recipe.at(static_cast<Gemm>(op)).is_fp8();
      for (const Shape shape :
           {Shape{64, 48, 80}, Shape{17, 32, 48}, Shape{1, 16, 16}, Shape{150, 272, 144}}) {
        const Problem p = problem(op, recipe.name.c_str(), shape);
        ASSERT_TRUE(backend_->open(p));
        std::vector<Subject> subjects = {{.impl = "bf16_cublaslt", .config = "h2"}};
        if (fp8) {
          subjects.push_back(generated(p));
          subjects.push_back({.impl = "cublaslt_tensorwise", .config = "h0"});
          // The fake library reads one scale or one for each row, and no library mixes them.
          const runtime::GemmDesc desc = gemm_desc(p, false).value();
          if (!codegen::is_block(desc.scale) && !desc.scalar_a && !desc.scalar_b) {
            subjects.push_back({.impl = "cublaslt", .config = "h1"});
          }
        }
        for (const Subject& subject : subjects) {
          const auto built = backend_->add(subject);
          ASSERT_TRUE(built) << p.key() << " " << subject.impl << " " << built.error().message;
          const auto check = backend_->verify(built->id);
          ASSERT_TRUE(check) << p.key() << " " << subject.impl << " " << check.error().message;
          EXPECT_TRUE(check->right) << p.key() << " " << subject.impl << ": " << check->what;
          EXPECT_LT(check->rel_err, 4e-3) << p.key() << " " << subject.impl;
          EXPECT_GT(check->rel_err, 0) << "bf16 results are never exact";
        }
      }
    }
  }
  EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
}

// Every recipe, with its weight cast in each forward and with the copies of before.
TEST_F(GpuBackendTest, LinearsAreRightAndTheirStepsAreTheirLaunches) {
  for (const Recipe& recipe : builtin_recipes()) {
    const Problem p = problem(Op::kLinear, recipe.name.c_str(), {64, 48, 80});
    ASSERT_TRUE(backend_->open(p));
    LinearChoices choices;
    for (const Gemm gemm : kGemms) {
      auto& choice = choices[static_cast<size_t>(gemm)];
      if (!recipe.at(gemm).is_fp8()) {
        choice.provider = Provider::kCublasLt;
        continue;
      }
      choice.config = codegen::parse_gemm_config(
                          generated(problem(to_op(gemm), recipe.name.c_str(), p.shape)).config)
                          .value();
    }
    const auto bf16 =
        backend_->add({.impl = "bf16", .config = "cublaslt:h0,cublaslt:h1,cublaslt:h2"});
    ASSERT_TRUE(bf16) << bf16.error().message;
    const auto twin = backend_->verify(bf16->id);
    ASSERT_TRUE(twin) << twin.error().message;
    EXPECT_TRUE(twin->right) << twin->what;
    EXPECT_LT(twin->rel_err, 4e-3);
    EXPECT_FALSE(backend_->add_steps(bf16->id));
    size_t steps_with_casts = 0;
    for (const char* impl : {"float8", "float8_reused"}) {
      const auto float8 = backend_->add({.impl = impl, .config = choices_text(choices)});
      ASSERT_TRUE(float8) << recipe.name << " " << impl << " " << float8.error().message;
      const auto check = backend_->verify(float8->id);
      ASSERT_TRUE(check) << recipe.name << " " << impl << " " << check.error().message;
      EXPECT_TRUE(check->right) << recipe.name << " " << impl << ": " << check->what;
      EXPECT_GT(check->sqnr_db, 18) << recipe.name;
      EXPECT_LT(check->sqnr_db, 45) << "that is no fp8";
      const auto steps = backend_->add_steps(float8->id);
      ASSERT_TRUE(steps);
      int gemms = 0;
      double bytes = 0;
      for (const auto& step : *steps) {
        gemms += step.name.starts_with("gemm ") ? 1 : 0;
        bytes += step.bytes;
        ASSERT_TRUE(backend_->estimate_ns(step.id)) << recipe.name << " " << step.name;
      }
      EXPECT_GE(gemms, 2) << recipe.name;
      EXPECT_LE(gemms, 3) << recipe.name;
      EXPECT_GT(bytes, 0) << recipe.name;
      if (std::string(impl) == "float8") {
        steps_with_casts = steps->size();
      } else {
        EXPECT_LE(steps->size(), steps_with_casts) << recipe.name;
      }
    }
  }
  EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
}

class BenchTest : public GpuBackendTest {
 protected:
  void SetUp() override {
    GpuBackendTest::SetUp();
    folder_ = make_temp_directory(std::filesystem::temp_directory_path(), "bench-test").value();
    auto cache = codegen::CubinCache::open(
        folder_, [](const codegen::KernelSource& source) -> Result<codegen::Cubin> {
          codegen::Cubin cubin;
          cubin.key = source.key;
          cubin.entry = source.entry;
          cubin.image.resize(16);
          return cubin;
        });
    ASSERT_TRUE(cache) << cache.error().message;
    compiler_ = std::make_unique<CompileAhead>(std::move(*cache), 1);
    bench_ = std::make_unique<Bench>(
        *backend_, *compiler_,
        BenchKnobs{.screen_ms = 0.1, .final_s = 0.002, .keep = 3, .linears = {}, .warm_s = 0},
        [](const std::string&) {});
  }
  void TearDown() override {
    bench_.reset();
    compiler_.reset();
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
    GpuBackendTest::TearDown();
  }
  std::filesystem::path folder_;
  std::unique_ptr<CompileAhead> compiler_;
  std::unique_ptr<Bench> bench_;
};

TEST_F(BenchTest, OfARowwiseMatmulTheRivalMayTakeOneScale) {
  const auto rowwise = bench_->matmul(problem(Op::kOutput, "rowwise", {64, 48, 80}), {});
  ASSERT_TRUE(rowwise) << rowwise.error().message;
  EXPECT_TRUE(rowwise->failed.empty()) << rowwise->failed.front().result.reason;
  for (const char* role : {"generated", "cublaslt best", "cublaslt tensorwise best", "rival",
                           "cublaslt first", "cublaslt bf16"}) {
    EXPECT_NE(rowwise->row(role), nullptr) << role;
  }
  EXPECT_EQ(rowwise->row("cublaslt tensorwise best")->subject.impl, "cublaslt_tensorwise");
  ASSERT_TRUE(rowwise->row("generated")->to_rival);
  EXPECT_NEAR(rowwise->row("rival")->to_rival->ratio, 1, 1e-9);
  EXPECT_TRUE(rowwise->no_rival.empty());

  const auto tensorwise = bench_->matmul(problem(Op::kOutput, "tensorwise", {64, 48, 80}), {});
  ASSERT_TRUE(tensorwise) << tensorwise.error().message;
  EXPECT_EQ(tensorwise->row("cublaslt tensorwise best"), nullptr);
  EXPECT_NE(tensorwise->row("cublaslt best"), nullptr);
}

TEST_F(BenchTest, ALinearIsSearchedOrChosen) {
  const Problem p = problem(Op::kLinear, "tensorwise", {64, 48, 80});
  const auto searched = bench_->linear(p, true, false);
  ASSERT_TRUE(searched) << searched.error().message;
  EXPECT_GT(searched->linears, 1);
  EXPECT_GT(searched->kernels.size(), 3u);
  const auto chosen = bench_->linear(p, false, false);
  ASSERT_TRUE(chosen) << chosen.error().message;
  EXPECT_EQ(chosen->linears, 0);
  for (const Gemm gemm : kGemms) {
    const auto prior =
        prior_choices(problem(to_op(gemm), "tensorwise", p.shape), h100(), {}).value();
    EXPECT_EQ(runtime::config_text(chosen->choices[static_cast<size_t>(gemm)]),
              runtime::config_text(prior.front()));
  }
}

TEST_F(GpuBackendTest, AKernelThatWritesNothingIsWrong) {
  const Problem p = problem(Op::kOutput, "tensorwise", {64, 48, 80});
  ASSERT_TRUE(backend_->open(p));
  const auto built = backend_->add(generated(p));
  ASSERT_TRUE(built);
  cuda_.emulate = false;
  const auto check = backend_->verify(built->id);
  ASSERT_TRUE(check);
  EXPECT_FALSE(check->right);
  EXPECT_NE(check->what.find("d[0][0] is not finite: not written"), std::string::npos)
      << check->what;
}

// Scales as a kernel would see them that reads one for all rows, or for all blocks: every element
// but those of the first rows is off.
TEST_F(GpuBackendTest, ScalesDifferSoThatAWrongOneShows) {
  for (const char* recipe : {"rowwise", "blockwise"}) {
    const Problem p = problem(Op::kOutput, recipe, {64, 272, 272});
    g.one_scale = true;
    ASSERT_TRUE(backend_->open(p));
    ASSERT_TRUE(backend_->add(generated(p)));
    const auto check = backend_->verify(0);
    ASSERT_TRUE(check);
    EXPECT_FALSE(check->right) << recipe;
    EXPECT_NE(check->what.find("relative error"), std::string::npos) << check->what;
    g.one_scale = false;
    ASSERT_TRUE(backend_->open(p));
    ASSERT_TRUE(backend_->add(generated(p)));
    EXPECT_TRUE(backend_->verify(0)->right) << recipe;
  }
}

TEST_F(GpuBackendTest, BatchesGoThroughEverySetEqually) {
  const Problem p = problem(Op::kOutput, "tensorwise", {64, 48, 80});
  ASSERT_TRUE(backend_->open(p));
  EXPECT_EQ(backend_->sets(), 3);
  const auto built = backend_->add(generated(p));
  ASSERT_TRUE(built);
  ASSERT_TRUE(backend_->set_batch(built->id, 4));
  EXPECT_EQ(g.launches_of_graph, (std::vector<size_t>{6}));  // up to a multiple of the sets
  const auto times = backend_->time(std::array{built->id, built->id});
  ASSERT_TRUE(times);
  ASSERT_EQ(times->size(), 2u);
  EXPECT_NEAR((*times)[0], 10e3, 1);  // a hundredth of a millisecond a launch
  EXPECT_NEAR((*times)[1], 10e3, 1);

  // Where one launch is a batch, the batches take turns with the sets.
  const auto large = backend_->add(generated(p, 1));
  ASSERT_TRUE(large);
  ASSERT_TRUE(backend_->set_batch(large->id, 1));
  EXPECT_EQ(g.launches_of_graph, (std::vector<size_t>{6, 1, 1, 1}));
  EXPECT_EQ(g.graphs, 4);
}

TEST_F(GpuBackendTest, ARefusedCallIsTheSubjectsALostDeviceEverybodys) {
  const Problem p = problem(Op::kOutput, "tensorwise", {64, 48, 80});
  ASSERT_TRUE(backend_->open(p));
  const auto built = backend_->add(generated(p));
  ASSERT_TRUE(built);
  cuda_.launch_result = CUDA_ERROR_INVALID_VALUE;
  const auto refused = backend_->verify(built->id);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().code, ErrorCode::kCuda) << refused.error().message;
  cuda_.launch_result = CUDA_SUCCESS;
  g.sync_result = CUDA_ERROR_ILLEGAL_ADDRESS;
  const auto lost = backend_->verify(built->id);
  ASSERT_FALSE(lost);
  EXPECT_EQ(lost.error().code, ErrorCode::kCuda);
  EXPECT_NE(lost.error().message.find("restart the process"), std::string::npos)
      << lost.error().message;
  g.sync_result = CUDA_SUCCESS;
}

TEST_F(GpuBackendTest, AFailedCaptureLeavesNothingBehind) {
  const Problem p = problem(Op::kOutput, "tensorwise", {64, 48, 80});
  ASSERT_TRUE(backend_->open(p));
  const auto built = backend_->add(generated(p));
  ASSERT_TRUE(built);
  cuda_.launch_result = CUDA_ERROR_INVALID_VALUE;
  EXPECT_FALSE(backend_->set_batch(built->id, 3));
  EXPECT_EQ(g.launches_of_graph.size(), 1u) << "the capture was not ended";
  EXPECT_EQ(g.graphs, 0);
}

TEST_F(GpuBackendTest, WhatDoesNotFitSaysHowMuchItTakes) {
  const Status opened = backend_->open(problem(Op::kLinear, "tensorwise", {65536, 8192, 8192}));
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().code, ErrorCode::kOutOfMemory);
  EXPECT_NE(opened.error().message.find("GiB"), std::string::npos) << opened.error().message;
  // And the next problem is not affected.
  EXPECT_TRUE(backend_->open(problem(Op::kOutput, "tensorwise", {64, 48, 80})));
}

TEST_F(GpuBackendTest, WhatCannotBeIsUnsupportedNotACrash) {
  const Problem kept = problem(Op::kGradWeight, "rowwise_with_gw_hp", {64, 48, 80});
  ASSERT_TRUE(backend_->open(kept));
  const auto built = backend_->add({.impl = "cublaslt", .config = "h0"});
  ASSERT_FALSE(built) << "this GEMM is not fp8";
  EXPECT_EQ(built.error().code, ErrorCode::kUnsupported);
  EXPECT_TRUE(backend_->add({.impl = "bf16_cublaslt", .config = "h0"}));
  const Problem p = problem(Op::kOutput, "tensorwise", {64, 48, 80});
  ASSERT_TRUE(backend_->open(p));
  EXPECT_FALSE(backend_->add({.impl = "cublaslt", .config = "h99"}));
  EXPECT_FALSE(backend_->add({.impl = "generated", .config = "nonsense"}));
  EXPECT_FALSE(backend_->add({.impl = "float8", .config = ""})) << "no linear is open";
  EXPECT_EQ(backend_->heuristics(p, false).value(), 8);
}

TEST_F(GpuBackendTest, AGroupRunsFromEndToEnd) {
  const Problem p = problem(Op::kGradInput, "rowwise", {64, 48, 80});
  Session session(*backend_);
  const auto outcomes =
      session.run({.problem = p,
                   .subjects = {generated(p),
                                generated(p, 2),
                                {.impl = "cublaslt", .config = "h0"},
                                {.impl = "bf16_cublaslt", .config = "h0"}},
                   .reference = 3,
                   .batch_us = 50,
                   .stop = {.target = 0.01, .min_s = 0, .max_s = 5, .min_blocks = 4},
                   .drop_above = 0,
                   .warm_s = 0.01,
                   .seed = 1});
  ASSERT_TRUE(outcomes) << outcomes.error().message;
  for (const SubjectOutcome& outcome : *outcomes) {
    EXPECT_EQ(outcome.result.state, tuning_db::TrialState::kOk) << outcome.result.reason;
    EXPECT_NEAR(outcome.result.timing->median_ns, 10e3, 1);
  }
  EXPECT_NEAR(outcomes->front().result.ratio->ratio, 1, 1e-6);
}

TEST(Pattern, IsTheRecipesCastOfUniformValues) {
  const CastSetting tensor{.scaling = Scaling::kDynamic,
                           .granularity = Granularity::kTensor,
                           .dtype = Dtype::kE4m3,
                           .pow2 = false};
  const Pattern bf16 = Pattern::make(nullptr, 3);
  const Pattern fp8 = Pattern::make(&tensor, 3);
  ASSERT_EQ(bf16.values.size(), kPatternElements);
  ASSERT_EQ(fp8.bytes.size(), kPatternElements);
  float largest = 0;
  double sum = 0;
  for (size_t i = 0; i < kPatternElements; ++i) {
    largest = std::max(largest, std::abs(fp8.values[i]));
    sum += bf16.values[i];
    const float back = fp8.values[i] * fp8.inv_scale;
    ASSERT_NEAR(back, bf16.values[i], 0.0626 * std::abs(bf16.values[i]) + 1e-4) << i;
  }
  EXPECT_EQ(largest, 448) << "the cast uses the whole range";
  EXPECT_LT(std::abs(sum / kPatternElements), 0.01) << "not uniform around zero";
}

}  // namespace
}  // namespace f8::tuner
