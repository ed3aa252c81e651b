#include "tools/tuner/search/sweep/measured.hpp"

#include <map>

namespace f8::tuner {

using tuning_db::TrialRow;

Result<std::set<std::string>> measured_linears(
    std::span<const tuning_db::Database* const> databases, const SweepRequest& request,
    const DeviceClass& device, const tuning_db::Toolchain& toolchain) {
  const tuning_db::Method method = method_of(request);
  std::set<std::string> measured;
  for (const tuning_db::Database* db : databases) {
    std::map<std::string, bool> runs;  // whether a run's rows count
    const auto counts = [&](const TrialRow& row) -> Result<bool> {
      if (row.candidate.impl != tuning_db::Impl::kFloat8 ||
          row.result.state != tuning_db::TrialState::kOk) {
        return false;
      }
      const auto [run, added] = runs.try_emplace(row.run_uuid, false);
      if (added) {
        run->second = F8_TRY(db->is_comparable(row.run_uuid, device, toolchain, method));
      }
      return run->second;
    };
    for (const Problem& problem : F8_TRY(problems_of(request))) {
      for (const TrialRow& row : F8_TRY(db->trials(problem))) {
        if (F8_TRY(counts(row))) measured.insert(problem.key());
      }
    }
  }
  return measured;
}

}  // namespace f8::tuner
