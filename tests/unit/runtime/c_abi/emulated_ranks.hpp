// Ranks of emulated devices for tests, each with a context and a thread.
#pragma once

#include <float8/float8.hpp>
#include <thread>
#include <vector>

namespace f8::testing {

// Ranks on devices of their own; a failed call gives the rank's error.
class Ranks {
 public:
  explicit Ranks(int count, int timeout_ms = 0) {
    float8::ContextOptions options;
    options.emulate = true;
    std::vector<const float8::Context*> pointers;
    for (int rank = 0; rank < count; ++rank) {
      contexts.push_back(float8::Context::create(rank % 8, options).value());
    }
    for (const auto& context : contexts) pointers.push_back(&context);
    communicators = float8::Communicator::create(pointers, timeout_ms).value();
  }
  template <class Body>
  void run(const Body& body) {
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < contexts.size(); ++rank) {
      threads.emplace_back([&, rank] { body(static_cast<int>(rank)); });
    }
    for (std::thread& thread : threads) thread.join();
  }
  [[nodiscard]] const float8::Context& context(int rank) const {
    return contexts[static_cast<size_t>(rank)];
  }
  [[nodiscard]] float8::Communicator& communicator(int rank) {
    return communicators[static_cast<size_t>(rank)];
  }
  std::vector<float8::Context> contexts;
  std::vector<float8::Communicator> communicators;
};

}  // namespace f8::testing
