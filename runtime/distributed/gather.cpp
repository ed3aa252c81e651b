#include "runtime/distributed/gather.hpp"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "recipes/fp8_layout.hpp"
#include "recipes/problem.hpp"
#include "runtime/device/calls/call_memory.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/memory.hpp"
#include "runtime/distributed/flight_recorder.hpp"
#include "runtime/distributed/nccl_api.hpp"

namespace f8::runtime {
namespace {

constexpr const char* kArgs = "float8_gather_args";
constexpr const char* kCall = "float8_gather_tensor";
constexpr int64_t kBlock = 128;

constexpr size_t in_16s(size_t bytes) {
  return (bytes + 15) / 16 * 16;
}
constexpr int64_t in_4s(int64_t count) {
  return ceil_div(count, 4) * 4;
}

// How the rows of a tensor are shared out: all shards have `each` but the last ones, which have what
// is left.
struct Split {
  int64_t rows = 0;
  int64_t each = 0;
  int ranks = 1;

  [[nodiscard]] int64_t of(int rank) const {
    return std::clamp<int64_t>(rows - rank * each, 0, each);
  }
  [[nodiscard]] bool is_even() const { return rows == each * ranks; }
  [[nodiscard]] bool cuts_blocks() const { return rows > each && each % kBlock != 0; }
};

// A copy of the tensor, or the inverse scales of one.
struct Part {
  const char* name = "";
  const void* from = nullptr;
  void* to = nullptr;
  bool shared = false;  // all shards have the same, of `unit` bytes
  int64_t lines = 1;
  int64_t unit = 0;        // bytes of a line that `unit_rows` rows take
  int64_t unit_rows = 1;   // rows of the tensor
  int64_t from_pitch = 0;  // bytes from one line to the next; 0: there is one line
  int64_t to_pitch = 0;
  int64_t to_width = 0;  // bytes of a line that are defined: zeros follow the last shard's

  [[nodiscard]] size_t width(int64_t rows) const {
    return static_cast<size_t>(ceil_div(rows, unit_rows) * unit);
  }
  [[nodiscard]] size_t bytes(int64_t rows, int64_t pitch) const {
    if (shared) return static_cast<size_t>(unit);
    return rows == 0 ? 0 : static_cast<size_t>((lines - 1) * pitch) + width(rows);
  }
  [[nodiscard]] size_t slot(const Split& split) const {
    return in_16s(static_cast<size_t>(lines) * width(split.each));
  }
  [[nodiscard]] bool is_in_place(const Split& split) const { return lines == 1 && split.is_even(); }
  [[nodiscard]] size_t workspace_bytes(const Split& split) const {
    return shared || is_in_place(split) ? 0 : slot(split) * static_cast<size_t>(split.ranks);
  }
};

// Sets how a copy's inverse scales lie: of q, whose rows are the tensor's, or of qt.
// `cuts_blocks`: shards may cut 128x128 blocks, and each has the scales of the whole.
void describe_scales(Part& part, int32_t granularity, const float8_tensor& shard,
                     const float8_tensor& whole, bool q, bool cuts_blocks) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(float));
  const int64_t cols = whole.cols;
  part.unit = kBytes;
  switch (granularity) {
    case FLOAT8_AXIS:
      part.shared = !q;
      if (!q) part.unit = cols * kBytes;
      return;
    case FLOAT8_BLOCK_1X128:
      if (q) {
        part.lines = ceil_div(cols, kBlock);
        part.from_pitch = in_4s(shard.rows) * kBytes;
        part.to_pitch = part.to_width = in_4s(whole.rows) * kBytes;
      } else {
        part.unit = in_4s(cols) * kBytes;
        part.unit_rows = kBlock;
      }
      return;
    case FLOAT8_BLOCK_128X128:
      part.unit_rows = kBlock;
      if (cuts_blocks) {
        const int64_t down = ceil_div(q ? whole.rows : cols, kBlock);
        const int64_t across = ceil_div(q ? cols : whole.rows, kBlock);
        part.shared = true;
        part.unit = down * in_4s(across) * kBytes;
      } else if (q) {
        part.unit = in_4s(ceil_div(cols, kBlock)) * kBytes;
      } else {
        part.lines = ceil_div(cols, kBlock);
        part.from_pitch = in_4s(ceil_div(shard.rows, kBlock)) * kBytes;
        part.to_pitch = part.to_width = in_4s(ceil_div(whole.rows, kBlock)) * kBytes;
      }
      return;
    default:
      part.shared = true;
  }
}

// The parts of the copies that `whole` has.
struct Parts {
  std::array<Part, 4> all;
  size_t count = 0;
  bool has_square_blocks = false;

