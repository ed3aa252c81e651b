// The trainer's kernels compile for Hopper, at the narrowest and the widest model, and do not
// spill.
#include "examples/train/kernel_source.hpp"

#include <gtest/gtest.h>

#include <regex>

#include "codegen/nvrtc.hpp"

namespace f8::train {
namespace {

struct Width {
  int64_t width, context;
};

class KernelSource : public ::testing::TestWithParam<Width> {};

TEST_P(KernelSource, CompilesToAllKernelsWithoutSpills) {
  const auto cubin = codegen::compile(kernel_source(GetParam().width, GetParam().context));
  ASSERT_TRUE(cubin.has_value()) << cubin.error().message;
  const std::string_view image(reinterpret_cast<const char*>(cubin->image.data()),
                               cubin->image.size());
  for (const char* name : kKernelNames) EXPECT_NE(image.find(name), image.npos) << name;
  const std::regex spill("([0-9]+) bytes spill (stores|loads)");
  int reports = 0;
  for (std::sregex_iterator it(cubin->log.begin(), cubin->log.end(), spill), end; it != end; ++it) {
    EXPECT_EQ((*it)[1], "0") << cubin->log;
    ++reports;
  }
  EXPECT_EQ(reports, 2 * static_cast<int>(kKernelNames.size()));
}

INSTANTIATE_TEST_SUITE_P(Widths, KernelSource,
                         ::testing::Values(Width{64, 8}, Width{192, 4}, Width{2048, 16},
                                           Width{8192, 4}));

}  // namespace
}  // namespace f8::train
