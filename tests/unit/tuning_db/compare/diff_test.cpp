// What one database has and another has not.
#include "tuning_db/compare/diff.hpp"

#include <gtest/gtest.h>

#include "tests/unit/tuning_db/sample.hpp"

namespace f8::tuning_db {
namespace {

KindDiff of_kind(const std::vector<KindDiff>& kinds, std::string_view kind) {
  for (const KindDiff& k : kinds) {
    if (k.kind == kind) return k;
  }
  ADD_FAILURE() << kind;
  return {};
}

TEST(Diff, ACopyIsEqualAndARunMoreIsNot) {
  const TempFolder folder;
  Database a = take(Database::open(folder / "a.db", OpenMode::kCreate));
  const std::vector<TrialKey> cells = {{gemm(8192, 4096, 4096), heuristic(0)},
                                       {gemm(8192, 4096, 4096), heuristic(1)}};
  sweep(a, cells, [](const TrialKey&) { return timed(100); });
  Database b = take(Database::open(folder / "b.db", OpenMode::kCreate));
  ASSERT_TRUE(b.merge_from(folder / "a.db"));
  for (const KindDiff& kind : take(diff(a, b))) {
    EXPECT_TRUE(kind.only_a.empty() && kind.only_b.empty() && kind.changed.empty()) << kind.kind;
    EXPECT_EQ(kind.in_a, kind.in_b);
    EXPECT_GT(kind.in_a, 0U) << kind.kind;
  }
  // A later run on another toolchain, which finds another kernel to be the fastest.
  const std::string run = sweep(
      b, cells,
      [](const TrialKey& cell) {
        return timed(cell.candidate.config == heuristic(1).config ? 50 : 100);
      },
      h100(), toolchain("def5678"));
  const auto kinds = take(diff(a, b));
  EXPECT_EQ(of_kind(kinds, "trial").only_b.size(), 2U);
  EXPECT_TRUE(of_kind(kinds, "trial").only_a.empty());
  ASSERT_EQ(of_kind(kinds, "run").only_b.size(), 1U);
  EXPECT_EQ(of_kind(kinds, "run").only_b[0].key, run);
  ASSERT_EQ(of_kind(kinds, "toolchain").only_b.size(), 1U);
  EXPECT_NE(of_kind(kinds, "toolchain").only_b[0].text.find("def5678"), std::string::npos);
  EXPECT_TRUE(of_kind(kinds, "device").only_b.empty());
  EXPECT_TRUE(of_kind(kinds, "problem").only_b.empty());
  EXPECT_EQ(of_kind(take(diff(b, a)), "trial").only_a.size(), 2U);
}

TEST(Diff, ADecisionForAnotherKernelIsAChange) {
  const TempFolder folder;
  Database a = take(Database::open(folder / "a.db", OpenMode::kCreate));
  Database b = take(Database::open(folder / "b.db", OpenMode::kCreate));
  const Problem problem = gemm(8192, 4096, 4096);
  sweep(a, {{problem, generated("128x256s4c2x1w2g8")}}, [](const TrialKey&) { return timed(1); });
  sweep(b, {{problem, generated("128x128s4c2x1w2g8")}}, [](const TrialKey&) { return timed(1); });
  const KindDiff decision = of_kind(take(diff(a, b)), "decision");
  ASSERT_EQ(decision.changed.size(), 1U);
  EXPECT_EQ(decision.changed[0].key, problem.key());
  EXPECT_EQ(decision.changed[0].text, "generated 128x256s4c2x1w2g8 -> generated 128x128s4c2x1w2g8");
}

}  // namespace
}  // namespace f8::tuning_db
