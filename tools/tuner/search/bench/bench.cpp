#include "tools/tuner/search/bench/bench.hpp"

#include <algorithm>

namespace f8::tuner {
namespace {

constexpr int kShareRounds = 15;
constexpr size_t kFinalists = 3;  // of each kind

}  // namespace

std::optional<PairedRatio> ratio_in_blocks(const CandidateOutcome& candidate,
                                           const CandidateOutcome& reference, uint64_t seed) {
  if (reference.blocks.empty() || candidate.blocks.size() != reference.blocks.size()) {
    return std::nullopt;
  }
  return paired_ratio(candidate.blocks, reference.blocks, seed);
}

bool BenchRow::is(std::string_view role) const {
  return std::ranges::find(roles, role) != roles.end();
}

const BenchRow* MatmulBench::row(std::string_view role) const {
  const auto found = std::ranges::find_if(rows, [&](const BenchRow& row) { return row.is(role); });
  return found == rows.end() ? nullptr : &*found;
}

std::vector<size_t> Bench::Screened::ranked(Impl impl) const {
  std::vector<size_t> order;
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (candidates[i].impl == impl && outcomes[i].result.is_timed()) order.push_back(i);
  }
  std::ranges::stable_sort(order, {},
                           [&](size_t i) { return outcomes[i].result.timing->median_ns; });
  return order;
}

void Bench::Screened::add_failed(std::vector<BenchRow>& rows) const {
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (outcomes[i].result.is_timed()) continue;
    rows.push_back(
        {.candidate = candidates[i], .roles = {}, .result = outcomes[i].result, .to_baseline = {}});
  }
}

Result<std::vector<Candidate>> Bench::generated(const Problem& gemm,
                                                const std::optional<GemmConfig>& config,
                                                const Epilogue& epilogue) {
  std::vector<codegen::GemmSpec> specs;
  if (config) {
    codegen::GemmSpec spec = F8_TRY(gemm_spec(gemm, epilogue));
    spec.config = *config;
    F8_TRY(codegen::validate(spec));
    specs.push_back(spec);
  } else {
    for (const Generated& candidate :
         F8_TRY(generated_candidates(gemm, backend_.device(), options_.keep, {}, epilogue))) {
      if (candidate.pruned.empty()) specs.push_back(candidate.spec);
    }
  }
  for (const codegen::GemmSpec& spec : specs) compiler_.want(spec);
  std::vector<Candidate> candidates;
  for (const codegen::GemmSpec& spec : specs) {
    // A kernel that does not compile says so again when it is added.
    (void)compiler_.wait(spec);
    candidates.push_back(
        {.impl = Impl::kGenerated, .config = key(spec.config), .epilogue = epilogue});
  }
  return candidates;
}

// The candidates that are cuBLASLt's suggestions. Where it has none, `why_none` says why.
Result<std::vector<Candidate>> Bench::library(const Problem& gemm, Library which,
                                              std::string& why_none) {
  std::vector<Candidate> candidates;
  const bool bf16 = which == Library::kBf16;
  const bool one_scale = which == Library::kOneScale;
  const auto found = backend_.suggestions(one_scale ? with_one_scale(gemm) : gemm, bf16);
  if (!found) {
    if (bf16 || found.error().code == ErrorCode::kCuda) return std::unexpected(found.error());
    why_none = found.error().message;
    return candidates;
  }
  if (found->count == 0) why_none = "cuBLASLt has no kernel for these types and scales";
  for (int i = 0; i < std::min(options_.heuristics, found->count); ++i) {
    candidates.push_back({.impl = bf16        ? Impl::kBf16CublasLt
                                  : one_scale ? Impl::kCublasLtTensorwise
                                              : Impl::kCublasLt,
                          .config = f8::format("h{}", i)});
  }
  return candidates;
}

Result<Bench::Screened> Bench::screen(const Problem& gemm, std::vector<Candidate> candidates,
                                      const char* what) {
  Screened screened{.candidates = std::move(candidates), .outcomes = {}};
  if (screened.candidates.empty()) return screened;
  progress_(
      f8::format("screening {} {} kernels for {}", screened.candidates.size(), what, gemm.key()));
  screened.outcomes = F8_TRY(
      measurer_.run(group_of_shares(gemm, screened.candidates, Screening{.drop_above = 1.15}, 1)));
  return screened;
}

