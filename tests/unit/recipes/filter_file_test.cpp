#include "recipes/model/filter_file.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "base/hash.hpp"

namespace f8 {
namespace {

FilterFile sample() {
  FilterFile file{.recipe = "rowwise", .tokens = 8192, .decisions = {}};
  file.decisions = {{"layers.*.attention.wq",
                     4096,
                     4096,
                     true,
                     "converted: speedup 1.3",
                     Evidence::kInterpolated,
                     {1.3, 1.25, 1.0 / 3 + 1}},
                    {"layers.3.attention.wq", 4096, 4096, false, "kept: by hand"},
                    {"output", 4096, 128256, false, "kept in bf16: its name holds \"output\""}};
  return file;
}

FilterFile with_attention() {
  FilterFile file = sample();
  file.sequence = 4096;
  file.attention = {{"layers.*.attention",
                     32,
                     8,
                     128,
                     "fp8",
                     "converted: speedup 1.2",
                     Evidence::kMeasured,
                     {1.2, 1.19, 1.21}},
                    {"layers.3.attention", 32, 8, 128, "bf16", "kept in bf16: windows"}};
  return file;
}

TEST(FilterFile, HasVerdictsOnAttentionInAVersionOfItsOwn) {
  const std::string text = with_attention().serialize().value();
  EXPECT_TRUE(text.starts_with("float8-filter 3\n"));
  EXPECT_NE(
      text.find("\nsequence 4096\nfp8\tlayers.*.attention\th32g8d128\tmeasured\t1.2 1.19 1.21\t"),
      std::string::npos);
  EXPECT_EQ(FilterFile::parse(text).value(), with_attention());
  FilterFile none = with_attention();
  none.attention.clear();
  EXPECT_EQ(FilterFile::parse(none.serialize().value()).value(), none);
}

TEST(FilterFile, FindsTheAttentionAroundAModule) {
  const FilterFile file = with_attention();
  const FilterIndex index(file);
  EXPECT_EQ(index.find_attention("layers.12.attention")->recipe, "fp8");
  EXPECT_EQ(index.find_attention("layers.12.attention.inner.sdpa")->recipe, "fp8");
  EXPECT_EQ(index.find_attention("layers.3.attention.inner")->recipe, "bf16");
  EXPECT_EQ(index.find_attention("layers.12"), nullptr);
  EXPECT_EQ(index.find_attention("layers.12.attention_norm"), nullptr);
  EXPECT_EQ(index.find_attention(""), nullptr);
  EXPECT_EQ(index.find("layers.12.attention"), nullptr) << "it is no linear";
}

TEST(FilterFile, ThereAndBack) {
  const std::string text = sample().serialize().value();
  EXPECT_TRUE(
      text.starts_with("float8-filter 2\nrecipe rowwise\ntokens 8192\n"
                       "convert\tlayers.*.attention.wq\tn4096k4096\tinterpolated\t1.3 1.25 "
                       "1.3333333333333333\tconverted: speedup"));
  EXPECT_EQ(FilterFile::parse(text).value(), sample());
  const FilterFile empty{.recipe = "tensorwise", .tokens = 1, .decisions = {}};
  EXPECT_EQ(FilterFile::parse(empty.serialize().value()).value(), empty);
}

TEST(FilterFile, FindsNamesBeforePatterns) {
  const FilterFile file = sample();
  EXPECT_TRUE(FilterIndex(file).find("layers.12.attention.wq")->convert);
  EXPECT_FALSE(FilterIndex(file).find("layers.3.attention.wq")->convert);
  EXPECT_EQ(FilterIndex(file).find("layers.x.attention.wq"), nullptr);
  EXPECT_EQ(FilterIndex(file).find("layers.12.attention.wk"), nullptr);
  EXPECT_EQ(FilterIndex(file).find(""), nullptr);
  EXPECT_TRUE(fits_pattern("layers.*.experts.*.w1", "layers.7.experts.*.w1"));
  EXPECT_FALSE(fits_pattern("layers.*.experts.*.w1", "layers.x.experts.*.w1"));
}

TEST(FilterFile, TheIndexAnswersAsAWalkThroughTheFileDoes) {
  FilterFile file{.recipe = "rowwise", .tokens = 1, .decisions = {}};
  for (const char* fqn : {"a.*.b.*", "a.1.b.*", "a.*.b.2", "*.*", "0.*", "a.*", "x*", "a.**.c",
                          "*.0.*.0.*.0.*.0", "0.*.0.*.0.*.0.*"}) {
    file.decisions.push_back({fqn, 16, 16, true, "r"});
  }
  const FilterIndex index(file);
  for (const char* fqn :
       {"a.1.b.2", "a.3.b.2", "a.3.b.4", "a.x.b.2", "0.0", "1.0", "a.0", "x1", "x*", "a.1.c",
        "0.0.0.0.0.0.0.0", "1.0.0.0.0.0.0.0", "0.0.0.1.0.0.0.0", "7"}) {
    const FilterFile::Decision* first = nullptr;
    for (const FilterFile::Decision& d : file.decisions) {
      if (d.fqn == fqn) {
        first = &d;
        break;
      }
      if (first == nullptr && fits_pattern(d.fqn, fqn)) first = &d;
    }
    EXPECT_EQ(index.find(fqn), first) << fqn;
  }
}

TEST(FilterFile, Patterns) {
  EXPECT_TRUE(fits_pattern("a.*.b.*", "a.0.b.17"));
  EXPECT_TRUE(fits_pattern("a", "a"));
  EXPECT_FALSE(fits_pattern("a.*", "a."));
  EXPECT_FALSE(fits_pattern("a.*", "a.1x"));
  EXPECT_FALSE(fits_pattern("a.*", "a.1.b"));
  EXPECT_FALSE(fits_pattern("a.*.b", "a.1"));
  EXPECT_FALSE(fits_pattern("a*", "a1")) << "a star is a whole part";
}

TEST(FilterFile, WritesOnlyWhatItCanRead) {
  const auto refused = [](auto&& change) {
    FilterFile file = sample();
    change(file);
    const auto text = file.serialize();
    return !text && text.error().code == ErrorCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused([](FilterFile& f) { f.recipe = "Row wise"; }));
  EXPECT_TRUE(refused([](FilterFile& f) { f.tokens = 0; }));
  EXPECT_TRUE(refused([](FilterFile& f) { f.decisions[0].fqn = "a\tb"; }));
  EXPECT_TRUE(refused([](FilterFile& f) { f.decisions[0].reason = "two\nlines"; }));
  EXPECT_TRUE(refused([](FilterFile& f) { f.decisions[0].fqn.clear(); }));
  EXPECT_TRUE(refused([](FilterFile& f) { f.decisions[1].fqn = f.decisions[0].fqn; }));
  EXPECT_TRUE(refused([](FilterFile& f) { f.decisions[2].in_features = kMaxDim + 1; }));
  EXPECT_TRUE(refused([](FilterFile& f) { f.decisions[0].speedup = {1.3, 1.4, 1.35}; }));
  EXPECT_TRUE(refused([](FilterFile& f) { f.decisions[0].speedup = {1, 0, 1}; }));
  EXPECT_TRUE(refused([](FilterFile& f) { f.decisions[0].speedup.hi = INFINITY; }));
  const auto attention_refused = [&](auto&& change) {
    return refused([&](FilterFile& f) {
      f = with_attention();
      change(f.attention[0], f);
    });
  };
  using Attention = FilterFile::Attention;
  EXPECT_FALSE(attention_refused([](Attention&, FilterFile&) {}));
  EXPECT_TRUE(attention_refused([](Attention&, FilterFile& f) { f.sequence = 0; }));
  EXPECT_TRUE(attention_refused([](Attention&, FilterFile& f) { f.sequence = -1; }));
  EXPECT_TRUE(attention_refused([](Attention& a, FilterFile&) { a.recipe = "rowwise"; }));
  EXPECT_TRUE(attention_refused([](Attention& a, FilterFile&) { a.heads_kv = 0; }));
  EXPECT_TRUE(attention_refused([](Attention& a, FilterFile&) { a.reason = "a\nb"; }));
  EXPECT_TRUE(attention_refused([](Attention& a, FilterFile&) { a.speedup.lo = 2; }));
  EXPECT_TRUE(attention_refused([](Attention& a, FilterFile& f) { f.attention[1].fqn = a.fqn; }));
}

TEST(FilterFile, BadFilesAreOneClearError) {
  const std::string whole = with_attention().serialize().value();
  const auto error = [](const std::string& text) {
    const auto file = FilterFile::parse(text);
    EXPECT_FALSE(file);
    return file ? Error{} : file.error();
  };
  const auto changed = [&](std::string_view from, std::string_view to) {
    std::string body = whole.substr(0, whole.rfind("end "));
    const size_t at = body.find(from);
    EXPECT_NE(at, std::string::npos);
    body.replace(at, from.size(), to);
    return error(body + "end " + hash_hex(std::string_view(body)) + "\n").message;
  };
  const auto says = [](const std::string& message, std::string_view words) {
    EXPECT_NE(message.find(words), std::string::npos) << message;
  };
  says(error("").message, "not a float8 filter file");
  says(error("{\"decisions\": []}").message, "not a float8 filter file");
  says(error("{\"decisions\": []}").message, "`float8-tune filter --verdicts FILE` writes one");
  says(error(whole.substr(0, whole.size() / 2)).message, "truncated");
  EXPECT_EQ(error(whole.substr(0, whole.size() / 2)).code, ErrorCode::kCorrupt);
  std::string edited = whole;
  edited[edited.find("convert")] = 'C';
  says(error(edited).message, "changed or damaged");
  says(error(whole + "more\n").message, "goes on after");
  std::string newer = whole;
  newer.replace(0, 15, "float8-filter 4");
  EXPECT_EQ(error(newer).code, ErrorCode::kUnsupported);
  says(changed("convert\t", "maybe\t"), "line 4: verdict 'maybe'");
  says(changed("n4096k4096", "n4096"), "line 4");
  says(changed("n4096k4096", "n0k4096"), "line 4: n '0'");
  says(changed("tokens 8192", "tokens 08192"), "in another way");
  says(changed("tokens 8192", "token 8192"), "line 3: 'tokens ' expected");
  says(changed("\tconverted", " converted"), "line 4: not a verdict");
  says(changed("interpolated\t", "guessed\t"), "line 4: evidence 'guessed'");
  says(changed("1.3 1.25 ", "1.3 -1 "), "line 4: lo '-1'");
  says(changed("1.3 1.25 ", "1.3 "), "line 4: hi ''");
  says(changed("1.3 1.25 ", "1.30 1.25 "), "in another way");
  says(changed("layers.3.", "layers.*."), "twice");
  says(changed("float8-filter 3", "float8-filter 2"), "version 2, and a line of a sequence");
  says(changed("fp8\tlayers", "fp4\tlayers"), "line 8: recipe 'fp4'");
  says(changed("h32g8d128", "h32d128"), "line 8: h '32d128'");
  says(changed("h32g8d128", "n32k8"), "line 8: 'h' expected");
  says(changed("sequence 4096", "sequence 0"), "line 7: sequence '0'");
  says(changed("sequence 4096\n", ""), "line 7: verdict 'fp8'");
  says(changed("layers.3.attention\t", "layers.*.attention\t"), "'layers.*.attention' twice");
}

}  // namespace
}  // namespace f8
