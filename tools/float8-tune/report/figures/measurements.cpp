#include "tools/float8-tune/report/figures/measurements.hpp"

#include <algorithm>
#include <iterator>
#include <set>
#include <tuple>

#include "tools/tuner/backend/candidate.hpp"

namespace f8::report {
namespace {

using tuning_db::Database;
using tuning_db::Impl;
using tuning_db::TrialRow;

std::optional<size_t> device_of(const TuningTable& table, const DeviceClass& device) {
  const auto found = std::ranges::find_if(
      table.devices, [&](const DeviceClass& known) { return known.is_same_class(device); });
  if (found == table.devices.end()) return std::nullopt;
  return static_cast<size_t>(found - table.devices.begin());
}

// The kernel of a GEMM's row, named as a linear's row names it. Nothing without a time.
std::optional<Kernel> kernel_of(const TrialRow& row) {
  const auto& timing = row.result.timing;
  if (!timing && !row.result.screened_ns) return std::nullopt;
  const auto candidate = tuner::from_row(row.candidate);
  if (!candidate) return std::nullopt;
  const bool generated = row.candidate.impl == Impl::kGenerated;
  return Kernel{
      .name = f8::format("{}:{}", to_string(generated ? Provider::kGenerated : Provider::kCublasLt),
                         candidate->config),
      .ns = timing ? timing->median_ns : *row.result.screened_ns,
      .predicted_ns = row.result.predicted_ns,
      .sm_mhz = row.result.sm_mhz_mean};
}

// One database's GEMMs of one problem and device.
struct GemmRows {
  struct Row {
    Impl impl;
    bool counts;  // ok and final: the others only tell a linear's parts
    std::string method, at;
    Kernel kernel;
  };
  Problem problem;
  std::vector<Row> rows;
};
using GemmIndex = std::map<std::pair<std::string, size_t>, GemmRows>;  // problem key, device

std::string method_of(const TrialRow& row) {
  return row.toolchain + "\n" + row.method_key;
}

class Collector {
 public:
  explicit Collector(TuningTable table) { result_.table = std::move(table); }

  Status add(const NamedDatabase& named) {
    const Database& database = *named.database;
    source_ = named.name;
    GemmIndex index;
    std::vector<TrialRow> gemms = F8_TRY(database.gemms(Impl::kGenerated));
    std::ranges::move(F8_TRY(database.gemms(Impl::kCublasLt)), std::back_inserter(gemms));
    std::ranges::move(tuner::measured_gemms(gemms), std::back_inserter(result_.choices));
    std::ranges::move(F8_TRY(database.gemms(Impl::kBf16CublasLt)), std::back_inserter(gemms));
    for (const TrialRow& row : gemms) add_row(row, index);
    for (const auto& [key, rows] : index) {
      if (const auto times = fastest(rows, key.second)) gemms_.try_emplace(key, *times);
    }
    F8_TRY(add_linears(database, index));
    F8_TRY(add_wholes(database, Op::kExperts, result_.experts));
    F8_TRY(add_wholes(database, Op::kMlp, result_.mlps));
    F8_TRY(add_attentions(database));
    for (tuning_db::RunInfo& run : F8_TRY(database.runs())) {
      result_.runs.push_back({source_, std::move(run)});
    }
    methods_.merge(F8_TRY(database.methods()));
    return {};
  }

  Measurements take() {
    for (auto& [key, times] : gemms_) result_.gemms.push_back(std::move(times));
    std::ranges::stable_sort(result_.gemms, {}, [](const GemmTimes& times) {
      const Shape s = times.problem.shape();
      return std::tuple(times.problem.op, s.n, s.k, s.m);
    });
    for (auto& [key, times] : linears_) result_.linears.push_back(std::move(times));
    for (auto& [key, times] : attentions_) result_.attentions.push_back(std::move(times));
    for (auto& [key, campaign] : campaigns_) result_.campaigns.push_back(std::move(campaign));
    for (auto& [key, method] : methods_) result_.methods.push_back(std::move(method));
    return std::move(result_);
  }

 private:
  void count(const TrialRow& row) {
    Campaign& campaign = campaigns_[{source_, row.device_name, row.toolchain, row.method_key}];
    const std::string date = row.at.substr(0, 10);
    if (campaign.states.empty()) {
      campaign = {source_, row.device_name, row.toolchain, row.method_key, date, date, {}};
    }
    campaign.first = std::min(campaign.first, date);
    campaign.last = std::max(campaign.last, date);
    ++campaign.states[std::string(tuning_db::to_string(row.result.state))];
  }

