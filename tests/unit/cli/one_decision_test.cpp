// One decision: the library, asked through its C interface on the emulated device, and float8-tune give
// the same verdict, speedup, interval, evidence and words for the same question, and choose the same
// kernels.
#include <gtest/gtest.h>

#include <array>
#include <float8/float8.hpp>

#include "base/file.hpp"
#include "recipes/model/filter_file.hpp"
#include "runtime/linear/linear.hpp"
#include "tests/unit/cli/run_tool.hpp"
#include "tests/unit/tuning_db/sample.hpp"
#include "tools/tuner/search/kernel_set.hpp"
#include "tuning_db/estimate/builtin_tables.hpp"

namespace f8::testing {
namespace {

using Json = nlohmann::json;
using Words = std::vector<std::string>;
using Names = std::vector<std::string>;

// Shapes that were measured, shapes between them and beyond them, and sizes that no kernel has.
std::vector<NamedLinear> grid() {
  std::vector<NamedLinear> layers;
  for (const int64_t k : {16, 1024, 1536, 4096, 8192, 14336, 57344}) {
    for (const int64_t n : {16, 1024, 4096, 5120, 28672}) {
      layers.push_back({f8::format("layers.{}.w", layers.size()), k, n, 1});
    }
  }
  layers.push_back({"head", 4096, 4096, 1});
  layers.push_back({"odd", 4096, 1000, 1});
  return layers;
}

std::string model_file(const std::vector<NamedLinear>& layers) {
  Json list = Json::array();
  for (const NamedLinear& layer : layers) {
    list.push_back({{"fqn", layer.fqn},
                    {"in_features", layer.in_features},
                    {"out_features", layer.out_features}});
  }
  return list.dump();
}

std::vector<float8::ModelLayer> model_layers(const std::vector<NamedLinear>& layers) {
  std::vector<float8::ModelLayer> all(layers.size());
  for (size_t i = 0; i < layers.size(); ++i) {
    all[i].name = layers[i].fqn;
    all[i].desc.n = layers[i].out_features;
    all[i].desc.k = layers[i].in_features;
  }
  return all;
}

float8::ModelOptions options_of(const std::string& recipe, int64_t tokens, Names names) {
  float8::ModelOptions options;
  options.recipe = float8::Recipe::named(recipe);
  options.tokens = tokens;
  options.filter_fqns = std::move(names);
  return options;
}

class OneDecision : public ::testing::Test {
 protected:
  OneDecision() {
    float8::ContextOptions options;
    options.emulate = true;
    context_ = float8::Context::create(0, options).value();
    tool_.write("model.json", model_file(layers_));
  }

  [[nodiscard]] Json ask_tool(const std::string& recipe, int64_t tokens, const Words& more) const {
    Words words = {"filter", "--model",  "model.json",          "--recipe",
                   recipe,   "--tokens", std::to_string(tokens)};
    words.insert(words.end(), more.begin(), more.end());
    return tool_.json(words);
  }

  // The tool's JSON has 6 digits of the interval.
  void expect_same(const Json& decisions, const float8::ModelOptions& options,
                   const std::string& prefix = "") const {
    const auto model = float8::Model::plan(*context_, model_layers(layers_), options);
    ASSERT_TRUE(model) << model.error().message;
    ASSERT_EQ(decisions.size(), layers_.size());
    const Names evidences = {"measured", "interpolated", "modelled", "rule"};
    for (size_t i = 0; i < layers_.size(); ++i) {
      const auto verdict = model.value().verdict(i).value();
      const Json& d = decisions[i];
      SCOPED_TRACE(f8::format("{} m={} {}", options.recipe.settings().value().name, options.tokens,
                              d.dump()));
      EXPECT_EQ(verdict.name, d["fqn"].get<std::string>());
      EXPECT_EQ(verdict.linear.has_value(), d["convert"].get<bool>());
      EXPECT_EQ(verdict.reason, prefix + d["reason"].get<std::string>());
      EXPECT_EQ(evidences.at(static_cast<size_t>(verdict.evidence)),
                d["evidence"].get<std::string>());
      EXPECT_NEAR(verdict.speedup, d["speedup"].get<double>(), 1e-4);
      EXPECT_NEAR(verdict.speedup_low, d["speedup_lo"].get<double>(), 1e-4);
      EXPECT_NEAR(verdict.speedup_high, d["speedup_hi"].get<double>(), 1e-4);
      if (!d.contains("wire")) continue;
      const auto expect_us = [&](double us, const char* field) {
        const auto printed = d["wire"][field].get<double>();
        EXPECT_NEAR(us, printed, 1e-3 * printed) << field;
      };
      expect_us(verdict.wire_bf16_us, "bf16_us");
      expect_us(verdict.wire_fp8_us, "fp8_us");
      expect_us(verdict.exposed_bf16_us, "bf16_exposed_us");
      expect_us(verdict.exposed_fp8_us, "fp8_exposed_us");
    }
  }

