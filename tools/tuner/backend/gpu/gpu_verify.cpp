// Checks results before they are timed: sampled elements are compared with fp64 sums over the
// operands that the host knows, and whole sampled rows are searched for elements that were never
// written.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "recipes/dtype.hpp"
#include "recipes/fp8_layout.hpp"
#include "tools/tuner/backend/gpu/gpu_backend.hpp"
#include "tools/tuner/statistics.hpp"

namespace f8::tuner {
namespace {

constexpr int kRows = 8;
constexpr int kCols = 12;
constexpr uint8_t kPoison = 0xff;  // a NaN in bf16 and in f32
// Limits of the relative Frobenius error of the samples; the tolerances of a whole matrix are
// tighter.
constexpr double kPreciseTolerance = 5e-3;
constexpr double kFastTolerance = 2e-2;
constexpr double kCastTolerance = 0.1;    // a cast's own error, in e5m2 at most
constexpr double kLinearTolerance = 0.2;  // fp8 against exact arithmetic: the format's own error

// The first index, the last, and some between.
std::vector<int64_t> sample_indices(int64_t extent, int count, uint64_t seed) {
  std::vector<int64_t> indices = {0, extent - 1};
  Random random(seed);
  for (int i = 2; i < count; ++i) {
    indices.push_back(static_cast<int64_t>(random.below(static_cast<size_t>(extent))));
  }
  std::ranges::sort(indices);
  const auto repeated = std::ranges::unique(indices);
  indices.erase(repeated.begin(), repeated.end());
  return indices;
}

// Sampled elements of a GEMM: values[i][j] = sum_c a(i, c) b(j, c).
template <class A, class B>
std::vector<double> sampled_gemm(const std::vector<int64_t>& rows, const std::vector<int64_t>& cols,
                                 int64_t k, const A& a, const B& b) {
  const auto gather = [&](const std::vector<int64_t>& indices, const auto& element) {
    std::vector<std::vector<float>> vectors(indices.size());
    for (size_t i = 0; i < indices.size(); ++i) {
      vectors[i].reserve(static_cast<size_t>(k));
      for (int64_t c = 0; c < k; ++c) vectors[i].push_back(element(indices[i], c));
    }
    return vectors;
  };
  const auto sampled_a = gather(rows, a);
  const auto sampled_b = gather(cols, b);
  std::vector<double> values;
  for (const auto& row : sampled_a) {
    for (const auto& col : sampled_b) {
      double sum = 0;
      for (size_t c = 0; c < row.size(); ++c) sum += static_cast<double>(row[c]) * col[c];
      values.push_back(sum);
    }
  }
  return values;
}

}  // namespace

// Computes d[i][j] = sum_c a(i, c) b(j, c); gemm.hpp says where the elements lie.
GpuBackend::Reference GpuBackend::gemm_reference(Operands operands, int64_t k) const {
  const bool bf16 = operands == Operands::kBf16;
  Reference reference;
  reference.rows = sample_indices(gemm_.m, kRows, options_.seed + 1);
  reference.cols = sample_indices(gemm_.n, kCols, options_.seed + 2);
  const GemmSet& set = (bf16 ? bf16_sets_ : fp8_sets_).front();
  if (!bf16) {
    const int64_t ld = row_pitch(gemm_.k);
    const bool one = operands == Operands::kFp8OneScale;
    const auto scale = [&](const Scales& scales, int64_t row, int64_t c) {
      return one ? scales.values.front() : scales.at(row, std::min(c, gemm_.k - 1));
    };
    reference.values = sampled_gemm(
        reference.rows, reference.cols, k,
        [&](int64_t i, int64_t c) { return set.a.value(i * ld + c) * scale(scale_a_, i, c); },
        [&](int64_t j, int64_t c) { return set.b.value(j * ld + c) * scale(scale_b_, j, c); });
    return reference;
  }
  const bool a_transposed = problem_.op == Op::kGradWeight;  // dy [M][N], reduced over M
  const bool b_transposed = problem_.op != Op::kOutput;      // w [N][K] or x [M][K]
  reference.values = sampled_gemm(
      reference.rows, reference.cols, k,
      [&](int64_t i, int64_t c) {
        return set.a.value(a_transposed ? c * gemm_.m + i : i * gemm_.k + c);
      },
      [&](int64_t j, int64_t c) {
        return set.b.value(b_transposed ? c * gemm_.n + j : j * gemm_.k + c);
      });
  return reference;
}

Result<std::vector<float>> GpuBackend::read(CUdeviceptr from, Dtype type, int64_t count) {
  std::vector<uint8_t> bytes(static_cast<size_t>(count) * size_bytes(type));
  F8_TRY(driver_.check(driver_.memcpy_dtoh(bytes.data(), from, bytes.size()), "cuMemcpyDtoH"));
  std::vector<float> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    values[static_cast<size_t>(i)] = load_element(bytes.data(), i, type);
  }
  return values;
}

