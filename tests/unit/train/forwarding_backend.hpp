// A backend that is another one, for tests that change what a rank does.
#pragma once

#include <memory>
#include <utility>

#include "examples/train/device/backend.hpp"

namespace train {

class ForwardingBackend : public Backend {
 public:
  explicit ForwardingBackend(std::unique_ptr<Backend> backend) : backend_(std::move(backend)) {}
  void* allocate(size_t bytes) override { return backend_->allocate(bytes); }
  void upload(void* to, const void* from, size_t bytes) override {
    backend_->upload(to, from, bytes);
  }
  void download(void* to, const void* from, size_t bytes) override {
    backend_->download(to, from, bytes);
  }
  void launch(const KernelCall& call) override { backend_->launch(call); }
  int share_count() const override { return backend_->share_count(); }
  float8::Context& context() override { return backend_->context(); }
  float8_stream stream() override { return backend_->stream(); }
  void attach() override { backend_->attach(); }
  void set_communicator(const float8::Communicator* communicator, int timeout_ms) override {
    backend_->set_communicator(communicator, timeout_ms);
  }
  void record(const std::function<void()>& step) override { backend_->record(step); }
  double repeat(int64_t times) override { return backend_->repeat(times); }

 private:
  std::unique_ptr<Backend> backend_;
};

}  // namespace train
