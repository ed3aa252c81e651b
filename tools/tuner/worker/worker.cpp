#include "tools/tuner/worker/worker.hpp"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "base/descriptor.hpp"
#include "tools/tuner/backend/attention_accuracy.hpp"
#include "tools/tuner/clock.hpp"
#include "tools/tuner/measure/measurer.hpp"
#include "tools/tuner/worker/protocol.hpp"

extern char** environ;

namespace f8::tuner {
namespace {

constexpr double kTickS = 0.2;

bool send_text(int fd, std::string_view text) {
  return f8::write_all(fd, "the pipe", text).has_value();
}

// Reads what has come; false at the end of input. Nothing may have come where a signal interrupts
// it.
bool read_some(int fd, LineBuffer& lines) {
  std::array<char, 4096> chunk;
  const ssize_t got = ::read(fd, chunk.data(), chunk.size());
  if (got > 0) lines.append({chunk.data(), static_cast<size_t>(got)});
  return got > 0 || (got < 0 && errno == EINTR);
}

// A message as a line of text. Invalid UTF-8 in a driver's message must not end the conversation.
std::string one_line(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

Json error_json(const Error& error, bool fatal) {
  return {{"is", "error"},
          {"code", to_string(error.code)},
          {"message", error.message},
          {"fatal", fatal}};
}

WorkerReply failed(WorkerFailure::Kind kind, int candidate, std::string reason) {
  return {
      .results = {},
      .failure = WorkerFailure{.kind = kind, .candidate = candidate, .reason = std::move(reason)}};
}

// An error about the whole group from a worker that is well: no candidate alone is to blame.
WorkerReply refused(size_t candidates, const std::string& message) {
  tuning_db::TrialResult result;
  result.state = tuning_db::TrialState::kLaunchError;
  result.reason = message;
  return {.results = std::vector(candidates, result), .failure = {}};
}

Result<WorkerReply> parse_outcomes(const Json& json, size_t candidates) {
  WorkerReply reply;
  for (const Json& result : json.value("results", Json::array())) {
    reply.results.push_back(F8_TRY(parse_result(result)));
  }
  if (reply.results.size() != candidates) {
    return fail(ErrorCode::kInternal, "a worker answered {} of {} candidates", reply.results.size(),
                candidates);
  }
  return reply;
}

Result<Json> answer(Backend& backend, Measurer& measurer, const Json& request, int out) {
  const std::string what = request.value("do", "");
  if (what == "suggestions") {
    const Problem problem = F8_TRY(Problem::parse(request.value("problem", "")));
    const Suggested found = F8_TRY(backend.suggestions(problem, request.value("bf16", false)));
    return Json{{"is", "suggestions"}, {"count", found.count}, {"unmeasured", found.unmeasured}};
  }
  if (what == "group") {
    const InterleavedGroup group = F8_TRY(parse_group(request));
    const auto outcomes = F8_TRY(measurer.run(group, [&](int candidate) {
      (void)send_text(out, one_line({{"is", "begin"}, {"candidate", candidate}}));
    }));
    Json results = Json::array();
    for (const CandidateOutcome& outcome : outcomes) results.push_back(to_json(outcome.result));
    return Json{{"is", "outcomes"}, {"results", results}};
  }
  if (what == "accuracy") {
    const Problem problem = F8_TRY(Problem::parse(request.value("problem", "")));
    Json of = Json::array();
    for (const tuning_db::Accuracy& accuracy : F8_TRY(
             attention_accuracy(backend, attention_recipe(problem), attention_shape(problem),
                                request.value("data", ""), request.value("seed", uint64_t{0})))) {
      of.push_back(to_json(accuracy));
    }
    return Json{{"is", "accuracy"}, {"of", of}};
  }
  return fail(ErrorCode::kCorrupt, "a worker was asked to do \"{}\"", what);
}

}  // namespace

std::optional<std::string> LineBuffer::next() {
  const size_t end = bytes_.find('\n');
  if (end == std::string::npos) return std::nullopt;
  std::string line = bytes_.substr(0, end);
  bytes_.erase(0, end + 1);
  return line;
}

int serve(const std::function<Result<std::unique_ptr<Backend>>()>& make, int in, int out) {
  // A Ctrl-C reaches the whole process group; the parent decides when the worker ends.
  std::signal(SIGINT, SIG_IGN);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // a sweep that is killed leaves nobody on the device
  Result<std::unique_ptr<Backend>> backend = make();
  if (!backend) {
    (void)send_text(out, one_line(error_json(backend.error(), true)));
    return 1;
  }
  if (!send_text(out, one_line({{"is", "hello"}, {"device", to_json((*backend)->device())}}))) {
    return 1;
  }
  Measurer measurer(**backend);
  LineBuffer lines;
  while (true) {
    const std::optional<std::string> line = lines.next();
    if (!line) {
      if (!read_some(in, lines)) return 0;
      continue;
    }
    const auto reply = [&]() -> Result<Json> {
      const Json request = F8_TRY(parse_message(*line, "request to a worker"));
      return answer(**backend, measurer, request, out);
    }();
    const bool fatal = !reply && reply.error().code == ErrorCode::kCuda;
    const Json json = reply ? *reply : error_json(reply.error(), fatal);
    if (!send_text(out, one_line(json))) return 1;
    // The process ends without destructors: destroying CUDA objects in a broken context can hang.
    if (fatal) ::_exit(1);
  }
}

Spawn spawn_self(int device) {
  return [device]() -> Result<Child> {
    std::array<int, 2> to_child{};
    std::array<int, 2> from_child{};
    if (::pipe2(to_child.data(), O_CLOEXEC) != 0) {
      return fail(ErrorCode::kIo, "cannot make a pipe for the worker: {}", std::strerror(errno));
    }
    if (::pipe2(from_child.data(), O_CLOEXEC) != 0) {
      ::close(to_child[0]);
      ::close(to_child[1]);
      return fail(ErrorCode::kIo, "cannot make a pipe for the worker: {}", std::strerror(errno));
    }
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, to_child[0], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, from_child[1], STDOUT_FILENO);
    const std::string ordinal = std::to_string(device);
    std::string self = "float8-tune";
    std::string command = kWorkerCommand;
    std::string argument = ordinal;
    std::array<char*, 4> argv = {self.data(), command.data(), argument.data(), nullptr};
    pid_t pid = -1;
    const int error =
        ::posix_spawn(&pid, "/proc/self/exe", &actions, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    ::close(to_child[0]);
    ::close(from_child[1]);
    if (error != 0) {
      ::close(to_child[1]);
      ::close(from_child[0]);
      return fail(ErrorCode::kIo, "cannot start the worker process: {}", std::strerror(error));
    }
    return Child{.pid = pid, .in = from_child[0], .out = to_child[1]};
  };
}

Worker::Line Worker::read_line(double timeout_s) {
  const double until = steady_s() + timeout_s;
  while (true) {
    if (std::optional<std::string> line = lines_.next()) {
      return {.kind = Line::Kind::kText, .text = *std::move(line)};
    }
    if (options_.tick && options_.tick()) return {.kind = Line::Kind::kInterrupted, .text = {}};
    const double left = until - steady_s();
    if (left <= 0) return {.kind = Line::Kind::kTimeout, .text = {}};
    pollfd poll_in{.fd = child_.in, .events = POLLIN, .revents = 0};
    const int ready = ::poll(&poll_in, 1, static_cast<int>(1e3 * std::min(left, kTickS)) + 1);
    if (ready <= 0) continue;
    if (!read_some(child_.in, lines_)) return {.kind = Line::Kind::kEnd, .text = {}};
  }
}

bool Worker::send(const std::string& line) {
  return send_text(child_.out, line);
}

std::string Worker::reap() {
  if (child_.pid < 0) return "did not start";
  ::close(child_.in);
  ::close(child_.out);
  int status = 0;
  ::kill(child_.pid, SIGKILL);
  while (::waitpid(child_.pid, &status, 0) < 0 && errno == EINTR) {
  }
  child_ = {};
  lines_.clear();
  if (WIFSIGNALED(status)) {
    return f8::format("ended by signal {} ({})", WTERMSIG(status), ::strsignal(WTERMSIG(status)));
  }
  return f8::format("exited with status {}", WEXITSTATUS(status));
}

WorkerReply Worker::gone(int candidate) {
  const std::string how = reap();
  const bool killed = how.starts_with(f8::format("ended by signal {} ", SIGKILL));
  return failed(killed ? WorkerFailure::Kind::kKilled : WorkerFailure::Kind::kCrash, candidate,
                "the worker process " + how);
}

void Worker::stop() {
  if (child_.pid >= 0) (void)reap();
}

Status Worker::launch() {
  if (child_.pid >= 0) return {};
  child_ = F8_TRY(spawn_());
  ready_ = false;
  ++starts_;
  return {};
}

Status Worker::start() {
  F8_TRY(launch());
  if (ready_) return {};
  const Line line = read_line(options_.start_timeout_s);
  if (line.kind == Line::Kind::kInterrupted) {
    stop();
    return fail(ErrorCode::kInterrupted, "interrupted");
  }
  if (line.kind != Line::Kind::kText) {
    const bool late = line.kind == Line::Kind::kTimeout;
    const std::string how = reap();
    return late ? Status(fail(ErrorCode::kEnvironment,
                              "the worker process gave no sign of life for {:.0f} s; see whether "
                              "nvidia-smi answers",
                              options_.start_timeout_s))
                : Status(fail(ErrorCode::kEnvironment, "the worker process {} as it started", how));
  }
  const Result<Json> json = parse_message(line.text, "a worker's first line");
  if (!json) {
    stop();
    return std::unexpected(json.error());
  }
  if (json->value("is", "") != "hello") {
    stop();
    return fail(parse_error_code(json->value("code", "")), "{}",
                json->value("message", "a worker did not start"));
  }
  device_ = F8_TRY(parse_device(json->value("device", Json::object())));
  ready_ = true;
  return {};
}

Result<Json> Worker::answer_to(const Json& question, std::string_view kind, std::string_view what) {
  F8_TRY(start());
  const Line line = send(one_line(question)) ? read_line(options_.trial_timeout_s)
                                             : Line{.kind = Line::Kind::kEnd, .text = {}};
  if (line.kind == Line::Kind::kInterrupted) {
    stop();
    return fail(ErrorCode::kInterrupted, "interrupted");
  }
  if (line.kind != Line::Kind::kText) {
    return fail(ErrorCode::kCuda, "{}: the worker process {}", what, reap());
  }
  Json json = F8_TRY(parse_message(line.text, "a worker's answer"));
  if (json.value("is", "") == kind) return json;
  if (json.value("fatal", false)) stop();
  return fail(parse_error_code(json.value("code", "")), "{}", json.value("message", ""));
}

Result<Suggested> Worker::suggestions(const Problem& gemm, bool bf16) {
  const Json json =
      F8_TRY(answer_to({{"do", "suggestions"}, {"problem", gemm.key()}, {"bf16", bf16}},
                       "suggestions", f8::format("cuBLASLt's suggestions for {}", gemm.key())));
  return Suggested{json.value("count", 0), json.value("unmeasured", 0)};
}

Result<std::vector<tuning_db::Accuracy>> Worker::accuracy(const Problem& attention,
                                                          std::string_view data, uint64_t seed) {
  const Json json = F8_TRY(
      answer_to({{"do", "accuracy"}, {"problem", attention.key()}, {"data", data}, {"seed", seed}},
                "accuracy", f8::format("the accuracy of {} on {} data", attention.key(), data)));
  return parse_accuracy(json);
}

Result<WorkerReply> Worker::measure(const InterleavedGroup& group) {
  F8_TRY(start());
  if (!send(one_line(to_json(group)))) return gone(-1);
  int candidate = -1;
  while (true) {
    const Line line = read_line(options_.trial_timeout_s);
    switch (line.kind) {
      case Line::Kind::kInterrupted:
        stop();
        return fail(ErrorCode::kInterrupted, "interrupted");
      case Line::Kind::kTimeout:
        (void)reap();
        return failed(WorkerFailure::Kind::kTimeout, candidate,
                      f8::format("no sign of life for {:.3g} s; the worker process was ended",
                                 options_.trial_timeout_s));
      case Line::Kind::kEnd:
        return gone(candidate);
      case Line::Kind::kText:
        break;
    }
    const Json json = F8_TRY(parse_message(line.text, "a worker's answer"));
    const std::string is = json.value("is", "");
    if (is == "begin") {
      candidate = json.value("candidate", -1);
    } else if (is == "outcomes") {
      return parse_outcomes(json, group.candidates.size());
    } else if (is == "error") {
      const std::string message = json.value("message", "");
      if (!json.value("fatal", false)) return refused(group.candidates.size(), message);
      (void)reap();
      return failed(WorkerFailure::Kind::kCrash, candidate, message);
    }
  }
}

}  // namespace f8::tuner
