// Damaged entries, unfit directories, full disks: one clear message, and nothing lost.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "codegen/cubin_cache.hpp"
#include "tests/unit/codegen/cache_testing.hpp"

namespace f8::codegen {
namespace {

using testing::CapturedLog;
using testing::Child;
using testing::CountingCompiler;
using testing::expect_same;
using testing::give_up_root;
using testing::kNobody;
using testing::TempDirectory;
using testing::test_cubin;
using testing::test_kernel;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

mode_t mode_of(const fs::path& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 ? info.st_mode & 07777 : 0;
}

std::string open_error(const fs::path& directory) {
  const auto cache = CubinCache::open(directory, CountingCompiler());
  return cache ? "opened" : cache.error().message;
}

size_t temporaries_in(const fs::path& directory) {
  size_t count = 0;
  for (const auto& file : fs::directory_iterator(directory)) {
    count += file.path().filename().native().starts_with("tmp.") ? 1 : 0;
  }
  return count;
}

// A cache with kernel 0 in it.
fs::path filled_cache(const TempDirectory& temp) {
  auto cache = CubinCache::open(temp / "cache", CountingCompiler());
  EXPECT_TRUE(cache && cache->get(test_kernel(0)));
  return temp / "cache";
}

struct Damage {
  const char* name;
  void (*inflict)(const fs::path& entry);
};

constexpr Damage kDamages[] = {
    {"cubin cut off", [](const fs::path& entry) { fs::resize_file(entry / "kernel.cubin", 10); }},
    {"cubin empty", [](const fs::path& entry) { fs::resize_file(entry / "kernel.cubin", 0); }},
    {"cubin grown",
     [](const fs::path& entry) {
       fs::resize_file(entry / "kernel.cubin", fs::file_size(entry / "kernel.cubin") + 1);
     }},
    {"cubin changed",
     [](const fs::path& entry) {
       std::string image = read_file(entry / "kernel.cubin").value();
       image[7] = static_cast<char>(image[7] ^ 4);
       (void)write_file_atomic(entry / "kernel.cubin", image);
     }},
    {"cubin gone", [](const fs::path& entry) { fs::remove(entry / "kernel.cubin"); }},
    {"manifest cut off",
     [](const fs::path& entry) {
       fs::resize_file(entry / "manifest", fs::file_size(entry / "manifest") / 2);
     }},
    {"manifest empty", [](const fs::path& entry) { fs::resize_file(entry / "manifest", 0); }},
    {"manifest gone", [](const fs::path& entry) { fs::remove(entry / "manifest"); }},
    {"manifest is text",
     [](const fs::path& entry) { (void)write_file_atomic(entry / "manifest", "hello\n"); }},
    {"manifest is a directory",
     [](const fs::path& entry) {
       fs::remove(entry / "manifest");
       fs::create_directory(entry / "manifest");
     }},
    {"entry empty",
     [](const fs::path& entry) {
       fs::remove_all(entry);
       fs::create_directory(entry);
     }},
    {"entry is a file",
     [](const fs::path& entry) {
       fs::remove_all(entry);
       (void)write_file_atomic(entry, "hello\n");
     }},
    {"cubin is a sparse file of 60 GB",
     [](const fs::path& entry) { fs::resize_file(entry / "kernel.cubin", uintmax_t{60} << 30); }},
    {"manifest is a sparse file of 60 GB",
     [](const fs::path& entry) { fs::resize_file(entry / "manifest", uintmax_t{60} << 30); }},
    {"cubin is a fifo",
     [](const fs::path& entry) {
       fs::remove(entry / "kernel.cubin");
       ASSERT_EQ(::mkfifo((entry / "kernel.cubin").c_str(), 0644), 0);
     }},
    {"manifest is a fifo",
     [](const fs::path& entry) {
       fs::remove(entry / "manifest");
       ASSERT_EQ(::mkfifo((entry / "manifest").c_str(), 0644), 0);
     }},
    {"manifest is a link to a device",
     [](const fs::path& entry) {
       fs::remove(entry / "manifest");
       fs::create_symlink("/dev/zero", entry / "manifest");
     }},
    {"cubin is a link to the cubin",
     [](const fs::path& entry) {
       fs::rename(entry / "kernel.cubin", entry.parent_path() / "moved");
       fs::create_symlink("../moved", entry / "kernel.cubin");
     }},
    {"cubin can be written by others",
     [](const fs::path& entry) { ASSERT_EQ(::chmod((entry / "kernel.cubin").c_str(), 0666), 0); }},
    {"entry can be written by others",
     [](const fs::path& entry) { ASSERT_EQ(::chmod(entry.c_str(), 0775), 0); }},
    {"entry is a link to an entry",
     [](const fs::path& entry) {
       fs::rename(entry, entry.parent_path() / "moved");
       fs::create_directory_symlink("moved", entry);
     }},
    {"entry is a fifo",
     [](const fs::path& entry) {
       fs::remove_all(entry);
       ASSERT_EQ(::mkfifo(entry.c_str(), 0644), 0);
     }},
    {"entry of another kernel",
     [](const fs::path& entry) {
       auto cache = CubinCache::open(entry.parent_path(), CountingCompiler());
       (void)cache->get(test_kernel(1));
       fs::remove_all(entry);
       fs::copy(entry.parent_path() / cache_key(test_kernel(1)).value(), entry);
     }},
};

TEST(DamagedEntry, IsRebuiltOnceWithOneWarning) {
  for (const Damage& damage : kDamages) {
    SCOPED_TRACE(damage.name);
    const TempDirectory temp;
    const fs::path directory = filled_cache(temp);
    const fs::path entry = directory / cache_key(test_kernel(0)).value();
    damage.inflict(entry);

    const CapturedLog log;
    const CountingCompiler compiler;
    const auto kernel = CubinCache::open(directory, compiler)->get(test_kernel(0));
    ASSERT_TRUE(kernel) << kernel.error().message;
    expect_same(**kernel, test_cubin(test_kernel(0)));
    EXPECT_EQ(*compiler.count, 1);
    ASSERT_EQ(log.warnings().size(), 1u);
    EXPECT_TRUE(contains(log.warnings()[0], entry.string())) << log.warnings()[0];
    EXPECT_TRUE(contains(log.warnings()[0], "test/kernel0")) << log.warnings()[0];

    const auto again = CubinCache::open(directory, compiler)->get(test_kernel(0));
    ASSERT_TRUE(again);
    EXPECT_TRUE((*again)->from_cache);
    EXPECT_EQ(*compiler.count, 1);
    EXPECT_EQ(log.warnings().size(), 1u);
    EXPECT_EQ(temporaries_in(directory), 0u);
  }
}

TEST(CacheDirectory, IsMadePrivateWhateverTheUmask) {
  const TempDirectory temp;
  const mode_t previous = ::umask(0);
  const std::string error = open_error(temp / "a" / "b" / "c/");
  ::umask(previous);
  EXPECT_EQ(error, "opened");
  for (const char* path : {"a", "a/b", "a/b/c"}) EXPECT_EQ(mode_of(temp / path), 0700u) << path;
}

TEST(CacheDirectory, ThatOthersCanWriteIsRefused) {
  for (const mode_t mode : {0777u, 0702u, 0770u, 0720u, 01777u}) {
    const TempDirectory temp;
    const fs::path directory = filled_cache(temp);
    ASSERT_EQ(::chmod(directory.c_str(), mode), 0);
    const std::string error = open_error(directory);
    EXPECT_TRUE(contains(error, directory.string())) << error;
    EXPECT_TRUE(contains(error, "chmod go-w '" + directory.string() + "'")) << error;
    ASSERT_EQ(::chmod(directory.c_str(), mode & ~022u), 0);
    EXPECT_EQ(open_error(directory), "opened") << "after what the message says to do";
  }
}

TEST(CacheDirectory, OfAnotherUserIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a directory away";
  const TempDirectory temp;
  const fs::path directory = filled_cache(temp);
  ASSERT_EQ(::chown(directory.c_str(), 12345, 12345), 0);
  const std::string error = open_error(directory);
  EXPECT_TRUE(contains(error, directory.string())) << error;
  EXPECT_TRUE(contains(error, "12345")) << error;
  EXPECT_TRUE(contains(error, "FLOAT8_CACHE_DIR")) << error;
}

TEST(CacheDirectory, ThatIsAFileOrCannotBeMadeNamesTheVariable) {
  const TempDirectory temp;
  ASSERT_TRUE(write_file_atomic(temp / "file", "x"));
  for (const fs::path& path :
       {temp / "file", temp / "file" / "below", fs::path("/proc/none/cache")}) {
    const std::string error = open_error(path);
    EXPECT_TRUE(contains(error, "FLOAT8_CACHE_DIR")) << error;
    EXPECT_TRUE(contains(error, path.string())) << error;
    EXPECT_FALSE(contains(error, "\n")) << error;
  }
  EXPECT_EQ(read_file(temp / "file").value(), "x");
}

TEST(CacheDirectory, WithoutOneKernelsAreInMemoryAlone) {
  const TempDirectory temp;
  const fs::path before = fs::current_path();
  fs::current_path(temp.path());
  const CapturedLog log;
  const CountingCompiler compiler;
  for (int i = 0; i < 2; ++i) {
    auto cache = CubinCache::open("", compiler);
    ASSERT_TRUE(cache) << cache.error().message;
    EXPECT_TRUE(cache->get(test_kernel(0)));
    EXPECT_TRUE(cache->get(test_kernel(0)));
    EXPECT_EQ(cache->directory(), "");
    EXPECT_EQ(cache->not_stored().kernels, 1u);
  }
  fs::current_path(before);
  EXPECT_EQ(*compiler.count, 2);
  ASSERT_LE(log.warnings().size(), 1u) << "it is said once a process";
  if (!log.warnings().empty()) {
    EXPECT_TRUE(contains(log.warnings()[0], "set FLOAT8_CACHE_DIR")) << log.warnings()[0];
  }
  EXPECT_TRUE(fs::is_empty(temp.path()));
}

TEST(CacheDirectory, IsMadeAgainWhenItIsDeletedInUse) {
  const TempDirectory temp;
  const CapturedLog log;
  auto cache = CubinCache::open(temp / "cache", CountingCompiler());
  fs::remove_all(temp / "cache");
  EXPECT_TRUE(cache->get(test_kernel(0)));
  EXPECT_TRUE(log.warnings().empty());
  const auto again = CubinCache::open(temp / "cache", CountingCompiler())->get(test_kernel(0));
  EXPECT_TRUE((*again)->from_cache);
}

TEST(CacheDirectory, OldTemporariesOfDeadProcessesGo) {
  const TempDirectory temp;
  const fs::path directory = filled_cache(temp);
  pid_t dead = 0;
  {
    Child child([] { return std::string(); });
    dead = child.pid();
    EXPECT_EQ(child.verdict(), "");
  }
  const auto make = [&](const std::string& name, std::chrono::minutes age) {
    fs::create_directory(directory / name);
    EXPECT_TRUE(write_file_atomic(directory / name / "kernel.cubin", "half"));
    fs::last_write_time(directory / name, fs::file_time_type::clock::now() - age);
    return directory / name;
  };
  const fs::path old = make(f8::format("tmp.{}.AAAAAA", dead), std::chrono::minutes(61));
  const fs::path young = make(f8::format("tmp.{}.BBBBBB", dead), std::chrono::minutes(5));
  const fs::path alive = make(f8::format("tmp.{}.CCCCCC", ::getpid()), std::chrono::minutes(61));
  fs::create_directories(old / "deep" / "deeper");
  fs::create_directory_symlink(directory, old / "link");
  fs::last_write_time(old, fs::file_time_type::clock::now() - std::chrono::minutes(61));
  const fs::path not_ours = make("tmp.notes", std::chrono::minutes(61));
  EXPECT_EQ(open_error(directory), "opened");
  EXPECT_FALSE(fs::exists(old));
  EXPECT_TRUE(fs::exists(young));
  EXPECT_TRUE(fs::exists(alive));
  EXPECT_TRUE(fs::exists(not_ours));
  EXPECT_TRUE(fs::exists(directory / cache_key(test_kernel(0)).value()));
}

// Uses a directory that cannot be written, as a user whom permissions bind.
std::string use_read_only(const fs::path& directory) {
  const CapturedLog log;
  const CountingCompiler compiler;
  auto cache = CubinCache::open(directory, compiler);
  if (!cache) return cache.error().message;
  const auto stored = cache->get(test_kernel(0));
  if (!stored) return stored.error().message;
  if (!(*stored)->from_cache || *compiler.count != 0) return "the stored kernel was not used";
  if (!log.warnings().empty()) return "a warning for reading: " + log.warnings()[0];
  for (int i = 1; i <= 2; ++i) {
    const auto compiled = cache->get(test_kernel(i));
    if (!compiled) return compiled.error().message;
    if ((*compiled)->image != test_cubin(test_kernel(i)).image) return "another image";
  }
  if (*compiler.count != 2) return f8::format("{} compiles", *compiler.count);
  if (log.warnings().size() != 1) return f8::format("{} warnings", log.warnings().size());
  if (!contains(log.warnings()[0], directory.string())) return log.warnings()[0];
  return "";
}

TEST(ReadOnlyCache, GivesWhatItHasAndKeepsTheRestInMemory) {
  const TempDirectory temp;
  const fs::path directory = filled_cache(temp);
  if (::geteuid() == 0) {
    ASSERT_EQ(::chown(directory.c_str(), kNobody, kNobody), 0);
  }
  ASSERT_EQ(::chmod(directory.c_str(), 0500), 0);
  Child child([&] { return give_up_root() ? use_read_only(directory) : "still root"; });
  EXPECT_EQ(child.verdict(), "");
  ASSERT_EQ(::chmod(directory.c_str(), 0700), 0);
}

TEST(ReadOnlyCache, OfRootServesOthers) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make a directory of root's";
  const TempDirectory temp;
  const fs::path directory = filled_cache(temp);
  ASSERT_EQ(::chmod(directory.c_str(), 0755), 0);
  Child child([&] { return give_up_root() ? use_read_only(directory) : "still root"; });
  EXPECT_EQ(child.verdict(), "");
}

TEST(SharedCache, WorksWhateverTheUmaskOfItsOwner) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make a directory of root's";
  for (const mode_t umask : {0000u, 0022u, 0027u, 0077u, 0177u}) {
    for (const mode_t shared : {0755u, 02750u}) {
      SCOPED_TRACE(f8::format("umask {:03o}, mode {:04o}", umask, shared));
      const TempDirectory temp;
      const fs::path directory = temp / "cache";
      fs::create_directory(directory);
      ASSERT_EQ(::chown(directory.c_str(), 0, kNobody), 0);
      ASSERT_EQ(::chmod(directory.c_str(), shared), 0);
      const mode_t previous = ::umask(umask);
      filled_cache(temp);
      ::umask(previous);
      Child child([&] { return give_up_root() ? use_read_only(directory) : "still root"; });
      EXPECT_EQ(child.verdict(), "");
    }
  }
}

