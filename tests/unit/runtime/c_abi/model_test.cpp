// Models through the C interface, on the emulated device.
#include <gtest/gtest.h>

#include <array>
#include <float8/float8.hpp>
#include <fstream>

#include "recipes/model/filter_file.hpp"
#include "recipes/reference/reference.hpp"
#include "runtime/c_abi/common.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"
#include "tuning_db/estimate/tuning_table.hpp"

namespace f8::runtime {
namespace {

using testing::Buffer;

class CAbiModel : public ::testing::Test {
 protected:
  static std::vector<float8::ModelLayer> layers() {
    std::vector<float8::ModelLayer> all(3);
    all[0].name = "layers.0.wq";
    all[0].desc.n = all[0].desc.k = 64;
    all[1].name = "layers.1.wq";
    all[1].desc = all[0].desc;
    all[2].name = "output";
    all[2].desc = all[0].desc;
    all[2].desc.n = 128;
    all[2].desc.bias = true;
    return all;
  }
  static float8::ModelOptions options() {
    float8::ModelOptions options;
    options.recipe = float8::Recipe::rowwise();
    options.tokens = 32;
    return options;
  }
  std::vector<bool> converted(const float8::ModelOptions& options) {
    const auto model = float8::Model::plan(context_, layers(), options);
    EXPECT_TRUE(model) << (model ? "" : model.error().message);
    std::vector<bool> all;
    for (size_t i = 0; model && i < model.value().layers(); ++i) {
      all.push_back(model.value().verdict(i).value().linear.has_value());
    }
    return all;
  }
  void refused(const float8::ModelOptions& options, std::string_view words) {
    const auto model = float8::Model::plan(context_, layers(), options);
    ASSERT_FALSE(model);
    EXPECT_NE(model.error().message.find(words), std::string::npos) << model.error().message;
  }
  // A description in C, changed.
  void refused(void (*change)(float8_model_desc&, float8_model_layer&, float8_linear_desc&),
               std::string_view words) {
    float8_linear_desc linear{};
    linear.struct_size = sizeof linear;
    linear.n = linear.k = 64;
    float8_model_layer layer{sizeof layer, "w", &linear, 0, 0};
    float8_model_desc desc{};
    desc.struct_size = sizeof desc;
    desc.layers = &layer;
    desc.count = 1;
    desc.tokens = 32;
    desc.recipe = "rowwise";
    change(desc, layer, linear);
    float8_model* model = nullptr;
    EXPECT_NE(float8_model_plan(context_.get(), &desc, &model), FLOAT8_OK) << words;
    EXPECT_EQ(model, nullptr);
    EXPECT_NE(std::string_view(float8_last_error()).find(words), std::string_view::npos)
        << float8_last_error();
  }
  float8::Context context_ = float8::Context::create(0, emulate()).value();
  testing::ScratchDirectory directory_;