  Parts(const float8_tensor& shard, const float8_tensor& whole, const Split& split) {
    const bool cuts_blocks = split.cuts_blocks();
    has_square_blocks =
        (whole.q != nullptr && whole.q_setting.granularity == FLOAT8_BLOCK_128X128) ||
        (whole.qt != nullptr && whole.qt_setting.granularity == FLOAT8_BLOCK_128X128);
    if (whole.q != nullptr) {
      Part& q = add("q", shard.q, whole.q);
      q.unit = row_pitch(whole.cols);
      describe_scales(add("q_inverse_scale", shard.q_inverse_scale, whole.q_inverse_scale),
                      whole.q_setting.granularity, shard, whole, true, cuts_blocks);
    }
    if (whole.qt != nullptr) {
      Part& qt = add("qt", shard.qt, whole.qt);
      if (whole.qt_shards > 1) {
        qt.unit = whole.cols;
      } else {
        qt.unit = 1;
        qt.lines = whole.cols;
        qt.from_pitch = row_pitch(shard.rows);
        qt.to_pitch = row_pitch(whole.rows);
        qt.to_width = padded(whole.rows);
      }
      // Copies that share a tensor's scale have it once.
      if (whole.q != nullptr && whole.q_inverse_scale == whole.qt_inverse_scale) return;
      describe_scales(add("qt_inverse_scale", shard.qt_inverse_scale, whole.qt_inverse_scale),
                      whole.qt_setting.granularity, shard, whole, false, cuts_blocks);
    }
  }
  [[nodiscard]] std::span<const Part> parts() const { return {all.data(), count}; }
  // The scales of blocks of rows, as the shards have them: `shared`, those of the whole.
  [[nodiscard]] bool has_blocks_of_rows(bool shared) const {
    return std::ranges::any_of(
        parts(), [&](const Part& part) { return part.unit_rows > 1 && part.shared == shared; });
  }

 private:
  Part& add(const char* name, const void* from, const void* to) {
    all[count] = {.name = name, .from = from, .to = const_cast<void*>(to)};
    return all[count++];
  }
};

// --- one call
class Gather {
 public:
  Gather(const Driver& driver, const Nccl& nccl, const GatherCall& call, const Split& split,
         int rank, Stream stream)
      : driver_(driver), nccl_(nccl), call_(call), split_(split), rank_(rank), stream_(stream) {}

  Status run(std::span<const Part> parts, void* workspace) const {
    F8_TRY(each(parts, workspace, &Gather::pack));
    F8_TRY(nccl_.check(nccl_.group_start(), "ncclGroupStart"));
    const Status sent = each(parts, workspace, &Gather::send);
    F8_TRY(nccl_.check(nccl_.group_end(), "ncclGroupEnd"));
    F8_TRY(sent);
    return each(parts, workspace, &Gather::unpack);
  }

 private:
  // Calls `step` for each part with its slots.
  Status each(std::span<const Part> parts, void* workspace,
              Status (Gather::*step)(const Part&, std::byte*) const) const {
    auto* slots = static_cast<std::byte*>(workspace);
    for (const Part& part : parts) {
      F8_TRY((this->*step)(part, slots));
      slots += part.workspace_bytes(split_);
    }
    return {};
  }
  [[nodiscard]] bool uses_slots(const Part& part) const { return part.workspace_bytes(split_) > 0; }
  // Without an empty shard, each rank has what is the same on all.
  [[nodiscard]] bool has_empty_shard() const { return split_.of(split_.ranks - 1) == 0; }

  Status pack(const Part& part, std::byte* slots) const {
    if (part.shared && !has_empty_shard()) return copy(part.to, part.from, 1, part.unit, 0, 0);
    const int64_t rows = split_.of(rank_);
    if (!uses_slots(part) || rows == 0) return {};
    return copy(slots + slot_at(part, rank_), part.from, part.lines, part.width(rows),
                static_cast<int64_t>(part.width(split_.each)), part.from_pitch);
  }

  Status send(const Part& part, std::byte* slots) const {
    if (part.shared) {
      if (!has_empty_shard()) return {};
      const auto bytes = static_cast<size_t>(part.unit);
      record_call(call_.communicator, {CollectiveKind::kBroadcast, bytes});
      return nccl_.check(
          nccl_.broadcast(part.from, part.to, bytes, ncclUint8, 0, call_.communicator, stream_),
          "ncclBroadcast");
    }
    const bool in_slots = uses_slots(part);
    const size_t bytes = in_slots ? part.slot(split_) : part.width(split_.each);
    record_call(call_.communicator, {CollectiveKind::kAllGather, bytes});
    return nccl_.check(
        nccl_.all_gather(in_slots ? slots + slot_at(part, rank_) : part.from,
                         in_slots ? slots : part.to, bytes, ncclUint8, call_.communicator, stream_),
        "ncclAllGather");
  }