InterleavedGroup Bench::group_of_shares(const Problem& problem, std::vector<Candidate> candidates,
                                        const Purpose& purpose, int min_blocks) const {
  const double all_s = options_.screen_ms / 1e3 * static_cast<double>(candidates.size());
  return {.problem = problem,
          .candidates = std::move(candidates),
          .purpose = purpose,
          .batch_us = 200,
          .stop = {.target = kAnyWidth, .min_s = all_s, .max_s = all_s, .min_blocks = min_blocks},
          .warm_s = options_.warm_s,
          .seed = options_.seed,
          .conditions = options_.conditions};
}

InterleavedGroup Bench::final_group(const Problem& problem, double max_s) const {
  return {.problem = problem,
          .candidates = {},
          .purpose = {},
          .batch_us = 400,
          .stop = {.target = options_.max_ci,
                   .min_s = options_.final_s / 4,
                   .max_s = max_s,
                   .min_blocks = 8},
          .warm_s = options_.warm_s,
          .seed = options_.seed,
          .conditions = options_.conditions};
}

Result<Bench::Screened> Bench::screen_fp8(const Problem& gemm) {
  std::string none;
  std::vector<Candidate> candidates = F8_TRY(generated(gemm, std::nullopt));
  const std::vector<Candidate> more = F8_TRY(library(gemm, Library::kItsScales, none));
  candidates.insert(candidates.end(), more.begin(), more.end());
  return screen(gemm, std::move(candidates), "fp8");
}

Result<Bench::Screened> Bench::screen_bf16(const Problem& gemm) {
  const std::string identity = gemm_identity(gemm, true);
  if (const auto known = bf16_.find(identity); known != bf16_.end()) return known->second;
  std::string none;
  std::vector<Candidate> candidates = F8_TRY(library(gemm, Library::kBf16, none));
  const Screened screened = F8_TRY(screen(gemm, std::move(candidates), "bf16"));
  return bf16_[identity] = screened;
}

std::optional<size_t> fastest_row(std::span<const BenchRow> rows, std::initializer_list<Impl> impls,
                                  const Epilogue& epilogue) {
  const bool paired =
      std::ranges::any_of(rows, [](const BenchRow& row) { return row.result.ratio.has_value(); });
  const auto speed = [&](size_t i) {
    const tuning_db::TrialResult& result = rows[i].result;
    if (!paired) return 1 / result.timing->median_ns;
    return result.ratio ? result.ratio->ratio : 1;  // the reference itself
  };
  std::optional<size_t> best;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (std::ranges::find(impls, rows[i].candidate.impl) == impls.end()) continue;
    if (rows[i].candidate.epilogue != epilogue) continue;
    if (!rows[i].result.is_timed()) continue;
    if (!best || speed(i) > speed(*best)) best = i;
  }
  return best;
}

Result<MatmulBench> Bench::matmul(const Problem& problem, const std::optional<GemmConfig>& config) {
  MatmulBench bench{.problem = problem, .rows = {}, .failed = {}, .no_baseline = {}};
  std::vector<Candidate> candidates = F8_TRY(generated(problem, config));
  const bool by_axis = F8_TRY(gemm_desc(problem, false)).scale == codegen::ScaleMode::kAxis;
  for (const Library which : {Library::kItsScales, Library::kOneScale}) {
    if (which == Library::kOneScale && !by_axis) continue;
    const std::vector<Candidate> more = F8_TRY(library(problem, which, bench.no_baseline));
    candidates.insert(candidates.end(), more.begin(), more.end());
  }
  const Screened fp8 = F8_TRY(screen(problem, std::move(candidates), "fp8"));
  const Screened bf16 = F8_TRY(screen_bf16(problem));

  // The fastest of each kind go to the comparison, which decides between them too.
  const auto add = [&](const Screened& screened, size_t index, const char* role) {
    const Candidate& candidate = screened.candidates[index];
    const auto known = std::ranges::find(bench.rows, candidate, &BenchRow::candidate);
    BenchRow& row = known == bench.rows.end() ? bench.rows.emplace_back() : *known;
    row.candidate = candidate;
    if (*role != '\0') row.roles.emplace_back(role);
  };
  for (const Screened* screened : {&fp8, &bf16}) {
    bench.screened += static_cast<int>(screened->candidates.size());
    screened->add_failed(bench.failed);
    for (const Impl impl : {Impl::kGenerated, Impl::kCublasLt, Impl::kCublasLtTensorwise}) {
      const std::vector<size_t> ranked = screened->ranked(impl);
      for (size_t i = 0; i < std::min(kFinalists, ranked.size()); ++i) {
        add(*screened, ranked[i], "");
      }
    }
  }
  for (const size_t i : fp8.ranked(Impl::kCublasLt)) {
    if (fp8.candidates[i].config == "h0") add(fp8, i, "cublaslt first");
  }
  if (const auto ranked = bf16.ranked(Impl::kBf16CublasLt); !ranked.empty()) {
    add(bf16, ranked.front(), "cublaslt bf16");
  }
  if (bench.rows.empty()) return bench;

  const std::vector<CandidateOutcome> outcomes = F8_TRY(compare(problem, bench.rows));
  name_best(bench, by_axis, outcomes);
  return bench;
}

