// fork() while other threads are inside of calls on an emulated device: the child works, or its first call
// says why it cannot.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <float8/float8.hpp>
#include <functional>
#include <latch>
#include <string>
#include <thread>
#include <vector>

#include "tests/call_args.hpp"
#include "tests/unit/runtime/c_abi/emulated_memory.hpp"

namespace float8::testing {
namespace {

constexpr unsigned kChildSeconds = 30;  // after which a child that waits for ever is ended

// Plans a linear and runs it; returns the error's text, or nothing.
std::string step(const Context& context, int64_t n) {
  float8_linear_desc desc = {};
  desc.struct_size = sizeof desc;
  desc.m_max = 16;
  desc.n = n;
  desc.k = 32;
  desc.recipe = "rowwise";
  float8_linear* linear = nullptr;
  std::string error;
  if (float8_linear_plan(context.get(), &desc, &linear) == FLOAT8_OK) {
    const Memory x = random_bf16(16 * 32, 1);
    const Memory w = random_bf16(n * 32, 2);
    const Memory y = memory(static_cast<size_t>(16 * n) * 2);
    const Memory workspace = memory(float8_linear_workspace_bytes(linear));
    std::memset(workspace.get(), 0, float8_linear_workspace_bytes(linear));
    float8_forward_args args;
    args.x.data = x.get();
    args.w.data = w.get();
    args.y.data = y.get();
    args.m = 16;
    args.step = &kEvaluation;
    if (float8_linear_forward(linear, given(args, workspace.get()), nullptr) != FLOAT8_OK) {
      error = float8_last_error();
    }
  } else {
    error = float8_last_error();
  }
  float8_linear_destroy(linear);
  return error;
}

// Runs the body in a child of this process, and returns what it returned there.
std::string in_child(const std::function<std::string()>& body) {
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    alarm(kChildSeconds);
    const std::string text = body();
    const auto written = write(ends[1], text.data(), text.size());
    _exit(written == static_cast<ssize_t>(text.size()) ? 0 : 1);
  }
  close(ends[1]);
  std::string text;
  char buffer[512];
  for (ssize_t got; (got = read(ends[0], buffer, sizeof buffer)) > 0;) {
    text.append(buffer, static_cast<size_t>(got));
  }
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return status == 0 ? text : text + " (the child ended with " + std::to_string(status) + ")";
}

TEST(Fork, WhileOtherThreadsPlanAndRun) {
  const Context context = emulated();
  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  std::latch started(3);
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      EXPECT_EQ(step(context, 16), "");
      started.count_down();
      for (int64_t n = 16 * (i + 1); !stop; n = n % 256 + 16) EXPECT_EQ(step(context, n), "");
    });
  }
  started.wait();
  for (int64_t i = 1; i <= 50; ++i)
    EXPECT_EQ(in_child([&] { return step(context, 16 * (i % 16 + 1)); }), "");
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

TEST(Fork, WhileAThreadStaysInACallIsOneError) {
  const Context context = emulated();
  std::latch inside(1), forked(1);
  std::thread other([&] {
    EXPECT_EQ(float8_calls_begin(), FLOAT8_OK);
    inside.count_down();
    forked.wait();
    float8_calls_end();
  });
  inside.wait();
  const std::string error = in_child([&] { return step(context, 16); });
  EXPECT_TRUE(
      error.starts_with("this process was forked while another thread was inside of a call"))
      << error;
  EXPECT_EQ(error.find('\n'), std::string::npos);
  forked.count_down();
  other.join();
  // The parent is as it was, and so are children that it has later.
  EXPECT_EQ(step(context, 16), "");
  EXPECT_EQ(in_child([&] { return step(context, 16); }), "");
}

TEST(Fork, InsideOfACallOfTheSameThread) {
  const Context context = emulated();
  ASSERT_EQ(float8_calls_begin(), FLOAT8_OK);
  EXPECT_EQ(in_child([&] {
              float8_calls_end();
              return step(context, 32);
            }),
            "");
  float8_calls_end();
}

}  // namespace
}  // namespace float8::testing
