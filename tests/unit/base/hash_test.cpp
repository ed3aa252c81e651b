// The digest is part of file formats and keys: these values are XXH3's published ones and must
// not change with the library or the machine.
#include "base/hash.hpp"

#include <gtest/gtest.h>

#include <set>

namespace f8 {
namespace {

TEST(Hash, GoldenValues) {
  EXPECT_EQ(hash_hex(std::string_view("")), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(hash_hex(std::string_view("abc")), "06b05ab6733a618578af5f94892f3950");
  EXPECT_EQ(hash64(""), 0x2d06800538d394c2U);
  EXPECT_EQ(hash64("abc"), 0x78af5f94892f3950U);
}

TEST(Hash, BytesAndTextAgree) {
  const std::string_view text("\0cubin\xff", 7);
  EXPECT_EQ(hash_hex(std::as_bytes(std::span(text))), hash_hex(text));
}

TEST(Hash, EveryPrefixOfALongTextDiffers) {
  std::string text;
  std::set<std::string> hashes;
  for (int i = 0; i < 2000; ++i) {
    const std::string hash = hash_hex(std::string_view(text));
    EXPECT_EQ(hash.size(), 32U);
    EXPECT_EQ(hash.find_first_not_of("0123456789abcdef"), std::string::npos);
    EXPECT_TRUE(hashes.insert(hash).second) << i;
    text += 'x';
  }
}

}  // namespace
}  // namespace f8
