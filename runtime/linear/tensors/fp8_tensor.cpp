#include "runtime/linear/tensors/fp8_tensor.hpp"

#include <algorithm>
#include <array>

#include "recipes/fp8_layout.hpp"
#include "runtime/quantize/quantize.hpp"

namespace f8::runtime {
namespace {

// One of a tensor's copies, as the GEMMs read it.
struct Copy {
  const char* name;
  const char* scale_name;
  const void* data;
  const float* inverse;
  int64_t rows, cols, ld, shards;
  const float8_cast_setting& setting;
  const std::optional<CastSetting>& wanted;
};

Copy copy_of(const float8_tensor& tensor, const Copies& copies, bool q) {
  if (q) {
    return {"q",         "q_inverse_scale", tensor.q, tensor.q_inverse_scale, tensor.rows,
            tensor.cols, tensor.ld_q,       1,        tensor.q_setting,       copies.q};
  }
  return {"qt",
          "qt_inverse_scale",
          tensor.qt,
          tensor.qt_inverse_scale,
          tensor.cols,
          tensor.rows,
          tensor.ld_qt,
          std::max<int64_t>(tensor.qt_shards, 1),
          tensor.qt_setting,
          copies.qt};
}

// Copies of equal format, granularity and rounding serve, however their scales were found.
bool serves(const float8_cast_setting& given, const float8_cast_setting& wanted) {
  return given.scaling != FLOAT8_HIGH_PRECISION && given.granularity == wanted.granularity &&
         given.format == wanted.format && (given.pow2 != 0 || wanted.pow2 == 0);
}

const char* granularity_name(int32_t granularity) {
  constexpr const char* kNames[] = {"FLOAT8_TENSOR", "FLOAT8_AXIS", "FLOAT8_BLOCK_1X128",
                                    "FLOAT8_BLOCK_128X128"};
  return granularity >= 0 && granularity < 4 ? kNames[granularity] : "an unknown granularity";
}

std::string in_words(const float8_cast_setting& setting) {
  return f8::format("{}, {}{}", setting.format == FLOAT8_E5M2 ? "FLOAT8_E5M2" : "FLOAT8_E4M3",
                    granularity_name(setting.granularity), setting.pow2 != 0 ? ", pow2" : "");
}

}  // namespace

float8_cast_setting cast_setting(const CastSetting& from) {
  if (from.scaling == Scaling::kDisabled) return {FLOAT8_HIGH_PRECISION, 0, 0, 0};
  return {from.scaling == Scaling::kDelayed ? FLOAT8_DELAYED : FLOAT8_DYNAMIC,
          static_cast<int32_t>(from.granularity),
          from.dtype == Dtype::kE5m2 ? FLOAT8_E5M2 : FLOAT8_E4M3, from.pow2 ? 1 : 0};
}

float8_tensor tensor_view(const Fp8Refs& refs, const CallArguments& call, int64_t rows,
                          int64_t cols, const Copies& copies) {
  float8_tensor view;
  view.rows = rows;
  view.cols = cols;
  if (copies.q && refs.q.slot() != 0) {
    view.q = call.at<void>(refs.q);
    view.q_inverse_scale = call.at<float>(refs.q_inverse);
    view.ld_q = row_pitch(cols);
    view.q_setting = cast_setting(*copies.q);
  }
  if (copies.qt && refs.qt.slot() != 0) {
    view.qt = call.at<void>(refs.qt);
    view.qt_inverse_scale = call.at<float>(refs.qt_inverse);
    view.ld_qt = row_pitch(rows);
    view.qt_setting = cast_setting(*copies.qt);
  } else if (refs.qt_inverse.slot() != 0) {
    view.qt_inverse_scale = call.at<float>(refs.qt_inverse);
  }
  return view;
}

Status check_tensor(const char* args, const char* name, const float8_tensor& tensor, int64_t rows,
                    int64_t cols, const Copies& copies, bool q, bool shards) {
  if (tensor.rows != rows || tensor.cols != cols) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{}.{} is a tensor of {} x {}, the call needs {} x {}",
                args, name, tensor.rows, tensor.cols, rows, cols);
  }
  const Copy copy = copy_of(tensor, copies, q);
  if (!copy.wanted) return {};
  for (const auto& [part, pointer] :
       {std::pair{copy.name, copy.data},
        std::pair{copy.scale_name, static_cast<const void*>(copy.inverse)}}) {
    if (pointer == nullptr) [[unlikely]] {
      return fail(ErrorCode::kInvalidArgument,
                  "{}.{}.{} is NULL; the call reads it: quantize the tensor with this copy", args,
                  name, part);
    }
  }
  const float8_cast_setting wanted = cast_setting(*copy.wanted);
  if (!serves(copy.setting, wanted)) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "{}.{}.{}_setting is {}; the recipe's is {}: quantize it under the linear's recipe",
                args, name, copy.name, in_words(copy.setting), in_words(wanted));
  }
  if (tensor.whole_rows != 0 && wanted.granularity == FLOAT8_BLOCK_128X128) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "{}.{} is a shard of a tensor of {} rows, whose blocks it may cut; gather it with "
                "float8_gather_tensor first",
                args, name, tensor.whole_rows);
  }
  if (copy.shards > 1) {
    constexpr int64_t kWhole = 128;  // of a GEMM's step
    if (!shards) [[unlikely]] {
      return fail(ErrorCode::kInvalidArgument,
                  "{}.{}.qt_shards is {}; only w.fp8 of a linear with weight_shards lies in shards",
                  args, name, copy.shards);
    }
    if (copy.cols % (copy.shards * kWhole) != 0 || copy.ld != copy.cols / copy.shards) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}.{} has {} rows in {} qt_shards, {} apart; a shard has whole 128s of them, "
                  "without gaps",
                  args, name, copy.cols, copy.shards, copy.ld);
    }
    return {};
  }
  if (copy.ld != row_pitch(copy.cols)) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{}.{}.ld_{} is {}; rows of {} elements lie {} apart",
                args, name, copy.name, copy.ld, copy.cols, row_pitch(copy.cols));
  }
  return {};
}

