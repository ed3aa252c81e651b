// Everything that fails throws float8::Exception, as value() of the public header does: it holds a
// status, and one line that says what happened and what to do about it.
#pragma once

#include <float8/float8.hpp>
#include <string>

namespace train {

// Gives what printf would print.
[[nodiscard, gnu::format(printf, 1, 2)]] std::string format(const char* format, ...);

// Throws; the message is what printf would print.
[[noreturn, gnu::format(printf, 2, 3)]] void fail(float8_status code, const char* format, ...);

// An error that all ranks of a run have in the same words; that of one rank alone names the rank.
class CommonException : public float8::Exception {
 public:
  using float8::Exception::Exception;
};
[[noreturn, gnu::format(printf, 2, 3)]] void fail_on_all(float8_status code, const char* format,
                                                         ...);

// Throws where a call of float8 has failed.
void check(const float8::Status& status);

}  // namespace train
