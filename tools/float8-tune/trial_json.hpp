// A measured row as the commands show it: times in microseconds, and its provenance.
#pragma once

#include <string>

#include "tools/float8-tune/output.hpp"
#include "tuning_db/database.hpp"

namespace f8::cli {

[[nodiscard]] Json trial_json(const tuning_db::TrialRow& row);
// "generated 128x256s4c2x1w2g8", "cublaslt h3", "float8".
[[nodiscard]] std::string candidate_text(const tuning_db::Candidate& candidate);

}  // namespace f8::cli
