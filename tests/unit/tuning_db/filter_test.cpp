// Policy `measured`: the kinds of evidence, the decision rule, layers of databases, stable output.
#include "tuning_db/estimate/filter.hpp"

#include <sqlite3.h>

#include <algorithm>
#include <tuple>

#include "recipes/model/tensor_parallel.hpp"
#include "sample.hpp"
#include "tuning_db/file/sqlite.hpp"

namespace f8::tuning_db {
namespace {

double bf16_ns(Shape s) {
  return 15'000 + 6.0 * static_cast<double>(s.m) * static_cast<double>(s.n) *
                      static_cast<double>(s.k) / 700e3;
}

class FilterTest : public ::testing::Test {
 protected:
  Database make(const char* name) {
    return Database::open(folder_ / name, OpenMode::kCreate).value();
  }

  // Columns (n, k) at three m, with a constant speedup each.
  void fill(Database& db, const char* recipe, double small, double large) {
    sweep_linears(db, recipe, measured_shapes(), bf16_ns,
                  [=](Shape s) { return s.n <= 2048 ? small : large; });
  }

  static FilterDecision decide(const Database& db, Shape s, const char* recipe = "tensorwise",
                               std::string fqn = "layers.0.w", double margin = 0.02) {
    const Database* dbs[] = {&db};
    return run({{std::move(fqn), s.k, s.n, 1}}, s.m, dbs, recipe, margin).decisions.at(0);
  }

  static FilterResult run(const std::vector<NamedLinear>& layers, int64_t tokens,
                          std::span<const Database* const> dbs, const char* recipe = "tensorwise",
                          double margin = 0.02, std::vector<std::string> fqns = {}) {
    return ask(
        layers, dbs, recipe,
        {.tokens = tokens, .filter_fqns = std::move(fqns), .margin = margin, .automatic = true});
  }

  static TuningTable table_of(std::span<const Database* const> dbs) {
    TuningTable table;
    for (const Database* db : dbs) {
      table.add_behind(take(db->table(Database::TablePart::kLinears)));
    }
    return table;
  }

  static FilterResult ask(const std::vector<NamedLinear>& layers,
                          std::span<const Database* const> dbs, const char* recipe,
                          const FilterOptions& options, std::string_view device = {}) {
    const TuningTable table = table_of(dbs);
    auto result = filter(layers, options, Estimator(table, recipe, device));
    EXPECT_TRUE(result) << (result ? "" : result.error().message);
    return result ? *std::move(result) : FilterResult{};
  }