  void add_row(const TrialRow& row, GemmIndex& index) {
    count(row);
    const auto device = device_of(result_.table, row.device);
    auto kernel = kernel_of(row);
    if (!device || !kernel) return;
    GemmRows& rows = index[{row.problem.key(), *device}];
    rows.problem = row.problem;
    const bool counts = row.result.state == tuning_db::TrialState::kOk && row.result.timing &&
                        row.fidelity == "final";
    rows.rows.push_back({row.candidate.impl, counts, method_of(row), row.at, *std::move(kernel)});
  }

  // The fastest of each kind, of the toolchain and method measured last.
  static std::optional<GemmTimes> fastest(const GemmRows& rows, size_t device) {
    const GemmRows::Row* newest = nullptr;
    for (const GemmRows::Row& row : rows.rows) {
      if (row.counts && (newest == nullptr || row.at > newest->at)) newest = &row;
    }
    if (newest == nullptr) return std::nullopt;
    GemmTimes times{
        .problem = rows.problem, .device = device, .generated = {}, .library = {}, .bf16 = {}};
    for (const GemmRows::Row& row : rows.rows) {
      if (!row.counts || row.method != newest->method) continue;
      std::optional<Kernel>& best = row.impl == Impl::kGenerated  ? times.generated
                                    : row.impl == Impl::kCublasLt ? times.library
                                                                  : times.bf16;
      if (!best || row.kernel.ns < best->ns) best = row.kernel;
    }
    return times;
  }

  // The time of the kernel that a linear took for a GEMM, measured as the linear was.
  static std::optional<double> gemm_ns(const TrialRow& linear, Gemm gemm, size_t device,
                                       const GemmIndex& index) {
    const tuning_db::PartKernel* taken = find_kernel(linear.result.kernels, to_string(gemm));
    if (taken == nullptr) return std::nullopt;
    Problem problem = linear.problem;
    if (const auto recipe = find_recipe(problem.recipe)) {
      const auto made = Problem::make(to_op(gemm), *recipe, problem.shape());
      if (!made) return std::nullopt;
      problem = *made;
    }
    const auto rows = index.find({problem.key(), device});
    if (rows == index.end()) return std::nullopt;
    const std::string name = tuning_db::to_string(*taken);
    const std::string method = method_of(linear);
    // A GEMM that the recipe keeps in bf16 has bf16 rows alone.
    const bool bf16 = linear.candidate.impl == Impl::kBf16 ||
                      std::ranges::none_of(rows->second.rows, [](const GemmRows::Row& row) {
                        return row.impl != Impl::kBf16CublasLt;
                      });
    std::optional<double> ns;
    for (const GemmRows::Row& row : rows->second.rows) {
      if ((row.impl == Impl::kBf16CublasLt) != bf16) continue;
      if (row.kernel.name != name || row.method != method) continue;
      if (!ns || row.kernel.ns < *ns) ns = row.kernel.ns;
    }
    return ns;
  }

  Status add_linears(const Database& database, const GemmIndex& index) {
    for (const std::string& recipe : result_.recipes()) {
      // bf16 rows by shape and device, for the float8 rows.
      std::map<std::tuple<std::string, size_t>, TrialRow> baselines;
      for (TrialRow& row : F8_TRY(database.linears(recipe, Impl::kBf16))) {
        count(row);
        const auto device = device_of(result_.table, row.device);
        if (device) baselines.try_emplace({row.problem.key(), *device}, std::move(row));
      }
      for (const TrialRow& row : F8_TRY(database.linears(recipe))) {
        count(row);
        const auto device = device_of(result_.table, row.device);
        if (!device) continue;
        LinearTimes times{.recipe = recipe,
                          .shape = row.problem.shape(),
                          .device = *device,
                          .fp8 = side_of(row, *device, index),
                          .bf16 = {}};
        const auto baseline = baselines.find({row.problem.key(), *device});
        if (baseline != baselines.end() && method_of(baseline->second) == method_of(row)) {
          times.bf16 = side_of(baseline->second, *device, index);
        }
        const Shape s = times.shape;
        linears_.try_emplace({recipe, s.n, s.k, s.m, *device}, std::move(times));
      }
    }
    return {};
  }