  // Small K and N lose, large ones win; one shape is another than the built-in one.
  void make_database() const {
    namespace db = tuning_db;
    auto database = db::Database::open(tool_.path() / "my.db", db::OpenMode::kCreate).value();
    const auto bf16_ns = [](Shape s) {
      return static_cast<double>(s.m) * static_cast<double>(s.n) * static_cast<double>(s.k) * 1e-5;
    };
    db::sweep_linears(database, "rowwise",
                      {{8192, 4096, 4096}, {8192, 1024, 1024}, {4096, 4096, 4096}}, bf16_ns,
                      [](Shape s) { return s.n <= 1024 ? 0.7 : 1.9; });
    const Problem gemm = db::gemm(8192, 4096, 4096, "rowwise");
    db::sweep(database, {{gemm, db::generated("128x128s6c1x2w2g16")}, {gemm, db::heuristic(3)}},
              [](const db::TrialKey& cell) {
                return db::timed(cell.candidate.impl == db::Impl::kGenerated ? 200 : 210);
              });
  }

  std::vector<NamedLinear> layers_ = grid();
  std::optional<float8::Context> context_;
  Tool tool_;
};

TEST_F(OneDecision, OverTheGridFromTheBuiltInTable) {
  int64_t converted = 0;
  std::set<std::string> evidences;
  for (const Recipe& recipe : builtin_recipes()) {
    for (const int64_t m : {1, 1000, 2048, 8192, 12288, 65536, 131072}) {
      const Json decisions = ask_tool(recipe.name, m, {"--filter-fqns", "head"})["decisions"];
      expect_same(decisions, options_of(recipe.name, m, {"head", "auto_filter_small_kn"}));
      for (const Json& d : decisions) {
        converted += d["convert"].get<bool>();
        evidences.insert(d["evidence"].get<std::string>());
      }
    }
  }
  // The grid holds every kind of answer.
  EXPECT_GT(converted, 100);
  EXPECT_EQ(evidences.size(), 4U);
}

// The ranks that share a model, with names that say how.
TEST_F(OneDecision, WithTheWire) {
  layers_ = {{"layers.0.attention.wq", 4096, 4096, 1},
             {"layers.0.attention.wk", 4096, 1024, 1},
             {"layers.0.feed_forward.w2", 14336, 4096, 1},
             {"layers.0.router", 4096, 64, 1},
             {"output", 4096, 128256, 1}};
  tool_.write("model.json", model_file(layers_));
  for (const Recipe& recipe : builtin_recipes()) {
    for (const auto& [fsdp, tp, hosts] : std::vector<std::array<int64_t, 3>>{
             {2, 1, 0}, {1, 8, 1}, {64, 8, 0}, {16384, 1, 0}, {8, 2, 16}, {1, 3, 1}}) {
      Words more = {"--fsdp", std::to_string(fsdp), "--tp", std::to_string(tp)};
      if (hosts != 0) more.insert(more.end(), {"--hosts", std::to_string(hosts)});
      const Json result = ask_tool(recipe.name, 4096, more);
      float8::ModelOptions options = options_of(recipe.name, 4096, {"auto_filter_small_kn"});
      options.fsdp = fsdp;
      options.tp = tp;
      options.hosts = hosts;
      expect_same(result["decisions"], options);
    }
  }
}

TEST_F(OneDecision, UnderTorchaosRuleWithAndWithoutTheFlag) {
  for (const char* recipe : {"rowwise", "tensorwise"}) {
    for (const bool flag : {false, true}) {
      Names names = {"head"};
      if (flag) names.emplace_back("auto_filter_small_kn");
      const Json result = ask_tool(
          recipe, 8192,
          {"--policy", "torchao", "--filter-fqns", f8::format("{}", fmt::join(names, ","))});
      float8::ModelOptions options = options_of(recipe, 8192, names);
      options.policy = FLOAT8_FILTER_TORCHAO;
      expect_same(result["decisions"], options);
    }
  }
}

TEST_F(OneDecision, FromADatabaseOfTheUsersExportedAsATable) {
  make_database();
  ASSERT_EQ(tool_({"db", "export", "--db", "my.db", "--format", "table", "-o", "table"}).code, 0);
  const auto hash = context_->load_table(tool_.path() / "table");
  ASSERT_TRUE(hash) << hash.error().message;
  const auto own = tool_.json({"db", "info", "--db", "my.db"})["table_hash"].get<std::string>();
  EXPECT_EQ(f8::format("{:016x}", hash.value()), own.substr(0, 16));
  for (const char* recipe : {"rowwise", "tensorwise"}) {
    for (const int64_t m : {512, 4096, 8192, 20000}) {
      const Json result = ask_tool(recipe, m, {"--db", "my.db"});
      expect_same(result["decisions"], options_of(recipe, m, {"auto_filter_small_kn"}));
    }
  }
  // The user's row counts, not the built-in one.
  const Json rowwise = ask_tool("rowwise", 8192, {"--db", "my.db"})["decisions"];
  EXPECT_EQ(rowwise[17]["speedup"], 1.9) << rowwise[17].dump();
  EXPECT_EQ(rowwise[17]["evidence"], "measured");
}

// A filter file stands for the rule, so the flag may stand beside it; it keeps all that the tool said.
TEST_F(OneDecision, FromAFilterFileWithAndWithoutTheFlag) {
  const Json result =
      ask_tool("delayed", 65536, {"--filter-fqns", "head", "--verdicts", "model.filter"});
  for (const Names& names : {Names{"head"}, Names{"head", "auto_filter_small_kn"}}) {
    float8::ModelOptions options = options_of("delayed", 65536, names);
    options.verdicts = tool_.path() / "model.filter";
    Json expected = result["decisions"];
    for (Json& d : expected) {
      const auto fqn = d["fqn"].get<std::string>();
      const auto reason = d["reason"].get<std::string>();
      const bool by_file = fqn != "head" && fqn != "odd";
      d["reason"] = (by_file ? "by the filter file: " : "") + reason;
    }
    expect_same(expected, options);
  }
}

// A table of its own in the library, one of the database in the tool.
TEST_F(OneDecision, KernelsAreThoseOfTheDatabasesTable) {
  namespace rt = runtime;
  const auto context = rt::Context::create(0, {.emulate = true}).value();
  const TuningTable table = tuning_db::Database::builtin()
                                .value()
                                .table(tuning_db::Database::TablePart::kAll,
                                       &tuning_db::builtin_tables().front().devices.front())
                                .value();
  for (const Recipe& recipe : builtin_recipes()) {
    for (const Shape shape :
         {Shape{8192, 4096, 4096}, Shape{2048, 1024, 8192}, Shape{16384, 28672, 8192},
          Shape{3000, 5120, 4096}, Shape{1, 16, 16}, Shape{131072, 8192, 28672}}) {
      rt::LinearDesc desc;
      desc.shape = shape;
      desc.recipe = recipe;
      const auto linear = rt::Linear::plan(context, desc).value();
      for (const Gemm gemm : kGemms) {
        const auto chosen = tuner::choose_gemm(recipe, gemm, shape, &table);
        ASSERT_TRUE(chosen) << chosen.error().message;
        rt::GemmChoice choice = chosen->choice;
        if (choice.heuristic == kRankedFirst) choice.heuristic = 0;  // as emulated
        EXPECT_EQ(linear->choice(gemm), choice)
            << recipe.name << " " << to_string(gemm) << " " << to_string(shape);
      }
    }
  }
}

}  // namespace
}  // namespace f8::testing
