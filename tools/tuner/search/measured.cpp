#include "tools/tuner/search/measured.hpp"

#include <map>

namespace f8::tuner {

using tuning_db::TrialRow;

Result<std::set<std::string>> measured_linears(
    std::span<const tuning_db::Database* const> databases, const SweepRequest& request,
    const DeviceClass& device, const tuning_db::Toolchain& toolchain) {
  const tuning_db::Method method = sweep_method(request.options);
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
    for (const Shape shape : request.shapes) {
      for (const std::string& name : request.recipes) {
        const Recipe recipe = F8_TRY(find_recipe(name));
        const Problem linear = F8_TRY(Problem::make(Op::kLinear, recipe, shape, request.groups));
        for (const TrialRow& row : F8_TRY(db->trials(linear))) {
          if (F8_TRY(counts(row))) measured.insert(linear.key());
        }
      }
    }
  }
  return measured;
}

}  // namespace f8::tuner