TEST(UnreadableCache, OfAnotherUserIsOneLine) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make a directory of root's";
  const TempDirectory temp;
  const fs::path directory = filled_cache(temp);
  Child refused([&] { return give_up_root() ? open_error(directory) : "still root"; });
  const std::string error = refused.verdict();
  EXPECT_TRUE(contains(error, "cannot be read (Permission denied); set FLOAT8_CACHE_DIR")) << error;

  // A directory that can be entered, with kernels in it that cannot be read.
  {
    auto cache = CubinCache::open(directory, CountingCompiler());
    ASSERT_TRUE(cache && cache->get(test_kernel(1)) && cache->get(test_kernel(2)));
  }
  ASSERT_EQ(::chmod(directory.c_str(), 0755), 0);
  for (int i = 0; i < 2; ++i) {
    const fs::path entry = directory / cache_key(test_kernel(i)).value();
    ASSERT_EQ(::chmod((i == 0 ? entry : entry / "manifest").c_str(), 0600), 0);
  }
  Child child([&]() -> std::string {
    if (!give_up_root()) return "still root";
    const CapturedLog log;
    const CountingCompiler compiler;
    auto cache = CubinCache::open(directory, compiler);
    if (!cache) return cache.error().message;
    for (int i = 0; i < 3; ++i) {
      if (!cache->get(test_kernel(i))) return "no kernel";
    }
    if (*compiler.count != 2) return f8::format("{} compiles", *compiler.count);
    if (cache->not_stored().kernels != 2) return "not_stored is wrong";
    if (log.warnings().size() != 1) return f8::format("{} warnings", log.warnings().size());
    return contains(log.warnings()[0], "chmod -R a+rX") ? "" : log.warnings()[0];
  });
  EXPECT_EQ(child.verdict(), "");
}

