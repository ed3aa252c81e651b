// The search's last step: which linears are formed, and that the fastest linear wins, whatever its
// kernels take alone.
#include "tools/tuner/search/linear_search.hpp"

#include <gtest/gtest.h>

#include "tests/unit/tools/fake_backend.hpp"
#include "tools/tuner/measure/measurer.hpp"

namespace f8::tuner {
namespace {

runtime::GemmChoice library(int heuristic) {
  return {{.provider = Provider::kCublasLt, .heuristic = heuristic}};
}

std::string text(const LinearChoices& choices) {
  std::string digits;
  for (const runtime::GemmChoice& choice : choices) digits += std::to_string(choice.heuristic);
  return digits;
}

KernelShortlists shortlists_of(int depth, std::array<int, 3> prior = {-1, -1, -1}) {
  KernelShortlists shortlists;
  for (size_t i = 0; i < shortlists.size(); ++i) {
    for (int h = 0; h < depth; ++h) shortlists[i].timed.push_back({library(h), 100.0 + h});
    if (prior[i] >= 0) shortlists[i].prior.push_back(library(prior[i]));
  }
  return shortlists;
}

std::vector<std::string> texts(const std::vector<LinearChoices>& variants) {
  std::vector<std::string> all;
  for (const LinearChoices& choices : variants) all.push_back(text(choices));
  return all;
}

// Times linears on the fake machine by `ns` of their digits, and remembers what was asked for.
struct FakeLinears {
  std::function<double(const std::string&)> ns;
  std::function<bool(const std::string&)> broken = [](const std::string&) { return false; };
  std::vector<std::vector<std::string>> groups;