void add_tensor(CallMemory& memory, const char* name, const float8_tensor& tensor,
                const Copies& copies, bool q) {
  const Copy copy = copy_of(tensor, copies, q);
  if (!copy.wanted) return;
  const codegen::ScaleMode mode = copy.wanted->granularity;
  const auto scales = static_cast<size_t>(scale_floats(mode, copy.rows, copy.cols));
  memory.add(name, copy.data, fp8_copy_bytes(copy.rows, copy.cols), Access::kRead);
  // A tensor's inverse scale follows its scale.
  const bool one = mode == codegen::ScaleMode::kTensor;
  memory.add(name, copy.inverse, (one ? 1 : scales) * sizeof(float), Access::kRead,
             is_block(mode) ? 16 : sizeof(float));
}

void bind_tensor(const float8_tensor& tensor, Slot first, CallArguments& to) {
  const std::array<const void*, 4> parts = {tensor.q, tensor.q_inverse_scale, tensor.qt,
                                            tensor.qt_inverse_scale};
  for (size_t i = 0; i < parts.size(); ++i) {
    to.set(static_cast<Slot>(static_cast<size_t>(first) + i), parts[i]);
  }
}

void bind_refs(const Fp8Refs& refs, Slot first, CallArguments& to) {
  const std::array<Ref, 4> parts = {refs.q, refs.q_inverse, refs.qt, refs.qt_inverse};
  for (size_t i = 0; i < parts.size(); ++i) {
    to.set(static_cast<Slot>(static_cast<size_t>(first) + i), to.at<void>(parts[i]));
  }
}

}  // namespace f8::runtime
