// The worker: the process that owns the device. A kernel that breaks the CUDA context, hangs or
// crashes takes the worker down and not the sweep: the parent learns which candidate was running,
// starts another worker and goes on. See protocol.hpp for what goes over the pipes.
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tools/tuner/measure/interleaved_group.hpp"

namespace f8::tuner {

// --- the child's side

// Answers requests from `in` on `out` until the end of input or a device error; returns the
// process's exit status.
[[nodiscard]] int serve(const std::function<Result<std::unique_ptr<Backend>>()>& make, int in,
                        int out);

// --- the parent's side

struct Child {
  int pid = -1;
  int in = -1;   // what the child writes
  int out = -1;  // what the child reads
};
// Starts a worker; spawn_self runs this executable again with kWorkerCommand.
using Spawn = std::function<Result<Child>()>;
inline constexpr const char* kWorkerCommand = "__worker";
[[nodiscard]] Spawn spawn_self(int device);

struct WorkerOptions {
  double start_timeout_s = 60;  // until hello: the driver's and the libraries' start
  double trial_timeout_s = 30;  // between two signs of life
  // Called while waiting, a few times a second; true: give up (kInterrupted).
  std::function<bool()> tick;
};

// Why a group has no outcomes.
struct WorkerFailure {
  // kKilled: by SIGKILL, which is no kernel's doing.
  enum class Kind { kCrash, kTimeout, kKilled };
  Kind kind = Kind::kCrash;
  int candidate = -1;  // the one that was running; -1: none alone
  std::string reason;
};

struct WorkerReply {
  std::vector<tuning_db::TrialResult> results;  // empty where the worker failed
  std::optional<WorkerFailure> failure;
};

// Takes bytes as they come and gives them back line by line.
class LineBuffer {
 public:
  void append(std::string_view bytes) { bytes_ += bytes; }
  [[nodiscard]] std::optional<std::string> next();  // without its end; nothing: no whole line yet
  void clear() { bytes_.clear(); }

 private:
  std::string bytes_;
};

class Worker {
 public:
  Worker(Spawn spawn, WorkerOptions options)
      : spawn_(std::move(spawn)), options_(std::move(options)) {}
  ~Worker() { stop(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Starts a worker where none runs, and does not wait for it: start() does.
  [[nodiscard]] Status launch();
  // Starts a worker where none runs.
  [[nodiscard]] Status start();
  [[nodiscard]] const runtime::DeviceInfo& device() const { return device_; }
  [[nodiscard]] Result<Suggested> suggestions(const Problem& gemm, bool bf16);
  // The accuracy of attention of this shape, on data of one kind.
  [[nodiscard]] Result<std::vector<tuning_db::Accuracy>> accuracy(const Problem& attention,
                                                                  std::string_view data,
                                                                  uint64_t seed);
  // An error ends the sweep (no device, interrupted); a failure costs the candidate that it names.
  [[nodiscard]] Result<WorkerReply> measure(const InterleavedGroup& group);
  void stop();
  [[nodiscard]] int starts() const { return starts_; }

 private:
  struct Line {
    enum class Kind { kText, kEnd, kTimeout, kInterrupted } kind = Kind::kText;
    std::string text;
  };
  [[nodiscard]] Line read_line(double timeout_s);
  [[nodiscard]] bool send(const std::string& line);
  // The one answer to a question, which is a message of this kind; `what` names the question in errors.
  [[nodiscard]] Result<nlohmann::json> answer_to(const nlohmann::json& question,
                                                 std::string_view kind, std::string_view what);
  [[nodiscard]] std::string reap();               // ends the child and says how it ended
  [[nodiscard]] WorkerReply gone(int candidate);  // of a child that ended by itself

  Spawn spawn_;
  WorkerOptions options_;
  Child child_;
  bool ready_ = false;  // the child has said hello
  LineBuffer lines_;
  runtime::DeviceInfo device_;
  int starts_ = 0;
};

}  // namespace f8::tuner
