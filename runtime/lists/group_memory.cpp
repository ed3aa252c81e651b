#include "runtime/lists/group_memory.hpp"

#include <algorithm>
#include <string_view>

namespace f8::runtime {
namespace {

constexpr std::string_view kGroupFields[] = {"m", "x", "dx", "saved", "workspace", "step"};

// Linears may have scale slots or counters in common, to which their casts add, and have launch counts
// in common.
bool is_repeated(const Region& a, const Region& b) {
  const std::string_view name = a.name;
  return name == b.name && a.begin == b.begin && a.bytes() == b.bytes() &&
         (name == "counters" || name == "float8_step.launch_counts" ||
          name.starts_with("float8_scale_slots"));
}

}  // namespace

std::string in_group(std::string message, int linear) {
  for (const std::string_view args : {"float8_forward_args.", "float8_backward_args."}) {
    size_t at = 0;
    while ((at = message.find(args, at)) != std::string::npos) {
      const size_t begin = at + args.size();
      const size_t end =
          std::min(message.find_first_not_of("abcdefghijklmnopqrstuvwxyz_", begin), message.size());
      const std::string_view field = std::string_view(message).substr(begin, end - begin);
      const bool of_group = std::ranges::count(kGroupFields, field) > 0 || linear == kOfGroup;
      const std::string prefix = of_group
                                     ? std::string("float8_linear_group_args.")
                                     : f8::format("float8_linear_group_args.linears[{}].", linear);
      message.replace(at, args.size(), prefix);
      at += prefix.size();
    }
  }
  return message;
}

Status in_group(Status status, int linear) {
  if (!status) [[unlikely]] {
    status.error().message = in_group(std::move(status.error().message), linear);
  }
  return status;
}

Status GroupMemory::add(const CallMemory& memory, int linear, Context& context, Stream stream) {
  Status good = memory.check_alignment(call_);
  if (good) good = memory.check_device(call_, context, stream);
  if (!good) [[unlikely]] {
    return in_group(std::move(good), linear);
  }
  for (const Region& region : memory.regions()) {
    if (region.access != Access::kNone) regions_[count_++] = {region, linear};
  }
  return {};
}

std::string GroupMemory::name(const OfLinear& of) {
  const std::string name = name_of(of.region);
  if (of.linear == kOfGroup) return name;
  return of.region.args == nullptr ? f8::format("{} of linears[{}]", name, of.linear)
                                   : in_group(name, of.linear);
}

Status GroupMemory::check_overlaps() const {
  for (size_t i = 0; i < count_; ++i) {
    const Region& written = regions_[i].region;
    if (written.access != Access::kWrite) continue;
    for (size_t j = 0; j < count_; ++j) {
      const Region& other = regions_[j].region;
      if (written.end <= other.begin || other.end <= written.begin || i == j) [[likely]] {
        continue;
      }
      if (!overlap(written, other) || is_repeated(written, other)) continue;
      return fail(ErrorCode::kInvalidArgument,
                  "{}: {} ({} bytes) and {} ({} bytes) overlap; the first is written, give it "
                  "memory of its own",
                  call_, name(regions_[i]), written.bytes(), name(regions_[j]), other.bytes());
    }
  }
  return {};
}

}  // namespace f8::runtime
