// The parsers of recipes/: whatever the text, they answer with a value that writes itself back as
// the same text, or with one readable line.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <span>
#include <vector>

#include "base/hash.hpp"
#include "recipes/filter_file.hpp"
#include "recipes/problem.hpp"
#include "recipes/scale_state.hpp"
#include "tests/fuzz/fuzz.hpp"
#include "tuning_db/estimate/tuning_table.hpp"

namespace f8 {
namespace {

constexpr Op kOps[] = {Op::kOutput, Op::kGradInput, Op::kGradWeight, Op::kLinear};

std::vector<std::string> problem_keys() {
  std::vector<std::string> keys;
  for (const Recipe& recipe : builtin_recipes()) {
    for (const Op op : kOps) {
      keys.push_back(Problem::make(op, recipe, {8192, 4096, 1024})->key());
      keys.push_back(Problem::make(op, recipe, {1, 16, kMaxDim})->key());
    }
  }
  return keys;
}

std::string table_text() {
  TuningTable table;
  table.devices = {{.name = "NVIDIA H100 80GB HBM3", .cc = 90, .sm_count = 132}};
  table.sources = {"built-in"};
  for (const Recipe& recipe : builtin_recipes()) {
    for (const Gemm g : kGemms) {
      table.add({*Problem::make(to_op(g), recipe, {8192, 4096, 1024}), Provider::kGenerated,
                 "128x256s4c2x1w2g8", 1234.5});
    }
    table.add({recipe.name, {8192, 4096, 1024}, 1.25, 1.2, 1.3, 1e6});
  }
  table.add({*Problem::make(Op::kOutput, builtin_recipes()[0], {16, 16, 16}), Provider::kCublasLt,
             "h3", 17});
  return table.serialize();
}

std::string filter_text() {
  FilterFile file{.recipe = "rowwise", .tokens = 8192, .decisions = {}};
  file.decisions = {{"layers.*.wq", 4096, 1024, false, "kept in bf16: speedup 0.9"},
                    {"output",
                     8192,
                     128256,
                     true,
                     "converted: measured",
                     Evidence::kMeasured,
                     {1.3, 1.25, 1.35}}};
  return file.serialize().value();
}

// Some of many cases must get through, else the checks behind the parser were never run.
void expect_some(int accepted) {
  EXPECT_TRUE(accepted > 0 || fuzz::options().iterations < 1000);
}

TEST(Fuzz, ProblemParse) {
  int accepted = 0;
  fuzz::run(problem_keys(), [&accepted](std::string_view text) {
    const auto problem = Problem::parse(text);
    if (!problem) {
      EXPECT_EQ(problem.error().code, ErrorCode::kInvalidArgument);
      fuzz::expect_readable(problem.error().message);
      return;
    }
    ++accepted;
    EXPECT_EQ(problem->key(), text);
    EXPECT_TRUE(validate_shape(problem->shape));
    EXPECT_GT(problem->flops(), 0);
    EXPECT_GT(problem->bytes(), 0);
  });
  expect_some(accepted);
}

TEST(Fuzz, ParseShapes) {
  const std::vector<std::string> corpus = {"8192,4096,4096", "1,16,16;17,2064,48;4095,16,1024",
                                           "1024:16384:x2,4096,14336", "1:64:7,16:64:16,32",
                                           "1:8:x2,16:256:x4,4096;8192,128256,16:32:16"};
  int accepted = 0;
  fuzz::run(corpus, [&accepted](std::string_view text) {
    const auto shapes = parse_shapes(text);
    if (!shapes) {
      EXPECT_EQ(shapes.error().code, ErrorCode::kInvalidArgument);
      fuzz::expect_readable(shapes.error().message);
      return;
    }
    ++accepted;
    EXPECT_FALSE(shapes->empty());
    EXPECT_LE(shapes->size(), kMaxShapes);
    EXPECT_EQ(std::set<Shape>(shapes->begin(), shapes->end()).size(), shapes->size());
    for (const Shape& shape : *shapes) {
      if (!validate_shape(shape)) ADD_FAILURE() << to_string(shape);
    }
  });
  expect_some(accepted);
}

void check_table(std::string_view text, int& accepted) {
  const auto table = TuningTable::parse(text);
  if (!table) {
    EXPECT_TRUE(table.error().code == ErrorCode::kCorrupt ||
                table.error().code == ErrorCode::kUnsupported);
    fuzz::expect_readable(table.error().message);
    return;
  }
  ++accepted;
  EXPECT_EQ(table->serialize(), text);
}

TEST(Fuzz, TuningTableParse) {
  const std::vector<std::string> corpus = {table_text(), TuningTable().serialize()};
  int accepted = 0;
  fuzz::run(corpus, [&](std::string_view text) {
    check_table(text, accepted);
    if (text != corpus[0] && text != corpus[1]) {
      EXPECT_FALSE(TuningTable::parse(text));
    }
  });
  expect_some(accepted);
}

// The same edits get past the hash: the end line is made to fit.
TEST(Fuzz, TuningTableParseOfSignedText) {
  std::vector<std::string> corpus;
  for (std::string text : {table_text(), TuningTable().serialize()}) {
    text.resize(text.rfind("end "));
    corpus.push_back(text);
  }
  int accepted = 0;
  fuzz::run(corpus, [&accepted](std::string_view text) {
    check_table(std::string(text) + "end " + hash_hex(text) + "\n", accepted);
  });
  expect_some(accepted);
}

// The text is edited as it stands, and then with a hash that fits.
TEST(Fuzz, FilterFileParse) {
  const std::string whole = filter_text();
  const std::string body = whole.substr(0, whole.rfind("end "));
  int accepted = 0;
  const auto check = [&accepted](const std::string& text) {
    const auto file = FilterFile::parse(text);
    if (!file) {
      fuzz::expect_readable(file.error().message);
      return;
    }
    ++accepted;
    EXPECT_EQ(file->serialize().value(), text);
  };
  fuzz::run(std::span(&whole, 1), [&](std::string_view text) { check(std::string(text)); });
  fuzz::run(std::span(&body, 1), [&](std::string_view text) {
    check(std::string(text) + "end " + hash_hex(text) + "\n");
  });
  expect_some(accepted);
}

TEST(Fuzz, Names) {
  const std::vector<std::string> corpus = {
      "tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise", "output", "grad_input",
      "linear",     "fprop",   "grad_weight",        "e4m3",    "m8n16k32"};
  fuzz::run(corpus, [](std::string_view text) {
    const auto check = [text](const auto& parsed, std::string_view name) {
      if (parsed) {
        EXPECT_EQ(name, text);
      } else {
        EXPECT_EQ(parsed.error().code, ErrorCode::kInvalidArgument);
        fuzz::expect_readable(parsed.error().message);
      }
    };
    const auto recipe = find_recipe(text);
    check(recipe, recipe ? recipe->name : "");
    const auto gemm = parse_gemm(text);
    check(gemm, gemm ? to_string(*gemm) : "");
    const auto dtype = parse_dtype(text);
    check(dtype, dtype ? to_string(*dtype) : "");
    const auto shape = parse_dims(text);
    const std::string dims = shape ? to_string(*shape) : "";
    check(shape, dims);
    const bool other_name = text == "fprop" || text == "dgrad" || text == "wgrad";
    const auto op = parse_op(text);
    check(op, op && !other_name ? to_string(*op) : text);
  });
}

// Bytes at random, and bytes at random under a hash that fits them.
TEST(Fuzz, ScaleStateParse) {
  std::vector<std::string> corpus;
  for (const uint32_t count : {0U, 1U, 5U}) {
    ScaleState state;
    state.length = count + 1;
    const auto words = [count](uint32_t first, size_t rows) {
      std::vector<uint32_t> values(count * rows);
      std::iota(values.begin(), values.end(), first);
      return values;
    };
    state.slots.assign(count, {Dtype::kE5m2, true});
    state.amax = words(0x3f800000, 1);
    state.scale = words(0x40000000, 1);
    state.inverse = words(0x3f000000, 1);
    state.history = words(0, state.length);
    state.non_finite = words(7, 1);
    corpus.push_back(state.serialize());
    EXPECT_EQ(ScaleState::parse(corpus.back()).value(), state);
  }
  int accepted = 0;
  fuzz::run(corpus, [&accepted](std::string_view text) {
    const std::string_view body = text.substr(0, text.size() - std::min<size_t>(text.size(), 32));
    for (const std::string& bytes : {std::string(text), std::string(body) + hash_hex(body)}) {
      const auto state = ScaleState::parse(bytes);
      if (!state) {
        EXPECT_TRUE(state.error().code == ErrorCode::kCorrupt ||
                    state.error().code == ErrorCode::kUnsupported);
        fuzz::expect_readable(state.error().message);
        continue;
      }
      ++accepted;
      EXPECT_EQ(state->serialize(), bytes);
    }
  });
  expect_some(accepted);
}

}  // namespace
}  // namespace f8