  LinearSearch search(const KernelShortlists& shortlists, const LinearSearchOptions& options = {}) {
    const auto digits = [](const Candidate& candidate) {
      return text(*parse_choices(candidate.config));
    };
    FakeMachine machine;
    machine.ns = [&](const Problem&, const Candidate& s, double) { return ns(digits(s)); };
    machine.misbehaviour = [&](const Problem&, const Candidate& s) {
      return broken(digits(s)) ? Misbehaviour::kWrong : Misbehaviour::kNone;
    };
    FakeBackend backend(machine);
    Measurer measurer(backend);
    const InterleavedGroup group{.problem = test_problem(Op::kLinear),
                                 .candidates = {},
                                 .purpose = {},
                                 .batch_us = 400,
                                 .stop = {},
                                 .warm_s = 0,
                                 .seed = 1};
    const auto measure =
        [&](const InterleavedGroup& part) -> Result<std::vector<tuning_db::TrialResult>> {
      groups.emplace_back();
      for (const Candidate& candidate : part.candidates) groups.back().push_back(digits(candidate));
      std::vector<tuning_db::TrialResult> results;
      for (CandidateOutcome& outcome : F8_TRY(measurer.run(part))) {
        results.push_back(std::move(outcome.result));
      }
      return results;
    };
    return search_linear(group, shortlists, options, measure).value();
  }
};

TEST(LinearVariants, FastestThenPriorThenOneChangeAtATime) {
  EXPECT_EQ(texts(linear_variants(shortlists_of(2, {1, 1, 0}), {})),
            (std::vector<std::string>{"000", "110", "100", "010", "001"}));
  EXPECT_EQ(texts(linear_variants(shortlists_of(3), {.most = 5})),
            (std::vector<std::string>{"000", "100", "010", "001", "200"}));
  // A prior choice is not timed twice, and a GEMM without one keeps its fastest kernel.
  EXPECT_EQ(texts(linear_variants(shortlists_of(2, {1, -1, -1}), {})),
            (std::vector<std::string>{"000", "100", "010", "001"}));
  EXPECT_EQ(linear_variants(shortlists_of(3), {.most = 0}).size(), 1u);
  // The others are out of reach, or deeper than the third.
  EXPECT_EQ(linear_variants(shortlists_of(3), {.within = 1.015}).size(), 4u);
  EXPECT_EQ(linear_variants(shortlists_of(5), {.most = 100}).size(), 7u);
}

TEST(LinearVariants, BothGradientsByOneConfiguration) {
  const auto kernel = [](const char* config, double ns) {
    return TimedKernel{{{.config = *parse_gemm_config(config)}}, ns};
  };
  KernelShortlists shortlists = shortlists_of(1);
  shortlists[1].timed = {kernel("128x256s4c2x1w2g8", 100), kernel("128x192s5c1x1w2g8", 110)};
  shortlists[2].timed = {kernel("256x128s4c2x1w2g8", 100), kernel("128x192s5c1x1w2g8", 101),
                         kernel("128x256s4c2x1w2g8", 120)};
  const auto variants = linear_variants(shortlists, {.within = 1.0});
  ASSERT_EQ(variants.size(), 3u);
  EXPECT_EQ(key(variants[1][1].config), "128x192s5c1x1w2g8") << "211 before 220";
  EXPECT_EQ(key(variants[1][2].config), "128x192s5c1x1w2g8");
  EXPECT_EQ(key(variants[2][1].config), "128x256s4c2x1w2g8");
  EXPECT_EQ(key(variants[2][2].config), "128x256s4c2x1w2g8");
}

TEST(LinearSearch, TheFastestLinearWinsWhateverItsKernelsTakeAlone) {
  FakeLinears machine;
  machine.ns = [](const std::string& d) { return d == "010" ? 950e3 : 1000e3; };
  const LinearSearch found = machine.search(shortlists_of(2));
  EXPECT_EQ(text(found.choices), "010");
  EXPECT_EQ(found.timed, 4);
  EXPECT_NEAR(found.over_first, 1000.0 / 950, 0.01);
  EXPECT_NEAR(found.over_untuned.value(), 1000.0 / 950, 0.01) << "there is no prior: the fastest";
  ASSERT_EQ(machine.groups.size(), 2u);
  EXPECT_EQ(machine.groups[1].size(), 2u);
}

TEST(LinearSearch, ThePriorIsAmongThem) {
  FakeLinears machine;  // only all three together are good: no single change leads there
  machine.ns = [](const std::string& d) { return d == "555" ? 900e3 : 1000e3; };
  const LinearSearch found = machine.search(shortlists_of(1, {5, 5, 5}));
  EXPECT_EQ(text(found.choices), "555");
  EXPECT_EQ(found.over_untuned, 1.0);
}

// A plan takes the last prior choice of each GEMM, of which one may have fewer than another.
TEST(LinearSearch, WhatAPlanTakesWithoutASearchIsAmongThem) {
  FakeLinears machine;
  machine.ns = [](const std::string& d) { return d == "667" ? 1100e3 : 1000e3; };
  KernelShortlists shortlists = shortlists_of(2, {5, 6, 7});
  shortlists[0].prior.push_back(library(6));
  EXPECT_EQ(texts(linear_variants(shortlists, {.most = 3})),
            (std::vector<std::string>{"000", "567", "667"}));
  EXPECT_NEAR(machine.search(shortlists).over_untuned.value(), 1.1, 0.01);
  shortlists[0].prior.back() = library(4);
  EXPECT_FALSE(machine.search(shortlists, {.most = 2}).over_untuned) << "it was not timed";
}

TEST(LinearSearch, ChangesThatHelpAreJoined) {
  FakeLinears machine;
  machine.ns = [](const std::string& d) {
    return 1000e3 - (d[0] == '1' ? 30e3 : 0) - (d[2] == '1' ? 40e3 : 0) + (d[1] == '1' ? 20e3 : 0);
  };
  const LinearSearch found = machine.search(shortlists_of(2));
  EXPECT_EQ(text(found.choices), "101");
  EXPECT_EQ(found.timed, 5);
  EXPECT_NEAR(found.over_first, 1000.0 / 930, 0.01);
}

TEST(LinearSearch, BrokenLinearsAreLeftOut) {
  FakeLinears machine;
  machine.ns = [](const std::string& d) { return d == "010" ? 100e3 : 1000e3; };
  machine.broken = [](const std::string& d) { return d == "010" || d == "000"; };
  const LinearSearch found = machine.search(shortlists_of(2));
  EXPECT_NE(text(found.choices), "010");
  EXPECT_NE(text(found.choices), "000");
  machine.broken = [](const std::string&) { return true; };
  const LinearSearch none = machine.search(shortlists_of(2));
  EXPECT_EQ(text(none.choices), "000");
  EXPECT_EQ(none.timed, 0);
}

TEST(LinearSearch, WithOneCombinationNothingIsTimed) {
  FakeLinears machine;
  machine.ns = [](const std::string&) { return 1000e3; };
  EXPECT_EQ(machine.search(shortlists_of(1)).timed, 0);
  EXPECT_EQ(machine.search(shortlists_of(3), {.most = 1}).timed, 0);
  EXPECT_TRUE(machine.groups.empty());
}

}  // namespace
}  // namespace f8::tuner
