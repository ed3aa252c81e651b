// The fields of every struct of float8.h that begins with struct_size, for the one check of all of
// them: a struct_size that ends inside a field is no version's. read_struct() of a struct that is
// not listed here does not compile, and neither does a list that lacks a struct's latest field.
#pragma once

#include <array>
#include <cstddef>
#include <type_traits>

#include "float8/float8.h"

namespace f8::c_abi {

struct Field {
  size_t begin = 0;
  size_t end = 0;
  bool is_pointer = false;
};

// Lays the fields out as the C ABI does: each at the next offset that its type may have.
template <class Struct, class... Types>
constexpr std::array<Field, sizeof...(Types)> lay_out(Types Struct::*...) {
  std::array<Field, sizeof...(Types)> fields{};
  size_t i = 0;
  size_t end = 0;
  const auto add = [&](size_t size, size_t align, bool is_pointer) {
    const size_t begin = (end + align - 1) / align * align;
    end = begin + size;
    fields[i++] = {begin, end, is_pointer};
  };
  (add(sizeof(Types), alignof(Types), std::is_pointer_v<Types>), ...);
  return fields;
}

template <class Struct>
struct StructFields;

template <>
struct StructFields<float8_context_options> {
  using S = float8_context_options;
  static constexpr auto kAll =
      lay_out(&S::struct_size, &S::cache_dir, &S::serial_launch, &S::check_pointers, &S::emulate,
              &S::no_table, &S::moves_saved, &S::tune_on_first_use, &S::database);
};

template <>
struct StructFields<float8_recipe> {
  using S = float8_recipe;
  static constexpr auto kAll =
      lay_out(&S::struct_size, &S::name, &S::output, &S::grad_input, &S::grad_weight, &S::reserved);
};

template <>
struct StructFields<float8_linear_desc> {
  using S = float8_linear_desc;
  static constexpr auto kAll =
      lay_out(&S::struct_size, &S::m_max, &S::n, &S::k, &S::recipe, &S::grad_weight_dtype, &S::bias,
              &S::accumulate_grad_weight, &S::no_grad_input, &S::custom_recipe, &S::tensor_dtype,
              &S::recompute, &S::bias_grad, &S::bias_grad_dtype, &S::non_finite, &S::count,
              &S::accumulate_grad_input, &S::sm_limit, &S::weight_shards, &S::reserved);
};

template <>
struct StructFields<float8_forward_args> {
  using S = float8_forward_args;
  static constexpr auto kAll =
      lay_out(&S::struct_size, &S::x, &S::w, &S::y, &S::saved, &S::m, &S::ld_x, &S::ld_w, &S::ld_y,
              &S::bias, &S::scales, &S::first_step, &S::reserved, &S::workspace_bytes,
              &S::saved_bytes, &S::counters, &S::ranks, &S::evaluate, &S::reserved_2, &S::x_tensor,
              &S::w_tensor, &S::launch_counts);
};

template <>
struct StructFields<float8_backward_args> {
  using S = float8_backward_args;
  static constexpr auto kAll =
      lay_out(&S::struct_size, &S::dy, &S::saved, &S::dx, &S::dw, &S::m, &S::ld_dy, &S::ld_dx,
              &S::ld_dw, &S::ld_x, &S::ld_w, &S::x, &S::w, &S::scales, &S::first_step,
              &S::accumulate, &S::workspace_bytes, &S::saved_bytes, &S::counters, &S::db,
              &S::accumulate_bias, &S::reserved, &S::ranks, &S::x_tensor, &S::w_tensor,
              &S::accumulate_dx, &S::reserved_2, &S::launch_counts, &S::dy_tensor);
};

template <>
struct StructFields<float8_tensor> {
  using S = float8_tensor;
  static constexpr auto kAll = lay_out(
      &S::struct_size, &S::rows, &S::cols, &S::q, &S::qt, &S::q_inverse_scale, &S::qt_inverse_scale,
      &S::ld_q, &S::ld_qt, &S::q_setting, &S::qt_setting, &S::qt_shards, &S::whole_rows);
};

template <>
struct StructFields<float8_quantizer_desc> {
  using S = float8_quantizer_desc;
  static constexpr auto kAll =
      lay_out(&S::struct_size, &S::rows_max, &S::cols, &S::operand, &S::dtype, &S::recipe,
              &S::custom_recipe, &S::non_finite, &S::count, &S::copies, &S::over_ranks,
              &S::whole_rows, &S::noop_flag, &S::f32_source, &S::source, &S::reserved);
};

template <>
struct StructFields<float8_quantize_args> {
  using S = float8_quantize_args;
  static constexpr auto kAll = lay_out(
      &S::struct_size, &S::x, &S::tensor, &S::rows, &S::ld_x, &S::scales, &S::first_step,
      &S::evaluate, &S::workspace_bytes, &S::tensor_bytes, &S::counters, &S::ranks, &S::transposed,
      &S::amax, &S::row_amax, &S::launch_counts, &S::first_row, &S::noop_flag, &S::up, &S::ld_up);
};

template <>
struct StructFields<float8_fingerprint_args> {
  using S = float8_fingerprint_args;
  static constexpr auto kAll = lay_out(&S::struct_size, &S::w, &S::n, &S::k, &S::ld_w, &S::dtype,
                                       &S::reserved, &S::seed, &S::fingerprint, &S::noop_flag);
};

template <>
struct StructFields<float8_grouped_linear_args> {
  using S = float8_grouped_linear_args;
  static constexpr auto kAll =
      lay_out(&S::struct_size, &S::w, &S::y, &S::dy, &S::dw, &S::ld_w, &S::ld_y, &S::ld_dy,
              &S::ld_dw, &S::bias, &S::db, &S::w_tensor, &S::scales, &S::counters, &S::accumulate,
              &S::accumulate_bias);
};

template <>
struct StructFields<float8_linear_group_args> {
  using S = float8_linear_group_args;
  static constexpr auto kAll =
      lay_out(&S::struct_size, &S::x, &S::saved, &S::dx, &S::m, &S::ld_x, &S::ld_dx, &S::linears,
              &S::count, &S::accumulate_dx, &S::first_step, &S::evaluate, &S::reserved, &S::ranks,
              &S::workspace_bytes, &S::saved_bytes);
};

template <>
struct StructFields<float8_gemm_desc> {
  using S = float8_gemm_desc;
  static constexpr auto kAll =
      lay_out(&S::struct_size, &S::m_max, &S::n, &S::k, &S::gemm, &S::d_dtype, &S::recipe,
              &S::custom_recipe, &S::bias, &S::accumulate, &S::sm_limit, &S::reserved);
};

template <>
struct StructFields<float8_gemm_args> {
  using S = float8_gemm_args;
  static constexpr auto kAll =
      lay_out(&S::struct_size, &S::a, &S::b, &S::d, &S::ld_d, &S::bias, &S::workspace_bytes);
};

template <>
struct StructFields<float8_gather_args> {
  using S = float8_gather_args;
  static constexpr auto kAll = lay_out(&S::struct_size, &S::shard, &S::whole, &S::shard_rows,
                                       &S::communicator, &S::workspace_bytes);
};

template <>
struct StructFields<float8_scales_desc> {
  using S = float8_scales_desc;
  static constexpr auto kAll = lay_out(&S::struct_size, &S::linears, &S::count, &S::history,
                                       &S::scale_from, &S::margin, &S::non_finite);
};

template <>
struct StructFields<float8_model_layer> {
  using S = float8_model_layer;
  static constexpr auto kAll = lay_out(&S::struct_size, &S::name, &S::desc);
};

template <>
struct StructFields<float8_model_desc> {
  using S = float8_model_desc;
  static constexpr auto kAll = lay_out(
      &S::struct_size, &S::layers, &S::count, &S::tokens, &S::recipe, &S::custom_recipe,
      &S::filter_fqns, &S::filter_fqn_count, &S::callback, &S::callback_user, &S::verdicts,
      &S::margin, &S::policy, &S::compile_threads, &S::fsdp, &S::tp, &S::hosts, &S::network_gbit);
};

template <>
struct StructFields<float8_model_verdict> {
  using S = float8_model_verdict;
  static constexpr auto kAll =
      lay_out(&S::struct_size, &S::name, &S::reason, &S::linear, &S::speedup, &S::speedup_low,
              &S::speedup_high, &S::evidence, &S::reserved, &S::wire_bf16_us, &S::wire_fp8_us,
              &S::exposed_bf16_us, &S::exposed_fp8_us, &S::wire_is_prediction, &S::reserved_2);
};

// True where a struct of so many bytes has whole fields alone. A struct's size is a multiple of its
// alignment, in every version.
template <class Struct>
constexpr bool has_whole_fields(size_t bytes) {
  constexpr auto& fields = StructFields<Struct>::kAll;
  static_assert(fields.back().end == sizeof(Struct),
                "the list of fields is not the struct's: add its new fields");
  if (bytes % alignof(Struct) != 0) return false;
  for (const Field& field : fields) {
    if (bytes > field.begin && bytes < field.end) return false;
  }
  return true;
}

}  // namespace f8::c_abi
