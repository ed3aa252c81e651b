// Version 1 of the schema and of the JSON-lines form wrote data into `reason`; here it is parsed:
//
//   reason   := screened | [ words "; " ] "kernels " kernel "," kernel "," kernel
//   screened := "screened at " MICROSECONDS " us, " words      of a trial in state `pruned`
//   kernel   := PartKernel's text; of output, grad_input, grad_weight
#include <charconv>

#include "base/text.hpp"
#include "tuning_db/rows.hpp"

namespace f8::tuning_db {
namespace {

void take_screening(TrialResult& result) {
  constexpr std::string_view kScreened = "screened at ";
  constexpr std::string_view kUnit = " us, ";
  if (result.state != TrialState::kPruned || !result.reason.starts_with(kScreened)) return;
  const char* begin = result.reason.data() + kScreened.size();
  const char* end = result.reason.data() + result.reason.size();
  double us = 0;
  const auto [stop, error] = std::from_chars(begin, end, us);
  const std::string_view rest(stop, static_cast<size_t>(end - stop));
  if (error != std::errc() || !(us > 0) || !rest.starts_with(kUnit)) return;
  result.screened_ns = us * 1e3;
  result.reason = std::string(rest.substr(kUnit.size()));
}

void take_kernels(TrialResult& result) {
  constexpr std::string_view kKernels = "kernels ";
  constexpr std::string_view kSeparator = "; ";
  const size_t start = result.reason.rfind(kKernels);
  if (start == std::string::npos) return;
  std::string_view words = std::string_view(result.reason).substr(0, start);
  if (!words.empty() && !words.ends_with(kSeparator)) return;
  std::string_view rest = std::string_view(result.reason).substr(start + kKernels.size());
  std::vector<PartKernel> kernels;
  for (const Gemm g : kGemms) {
    auto parsed = parse_part_kernel(to_string(g), take_until(rest, ','));
    if (!parsed) return;
    kernels.push_back(*std::move(parsed));
  }
  if (!rest.empty()) return;
  if (!words.empty()) words.remove_suffix(kSeparator.size());
  result.kernels = std::move(kernels);
  result.reason = std::string(words);
}

}  // namespace

void take_data_from_reason(TrialResult& result) {
  if (!result.screened_ns) take_screening(result);
  if (result.kernels.empty()) take_kernels(result);
}

}  // namespace f8::tuning_db
