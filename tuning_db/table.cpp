// The tuning table of a database: for each GEMM the kernel that counts, for each linear its
// measured speedup with where it comes from.
#include <algorithm>
#include <map>

#include "base/file.hpp"
#include "base/text.hpp"
#include "recipes/mlp.hpp"
#include "tuning_db/state.hpp"
#include "tuning_db/trial_rows.hpp"

namespace f8::tuning_db {
namespace {

constexpr size_t kMaxDevices = 1000;
constexpr size_t kMaxRecipes = 100;
constexpr size_t kMaxRows = 20'000;  // of linears, and of kernels

std::unexpected<Error> too_many(const std::string& layer, size_t most, std::string_view what) {
  return fail(
      ErrorCode::kUnsupported,
      "{}: more than {} {}, which is the most that a table is made of; keep them in several "
      "databases",
      layer, most, what);
}

DeviceClass table_device(DeviceClass device) {
  device.name = printable(device.name);
  return device;
}

// The label of a database without its folder: folders of one machine say nothing to others.
std::string source_of(const std::string& layer) {
  const std::string name = printable(fs::path(layer).filename().string());
  return name.empty() ? "database" : name;
}

// --- linears

// The bf16 linears of a recipe.
class Baselines {
 public:
  explicit Baselines(const std::vector<TrialRow>& rows) {
    for (const TrialRow& row : rows) {
      by_uuid_[row.uuid] = &row;
      by_run_[{row.problem.key(), row.run_uuid}] = &row;
    }
  }
  // The one that this row was measured against, else one of its run; null if there is none.
  [[nodiscard]] const TrialRow* find(const TrialRow& row) const {
    if (row.result.ratio) {
      const auto paired = by_uuid_.find(row.result.ratio->pair_uuid);
      if (paired != by_uuid_.end() && paired->second->problem == row.problem) return paired->second;
    }
    const auto same_run = by_run_.find({row.problem.key(), row.run_uuid});
    return same_run == by_run_.end() ? nullptr : same_run->second;
  }