Status GpuBackend::check_output(CUdeviceptr d, Dtype type, int64_t row_length,
                                const Reference& reference, double tolerance, const char* name,
                                Check& check) {
  const size_t bytes = static_cast<size_t>(row_length) * size_bytes(type);
  return check_rows(
      [&](int64_t i) { return read(d + static_cast<size_t>(i) * bytes, type, row_length); },
      reference, tolerance, name, check);
}

Status GpuBackend::check_rows(const std::function<Result<std::vector<float>>(int64_t)>& row_of,
                              const Reference& reference, double tolerance, const char* name,
                              Check& check) {
  double error = 0;
  double norm = 0;
  double worst = -1;
  std::string worst_text;
  size_t at = 0;
  for (const int64_t i : reference.rows) {
    const std::vector<float> row = F8_TRY(row_of(i));
    for (size_t j = 0; j < row.size() && check.right; ++j) {
      if (std::isfinite(row[j])) continue;
      check.right = false;
      check.what = f8::format("{}[{}][{}] is not finite: not written, or overflowed", name, i, j);
    }
    for (const int64_t j : reference.cols) {
      const double want = reference.values[at++];
      const double got = row[static_cast<size_t>(j)];
      const double off = std::abs(got - want);
      error += off * off;
      norm += want * want;
      if (off <= worst) continue;
      worst = off;
      worst_text = f8::format("{}[{}][{}] is {:.6g}, want {:.6g}", name, i, j, got, want);
    }
  }
  if (!check.right) return {};
  const double relative = norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
  check.rel_err = std::max(check.rel_err, relative);
  check.sqnr_db = check.rel_err > 0 ? -20 * std::log10(check.rel_err) : 200;
  if (!(relative <= tolerance)) {
    check.right = false;
    check.what = f8::format("relative error {:.3g} > {:.3g} over {} sampled elements; {}", relative,
                            tolerance, reference.values.size(), worst_text);
  }
  return {};
}

// Checks the amax of the GEMM's whole result, which the kernel takes before it rounds the result
// and adds it to `held`.
Status GpuBackend::check_amax(const Timed& timed, CUdeviceptr d, float held, Check& check) {
  float most = 0;
  for (int64_t i = 0; i < gemm_.m; ++i) {
    const size_t at = static_cast<size_t>(i * gemm_.n) * size_bytes(problem_.d);
    for (const float value : F8_TRY(read(d + at, problem_.d, gemm_.n))) {
      most = std::max(most, std::abs(value - held));
    }
  }
  const float amax = F8_TRY(read(timed.amax, Dtype::kF32, 1)).front();
  if (!check.right || std::abs(amax - most) <= kPreciseTolerance * most) return {};
  check.right = false;
  check.what = f8::format("the amax is {:.6g}, that of the result is {:.6g}", amax, most);
  return {};
}

