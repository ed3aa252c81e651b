// The tuning table of one rank as a text that other ranks take, through the public header.
#include <gtest/gtest.h>

#include <cstring>
#include <float8/float8.hpp>
#include <string>

#include "base/format.hpp"
#include "tuning_db/estimate/tuning_table.hpp"

namespace f8 {
namespace {

constexpr int64_t kTokens = 8192, kOut = 512, kIn = 256;
constexpr const char* kKey = "output/rowwise/e4m3.e4m3.bf16/tn/m8192n512k256/b0f1";
constexpr const char* kConfig = "64x128s4c1x1w1g8";  // not what the cost model chooses

float8::Context context(bool no_table) {
  float8::ContextOptions options;
  options.emulate = true;
  options.no_table = no_table;
  return float8::Context::create(0, options).value();
}

TuningTable table() {
  TuningTable out;
  out.devices = {{.name = "a device"}};
  out.sources = {{"made"}};
  out.add(KernelChoice{
      Problem::parse(kKey).value(), {.config = parse_gemm_config(kConfig).value()}, 1000});
  return out;
}

uint64_t hash_word(const TuningTable& from) {
  return std::stoull(from.hash().substr(0, 16), nullptr, 16);
}

// What a linear of the table's shape says of its kernel.
std::string kernel_of_output(const float8::Context& on) {
  float8::LinearDesc desc;
  desc.m_max = kTokens;
  desc.n = kOut;
  desc.k = kIn;
  desc.recipe = float8::Recipe::rowwise();
  const std::string info = float8::Linear::plan(on, desc).value().info().value();
  const size_t at = info.find("generated ");
  return info.substr(at, info.find('\n', at) - at);
}

TEST(TableText, GivesAnotherRankTheSameKernels) {
  float8::Context first = context(false), other = context(true);
  const std::string without = kernel_of_output(other);
  EXPECT_EQ(first.set_table(table().serialize()).value(), hash_word(table()));
  const std::string text = first.table().value();
  EXPECT_EQ(text, table().serialize());
  EXPECT_EQ(other.set_table(text).value(), first.table_hash());
  EXPECT_EQ(other.table_hash(), hash_word(table()));
  EXPECT_EQ(other.table().value(), text);
  const std::string with = kernel_of_output(other);
  EXPECT_NE(with, without);
  EXPECT_EQ(with, kernel_of_output(first));
  EXPECT_NE(with.find(kConfig), std::string::npos) << with;
  EXPECT_NE(with.find("the tuning table's row of this shape"), std::string::npos) << with;
}

// cuBLASLt reads no operand in shards: where it is the choice for grad_input, such a linear is refused.
TEST(TableText, NamesALibrarysGemmThatReadsNoShards) {
  TuningTable rows = table();
  const Recipe recipe = find_recipe("rowwise").value();
  rows.add(KernelChoice{Problem::make(Op::kGradInput, recipe, {kTokens, kOut, kIn}).value(),
                        {Provider::kCublasLt},
                        1000});
  float8::Context on = context(true);
  ASSERT_TRUE(on.set_table(rows.serialize()));
  float8::LinearDesc desc;
  desc.m_max = kTokens;
  desc.n = kOut;
  desc.k = kIn;
  desc.recipe = float8::Recipe::rowwise();
  const auto whole = float8::Linear::plan(on, desc);
  ASSERT_TRUE(whole) << whole.error().message;
  EXPECT_NE(whole.value().info().value().find("cublaslt h0"), std::string::npos);
  desc.weight_shards = true;
  const auto in_shards = float8::Linear::plan(on, desc);
  ASSERT_FALSE(in_shards);
  EXPECT_EQ(in_shards.error().code, FLOAT8_UNSUPPORTED);
}

TEST(TableText, OfTheBuiltInTableIsATable) {
  float8::Context first = context(false), other = context(true);
  const std::string text = first.table().value();
  EXPECT_NE(first.table_hash(), 0U);
  EXPECT_EQ(other.set_table(text).value(), first.table_hash());
  EXPECT_EQ(other.table().value(), text);
}

// A rank without a table is sent around as well.
TEST(TableText, IsEmptyWhereThereIsNoTable) {
  float8::Context first = context(true), other = context(false);
  EXPECT_EQ(first.table().value(), "");
  EXPECT_EQ(first.table_hash(), 0U);
  EXPECT_NE(other.table_hash(), 0U);
  EXPECT_EQ(other.set_table("").value(), 0U);
  EXPECT_EQ(other.table_hash(), 0U);
  EXPECT_EQ(kernel_of_output(other), kernel_of_output(first));
}

TEST(TableText, ThatIsNoTableIsRefusedAndChangesNothing) {
  float8::Context one = context(false);
  ASSERT_TRUE(one.set_table(table().serialize()));
  const std::string good = one.table().value();
  std::string flipped = good;
  flipped[good.find("a device")] = 'A';
  std::string newer = good;
  newer.replace(0, newer.find('\n'), "float8-table 999");
  struct Bad {
    std::string text;
    float8_status code;
  };
  for (const Bad& bad :
       {Bad{"not a table", FLOAT8_CORRUPT}, Bad{flipped, FLOAT8_CORRUPT},
        Bad{good.substr(0, good.size() / 2), FLOAT8_CORRUPT}, Bad{newer, FLOAT8_UNSUPPORTED}}) {
    const auto refused = one.set_table(bad.text);
    ASSERT_FALSE(refused) << bad.text;
    EXPECT_EQ(refused.error().code, bad.code) << refused.error().message;
    EXPECT_EQ(refused.error().message.rfind("text: ", 0), 0U) << refused.error().message;
    EXPECT_EQ(one.table().value(), good);
    EXPECT_EQ(one.table_hash(), hash_word(table()));
  }
}

TEST(TableText, IsCopiedAsFarAsThereIsRoom) {
  float8::Context one = context(false);
  ASSERT_TRUE(one.set_table(table().serialize()));
  const std::string all = one.table().value();
  size_t needed = 0;
  ASSERT_EQ(float8_context_table(one.get(), nullptr, 0, &needed, nullptr), FLOAT8_OK);
  EXPECT_EQ(needed, all.size() + 1);
  char text[16];
  std::memset(text, 'x', sizeof text);
  uint64_t hash = 0;
  ASSERT_EQ(float8_context_table(one.get(), text, 13, nullptr, &hash), FLOAT8_OK);
  EXPECT_EQ(std::string(text), all.substr(0, 12));
  EXPECT_EQ(text[13], 'x');
  EXPECT_EQ(hash, hash_word(table()));
  EXPECT_EQ(float8_context_table(nullptr, nullptr, 0, &needed, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_context_table(one.get(), nullptr, 5, &needed, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_context_set_table(nullptr, "", nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_context_set_table(one.get(), nullptr, nullptr), FLOAT8_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace f8