 private:
  std::map<std::string_view, const TrialRow*> by_uuid_;
  std::map<std::pair<std::string, std::string>, const TrialRow*> by_run_;
};

std::optional<LinearSpeedup> to_speedup(const TrialRow& row, const Baselines& baselines) {
  if (!row.result.timing) return std::nullopt;
  const Timing& fp8 = *row.result.timing;
  const TrialRow* baseline = baselines.find(row);
  LinearSpeedup s{.recipe = row.problem.recipe,
                  .shape = row.problem.shape(),
                  .date = row.at.substr(0, 10),
                  .trial = row.uuid,
                  .groups = row.problem.groups()};
  if (row.problem.op == Op::kMlp) s.gate = mlp_shape(row.problem.dims).gate;
  if (row.result.ratio) {
    s.speedup = row.result.ratio->ratio;
    s.lo = row.result.ratio->lo;
    s.hi = row.result.ratio->hi;
    s.bf16_ns =
        baseline != nullptr ? baseline->result.timing->median_ns : s.speedup * fp8.median_ns;
    return s;
  }
  // The row was not measured interleaved: the intervals of both times give a wider one.
  if (baseline == nullptr) return std::nullopt;
  const Timing& b = *baseline->result.timing;
  s.speedup = b.median_ns / fp8.median_ns;
  s.lo = b.ci_lo_ns / fp8.ci_hi_ns;
  s.hi = b.ci_hi_ns / fp8.ci_lo_ns;
  s.bf16_ns = b.median_ns;
  return s;
}

// A linear of the table to be, and what made its kernels.
struct FoundLinear {
  LinearSpeedup speedup;
  ToolchainVersions toolchain;
};

// Versions as words, as the text of a table has them.
ToolchainVersions table_versions(ToolchainVersions versions) {
  for (std::string* version : {&versions.nvrtc, &versions.cublaslt}) {
    *version = printable(*version);
    std::ranges::replace(*version, ' ', '_');
  }
  return versions;
}

// Orders two rows of one shape and class: one without a bias comes first, then the newer one.
bool is_better(const TrialRow& a, const TrialRow& b) {
  if (a.problem.bias != b.problem.bias) return !a.problem.bias;
  if (a.at != b.at) return a.at > b.at;
  return a.uuid < b.uuid;
}

Status find_linears(const Database& db, const std::string& recipe, Op op, const TuningTable& table,
                    std::vector<FoundLinear>& found) {
  const std::vector<TrialRow> rows = F8_TRY(db.linears(recipe, Impl::kFloat8, op));
  const std::vector<TrialRow> bf16 = F8_TRY(db.linears(recipe, Impl::kBf16, op));
  if (found.size() + rows.size() > kMaxRows) {
    return too_many(rows.front().layer, kMaxRows, "linears");
  }
  const Baselines baselines(bf16);
  std::map<std::pair<Dims, size_t>, std::pair<const TrialRow*, LinearSpeedup>> best;
  for (const TrialRow& row : rows) {
    auto speedup = to_speedup(row, baselines);
    const auto device = std::ranges::find_if(table.devices, [&](const DeviceClass& d) {
      return d.is_same_class(table_device(row.device));
    });
    if (!speedup || device == table.devices.end()) continue;
    speedup->device = static_cast<size_t>(device - table.devices.begin());
    auto& [known, value] = best[{row.problem.dims, speedup->device}];
    if (known != nullptr && !is_better(row, *known)) continue;
    known = &row;
    value = *std::move(speedup);
  }
  for (auto& [key, row] : best) {
    found.push_back({std::move(row.second), table_versions(row.first->versions)});
  }
  return {};
}

// Adds them, with a source for each toolchain.
void add_linears(std::vector<FoundLinear> found, const std::string& source, TuningTable& table) {
  std::vector<ToolchainVersions> toolchains;
  for (const FoundLinear& linear : found) toolchains.push_back(linear.toolchain);
  std::ranges::sort(toolchains);
  toolchains.erase(std::unique(toolchains.begin(), toolchains.end()), toolchains.end());
  for (const ToolchainVersions& toolchain : toolchains)
    table.sources.push_back({source, toolchain});
  for (FoundLinear& linear : found) {
    const auto at = std::ranges::find(toolchains, linear.toolchain);
    linear.speedup.source = static_cast<size_t>(at - toolchains.begin());
    table.add(std::move(linear.speedup));
  }
}

// --- kernels

// A candidate as the kernel of its GEMM.
Result<PartKernel> table_kernel(const TrialRow& row) {
  const Candidate& c = row.candidate;
  const bool generated = c.impl == Impl::kGenerated;
  if (const auto config = c.kernel_config()) {
    const Provider provider = generated ? Provider::kGenerated : Provider::kCublasLt;
    auto kernel = parse_part_kernel(to_string(to_gemm(row.problem.op)),
                                    f8::format("{}:{}", to_string(provider), *config));
    if (kernel) return kernel;
  }
  return fail(
      ErrorCode::kCorrupt,
      "{}: candidate {} has the configuration {}, expected {}; restore a copy, or measure into "
      "a new file",
      row.layer, to_string(c.impl), quote(c.config),
      generated ? R"({"config":"..."})" : R"({"heuristic":N})");
}

// The fastest operations of several kernels that name them, by recipe, dims and the part that is asked
// about.
using FastestWholes =
    std::map<std::tuple<std::string, Dims, std::string_view>, const IdentifiedRow*>;
using RowIterator = std::vector<IdentifiedRow>::const_iterator;

// [first, last): the rows of one GEMM, fastest first. The fastest of all implementations counts
// (the library takes part in every sweep), unless the fastest linear took another.
Result<KernelChoice> choose_kernel(RowIterator first, RowIterator last,
                                   const FastestWholes& wholes) {
  const Problem& problem = first->row.problem;
  KernelChoice choice{
      .problem = problem, .kernel = {}, .median_ns = first->row.result.timing->median_ns};
  PartKernel kernel = F8_TRY(table_kernel(first->row));
  const std::string_view part = to_string(to_gemm(problem.op));
  const auto whole = wholes.find({problem.recipe, problem.dims, part});
  if (whole != wholes.end() && whole->second->is_comparable(*first)) {
    kernel = *find_kernel(whole->second->row.result.kernels, part);
    for (auto own = first; own != last; ++own) {
      if (F8_TRY(table_kernel(own->row)) != kernel) continue;
      choice.median_ns = own->row.result.timing->median_ns;
      break;
    }
  }
  auto parsed = parse_gemm_kernel(kernel.provider, kernel.config);
  if (!parsed) {
    return fail(ErrorCode::kCorrupt, "{}: {}; restore a copy, or measure into a new file",
                first->row.layer, parsed.error().message);
  }
  choice.kernel = *parsed;
  return choice;
}

Status add_kernels(const std::vector<IdentifiedRow>& rows, TuningTable& table) {
  FastestWholes wholes;
  for (auto row = rows.begin(); row != rows.end();) {
    const Problem& problem = row->row.problem;
    const auto end = std::find_if(
        row, rows.end(), [&](const IdentifiedRow& other) { return other.problem != row->problem; });
    if (is_gemm(problem.op)) {
      if (table.choices().size() == kMaxRows) {
        return too_many(row->row.layer, kMaxRows, "kernels");
      }
      table.add(F8_TRY(choose_kernel(row, end, wholes)));
    } else if (row->row.candidate.impl == Impl::kFloat8) {
      for (const PartKernel& kernel : row->row.result.kernels) {
        wholes[{problem.recipe, problem.dims, kernel.part}] = &*row;
      }
    }
    row = end;
  }
  return {};
}

}  // namespace

Result<TuningTable> Database::table(TablePart part, const DeviceClass* asked) const {
  if (asked != nullptr && state_->made_table != nullptr) {
    if (const auto made = state_->made_table(*asked)) {
      return part == TablePart::kAll ? *made : made->linears([](const auto&) { return true; });
    }
  }
  TuningTable table;
  const std::vector<DeviceClass> known = F8_TRY(devices(asked));
  if (known.empty()) return table;
  for (const DeviceClass& d : known) {
    const DeviceClass device = table_device(d);
    if (table.devices.size() == kMaxDevices) {
      return too_many(state_->layer, kMaxDevices, "device classes");
    }
    const auto same = [&](const DeviceClass& other) { return other.is_same_class(device); };
    if (std::ranges::none_of(table.devices, same)) table.devices.push_back(device);
  }
  std::vector<FoundLinear> linears;
  for (const Op op : {Op::kLinear, Op::kExperts, Op::kMlp}) {
    auto recipes = F8_TRY(state_->db->prepare("SELECT DISTINCT recipe FROM problem WHERE op = ?"));
    recipes.bind(to_string(op));
    for (size_t count = 0; F8_TRY(recipes.step()); ++count) {
      if (count == kMaxRecipes) return too_many(state_->layer, kMaxRecipes, "recipes");
      F8_TRY(find_linears(*this, recipes.text(0), op, table, linears));
    }
  }
  add_linears(std::move(linears), source_of(state_->layer), table);
  if (part == TablePart::kLinears) return table;

  // A GEMM that its recipe keeps in bf16 has cuBLASLt's bf16 rows for candidates, unless it is grouped:
  // then they are of a call for each group. Whole operations
  // come before the GEMMs that ask what they took.
  for (const DeviceClass& device : known) {
    auto s = F8_TRY(state_->db->prepare(
        select_rows() +
        "WHERE d.key = ? AND (c.impl IN ('generated', 'cublaslt', 'float8') OR "
        "(c.impl = 'bf16_cublaslt' AND p.key GLOB '*/bf16.*' AND p.op NOT GLOB 'grouped_*')) AND "
        "t.state = 'ok' "
        "AND m.fidelity = 'final' ORDER BY c.impl = 'float8' DESC, p.key, t.median_ns, t.uuid"));
    s.bind(key(device));
    std::vector<IdentifiedRow> rows;
    while (F8_TRY(s.step())) rows.push_back(F8_TRY(read_row(s, state_->layer)));
    TuningTable own;
    F8_TRY(add_kernels(newest(std::move(rows)), own));
    table.add_behind(own);
  }
  if (table.choices().size() > kMaxRows) return too_many(state_->layer, kMaxRows, "kernels");
  return table;
}

}  // namespace f8::tuning_db
