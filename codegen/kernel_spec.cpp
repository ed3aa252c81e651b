#include "codegen/kernel_spec.hpp"

#include <algorithm>
#include <vector>

#include "base/text.hpp"

namespace f8::codegen {
namespace {

// Tries the registered kinds in turn.
template <size_t kIndex = 0>
Result<KernelSpec> parse_kind(std::string_view kind, std::string_view rest,
                              std::vector<std::string_view>& known) {
  if constexpr (kIndex == std::variant_size_v<KernelSpec>) {
    return fail(ErrorCode::kInvalidArgument, "unknown kind {}; one of {}", quote(kind),
                fmt::join(known, ", "));
  } else {
    using Spec = std::variant_alternative_t<kIndex, KernelSpec>;
    if (std::ranges::find(Spec::kKinds, kind) != std::end(Spec::kKinds)) {
      return F8_TRY(Spec::parse(kind, rest));
    }
    known.insert(known.end(), std::begin(Spec::kKinds), std::end(Spec::kKinds));
    return parse_kind<kIndex + 1>(kind, rest, known);
  }
}

Result<KernelSpec> parse(std::string_view text) {
  std::string_view rest = text;
  const std::string_view kind = take_until(rest, '/');
  std::vector<std::string_view> known;
  const KernelSpec spec = F8_TRY(parse_kind(kind, rest, known));
  F8_TRY(validate(spec));
  if (const std::string written = key(spec); written != text) {
    return fail(ErrorCode::kInvalidArgument, "it is written {}", written);
  }
  return spec;
}

}  // namespace

std::string key(const KernelSpec& spec) {
  return std::visit([](const auto& kind) { return kind.key(); }, spec);
}

Result<KernelSpec> parse_kernel_spec(std::string_view text) {
  Result<KernelSpec> spec = parse(text);
  if (spec) return spec;
  return fail(ErrorCode::kInvalidArgument, "kernel {}: {}", quote(text), spec.error().message);
}

Status validate(const KernelSpec& spec) {
  return std::visit([](const auto& kind) { return kind.validate(); }, spec);
}

Stub stub(const KernelSpec& spec) {
  return std::visit([](const auto& kind) { return kind.stub(); }, spec);
}

LaunchTraits launch_traits(const KernelSpec& spec) {
  return std::visit([](const auto& kind) { return kind.launch(); }, spec);
}

ParameterBytes parameter_bytes(const KernelSpec& spec) {
  return std::visit([](const auto& kind) { return kind.parameters(); }, spec);
}

}  // namespace f8::codegen
