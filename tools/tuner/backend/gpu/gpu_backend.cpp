// Opening problems and timing. gpu_candidates.cpp makes candidates and gpu_verify.cpp checks them.
#include "tools/tuner/backend/gpu/gpu_backend.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "base/log.hpp"
#include "codegen/kernels/kernel_args.cuh"
#include "tools/tuner/clock.hpp"

namespace f8::tuner {
namespace {

constexpr double kLeadInNs = 2e6;  // a shorter batch is run untimed first, to get the device going

}  // namespace

Result<std::unique_ptr<GpuBackend>> GpuBackend::create(int device,
                                                       const GpuBackendOptions& options) {
  // Candidates name their kernels, and what a plan chooses by itself is the cost model's.
  return create(F8_TRY(runtime::Context::create(
                    device, {.cache_dir = options.cache_dir, .builtin_table = false})),
                options);
}

Result<std::unique_ptr<GpuBackend>> GpuBackend::create(std::shared_ptr<runtime::Context> context,
                                                       const GpuBackendOptions& options) {
  F8_TRY(context->make_current());
  const runtime::Driver* driver = F8_TRY(runtime::driver());
  std::unique_ptr<GpuBackend> backend(new GpuBackend(std::move(context), *driver, options));
  size_t free_bytes = 0;
  size_t total = 0;
  F8_TRY(driver->check(driver->mem_get_info(&free_bytes, &total), "cuMemGetInfo"));
  backend->budget_ = static_cast<size_t>(static_cast<double>(free_bytes) * options.memory_fraction);
  F8_TRY(driver->check(driver->stream_create(&backend->stream_, CU_STREAM_NON_BLOCKING),
                       "cuStreamCreate"));
  auto nvml = NvmlDevice::open(backend->device().uuid);
  if (nvml) {
    backend->sampler_ = std::make_unique<DeviceSampler>(*nvml);
  } else {
    log_warning("clocks, power and throttling are not recorded: {}", nvml.error().message);
  }
  return backend;
}

GpuBackend::~GpuBackend() {
  sampler_.reset();
  forget();
  for (CUevent event : events_) driver_.event_destroy(event);
  if (stream_ != nullptr) driver_.stream_destroy(stream_);
}

// Keeps code kCuda for a lost device alone: a library that refuses one call concerns one candidate.
std::unexpected<Error> GpuBackend::triage(Error error) {
  if (error.code == ErrorCode::kCuda) {
    const CUresult state = driver_.ctx_synchronize();
    if (state == CUDA_SUCCESS) {
      error.code = ErrorCode::kInternal;
    } else if (const Status lost = driver_.check(state, "cuCtxSynchronize"); !lost) {
      error.message += "; " + lost.error().message;
    }
  }
  return std::unexpected(std::move(error));
}

Pool& GpuBackend::pool(const CastSetting* cast) {
  const std::string key =
      cast == nullptr ? "bf16" : f8::format("{}/{}", to_string(cast->dtype), cast->pow2);
  const auto found = pools_.find(key);
  if (found != pools_.end()) return found->second;
  return pools_.emplace(key, Pool(Pattern::make(cast, options_.seed))).first->second;
}

// How many operand sets there are: `footprint` is what one launch touches, `set_bytes` what a set
// takes.
Result<int> GpuBackend::fit_sets(double footprint, double set_bytes) {
  return fit_sets(footprint, set_bytes, {problem_.key(), "use a smaller M"});
}

Result<int> GpuBackend::fit_sets(double footprint, double set_bytes, const Opened& opened) {
  const double l2 = static_cast<double>(device().l2_bytes);
  const double cold = std::clamp(std::ceil(2 * l2 / footprint), 2.0, 1.0 * options_.max_sets);
  const double wanted = l2_ == L2State::kHot ? 1 : cold;
  const double fitting = std::floor(static_cast<double>(budget_) / set_bytes);
  if (fitting < 1) {
    return fail(ErrorCode::kOutOfMemory,
                "{} takes {:.1f} GiB on the device and {:.1f} GiB are free for it; {}", opened.what,
                set_bytes / 0x1p30, static_cast<double>(budget_) / 0x1p30, opened.remedy);
  }
  return static_cast<int>(std::min(wanted, fitting));
}

// Gives back what the pools of other problems hold where it is in the way.
Status GpuBackend::make_room(size_t bytes) {
  size_t held = results_.capacity();
  for (const auto& [key, pool] : pools_) held += pool.capacity();
  if (held + bytes <= budget_) return {};
  for (auto& [key, pool] : pools_) pool.release();
  results_.release();
  return {};
}

void GpuBackend::forget() {
  for (Timed& timed : timed_) {
    for (CUgraphExec graph : timed.graphs) driver_.graph_exec_destroy(graph);
  }
  timed_.clear();
  if (workspaces_.size() > 1) workspaces_.erase(workspaces_.begin(), workspaces_.end() - 1);
  buffers_.clear();
  fp8_sets_.clear();
  bf16_sets_.clear();
  linear_sets_.clear();
  routing_.reset();
  weights_.reset();
  attention_.reset();
  mlp_.reset();
  producer_.reset();
  outputs_.clear();
  references_.clear();
  for (auto& [key, pool] : pools_) pool.rewind();
  results_.rewind();
  scales_.rewind();
}

Status GpuBackend::open(const Problem& problem, L2State l2) {
  const bool attention = is_attention(problem.op);
  const Result<Recipe> recipe = attention ? Recipe{} : find_recipe(problem.recipe);
  if (!recipe) return std::unexpected(recipe.error());
  F8_TRY(driver_.check(driver_.stream_synchronize(stream_), "cuStreamSynchronize"));
  forget();
  problem_ = problem;
  recipe_ = *recipe;
  l2_ = l2;
  const bool dense_gemm = is_gemm(problem.op) && !is_grouped(problem.op);
  const Status opened = attention                ? open_attention()
                        : problem.op == Op::kMlp ? open_mlp()
                        : dense_gemm             ? open_gemm()
                                                 : open_linear();
  if (!opened) return triage(opened.error());
  return {};
}

Status GpuBackend::open_gemm() {
  const Gemm gemm = to_gemm(problem_.op);
  const GemmSetting& setting = recipe_.at(gemm);
  gemm_ = gemm_shape(problem_.shape(), gemm);
  const int64_t ld = row_pitch(gemm_.k);
  const bool fp8 = setting.is_fp8();
  const size_t a = fp8 ? bytes_of(gemm_.m * ld, setting.a.dtype) : 0;
  const size_t b = fp8 ? bytes_of(gemm_.n * ld, setting.b.dtype) : 0;
  const size_t bf16 = suballocation_bytes(bytes_of(gemm_.m * gemm_.k, Dtype::kBf16)) +
                      suballocation_bytes(bytes_of(gemm_.n * gemm_.k, Dtype::kBf16));
  const size_t d = suballocation_bytes(bytes_of(gemm_.m * gemm_.n, problem_.d));
  const double footprint = static_cast<double>(fp8 ? a + b + d : bf16 + d);
  const size_t set_bytes = suballocation_bytes(a) + suballocation_bytes(b) + bf16 + d;
  sets_ = F8_TRY(fit_sets(footprint, static_cast<double>(set_bytes)));
  const auto sets = static_cast<size_t>(sets_);
  F8_TRY(make_room(set_bytes * sets));
  F8_TRY(results_.reserve(driver_, d * sets, "results"));
  for (size_t i = 0; i < sets; ++i) outputs_.push_back(results_.suballocate(d));
  return {};
}

// Lays out the fp8 operand sets and their scales. Both operands may come from one pool.
Status GpuBackend::suballocate_fp8() {
  if (!fp8_sets_.empty()) return {};
  const GemmSetting& setting = recipe_.at(to_gemm(problem_.op));
  const int64_t ld = row_pitch(gemm_.k);
  const auto sets = static_cast<size_t>(sets_);
  Pool& pool_a = pool(&setting.a);
  Pool& pool_b = pool(&setting.b);
  const size_t a = suballocation_bytes(bytes_of(gemm_.m * ld, setting.a.dtype)) * sets;
  const size_t b = suballocation_bytes(bytes_of(gemm_.n * ld, setting.b.dtype)) * sets;
  if (&pool_a == &pool_b) {
    F8_TRY(pool_a.reserve(driver_, a + b));
  } else {
    F8_TRY(pool_a.reserve(driver_, a));
    F8_TRY(pool_b.reserve(driver_, b));
  }
  for (size_t i = 0; i < sets; ++i) {
    fp8_sets_.push_back({.a = pool_a.suballocate(gemm_.m * ld),
                         .b = pool_b.suballocate(gemm_.n * ld),
                         .d = outputs_[i]});
  }
  return lay_out_scales(pool_a.pattern().inv_scale, pool_b.pattern().inv_scale);
}

// The scales differ from row to row and from block to block, so that a kernel that reads a wrong
// one is found out.
Status GpuBackend::lay_out_scales(float inv_a, float inv_b) {
  const runtime::GemmDesc desc = F8_TRY(gemm_desc(problem_, false));
  using codegen::ScaleMode;
  const bool block = is_block(desc.scale);
  const ScaleMode mode_a = block           ? ScaleMode::kBlock1x128
                           : desc.scalar_a ? ScaleMode::kTensor
                                           : desc.scale;
  const ScaleMode mode_b = !block && desc.scalar_b ? ScaleMode::kTensor : desc.scale;
  scale_a_ = make_scales(mode_a, inv_a, gemm_.m, gemm_.k, 7, desc.pow2);
  scale_b_ = make_scales(mode_b, inv_b, gemm_.n, gemm_.k, 5, desc.pow2);
  const auto bytes = [](const Scales& scales) { return scales.values.size() * sizeof(float); };
  const size_t all = suballocation_bytes(bytes(scale_a_)) + suballocation_bytes(bytes(scale_b_));
  F8_TRY(scales_.reserve(driver_, all, "scales"));
  for (Scales* scales : {&scale_a_, &scale_b_}) {
    const CUdeviceptr at = scales_.suballocate(bytes(*scales));
    F8_TRY(driver_.check(driver_.memcpy_htod(at, scales->values.data(), bytes(*scales)),
                         "cuMemcpyHtoD"));
    scales->data = reinterpret_cast<const float*>(at);
  }
  // The copies run on the default stream, which this backend's stream does not wait for.
  return driver_.check(driver_.stream_synchronize(nullptr), "cuStreamSynchronize");
}

// Lays the scales out where a kernel looks for them; codegen/kernel_spec.hpp has the layouts.
GpuBackend::Scales GpuBackend::make_scales(codegen::ScaleMode mode, float inv, int64_t rows,
                                           int64_t k, int period, bool pow2) {
  Scales scales;
  scales.mode = mode;
  const int64_t blocks = ceil_div(k, 128);
  int64_t count = 1;
  switch (mode) {
    case codegen::ScaleMode::kTensor:
      break;
    case codegen::ScaleMode::kAxis:
      count = rows;
      break;
    case codegen::ScaleMode::kBlock1x128:
      scales.stride = kernels::padded_scales(rows);
      count = blocks * scales.stride;
      break;
    case codegen::ScaleMode::kBlock128x128:
      scales.stride = kernels::padded_scales(blocks);
      count = ceil_div(rows, 128) * scales.stride;
      break;
  }
  scales.values.assign(static_cast<size_t>(count), inv);
  for (size_t i = 0; i < scales.values.size(); ++i) {
    const int place = static_cast<int>(i % static_cast<size_t>(period));
    scales.values[i] *= pow2 ? std::ldexp(1.0F, -place) : 1 + 0.25F * static_cast<float>(place);
  }
  return scales;
}

float GpuBackend::Scales::at(int64_t row, int64_t c) const {
  switch (mode) {
    case codegen::ScaleMode::kTensor:
      return values[0];
    case codegen::ScaleMode::kAxis:
      return values[static_cast<size_t>(row)];
    case codegen::ScaleMode::kBlock1x128:
      return values[static_cast<size_t>(c / 128 * stride + row)];
    case codegen::ScaleMode::kBlock128x128:
      return values[static_cast<size_t>(row / 128 * stride + c / 128)];
  }
  return values[0];
}

Status GpuBackend::suballocate_bf16() {
  if (!bf16_sets_.empty()) return {};
  const size_t a = suballocation_bytes(bytes_of(gemm_.m * gemm_.k, Dtype::kBf16));
  const size_t b = suballocation_bytes(bytes_of(gemm_.n * gemm_.k, Dtype::kBf16));
  const auto sets = static_cast<size_t>(sets_);
  Pool& operands = pool(nullptr);
  F8_TRY(operands.reserve(driver_, (a + b) * sets));
  for (size_t i = 0; i < sets; ++i) {
    bf16_sets_.push_back({.a = operands.suballocate(gemm_.m * gemm_.k),
                          .b = operands.suballocate(gemm_.n * gemm_.k),
                          .d = outputs_[i]});
  }
  return {};
}

// Opens a linear, or an expert linear or one of its GEMMs, whose operands its casts make.
Status GpuBackend::open_linear() {
  const auto [m, n, k] = problem_.shape();
  const int64_t matrices = std::max<int64_t>(problem_.groups().experts, 1);
  const size_t x = suballocation_bytes(bytes_of(m * k, Dtype::kBf16));
  const size_t w = suballocation_bytes(bytes_of(matrices * n * k, Dtype::kBf16));
  const size_t y = suballocation_bytes(bytes_of(m * n, Dtype::kBf16));
  const size_t inputs = x + w + y;
  const size_t outputs = y + x + w;
  group_rows_ = {m};
  // Forward leaves its fp8 operands for backward: at most both layouts of x and w, and their
  // scales, of which there are most in 1x128 mode.
  const auto layouts = [](int64_t rows, int64_t cols) {
    return fp8_copy_bytes(rows, cols) + fp8_copy_bytes(cols, rows);
  };
  const auto scales = static_cast<size_t>(8 * (m + n + k));
  saved_bytes_ =
      suballocation_bytes(layouts(m, k) + layouts(n, k) + (x + w) / 16 + scales + (4 << 20));
  // The workspace holds the casts of dy in both layouts, and what split-K kernels need.
  size_t workspace = y + x + w + (256 << 20);
  size_t own_workspace = 0;
  if (is_grouped(problem_.op)) {
    group_rows_ = rows_of_experts(m, problem_.groups());
    const runtime::ExpertsDesc desc = F8_TRY(experts_desc(problem_));
    const auto plan = F8_TRY(runtime::Experts::plan(context_, desc));
    saved_bytes_ = suballocation_bytes(plan->saved_bytes());
    own_workspace = suballocation_bytes(plan->workspace_bytes());
    workspace = 0;
    F8_TRY(open_routing());
  }
  const size_t results = outputs + saved_bytes_ + own_workspace;
  const size_t set_bytes = inputs + results;
  const double footprint =
      is_gemm(problem_.op) ? problem_.bytes() : static_cast<double>(inputs + outputs);
  sets_ = F8_TRY(fit_sets(footprint, static_cast<double>(set_bytes + workspace)));
  const auto sets = static_cast<size_t>(sets_);
  F8_TRY(make_room(set_bytes * sets));
  Pool& operands = pool(nullptr);
  F8_TRY(operands.reserve(driver_, inputs * sets));
  F8_TRY(results_.reserve(driver_, results * sets, "results"));
  for (size_t i = 0; i < sets; ++i) {
    LinearSet set;
    set.x = operands.suballocate(m * k);
    set.w = operands.suballocate(matrices * n * k);
    set.dy = operands.suballocate(m * n);
    set.y = results_.suballocate(y);
    set.dx = results_.suballocate(x);
    set.dw = results_.suballocate(w);
    set.saved = results_.suballocate(saved_bytes_);
    set.workspace = results_.suballocate(own_workspace);
    linear_sets_.push_back(set);
  }
  return {};
}

// Leaves the layout of the routing on the device, which one launch makes.
Status GpuBackend::open_routing() {
  const int64_t m = problem_.shape().m;
  Routing routing{
      F8_TRY(runtime::GroupLayoutPlan::create(context_, m, std::ssize(group_rows_))), {}, {}, {}};
  std::vector<int32_t> ends;
  for (const int64_t rows : group_rows_) {
    ends.push_back((ends.empty() ? 0 : ends.back()) + static_cast<int32_t>(rows));
  }
  const size_t bytes = ends.size() * sizeof(int32_t);
  routing.offsets = F8_TRY(DeviceBuffer::allocate(driver_, bytes, "offsets"));
  routing.layout = F8_TRY(DeviceBuffer::allocate(driver_, routing.plan.bytes(), "a layout"));
  F8_TRY(driver_.check(driver_.memcpy_htod(routing.offsets.address(), ends.data(), bytes),
                       "cuMemcpyHtoD"));
  F8_TRY(driver_.check(driver_.memset_d8(routing.layout.address(), 0, routing.plan.bytes()),
                       "cuMemsetD8"));
  F8_TRY(driver_.check(driver_.stream_synchronize(nullptr), "cuStreamSynchronize"));
  routing.call = {.offsets = static_cast<const int32_t*>(pointer(routing.offsets.address())),
                  .m = m,
                  .layout = {mutable_pointer(routing.layout.address())}};
  F8_TRY(routing.plan.run(routing.call, stream_));
  routing_.emplace(std::move(routing));
  return {};
}

Status GpuBackend::launch_once(Timed& timed, size_t set) {
  return timed.launch[set % timed.launch.size()](stream_);
}

Result<double> GpuBackend::estimate_ns(int candidate) {
  Timed& timed = timed_[static_cast<size_t>(candidate)];
  while (events_.size() < 2) {
    CUevent event = nullptr;
    F8_TRY(driver_.check(driver_.event_create(&event, CU_EVENT_DEFAULT), "cuEventCreate"));
    events_.push_back(event);
  }
  double best = 0;
  for (size_t i = 0; i < 4; ++i) {
    F8_TRY(driver_.check(driver_.event_record(events_[0], stream_), "cuEventRecord"));
    if (const Status launched = launch_once(timed, i); !launched) return triage(launched.error());
    F8_TRY(driver_.check(driver_.event_record(events_[1], stream_), "cuEventRecord"));
    F8_TRY(driver_.check(driver_.event_synchronize(events_[1]), "cuEventSynchronize"));
    float ms = 0;
    F8_TRY(driver_.check(driver_.event_elapsed_time(&ms, events_[0], events_[1]),
                         "cuEventElapsedTime"));
    best = i == 0 ? ms * 1e6 : std::min(best, ms * 1e6);
    if (best > kLeadInNs) break;
  }
  timed.estimate_ns = best;
  return best;
}

Result<CUgraphExec> GpuBackend::capture(Timed& timed, size_t first_set) {
  F8_TRY(driver_.check(driver_.stream_begin_capture(stream_, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
                       "cuStreamBeginCapture"));
  Status launched;
  for (int i = 0; i < timed.launches && launched; ++i) {
    launched = launch_once(timed, first_set + static_cast<size_t>(i));
  }
  CUgraph graph = nullptr;
  const CUresult ended = driver_.stream_end_capture(stream_, &graph);
  if (!launched) {
    if (graph != nullptr) driver_.graph_destroy(graph);
    return triage(launched.error());
  }
  if (const Status captured = driver_.check(ended, "cuStreamEndCapture"); !captured) {
    return triage(captured.error());
  }
  CUgraphExec exec = nullptr;
  const CUresult made = driver_.graph_instantiate(&exec, graph, 0);
  driver_.graph_destroy(graph);
  if (const Status instantiated = driver_.check(made, "cuGraphInstantiateWithFlags");
      !instantiated) {
    return triage(instantiated.error());
  }
  return exec;
}

Status GpuBackend::set_batch(int candidate, int launches) {
  Timed& timed = timed_[static_cast<size_t>(candidate)];
  const int rotation = static_cast<int>(timed.launch.size());
  // The batches take the sets in turn if a batch is one launch. Else every batch takes all sets.
  const bool alternate = launches == 1;
  timed.launches = alternate ? 1 : (launches + rotation - 1) / rotation * rotation;
  for (CUgraphExec graph : timed.graphs) driver_.graph_exec_destroy(graph);
  timed.graphs.clear();
  for (int i = 0; i < (alternate ? rotation : 1); ++i) {
    timed.graphs.push_back(F8_TRY(capture(timed, static_cast<size_t>(i))));
  }
  // The first launch of a graph also uploads it.
  if (timed.estimate_ns * timed.launches < kLeadInNs) {
    for (CUgraphExec graph : timed.graphs) {
      F8_TRY(driver_.check(driver_.graph_launch(graph, stream_), "cuGraphLaunch"));
    }
    if (const Status done =
            driver_.check(driver_.stream_synchronize(stream_), "cuStreamSynchronize");
        !done) {
      return triage(done.error());
    }
  }
  return {};
}

Result<std::vector<double>> GpuBackend::time(std::span<const int> order) {
  while (events_.size() < order.size() + 1) {
    CUevent event = nullptr;
    F8_TRY(driver_.check(driver_.event_create(&event, CU_EVENT_DEFAULT), "cuEventCreate"));
    events_.push_back(event);
  }
  const auto launch = [&](int candidate) {
    Timed& timed = timed_[static_cast<size_t>(candidate)];
    CUgraphExec graph = timed.graphs[timed.next_graph++ % timed.graphs.size()];
    return driver_.check(driver_.graph_launch(graph, stream_), "cuGraphLaunch");
  };
  const Timed& first = timed_[static_cast<size_t>(order.front())];
  if (first.estimate_ns * first.launches < kLeadInNs) F8_TRY(launch(order.front()));
  F8_TRY(driver_.check(driver_.event_record(events_[0], stream_), "cuEventRecord"));
  for (size_t i = 0; i < order.size(); ++i) {
    F8_TRY(launch(order[i]));
    F8_TRY(driver_.check(driver_.event_record(events_[i + 1], stream_), "cuEventRecord"));
  }
  F8_TRY(driver_.check(driver_.event_synchronize(events_[order.size()]), "cuEventSynchronize"));
  std::vector<double> times;
  for (size_t i = 0; i < order.size(); ++i) {
    float ms = 0;
    F8_TRY(driver_.check(driver_.event_elapsed_time(&ms, events_[i], events_[i + 1]),
                         "cuEventElapsedTime"));
    times.push_back(ms * 1e6 / timed_[static_cast<size_t>(order[i])].launches);
  }
  return times;
}

DeviceState GpuBackend::sample() {
  return sampler_ == nullptr ? DeviceState{} : sampler_->take();
}

double GpuBackend::now_s() const {
  return steady_s();
}

void GpuBackend::sleep_s(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

// Every set has a pair of buffers, so that neither side of the copy stays in L2.
Result<Built> GpuBackend::add_copy() {
  const size_t bytes = options_.copy_bytes;
  const auto sets = static_cast<size_t>(F8_TRY(fit_sets(copy_traffic(), copy_traffic())));
  Timed timed;
  timed.candidate = {.impl = Impl::kCopy, .config = f8::format("{}", bytes)};
  buffers_.push_back(
      F8_TRY(DeviceBuffer::allocate(driver_, suballocation_bytes(bytes) * sets, "a copy")));
  const CUdeviceptr to = buffers_.back().address();
  buffers_.push_back(
      F8_TRY(DeviceBuffer::allocate(driver_, suballocation_bytes(bytes) * sets, "a copy")));
  const CUdeviceptr from = buffers_.back().address();
  F8_TRY(driver_.check(driver_.memset_d8(from, 0x5a, suballocation_bytes(bytes) * sets),
                       "cuMemsetD8"));
  for (size_t i = 0; i < sets; ++i) {
    const size_t offset = i * suballocation_bytes(bytes);
    timed.launch.emplace_back([this, to, from, offset, bytes](runtime::Stream stream) {
      return driver_.check(driver_.memcpy_dtod_async(to + offset, from + offset, bytes, stream),
                           "cuMemcpyDtoDAsync");
    });
  }
  timed_.push_back(std::move(timed));
  return Built{.id = static_cast<int>(timed_.size()) - 1};
}

}  // namespace f8::tuner