// An entry that cannot be opened for want of descriptors is a sound one.
TEST(UnreadableCache, ForWantOfDescriptorsLosesNothing) {
  const TempDirectory temp;
  const fs::path directory = filled_cache(temp);
  const CountingCompiler compiler;
  Child child([&]() -> std::string {
    const CapturedLog log;
    auto cache = CubinCache::open(directory, compiler);
    const Descriptor next(::open("/dev/null", O_RDONLY));
    rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return "no limit";
    limit.rlim_cur = static_cast<rlim_t>(next.get());
    if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) return "no limit";
    const auto kernel = cache->get(test_kernel(0));
    if (!kernel) return kernel.error().message;
    if (log.warnings().size() != 1) return f8::format("{} warnings", log.warnings().size());
    return contains(log.warnings()[0], "Too many open files") ? "" : log.warnings()[0];
  });
  EXPECT_EQ(child.verdict(), "");
  EXPECT_TRUE((*CubinCache::open(directory, compiler)->get(test_kernel(0)))->from_cache);
}

TEST(DamagedEntry, OfAnotherUserIsRebuilt) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a file away";
  for (const char* part : {"", "manifest", "kernel.cubin"}) {
    const TempDirectory temp;
    const fs::path directory = filled_cache(temp);
    const fs::path entry = directory / cache_key(test_kernel(0)).value();
    ASSERT_EQ(::chown((entry / part).c_str(), 12345, 12345), 0);
    const CapturedLog log;
    const CountingCompiler compiler;
    ASSERT_TRUE(CubinCache::open(directory, compiler)->get(test_kernel(0)));
    EXPECT_EQ(*compiler.count, 1) << part;
    ASSERT_EQ(log.warnings().size(), 1u);
    EXPECT_TRUE(contains(log.warnings()[0], "belongs to user 12345")) << log.warnings()[0];
    EXPECT_TRUE((*CubinCache::open(directory, compiler)->get(test_kernel(0)))->from_cache);
  }
}

