// The trainer's kernels compile for Hopper, at the narrowest and the widest model, and do not
// spill.
#include "examples/train/device/kernels.hpp"

#include <gtest/gtest.h>

#include <regex>

namespace train {
namespace {

struct Width {
  int64_t width, context;
};

class Kernels : public ::testing::TestWithParam<Width> {};

TEST_P(Kernels, CompilesToAllKernelsWithoutSpills) {
  const Cubin& cubin = compiled_kernels(GetParam().width, GetParam().context);
  for (const char* name : kKernelNames) EXPECT_NE(cubin.image.find(name), cubin.image.npos) << name;
  const std::regex spill("([0-9]+) bytes spill (stores|loads)");
  int reports = 0;
  for (std::sregex_iterator it(cubin.log.begin(), cubin.log.end(), spill), end; it != end; ++it) {
    EXPECT_EQ((*it)[1], "0") << cubin.log;
    ++reports;
  }
  EXPECT_EQ(reports, 2 * static_cast<int>(kKernelNames.size()));
  EXPECT_EQ(&compiled_kernels(GetParam().width, GetParam().context), &cubin);  // it is kept
}

INSTANTIATE_TEST_SUITE_P(Widths, Kernels,
                         ::testing::Values(Width{64, 8}, Width{192, 4}, Width{2048, 16},
                                           Width{8192, 4}));

}  // namespace
}  // namespace train
