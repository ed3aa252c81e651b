#include "tools/tuner/search/bench.hpp"

#include <algorithm>

namespace f8::tuner {
namespace {

constexpr int kShareRounds = 15;
constexpr size_t kFinalists = 3;  // of each kind

// The reference's time over the subject's, where both were timed in all blocks.
std::optional<PairedRatio> ratio_in_blocks(const SubjectOutcome& subject,
                                           const SubjectOutcome& reference, uint64_t seed) {
  if (reference.blocks.empty() || subject.blocks.size() != reference.blocks.size()) {
    return std::nullopt;
  }
  return paired_ratio(subject.blocks, reference.blocks, seed);
}

}  // namespace

bool BenchRow::is(std::string_view role) const {
  return std::ranges::find(roles, role) != roles.end();
}

const BenchRow* MatmulBench::row(std::string_view role) const {
  const auto found = std::ranges::find_if(rows, [&](const BenchRow& row) { return row.is(role); });
  return found == rows.end() ? nullptr : &*found;
}

std::vector<size_t> Bench::Screened::ranked(std::string_view impl) const {
  std::vector<size_t> order;
  for (size_t i = 0; i < subjects.size(); ++i) {
    if (subjects[i].impl == impl && outcomes[i].result.is_timed()) order.push_back(i);
  }
  std::ranges::stable_sort(order, {},
                           [&](size_t i) { return outcomes[i].result.timing->median_ns; });
  return order;
}

void Bench::Screened::add_failed(std::vector<BenchRow>& rows) const {
  for (size_t i = 0; i < subjects.size(); ++i) {
    if (outcomes[i].result.is_timed()) continue;
    rows.push_back(
        {.subject = subjects[i], .roles = {}, .result = outcomes[i].result, .to_rival = {}});
  }
}

Result<std::vector<Subject>> Bench::generated(const Problem& gemm,
                                              const std::optional<codegen::GemmConfig>& config,
                                              const Epilogue& epilogue) {
  std::vector<codegen::GemmSpec> specs;
  if (config) {
    codegen::GemmSpec spec = F8_TRY(gemm_spec(gemm, epilogue));
    spec.config = *config;
    F8_TRY(codegen::validate(spec));
    specs.push_back(spec);
  } else {
    for (const Generated& candidate :
         F8_TRY(generated_candidates(gemm, backend_.device(), knobs_.keep, {}, epilogue))) {
      if (candidate.pruned.empty()) specs.push_back(candidate.spec);
    }
  }
  for (const codegen::GemmSpec& spec : specs) compiler_.want(spec);
  std::vector<Subject> subjects;
  for (const codegen::GemmSpec& spec : specs) {
    // A kernel that does not compile says so again when it is added.
    (void)compiler_.wait(spec);
    subjects.push_back({.impl = generated_impl(epilogue), .config = codegen::key(spec.config)});
  }
  return subjects;
}

// cuBLASLt's suggestions. Where it has none, `why_none` says so.
Result<std::vector<Subject>> Bench::library(const Problem& gemm, Library which,
                                            std::string& why_none) {
  std::vector<Subject> subjects;
  const bool bf16 = which == Library::kBf16;
  const bool one_scale = which == Library::kOneScale;
  const Result<int> count = backend_.heuristics(one_scale ? with_one_scale(gemm) : gemm, bf16);
  if (!count) {
    if (bf16 || count.error().code == ErrorCode::kCuda) return std::unexpected(count.error());
    why_none = count.error().message;
    return subjects;
  }
  if (*count == 0) why_none = "cuBLASLt has no kernel for these types and scales";
  for (int i = 0; i < std::min(knobs_.heuristics, *count); ++i) {
    subjects.push_back({.impl = bf16        ? "bf16_cublaslt"
                                : one_scale ? "cublaslt_tensorwise"
                                            : "cublaslt",
                        .config = fmt::format("h{}", i)});
  }
  return subjects;
}

Result<Bench::Screened> Bench::screen(const Problem& gemm, std::vector<Subject> subjects,
                                      const char* what) {
  Screened screened{.subjects = std::move(subjects), .outcomes = {}};
  if (screened.subjects.empty()) return screened;
  progress_(
      fmt::format("screening {} {} kernels for {}", screened.subjects.size(), what, gemm.key()));
  const double share_s = knobs_.screen_ms / 1e3 * static_cast<double>(screened.subjects.size());
  screened.outcomes = F8_TRY(
      session_.run({.problem = gemm,
                    .subjects = screened.subjects,
                    .reference = -1,
                    .batch_us = 200,
                    .stop = {.target = 1e9, .min_s = share_s, .max_s = share_s, .min_blocks = 1},
                    .drop_above = 1.15,
                    .warm_s = knobs_.warm_s,
                    .seed = knobs_.seed}));
  return screened;
}

Result<Bench::Screened> Bench::screen_fp8(const Problem& gemm) {
  std::string none;
  std::vector<Subject> subjects = F8_TRY(generated(gemm, std::nullopt));
  const std::vector<Subject> more = F8_TRY(library(gemm, Library::kItsScales, none));
  subjects.insert(subjects.end(), more.begin(), more.end());
  return screen(gemm, std::move(subjects), "fp8");
}

Result<Bench::Screened> Bench::screen_bf16(const Problem& gemm) {
  const std::string identity = gemm_identity(gemm, true);
  if (const auto known = bf16_.find(identity); known != bf16_.end()) return known->second;
  std::string none;
  std::vector<Subject> subjects = F8_TRY(library(gemm, Library::kBf16, none));
  const Screened screened = F8_TRY(screen(gemm, std::move(subjects), "bf16"));
  return bf16_[identity] = screened;
}

std::optional<size_t> fastest_row(std::span<const BenchRow> rows,
                                  std::initializer_list<std::string_view> impls) {
  const bool paired =
      std::ranges::any_of(rows, [](const BenchRow& row) { return row.result.ratio.has_value(); });
  const auto speed = [&](size_t i) {
    const tuning_db::TrialResult& result = rows[i].result;
    if (!paired) return 1 / result.timing->median_ns;
    return result.ratio ? result.ratio->ratio : 1;  // the reference itself
  };
  std::optional<size_t> best;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (std::ranges::find(impls, rows[i].subject.impl) == impls.end()) continue;
    if (!rows[i].result.is_timed()) continue;
    if (!best || speed(i) > speed(*best)) best = i;
  }
  return best;
}

