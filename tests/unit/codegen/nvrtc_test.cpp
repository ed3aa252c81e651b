// NVRTC on small sources. None of it needs a GPU.
#include "codegen/nvrtc.hpp"

#include <gtest/gtest.h>

#include <thread>

namespace f8::codegen {
namespace {

KernelSource kernel(std::string source, std::vector<std::string> more_options = {}) {
  KernelSource result{"test/kernel", "k", std::move(source), {"--gpu-architecture=sm_90a"}};
  result.options.emplace_back("--ptxas-options=-v");
  for (std::string& option : more_options) result.options.push_back(std::move(option));
  return result;
}

const std::string kReverse = R"(
extern "C" __global__ void other(float* p) { p[0] = 0; }
extern "C" __global__ void k(float* p) {
  __shared__ float tile[32];
  tile[threadIdx.x] = p[threadIdx.x];
  __syncthreads();
  p[threadIdx.x] = tile[31 - threadIdx.x];
})";

// `wait` stands between the matrix instruction and the use of its accumulators.
std::string wgmma(const std::string& before_wait) {
  return R"(
extern "C" __global__ void k(float* out, unsigned long long a, unsigned long long b) {
  float d0 = 0, d1 = 0, d2 = 0, d3 = 0;
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0,%1,%2,%3}, %4, %5, 1, 1, 1;"
               : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3) : "l"(a), "l"(b));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
)" + before_wait +
         R"(
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  out[threadIdx.x] = d0 + d1 + d2 + d3;
})";
}

bool one_line(const std::string& message) {
  return message.find('\n') == std::string::npos;
}

TEST(Nvrtc, IsOfCuda13) {
  const auto version = nvrtc_version();
  ASSERT_TRUE(version) << version.error().message;
  EXPECT_EQ(version->major, 13);
}

TEST(Nvrtc, CompilesToAnElfImageWithItsResources) {
  const auto cubin = compile(kernel(kReverse));
  ASSERT_TRUE(cubin) << cubin.error().message;
  ASSERT_GT(cubin->image.size(), 4u);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(cubin->image.data()), 4),
            "\x7f"
            "ELF");
  EXPECT_EQ(cubin->key, "test/kernel");
  EXPECT_EQ(cubin->entry, "k");
  EXPECT_GT(cubin->registers, 0);
  EXPECT_EQ(cubin->smem_bytes, 128);
  EXPECT_EQ(cubin->spill_bytes, 0);
  EXPECT_GT(cubin->compile_ms, 0);
  EXPECT_FALSE(cubin->from_cache);
  EXPECT_NE(cubin->log.find("Compiling entry function 'k'"), std::string::npos);
}

TEST(Nvrtc, SpillsAreRecordedAndNoError) {
  const auto cubin = compile(kernel(R"(
extern "C" __global__ void k(float* p) {
  float v[64];
  for (int i = 0; i < 64; ++i) v[i] = p[i * 32 + threadIdx.x];
  __syncthreads();
  for (int i = 0; i < 64; ++i) p[i * 32 + threadIdx.x] = v[i] * v[63 - i];
})",
                                    {"--maxrregcount=24"}));
  ASSERT_TRUE(cubin) << cubin.error().message;
  EXPECT_GT(cubin->spill_bytes, 0);
  EXPECT_LE(cubin->registers, 24);
}

TEST(Nvrtc, AnErrorNamesTheKernelAndQuotesTheLines) {
  const auto cubin =
      compile(kernel("extern \"C\" __global__ void k(float* p) {\n  p[0] = lost;\n}"));
  ASSERT_FALSE(cubin);
  EXPECT_EQ(cubin.error().code, ErrorCode::kCompile);
  EXPECT_NE(cubin.error().message.find("test/kernel"), std::string::npos);
  EXPECT_NE(cubin.error().message.find("k.cu(2): error: identifier \"lost\""), std::string::npos)
      << cubin.error().message;
  EXPECT_TRUE(one_line(cubin.error().message)) << cubin.error().message;
}

TEST(Nvrtc, AnErrorOfPtxasIsQuotedToo) {
  const auto cubin =
      compile(kernel("extern \"C\" __global__ void k() { asm volatile(\"wgmma.nonsense;\"); }"));
  ASSERT_FALSE(cubin);
  EXPECT_EQ(cubin.error().code, ErrorCode::kCompile);
  EXPECT_NE(cubin.error().message.find("wgmma"), std::string::npos) << cubin.error().message;
  EXPECT_TRUE(one_line(cubin.error().message)) << cubin.error().message;
}

TEST(Nvrtc, AnUnknownOptionIsNamed) {
  const auto cubin = compile(kernel(kReverse, {"--no-such-option"}));
  ASSERT_FALSE(cubin);
  EXPECT_EQ(cubin.error().code, ErrorCode::kCompile);
  EXPECT_NE(cubin.error().message.find("--no-such-option"), std::string::npos)
      << cubin.error().message;
}

TEST(Nvrtc, AVirtualArchitectureHasPtxButNoCubin) {
  KernelSource source = kernel(kReverse);
  source.options = {"--gpu-architecture=compute_90a"};
  const auto cubin = compile(source);
  ASSERT_FALSE(cubin);
  EXPECT_NE(cubin.error().message.find("--gpu-architecture=sm_90a"), std::string::npos)
      << cubin.error().message;
  EXPECT_TRUE(compile_to_ptx(source));
}

TEST(Nvrtc, PtxIsText) {
  const auto ptx = compile_to_ptx(kernel(kReverse));
  ASSERT_TRUE(ptx) << ptx.error().message;
  EXPECT_NE(ptx->find(".target sm_90a"), std::string::npos);
  EXPECT_NE(ptx->find(".entry k("), std::string::npos);
  EXPECT_EQ(ptx->find('\0'), std::string::npos);
}

TEST(Nvrtc, ASerialisedWgmmaIsRefused) {
  EXPECT_TRUE(compile(kernel(wgmma(""))));
  for (const KernelSource& source :
       {kernel(wgmma("d0 += 1;")), kernel(wgmma(""), {"--device-debug"})}) {
    const auto cubin = compile(source);
    ASSERT_FALSE(cubin);
    EXPECT_EQ(cubin.error().code, ErrorCode::kCompile);
    EXPECT_NE(cubin.error().message.find("test/kernel"), std::string::npos);
    EXPECT_NE(cubin.error().message.find("(C75"), std::string::npos) << cubin.error().message;
    EXPECT_TRUE(one_line(cubin.error().message)) << cubin.error().message;
  }
}

TEST(Nvrtc, ThreadsCompileAtOnce) {
  std::vector<Result<Cubin>> results(4, fail(ErrorCode::kInternal, "not run"));
  {
    std::vector<std::jthread> threads;
    for (size_t i = 0; i < results.size(); ++i) {
      threads.emplace_back([&results, i] {
        results[i] = compile(kernel(f8::format(
            "extern \"C\" __global__ void k(float* p) {{ p[threadIdx.x] *= {}.0f; }}", i + 2)));
      });
    }
  }
  for (const auto& result : results) EXPECT_TRUE(result) << result.error().message;
  EXPECT_NE(results[0]->image, results[1]->image);
}

}  // namespace
}  // namespace f8::codegen
