// Files that float8 0.1 wrote stay readable, with what they said.
#include <gtest/gtest.h>

#include <vector>

#include "base/file.hpp"
#include "recipes/model/filter_file.hpp"
#include "recipes/scales/scale_state.hpp"

namespace f8 {
namespace {

std::string fixture(const char* name) {
  return read_file(std::string(FLOAT8_SOURCE_DIR "/tests/fixtures/") + name).value();
}

TEST(OldFiles, AFilterFileOfVersion2Opens) {
  const Result<FilterFile> file = FilterFile::parse(fixture("filter_v2.txt"));
  ASSERT_TRUE(file) << file.error().message;
  EXPECT_EQ(file->recipe, "rowwise");
  EXPECT_EQ(file->tokens, 8192);
  ASSERT_EQ(file->decisions.size(), 2U);
  const FilterIndex index(*file);
  const FilterFile::Decision* wq = index.find("layers.31.attention.wq");
  ASSERT_NE(wq, nullptr);
  EXPECT_TRUE(wq->convert);
  EXPECT_EQ(wq->in_features, 4096);
  EXPECT_EQ(wq->evidence, Evidence::kMeasured);
  EXPECT_EQ(wq->speedup.speedup, 1.4733629519033802);
  const FilterFile::Decision* output = index.find("output");
  ASSERT_NE(output, nullptr);
  EXPECT_FALSE(output->convert);
  EXPECT_EQ(output->out_features, 32000);
  EXPECT_EQ(output->evidence, Evidence::kRule);
}

TEST(OldFiles, AFilterFileOfVersion3HasAttention) {
  const Result<FilterFile> file = FilterFile::parse(fixture("filter_v3.txt"));
  ASSERT_TRUE(file) << file.error().message;
  EXPECT_EQ(file->sequence, 8192);
  EXPECT_EQ(file->decisions.size(), 1U);
  ASSERT_EQ(file->attention.size(), 3U);
  const FilterFile::Attention& first = file->attention.front();
  EXPECT_EQ(first.fqn, "model.layers.0.self_attn");
  EXPECT_EQ(first.recipe, "fp8");
  EXPECT_EQ(first.heads_q, 32);
  EXPECT_EQ(first.heads_kv, 8);
  EXPECT_EQ(first.head_dim, 128);
  EXPECT_EQ(first.evidence, Evidence::kMeasured);
  EXPECT_EQ(first.speedup.lo, 1.3129604837222866);
  EXPECT_EQ(file->attention[1].recipe, "bf16");
  EXPECT_EQ(file->attention[1].evidence, Evidence::kRule);
  EXPECT_EQ(file->attention[2].recipe, "fp8_forward");
}

TEST(OldFiles, AScaleStateOfVersion1Opens) {
  const Result<ScaleState> state = ScaleState::parse(fixture("scales_v1.bin"));
  ASSERT_TRUE(state) << state.error().message;
  EXPECT_EQ(state->slots.size(), 5U);
  EXPECT_EQ(state->length, 6U);
  for (const DelayedSlot& slot : state->slots) {
    EXPECT_EQ(slot.dtype, Dtype::kE5m2);
    EXPECT_TRUE(slot.pow2);
  }
  EXPECT_EQ(state->amax.front(), 0x3f800000U);
  EXPECT_EQ(state->scale.back(), 0x40000004U);
  EXPECT_EQ(state->inverse.front(), 0x3f000000U);
  ASSERT_EQ(state->history.size(), 30U);
  EXPECT_EQ(state->history.back(), 29U);
  EXPECT_EQ(state->non_finite, (std::vector<uint32_t>{7, 8, 9, 10, 11}));
}

}  // namespace
}  // namespace f8
