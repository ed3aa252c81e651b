#include "tools/float8-tune/bench/measured_gemms.hpp"

#include <algorithm>
#include <iterator>

#include "base/text.hpp"
#include "tools/float8-tune/options.hpp"
#include "tools/float8-tune/source.hpp"

namespace f8::cli {

using tuner::MeasuredGemm;

Result<std::vector<MeasuredGemm>> gemms_of(const char* option, const std::string& list) {
  std::vector<MeasuredGemm> all;
  for (const std::string& source : split(list, ',')) {
    const auto add = [&all](const tuning_db::Database& database) -> Status {
      std::ranges::move(F8_TRY(tuner::measured_gemms(database)), std::back_inserter(all));
      return {};
    };
    F8_TRY(of_option(option, read_source(source, add)));
  }
  if (all.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: no GEMM with two or more timed configurations; measure some with "
                "`float8-tune sweep --exhaustive`",
                option);
  }
  return all;
}

}  // namespace f8::cli