Result<MatmulBench> Bench::matmul(const Problem& problem,
                                  const std::optional<codegen::GemmConfig>& config) {
  MatmulBench bench{.problem = problem, .rows = {}, .failed = {}, .no_rival = {}};
  std::vector<Subject> subjects = F8_TRY(generated(problem, config));
  const bool by_axis = F8_TRY(gemm_desc(problem, false)).scale == codegen::ScaleMode::kAxis;
  for (const Library which : {Library::kItsScales, Library::kOneScale}) {
    if (which == Library::kOneScale && !by_axis) continue;
    const std::vector<Subject> more = F8_TRY(library(problem, which, bench.no_rival));
    subjects.insert(subjects.end(), more.begin(), more.end());
  }
  const Screened fp8 = F8_TRY(screen(problem, std::move(subjects), "fp8"));
  const Screened bf16 = F8_TRY(screen_bf16(problem));

  // The fastest of each kind go to the comparison, which decides between them too.
  const auto add = [&](const Screened& screened, size_t index, const char* role) {
    const Subject& subject = screened.subjects[index];
    const auto known = std::ranges::find(bench.rows, subject, &BenchRow::subject);
    BenchRow& row = known == bench.rows.end() ? bench.rows.emplace_back() : *known;
    row.subject = subject;
    if (*role != '\0') row.roles.emplace_back(role);
  };
  for (const Screened* screened : {&fp8, &bf16}) {
    bench.screened += static_cast<int>(screened->subjects.size());
    screened->add_failed(bench.failed);
    for (const char* impl : {"generated", "cublaslt", "cublaslt_tensorwise"}) {
      const std::vector<size_t> ranked = screened->ranked(impl);
      for (size_t i = 0; i < std::min(kFinalists, ranked.size()); ++i) {
        add(*screened, ranked[i], "");
      }
    }
  }
  for (const size_t i : fp8.ranked("cublaslt")) {
    if (fp8.subjects[i].config == "h0") add(fp8, i, "cublaslt first");
  }
  if (const auto ranked = bf16.ranked("bf16_cublaslt"); !ranked.empty()) {
    add(bf16, ranked.front(), "cublaslt bf16");
  }
  if (bench.rows.empty()) return bench;

  const std::vector<SubjectOutcome> outcomes = F8_TRY(compare(problem, bench.rows));
  const auto name = [&](std::optional<size_t> row, const char* role) {
    if (row) bench.rows[*row].roles.insert(bench.rows[*row].roles.begin(), role);
  };
  const std::optional<size_t> rival = fastest_row(bench.rows, {"cublaslt", "cublaslt_tensorwise"});
  if (by_axis) {
    name(rival, "rival");
    name(fastest_row(bench.rows, {"cublaslt_tensorwise"}), "cublaslt tensorwise best");
  }
  name(fastest_row(bench.rows, {"cublaslt"}), "cublaslt best");
  name(fastest_row(bench.rows, {"generated"}), "generated");
  if (!rival) {
    if (bench.no_rival.empty()) bench.no_rival = "none of cuBLASLt's kernels could be measured";
    return bench;
  }
  bench.no_rival.clear();
  for (size_t i = 0; i < outcomes.size(); ++i) {
    bench.rows[i].to_rival = ratio_in_blocks(outcomes[i], outcomes[*rival], knobs_.seed);
  }
  return bench;
}

