// What training sends. The program's own float8_gather_tensor and the like come before the library's:
// they count, and call it.
#include <dlfcn.h>

#include <atomic>
#include <fstream>

#include "examples/train/parameters.hpp"
#include "examples/train/trainer.hpp"
#include "train_test.hpp"
#include "tuning_db/estimate/tuning_table.hpp"

namespace train {
namespace {

// What all ranks together have asked for.
struct Sent {
  std::atomic<int64_t> q, qt;       // elements of whole tensors in fp8
  std::atomic<int64_t> in_shards;   // those of qt that stay as they arrive
  std::atomic<int64_t> reductions;  // of maxima
  std::atomic<int64_t> words;       // of them
  std::atomic<int64_t> bf16;        // elements gathered in bf16
  std::atomic<int64_t> gradients;   // elements of whole gradients, in fp32

  void clear() { q = qt = in_shards = reductions = words = bf16 = gradients = 0; }
};
Sent sent;

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

int64_t elements(const float8_tensor& tensor) {
  return tensor.rows * tensor.cols;
}

}  // namespace
}  // namespace train

extern "C" {

float8_status float8_gather_tensor(float8_context* context, const float8_gather_args* args,
                                   void* workspace, float8_stream stream) {
  using train::sent;
  const float8_tensor& whole = *args->whole;
  if (whole.q != nullptr) sent.q += train::elements(whole);
  if (whole.qt != nullptr) sent.qt += train::elements(whole);
  if (whole.qt != nullptr && whole.qt_shards > 1) sent.in_shards += train::elements(whole);
  static auto* const gather = train::next<decltype(float8_gather_tensor)>("float8_gather_tensor");
  return gather(context, args, workspace, stream);
}

float8_status float8_amax_sync(uint32_t* amax_bits, size_t count, float8_nccl_comm communicator,
                               float8_stream stream) {
  ++train::sent.reductions;
  train::sent.words += static_cast<int64_t>(count);
  static auto* const sync = train::next<decltype(float8_amax_sync)>("float8_amax_sync");
  return sync(amax_bits, count, communicator, stream);
}

float8_status float8_all_gather(const void* from, void* to, size_t count, int32_t dtype,
                                float8_nccl_comm communicator, float8_stream stream) {
  if (dtype == FLOAT8_BF16) train::sent.bf16 += static_cast<int64_t>(count);
  static auto* const gather = train::next<decltype(float8_all_gather)>("float8_all_gather");
  return gather(from, to, count, dtype, communicator, stream);
}

float8_status float8_reduce_scatter(const void* from, void* to, size_t count, int32_t dtype,
                                    float8_nccl_comm communicator, float8_stream stream) {
  train::sent.gradients += static_cast<int64_t>(count);
  static auto* const scatter =
      train::next<decltype(float8_reduce_scatter)>("float8_reduce_scatter");
  return scatter(from, to, count, dtype, communicator, stream);
}

}  // extern "C"

