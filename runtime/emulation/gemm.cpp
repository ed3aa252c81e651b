// The generated GEMM kernels on the CPU, from the tensor maps and arguments of a launch.
#include <algorithm>
#include <cstring>

#include "base/format.hpp"
#include "codegen/kernels/experts/group_args.cuh"
#include "codegen/kernels/gemm/gemm_layout.cuh"
#include "runtime/device/memory.hpp"
#include "runtime/emulation/kernels.hpp"
#include "runtime/emulation/matmul.hpp"

namespace f8::runtime::emulation {

using codegen::ScaleMode;

namespace {

CUtensorMapDataType map_type(Dtype type) {
  switch (type) {
    case Dtype::kE4m3:
    case Dtype::kE5m2:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    case Dtype::kBf16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case Dtype::kF16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case Dtype::kF32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  }
  return CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

// What a tensor map has to be.
struct ExpectedMap {
  const char* name;
  unsigned cols, rows;
  Dtype type;
  int box_rows, box_bytes;
  unsigned ld_unit;
};
void check(const TensorMap& map, const ExpectedMap& expected, Faults& faults) {
  const auto& [name, cols, rows, type, box_rows, box_bytes, ld_unit] = expected;
  const auto fault = [&faults]<class... T>(fmt::format_string<T...> format, T&&... values) {
    faults.push_back(f8::format(format, std::forward<T>(values)...));
  };
  const auto element_bytes = static_cast<unsigned>(size_bytes(type));
  if (map.cols != cols || map.rows != rows) {
    fault("{}: map is {} x {}, expected {} x {}", name, map.rows, map.cols, rows, cols);
  }
  if (map.type != map_type(type)) fault("{}: element type", name);
  if (map.ld_bytes % ld_unit != 0 || map.ld_bytes < cols * element_bytes) {
    fault("{}: rows {} bytes apart", name, map.ld_bytes);
  }
  if (static_cast<int>(map.box_cols * element_bytes) != box_bytes ||
      static_cast<int>(map.box_rows) != box_rows || map.box_rows > 256) {
    fault("{}: box {} x {}", name, map.box_rows, map.box_cols);
  }
  if (map.base == nullptr || !is_aligned(map.base)) fault("{}: misaligned or null", name);
}
void check_result(const codegen::GemmSpec& spec, const TensorMap& d,
                  const kernels::GemmProblem& args, Faults& faults) {
  check(d, {"d", args.n, args.m, spec.d, kernels::kOutRows, codegen::out_row_bytes(spec), 16},
        faults);
}
// Those of a and d; b is tile_n / cluster_m rows of 128 bytes.
void check_rows(const codegen::GemmSpec& spec, const TensorMap& a, const TensorMap& d,
                const kernels::GemmProblem& args, Faults& faults) {
  check(a,
        {"a", args.k, args.m, spec.a, spec.config.tile_m / spec.config.cluster_n, 128,
         is_fp8(spec.a) ? 128U : 16U},
        faults);
  check_result(spec, d, args, faults);
}

// Computes one of a launch's GEMMs.
void run_gemm(const codegen::GemmSpec& spec, const TensorMap& a, const TensorMap& b,
              const TensorMap& d, const kernels::GemmProblem& args, Faults& faults) {
  const GemmConfig& config = spec.config;
  const auto fault = [&faults]<class... T>(fmt::format_string<T...> format, T&&... values) {
    faults.push_back(f8::format(format, std::forward<T>(values)...));
  };
  const auto d_bytes = static_cast<unsigned>(size_bytes(spec.d));
  // Without shards K is one.
  const unsigned blocks = (args.k + kernels::kStageK - 1) / kernels::kStageK;
  const unsigned shards = args.shard_blocks == 0 ? 0 : blocks / args.shard_blocks;
  if (shards == 0 || shards * args.shard_blocks != blocks || (shards > 1 && !spec.shards)) {
    fault("b: shards of {} of {} blocks", args.shard_blocks, blocks);
    return;
  }
  check(b,
        {"b", args.k / shards, args.n * shards, spec.b, config.tile_n / config.cluster_m, 128, 128},
        faults);
  check_rows(spec, a, d, args, faults);
  const bool block = is_block(spec.scale);
  if (args.inv_scale_a == nullptr || args.inv_scale_b == nullptr) fault("inverse scales are null");
  if (block && (args.stride_a % 4 != 0 || args.stride_b % 4 != 0 || !is_aligned(args.inv_scale_a) ||
                !is_aligned(args.inv_scale_b))) {
    fault("block scales: strides {} and {}, or misaligned", args.stride_a, args.stride_b);
  }
  if (spec.bias && args.bias == nullptr) fault("bias is null");
  if (spec.amax && args.amax == nullptr) fault("amax is null");
  if (!faults.empty()) return;
  compute(
      {.m = args.m,
       .n = args.n,
       .k = args.k,
       .a = {a.base, spec.a, static_cast<int64_t>(a.ld_bytes), 1},
       .b = {b.base, spec.b, static_cast<int64_t>(b.ld_bytes), 1, args.k / shards,
             static_cast<int64_t>(args.n * b.ld_bytes)},
       .scale_a = {args.inv_scale_a, block ? ScaleMode::kBlock1x128 : spec.scale, args.stride_a},
       .scale_b = {args.inv_scale_b, spec.scale, args.stride_b},
       .d = d.base,
       .d_type = spec.d,
       .ld_d = static_cast<int64_t>(d.ld_bytes / d_bytes),
       .bias = spec.bias ? args.bias : nullptr,
       .add = spec.add,
       .amax = spec.amax ? args.amax : nullptr});
}

// Computes an M-grouped GEMM, entry by entry of its table of row tiles.
void run_grouped(const codegen::GemmSpec& spec, const TensorMap& a, const TensorMap& b,
                 const TensorMap& d, const kernels::GroupedGemmArgs& args, const Call& call) {
  const kernels::GemmProblem& problem = args.problems[0];
  const bool fp8 = is_fp8(spec.a);
  check(b,
        spec.mn_b ? ExpectedMap{"b", problem.n, problem.k, spec.b, kernels::kMnBox, 128, 16}
                  : ExpectedMap{"b", problem.k, problem.n, spec.b, spec.config.tile_n, 128,
                                fp8 ? 128U : 16U},
        call.faults);
  check_rows(spec, a, d, problem, call.faults);
  if (b.matrices == 0 || b.matrix_bytes != b.rows * b.ld_bytes) {
    call.fault("b: {} matrices {} bytes apart", b.matrices, b.matrix_bytes);
  }
  if (fp8 && (problem.inv_scale_a == nullptr || problem.inv_scale_b == nullptr)) {
    call.fault("inverse scales are null");
  }
  if (args.d != d.base || args.ld_d != d.ld_bytes) call.fault("d is not its tensor map's");
  if (args.groups == nullptr || args.row_tiles == nullptr || args.row_tile_count == nullptr) {
    call.fault("the layout of the groups is null");
  }
  if (!call.faults.empty()) return;
  const auto d_bytes = static_cast<int64_t>(size_bytes(spec.d));
  const auto ld_d = static_cast<int64_t>(d.ld_bytes);
  for (int i = 0; i < *args.row_tile_count; ++i) {
    const auto& [group, row, end, scale_row] = args.row_tiles[i];
    if (group < 0 || static_cast<unsigned long long>(group) >= b.matrices || row < 0 ||
        row >= end || end > static_cast<int>(problem.m)) {
      return call.fault("row tile {}: rows {} to {} of group {}", i, row, end, group);
    }
    const bool block = is_block(spec.scale);
    const auto scales_at = [](const float* all, int64_t at) {
      return all == nullptr ? nullptr : all + at;
    };
    const float* inv_a =
        scales_at(problem.inv_scale_a,
                  block ? int64_t{scale_row}
                        : int64_t{group} * args.group_stride_a + int64_t{row} * problem.stride_a);
    const float* inv_b = scales_at(problem.inv_scale_b, int64_t{group} * args.group_stride_b);
    const auto element = static_cast<int64_t>(size_bytes(spec.a));
    const auto ld_a = static_cast<int64_t>(a.ld_bytes), ld_b = static_cast<int64_t>(b.ld_bytes);
    compute(
        {.m = std::min(end - row, spec.config.tile_m),
         .n = problem.n,
         .k = problem.k,
         .a = {static_cast<const uint8_t*>(a.base) + row * ld_a, spec.a, ld_a / element, 1},
         .b = {static_cast<const uint8_t*>(b.base) + group * static_cast<int64_t>(b.matrix_bytes),
               spec.b, spec.mn_b ? 1 : ld_b / element, spec.mn_b ? ld_b / element : 1},
         .scale_a = {inv_a, block ? ScaleMode::kBlock1x128 : spec.scale, problem.stride_a},
         .scale_b = {inv_b, spec.scale, problem.stride_b},
         .d = static_cast<uint8_t*>(d.base) + row * ld_d,
         .d_type = spec.d,
         .ld_d = ld_d / d_bytes});
  }
  for (int64_t row = args.groups[kernels::kGroupRows]; args.zero_tail != 0 && row < problem.m;
       ++row) {
    std::memset(static_cast<uint8_t*>(d.base) + row * ld_d, 0,
                static_cast<size_t>(problem.n * d_bytes));
  }
}

// Computes a K-grouped GEMM, group by group, over whole blocks of columns: those behind a group's own
// have to be zeros.
void run_k_grouped(const codegen::GemmSpec& spec, const TensorMap& a, const TensorMap& b,
                   const TensorMap& d, const kernels::KGroupedGemmArgs& args, const Call& call) {
  const kernels::GemmProblem& problem = args.problems[0];
  const kernels::GroupLayout& layout = args.layout;
  if (spec.mn_major_a()) {
    check(a, {"a", problem.m, problem.k, spec.a, kernels::kMnBox, 128, 16}, call.faults);
    check(b, {"b", problem.n, problem.k, spec.b, kernels::kMnBox, 128, 16}, call.faults);
    check_result(spec, d, problem, call.faults);
  } else {
    check(b,
          {"b", problem.k, problem.n, spec.b, spec.config.tile_n / spec.config.cluster_m, 128, 128},
          call.faults);
    check_rows(spec, a, d, problem, call.faults);
  }
  if (d.matrices != static_cast<unsigned>(layout.experts) ||
      d.matrix_bytes != d.rows * d.ld_bytes || args.d != d.base || args.ld_d != d.ld_bytes) {
    call.fault("d: {} matrices {} bytes apart", d.matrices, d.matrix_bytes);
  }
  const bool scaled = problem.inv_scale_a != nullptr && problem.inv_scale_b != nullptr;
  if ((!scaled && !spec.mn_major_a()) || args.groups == nullptr) {
    call.fault("inverse scales or the layout of the groups are null");
  }
  if (!call.faults.empty()) return;
  const bool block = is_block(spec.scale);
  const auto d_bytes = static_cast<int64_t>(size_bytes(spec.d));
  for (int group = 0; group < layout.experts; ++group) {
    const int64_t first = args.groups[layout.at_blocks() + group];
    const int64_t length = args.groups[layout.at_lengths() + group];
    const int64_t blocks = ceil_div(length, kernels::kStageK);
    const int64_t start = args.groups[layout.at_starts() + group];
    const int64_t column = spec.mn_major_a() ? start : first * kernels::kStageK;
    const int64_t columns = spec.mn_major_a() ? length : blocks * kernels::kStageK;
    if (column + columns > static_cast<int64_t>(problem.k)) {
      return call.fault("group {}: blocks from {} on, {} of them, of {} columns", group, first,
                        blocks, problem.k);
    }
    auto* const to = static_cast<uint8_t*>(d.base) + group * static_cast<int64_t>(d.matrix_bytes);
    for (unsigned row = 0; blocks == 0 && !spec.add && row < problem.m; ++row) {
      std::memset(to + row * d.ld_bytes, 0, static_cast<size_t>(problem.n * d_bytes));
    }
    if (blocks == 0) continue;
    const auto scales = [&](const float* values, uint32_t stride, uint32_t group_stride) {
      if (spec.mn_major_a()) return InverseScales{};
      return InverseScales{
          values + (block ? first * stride : static_cast<int64_t>(group) * group_stride),
          spec.scale, stride};
    };
    const auto operand = [&](const TensorMap& map, Dtype type) {
      const auto* const base = static_cast<const uint8_t*>(map.base);
      const auto pitch = static_cast<int64_t>(map.ld_bytes);
      if (spec.mn_major_a()) return Elements{base + column * pitch, type, 1, pitch / 2};
      return Elements{base + column, type, pitch, 1};
    };
    compute({.m = problem.m,
             .n = problem.n,
             .k = columns,
             .a = operand(a, spec.a),
             .b = operand(b, spec.b),
             .scale_a = scales(problem.inv_scale_a, problem.stride_a, args.group_stride_a),
             .scale_b = scales(problem.inv_scale_b, problem.stride_b, args.group_stride_b),
             .d = to,
             .d_type = spec.d,
             .ld_d = static_cast<int64_t>(d.ld_bytes) / d_bytes,
             .add = spec.add});
  }
}

}  // namespace

void emulate(const codegen::GemmSpec& spec, const Call& call) {
  static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap) &&
                sizeof(CUtensorMap) == codegen::kTensorMapBytes);
  if (reinterpret_cast<uintptr_t>(call.parameters[0]) % alignof(CUtensorMap) != 0) {
    call.fault("the tensor maps are not aligned to {} bytes", alignof(CUtensorMap));
  }
  const auto* encoded = &call.args<CUtensorMap>();
  if (spec.groups != codegen::GemmGroups::kNone) {
    TensorMap maps[3];
    for (int j = 0; j < 3; ++j) std::memcpy(&maps[j], &encoded[j], sizeof maps[j]);
    if (spec.groups == codegen::GemmGroups::kK) {
      return run_k_grouped(spec, maps[0], maps[1], maps[2], call.args<kernels::KGroupedGemmArgs>(1),
                           call);
    }
    return run_grouped(spec, maps[0], maps[1], maps[2], call.args<kernels::GroupedGemmArgs>(1),
                       call);
  }
  const auto& args = call.args<kernels::GemmArgs>(1);
  for (int i = 0; i < spec.problems; ++i) {
    TensorMap maps[3];
    for (int j = 0; j < 3; ++j) std::memcpy(&maps[j], &encoded[3 * i + j], sizeof maps[j]);
    run_gemm(spec, maps[0], maps[1], maps[2], args.problems[i], call.faults);
  }
}

}  // namespace f8::runtime::emulation