Result<std::vector<SubjectOutcome>> Bench::compare(const Problem& gemm,
                                                   std::vector<BenchRow>& rows) {
  GroupRequest request{.problem = gemm,
                       .subjects = {},
                       .reference = rows.size() > 1 ? 0 : -1,
                       .batch_us = 400,
                       .stop = {.target = knobs_.max_ci,
                                .min_s = knobs_.final_s / 4,
                                .max_s = knobs_.final_s,
                                .min_blocks = 8},
                       .drop_above = 0,
                       .warm_s = knobs_.warm_s,
                       .seed = knobs_.seed};
  for (const BenchRow& row : rows) request.subjects.push_back(row.subject);
  progress_(fmt::format("comparing {} kernels for {}", rows.size(), gemm.key()));
  std::vector<SubjectOutcome> outcomes = F8_TRY(session_.run(request));
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
    const std::vector<Subject> subjects = F8_TRY(generated(problem, std::nullopt, epilogue));
    const Screened screened = F8_TRY(screen(problem, subjects, to_string(epilogue).c_str()));
    screened.add_failed(bench.failed);
    const std::vector<size_t> ranked = screened.ranked(generated_impl(epilogue));
    for (size_t i = 0; i < std::min(kFinalists, ranked.size()); ++i) {
      bench.rows.emplace_back().subject = screened.subjects[ranked[i]];
    }
  }
  if (bench.rows.empty()) return bench;
  const std::vector<SubjectOutcome> outcomes = F8_TRY(compare(problem, bench.rows));
  const std::optional<size_t> plain = fastest_row(bench.rows, {generated_impl({})});
  for (const Epilogue& epilogue : all) {
    const auto row = fastest_row(bench.rows, {generated_impl(epilogue)});
    if (!row) continue;
    bench.rows[*row].roles.push_back(to_string(epilogue));
    EpilogueCost cost{.epilogue = epilogue, .row = *row, .over_plain = {}};
    if (plain) cost.over_plain = ratio_in_blocks(outcomes[*plain], outcomes[*row], knobs_.seed);
    bench.costs.push_back(cost);
  }
  return bench;
}

// Each launch timed by itself, all of them in turn; the sum differs from the linear's time by what
// neighbours hide of each other.
Result<std::vector<KernelShare>> Bench::shares(int subject) {
  const std::vector<GpuBackend::Part> parts = F8_TRY(backend_.add_steps(subject));
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
    result.push_back({.name = parts[i].name, .ns = median(times[i]), .bytes = parts[i].bytes});
  }
  return result;
}

