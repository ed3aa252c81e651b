// The cache within one process: identity, memory and disk, threads.
#include "codegen/cubin_cache.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <set>
#include <thread>

#include "tests/unit/codegen/cache_testing.hpp"

namespace f8::codegen {
namespace {

using testing::CapturedLog;
using testing::CountingCompiler;
using testing::expect_same;
using testing::TempDirectory;
using testing::test_cubin;
using testing::test_kernel;

std::string key_of(const KernelSource& source) {
  const auto key = cache_key(source);
  return key ? *key : key.error().message;
}

TEST(CacheKey, IsAllThatDecidesTheCode) {
  const KernelSource kernel = test_kernel();
  std::set<std::string> keys{key_of(kernel)};
  KernelSource other = kernel;
  other.source += " ";
  keys.insert(key_of(other));
  other = kernel;
  other.options.emplace_back("-DA");
  keys.insert(key_of(other));
  other.options.back() = "-DB";
  keys.insert(key_of(other));
  other = kernel;
  other.entry = "k2";
  keys.insert(key_of(other));
  other = kernel;
  other.options[0] = "--gpu-architecture=sm_100a";
  keys.insert(key_of(other));
  EXPECT_EQ(keys.size(), 6u);
  EXPECT_EQ(key_of(kernel).size(), 32u);
}

TEST(CacheKey, IgnoresTheOrderOfOptionsButNotWhichOfTwoValuesIsLast) {
  KernelSource a = test_kernel();
  KernelSource b = a;
  std::swap(b.options[0], b.options[1]);
  EXPECT_EQ(key_of(a), key_of(b));
  a.options.insert(a.options.end(), {"--maxrregcount=32", "--maxrregcount=64"});
  b.options.insert(b.options.end(), {"--maxrregcount=64", "--maxrregcount=32"});
  EXPECT_NE(key_of(a), key_of(b));
}

TEST(CacheKey, TextMovedBetweenFieldsIsAnotherKernel) {
  KernelSource a = test_kernel();
  KernelSource b = a;
  a.options = {"-a", "-b"};
  b.options = {"-a"};
  b.source = "2 -b\n" + b.source;
  EXPECT_NE(key_of(a), key_of(b));
}

TEST(CacheKey, RefusesWhatItCannotName) {
  KernelSource source = test_kernel();
  source.options.insert(source.options.end(), {"-D", "A"});
  EXPECT_NE(cache_key(source).error().message.find("'A'"), std::string::npos);
  source = test_kernel();
  source.entry = "";
  EXPECT_EQ(cache_key(source).error().code, ErrorCode::kInvalidArgument);
  source = test_kernel();
  source.key += "\nregisters 1";
  EXPECT_EQ(cache_key(source).error().code, ErrorCode::kInvalidArgument);
}

TEST(CubinCache, CompiledThenFromMemoryThenFromDisk) {
  const TempDirectory temp;
  const CapturedLog log;
  const CountingCompiler compiler;
  auto cache = CubinCache::open(temp / "cache", compiler);
  ASSERT_TRUE(cache) << cache.error().message;
  const auto compiled = cache->get(test_kernel());
  ASSERT_TRUE(compiled) << compiled.error().message;
  EXPECT_FALSE((*compiled)->from_cache);
  EXPECT_EQ(cache->get(test_kernel())->get(), compiled->get());

  auto second_start = CubinCache::open(temp / "cache", compiler);
  const auto loaded = second_start->get(test_kernel());
  ASSERT_TRUE(loaded) << loaded.error().message;
  EXPECT_TRUE((*loaded)->from_cache);
  expect_same(**loaded, test_cubin(test_kernel()));
  EXPECT_EQ(*compiler.count, 1);
  EXPECT_TRUE(log.warnings().empty());
}

TEST(CubinCache, CompilesForRealAndFindsItAgain) {
  const TempDirectory temp;
  auto cache = CubinCache::open(temp / "cache");
  const auto compiled = cache->get(test_kernel());
  ASSERT_TRUE(compiled) << compiled.error().message;
  EXPECT_GT((*compiled)->registers, 0);
  auto second_start = CubinCache::open(temp / "cache");
  const auto loaded = second_start->get(test_kernel());
  ASSERT_TRUE(loaded) << loaded.error().message;
  EXPECT_TRUE((*loaded)->from_cache);
  EXPECT_EQ((*loaded)->image, (*compiled)->image);
}

TEST(CubinCache, AFailureIsReportedAndTriedAgain) {
  const TempDirectory temp;
  int calls = 0;
  auto cache = CubinCache::open(temp / "cache", [&](const KernelSource& source) -> Result<Cubin> {
    if (++calls == 1) return fail(ErrorCode::kCompile, "no luck with {}", source.key);
    return test_cubin(source);
  });
  const auto first = cache->get(test_kernel());
  ASSERT_FALSE(first);
  EXPECT_EQ(first.error().message, "no luck with test/kernel0");
  EXPECT_TRUE(cache->get(test_kernel()));
  EXPECT_EQ(calls, 2);
}

TEST(CubinCache, ThreadsThatWantTheSameKernelCompileItOnce) {
  const TempDirectory temp;
  const CountingCompiler compiler;
  auto cache = CubinCache::open(temp / "cache", [&](const KernelSource& source) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return compiler(source);
  });
  constexpr size_t kThreads = 16;
  std::vector<const Cubin*> seen(kThreads);
  {
    std::vector<std::jthread> threads;
    for (size_t i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] { seen[i] = cache->get(test_kernel())->get(); });
    }
  }
  EXPECT_EQ(*compiler.count, 1);
  for (const Cubin* cubin : seen) EXPECT_EQ(cubin, seen[0]);
}