// An epilogue that adds to what the result holds finds ones there.
Result<Check> GpuBackend::verify_gemm(Timed& timed) {
  const Epilogue& epilogue = timed.candidate.epilogue;
  const CUdeviceptr d = outputs_.front();
  const size_t bytes = static_cast<size_t>(gemm_.m * gemm_.n) * size_bytes(problem_.d);
  if (epilogue.add) {
    uint32_t ones = 0;
    const auto in_word = static_cast<int64_t>(sizeof ones / size_bytes(problem_.d));
    for (int64_t i = 0; i < in_word; ++i) store_element(&ones, i, 1.0F, problem_.d);
    F8_TRY(driver_.check(driver_.memset_d32_async(d, ones, bytes / sizeof ones, stream_),
                         "cuMemsetD32Async"));
  } else {
    F8_TRY(driver_.check(driver_.memset_d8_async(d, kPoison, bytes, stream_), "cuMemsetD8Async"));
  }
  if (epilogue.amax) {
    F8_TRY(driver_.check(driver_.memset_d8_async(timed.amax, 0, sizeof(uint32_t), stream_),
                         "cuMemsetD8Async"));
  }
  if (const Status ran = run_once(timed); !ran) return triage(ran.error());
  const auto key = std::pair{timed.operands, timed.k};
  if (!references_.contains(key)) {
    references_[key] = gemm_reference(timed.operands, timed.k);
  }
  Reference reference = references_[key];
  size_t at = 0;
  for (size_t i = 0; i < reference.rows.size(); ++i) {
    for (const int64_t j : reference.cols) {
      if (epilogue.bias) reference.values[at] += bias_of(j);
      if (epilogue.add) reference.values[at] += 1;
      ++at;
    }
  }
  const bool bf16 = timed.operands == Operands::kBf16;
  const double tolerance = !bf16 && problem_.fast ? kFastTolerance : kPreciseTolerance;
  Check check;
  F8_TRY(check_output(d, problem_.d, gemm_.n, reference, tolerance, "d", check));
  if (epilogue.amax) F8_TRY(check_amax(timed, d, epilogue.add ? 1.0F : 0.0F, check));
  return check;
}

Status GpuBackend::run_once(Timed& timed) {
  F8_TRY(launch_once(timed, 0));
  return driver_.check(driver_.stream_synchronize(stream_), "cuStreamSynchronize");
}

Result<Check> GpuBackend::verify(int candidate) {
  Timed& timed = timed_[static_cast<size_t>(candidate)];
  if (timed.candidate.impl == Impl::kCopy) return Check{};
  if (weights_ != nullptr) return verify_casts(timed);
  if (attention_) return verify_attention(timed);
  if (timed.prime) {
    if (const Status primed = timed.prime(); !primed) return triage(primed.error());
  }
  if (producer_) return verify_producer(timed);
  if (mlp_) return verify_mlp(timed);
  const bool dense_gemm = is_gemm(problem_.op) && !is_grouped(problem_.op);
  return dense_gemm ? verify_gemm(timed) : verify_linear(timed);
}

