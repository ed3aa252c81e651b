// Text embedded by float8_embed_text is the file's, byte for byte.
#include <gtest/gtest.h>

#include <span>
#include <utility>

#include "base/file.hpp"

namespace f8::codegen {

namespace embedded {
extern const std::string_view kernel_args_cuh;
}
namespace embedded_fixture {
extern const std::string_view hostile_cuh;
extern const std::span<const std::pair<std::string_view, const std::string_view*>> files;
}  // namespace embedded_fixture

namespace {

const fs::path kSource = FLOAT8_SOURCE_DIR;

TEST(EmbedText, KeepsSemicolonsBracketsAndBackslashes) {
  const auto file = read_file(kSource / "tests/unit/codegen/fixtures/hostile.cuh");
  ASSERT_TRUE(file) << file.error().message;
  for (const char* text : {";;", "]]", "\\;", "\\\n", "${", ")\"", "\t"}) {
    EXPECT_NE(file->find(text), std::string::npos) << "the fixture lost its " << text;
  }
  EXPECT_EQ(embedded_fixture::hostile_cuh, *file);
  ASSERT_EQ(embedded_fixture::files.size(), 1U);
  EXPECT_EQ(embedded_fixture::files[0].first, "hostile.cuh");
  EXPECT_EQ(embedded_fixture::files[0].second, &embedded_fixture::hostile_cuh);
}

TEST(EmbedText, KernelHeaderIsTheFile) {
  const auto file = read_file(kSource / "codegen/kernels/kernel_args.cuh");
  ASSERT_TRUE(file) << file.error().message;
  EXPECT_EQ(embedded::kernel_args_cuh, *file);
}

}  // namespace
}  // namespace f8::codegen
