// Reading: order, which rows count now, the runtime's table.
#include "sample.hpp"
#include "tuning_db/estimate/builtin_tables.hpp"

namespace f8::tuning_db {
namespace {

class QueryTest : public ::testing::Test {
 protected:
  QueryTest() : db_(Database::open(folder_ / "t.db", OpenMode::kCreate).value()) {}
  TempFolder folder_;
  Database db_;
};

TEST(Keys, AreOfCanonicalValues) {
  EXPECT_EQ((Method{"final", R"({"a":1,"b":2})"}.key()),
            (Method{"final", R"({ "b":2, "a":1 })"}.key()));
  EXPECT_NE((Method{"final", "{}"}.key()), (Method{"screen", "{}"}.key()));
  EXPECT_NE(key(h100(700)), key(h100(500)));
  // The border between two fields counts.
  EXPECT_NE((Candidate{Impl::kFloat8, "{}", "c"}.key()),
            (Candidate{Impl::kFloat8, "{}c", ""}.key()));
  EXPECT_EQ(key(h100()).size(), 32U);
  // Keys are stored: they may not change from release to release.
  EXPECT_EQ((Candidate{Impl::kCublasLt, R"({"heuristic":3})", ""}.key()),
            "96a6d5274b3828b3eb001bbbe8837396");
}

TEST_F(QueryTest, TrialsBestFirst) {
  const Problem p = gemm(8192, 4096, 4096);
  sweep(db_, {{p, heuristic(0)}, {p, heuristic(1)}, {p, heuristic(2)}, {p, heuristic(3)}},
        [](const TrialKey& c) {
          if (c.candidate.config == R"({"heuristic":0})") return timed(300);
          if (c.candidate.config == R"({"heuristic":1})") return timed(100);
          if (c.candidate.config == R"({"heuristic":2})") {
            return TrialResult{.state = TrialState::kWrong, .reason = "rel_err 0.4"};
          }
          TrialResult r = timed(50);
          r.state = TrialState::kNoisy;
          return r;
        });
  // A screening is faster, and is not best.
  sweep(db_, {{p, heuristic(4)}}, [](const TrialKey&) { return timed(10); }, h100(), toolchain(),
        {"screen", "{}"});
  std::vector<std::string> order;
  for (const TrialRow& row : take(db_.trials(p))) {
    order.push_back(row.candidate.config.substr(13, 1) + " " +
                    std::string(to_string(row.result.state)));
  }
  EXPECT_EQ(order, (std::vector<std::string>{"1 ok", "0 ok", "4 ok", "3 noisy", "2 wrong"}));
  EXPECT_TRUE(db_.trials(gemm(16, 16, 16)).value().empty());
}

TEST_F(QueryTest, TheNewestToolchainCounts) {
  const Problem p = linear({8192, 4096, 4096});
  const auto measure = [&](const char* sha, double ns, const Method& method) {
    sweep(
        db_, {{p, {Impl::kFloat8, "{}", "f"}}},
        [&](const TrialKey&) { return timed(ns, 1e6 / ns); }, h100(), toolchain(sha), method);
  };
  measure("old", 500'000, final_method());
  measure("new", 600'000, final_method());
  measure("new", 650'000, final_method());
  measure("new", 100'000, {"screen", "{}"});
  const auto rows = db_.linears("tensorwise").value();
  ASSERT_EQ(rows.size(), 1U);
  EXPECT_EQ(rows[0].result.timing->median_ns, 600'000);
  EXPECT_TRUE(db_.linears("rowwise").value().empty());
  EXPECT_TRUE(db_.linears("tensorwise", Impl::kBf16).value().empty());
}

TEST_F(QueryTest, EachDeviceClassHasItsRow) {
  for (const int watts : {700, 500}) {
    sweep_linears(
        db_, "tensorwise", {{8192, 4096, 4096}}, [](Shape) { return 1e6; },
        [&](Shape) { return watts / 500.0; }, h100(watts));
  }
  EXPECT_EQ(db_.linears("tensorwise").value().size(), 2U);
  EXPECT_EQ(db_.linears("tensorwise", Impl::kBf16).value().size(), 2U);
  EXPECT_EQ(db_.devices().value().at(0).power_limit_w, 500);  // measured last
}

TEST_F(QueryTest, TableTakesTheFastestOfAllImplementations) {
  const Problem a = gemm(8192, 4096, 4096);
  const Problem b = gemm(2048, 4096, 4096);
  sweep(db_,
        {{a, heuristic(0)},
         {a, heuristic(5)},
         {a, generated("128x256s4c2x1w2g8")},
         {a, {Impl::kBf16CublasLt, "{}", ""}},
         {b, heuristic(5)},
         {b, generated("128x128s4c2x1w2g8")}},
        [](const TrialKey& c) {
          if (c.candidate.impl == Impl::kBf16CublasLt) return timed(1);
          if (c.candidate.impl == Impl::kGenerated)
            return timed(c.problem.shape().m == 8192 ? 90 : 110);
          return timed(100);
        });
  sweep_linears(
      db_, "tensorwise", {{8192, 4096, 4096}}, [](Shape) { return 1e6; },
      [](Shape) { return 1.25; });
  const TuningTable table = db_.table().value();
  EXPECT_EQ(table.device_name(), "NVIDIA H100 80GB HBM3");
  ASSERT_EQ(table.choices().size(), 2U);
  const KernelChoice* first = table.find(a);
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first->kernel.provider, Provider::kGenerated);
  EXPECT_EQ(config_text(first->kernel), "128x256s4c2x1w2g8");
  EXPECT_EQ(first->median_ns, 90);
  const KernelChoice* second = table.find(b);
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(second->kernel.provider, Provider::kCublasLt);
  EXPECT_EQ(config_text(second->kernel), "h5");
  ASSERT_EQ(table.speedups().size(), 1U);
  const LinearSpeedup& speedup = table.speedups()[0];
  EXPECT_EQ(speedup.lo, 1.245);
  EXPECT_EQ(speedup.bf16_ns, 1e6);
  EXPECT_EQ(table.sources.at(speedup.source).name, "t.db") << "without its folder";
  const TrialRow row = take(db_.linears("tensorwise")).at(0);
  EXPECT_EQ(speedup.trial, row.uuid);
  EXPECT_EQ(speedup.date, row.at.substr(0, 10));
  const DeviceClass& device = table.devices.at(speedup.device);
  EXPECT_EQ(device.power_limit_w, 700);
  EXPECT_EQ(device.sm_count, 132);
  // It goes through the text that a trainer broadcasts.
  const auto parsed = TuningTable::parse(table.serialize());
  ASSERT_TRUE(parsed) << parsed.error().message;
  EXPECT_EQ(parsed->hash(), table.hash());
}

TEST(Impls, AreASetOfNames) {
  for (const Impl impl :
       {Impl::kGenerated, Impl::kCublasLt, Impl::kBf16CublasLt, Impl::kFloat8, Impl::kBf16}) {
    EXPECT_EQ(parse_impl(to_string(impl)).value(), impl);
  }
  for (const char* none : {"", "generated+bias", "Float8", "float8_reused"}) {
    EXPECT_FALSE(parse_impl(none)) << none;
  }
}

TEST(Kernels, HaveAText) {
  for (const char* text : {"generated:128x256s4c2x1w2g8", "cublaslt:h3", "cublaslt:h0"}) {
    const auto kernel = parse_part_kernel("output", text);
    ASSERT_TRUE(kernel) << kernel.error().message;
    EXPECT_EQ(to_string(*kernel), text);
  }
  EXPECT_EQ(parse_part_kernel("grad_input", "cublaslt:h3").value(),
            (PartKernel{"grad_input", Provider::kCublasLt, "h3"}));
  for (const char* none : {"", "generated", "generated:", "cublaslt:", "cublaslt:h", "cublaslt:3",
                           "other:h1", "generated:a b", " generated:a"}) {
    EXPECT_FALSE(parse_part_kernel("output", none)) << none;
  }
}

class LinearsChoice : public QueryTest {
 protected:
  // One run: the GEMM's kernels, and the linear, which took h5 and is not faster with it alone.
  void measure(const char* sha, bool with_gemms = true, bool h5_is_ok = true) {
    std::vector<TrialKey> cells = {{linear_, {Impl::kFloat8, "{}", "f"}}};
    if (with_gemms) {
      for (const int i : {0, 5}) cells.push_back({product_, heuristic(i)});
    }
    sweep(
        db_, cells,
        [&](const TrialKey& c) {
          if (c.problem.op == Op::kLinear) {
            TrialResult r = timed(1000, 1.2);
            r.kernels = {{"output", Provider::kCublasLt, "h5"},
                         {"grad_input", Provider::kCublasLt, "h0"},
                         {"grad_weight", Provider::kCublasLt, "h0"}};
            return r;
          }
          const bool h5 = c.candidate.config == heuristic(5).config;
          TrialResult r = timed(h5 ? 102 : 100);
          if (h5 && !h5_is_ok) r.state = TrialState::kNoisy;
          return r;
        },
        h100(), toolchain(sha));
  }
  KernelChoice choice() { return *db_.table().value().find(product_); }

  const Problem linear_ = linear({8192, 4096, 4096});
  const Problem product_ = gemm(8192, 4096, 4096);
};

TEST_F(LinearsChoice, IsWhatTheTableTakes) {
  measure("abc1234");
  EXPECT_EQ(config_text(choice().kernel), "h5");
  EXPECT_EQ(choice().median_ns, 102);
  EXPECT_EQ(db_.table()->choices().size(), 1U);
}

TEST_F(LinearsChoice, CountsWhereItsOwnRowIsNotSteady) {
  measure("abc1234", true, false);
  EXPECT_EQ(config_text(choice().kernel), "h5");
  EXPECT_EQ(choice().median_ns, 100) << "the fastest known stands for it";
}

TEST_F(LinearsChoice, OfAnOlderToolchainDoesNotCount) {
  measure("old");
  sweep(
      db_, {{product_, heuristic(0)}, {product_, heuristic(5)}},
      [](const TrialKey& c) { return timed(c.candidate.config == heuristic(0).config ? 90 : 95); },
      h100(), toolchain("new"));
  EXPECT_EQ(config_text(choice().kernel), "h0");
  measure("new", false);
  EXPECT_EQ(config_text(choice().kernel), "h5") << "measured again with the new one";
}

TEST_F(QueryTest, TableTakesBf16KernelsWhereTheRecipeKeepsAGemmInBf16) {
  const Recipe recipe = find_recipe("rowwise_with_gw_hp").value();
  const Problem kept = Problem::make(Op::kGradWeight, recipe, {8192, 4096, 4096}).value();
  sweep(db_, {{kept, {Impl::kBf16CublasLt, R"({"heuristic":2})", ""}}},
        [](const TrialKey&) { return timed(100); });
  const TuningTable table = db_.table().value();
  const KernelChoice* chosen = table.find(kept);
  ASSERT_NE(chosen, nullptr);
  EXPECT_EQ(chosen->kernel.provider, Provider::kCublasLt);
  EXPECT_EQ(config_text(chosen->kernel), "h2");
}

TEST_F(QueryTest, AnEmptyDatabaseHasAnEmptyTable) {
  const TuningTable table = db_.table().value();
  EXPECT_TRUE(table.choices().empty());
  EXPECT_TRUE(table.devices.empty());
}

TEST_F(QueryTest, AConfigurationThatIsNoneIsSaid) {
  sweep(db_, {{gemm(16, 16, 16), {Impl::kGenerated, "{\"x\":1}", ""}}},
        [](const TrialKey&) { return timed(1); });
  const auto table = db_.table();
  ASSERT_FALSE(table);
  EXPECT_NE(table.error().message.find("{\"x\":1}"), std::string::npos);
}

TEST_F(QueryTest, TheTableHasTheLinearsOfEveryDevice) {
  for (const int watts : {700, 500}) {
    sweep_linears(
        db_, "tensorwise", {{8192, 4096, 4096}}, [](Shape) { return 1e6; },
        [&](Shape) { return watts / 500.0; }, h100(watts));
  }
  const TuningTable table = db_.table(Database::TablePart::kLinears).value();
  ASSERT_EQ(table.devices.size(), 2U);
  EXPECT_EQ(table.devices[0].power_limit_w, 500) << "measured last, asked first";
  ASSERT_EQ(table.speedups().size(), 2U);
  EXPECT_EQ(table.speedups()[0].speedup, 1);
  EXPECT_EQ(table.speedups()[1].speedup, 1.4);
}

// The library carries what the built-in database says. The rows of a copy are read, since the built-in database gives the
// runtime's tables as they are.
TEST(Builtin, ItsTableIsTheOneThatTheRuntimeCarries) {
  const TempFolder folder;
  const Database builtin = Database::builtin().value();
  ASSERT_TRUE(builtin.export_db(folder / "built-in"));
  const Database database = Database::open(folder / "built-in", OpenMode::kReadOnly).value();
  ASSERT_EQ(builtin_tables().size(), 2U);
  EXPECT_EQ(builtin_tables()[0].device_name(), "NVIDIA H100 80GB HBM3");
  EXPECT_EQ(builtin_tables()[1].device_name(), "NVIDIA H200");
  for (const TuningTable& own : builtin_tables()) {
    const DeviceClass& device = own.devices.front();
    const TuningTable table = database.table(Database::TablePart::kAll, &device).value();
    EXPECT_EQ(table.devices.size(), 2U);
    EXPECT_EQ(table.devices.front(), device) << "its own rows come first";
    EXPECT_EQ(builtin_table(device)->serialize(), table.serialize());
    for (const auto part : {Database::TablePart::kAll, Database::TablePart::kLinears}) {
      EXPECT_EQ(builtin.table(part, &device).value().serialize(),
                database.table(part, &device).value().serialize());
    }
    EXPECT_GT(table.choices().size(), own.choices().size()) << "others fill the gaps";
  }
}

TEST(Builtin, OpensForReading) {
  const auto db = Database::builtin();
  ASSERT_TRUE(db) << db.error().message;
  EXPECT_TRUE(db->check());
  EXPECT_TRUE(db->runs());
  Database writer = Database::builtin().value();
  EXPECT_FALSE(writer.begin_run({}, 0, h100(), "u", toolchain(), final_method(), {}));
}

}  // namespace
}  // namespace f8::tuning_db
