// RMSNorms and their gradients on the CPU, with the order of sums that codegen/kernels/norm/norm_args.cuh describes.
#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "codegen/kernels/norm/norm_args.cuh"
#include "runtime/device/memory.hpp"
#include "runtime/emulation/kernels.hpp"

namespace f8::runtime::emulation {
namespace {

// Returns the sum over a row of what each thread adds its elements to.
template <class AddElement>
float sum_of_row(const kernels::NormThreads& threads, int32_t cols, const AddElement& add) {
  const int32_t lanes = std::min(threads.of_row, 32);
  float sum = 0;
  for (int32_t first = 0; first < threads.of_row; first += lanes) {
    std::array<float, 32> lane{};
    for (int32_t i = 0; i < lanes; ++i) {
      for (int32_t v = 0; v < threads.vectors; ++v) {
        const int32_t column = 8 * (v * threads.of_row + first + i);
        for (int32_t c = column; c < std::min(column + 8, cols); ++c) {
          lane[static_cast<size_t>(i)] = add(c, lane[static_cast<size_t>(i)]);
        }
      }
    }
    for (int32_t step = lanes / 2; step > 0; step /= 2) {
      for (int32_t i = 0; i < step; ++i) {
        lane[static_cast<size_t>(i)] += lane[static_cast<size_t>(i + step)];
      }
    }
    sum = first == 0 ? lane[0] : sum + lane[0];
  }
  return sum;
}

float normalized_element(float x, float rstd, const codegen::RmsNormSpec& spec) {
  return spec.normalized ? round_element(x * rstd, spec.in) : x * rstd;
}

std::vector<float> read_row(const void* from, int64_t first, int64_t count, Dtype type) {
  std::vector<float> row(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    row[static_cast<size_t>(i)] = load_element(from, first + i, type);
  }
  return row;
}

// The weights of all columns, as elements are multiplied by them.
std::vector<float> read_weights(const codegen::RmsNormSpec& spec, const void* weight, int32_t cols,
                                float offset) {
  std::vector<float> weights = read_row(weight, 0, cols, spec.weight);
  if (!spec.normalized) {
    for (float& w : weights) w += offset;
  }
  return weights;
}

// Tells whether the kernel is for these columns.
bool are_norm_cols(const codegen::RmsNormSpec& spec, int32_t rows, int32_t cols) {
  return rows > 0 && cols >= 8 && cols % 8 == 0 && kernels::norm_kernel_cols(cols) == spec.cols;
}

void check_norm_matrix(const Call& call, const char* name, const void* at, int64_t ld, int32_t cols,
                       Dtype type) {
  if (at == nullptr || !is_aligned(at) || ld < cols || !is_row_stride(ld, cols, type)) {
    call.fault("rms norm: {} is null or misaligned, or its row stride {} is none", name, ld);
  }
}

void emulate_forward(const codegen::RmsNormSpec& spec, const Call& call) {
  const auto& args = call.args<kernels::RmsNormArgs>();
  const kernels::NormThreads threads = kernels::norm_threads(spec.cols, spec.backward);
  if (!are_norm_cols(spec, args.rows, args.cols) ||
      call.launch.grid != ceil_div(int64_t{args.rows}, threads.rows_of_block())) {
    call.fault("rms norm: grid {} for {} rows of {}", call.launch.grid, args.rows, args.cols);
  }
  check_norm_matrix(call, "x", args.x, args.ld_x, args.cols, spec.in);
  check_norm_matrix(call, "y", args.y, args.ld_y, args.cols, spec.out);
  if (args.weight == nullptr || !is_aligned(args.weight)) call.fault("rms norm: weight");
  if (!call.faults.empty()) return;
  const std::vector<float> weights = read_weights(spec, args.weight, args.cols, args.weight_offset);
  for (int64_t row = 0; row < args.rows; ++row) {
    const std::vector<float> x = read_row(args.x, row * args.ld_x, args.cols, spec.in);
    const float sum = sum_of_row(threads, args.cols, [&](int32_t c, float before) {
      return std::fmaf(x[static_cast<size_t>(c)], x[static_cast<size_t>(c)], before);
    });
    const float rstd = 1.0F / std::sqrt(sum / static_cast<float>(args.cols) + args.eps);
    if (args.rstd != nullptr) args.rstd[row] = rstd;
    for (size_t c = 0; c < x.size(); ++c) {
      store_element(args.y, row * args.ld_y + static_cast<int64_t>(c),
                    normalized_element(x[c], rstd, spec) * weights[c], spec.out);
    }
  }
}

// Writes dx of a row, and adds to dweight.
void add_row(const codegen::RmsNormSpec& spec, const kernels::RmsNormBackwardArgs& args,
             const std::vector<float>& weights, int64_t row, std::vector<float>& dweight) {
  if (row >= args.rows) {  // a thread adds the zeros that it has in the place of a row
    for (float& sum : dweight) sum += 0.0F;
    return;
  }
  const std::vector<float> x = read_row(args.x, row * args.ld_x, args.cols, spec.in);
  const std::vector<float> dy = read_row(args.dy, row * args.ld_dy, args.cols, spec.out);
  const float rstd = args.rstd[row];
  const float sum = sum_of_row(kernels::norm_threads(spec.cols, spec.backward), args.cols,
                               [&](int32_t column, float before) {
                                 const auto c = static_cast<size_t>(column);
                                 return std::fmaf(dy[c] * weights[c], x[c] * rstd, before);
                               });
  const float mean = sum / static_cast<float>(args.cols);
  for (size_t c = 0; c < x.size(); ++c) {
    dweight[c] = std::fmaf(dy[c], normalized_element(x[c], rstd, spec), dweight[c]);
    if (args.dx == nullptr) continue;
    const float g = dy[c] * weights[c];
    store_element(args.dx, row * args.ld_dx + static_cast<int64_t>(c),
                  rstd * std::fmaf(-(x[c] * rstd), mean, g), spec.in);
  }
}

void emulate_backward(const codegen::RmsNormSpec& spec, const Call& call) {
  const auto& args = call.args<kernels::RmsNormBackwardArgs>();
  const kernels::NormThreads threads = kernels::norm_threads(spec.cols, spec.backward);
  const int64_t blocks = call.launch.grid;
  if (!are_norm_cols(spec, args.rows, args.cols) ||
      blocks != kernels::norm_backward_blocks(args.rows, spec.cols, call.sm_count)) {
    call.fault("rms norm backward: grid {} for {} rows of {}", blocks, args.rows, args.cols);
  }
  check_norm_matrix(call, "x", args.x, args.ld_x, args.cols, spec.in);
  check_norm_matrix(call, "dy", args.dy, args.ld_dy, args.cols, spec.out);
  if (args.dx != nullptr) {
    check_norm_matrix(call, "dx", args.dx, args.ld_dx, args.cols, spec.in);
  }
  if (args.weight == nullptr || !is_aligned(args.weight) || args.rstd == nullptr ||
      !is_aligned(args.partials)) {
    call.fault("rms norm backward: weight, rstd or partials");
  }
  if (!call.faults.empty()) return;
  const std::vector<float> weights = read_weights(spec, args.weight, args.cols, args.weight_offset);
  const auto cols = static_cast<size_t>(args.cols);
  for (int64_t block = 0; block < blocks; ++block) {
    std::vector<float> of_block;
    for (int64_t group = 0; group < threads.groups(); ++group) {
      std::vector<float> sums(cols);
      for (int64_t begin = block * threads.rows_of_block(); begin < args.rows;
           begin += blocks * threads.rows_of_block()) {
        for (int64_t r = 0; r < threads.rows; ++r) {
          add_row(spec, args, weights, begin + group * threads.rows + r, sums);
        }
      }
      if (group == 0) {
        of_block = std::move(sums);
      } else {
        for (size_t c = 0; c < cols; ++c) of_block[c] += sums[c];
      }
    }
    if (args.partials != nullptr) {
      std::ranges::copy(of_block, args.partials + block * args.cols);
    }
  }
}

}  // namespace

void emulate(const codegen::RmsNormSpec& spec, const Call& call) {
  if (spec.backward) {
    emulate_backward(spec, call);
  } else {
    emulate_forward(spec, call);
  }
}

}  // namespace f8::runtime::emulation