 private:
  static float8::ContextOptions emulate() {
    float8::ContextOptions options;
    options.emulate = true;
    return options;
  }
};

TEST_F(CAbiModel, FiltersAndPlans) {
  float8::ModelOptions o = options();
  EXPECT_EQ(converted(o), (std::vector<bool>{true, true, true}));
  o.filter_fqns = {"output"};
  EXPECT_EQ(converted(o), (std::vector<bool>{true, true, false}));
  o.filter_fqns = {"auto_filter_small_kn"};
  o.policy = FLOAT8_FILTER_TORCHAO;
  EXPECT_EQ(converted(o), (std::vector<bool>{false, false, false}));
  o = options();
  std::vector<std::string> asked;
  o.callback = [&](const std::string& name, int64_t n, int64_t k) {
    asked.push_back(f8::format("{} {} {}", name, n, k));
    return n > k;
  };
  EXPECT_EQ(converted(o), (std::vector<bool>{false, false, true}));
  EXPECT_EQ(asked.back(), "output 128 64");
}

TEST_F(CAbiModel, VerdictsOfAFile) {
  FilterFile file{.recipe = "rowwise", .tokens = 32, .decisions = {}};
  file.decisions = {{"layers.*.wq", 64, 64, false, "too small"}, {"output", 64, 128, true, "fast"}};
  float8::ModelOptions o = options();
  o.verdicts = directory_.path() + "/verdicts";
  std::ofstream(o.verdicts) << file.serialize().value();
  EXPECT_EQ(converted(o), (std::vector<bool>{false, false, true}));
  o.tokens = 64;
  refused(o, "is for recipe rowwise and 32 tokens");
  std::ofstream(o.verdicts) << "{}";
  refused(o, "verdicts: not a float8 filter file");
  o.verdicts += ".none";
  refused(o, "verdicts.none");
}

TEST_F(CAbiModel, LinearsOfAFusedMlpHaveOneVerdict) {
  LinearSpeedup mlp{"rowwise", {32, 128, 64}, 1.5, 1.4, 1.6, 1e6};
  mlp.gate = true;
  TuningTable table;
  table.devices = {{.name = "a device"}};
  table.sources = {{"made"}};
  table.add(mlp);
  ASSERT_TRUE(context_.set_table(table.serialize()));
  std::vector<float8::ModelLayer> layers(3);
  for (size_t i = 0; i < layers.size(); ++i) {
    layers[i].name = std::array{"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}[i];
    layers[i].desc.n = i < 2 ? 128 : 64;
    layers[i].desc.k = i < 2 ? 64 : 128;
  }
  float8::ModelOptions o = options();
  o.filter_fqns = {"auto_filter_small_kn"};
  EXPECT_EQ(float8::Model::plan(context_, layers, o).value().converted(), 0U);
  o.fused_mlps = true;
  const auto model = float8::Model::plan(context_, layers, o).value();
  EXPECT_EQ(model.converted(), 3U);
  EXPECT_EQ(model.verdict(2).value().speedup, 1.5);
  // One linear may make gate and up.
  layers.erase(layers.begin());
  layers[0].name = "mlp.gate_up_proj";
  layers[0].desc.n = 256;
  const auto merged = float8::Model::plan(context_, layers, o).value();
  EXPECT_EQ(merged.converted(), 2U);
  EXPECT_EQ(merged.verdict(0).value().speedup, 1.5);
}

TEST_F(CAbiModel, VerdictsNameTheDeviceAndWhoseRowsTheyAreOf) {
  TuningTable table;
  table.devices = {{.name = "first A100"}, {.name = "second B200"}};
  table.sources = {{"made"}};
  table.add(LinearSpeedup{"rowwise", {32, 64, 64}, 1.5, 1.4, 1.6, 1e6});
  table.add(LinearSpeedup{"rowwise", {32, 64, 64}, 0.5, 0.4, 0.6, 1e6, 1});
  table.add(LinearSpeedup{"rowwise", {32, 64, 128}, 1.5, 1.4, 1.6, 1e6, 1});
  ASSERT_TRUE(context_.set_table(table.serialize()));
  std::vector<float8::ModelLayer> layers(2);
  for (size_t i = 0; i < layers.size(); ++i) {
    layers[i].name = std::array{"a", "b"}[i];
    layers[i].desc.n = 64;
    layers[i].desc.k = i == 0 ? 64 : 128;
  }
  float8::ModelOptions o = options();
  o.filter_fqns = {"auto_filter_small_kn"};
  using Whose = std::array<std::string, 3>;  // speedup, device, measured_on
  const auto asked = [&](size_t i) {
    const auto verdict = float8::Model::plan(context_, layers, o).value().verdict(i).value();
    return Whose{f8::format("{}", verdict.speedup), verdict.device, verdict.measured_on};
  };
  EXPECT_EQ(asked(0), (Whose{"1.5", "first A100", "first A100"}));
  EXPECT_EQ(asked(1), (Whose{"1.5", "first A100", "second B200"}));
  for (const char* name : {"second B200", "b200", "SECOND"}) {
    o.device = name;
    EXPECT_EQ(asked(0), (Whose{"0.5", "second B200", "second B200"}));
  }
  o.device = "a100";
  EXPECT_EQ(asked(1), (Whose{"1", "first A100", ""}));
  o.device = "00";
  refused(o, "float8_model_desc.device: '00' may be 'first A100', 'second B200'");
  o.device = "H100";
  const auto unknown = float8::Model::plan(context_, layers, o);
  ASSERT_FALSE(unknown);
  EXPECT_EQ(unknown.error().code, FLOAT8_NOT_FOUND);
  EXPECT_NE(unknown.error().message.find("some on 'first A100', 'second B200'"), std::string::npos)
      << unknown.error().message;
}

TEST_F(CAbiModel, VerdictsOnAttention) {
  FilterFile file{.recipe = "rowwise", .tokens = 32, .decisions = {}};
  file.decisions = {{"layers.*.wq", 64, 64, false, "too small"}, {"output", 64, 128, true, "fast"}};
  const std::string path = directory_.path() + "/verdicts";
  std::ofstream(path) << file.serialize().value();
  auto read = float8::AttentionVerdicts::read(path);
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code, FLOAT8_INVALID_ARGUMENT);
  EXPECT_NE(read.error().message.find("linears alone"), std::string::npos) << read.error().message;
  file.sequence = 16;
  file.attention = {
      {"layers.*.attention", 8, 2, 64, "fp8", "fast", Evidence::kMeasured, {1.2, 1.1, 1.3}},
      {"layers.3.attention", 8, 2, 64, "bf16", "slow"}};
  std::ofstream(path) << file.serialize().value();
  read = float8::AttentionVerdicts::read(path);
  ASSERT_TRUE(read) << read.error().message;
  const float8::AttentionVerdicts& verdicts = read.value();
  ASSERT_EQ(verdicts.size(), 2U);
  EXPECT_EQ(verdicts.at(1).value().recipe, "bf16");
  EXPECT_EQ(verdicts.at(2).error().code, FLOAT8_INVALID_ARGUMENT);
  const float8::AttentionVerdict found = verdicts.find("layers.7.attention.inner").value();
  EXPECT_EQ(found.name, "layers.*.attention");
  EXPECT_EQ(found.recipe, "fp8");
  EXPECT_EQ(found.reason, "fast");
  EXPECT_EQ(found.heads_q, 8);
  EXPECT_EQ(found.heads_kv, 2);
  EXPECT_EQ(found.head_dim, 64);
  EXPECT_EQ(found.tokens, 32);
  EXPECT_EQ(found.sequence, 16);
  EXPECT_EQ(found.speedup_high, 1.3);
  EXPECT_EQ(found.evidence, FLOAT8_EVIDENCE_MEASURED);
  const auto none = verdicts.find("decoder");
  ASSERT_FALSE(none);
  EXPECT_NE(none.error().message.find("no attention 'decoder'"), std::string::npos);
  EXPECT_EQ(float8::AttentionVerdicts::read(path + ".none").error().code, FLOAT8_NOT_FOUND);
  // Linears are decided by the same file.
  float8::ModelOptions o = options();
  o.verdicts = path;
  EXPECT_EQ(converted(o), (std::vector<bool>{false, false, true}));
}

// A context has the built-in table of the nearest class from the start, unless it is told not to.
TEST_F(CAbiModel, MeasuredVerdictsFromTheBuiltInTableOrNone) {
  std::vector<float8::ModelLayer> all(1);
  all[0].name = "w";
  all[0].desc.n = all[0].desc.k = 4096;
  float8::ModelOptions o = options();
  o.tokens = 8192;
  o.filter_fqns = {"auto_filter_small_kn"};
  const auto verdict = [&](const float8::Context& context) {
    return float8::Model::plan(context, all, o).value().verdict(0).value();
  };
  const auto measured = verdict(context_);
  EXPECT_TRUE(measured.linear);
  EXPECT_EQ(measured.evidence, FLOAT8_EVIDENCE_MEASURED);
  EXPECT_GT(measured.speedup_low, 1.02);
  EXPECT_NE(measured.reason.find("measured, bf16 "), std::string::npos);
  float8::ContextOptions without;
  without.emulate = without.no_table = true;
  const auto kept = verdict(float8::Context::create(0, without).value());
  EXPECT_FALSE(kept.linear);
  EXPECT_EQ(kept.evidence, FLOAT8_EVIDENCE_RULE);
  EXPECT_EQ(kept.speedup, 1);
  EXPECT_NE(kept.reason.find("there are no measurements"), std::string::npos);
}

// With tensor parallelism the plans are of a rank's part, and verdicts have the wire.
TEST_F(CAbiModel, RanksThatShareTheModel) {
  float8::ModelOptions o = options();
  o.tp = 2;
  std::vector<std::string> asked;
  o.callback = [&](const std::string& name, int64_t n, int64_t k) {
    asked.push_back(f8::format("{} {} {}", name, n, k));
    return true;
  };
  auto model = float8::Model::plan(context_, layers(), o);
  ASSERT_TRUE(model) << model.error().message;
  EXPECT_EQ(asked,
            (std::vector<std::string>{"layers.0.wq 32 64", "layers.1.wq 32 64", "output 64 64"}));
  const auto verdict = model.value().verdict(0).value();
  EXPECT_EQ(verdict.linear->get()->linear->desc().shape, (Shape{32, 32, 64}));
  EXPECT_GT(verdict.wire_bf16_us, 0);
  EXPECT_EQ(verdict.wire_bf16_us, verdict.exposed_bf16_us) << "nothing hides it";
  o.tp = 1;
  o.callback = {};
  const auto alone = float8::Model::plan(context_, layers(), o).value().verdict(0).value();
  EXPECT_EQ(alone.wire_bf16_us, 0);
  o.fsdp = 1024;
  const auto many = float8::Model::plan(context_, layers(), o).value().verdict(0).value();
  EXPECT_TRUE(many.wire_is_prediction);
  EXPECT_GT(many.wire_fp8_us, 0);
  EXPECT_NE(many.speedup, alone.speedup);
}

// Experts of a mixture see fewer rows than the other layers.
TEST_F(CAbiModel, ALayerMayHaveItsOwnTokens) {
  auto all = layers();
  all[1].desc.m_max = 16;
  const auto model = float8::Model::plan(context_, all, options());
  ASSERT_TRUE(model) << model.error().message;
  const auto m_max = [&](size_t i) {
    return model.value().verdict(i).value().linear->get()->linear->desc().shape.m;
  };
  EXPECT_EQ(m_max(0), 32);
  EXPECT_EQ(m_max(1), 16) << "not one plan with the layer that is alike but for M";
  EXPECT_EQ(m_max(2), 32);
}

TEST_F(CAbiModel, ItsLinearsRun) {
  auto model = float8::Model::plan(context_, layers(), options());
  ASSERT_TRUE(model) << model.error().message;
  EXPECT_EQ(model.value().converted(), 3U);
  const auto first = model.value().verdict(0).value();
  const auto second = model.value().verdict(1).value();
  EXPECT_EQ(second.name, "layers.1.wq");
  EXPECT_NE(second.reason.find("converted"), std::string::npos);
  EXPECT_EQ(first.linear->get()->linear, second.linear->get()->linear) << "alike, so one plan";
  const auto output = model.value().verdict(2).value();
  EXPECT_TRUE(output.linear->get()->linear->desc().bias);
  EXPECT_LE(output.linear->workspace_bytes(), model.value().workspace_bytes());
  EXPECT_FALSE(model.value().verdict(3));

  const auto x = reference::random_matrix(32, 64, 1);
  const auto w = reference::random_matrix(64, 64, 2);
  Buffer tx(x), tw(w), y(32 * 64 * 2), workspace(model.value().workspace_bytes());
  model = float8::Error{};  // a linear keeps its model alive
  float8::ForwardArgs args;
  args.x.data = tx.data();
  args.w.data = tw.data();
  args.y.data = y.data();
  const float8::Status status =
      first.linear->forward(with_workspace(args, workspace.data()), nullptr);
  ASSERT_TRUE(status) << status.message();
  const auto expected = reference::linear_gemm(find_recipe("rowwise").value(), Gemm::kOutput, x, w,
                                               reference::Matrix{})
                            .value();
  EXPECT_LT(reference::relative_error(expected, y.bf16()), 2.5e-3);
}

TEST_F(CAbiModel, Misuse) {
  float8::ModelOptions o = options();
  o.filter_fqns = {""};
  refused(o, "empty name");
  o = options();
  o.recipe = float8::Recipe::blockwise();
  o.filter_fqns = {"auto_filter_small_kn"};
  o.policy = FLOAT8_FILTER_TORCHAO;
  refused(o, "auto_filter_small_kn");
  refused([](auto& d, auto&, auto&) { d.layers = nullptr; }, "float8_model_desc.layers is NULL");
  refused([](auto& d, auto&, auto&) { d.struct_size = 1; }, "struct_size is 1");
  refused([](auto& d, auto&, auto&) { d.recipe = nullptr; }, "set one of recipe");
  refused([](auto& d, auto&, auto&) { d.policy = 2; }, "float8_model_desc.policy is 2");
  refused([](auto& d, auto&, auto&) { d.compile_threads = -1; }, "compile_threads is -1");
  refused([](auto& d, auto&, auto&) { d.margin = -0.5; }, "margin is -0.5");
  refused([](auto& d, auto&, auto&) { d.tokens = 0; }, "tokens is 0");
  refused([](auto& d, auto&, auto&) { d.fsdp = -1; }, "fsdp is -1");
  refused([](auto& d, auto&, auto&) { d.tp = 3; }, "no layer of the model");
  refused([](auto& d, auto&, auto&) { d.hosts = 2; }, "hosts is 2");
  refused([](auto& d, auto&, auto&) { d.network_gbit = -1; }, "the network has -1 Gbit/s");
  refused([](auto& d, auto&, auto&) { d.filter_fqn_count = 1; }, "filter_fqns is NULL");
  refused([](auto&, auto& l, auto&) { l.name = nullptr; }, "layers[0]: name is NULL");
  refused([](auto&, auto& l, auto&) { l.desc = nullptr; }, "layers[0]: desc is NULL");
  refused([](auto&, auto& l, auto&) { l.struct_size = 0; }, "struct_size is 0");
  refused([](auto&, auto&, auto& d) { d.recipe = "rowwise"; }, "layer 'w': recipe");
  refused([](auto&, auto&, auto& d) { d.m_max = -1; }, "layer 'w': -1 tokens");
  refused([](auto&, auto&, auto& d) { d.tensor_dtype = 9; }, "tensor_dtype is 9");
  refused([](auto&, auto&, auto& d) { d.k = 0; }, "in_features 0");
  EXPECT_EQ(float8_model_plan(nullptr, nullptr, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_model_layer_verdict(nullptr, 0, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_model_layer_count(nullptr), 0U);
  float8_model_destroy(nullptr);
}

}  // namespace
}  // namespace f8::runtime
