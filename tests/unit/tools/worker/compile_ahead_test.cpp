#include "tools/tuner/worker/compile_ahead.hpp"

#include <gtest/gtest.h>

#include <stdexcept>

#include "base/file.hpp"

namespace f8::tuner {
namespace {

codegen::KernelSpec spec_of(const char* key) {
  return codegen::parse_kernel_spec(key).value();
}

TEST(CompileAhead, WhatACompilerThrowsIsThatKernelsError) {
  const fs::path folder = make_temp_directory(fs::temp_directory_path(), "float8-ahead-").value();
  const auto compile = [](const codegen::KernelSource& source) -> Result<codegen::Cubin> {
    if (source.key == "amax/bf16/tensor") throw std::runtime_error("broken compiler");
    return fail(ErrorCode::kCompile, "refused");
  };
  {
    CompileAhead compiler(codegen::CubinCache::open(folder / "cache", compile).value(), 2);
    const auto thrown = compiler.wait(spec_of("amax/bf16/tensor"));
    ASSERT_FALSE(thrown);
    EXPECT_EQ(thrown.error().message, "broken compiler");
    const auto next = compiler.wait(spec_of("amax/f32/rowcol"));
    ASSERT_FALSE(next);
    EXPECT_EQ(next.error().message, "refused");
    EXPECT_EQ(compiler.count().done, 2U);
  }
  fs::remove_all(folder);
}

}  // namespace
}  // namespace f8::tuner