// Of experts, w and dw have a matrix for each, and a group's rows count from its first one.
Result<Check> GpuBackend::verify_linear(Timed& timed) {
  const auto poison = [&](CUdeviceptr d, int64_t elements) {
    return driver_.check(
        driver_.memset_d8_async(d, kPoison, static_cast<size_t>(elements) * 2, stream_),
        "cuMemsetD8Async");
  };
  Check check;
  const auto [m, n, k] = problem_.shape();
  const int64_t weight_rows = std::ssize(group_rows_) * n;
  const LinearSet& set = linear_sets_.front();
  F8_TRY(poison(set.y, m * n));
  F8_TRY(poison(set.dx, m * k));
  F8_TRY(poison(set.dw, weight_rows * k));
  if (const Status ran = run_once(timed); !ran) return triage(ran.error());
  std::vector<int64_t> first = {0};
  for (const int64_t rows : group_rows_) first.push_back(first.back() + rows);
  const auto group_of = [&](int64_t row) {
    return std::ranges::upper_bound(first, row) - first.begin() - 1;
  };
  const auto x = [&](int64_t i, int64_t j) { return set.x.value(i * k + j); };
  const auto dy = [&](int64_t i, int64_t j) { return set.dy.value(i * n + j); };
  const bool bf16 =
      timed.candidate.impl == Impl::kBf16 || timed.candidate.impl == Impl::kBf16CublasLt;
  const double tolerance = bf16 ? kPreciseTolerance : kLinearTolerance;
  // `row(i, cols)` has the elements of a row of the result.
  const auto compare = [&](Gemm which, CUdeviceptr d, const char* name, int64_t rows, int64_t cols,
                           const auto& row) -> Status {
    if (!check.right || (is_gemm(problem_.op) && to_gemm(problem_.op) != which)) return {};
    const auto key = std::pair{Operands::kBf16, static_cast<int64_t>(which)};
    if (!references_.contains(key)) {
      Reference reference;
      reference.rows = sample_indices(rows, kRows, options_.seed + 3);
      reference.cols = sample_indices(cols, kCols, options_.seed + 4);
      for (const int64_t i : reference.rows) {
        std::ranges::copy(row(i, reference.cols), std::back_inserter(reference.values));
      }
      references_[key] = std::move(reference);
    }
    return check_output(d, Dtype::kBf16, cols, references_[key], tolerance, name, check);
  };
  using Indices = std::vector<int64_t>;
  F8_TRY(compare(Gemm::kOutput, set.y, "y", m, n, [&](int64_t i, const Indices& cols) {
    const int64_t w = group_of(i) * n * k;
    return sampled_gemm({i}, cols, k, x,
                        [&](int64_t j, int64_t c) { return set.w.value(w + j * k + c); });
  }));
  F8_TRY(compare(Gemm::kGradInput, set.dx, "dx", m, k, [&](int64_t i, const Indices& cols) {
    const int64_t w = group_of(i) * n * k;
    return sampled_gemm({i}, cols, n, dy,
                        [&](int64_t j, int64_t c) { return set.w.value(w + c * k + j); });
  }));
  F8_TRY(
      compare(Gemm::kGradWeight, set.dw, "dw", weight_rows, k, [&](int64_t i, const Indices& cols) {
        const auto e = static_cast<size_t>(i / n);
        return sampled_gemm(
            {i % n}, cols, group_rows_[e],
            [&](int64_t r, int64_t c) { return dy(first[e] + c, r); },
            [&](int64_t j, int64_t c) { return x(first[e] + c, j); });
      }));
  return check;
}

// A few elements of y, of the first and the last row.
GpuBackend::Reference GpuBackend::mlp_reference() const {
  constexpr int64_t kCols = 8;
  const MlpShape& mlp = mlp_->shape;
  const OpenMlp::Set& set = mlp_->sets.front();
  Reference reference;
  reference.rows = {0, mlp.m - 1};
  for (int64_t c = 0; c < kCols; ++c) reference.cols.push_back(c * (mlp.k / kCols));
  for (const int64_t row : reference.rows) {
    int64_t expert = 0;
    for (int64_t end = group_rows_[0]; end <= row;)
      end += group_rows_[static_cast<size_t>(++expert)];
    const auto dot = [&](size_t w, int64_t j) {
      const int64_t first = (expert * linears_of(mlp)[w].n + j) * mlp.k;
      double sum = 0;
      for (int64_t c = 0; c < mlp.k; ++c) {
        sum += static_cast<double>(set.x.value(row * mlp.k + c)) * set.w[w].value(first + c);
      }
      return sum;
    };
    std::vector<double> h;
    for (int64_t j = 0; j < mlp.n; ++j) {
      const double first = dot(0, j);
      if (!mlp.gate) {
        h.push_back(0.5 * first * std::erfc(-first / std::numbers::sqrt2));
      } else {
        const double up = mlp.groups.experts > 0 ? dot(0, mlp.n + j) : dot(1, j);
        h.push_back(first / (1 + std::exp(-first)) * up);
      }
    }
    for (const int64_t j : reference.cols) {
      double sum = 0;
      for (int64_t c = 0; c < mlp.n; ++c) {
        sum += h[static_cast<size_t>(c)] * set.w.back().value((expert * mlp.k + j) * mlp.n + c);
      }
      reference.values.push_back(sum);
    }
  }
  return reference;
}

