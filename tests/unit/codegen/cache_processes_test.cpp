// Several processes on one cache: who compiles, who waits, and what a kill leaves behind.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <new>
#include <optional>
#include <thread>

#include "codegen/cubin_cache.hpp"
#include "tests/bytes_read.hpp"
#include "tests/unit/codegen/cache_testing.hpp"

namespace {

int lock_error = 0;  // what flock fails with, as on a file system without locks; 0: it locks

}  // namespace

// Calls of this program reach this definition before that of libc.
extern "C" int flock(int file, int operation) noexcept {
  if (lock_error == 0) return static_cast<int>(::syscall(SYS_flock, file, operation));
  errno = lock_error;
  return -1;
}

namespace f8::codegen {
namespace {

using f8::testing::bytes_read;
using testing::CapturedLog;
using testing::Child;
using testing::CountingCompiler;
using testing::TempDirectory;
using testing::test_cubin;
using testing::test_kernel;

// One byte for each event, between processes.
class Bell {
 public:
  Bell() {
    if (::pipe(ends_) != 0) std::abort();
  }
  Bell(const Bell&) = delete;
  Bell& operator=(const Bell&) = delete;
  ~Bell() {
    ::close(ends_[0]);
    ::close(ends_[1]);
  }
  void ring() const {
    if (::write(ends_[1], "!", 1) != 1) std::abort();
  }
  [[nodiscard]] bool rung_within(std::chrono::milliseconds time) const {
    pollfd wait{ends_[0], POLLIN, 0};
    if (::poll(&wait, 1, static_cast<int>(time.count())) != 1) return false;
    char byte = 0;
    return ::read(ends_[0], &byte, 1) == 1;
  }
  [[nodiscard]] int count() const {
    int rings = 0;
    while (rung_within(std::chrono::milliseconds(0))) ++rings;
    return rings;
  }

 private:
  int ends_[2];
};

constexpr std::chrono::seconds kLong(200);  // ten times what a busy machine takes

std::string get_kernel(const fs::path& directory, const CubinCache::Compiler& compiler) {
  auto cache = CubinCache::open(directory, compiler);
  if (!cache) return cache.error().message;
  const auto kernel = cache->get(test_kernel());
  if (!kernel) return kernel.error().message;
  return (*kernel)->image == test_cubin(test_kernel()).image ? "" : "another image";
}

class CacheProcesses : public ::testing::Test {
 protected:
  // Children inherit the opened library; the processes under test then start without a delay.
  static void SetUpTestSuite() { ASSERT_TRUE(nvrtc_version()); }

