// Fuzz targets: one LLVMFuzzerTestOneInput a file of targets/, for a parser that reads a stranger's
// bytes. A target hands the bytes to its parser and aborts where the answer breaks a promise: a value
// that is accepted writes itself back as the same bytes, and a refusal is one readable line.
//
// Two drivers call a target. libFuzzer (clang, scripts/check) searches by coverage. driver.cpp needs
// no other compiler than the build's: it replays the seeds of seeds/TARGET and then mutates them,
// the same way on every machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace f8::fuzz {

inline std::string_view text_of(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

// Some inputs must be accepted, else the checks behind the parser are never run: the driver asks.
void count_accepted();
[[nodiscard]] uint64_t accepted();

// Every parser promises this of a message: it is one printable line, not endless.
void check_readable(const std::string& message);

[[noreturn]] void broken(const char* file, int line, const char* promise);
#define FUZZ_CHECK(promise) \
  ((promise) ? static_cast<void>(0) : ::f8::fuzz::broken(__FILE__, __LINE__, #promise))

}  // namespace f8::fuzz