// Names the fastest row of each kind, and forms the ratios to the baseline.
void Bench::name_best(MatmulBench& bench, bool by_axis,
                      const std::vector<CandidateOutcome>& outcomes) const {
  const auto name = [&](std::optional<size_t> row, const char* role) {
    if (row) bench.rows[*row].roles.insert(bench.rows[*row].roles.begin(), role);
  };
  const std::optional<size_t> baseline =
      fastest_row(bench.rows, {Impl::kCublasLt, Impl::kCublasLtTensorwise});
  if (by_axis) {
    name(baseline, "baseline");
    name(fastest_row(bench.rows, {Impl::kCublasLtTensorwise}), "cublaslt tensorwise best");
  }
  name(fastest_row(bench.rows, {Impl::kCublasLt}), "cublaslt best");
  name(fastest_row(bench.rows, {Impl::kGenerated}), "generated");
  if (!baseline) {
    if (bench.no_baseline.empty()) {
      bench.no_baseline = "none of cuBLASLt's kernels could be measured";
    }
    return;
  }
  bench.no_baseline.clear();
  for (size_t i = 0; i < outcomes.size(); ++i) {
    bench.rows[i].to_baseline = ratio_in_blocks(outcomes[i], outcomes[*baseline], options_.seed);
  }
}

Result<std::vector<CandidateOutcome>> Bench::compare(const Problem& gemm,
                                                     std::vector<BenchRow>& rows) {
  InterleavedGroup group = final_group(gemm, options_.final_s);
  for (const BenchRow& row : rows) group.candidates.push_back(row.candidate);
  if (rows.size() > 1) group.purpose = Ratios{.reference = 0};
  progress_(f8::format("comparing {} kernels for {}", rows.size(), gemm.key()));
  std::vector<CandidateOutcome> outcomes = F8_TRY(measurer_.run(group));
  for (size_t i = 0; i < outcomes.size(); ++i) rows[i].result = outcomes[i].result;
  return outcomes;
}

Result<EpilogueBench> Bench::epilogues(const Problem& problem,
                                       std::span<const Epilogue> epilogues) {
  EpilogueBench bench{.problem = problem, .rows = {}, .failed = {}, .costs = {}};
  std::vector<Epilogue> all = {Epilogue{}};
  for (const Epilogue& epilogue : epilogues) {
    if (std::ranges::find(all, epilogue) == all.end()) all.push_back(epilogue);
  }
  for (const Epilogue& epilogue : all) {
    const std::vector<Candidate> candidates = F8_TRY(generated(problem, std::nullopt, epilogue));
    const Screened screened = F8_TRY(screen(problem, candidates, to_string(epilogue).c_str()));
    screened.add_failed(bench.failed);
    const std::vector<size_t> ranked = screened.ranked(Impl::kGenerated);
    for (size_t i = 0; i < std::min(kFinalists, ranked.size()); ++i) {
      bench.rows.emplace_back().candidate = screened.candidates[ranked[i]];
    }
  }
  if (bench.rows.empty()) return bench;
  const std::vector<CandidateOutcome> outcomes = F8_TRY(compare(problem, bench.rows));
  const std::optional<size_t> plain = fastest_row(bench.rows, {Impl::kGenerated});
  for (const Epilogue& epilogue : all) {
    const auto row = fastest_row(bench.rows, {Impl::kGenerated}, epilogue);
    if (!row) continue;
    bench.rows[*row].roles.push_back(to_string(epilogue));
    EpilogueCost cost{.epilogue = epilogue, .row = *row, .over_plain = {}};
    if (plain) cost.over_plain = ratio_in_blocks(outcomes[*plain], outcomes[*row], options_.seed);
    bench.costs.push_back(cost);
  }
  return bench;
}