// The baseline computes no activation, so that its numbers are nothing to check.
Result<Check> GpuBackend::verify_mlp(Timed& timed) {
  Check check;
  const OpenMlp::Set& set = mlp_->sets.front();
  const auto elements = [&](size_t i) {
    const Shape linear = linears_of(mlp_->shape)[i];
    return std::ssize(group_rows_) * linear.n * linear.k;
  };
  const auto poison = [&](CUdeviceptr at, int64_t count) {
    return driver_.check(
        driver_.memset_d8_async(at, kPoison, bytes_of(count, Dtype::kBf16), stream_),
        "cuMemsetD8Async");
  };
  const int64_t of_x = mlp_->shape.m * mlp_->shape.k;
  F8_TRY(poison(set.y, of_x));
  F8_TRY(poison(set.dx, of_x));
  for (size_t i = 0; i < set.dw.size(); ++i) F8_TRY(poison(set.dw[i], elements(i)));
  if (const Status ran = run_once(timed); !ran) return triage(ran.error());
  if (timed.candidate.impl == Impl::kBf16) return check;
  const auto key = std::pair{Operands::kBf16, int64_t{0}};
  if (!references_.contains(key)) references_[key] = mlp_reference();
  F8_TRY(check_output(set.y, Dtype::kBf16, mlp_->shape.k, references_[key], kLinearTolerance, "y",
                      check));
  const auto look = [&](CUdeviceptr at, int64_t count, const char* name) -> Status {
    constexpr int64_t kMost = 4096;
    for (const int64_t first : {int64_t{0}, std::max<int64_t>(count - kMost, 0)}) {
      const auto values =
          F8_TRY(read(at + bytes_of(first, Dtype::kBf16), Dtype::kBf16, std::min(count, kMost)));
      if (!check.right || std::ranges::all_of(values, [](float v) { return std::isfinite(v); })) {
        continue;
      }
      check.right = false;
      check.what = f8::format("{} is not finite: not written, or overflowed", name);
    }
    return {};
  };
  F8_TRY(look(set.dx, of_x, "dx"));
  for (size_t i = 0; i < set.dw.size(); ++i) F8_TRY(look(set.dw[i], elements(i), "dw"));
  return check;
}

// What an element of a result is: as the operands make it, or, apart, as the copy of them has left it there.
double GpuBackend::produced_element(bool fused, size_t result, int64_t row, int64_t col) const {
  const OpenProducer& open = *producer_;
  const std::vector<PoolTensor>& operands = open.sets.front().operands;
  const int64_t at = row * open.size.cols + col;
  if (!fused) {
    return operands.front().value(static_cast<int64_t>(result) * open.size.rows * open.size.cols +
                                  at);
  }
  std::array<double, 3> of{operands.front().value(at)};
  for (size_t i = 1; i < operands.size(); ++i) of[i] = operands[i].value(at);
  if (is_norm(open.what.source)) {
    of = {of[0], open.norm_weight.value(col), open.norm_bias.value(col)};
  }
  const Produced both = produced(open.what, of);
  return result == 0 ? both.first : both.second;
}