Result<LinearBench> Bench::linear(const Problem& problem, bool tune, bool with_copy) {
  const Recipe recipe = F8_TRY(find_recipe(problem.recipe));
  LinearBench bench{.problem = problem,
                    .choices = {},
                    .twin = {},
                    .float8 = {},
                    .bf16 = {},
                    .kernels = {},
                    .copy_gb_per_s = {}};
  KernelFields fields;
  for (const Gemm g : kGemms) {
    const auto i = static_cast<size_t>(g);
    const Problem gemm = F8_TRY(Problem::make(to_op(g), recipe, problem.shape));
    bench.twin[i].provider = Provider::kCublasLt;
    const Screened bf16 = F8_TRY(screen_bf16(gemm));
    if (const auto ranked = bf16.ranked("bf16_cublaslt"); !ranked.empty()) {
      bench.twin[i] = F8_TRY(to_choice(bf16.subjects[ranked.front()]));
    }
    if (!tune) continue;
    // A GEMM that the recipe keeps in bf16 takes part in the search too.
    const bool is_fp8 = recipe.at(g).is_fp8();
    const Screened screened = is_fp8 ? F8_TRY(screen_fp8(gemm)) : bf16;
    std::vector<TimedKernel> kernels;
    std::string reason;
    for (size_t s = 0; s < screened.subjects.size(); ++s) {
      const tuning_db::TrialResult& result = screened.outcomes[s].result;
      if (result.is_timed()) {
        kernels.push_back(
            {.choice = F8_TRY(to_choice(screened.subjects[s])), .ns = result.timing->median_ns});
      } else if (reason.empty()) {
        reason = result.reason;
      }
    }
    if (kernels.empty()) {
      return fail(ErrorCode::kUnsupported, "{}: no kernel works; the first says: {}", gemm.key(),
                  reason.empty() ? "there are no candidates" : reason);
    }
    std::ranges::stable_sort(kernels, {}, &TimedKernel::ns);
    fields[i].timed = std::move(kernels);
    if (is_fp8) {
      const auto table = backend_.context()->table();
      fields[i].prior =
          F8_TRY(prior_choices(gemm, backend_.device(), table ? *table : TuningTable{}));
    }
  }
  if (tune) {
    progress_(fmt::format("timing linears of the best kernels for {}", problem.key()));
    const auto measure =
        [this](const GroupRequest& group) -> Result<std::vector<tuning_db::TrialResult>> {
      std::vector<tuning_db::TrialResult> results;
      for (SubjectOutcome& outcome : F8_TRY(session_.run(group))) {
        results.push_back(std::move(outcome.result));
      }
      return results;
    };
    const LinearSearch search = F8_TRY(search_linear(
        {.problem = problem,
         .subjects = {},
         .batch_us = 400,
         .stop = {},
         .warm_s = knobs_.warm_s,
         .seed = knobs_.seed},
        fields, knobs_.linears, measure, knobs_.reuse_weights ? "float8_reused" : "float8"));
    bench.choices = search.choices;
    bench.linears = search.timed;
    bench.over_first = search.over_first;
  } else {
    const auto plan = F8_TRY(runtime::Linear::plan(
        backend_.context(), {.shape = problem.shape, .recipe = recipe, .choices = {}}));
    for (const Gemm g : kGemms) bench.choices[static_cast<size_t>(g)] = plan->choice(g);
  }
  progress_(fmt::format("timing {} against bf16", problem.key()));
  std::vector<SubjectOutcome> outcomes =
      F8_TRY(session_.run({.problem = problem,
                           .subjects = {{.impl = knobs_.reuse_weights ? "float8_reused" : "float8",
                                         .config = choices_text(bench.choices)},
                                        {.impl = "bf16", .config = choices_text(bench.twin)}},
                           .reference = 1,
                           .batch_us = 400,
                           .stop = {.target = knobs_.max_ci,
                                    .min_s = knobs_.final_s / 4,
                                    .max_s = 2 * knobs_.final_s,
                                    .min_blocks = 8},
                           .drop_above = 0,
                           .warm_s = knobs_.warm_s,
                           .seed = knobs_.seed}));
  bench.float8 = std::move(outcomes[0].result);
  bench.bf16 = std::move(outcomes[1].result);
  if (!bench.float8.is_timed()) {
    return fail(ErrorCode::kInternal, "{}: {}: {}", problem.key(),
                tuning_db::to_string(bench.float8.state), bench.float8.reason);
  }
  progress_(fmt::format("timing the kernels of {} one by one", problem.key()));
  bench.kernels = F8_TRY(shares(0));
  if (with_copy) {
    const int copy = F8_TRY(backend_.add_copy());
    F8_TRY(backend_.estimate_ns(copy));
    F8_TRY(backend_.set_batch(copy, 2));
    std::vector<double> times;
    for (int round = 0; round < kShareRounds; ++round) {
      times.push_back(F8_TRY(backend_.time(std::array{copy})).front());
    }
    bench.copy_gb_per_s = backend_.copy_traffic() / median(times);
  }
  return bench;
}

Result<CastBench> Bench::casts(const Recipe& recipe,
                               const std::vector<runtime::MatrixSize>& weights) {
  CastBench bench;
  bench.bytes = F8_TRY(cast_bytes(recipe, weights));
  bench.copy_bytes = backend_.copy_traffic();
  progress_(fmt::format("casting {} weights, {}", weights.size(), recipe.name));
  F8_TRY(backend_.open_weights(recipe, weights));
  GroupRequest request;
  for (const char* impl : {"cast_each", "cast_list", "copy"}) {
    request.subjects.push_back({.impl = impl, .config = ""});
  }
  request.reference = 0;
  request.batch_us = 400;
  request.stop = {.target = knobs_.max_ci,
                  .min_s = knobs_.final_s / 4,
                  .max_s = 2 * knobs_.final_s,
                  .min_blocks = 8};
  request.warm_s = knobs_.warm_s;
  request.seed = knobs_.seed;
  const std::vector<SubjectOutcome> outcomes = F8_TRY(session_.run_opened(request));
  for (size_t i = 0; i < outcomes.size(); ++i) {
    CastRow row{.impl = request.subjects[i].impl, .result = outcomes[i].result, .of_copy = {}};
    if (i + 1 < outcomes.size()) {
      row.of_copy = ratio_in_blocks(outcomes[i], outcomes.back(), knobs_.seed);
    }
    if (row.of_copy) {  // how many times the copy's rate this one moves its bytes at
      const double more = bench.bytes / bench.copy_bytes;
      for (double* x : {&row.of_copy->ratio, &row.of_copy->ci.lo, &row.of_copy->ci.hi}) *x *= more;
    }
    bench.rows.push_back(std::move(row));
  }
  return bench;
}

}  // namespace f8::tuner