Result<SuggestionBench> Bench::suggestions(const Problem& problem) {
  const runtime::GemmDesc desc = F8_TRY(gemm_desc(problem, true));
  const auto found = F8_TRY(runtime::cublaslt_suggestions(*backend_.context(), desc));
  if (found.all.empty()) {
    return fail(ErrorCode::kUnsupported, "{}: cuBLASLt suggests no kernel", problem.key());
  }
  SuggestionBench bench{.problem = problem,
                        .suggestions = found.all,
                        .results = {},
                        .ranked_first = static_cast<size_t>(found.unmeasured)};
  std::vector<Candidate> candidates;
  for (size_t i = 0; i < found.all.size(); ++i) {
    candidates.push_back({.impl = Impl::kBf16CublasLt, .config = f8::format("h{}", i)});
  }
  progress_(f8::format("timing {} suggestions for {}", candidates.size(), problem.key()));
  const auto outcomes =
      F8_TRY(measurer_.run(group_of_shares(problem, std::move(candidates), Times{}, 3)));
  for (const CandidateOutcome& outcome : outcomes) bench.results.push_back(outcome.result);
  return bench;
}

// Times each launch by itself, all of them in turn. Their sum differs from the linear's time by
// what neighbours hide of each other.
Result<std::vector<KernelShare>> Bench::shares(int candidate) {
  const std::vector<GpuBackend::Part> parts = F8_TRY(backend_.add_steps(candidate));
  std::vector<int> order;
  for (const GpuBackend::Part& part : parts) {
    const double ns = F8_TRY(backend_.estimate_ns(part.id));
    F8_TRY(backend_.set_batch(part.id, std::max(1, static_cast<int>(200e3 / std::max(ns, 500.0)))));
    order.push_back(part.id);
  }
  std::vector<std::vector<double>> times(parts.size());
  for (int round = 0; round < kShareRounds; ++round) {
    const std::vector<double> round_times = F8_TRY(backend_.time(order));
    for (size_t i = 0; i < times.size(); ++i) times[i].push_back(round_times[i]);
  }
  std::vector<KernelShare> result;
  for (size_t i = 0; i < parts.size(); ++i) {
    result.push_back({.name = parts[i].name,
                      .ns = median(times[i]),
                      .bytes = parts[i].bytes,
                      .products = parts[i].products});
  }
  return result;
}

Result<double> Bench::copy_gb_per_s() {
  const int copy = F8_TRY(backend_.add_copy()).id;
  F8_TRY(backend_.estimate_ns(copy));
  F8_TRY(backend_.set_batch(copy, 2));
  std::vector<double> times;
  for (int round = 0; round < kShareRounds; ++round) {
    times.push_back(F8_TRY(backend_.time(std::array{copy})).front());
  }
  return backend_.copy_traffic() / median(times);
}

// The kernels of one GEMM that the search for the best linear looks at.
Result<KernelShortlist> Bench::shortlist(const Problem& gemm, bool is_fp8) {
  // A GEMM that the recipe keeps in bf16 takes part in the search too.
  const Screened screened = is_fp8 ? F8_TRY(screen_fp8(gemm)) : F8_TRY(screen_bf16(gemm));
  KernelShortlist shortlist;
  std::string reason;
  for (size_t i = 0; i < screened.candidates.size(); ++i) {
    const tuning_db::TrialResult& result = screened.outcomes[i].result;
    if (result.is_timed()) {
      const runtime::GemmChoice choice = F8_TRY(to_choice(screened.candidates[i]));
      shortlist.timed.push_back({.choice = choice, .ns = result.timing->median_ns});
    } else if (reason.empty()) {
      reason = result.reason;
    }
  }
  if (shortlist.timed.empty()) {
    return fail(ErrorCode::kUnsupported, "{}: no kernel works; the first says: {}", gemm.key(),
                reason.empty() ? "there are no candidates" : reason);
  }
  std::ranges::stable_sort(shortlist.timed, {}, &TimedKernel::ns);
  const auto table = backend_.context()->table();
  const Suggested bf16 = is_fp8 ? Suggested{} : F8_TRY(backend_.suggestions(gemm, true));
  shortlist.prior = F8_TRY(
      prior_choices(gemm, backend_.device(), table ? *table : TuningTable{}, bf16.unmeasured));
  return shortlist;
}

// The kernels of a plan, from the context's table or the cost model.
Result<LinearChoices> Bench::planned_choices(const Problem& problem) {
  LinearChoices choices;
  if (is_grouped(problem.op)) {
    const runtime::ExpertsDesc desc = F8_TRY(experts_desc(problem));
    const auto plan = F8_TRY(runtime::Experts::plan(backend_.context(), desc));
    for (const Gemm g : kGemms) choices[static_cast<size_t>(g)].config = plan->config(g);
    return choices;
  }
  const Recipe recipe = F8_TRY(find_recipe(problem.recipe));
  const auto plan = F8_TRY(runtime::Linear::plan(
      backend_.context(), {.shape = problem.shape(), .recipe = recipe, .choices = {}}));
  for (const Gemm g : kGemms) choices[static_cast<size_t>(g)] = plan->choice(g);
  return choices;
}