// Compares sampled elements of all copies in fp8 with what the results are.
Result<Check> GpuBackend::verify_producer(Timed& timed) {
  const OpenProducer& open = *producer_;
  const bool fused = timed.candidate.impl == Impl::kProduce;
  const std::vector<void*>& results = open.sets.front().results;
  for (void* result : results) {
    F8_TRY(driver_.check(driver_.memset_d8_async(reinterpret_cast<CUdeviceptr>(result), kPoison,
                                                 open.fused->tensor_bytes(), stream_),
                         "cuMemsetD8Async"));
  }
  if (const Status ran = run_once(timed); !ran) return triage(ran.error());
  Check check;
  for (size_t i = 0; i < results.size(); ++i) {
    const float8_tensor view = F8_TRY(open.fused->view(results[i], nullptr, open.size.rows));
    const auto want = [&](int64_t row, int64_t col) {
      return produced_element(fused, i, row, col);
    };
    F8_TRY(check_copy(view, false, want, f8::format("q of result {}", i), check));
    F8_TRY(check_copy(view, true, want, f8::format("qt of result {}", i), check));
  }
  return check;
}

// Compares q, or qt, where the tensor has it.
Status GpuBackend::check_copy(const float8_tensor& view, bool transposed,
                              const std::function<double(int64_t, int64_t)>& want,
                              const std::string& name, Check& check) {
  const void* copy = transposed ? view.qt : view.q;
  if (copy == nullptr) return {};
  const int64_t rows = transposed ? view.cols : view.rows;
  const int64_t cols = transposed ? view.rows : view.cols;
  const int64_t pitch = transposed ? view.ld_qt : view.ld_q;
  const float8_cast_setting& setting = transposed ? view.qt_setting : view.q_setting;
  const Scales scales = F8_TRY(
      read_scales(transposed ? view.qt_inverse_scale : view.q_inverse_scale, setting, rows, cols));
  Reference reference;
  reference.rows = sample_indices(rows, kRows, options_.seed + 1);
  reference.cols = sample_indices(cols, kCols, options_.seed + 2);
  for (const int64_t i : reference.rows) {
    for (const int64_t j : reference.cols) {
      reference.values.push_back(transposed ? want(j, i) : want(i, j));
    }
  }
  const Dtype type = setting.format == FLOAT8_E5M2 ? Dtype::kE5m2 : Dtype::kE4m3;
  const auto row_of = [&](int64_t i) -> Result<std::vector<float>> {
    std::vector<float> row = F8_TRY(
        read(reinterpret_cast<CUdeviceptr>(copy) + static_cast<size_t>(i * pitch), type, cols));
    for (int64_t j = 0; j < cols; ++j) row[static_cast<size_t>(j)] *= scales.at(i, j);
    return row;
  };
  return check_rows(row_of, reference, kCastTolerance, name.c_str(), check);
}

// The inverse scales of a copy with so many rows, as a view says where they lie.
Result<GpuBackend::Scales> GpuBackend::read_scales(const float* from,
                                                   const float8_cast_setting& setting, int64_t rows,
                                                   int64_t cols) {
  const int64_t blocks = ceil_div(cols, 128);
  Scales scales;
  scales.mode = static_cast<codegen::ScaleMode>(setting.granularity);
  int64_t count = 1;
  switch (scales.mode) {
    case codegen::ScaleMode::kTensor:
      break;
    case codegen::ScaleMode::kAxis:
      count = rows;
      break;
    case codegen::ScaleMode::kBlock1x128:
      scales.stride = ceil_div(rows, 4) * 4;
      count = blocks * scales.stride;
      break;
    case codegen::ScaleMode::kBlock128x128:
      scales.stride = ceil_div(blocks, 4) * 4;
      count = ceil_div(rows, 128) * scales.stride;
      break;
  }
  scales.values = F8_TRY(read(reinterpret_cast<CUdeviceptr>(from), Dtype::kF32, count));
  return scales;
}

}  // namespace f8::tuner
