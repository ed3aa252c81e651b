// What a test counts where it means that a reader stops early or reads nothing twice.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <string>

namespace f8::testing {

// The bytes that this process has read from files, pipes and sockets, as Linux counts them.
inline uint64_t bytes_read() {
  std::ifstream io("/proc/self/io");
  std::string name;
  uint64_t bytes = 0;
  io >> name >> bytes;
  EXPECT_EQ(name, "rchar:");
  return bytes;
}

}  // namespace f8::testing
