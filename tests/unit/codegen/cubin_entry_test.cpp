// The manifest's grammar, and entries as they come and go.
#include "codegen/cubin_entry.hpp"

#include <gtest/gtest.h>

#include "base/hash.hpp"
#include "tests/unit/codegen/cache_testing.hpp"

namespace f8::codegen {
namespace {

using testing::expect_same;
using testing::TempDirectory;
using testing::test_cubin;
using testing::test_kernel;

const std::string kKey(32, 'a');

std::string image_of(const Cubin& cubin) {
  return {reinterpret_cast<const char*>(cubin.image.data()), cubin.image.size()};
}

size_t files_in(const fs::path& directory) {
  return static_cast<size_t>(std::distance(fs::directory_iterator(directory), {}));
}

TEST(Manifest, RoundTrips) {
  const Cubin cubin = test_cubin(test_kernel());
  const auto read = read_manifest(write_manifest(kKey, cubin), kKey, image_of(cubin));
  ASSERT_TRUE(read) << read.error().message;
  Cubin whole = *read;
  whole.image = cubin.image;
  expect_same(whole, cubin);
}

TEST(Manifest, CutOffAnywhereIsRefused) {
  const Cubin cubin = test_cubin(test_kernel());
  const std::string manifest = write_manifest(kKey, cubin);
  for (size_t bytes = 0; bytes < manifest.size(); ++bytes) {
    EXPECT_FALSE(read_manifest(manifest.substr(0, bytes), kKey, image_of(cubin))) << bytes;
  }
}

TEST(Manifest, AnyChangedByteIsRefused) {
  const Cubin cubin = test_cubin(test_kernel());
  const std::string manifest = write_manifest(kKey, cubin);
  for (size_t at = 0; at < manifest.size(); ++at) {
    std::string changed = manifest;
    changed[at] = static_cast<char>(changed[at] ^ 1);
    EXPECT_FALSE(read_manifest(changed, kKey, image_of(cubin))) << at;
  }
}

// A sound checksum over a body that does not follow the grammar.
std::string signed_manifest(std::string body) {
  body += f8::format("checksum {}\n", hash_hex(body));
  return body;
}

TEST(Manifest, ASoundChecksumDoesNotExcuseTheRest) {
  const Cubin cubin = test_cubin(test_kernel());
  const std::string manifest = write_manifest(kKey, cubin);
  const std::string body = manifest.substr(0, manifest.rfind("checksum "));
  ASSERT_TRUE(read_manifest(signed_manifest(body), kKey, image_of(cubin)));

  const auto refused_with = [&](const std::string& from, const std::string& to) {
    std::string changed = body;
    const size_t at = changed.find(from);
    if (at == std::string::npos) return std::string("no such text");
    changed.replace(at, from.size(), to);
    const auto read = read_manifest(signed_manifest(changed), kKey, image_of(cubin));
    return read ? std::string("accepted") : read.error().message;
  };
  const std::string log_bytes = f8::format("log_bytes {}", cubin.log.size());
  EXPECT_NE(refused_with("registers 168", "registers many").find("registers"), std::string::npos);
  EXPECT_NE(refused_with("registers 168", "registers -1").find("registers"), std::string::npos);
  EXPECT_NE(refused_with("registers 168", "registers 99999999999").find("registers"),
            std::string::npos);
  EXPECT_NE(refused_with("spill_bytes 12\n", "").find("spill_bytes"), std::string::npos);
  EXPECT_NE(refused_with(log_bytes, "log_bytes 99999").find("log"), std::string::npos);
  EXPECT_NE(refused_with(log_bytes, "log_bytes 18446744073709551615").find("log"),
            std::string::npos);
  EXPECT_NE(refused_with(log_bytes, "log_bytes 1").find("log"), std::string::npos);
  EXPECT_NE(refused_with("float8 cubin 1", "float8 cubin 2").find("another entry"),
            std::string::npos);
  EXPECT_NE(refused_with("key aaaa", "key bbbb").find("another entry"), std::string::npos);
  EXPECT_NE(refused_with("cubin_bytes ", "cubin_bytes 1").find("kernel.cubin has"),
            std::string::npos);
}

TEST(CubinEntry, StoredAndLoaded) {
  const TempDirectory temp;
  const CacheDirectory cache = open_cache_directory(temp.path()).value();
  const Cubin cubin = test_cubin(test_kernel());
  EXPECT_EQ(load_entry(cache, kKey).error().code, ErrorCode::kNotFound);
  const auto stored = store_entry(cache, kKey, cubin);
  ASSERT_TRUE(stored) << stored.error().message;
  EXPECT_FALSE(stored->has_value());
  const auto loaded = load_entry(cache, kKey);
  ASSERT_TRUE(loaded) << loaded.error().message;
  EXPECT_TRUE(loaded->from_cache);
  expect_same(*loaded, cubin);
  EXPECT_EQ(files_in(temp.path()), 1u);
}

TEST(CubinEntry, TheLoserOfARaceGetsTheWinnersEntry) {
  const TempDirectory temp;
  const CacheDirectory cache = open_cache_directory(temp.path()).value();
  Cubin winner = test_cubin(test_kernel());
  ASSERT_TRUE(store_entry(cache, kKey, winner));
  Cubin loser = winner;
  loser.image.push_back(std::byte{1});
  const auto stored = store_entry(cache, kKey, loser);
  ASSERT_TRUE(stored) << stored.error().message;
  ASSERT_TRUE(stored->has_value());
  expect_same(**stored, winner);
  EXPECT_EQ(files_in(temp.path()), 1u) << "the loser left its temporary directory";
}

TEST(CubinEntry, RemovedWhole) {
  const TempDirectory temp;
  const CacheDirectory cache = open_cache_directory(temp.path()).value();
  ASSERT_TRUE(store_entry(cache, kKey, test_cubin(test_kernel())));
  EXPECT_TRUE(remove_entry(cache, kKey));
  EXPECT_EQ(files_in(temp.path()), 0u);
  EXPECT_TRUE(remove_entry(cache, kKey)) << "already gone is as good";
}

TEST(CubinEntry, TooLargeToBeReadIsNotStored) {
  const TempDirectory temp;
  const CacheDirectory cache = open_cache_directory(temp.path()).value();
  Cubin cubin = test_cubin(test_kernel());
  cubin.image.resize(kMaxImageBytes + 1);
  const auto stored = store_entry(cache, kKey, cubin);
  ASSERT_FALSE(stored);
  EXPECT_NE(stored.error().message.find("kernel.cubin would have 67108865 bytes"),
            std::string::npos)
      << stored.error().message;
  EXPECT_EQ(files_in(temp.path()), 0u);
}

// What a name leads to may change between two calls; an open directory stays the same one.
TEST(CubinEntry, ASwappedDirectoryIsNotTrusted) {
  const TempDirectory temp;
  const fs::path path = temp / "cache";
  const CacheDirectory cache = open_cache_directory(path).value();
  const Cubin ours = test_cubin(test_kernel());
  ASSERT_TRUE(store_entry(cache, kKey, ours));
  Cubin theirs = ours;
  theirs.image.assign(100, std::byte{66});
  {
    const CacheDirectory planted = open_cache_directory(temp / "planted").value();
    ASSERT_TRUE(store_entry(planted, kKey, theirs));
    ASSERT_TRUE(store_entry(planted, std::string(32, 'b'), theirs));
  }
  fs::rename(path, temp / "aside");
  fs::create_directory_symlink(temp / "planted", path);
  const auto loaded = load_entry(cache, kKey);
  ASSERT_TRUE(loaded) << loaded.error().message;
  expect_same(*loaded, ours);
  EXPECT_EQ(load_entry(cache, std::string(32, 'b')).error().code, ErrorCode::kNotFound);
  ASSERT_TRUE(store_entry(cache, std::string(32, 'c'), ours));
  EXPECT_TRUE(fs::exists(temp / "aside" / std::string(32, 'c')));
  EXPECT_EQ(files_in(temp / "planted"), 2u);
}

}  // namespace
}  // namespace f8::codegen