namespace train {
namespace {

TrainConfig wide(const std::string& recipe, int64_t fsdp, int64_t tp = 1) {
  TrainConfig config;
  config.recipe = recipe;
  config.hidden = 256;
  config.ffn = 512 * tp;
  config.layers = 1;
  config.context = 4;
  config.tokens = 16 * fsdp;
  config.fsdp = fsdp;
  config.tp = tp;
  return config;
}

std::unique_ptr<Backend> backend_with(int rank, const std::filesystem::path& table) {
  auto backend = make_host_backend(rank);
  if (!table.empty()) static_cast<void>(backend->context().load_table(table.string()).value());
  return backend;
}

// Counts what a step sends, the second one, since the first of delayed scaling reduces more. Gives the
// losses of both.
std::vector<float> count_a_step(TrainConfig config, const std::filesystem::path& table = {}) {
  Text text;
  text.bytes = std::string(1000, 'a');
  text.hash = "fixed";
  std::vector<float> losses;
  const auto train_for = [&](int64_t steps) {
    config.steps = steps;
    sent.clear();
    const auto make = [&](int rank) { return backend_with(rank, table); };
    losses = train_on_ranks(make, config, text, {}).curve.loss;
  };
  train_for(1);
  const int64_t q = sent.q, qt = sent.qt, in_shards = sent.in_shards, bf16 = sent.bf16;
  const int64_t reductions = sent.reductions, words = sent.words, gradients = sent.gradients;
  train_for(2);
  sent.q -= q;
  sent.qt -= qt;
  sent.in_shards -= in_shards;
  sent.bf16 -= bf16;
  sent.reductions -= reductions;
  sent.words -= words;
  sent.gradients -= gradients;
  return losses;
}

class Wire : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Recipes, Wire,
                         ::testing::Values("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed",
                                           "blockwise"),
                         [](const auto& recipe) { return recipe.param; });

// The fp8 linears of the model are up and down; the head is gathered in bf16, twice.
TEST_P(Wire, IsOneByteAnElementForwardAndOneBackward) {
  for (const int64_t ranks : {2, 3, 4}) {
    const TrainConfig config = wide(GetParam(), ranks);
    const int64_t elements_of_weights = 2 * config.hidden * config.ffn;
    count_a_step(config);
    EXPECT_EQ(sent.q, ranks * elements_of_weights) << ranks;
    EXPECT_EQ(sent.qt, ranks * elements_of_weights) << ranks;
    // 512 rows in two or four shards of whole 128s, 256 in two.
    const int64_t equal = ranks == 2 ? 2 : ranks == 4 ? 1 : 0;
    EXPECT_EQ(sent.in_shards, ranks * equal * config.hidden * config.ffn) << ranks;
    const Parameters parameters(config, Rank{0, static_cast<int>(ranks), nullptr});
    EXPECT_EQ(sent.bf16, ranks * 2 * parameters.linears.back().shard_rows * config.hidden);
    int64_t shards = 0;
    for (const LinearShape& shape : parameters.linears) shards += shape.shard_rows * shape.k;
    EXPECT_EQ(sent.gradients, ranks * shards) << ranks;
  }
}

// A rank reduces the words of all weights at once: one of a tensor, K of columns.
TEST_P(Wire, HasOneReductionOfAllMaxima) {
  const TrainConfig config = wide(GetParam(), 2);
  count_a_step(config);
  const std::string& recipe = GetParam();
  const int64_t words = recipe == "rowwise"                            ? config.hidden + config.ffn
                        : recipe == "delayed" || recipe == "blockwise" ? 0
                                                                       : 2;
  EXPECT_EQ(sent.reductions, words > 0 ? 2 : 0);
  EXPECT_EQ(sent.words, 2 * words);
}

// FSDP's reduction of weights, and that of tensor parallelism: the words of columns that all of its ranks
// hold, and those of rows that they hold parts of. Then one of a word a token for x of down, and one for
// dy of up.
TEST(WireOfTwoGroups, HasOneReductionForEach) {
  const TrainConfig config = wide("rowwise", 2, 2);
  count_a_step(config);
  EXPECT_EQ(sent.reductions, 4 * (2 + 2));
  const int64_t over_fsdp = config.hidden + config.ffn / 2;
  const int64_t over_tp = config.hidden + config.hidden / 2;
  EXPECT_EQ(sent.words, 4 * (over_fsdp + over_tp + 2 * config.batch_tokens()));
}

// cuBLASLt reads no operand in shards: where a table names it for grad_input, that qt is gathered in one
// piece, and the others stay as they arrive.
TEST(WireOfALibrarysGemm, HasItsQtInOnePiece) {
  const TrainConfig config = wide("rowwise", 2);
  const f8::Shape up{config.batch_tokens(), config.ffn, config.hidden};
  f8::TuningTable rows;
  rows.devices = {{.name = "a device"}};
  rows.sources = {{"made"}};
  const f8::Recipe recipe = f8::find_recipe("rowwise").value();
  rows.add(f8::KernelChoice{
      f8::Problem::make(f8::Op::kGradInput, recipe, up).value(), {f8::Provider::kCublasLt}, 1000});
  const TemporaryFolder folder;
  const std::filesystem::path table = folder / "table";
  std::ofstream(table) << rows.serialize();

  // The plan with weight_shards is refused, and the one without it is the library's.
  const auto backend = backend_with(0, table);
  float8::LinearDesc desc;
  desc.m_max = up.m;
  desc.n = up.n;
  desc.k = up.k;
  desc.recipe = float8::Recipe::rowwise();
  desc.grad_weight_dtype = FLOAT8_F32;
  const auto plan = float8::Linear::plan(backend->context(), desc);
  ASSERT_TRUE(plan) << plan.error().message;
  EXPECT_NE(plan.value().info().value().find("cublaslt h0"), std::string::npos)
      << plan.value().info().value();
  desc.weight_shards = true;
  const auto refused = float8::Linear::plan(backend->context(), desc);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, FLOAT8_UNSUPPORTED);

  const std::vector<float> expected = count_a_step(config);
  const int64_t elements_of_a_weight = config.hidden * config.ffn;
  EXPECT_EQ(sent.in_shards, 2 * 2 * elements_of_a_weight);
  EXPECT_EQ(count_a_step(config, table), expected);
  EXPECT_EQ(sent.qt, 2 * 2 * elements_of_a_weight);
  EXPECT_EQ(sent.in_shards, 2 * 1 * elements_of_a_weight);
}

}  // namespace
}  // namespace train