// Every write to a file fails from its 100th byte on, as on a disk that fills up.
bool fill_the_disk() {
  ::signal(SIGXFSZ, SIG_IGN);
  const rlimit limit{100, RLIM_INFINITY};
  return ::setrlimit(RLIMIT_FSIZE, &limit) == 0;
}

bool empty_the_disk() {
  const rlimit limit{RLIM_INFINITY, RLIM_INFINITY};
  return ::setrlimit(RLIMIT_FSIZE, &limit) == 0;
}

std::string use_full_disk(const fs::path& directory) {
  const CapturedLog log;
  const CountingCompiler compiler;
  if (!fill_the_disk()) return "no limit";
  auto cache = CubinCache::open(directory, compiler);
  if (!cache) return cache.error().message;
  for (int i = 0; i <= 2; ++i) {
    const auto kernel = cache->get(test_kernel(i));
    if (!kernel) return kernel.error().message;
    if ((*kernel)->image != test_cubin(test_kernel(i)).image) return "another image";
  }
  if (*compiler.count != 2) return f8::format("{} compiles, kernel 0 was there", *compiler.count);
  if (log.warnings().size() != 1) return f8::format("{} warnings", log.warnings().size());
  if (!contains(log.warnings()[0], "File too large")) return log.warnings()[0];
  if (cache->not_stored().kernels != 2) return "not_stored is wrong";
  if (!contains(cache->not_stored().reason, directory.string())) return cache->not_stored().reason;
  if (temporaries_in(directory) != 0) return "a temporary directory was left";

  if (!empty_the_disk()) return "the limit stays";
  auto later = CubinCache::open(directory, compiler);
  if (!later->get(test_kernel(1)) || *compiler.count != 3) return "kernel 1 was not compiled again";
  auto last = CubinCache::open(directory, compiler);
  if (!(*last->get(test_kernel(1)))->from_cache) return "kernel 1 was not stored";
  return log.warnings().size() == 1 ? "" : "a warning too many";
}

TEST(FullDisk, KernelsComeFromMemoryAndNothingIsLost) {
  const TempDirectory temp;
  const fs::path directory = filled_cache(temp);
  Child child([&] { return use_full_disk(directory); });
  EXPECT_EQ(child.verdict(), "");
}

}  // namespace
}  // namespace f8::codegen