  TempFolder folder_;
};

// A list of a million unlike layers is no attack: the work for an m is done once, and little is kept.
TEST_F(FilterTest, UnlikeLayersShareTheWorkOfTheirM) {
  Database db = make("t.db");
  fill(db, "tensorwise", 0.9, 1.5);
  const Database* dbs[] = {&db};
  const TuningTable table = table_of(dbs);
  const Estimator estimator(table, "tensorwise");
  Estimates estimates(estimator);
  constexpr int64_t kLayers = 3 * Estimates::kMostShapes;
  for (int64_t i = 0; i < kLayers; ++i) {
    const Shape shape{i % 2 == 0 ? 8192 : 3000, 16 * (1 + i % 100), 16 * (1 + i / 100)};
    const auto& e = estimates(shape);
    ASSERT_TRUE(e);
    ASSERT_LE(estimates.shapes_kept(), Estimates::kMostShapes);
    if (i % 97 != 0) continue;
    const auto alone = estimator.estimate(shape);
    ASSERT_TRUE(alone);
    ASSERT_EQ(std::tuple(e->speedup, e->lo, e->hi, e->basis, e->rows),
              std::tuple(alone->speedup, alone->lo, alone->hi, alone->basis, alone->rows));
  }
  EXPECT_EQ(estimates.slices_made(), 2U);
  for (int64_t m = 1; m < 100; ++m) {
    ASSERT_TRUE(estimates({m, 4096, 4096}));
    ASSERT_LE(estimates.slices_kept(), Estimates::kMostSlices);
  }
}

TEST_F(FilterTest, AMeasuredShapeIsItsRow) {
  Database db = make("t.db");
  fill(db, "tensorwise", 0.9, 1.5);
  const FilterDecision yes = decide(db, {8192, 4096, 4096});
  EXPECT_TRUE(yes.convert);
  EXPECT_EQ(yes.evidence, Evidence::kMeasured);
  EXPECT_EQ(yes.speedup, 1.5);
  EXPECT_EQ(yes.lo, 1.495);
  EXPECT_EQ(yes.hi, 1.505);
  ASSERT_EQ(yes.trial_uuids.size(), 1U);
  const auto rows = db.trials(linear({8192, 4096, 4096})).value();
  EXPECT_EQ(yes.trial_uuids[0],
            rows[0].candidate.impl == Impl::kFloat8 ? rows[0].uuid : rows[1].uuid);
  EXPECT_TRUE(yes.reason.starts_with("converted: at least 1.495, need > 1.02; measured, bf16 "))
      << yes.reason;
  EXPECT_LT(yes.reason.size(), 100u) << yes.reason;
  EXPECT_NEAR(yes.terms.rows, std::log(1.505 / 1.495) / 2, 1e-9);
  EXPECT_EQ(yes.terms.shape, 0);
  EXPECT_EQ(yes.terms.device, 0);
  const FilterDecision no = decide(db, {8192, 1024, 4096});
  EXPECT_FALSE(no.convert);
  EXPECT_NE(no.reason.find("kept in bf16: at most 0.9"), std::string::npos) << no.reason;
}

// Experts without rows are judged by the linears of the recipe: more weights are more to cast.
TEST_F(FilterTest, ExpertsWithoutRowsAreEstimatedByLinears) {
  Database db = make("t.db");
  fill(db, "tensorwise", 1.5, 1.5);
  const Database* dbs[] = {&db};
  const auto experts = [](int64_t count) {
    return NamedLinear{.fqn = "layers.0.experts",
                       .in_features = 4096,
                       .out_features = 2048,
                       .tokens_share = 2,
                       .groups = {.experts = count}};
  };
  const FilterResult few = run({experts(2)}, 8192, dbs);
  const FilterDecision& d = few.decisions.at(0);
  EXPECT_EQ(d.evidence, Evidence::kModelled);
  EXPECT_TRUE(d.convert) << d.reason;
  ASSERT_EQ(d.parts.size(), 2U);
  EXPECT_EQ(d.parts[0].linear.shape, (Shape{16384, 4096, 4096}));
  EXPECT_EQ(d.parts[1].linear.shape, (Shape{16384, 4096, 2048}));
  EXPECT_TRUE(d.trial_uuids.empty());
  EXPECT_NEAR(d.terms.shape, kOfLinearsModel, 1e-9);
  const FilterDecision many = run({experts(512)}, 8192, dbs).decisions.at(0);
  EXPECT_GE(many.bf16_ns, d.bf16_ns);
  EXPECT_GT(few.estimated_model_speedup, 1);
  // Without rows of the recipe nothing is known.
  const FilterDecision unknown = run({experts(2)}, 8192, dbs, "blockwise").decisions.at(0);
  EXPECT_FALSE(unknown.convert);
  EXPECT_FALSE(unknown.has_estimate());
  EXPECT_EQ(unknown.evidence, Evidence::kRule);
  for (const char* part : {"no measurements of recipe blockwise", "--experts 2 --skew 0"}) {
    EXPECT_NE(unknown.reason.find(part), std::string::npos) << unknown.reason;
  }
}

// The ranks of tensor and expert parallelism.
TEST_F(FilterTest, ExpertsAreSharedByRanks) {
  std::vector<NamedLinear> layers = {{.fqn = "layers.0.wq", .in_features = 64, .out_features = 64},
                                     {.fqn = "layers.0.moe.experts",
                                      .in_features = 64,
                                      .out_features = 256,
                                      .groups = {.experts = 8}}};
  ASSERT_TRUE(shard_expert_parallel(layers, 4, "m"));
  EXPECT_EQ(layers[1].groups.experts, 2);
  EXPECT_EQ(layers[0].groups.experts, 0);
  ASSERT_TRUE(shard_tensor_parallel(layers, 4, "m"));
  EXPECT_EQ(layers[1].out_features, 64);
  EXPECT_EQ(layers[1].in_features, 64);
  EXPECT_FALSE(shard_expert_parallel(layers, 4, "m"));
  EXPECT_EQ(layers[1].groups.experts, 2) << "what was refused stays as it was";
  // Nothing that they send is in a verdict.
  layers[1].tokens_share = 2;
  Database db = make("t.db");
  fill(db, "tensorwise", 1.5, 1.5);
  const Database* dbs[] = {&db};
  const FilterResult result =
      ask(layers, dbs, "tensorwise", {.tokens = 8192, .automatic = true, .parallel = {.fsdp = 8}});
  EXPECT_TRUE(result.decisions[0].wire);
  EXPECT_FALSE(result.decisions[1].wire);
  EXPECT_TRUE(result.decisions[1].has_estimate());
}

TEST_F(FilterTest, ConvertsOnlyAboveTheMarginForCertain) {
  Database db = make("t.db");
  const auto speedup = [](Shape s) { return s.n == 4096 ? 1.022 : s.n == 8192 ? 1.026 : 1.01; };
  sweep_linears(db, "tensorwise", {{8192, 4096, 4096}, {8192, 8192, 4096}, {8192, 2048, 4096}},
                bf16_ns, speedup);
  const FilterDecision ambiguous = decide(db, {8192, 4096, 4096});  // [1.017, 1.027]
  EXPECT_FALSE(ambiguous.convert);
  EXPECT_NE(ambiguous.reason.find("ambiguous"), std::string::npos) << ambiguous.reason;
  EXPECT_TRUE(decide(db, {8192, 8192, 4096}).convert);  // [1.021, 1.031]
  const FilterDecision below = decide(db, {8192, 2048, 4096});
  EXPECT_FALSE(below.convert);
  EXPECT_EQ(below.reason.find("ambiguous"), std::string::npos);
  EXPECT_TRUE(decide(db, {8192, 4096, 4096}, "tensorwise", "w", 0).convert);
}

TEST_F(FilterTest, BetweenTwoTokenCountsOfAShape) {
  Database db = make("t.db");
  // log speedup is linear in log2 m: the interpolation is exact.
  const auto speedup = [](Shape s) {
    return 1.1 * std::pow(1.1, std::log2(static_cast<double>(s.m) / 2048));
  };
  sweep_linears(db, "tensorwise", measured_shapes(), bf16_ns, speedup);
  const FilterDecision d = decide(db, {4096, 4096, 4096});
  EXPECT_EQ(d.evidence, Evidence::kInterpolated);
  EXPECT_NEAR(d.speedup, 1.21, 1e-3);
  EXPECT_LT(d.lo, d.speedup);
  EXPECT_GT(d.hi, d.speedup);
  // No row leaves the line between others, so the interval is hardly wider than the rows'.
  EXPECT_LT(d.hi - d.lo, 0.02);
  EXPECT_EQ(d.trial_uuids.size(), 2U);
  EXPECT_NE(d.reason.find("interpolated between M 2048 (1.100) and 8192 (1.331)"),
            std::string::npos)
      << d.reason;
}

TEST_F(FilterTest, ASaturatingCurveStaysInsideItsInterval) {
  Database db = make("t.db");
  const auto speedup = [](Shape s) {
    return 1.6 * static_cast<double>(s.m) / (static_cast<double>(s.m) + 1500);
  };
  sweep_linears(db, "tensorwise", measured_shapes(), bf16_ns, speedup);
  for (const int64_t m : {2560, 3072, 4096, 6144, 10'000, 12'288}) {
    const FilterDecision d = decide(db, {m, 4096, 4096});
    EXPECT_EQ(d.evidence, Evidence::kInterpolated);
    EXPECT_LE(d.lo, speedup({m, 4096, 4096})) << m;
    EXPECT_GE(d.hi, speedup({m, 4096, 4096})) << m;
    EXPECT_LT(d.hi / d.lo, 1.15) << m;
  }
}

TEST_F(FilterTest, UnseenWeightsAreInterpolatedOrModelled) {
  Database db = make("t.db");
  fill(db, "tensorwise", 0.8, 1.5);
  const FilterDecision inside = decide(db, {8192, 6144, 6144});
  EXPECT_EQ(inside.evidence, Evidence::kInterpolated);
  EXPECT_LT(inside.lo, inside.speedup);
  EXPECT_NE(inside.reason.find("measured (n, k), give or take"), std::string::npos);
  EXPECT_EQ(inside.trial_uuids.size(), 3U);
  for (const Shape s : {Shape{8192, 128, 128}, Shape{64, 4096, 4096}, Shape{65'536, 4096, 4096},
                        Shape{8192, 131'072, 16'384}}) {
    const FilterDecision outside = decide(db, s);
    EXPECT_EQ(outside.evidence, Evidence::kModelled);
    EXPECT_LT(outside.lo, outside.speedup);
    EXPECT_GT(outside.hi, outside.speedup);
    EXPECT_NE(outside.reason.find("measured shapes, give or take"), std::string::npos);
  }
  // Farther away the interval is wider.
  const auto width = [&](int64_t m) {
    const FilterDecision d = decide(db, {m, 4096, 4096});
    return d.hi / d.lo;
  };
  EXPECT_GT(width(262'144), width(32'768));
}

TEST_F(FilterTest, NamesAndMultiplesOf16ComeFirst) {
  Database db = make("t.db");
  fill(db, "tensorwise", 1.5, 1.5);
  const Database* dbs[] = {&db};
  const FilterResult r = run({{"layers.0.wq", 4096, 4096, 1},
                              {"output", 4096, 4096, 1},
                              {"odd_k", 4100, 4096, 1},
                              {"odd_n", 4096, 4104, 1}},
                             8192, dbs, "tensorwise", 0.02, {"output", "auto_filter_small_kn"});
  EXPECT_TRUE(r.decisions[0].convert);
  EXPECT_FALSE(r.decisions[1].convert);
  EXPECT_EQ(r.decisions[1].evidence, Evidence::kRule);
  EXPECT_EQ(r.decisions[1].speedup, 1.5);  // if it were converted
  EXPECT_NE(r.decisions[1].reason.find("\"output\""), std::string::npos);
  EXPECT_FALSE(r.decisions[2].convert);
  EXPECT_NE(r.decisions[2].reason.find("K (in_features) 4100 is not a multiple of 16"),
            std::string::npos);
  EXPECT_EQ(r.decisions[2].speedup, 1);
  EXPECT_FALSE(r.decisions[3].convert);
  EXPECT_NE(r.decisions[3].reason.find("N (out_features) 4104"), std::string::npos);
}

TEST_F(FilterTest, WithoutMeasurementsItKeepsAndSaysHowToMeasure) {
  const Database db = make("t.db");
  const Database* dbs[] = {&db};
  const FilterResult r = run({{"w", 4096, 1024, 1}}, 8192, dbs, "rowwise");
  EXPECT_FALSE(r.decisions[0].convert);
  EXPECT_EQ(r.decisions[0].evidence, Evidence::kRule);
  EXPECT_EQ(r.decisions[0].speedup, 1);
  EXPECT_NE(r.decisions[0].reason.find("float8-tune sweep --mnk 8192,1024,4096 --recipe rowwise"),
            std::string::npos)
      << r.decisions[0].reason;
  EXPECT_EQ(r.estimated_model_speedup, 1);
  EXPECT_EQ(r.device, "");
}

TEST_F(FilterTest, FewRowsSayNothingOfOtherShapes) {
  Database db = make("t.db");
  sweep_linears(db, "tensorwise", {{8192, 4096, 4096}}, bf16_ns, [](Shape) { return 1.5; });
  EXPECT_EQ(decide(db, {8192, 4096, 4096}).evidence, Evidence::kMeasured);
  const FilterDecision other = decide(db, {8192, 4096, 2048});
  EXPECT_FALSE(other.convert);
  EXPECT_EQ(other.evidence, Evidence::kRule);
  EXPECT_NE(other.reason.find("too few"), std::string::npos) << other.reason;
}

TEST_F(FilterTest, RowsOfTheUserWin) {
  Database builtin = make("builtin.db");
  Database user = make("user.db");
  fill(builtin, "tensorwise", 0.9, 1.5);
  sweep_linears(user, "tensorwise", {{8192, 4096, 4096}}, bf16_ns, [](Shape) { return 0.95; });
  const Database* dbs[] = {&user, &builtin};
  const FilterResult r =
      run({{"a", 4096, 4096, 1}, {"b", 8192, 8192, 1}, {"c", 4608, 4608, 1}}, 8192, dbs);
  EXPECT_EQ(r.decisions[0].speedup, 0.95);
  EXPECT_EQ(r.decisions[1].speedup, 1.5);
  EXPECT_EQ(r.decisions[1].evidence, Evidence::kMeasured);
  const Database* only_builtin[] = {&builtin};
  EXPECT_EQ(run({{"a", 4096, 4096, 1}}, 8192, only_builtin).decisions[0].speedup, 1.5);
  // The interpolation sees the user's row too.
  EXPECT_LT(r.decisions[2].speedup,
            run({{"c", 4608, 4608, 1}}, 8192, only_builtin).decisions[0].speedup);
}

TEST_F(FilterTest, AnotherDeviceIsOnlyAModel) {
  Database builtin = make("builtin.db");
  Database user = make("user.db");
  fill(builtin, "tensorwise", 0.9, 1.5);
  sweep_linears(
      user, "tensorwise", {{8192, 4096, 4096}}, bf16_ns, [](Shape) { return 1.2; }, h100(500));
  const Database* dbs[] = {&user, &builtin};
  const FilterResult r = run({{"a", 4096, 4096, 1}, {"b", 8192, 8192, 1}}, 8192, dbs);
  EXPECT_EQ(r.decisions[0].evidence, Evidence::kMeasured);
  EXPECT_EQ(r.decisions[0].speedup, 1.2);
  EXPECT_EQ(r.decisions[1].evidence, Evidence::kModelled);
  EXPECT_NE(r.decisions[1].reason.find("another device"), std::string::npos)
      << r.decisions[1].reason;

  const FilterOptions options{.tokens = 8192, .automatic = true};
  const auto none = ask({{"a", 4096, 4096, 1}}, dbs, "tensorwise", options, "NVIDIA H200");
  EXPECT_EQ(none.decisions[0].evidence, Evidence::kRule);
  EXPECT_NE(none.decisions[0].reason.find("on NVIDIA H200"), std::string::npos);
}

TEST_F(FilterTest, WholeModelIsWeightedByTimeAndCount) {
  Database db = make("t.db");
  const auto speedup = [](Shape s) { return s.n == 4096 ? 2.0 : 0.5; };
  const auto time = [](Shape s) { return s.n == 4096 ? 3e6 : 1e6; };
  sweep_linears(db, "tensorwise", {{8192, 4096, 4096}, {8192, 1024, 4096}}, time, speedup);
  const Database* dbs[] = {&db};
  // bf16 2 * 3 + 4 * 1 = 10, after 2 * 1.5 + 4 * 1 = 7.
  const FilterResult r = run({{"a", 4096, 4096, 2}, {"b", 4096, 1024, 4}}, 8192, dbs);
  EXPECT_NEAR(r.estimated_model_speedup, 10.0 / 7, 1e-4);
  EXPECT_EQ(r.device, "NVIDIA H100 80GB HBM3");
  // Under torchao's rule without the flag the slow ones are converted too.
  FilterOptions options{.policy = FilterPolicy::kTorchao, .tokens = 8192};
  const std::vector<NamedLinear> layers = {{"a", 4096, 4096, 2}, {"b", 4096, 1024, 4}};
  const auto torchao = ask(layers, dbs, "tensorwise", options);
  EXPECT_NEAR(torchao.estimated_model_speedup, 10.0 / 11, 1e-4);
}

TEST_F(FilterTest, BadInputIsRefused) {
  const NamedLinear good{"a", 4096, 4096, 1};
  const auto refused = [&](const NamedLinear& layer, const FilterOptions& options,
                           const char* text) {
    const auto result = filter({&layer, 1}, options, Estimator(TuningTable{}, "tensorwise"));
    ASSERT_FALSE(result) << text;
    EXPECT_NE(result.error().message.find(text), std::string::npos) << result.error().message;
  };
  refused(good, {.tokens = 0}, "tokens is 0");
  refused(good, {.tokens = -1}, "tokens is -1");
  refused(good, {.tokens = 1, .margin = -0.5}, "margin");
  refused(good, {.tokens = 1, .margin = std::nan("")}, "margin");
  refused({"layers.3.w", 0, 16, 1}, {.tokens = 1}, "layers.3.w");
  refused({"x", 16, int64_t{1} << 40, 1}, {.tokens = 1}, "x");
  refused({"x", 16, 16, 0}, {.tokens = 1}, "count 0");
}

TEST_F(FilterTest, EqualDataGivesEqualDecisionsWhateverTheFile) {
  Database db = make("t.db");
  fill(db, "tensorwise", 0.9, 1.5);
  ASSERT_TRUE(db.export_jsonl(folder_ / "t.jsonl"));
  Database copy = make("copy.db");
  ASSERT_TRUE(copy.import_jsonl(folder_ / "t.jsonl"));
  std::vector<NamedLinear> layers;
  for (const int64_t k : {1024, 3072, 4096, 20'480}) {
    for (const int64_t n : {512, 4096, 6144}) layers.push_back({"w", k, n, 1});
  }
  const Database* a[] = {&db};
  const Database* b[] = {&copy};
  const FilterResult ra = run(layers, 4096, a);
  const FilterResult rb = run(layers, 4096, b);
  for (size_t i = 0; i < layers.size(); ++i) {
    EXPECT_EQ(ra.decisions[i].speedup, rb.decisions[i].speedup);
    EXPECT_EQ(ra.decisions[i].lo, rb.decisions[i].lo);
    EXPECT_EQ(ra.decisions[i].trial_uuids, rb.decisions[i].trial_uuids);
  }
  EXPECT_EQ(ra.estimated_model_speedup, rb.estimated_model_speedup);
}

TEST_F(FilterTest, ThresholdsOfAKnownRule) {
  Database db = make("t.db");
  // Worth it but for n <= 2048 and k <= 4096; at m = 2048 never, at m = 16384 always.
  sweep_linears(db, "tensorwise", measured_shapes(), bf16_ns, [](Shape s) {
    if (s.m == 2048) return 0.9;
    if (s.m == 16384) return 1.4;
    return s.n <= 2048 && s.k <= 4096 ? 0.9 : 1.3;
  });
  const Database* dbs[] = {&db};
  const TuningTable table = table_of(dbs);
  const auto rules = thresholds(Estimator(table, "tensorwise"));
  ASSERT_EQ(rules.size(), 3U);
  EXPECT_EQ(rules[0].m, 2048);
  EXPECT_EQ(rules[0].agree, 10);
  EXPECT_EQ(rules[0].kept, 10);
  EXPECT_EQ(rules[0].k_max, 14'336);
  EXPECT_EQ(rules[0].n_max, 28'672);
  EXPECT_EQ(rules[0].torchao_agree, 2);  // (4096, 1024) and (1024, 1024) of the ten
  EXPECT_EQ(rules[1].m, 8192);
  EXPECT_EQ(rules[1].k_max, 4096);
  EXPECT_EQ(rules[1].n_max, 2048);
  EXPECT_EQ(rules[1].kept, 3);  // (4096, 1024), (2048, 2048) and (1024, 1024)
  EXPECT_EQ(rules[1].agree, 10);
  EXPECT_EQ(rules[1].trials, 10);
  EXPECT_EQ(rules[1].torchao_agree, 9);
  EXPECT_EQ(rules[2].k_max, 0);
  EXPECT_EQ(rules[2].n_max, 0);
  EXPECT_EQ(rules[2].kept, 0);
  EXPECT_EQ(rules[2].agree, 10);
  EXPECT_EQ(rules[2].torchao_agree, 8);
  EXPECT_TRUE(thresholds(Estimator(table, "rowwise")).empty());
}

// The rows that SQLite gives, and the steps that its machine takes, on connections opened meanwhile.
class SqlWork {
 public:
  SqlWork() {
    rows = steps = 0;
    EXPECT_EQ(sqlite3_auto_extension(reinterpret_cast<void (*)()>(&watch)), SQLITE_OK);
  }
  SqlWork(const SqlWork&) = delete;
  SqlWork& operator=(const SqlWork&) = delete;
  ~SqlWork() { sqlite3_cancel_auto_extension(reinterpret_cast<void (*)()>(&watch)); }

  static inline int64_t rows = 0;
  static inline int64_t steps = 0;

 private:
  static int watch(sqlite3* db, const char**, const struct sqlite3_api_routines*) {
    const auto count = [](unsigned event, void*, void* statement, void*) {
      if (event == SQLITE_TRACE_ROW) ++rows;
      if (event == SQLITE_TRACE_PROFILE) {
        steps += sqlite3_stmt_status(static_cast<sqlite3_stmt*>(statement),
                                     SQLITE_STMTSTATUS_VM_STEP, /*resetFlg=*/1);
      }
      return 0;
    };
    return sqlite3_trace_v2(db, SQLITE_TRACE_ROW | SQLITE_TRACE_PROFILE, count, nullptr);
  }
};

// A decision reads the database once, however many layers ask; of its GEMMs opening it has few rows each.
TEST_F(FilterTest, ReadsTheDatabaseOnceForAllLayers) {
  const auto work_of = [&](const char* name, int64_t layer_count) {
    std::vector<NamedLinear> layers;
    for (int64_t i = 0; i < layer_count; ++i) {
      layers.push_back({"layers." + std::to_string(i), 1024 + 16 * i, 8192 - 16 * i, 1});
    }
    const SqlWork work;
    const Database db = Database::open(folder_ / name, OpenMode::kReadOnly).value();
    const Database* dbs[] = {&db};
    EXPECT_EQ(run(layers, 4096, dbs).decisions.size(), layers.size());
    return std::pair(SqlWork::rows, SqlWork::steps);
  };
  for (const auto& [name, gemms] : {std::pair{"few.db", 5}, {"many.db", 500}}) {
    Database db = make(name);
    for (const char* recipe : {"tensorwise", "rowwise"}) fill(db, recipe, 0.9, 1.5);
    std::vector<TrialKey> cells;
    for (int64_t i = 0; i < gemms; ++i) {
      cells.push_back(
          {gemm(2048 * (1 + i % 3), 1024 * (1 + i % 10), 4096), heuristic(static_cast<int>(i))});
    }
    sweep(db, cells, [](const TrialKey&) { return timed(1000); });
  }
  const auto few = work_of("few.db", 1);
  EXPECT_GT(few.first, 2 * static_cast<int64_t>(measured_shapes().size()));
  EXPECT_EQ(work_of("few.db", 300), few);
  // Opening reads some rows of every trial; the steps of SQLite's machine grow by no more either.
  const auto many = work_of("many.db", 300);
  EXPECT_LE(many.first - few.first, 3 * 495);
  EXPECT_LE(many.second - few.second, 300 * 495);
}

}  // namespace
}  // namespace f8::tuning_db