  TempDirectory temp_;
  const fs::path directory_ = temp_ / "cache";
};

TEST_F(CacheProcesses, CompileAKernelOnce) {
  constexpr int kRanks = 6;
  const Bell asking;
  const Bell compiled;
  std::vector<std::unique_ptr<Child>> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.push_back(std::make_unique<Child>([&] {
      asking.ring();
      return get_kernel(directory_, [&](const KernelSource& source) -> Result<Cubin> {
        compiled.ring();
        for (int i = 0; i < kRanks; ++i) {
          if (!asking.rung_within(kLong)) return fail(ErrorCode::kInternal, "a rank is missing");
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(30));  // from asking to the lock
        return test_cubin(source);
      });
    }));
  }
  for (const auto& rank : ranks) EXPECT_EQ(rank->verdict(), "");
  EXPECT_EQ(compiled.count(), 1);
}

// Each rank's first compile ends when two ranks compile, which never is where all wait for one.
TEST_F(CacheProcesses, ShareOutTheKernelsOfAModel) {
  constexpr int kModel = 12;
  const Bell compiled;
  void* const shared = ::mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  auto* const compiling = new (shared) std::atomic<int>(0);
  std::vector<KernelSource> model;
  for (int i = 0; i < kModel; ++i) model.push_back(test_kernel(i));
  std::vector<std::unique_ptr<Child>> ranks;
  for (int rank = 0; rank < 4; ++rank) {
    ranks.push_back(std::make_unique<Child>([&]() -> std::string {
      bool is_first = true;
      const auto compiler = [&](const KernelSource& source) -> Result<Cubin> {
        compiled.ring();
        if (is_first) ++*compiling;
        is_first = false;
        for (int waits = 0; *compiling < 2; ++waits) {
          if (waits == 60'000) return fail(ErrorCode::kInternal, "the others wait for this rank");
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        return test_cubin(source);
      };
      auto cache = CubinCache::open(directory_, compiler);
      if (!cache) return cache.error().message;
      const auto kernels = cache->get_all(model, 1);
      return kernels ? "" : kernels.error().message;
    }));
  }
  for (const auto& rank : ranks) EXPECT_EQ(rank->verdict(), "");
  EXPECT_EQ(compiled.count(), kModel);
  ::munmap(shared, sizeof(std::atomic<int>));
}

TEST_F(CacheProcesses, AKilledCompilerFreesTheNext) {
  const Bell first_compiles;
  const Bell second_compiles;
  Child first([&] {
    return get_kernel(directory_, [&](const KernelSource&) -> Result<Cubin> {
      first_compiles.ring();
      std::this_thread::sleep_for(kLong);
      return fail(ErrorCode::kInternal, "not killed");
    });
  });
  ASSERT_TRUE(first_compiles.rung_within(kLong));
  Child second([&] {
    return get_kernel(directory_, [&](const KernelSource& source) {
      second_compiles.ring();
      return Result<Cubin>(test_cubin(source));
    });
  });
  EXPECT_FALSE(second_compiles.rung_within(std::chrono::milliseconds(150)))
      << "compiled while another process held the lock";
  first.kill();
  EXPECT_EQ(second.verdict(), "");
  EXPECT_EQ(second_compiles.count(), 1);
}

TEST_F(CacheProcesses, AStoppedCompilerIsNamedAndThenDoneWithout) {
  const Bell compiling;
  Child first([&] {
    return get_kernel(directory_, [&](const KernelSource&) -> Result<Cubin> {
      compiling.ring();
      std::this_thread::sleep_for(kLong);
      return fail(ErrorCode::kInternal, "not killed");
    });
  });
  ASSERT_TRUE(compiling.rung_within(kLong));
  ASSERT_EQ(::kill(first.pid(), SIGSTOP), 0);
  int status = 0;
  ASSERT_EQ(::waitpid(first.pid(), &status, WUNTRACED), first.pid());

  const CapturedLog log;
  const CountingCompiler compiler;
  const LockPatience patience{.say_after = std::chrono::milliseconds(40),
                              .give_up_after = std::chrono::milliseconds(200)};
  auto cache = CubinCache::open(directory_, compiler, patience);
  const auto kernel = cache->get(test_kernel());
  ASSERT_TRUE(kernel) << kernel.error().message;
  EXPECT_EQ(*compiler.count, 1);
  EXPECT_EQ(cache->not_stored().kernels, 0u) << "an entry appears by a rename, also without a lock";
  ASSERT_EQ(log.warnings().size(), 2u);
  const std::string who = f8::format("process {} on ", first.pid());
  const std::string remedy = f8::format("end it: kill -9 {}", first.pid());
  for (const std::string& warning : log.warnings()) {
    EXPECT_NE(warning.find(who), std::string::npos) << warning;
    EXPECT_NE(warning.find(", which is stopped"), std::string::npos) << warning;
    EXPECT_NE(warning.find("test/kernel0"), std::string::npos) << warning;
    EXPECT_NE(warning.find(remedy), std::string::npos) << warning;
  }
  EXPECT_TRUE((*CubinCache::open(directory_, compiler)->get(test_kernel()))->from_cache);
}

// A lock is what a stranger may have left there.
TEST_F(CacheProcesses, AnOddLockStopsNobody) {
  using Make = void (*)(const fs::path&);
  const CapturedLog log;
  int i = 0;
  for (const Make make : {
           Make([](const fs::path& lock) { fs::create_directory(lock); }),
           Make([](const fs::path& lock) { ASSERT_EQ(::mkfifo(lock.c_str(), 0644), 0); }),
           Make([](const fs::path& lock) { fs::create_symlink("/dev/zero", lock); }),
           Make([](const fs::path& lock) { std::ofstream(lock) << "12\033[31m\n"; }),
       }) {
    auto cache = CubinCache::open(directory_, CountingCompiler());
    ++i;
    make(directory_ / (cache_key(test_kernel(i)).value() + ".lock"));
    EXPECT_TRUE(cache->get(test_kernel(i)));
    EXPECT_EQ(cache->not_stored().kernels, 0u);
  }
  EXPECT_TRUE(log.warnings().empty()) << log.warnings()[0];
}

// Both are past the lock before either has stored, so both compile; the second finds the first's entry.
TEST_F(CacheProcesses, AFileSystemWithoutLocksOnlyCompilesMore) {
  for (const int error : {ENOLCK, ENOSYS, EOPNOTSUPP}) {
    const Bell compiling;
    const Bell stored;
    const auto rank = [&](auto&& wait) {
      return std::make_unique<Child>([&directory = directory_, &compiling, error, wait] {
        lock_error = error;
        return get_kernel(directory, [&](const KernelSource& source) -> Result<Cubin> {
          compiling.ring();
          wait();
          return test_cubin(source);
        });
      });
    };
    const auto first = rank([&] { (void)stored.rung_within(kLong); });
    ASSERT_TRUE(compiling.rung_within(kLong));
    const auto second = rank([] {});
    EXPECT_EQ(second->verdict(), "");
    stored.ring();
    EXPECT_EQ(first->verdict(), "");
    EXPECT_EQ(compiling.count(), 1) << "of the second";
    const CapturedLog log;
    const CountingCompiler compiler;
    EXPECT_TRUE((*CubinCache::open(directory_, compiler)->get(test_kernel()))->from_cache);
    EXPECT_EQ(*compiler.count, 0);
    EXPECT_TRUE(log.warnings().empty()) << log.warnings()[0];
    fs::remove_all(directory_);
  }
}

TEST_F(CacheProcesses, AFailedCompileIsTriedByTheNext) {
  Child first([&] {
    return get_kernel(directory_, [](const KernelSource&) -> Result<Cubin> {
      return fail(ErrorCode::kCompile, "no");
    });
  });
  EXPECT_EQ(first.verdict(), "no");
  EXPECT_EQ(get_kernel(directory_, CountingCompiler()), "");
}

TEST_F(CacheProcesses, AKillAtAnyMomentLeavesOnlyWholeEntries) {
  const CapturedLog log;
  for (int round = 0; round < 12; ++round) {
    const Bell stored;
    Child writer([&] {
      auto cache = CubinCache::open(directory_, CountingCompiler());
      for (int i = 0;; ++i) {
        (void)cache->get(test_kernel(round * 1000 + i));
        if (i == 0) stored.ring();
      }
      return std::string();
    });
    ASSERT_TRUE(stored.rung_within(kLong));
    std::this_thread::sleep_for(std::chrono::microseconds(3000 * round));
    writer.kill();
    auto cache = CubinCache::open(directory_, CountingCompiler());
    ASSERT_TRUE(cache) << cache.error().message;
    int whole = 0;
    while ((*cache->get(test_kernel(round * 1000 + whole)))->from_cache) ++whole;
    EXPECT_GE(whole, 1);
  }
  EXPECT_TRUE(log.warnings().empty()) << log.warnings()[0];
}

// The size of real kernels: a source of 40 KB, a cubin of 30 KB.
KernelSource large_kernel(int i) {
  KernelSource source = test_kernel(i);
  source.source.resize(40 << 10, ' ');
  return source;
}

TEST_F(CacheProcesses, TheSecondStartReadsEachEntryOnce) {
  constexpr int kKernels = 30;
  auto first = CubinCache::open(directory_, [](const KernelSource& source) -> Result<Cubin> {
    Cubin cubin = test_cubin(source);
    cubin.image.resize(30 << 10, std::byte{7});
    return cubin;
  });
  for (int i = 0; i < kKernels; ++i) ASSERT_TRUE(first->get(large_kernel(i)));
  uint64_t stored = 0;
  for (const auto& entry : fs::recursive_directory_iterator(directory_)) {
    if (entry.is_regular_file()) stored += entry.file_size();
  }
  ASSERT_GT(stored, kKernels * (30 << 10));

  const CountingCompiler compiler;
  const uint64_t before = bytes_read();
  auto second = CubinCache::open(directory_, compiler);
  for (int i = 0; i < kKernels; ++i) ASSERT_TRUE(second->get(large_kernel(i)));
  EXPECT_EQ(*compiler.count, 0);
  EXPECT_LT(bytes_read() - before, stored + stored / 10);
}

}  // namespace
}  // namespace f8::codegen
