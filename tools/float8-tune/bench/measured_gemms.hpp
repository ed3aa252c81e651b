// The measured GEMMs that options name: what the cost model is fitted to, and searches are judged by.
#pragma once

#include <string>
#include <vector>

#include "tools/tuner/fit/regret.hpp"

namespace f8::cli {

// `list` has sources between commas: "builtin", databases, or .jsonl files of `db export`, of which
// "-" is one on standard input. An error begins with the option.
[[nodiscard]] Result<std::vector<tuner::MeasuredGemm>> gemms_of(const char* option,
                                                                const std::string& list);

}  // namespace f8::cli