TEST(CubinCache, GetAllKeepsTheOrderAndCountsUp) {
  const TempDirectory temp;
  const CountingCompiler compiler;
  auto cache = CubinCache::open(temp / "cache", compiler);
  std::vector<KernelSource> sources;
  for (int i = 0; i < 8; ++i) sources.push_back(test_kernel(i % 5));  // three of them twice
  std::vector<size_t> done;
  const auto kernels = cache->get_all(sources, 4, [&](size_t count, size_t total) {
    EXPECT_EQ(total, sources.size());
    done.push_back(count);
  });
  ASSERT_TRUE(kernels) << kernels.error().message;
  ASSERT_EQ(kernels->size(), sources.size());
  for (size_t i = 0; i < sources.size(); ++i) EXPECT_EQ((*kernels)[i]->key, sources[i].key);
  EXPECT_EQ(*compiler.count, 5);
  EXPECT_EQ(done, (std::vector<size_t>{1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_TRUE(cache->get_all({})->empty());
}

TEST(CubinCache, GetAllCompilesAtOnce) {
  const TempDirectory temp;
  std::mutex mutex;
  std::condition_variable changed;
  int inside = 0;
  auto cache = CubinCache::open(temp / "cache", [&](const KernelSource& source) -> Result<Cubin> {
    std::unique_lock lock(mutex);
    ++inside;
    changed.notify_all();
    if (!changed.wait_for(lock, std::chrono::seconds(10), [&] { return inside == 3; })) {
      return fail(ErrorCode::kInternal, "alone in the compiler");
    }
    return test_cubin(source);
  });
  const std::vector<KernelSource> sources{test_kernel(0), test_kernel(1), test_kernel(2)};
  const auto kernels = cache->get_all(sources, 3);
  EXPECT_TRUE(kernels) << kernels.error().message;
}

TEST(CubinCache, GetAllReportsTheFirstFailureAndKeepsTheRest) {
  const TempDirectory temp;
  const CountingCompiler compiler;
  auto cache = CubinCache::open(temp / "cache", [&](const KernelSource& source) -> Result<Cubin> {
    if (source.key != "test/kernel0" && source.key != "test/kernel3") return compiler(source);
    return fail(ErrorCode::kCompile, "cannot compile {}", source.key);
  });
  std::vector<KernelSource> sources;
  for (int i = 0; i < 5; ++i) sources.push_back(test_kernel(i));
  const auto kernels = cache->get_all(sources, 2);
  ASSERT_FALSE(kernels);
  EXPECT_EQ(kernels.error().message, "cannot compile test/kernel0");
  EXPECT_EQ(*compiler.count, 3);
  EXPECT_FALSE(cache->get_all(sources, -1));
}

TEST(CubinCache, WhatACompilerThrowsIsAnErrorAndTheKernelIsTriedAgain) {
  const TempDirectory temp;
  const CountingCompiler compiler;
  std::atomic<bool> throws = true;
  auto cache = CubinCache::open(temp / "cache", [&](const KernelSource& source) -> Result<Cubin> {
    if (throws && source.key == "test/kernel1") throw std::bad_alloc();
    if (throws && source.key != "test/kernel0") throw std::runtime_error("broken compiler");
    return compiler(source);
  });
  std::vector<KernelSource> sources;
  for (int i = 0; i < 6; ++i) sources.push_back(test_kernel(i));
  const auto none = cache->get_all(sources, 4);
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, ErrorCode::kOutOfMemory);
  const auto one = cache->get(sources[2]);
  ASSERT_FALSE(one);
  EXPECT_EQ(one.error().message, "broken compiler");
  throws = false;
  const auto all = cache->get_all(sources, 4);
  ASSERT_TRUE(all) << all.error().message;
  EXPECT_EQ(*compiler.count, 6);
}

TEST(CubinCache, WhatTheCallerOfProgressThrowsIsAnError) {
  const TempDirectory temp;
  auto cache = CubinCache::open(temp / "cache", CountingCompiler());
  const std::vector<KernelSource> sources{test_kernel(0), test_kernel(1), test_kernel(2)};
  const auto kernels =
      cache->get_all(sources, 3, [](size_t, size_t) { throw std::runtime_error("no screen"); });
  ASSERT_FALSE(kernels);
  EXPECT_EQ(kernels.error().message, "no screen");
}

}  // namespace
}  // namespace f8::codegen