// Looks for the kernels of the fastest linear.
Status Bench::search_kernels(LinearBench& bench) {
  const Problem& problem = bench.problem;
  const Recipe recipe = F8_TRY(find_recipe(problem.recipe));
  KernelShortlists shortlists;
  for (const Gemm g : kGemms) {
    const Problem gemm = F8_TRY(Problem::make(problem.sibling(to_op(g)), recipe, problem.dims));
    shortlists[static_cast<size_t>(g)] =
        F8_TRY(shortlist(gemm, is_grouped(gemm.op) || recipe.at(g).is_fp8()));
  }
  progress_(f8::format("timing linears of the best kernels for {}", problem.key()));
  const LinearSearch search =
      F8_TRY(search_linear(final_group(problem, 2 * options_.final_s), shortlists, options_.linears,
                           results_of(), linear_impl()));
  bench.choices = search.choices;
  bench.linears = search.timed;
  bench.over_first = search.over_first;
  return {};
}

MeasureGroup Bench::results_of() {
  return [this](const InterleavedGroup& group) -> Result<std::vector<tuning_db::TrialResult>> {
    std::vector<tuning_db::TrialResult> results;
    for (CandidateOutcome& outcome : F8_TRY(measurer_.run(group))) {
      results.push_back(std::move(outcome.result));
    }
    return results;
  };
}

// The kernels of the linear in bf16.
Result<LinearChoices> Bench::baseline_of(const Problem& problem) {
  if (is_grouped(problem.op)) {
    const auto table = backend_.context()->table();
    const ExpertBaseline baseline =
        F8_TRY(expert_baseline(problem, backend_.device(), table ? *table : TuningTable{}));
    for (const codegen::KernelSpec& spec : baseline.specs) compiler_.want(spec);
    for (const codegen::KernelSpec& spec : baseline.specs) (void)compiler_.wait(spec);
    progress_(f8::format("looking for the bf16 baseline of {}", problem.key()));
    return search_expert_baseline(baseline, final_group(problem, 2 * options_.final_s),
                                  options_.linears, results_of());
  }
  const Recipe recipe = F8_TRY(find_recipe(problem.recipe));
  LinearChoices choices;
  for (const Gemm g : kGemms) {
    runtime::GemmChoice& choice = choices[static_cast<size_t>(g)];
    choice.provider = Provider::kCublasLt;
    const Problem gemm = F8_TRY(Problem::make(to_op(g), recipe, problem.shape()));
    const Screened bf16 = F8_TRY(screen_bf16(gemm));
    if (const auto ranked = bf16.ranked(Impl::kBf16CublasLt); !ranked.empty()) {
      choice = F8_TRY(to_choice(bf16.candidates[ranked.front()]));
    }
  }
  return choices;
}

Result<LinearBench> Bench::linear(const Problem& problem, bool tune, bool with_copy) {
  LinearBench bench{.problem = problem};
  bench.bf16_choices = F8_TRY(baseline_of(problem));
  bench.untuned_choices = bench.choices = F8_TRY(planned_choices(problem));
  if (tune) F8_TRY(search_kernels(bench));
  progress_(f8::format("timing {} against bf16", problem.key()));
  InterleavedGroup group = final_group(problem, 2 * options_.final_s);
  group.candidates = {{.impl = linear_impl(), .config = choices_text(bench.choices)},
                      {.impl = Impl::kBf16, .config = choices_text(bench.bf16_choices)}};
  const std::string untuned = choices_text(bench.untuned_choices);
  if (untuned != group.candidates.front().config) {
    group.candidates.push_back({.impl = linear_impl(), .config = untuned});
  }
  group.purpose = Ratios{.reference = 1};
  std::vector<CandidateOutcome> outcomes = F8_TRY(measurer_.run(group));
  if (tune) {
    bench.untuned =
        ratio_in_blocks(outcomes.front(), outcomes[outcomes.size() > 2 ? 2 : 0], options_.seed);
  }
  bench.float8 = std::move(outcomes[0].result);
  bench.bf16 = std::move(outcomes[1].result);
  if (!bench.float8.is_timed()) {
    return fail(ErrorCode::kInternal, "{}: {}: {}", problem.key(),
                tuning_db::to_string(bench.float8.state), bench.float8.reason);
  }
  progress_(f8::format("timing the kernels of {} one by one", problem.key()));
  bench.kernels = F8_TRY(shares(0));
  if (with_copy) bench.copy_gb_per_s = F8_TRY(copy_gb_per_s());
  return bench;
}

}  // namespace f8::tuner
