// Benchmarks from end to end on a fake device: what they compare, and what they say about it.
#include "tools/tuner/search/bench/bench.hpp"

#include "base/file.hpp"
#include "tests/unit/tools/backend/gpu_backend_fixture.hpp"
#include "tools/tuner/backend/toolchain.hpp"

namespace f8::tuner {
namespace {

using testing::g_fakes;
using testing::GpuBackendTest;

class BenchTest : public GpuBackendTest {
 protected:
  void SetUp() override {
    GpuBackendTest::SetUp();
    folder_ = make_temp_directory(std::filesystem::temp_directory_path(), "bench-test").value();
    auto cache = codegen::CubinCache::open(
        folder_, [](const codegen::KernelSource& source) -> Result<codegen::Cubin> {
          codegen::Cubin cubin;
          cubin.key = source.key;
          cubin.entry = source.entry;
          cubin.image.resize(16);
          return cubin;
        });
    ASSERT_TRUE(cache) << cache.error().message;
    compiler_ = std::make_unique<CompileAhead>(std::move(*cache), 1);
    bench_ = std::make_unique<Bench>(
        *backend_, *compiler_,
        BenchOptions{.screen_ms = 0.1, .final_s = 0.002, .keep = 3, .linears = {}, .warm_s = 0},
        [](const std::string&) {});
  }
  void TearDown() override {
    bench_.reset();
    compiler_.reset();
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
    GpuBackendTest::TearDown();
  }
  std::filesystem::path folder_;
  std::unique_ptr<CompileAhead> compiler_;
  std::unique_ptr<Bench> bench_;
};

BenchRow row_of(Impl impl, double median_ns, std::optional<double> ratio,
                tuning_db::TrialState state = tuning_db::TrialState::kOk) {
  BenchRow row;
  row.candidate.impl = impl;
  row.result.state = state;
  row.result.timing = tuning_db::Timing{.median_ns = median_ns};
  if (ratio) row.result.ratio = tuning_db::Ratio{.pair_uuid = "", .ratio = *ratio};
  return row;
}

TEST(FastestRow, WinsTheBlocks) {
  std::vector<BenchRow> rows = {row_of(Impl::kGenerated, 108, std::nullopt),  // the reference
                                row_of(Impl::kGenerated, 110, 200.0 / 190),   // by median slower
                                row_of(Impl::kCublasLt, 90, 0.9), row_of(Impl::kCublasLt, 95, 0.97),
                                row_of(Impl::kCublasLt, 80, 2.0, tuning_db::TrialState::kWrong)};
  EXPECT_EQ(fastest_row(rows, {Impl::kGenerated}), 1u);
  EXPECT_EQ(fastest_row(rows, {Impl::kCublasLt}), 3u) << "who computes wrongly does not count";
  EXPECT_EQ(fastest_row(rows, {Impl::kCublasLt, Impl::kGenerated}), 1u);
  EXPECT_EQ(fastest_row(rows, {Impl::kCublasLtTensorwise}), std::nullopt);
  rows[1].result.ratio->ratio = 0.99;
  EXPECT_EQ(fastest_row(rows, {Impl::kGenerated}), 0u) << "the reference's ratio is 1";
  for (BenchRow& row : rows) row.result.ratio.reset();
  EXPECT_EQ(fastest_row(rows, {Impl::kGenerated}), 0u) << "by medians";
  EXPECT_EQ(fastest_row(rows, {Impl::kCublasLt}), 2u) << "by medians";
}

TEST_F(BenchTest, TheBaselineOfARowwiseMatmulMayTakeOneScale) {
  const auto rowwise = bench_->matmul(problem(Op::kOutput, "rowwise", {64, 48, 80}), {});
  ASSERT_TRUE(rowwise) << rowwise.error().message;
  EXPECT_TRUE(rowwise->failed.empty()) << rowwise->failed.front().result.reason;
  for (const char* role : {"generated", "cublaslt best", "cublaslt tensorwise best", "baseline",
                           "cublaslt first", "cublaslt bf16"}) {
    EXPECT_NE(rowwise->row(role), nullptr) << role;
  }
  EXPECT_EQ(rowwise->row("cublaslt tensorwise best")->candidate.impl, Impl::kCublasLtTensorwise);
  ASSERT_TRUE(rowwise->row("generated")->to_baseline);
  EXPECT_NEAR(rowwise->row("baseline")->to_baseline->ratio, 1, 1e-9);
  EXPECT_TRUE(rowwise->no_baseline.empty());

  const auto tensorwise = bench_->matmul(problem(Op::kOutput, "tensorwise", {64, 48, 80}), {});
  ASSERT_TRUE(tensorwise) << tensorwise.error().message;
  EXPECT_EQ(tensorwise->row("cublaslt tensorwise best"), nullptr);
  EXPECT_NE(tensorwise->row("cublaslt best"), nullptr);
}

TEST_F(BenchTest, EpiloguesAreComparedWithTheFastestPlainKernel) {
  Problem p = problem(Op::kGradWeight, "tensorwise", {64, 48, 80});
  p.d = Dtype::kF32;
  const std::vector<Epilogue> wanted = {{.bias = true}, {.add = true}, {}, {.bias = true}};
  const auto bench = bench_->epilogues(p, wanted);
  ASSERT_TRUE(bench) << bench.error().message;
  EXPECT_TRUE(bench->failed.empty()) << bench->failed.front().result.reason;
  EXPECT_EQ(bench->rows.size(), 9u) << "three of each";
  ASSERT_EQ(bench->costs.size(), 3u) << "plain, bias, add";
  EXPECT_EQ(bench->costs[0].epilogue, Epilogue{});
  EXPECT_EQ(bench->costs[1].epilogue, (Epilogue{.bias = true}));
  EXPECT_EQ(bench->costs[2].epilogue, (Epilogue{.add = true}));
  for (const EpilogueCost& cost : bench->costs) {
    const BenchRow& row = bench->rows[cost.row];
    EXPECT_EQ(row.candidate.epilogue, cost.epilogue);
    EXPECT_TRUE(row.is(to_string(cost.epilogue)));
    ASSERT_TRUE(cost.over_plain);
    EXPECT_NEAR(cost.over_plain->ratio, 1, 1e-6) << "every launch takes the same here";
  }
}

TEST_F(BenchTest, ALinearIsSearchedOrChosen) {
  const Problem p = problem(Op::kLinear, "tensorwise", {64, 48, 80});
  const auto searched = bench_->linear(p, true, false);
  ASSERT_TRUE(searched) << searched.error().message;
  EXPECT_GT(searched->linears, 1);
  EXPECT_GT(searched->kernels.size(), 3u);
  ASSERT_TRUE(searched->untuned);
  EXPECT_NEAR(searched->untuned->ratio, 1, 1e-6) << "every launch takes the same here";
  const auto chosen = bench_->linear(p, false, false);
  ASSERT_TRUE(chosen) << chosen.error().message;
  EXPECT_EQ(chosen->linears, 0);
  EXPECT_FALSE(chosen->untuned) << "nothing was searched";
  EXPECT_EQ(choices_text(chosen->choices), choices_text(searched->untuned_choices));
  for (const Gemm gemm : kGemms) {
    const auto prior =
        prior_choices(problem(to_op(gemm), "tensorwise", p.shape()), h100(), {}, 0).value();
    EXPECT_EQ(config_text(chosen->choices[static_cast<size_t>(gemm)]), config_text(prior.front()));
  }
}

TEST_F(BenchTest, ExpertsAreSearchedOrChosen) {
  const Problem p = Problem::make(Op::kLinear, find_recipe("rowwise_with_gw_hp").value(),
                                  {333, 48, 80}, {5, kZipf})
                        .value();
  const auto searched = bench_->linear(p, true, false);
  ASSERT_TRUE(searched) << searched.error().message;
  EXPECT_GT(searched->linears, 1);
  ASSERT_EQ(searched->kernels.size(), 7u);
  EXPECT_EQ(searched->kernels[3].name, "gemm output");
  ASSERT_TRUE(searched->bf16.timing) << searched->bf16.reason;
  ASSERT_TRUE(searched->float8.ratio);
  // All launches take the same time here: the baseline is the layout and three grouped GEMMs, not three
  // calls for each of five groups.
  for (const runtime::GemmChoice& choice : searched->bf16_choices) {
    EXPECT_EQ(choice.provider, Provider::kGenerated);
  }
  EXPECT_NEAR(searched->float8.ratio->ratio, 4.0 / 7, 1e-6);
  const auto chosen = bench_->linear(p, false, false);
  ASSERT_TRUE(chosen) << chosen.error().message;
  EXPECT_EQ(chosen->linears, 0);
  EXPECT_EQ(choices_text(chosen->choices), choices_text(searched->untuned_choices));
}

// On the fake device the emulated kernels compute, so that the check before the timing is real.
constexpr AttentionRecipe kForward = AttentionRecipe::kFp8Forward, kFp8 = AttentionRecipe::kFp8;
using Names = std::vector<std::string>;

Names names_of(const std::vector<KernelShare>& kernels) {
  Names names;
  for (const KernelShare& kernel : kernels) {
    names.push_back(kernel.name);
    EXPECT_GT(kernel.ns, 0) << kernel.name;
    EXPECT_NE(kernel.bytes > 0, kernel.products > 0) << kernel.name;
  }
  return names;
}

// Launches of the fake device take the same time each, and so do calls of the library.
TEST_F(BenchTest, AttentionIsTimedBesideBf16AndByLaunch) {
  testing::give_cudnn(*backend_->context());
  const std::pair<AttentionRecipe, AttentionShape> cases[] = {
      {kForward, {.tokens = 130, .batch = 2, .heads_q = 2, .heads_kv = 1, .head_dim = 64}},
      {kForward, {.tokens = 40, .heads_q = 1, .heads_kv = 1, .causal = false}},
      {kFp8, {.tokens = 130, .heads_q = 2, .heads_kv = 1}},
      {kFp8, {.tokens = 40, .heads_q = 1, .heads_kv = 1, .head_dim = 256, .causal = false}}};
  for (const auto& [recipe, shape] : cases) {
    const bool fp8 = recipe == kFp8;
    const auto bench =
        bench_->attention(attention_problem(Op::kAttentionForward, recipe, shape).value());
    ASSERT_TRUE(bench) << bench.error().message;
    EXPECT_EQ(bench->no_bf16, "");
    Names own = {"sum k", "cast q,k,v", "forward", "dequantize q,k,v", "backward in bf16"};
    if (fp8) own = {"sum k", "cast q,k,v", "forward", "cast dO", "dQ", "dK,dV"};
    const bool apart = fp8 && shape.head_dim == 256;
    if (apart) own = {"sum k", "cast q,k,v", "forward", "cast dO", "dQ", "dK", "dV"};
    EXPECT_EQ(names_of(bench->kernels), own);
    const double launch_ns = bench->kernels[2].ns;
    const auto expect = [&](const AttentionTimes& times, int launches, int of_bf16) {
      EXPECT_GT(times.float8.sqnr_db.value_or(0), 18);
      EXPECT_LT(times.float8.sqnr_db.value_or(0), 40);
      EXPECT_NEAR(times.float8.timing->median_ns, launches * launch_ns, 1);
      ASSERT_TRUE(times.bf16 && times.float8.ratio);
      EXPECT_GT(times.bf16->sqnr_db.value_or(0), 40) << "it is in bf16";
      EXPECT_NEAR(times.bf16->timing->median_ns, of_bf16 * launch_ns, 1);
      EXPECT_NEAR(times.float8.ratio->ratio, 1.0 * of_bf16 / launches, 1e-6);
    };
    expect(bench->forward, 3, 1);
    ASSERT_TRUE(bench->both);
    expect(*bench->both, static_cast<int>(own.size()), 2);
    const int64_t rows = shape.batch * shape.heads_q * shape.tokens;
    EXPECT_GT(bench->saved_bytes, static_cast<size_t>(rows * shape.head_dim * 2 + rows * 4));
    ASSERT_EQ(bench->backward.has_value(), fp8);
    if (fp8) expect(*bench->backward, apart ? 4 : 3, 1);
  }
  EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
}

TEST_F(BenchTest, AttentionWithoutBf16IsTimedAlone) {
  if (runtime::Attention::plan(
          backend_->context(),
          {.heads_q = 1, .heads_kv = 1, .head_dim = 64, .recipe = AttentionRecipe::kBf16})) {
    GTEST_SKIP() << "this machine has cuDNN and a GPU";
  }
  const AttentionShape shape{.tokens = 40, .heads_q = 1, .heads_kv = 1, .head_dim = 64};
  for (const AttentionRecipe recipe : kAttentionRecipes) {
    const auto bench =
        bench_->attention(attention_problem(Op::kAttentionForward, recipe, shape).value());
    ASSERT_TRUE(bench) << bench.error().message;
    EXPECT_FALSE(bench->both);
    EXPECT_NE(bench->no_bf16.find("no attention in bf16"), std::string::npos) << bench->no_bf16;
    EXPECT_TRUE(bench->forward.float8.is_timed());
    EXPECT_FALSE(bench->forward.bf16 || bench->forward.float8.ratio);
    ASSERT_EQ(bench->backward.has_value(), recipe == kFp8);
    EXPECT_EQ(names_of(bench->kernels),
              recipe == kFp8 ? Names({"sum k", "cast q,k,v", "forward", "cast dO", "dQ", "dK,dV"})
                             : Names({"sum k", "cast q,k,v", "forward", "dequantize q,k,v"}));
    const auto accuracy = bench_->attention_accuracy(recipe, shape);
    ASSERT_TRUE(accuracy) << accuracy.error().message;
    EXPECT_EQ(accuracy->size(), kAttentionData.size() * (recipe == kFp8 ? 4 : 1));
  }
}

// What decides about attention is the row of both together.
TEST_F(BenchTest, AttentionsRowsAreKeptWithTheirPairs) {
  testing::give_cudnn(*backend_->context());
  const Problem problem =
      attention_problem(Op::kAttentionForward, kFp8, {.tokens = 40, .head_dim = 64}).value();
  const auto bench = bench_->attention(problem);
  ASSERT_TRUE(bench) << bench.error().message;
  std::vector<tuning_db::Accuracy> accuracy;
  for (const char* tensor : {"O", "dQ", "dK", "dV"}) {
    accuracy.push_back({"normal", tensor, 25, 0.999, 0.01});
  }
  const std::vector<MeasuredTrial> trials = trials_of(*bench, accuracy);
  ASSERT_EQ(trials.size(), 6U);
  auto db = tuning_db::Database::open(folder_ / "rows.f8db", tuning_db::OpenMode::kCreate).value();
  std::vector<tuning_db::TrialKey> keys;
  for (const MeasuredTrial& trial : trials) keys.push_back(trial.key);
  const auto run =
      db.begin_run({"bench"}, 1, h100(), std::string(32, '0'), current_toolchain("580", 13000, "0"),
                   to_method(bench_->attention_method(1024)), keys);
  ASSERT_TRUE(run) << run.error().message;
  ASSERT_TRUE(keep(db, run->uuid, trials));
  EXPECT_EQ(db.runs().value().front().state, "done");
  const std::pair<Op, size_t> tensors[] = {
      {Op::kAttentionForward, 1}, {Op::kAttentionBackward, 3}, {Op::kAttention, 4}};
  for (const auto& [op, count] : tensors) {
    Problem operation = problem;
    operation.op = op;
    const auto rows = db.trials(operation).value();
    ASSERT_EQ(rows.size(), 2U) << operation.key();
    const bool first = rows[0].candidate.impl == tuning_db::Impl::kFloat8;
    const tuning_db::TrialRow& float8 = rows[first ? 0 : 1];
    const tuning_db::TrialRow& bf16 = rows[first ? 1 : 0];
    EXPECT_EQ(float8.fidelity, "final");
    EXPECT_EQ(float8.result.accuracy.size(), count);
    ASSERT_TRUE(float8.result.ratio);
    EXPECT_EQ(float8.result.ratio->pair_uuid, bf16.uuid);
    EXPECT_EQ(bf16.candidate.config, R"({"backend":"cudnn"})");
  }
}

// A sweep compiles the kernels ahead that a plan loads.
TEST_F(BenchTest, AttentionsKernelsAreThoseThatItsPlanLoads) {
  std::set<std::string, std::less<>> ahead = cuda_.keys;
  for (const AttentionRecipe recipe : kAttentionRecipes) {
    for (const int64_t head_dim : {64, 128, 256}) {
      for (const bool causal : {true, false}) {
        const AttentionShape shape{.tokens = 40, .head_dim = head_dim, .causal = causal};
        for (const codegen::KernelSpec& spec : attention_kernels(recipe, shape)) {
          ahead.insert(codegen::key(spec));
        }
        const auto problem = attention_problem(Op::kAttentionForward, recipe, shape);
        ASSERT_TRUE(backend_->open(*problem));
        EXPECT_EQ(cuda_.keys, ahead) << problem->key();
      }
    }
  }
}

TEST_F(BenchTest, AttentionsAccuracyIsInItsBudgetOnAllData) {
  testing::give_cudnn(*backend_->context());
  const Names tensors = {"O", "dQ", "dK", "dV"};
  for (const AttentionRecipe recipe : kAttentionRecipes) {
    for (const bool causal : {true, false}) {
      const AttentionShape shape{.tokens = 256, .heads_q = 2, .heads_kv = 2, .causal = causal};
      const auto accuracy = bench_->attention_accuracy(recipe, shape);
      ASSERT_TRUE(accuracy) << accuracy.error().message;
      ASSERT_EQ(accuracy->size(), kAttentionData.size() * tensors.size());
      for (size_t i = 0; i < accuracy->size(); ++i) {
        const tuning_db::Accuracy& a = (*accuracy)[i];
        EXPECT_EQ(a.data, kAttentionData[i / tensors.size()]);
        EXPECT_EQ(a.tensor, tensors[i % tensors.size()]);
        EXPECT_GT(a.sqnr_db, a.tensor == "O" || a.tensor == "dV" ? 20 : 18) << a.data << a.tensor;
        EXPECT_LT(a.sqnr_db, 50) << a.data << ": as exact as bf16, so it was not in fp8";
        EXPECT_GT(a.cosine, 0.99) << a.data << a.tensor;
        EXPECT_GT(a.rmse, 0) << a.data << a.tensor;
      }
    }
  }
}

// The derivative of sum(O dO) by finite differences.
TEST(AttentionData, ExactGradientsAreThoseOfO) {
  const AttentionShape shape{.tokens = 5, .batch = 2, .heads_q = 4, .heads_kv = 2, .head_dim = 64};
  const AttentionData data = attention_data("sharp", shape, 3);
  const auto loss = [&](const AttentionData& of) {
    const std::vector<double> o = exact_attention(shape, of, false).o;
    double sum = 0;
    for (int64_t i = 0; i < std::ssize(o); ++i) {
      const int64_t c = i % 64, h = i / 64 % 4, t = i / 64 / 4 % 5, b = i / 64 / 4 / 5;
      sum += o[static_cast<size_t>(i)] *
             decode_bf16(of.dout[static_cast<size_t>(((b * 4 + h) * 5 + t) * 64 + c)]);
    }
    return sum;
  };
  const AttentionResults<double> exact = exact_attention(shape, data, true);
  const auto expect = [&](std::vector<uint16_t> AttentionData::*operand,
                          const std::vector<double>& gradient) {
    ASSERT_EQ(gradient.size(), (data.*operand).size());
    for (size_t i = 3; i < gradient.size(); i += 97) {
      AttentionData up = data, down = data;
      uint16_t& above = (up.*operand)[i];
      uint16_t& below = (down.*operand)[i];
      const float x = decode_bf16(above);
      above = encode_bf16(x + 0.03F);
      below = encode_bf16(x - 0.03F);
      const double step = decode_bf16(above) - decode_bf16(below);
      EXPECT_NEAR((loss(up) - loss(down)) / step, gradient[i], 2e-3) << i;
    }
  };
  expect(&AttentionData::q, exact.dq);
  expect(&AttentionData::k, exact.dk);
  expect(&AttentionData::v, exact.dv);
}

TEST(AttentionData, AccuracyIsThatOfTheDifference) {
  const std::vector<float> actual = {1.1F, 0, 2};
  const std::vector<double> exact = {1, 0, 2};
  const tuning_db::Accuracy a = accuracy_of("normal", "O", actual, exact);
  EXPECT_NEAR(a.sqnr_db, 10 * std::log10(5 / 0.01), 1e-4);
  EXPECT_NEAR(a.rmse, 0.1 / std::sqrt(3.0), 1e-6);
  EXPECT_NEAR(a.cosine, 5.1 / std::sqrt(5 * 5.21), 1e-6);
  EXPECT_EQ(accuracy_of("normal", "O", std::vector{1.0F}, std::vector{1.0}).rmse, 0);
}

TEST_F(GpuBackendTest, AttentionThatWritesNothingOrDoesNotFitSaysWhy) {
  const AttentionShape shape{.tokens = 64, .heads_q = 2, .heads_kv = 1};
  const auto problem = [](Op op, AttentionRecipe recipe, const AttentionShape& of) {
    return attention_problem(op, recipe, of).value();
  };
  testing::give_cudnn(*backend_->context());
  for (const Problem& each : {problem(Op::kAttentionForward, AttentionRecipe::kFp8Forward, shape),
                              problem(Op::kAttentionBackward, AttentionRecipe::kFp8, shape),
                              problem(Op::kAttention, AttentionRecipe::kFp8, shape)}) {
    ASSERT_TRUE(backend_->open(each));
    EXPECT_FALSE(backend_->add({.impl = Impl::kFloat8Reused}));
    ASSERT_TRUE(backend_->add({.impl = Impl::kFloat8}));
    cuda_.emulate = false;
    const auto nothing = backend_->verify(0);
    ASSERT_TRUE(nothing);
    EXPECT_FALSE(nothing->right);
    EXPECT_NE(nothing->what.find("not finite"), std::string::npos) << nothing->what;
    cuda_.emulate = true;
  }
  const AttentionShape large{.tokens = 1 << 20, .heads_q = 32, .heads_kv = 32};
  const auto opened =
      backend_->open(problem(Op::kAttentionForward, AttentionRecipe::kFp8Forward, large));
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().code, ErrorCode::kOutOfMemory);
}

// All three are timed, and the figures of the two casts fit together and to the copy's.
void expect_casts(const Bench::CastRows& rows, std::array<Impl, 2> casts, const std::string& what) {
  const CastRow& copy = rows[2];
  EXPECT_EQ(copy.impl, Impl::kCopy);
  for (const CastRow& row : rows) {
    ASSERT_TRUE(row.result.timing) << what << " " << to_string(row.impl) << row.result.reason;
  }
  const auto ns = [](const CastRow& row) { return row.result.timing->median_ns; };
  EXPECT_FALSE(copy.of_copy);
  for (size_t i = 0; i < casts.size(); ++i) {
    EXPECT_EQ(rows[i].impl, casts[i]) << what;
    ASSERT_TRUE(rows[i].of_copy) << what;
    EXPECT_NEAR(rows[i].of_copy->ratio, rows[i].bytes / ns(rows[i]) / (copy.bytes / ns(copy)),
                1e-9);
  }
  ASSERT_TRUE(rows[1].result.ratio);
  EXPECT_NEAR(rows[1].result.ratio->ratio, ns(rows[0]) / ns(rows[1]), 1e-6);
}

// Under every recipe both ways to cast leave the same bytes, and their figures fit together.
TEST_F(BenchTest, AListOfWeightsIsCastTogetherAndOneByOne) {
  const auto weights = parse_weight_list("64,48*30;32,80;272,144").value();
  for (const Recipe& recipe : builtin_recipes()) {
    const auto rows = bench_->casts(recipe, weights);
    ASSERT_TRUE(rows) << recipe.name << ": " << rows.error().message;
    expect_casts(*rows, {Impl::kCastEach, Impl::kCastList}, recipe.name);
    const auto& [each, list, copy] = *rows;
    for (const CastRow* row : {&each, &list}) {
      EXPECT_EQ(row->bytes, cast_bytes(recipe, weights).value());
    }
    // All launches take the same time, so the few of a list are faster.
    EXPECT_GT(list.result.ratio->ratio, 5) << recipe.name;
  }
  EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
}

TEST_F(BenchTest, AProducerIsCastAsItIsComputedAndApart) {
  const auto producers = parse_producers(
      "glu,glu_backward/gelu_tanh,activation/gelu,activation_backward/relu2,rms_norm,layer_norm");
  ASSERT_TRUE(producers);
  for (const Recipe& recipe : builtin_recipes()) {
    for (const Producer& producer : *producers) {
      const runtime::MatrixSize size{136, 144};
      const std::string what = recipe.name + " " + to_string(producer);
      const auto rows = bench_->producer(recipe, producer, size);
      ASSERT_TRUE(rows) << what << ": " << rows.error().message;
      expect_casts(*rows, {Impl::kProduceApart, Impl::kProduce}, what);
      const ProducerBytes bytes = bytes_of(producer, recipe, size).value();
      EXPECT_EQ((*rows)[0].bytes, bytes.apart) << what;
      EXPECT_EQ((*rows)[1].bytes, bytes.fused) << what;
    }
  }
  EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
}

}  // namespace
}  // namespace f8::tuner