  Status unpack(const Part& part, std::byte* slots) const {
    if (part.shared) return {};
    const size_t full = part.width(split_.each);
    for (int rank = 0; uses_slots(part) && rank < split_.ranks; ++rank) {
      F8_TRY(copy(static_cast<std::byte*>(part.to) + static_cast<size_t>(rank) * full,
                  slots + slot_at(part, rank), part.lines, part.width(split_.of(rank)),
                  part.to_pitch, static_cast<int64_t>(full)));
    }
    const size_t end = part.width(split_.rows);
    const auto width = static_cast<size_t>(part.to_width);
    if (width <= end) return {};
    return driver_.check(
        driver_.memset_d2d8_async(reinterpret_cast<CUdeviceptr>(part.to) + end,
                                  static_cast<size_t>(part.to_pitch), 0, width - end,
                                  static_cast<size_t>(part.lines), stream_),
        "cuMemsetD2D8Async");
  }

  [[nodiscard]] size_t slot_at(const Part& part, int rank) const {
    return part.slot(split_) * static_cast<size_t>(rank);
  }
  Status copy(void* to, const void* from, int64_t lines, int64_t width, int64_t to_pitch,
              int64_t from_pitch) const {
    return copy(to, from, lines, static_cast<size_t>(width), to_pitch, from_pitch);
  }
  Status copy(void* to, const void* from, int64_t lines, size_t width, int64_t to_pitch,
              int64_t from_pitch) const {
    return copy_lines(driver_, to, static_cast<size_t>(to_pitch), from,
                      static_cast<size_t>(from_pitch), width, static_cast<size_t>(lines), stream_);
  }

  const Driver& driver_;
  const Nccl& nccl_;
  const GatherCall& call_;
  const Split& split_;
  int rank_;
  Stream stream_;
};

// --- checks
Status check_sizes(const GatherCall& call) {
  for (const auto& [name, size] : {std::pair{"shard_rows", call.shard_rows},
                                   {"shard.rows", call.shard.rows},
                                   {"whole.rows", call.whole.rows},
                                   {"whole.cols", call.whole.cols},
                                   {"whole.qt_shards", call.whole.qt_shards}}) {
    if (size >= 0 && size <= kMaxDim) continue;
    return fail(ErrorCode::kInvalidArgument, "{}.{} is {}; it is 0 to {}", kArgs, name, size,
                kMaxDim);
  }
  for (const auto& [name, setting] :
       {std::pair{"q_setting", call.whole.q_setting}, {"qt_setting", call.whole.qt_setting}}) {
    if (setting.granularity >= 0 && setting.granularity <= FLOAT8_BLOCK_128X128) continue;
    return fail(ErrorCode::kInvalidArgument, "{}.whole.{}.granularity is {}; see float8.h", kArgs,
                name, setting.granularity);
  }
  return {};
}

Status check_split(const GatherCall& call, const Split& split, int rank, const Parts& parts) {
  if (split.rows > split.each * split.ranks) {
    return fail(ErrorCode::kInvalidArgument,
                "{}.shard_rows is {}: {} ranks have {} rows at most, and whole has {}", kArgs,
                split.each, split.ranks, split.each * split.ranks, split.rows);
  }
  if (call.shard.rows != split.of(rank)) {
    return fail(ErrorCode::kInvalidArgument,
                "{}.shard has {} rows; rank {} of {} has {} of the {} rows of whole, where "
                "shard_rows is {}",
                kArgs, call.shard.rows, rank, split.ranks, split.of(rank), split.rows, split.each);
  }
  const int64_t shards = call.whole.qt == nullptr ? 0 : call.whole.qt_shards;
  if (shards > 1 && (shards != split.ranks || !split.is_even() || split.each % kBlock != 0)) {
    return fail(
        ErrorCode::kInvalidArgument,
        "{}.whole.qt_shards is {}; {} ranks have {} rows each, of {}: it is their number where "
        "they have equal rows, a multiple of 128",
        kArgs, shards, split.ranks, split.each, split.rows);
  }
  if (split.cuts_blocks() && parts.has_blocks_of_rows(false)) {
    return fail(ErrorCode::kInvalidArgument,
                "{}.shard_rows is {}, which cuts the blocks of 128 rows that have a scale; it is a "
                "multiple of 128",
                kArgs, split.each);
  }
  const int64_t needed = parts.has_blocks_of_rows(true) ? split.rows : 0;
  if (call.shard.whole_rows != needed && parts.has_square_blocks && call.shard.rows > 0) {
    return fail(ErrorCode::kInvalidArgument,
                "{}.shard.whole_rows is {}; where shard_rows is {} it is {}: plan the shards' "
                "quantizers with shard_rows as rows_max, and with the whole's rows as whole_rows",
                kArgs, call.shard.whole_rows, split.each, needed);
  }
  return {};
}

