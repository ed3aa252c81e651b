// Which linears of a model to convert: the rules that need no measurement, and the words of every
// verdict. They compose: names first, then sizes, then the automatic rule, where it is on.
//
// The automatic rule is torchao's (`torchao`: fixed limits on K and N, whatever the token count),
// or asks for a speedup (`measured`), which tuning_db/estimate knows.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "recipes/problem.hpp"

namespace f8 {

enum class FilterPolicy : uint8_t { kMeasured, kTorchao };
[[nodiscard]] Result<FilterPolicy> parse_filter_policy(std::string_view text);
[[nodiscard]] std::string_view to_string(FilterPolicy policy);

// The evidence that a verdict rests on.
enum class Evidence : uint8_t { kMeasured, kInterpolated, kModelled, kRule };
[[nodiscard]] std::string_view to_string(Evidence evidence);
[[nodiscard]] Result<Evidence> parse_evidence(std::string_view text);

// K and N are multiples of it, which fp8 tensor cores ask for.
inline constexpr int64_t kFp8Alignment = 16;
inline constexpr double kFilterMargin = 0.02;  // convert above a speedup of 1 + margin
// Among the names, it is no name: it switches the automatic rule on.
inline constexpr std::string_view kAutoFlag = "auto_filter_small_kn";

// Names of layers to keep: an entry that is part of a layer's name, case and all, keeps it.
struct NameFilter {
  std::vector<std::string> names;
  bool automatic = false;  // the flag was among them
};
// kInvalidArgument for an empty name, which would match every layer.
[[nodiscard]] Result<NameFilter> name_filter(std::span<const std::string> filter_fqns);

struct Verdict {
  bool convert = false;
  std::string reason;
};

// Why a layer is kept whatever its speed; empty: it may be converted. K and N, of experts both of their
// widths, are aligned on each of the ranks that share it too.
[[nodiscard]] std::string kept_by_name_or_size(const NameFilter& filter, const NamedLinear& layer);

// torchao's automatic rule, which it has for the settings of tensorwise and rowwise alone: a layer
// stays in bf16 where one of these boxes holds it. 0 is no bound.
struct KnBox {
  int64_t n_max = 0;
  int64_t k_max = 0;
};
[[nodiscard]] std::string to_string(const KnBox& box);  // "N <= 4096 and K <= 2048"
// Empty: torchao has no rule for the recipe.
[[nodiscard]] std::span<const KnBox> torchao_boxes(const Recipe& recipe);
[[nodiscard]] inline bool has_torchao_rule(std::string_view label) {
  return !torchao_boxes(recipe_of_label(label)).empty();
}
[[nodiscard]] Status check_torchao_rule(const Recipe& recipe);  // the error says what to do
// Experts are kept, since torchao has no rule for them.
[[nodiscard]] Verdict torchao_verdict(const Recipe& recipe, const NamedLinear& layer);

// The verdict of a speedup with its interval: convert where the lower end exceeds 1 + margin.
// `basis` ends the reason.
struct SpeedupInterval {
  double speedup = 1, lo = 1, hi = 1;
  bool operator==(const SpeedupInterval&) const = default;
};
[[nodiscard]] Verdict speedup_verdict(const SpeedupInterval& interval, double margin,
                                      std::string_view basis);

// Checks the tokens, the margin and the sizes of layers; the error names the layer.
[[nodiscard]] Status check_filter(std::span<const NamedLinear> layers, int64_t tokens,
                                  double margin);

}  // namespace f8