  Status add_wholes(const Database& database, Op op, std::vector<TrialRow>& all) {
    for (const Recipe& recipe : builtin_recipes()) {
      for (TrialRow& row : F8_TRY(database.linears(recipe.name, Impl::kFloat8, op))) {
        count(row);
        const auto same = [&](const TrialRow& known) {
          return known.problem == row.problem && known.device.is_same_class(row.device);
        };
        if (std::ranges::none_of(all, same)) all.push_back(std::move(row));
      }
    }
    return {};
  }

  Status add_attentions(const Database& database) {
    using Part = std::optional<TrialRow> AttentionTimes::*;
    constexpr std::pair<Op, Part> kAttentionParts[] = {
        {Op::kAttention, &AttentionTimes::both},
        {Op::kAttentionForward, &AttentionTimes::forward},
        {Op::kAttentionBackward, &AttentionTimes::backward}};
    for (const std::string_view recipe : kAttentionRecipeNames) {
      for (const auto& [op, part] : kAttentionParts) {
        for (const TrialRow& row : F8_TRY(database.linears(recipe, Impl::kFloat8, op))) {
          count(row);
          const AttentionShape s = attention_shape(row.problem);
          AttentionTimes& times =
              attentions_[{s.head_dim, s.heads_q, s.heads_kv, s.tokens, s.batch, !s.causal,
                           row.device_name, recipe != to_string(kAttentionRecipes.front())}];
          times.shape = s;
          times.recipe = recipe;
          times.device = row.device_name;
          if (times.*part) continue;  // of a database that is asked before
          // Only the rows of a problem have their accuracy.
          for (TrialRow& own : F8_TRY(database.trials(row.problem))) {
            if (own.uuid == row.uuid) times.*part = std::move(own);
          }
        }
      }
    }
    return {};
  }

  static LinearTimes::Side side_of(const TrialRow& row, size_t device, const GemmIndex& index) {
    LinearTimes::Side side{.ns = row.result.timing->median_ns};
    for (const Gemm gemm : kGemms) {
      side.gemm_ns[static_cast<size_t>(gemm)] = gemm_ns(row, gemm, device, index);
    }
    return side;
  }

  Measurements result_;
  std::string source_;  // of the database that is being added
  std::map<std::string, tuning_db::Method> methods_;
  std::map<std::pair<std::string, size_t>, GemmTimes> gemms_;
  std::map<std::tuple<std::string, int64_t, int64_t, int64_t, size_t>, LinearTimes> linears_;
  std::map<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, bool, std::string, bool>,
           AttentionTimes>
      attentions_;
  std::map<std::tuple<std::string, std::string, std::string, std::string>, Campaign> campaigns_;
};

}  // namespace

std::string config_of(const Kernel& kernel) {
  return kernel.name.substr(kernel.name.find(':') + 1);
}

std::vector<std::string> name_cells(const Problem& gemm) {
  const Shape s = gemm.shape();
  return {std::string(to_string(gemm.op)), f8::format("{}", s.n), f8::format("{}", s.k),
          f8::format("{}", s.m)};
}

std::optional<double> LinearTimes::Side::rest_ns() const {
  double rest = ns;
  for (const std::optional<double>& gemm : gemm_ns) {
    if (!gemm) return std::nullopt;
    rest -= *gemm;
  }
  return rest;
}

std::vector<std::string> Measurements::recipes() const {
  std::set<std::string> measured;
  for (const LinearSpeedup& row : table.speedups()) measured.insert(row.recipe);
  // The built-in recipes in their order, then the user's.
  std::vector<std::string> names;
  for (const Recipe& recipe : builtin_recipes()) {
    if (measured.erase(recipe.name) > 0) names.push_back(recipe.name);
  }
  names.insert(names.end(), measured.begin(), measured.end());
  return names;
}

std::string Measurements::device_label(size_t device) const {
  const DeviceClass& it = table.devices.at(device);
  const bool shared = std::ranges::count(table.devices, it.name, &DeviceClass::name) > 1;
  return shared ? f8::format("{}, {} W{}", it.name, it.power_limit_w, it.mig ? ", MIG" : "")
                : it.name;
}

Result<Measurements> collect(std::span<const NamedDatabase> databases, TuningTable table) {
  Collector collector(std::move(table));
  for (const NamedDatabase& database : databases) F8_TRY(collector.add(database));
  return collector.take();
}

}  // namespace f8::report