bool equal(const float8_cast_setting& a, const float8_cast_setting& b) {
  return a.granularity == b.granularity && a.format == b.format;
}

Status check_copies(const GatherCall& call, const Parts& parts) {
  const float8_tensor& shard = call.shard;
  const float8_tensor& whole = call.whole;
  if (parts.count == 0) {
    return fail(ErrorCode::kInvalidArgument,
                "{}.whole has neither q nor qt; what it has is gathered", kArgs);
  }
  for (const Part& part : parts.parts()) {
    if (part.to == nullptr || (part.from == nullptr && shard.rows > 0)) {
      return fail(ErrorCode::kInvalidArgument, "{}.{}.{} is NULL; whole has this copy", kArgs,
                  part.to == nullptr ? "whole" : "shard", part.name);
    }
  }
  if (shard.cols != whole.cols || whole.cols < 1) {
    return fail(ErrorCode::kInvalidArgument, "{}.shard has {} columns, whole has {}", kArgs,
                shard.cols, whole.cols);
  }
  const bool q_fits = whole.q == nullptr || shard.rows == 0 ||
                      (equal(shard.q_setting, whole.q_setting) &&
                       shard.ld_q == row_pitch(shard.cols) && whole.ld_q == shard.ld_q);
  const bool qt_fits =
      whole.qt == nullptr || shard.rows == 0 ||
      (equal(shard.qt_setting, whole.qt_setting) && shard.ld_qt == row_pitch(shard.rows) &&
       whole.ld_qt == row_pitch(whole.rows / std::max<int64_t>(whole.qt_shards, 1)));
  if (q_fits && qt_fits) return {};
  return fail(ErrorCode::kInvalidArgument,
              "{}: the settings or the row strides of {} of shard and whole differ; make both "
              "views by quantizers of one recipe",
              kArgs, q_fits ? "qt" : "q");
}

Status check_memory(const Parts& parts, const Split& split, int rank, const GatherCall& call,
                    Context& context, Stream stream) {
  CallMemory memory(kArgs);
  size_t bytes = 0;
  for (const Part& part : parts.parts()) {
    const auto alignment = static_cast<uint32_t>(part.unit_rows > 1 || part.lines > 1 ? 16 : 4);
    if (split.of(rank) > 0) {
      memory.add(part.name, part.from, part.bytes(call.shard.rows, part.from_pitch), Access::kRead,
                 alignment);
    }
    memory.add(part.name, part.to, part.bytes(split.rows, part.to_pitch), Access::kWrite,
               alignment);
    bytes += part.workspace_bytes(split);
  }
  memory.add("workspace", call.workspace.data, bytes, Access::kWrite);
  return memory.check(kCall, context, stream);
}

}  // namespace

size_t gather_workspace_bytes(const float8_tensor& whole, int64_t shard_rows, int ranks) {
  const bool known =
      check_sizes({.shard = whole, .whole = whole, .shard_rows = shard_rows}) && ranks >= 1;
  if (!known) return 0;
  const Split split{.rows = whole.rows, .each = shard_rows, .ranks = ranks};
  const Parts parts(whole, whole, split);
  size_t bytes = 0;
  for (const Part& part : parts.parts()) bytes += part.workspace_bytes(split);
  return bytes;
}

Status gather(Context& context, const GatherCall& call, Stream stream) {
  F8_TRY(check_sizes(call));
  const Nccl& nccl = *F8_TRY(nccl_of(call.communicator));
  int rank = 0;
  Split split{.rows = call.whole.rows, .each = call.shard_rows};
  F8_TRY(nccl.check(nccl.comm_count(call.communicator, &split.ranks), "ncclCommCount"));
  F8_TRY(nccl.check(nccl.comm_user_rank(call.communicator, &rank), "ncclCommUserRank"));
  const Parts parts(call.shard, call.whole, split);
  F8_TRY(check_copies(call, parts));
  F8_TRY(check_split(call, split, rank, parts));
  const size_t needed = gather_workspace_bytes(call.whole, split.each, split.ranks);
  if (needed > 0 && call.workspace.data == nullptr) {
    return fail(ErrorCode::kInvalidArgument, "{}.workspace.data is NULL; {} bytes are needed",
                kArgs, needed);
  }
  if (call.workspace.bytes != 0 && call.workspace.bytes < needed) {
    return fail(ErrorCode::kInvalidArgument, "{}.workspace.bytes is {}, {} bytes are needed", kArgs,
                call.workspace.bytes, needed);
  }
  F8_TRY(check_memory(parts, split, rank, call, context, stream));
  if (split.rows == 0) return {};
  const Context::State& state = context.state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  return Gather(state.driver, nccl, call, split, rank, stream)
      .run(parts.parts(), call.workspace.data);
}

}  // namespace f8::runtime
