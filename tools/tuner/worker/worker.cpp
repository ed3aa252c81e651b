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
#include <chrono>
#include <csignal>
#include <cstring>

#include "tools/tuner/worker/protocol.hpp"

extern char** environ;

namespace f8::tuner {
namespace {

constexpr double kTickS = 0.2;

double seconds() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

// Text in a line of its own: invalid UTF-8 in a driver's message must not end the conversation.
std::string one_line(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

Json error_json(const Error& error, bool fatal) {
  return {{"is", "error"},
          {"code", to_string(error.code)},
          {"message", error.message},
          {"fatal", fatal}};
}

Result<Json> answer(Backend& backend, Session& session, const Json& request, int out) {
  const std::string what = request.value("do", "");
  if (what == "heuristics") {
    const Problem problem = F8_TRY(Problem::parse(request.value("problem", "")));
    const int count = F8_TRY(backend.heuristics(problem, request.value("bf16", false)));
    return Json{{"is", "count"}, {"value", count}};
  }
  if (what == "group") {
    const GroupRequest group = F8_TRY(parse_group(request));
    const auto outcomes = F8_TRY(session.run(group, [&](int subject) {
      (void)write_all(out, one_line({{"is", "begin"}, {"subject", subject}}));
    }));
    Json results = Json::array();
    for (const SubjectOutcome& outcome : outcomes) results.push_back(to_json(outcome.result));
    return Json{{"is", "outcomes"}, {"results", results}};
  }
  return fail(ErrorCode::kCorrupt, "a worker was asked to do \"{}\"", what);
}

}  // namespace

int serve(const std::function<Result<std::unique_ptr<Backend>>()>& make, int in, int out) {
  // A Ctrl-C reaches the whole process group; the parent decides when the worker ends.
  std::signal(SIGINT, SIG_IGN);
  std::signal(SIGPIPE, SIG_IGN);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // a sweep that is killed leaves nobody on the device
  Result<std::unique_ptr<Backend>> backend = make();
  if (!backend) {
    (void)write_all(out, one_line(error_json(backend.error(), true)));
    return 1;
  }
  if (!write_all(out, one_line({{"is", "hello"}, {"device", to_json((*backend)->device())}}))) {
    return 1;
  }
  Session session(**backend);
  std::string buffer;
  std::array<char, 4096> chunk;
  while (true) {
    const size_t end = buffer.find('\n');
    if (end == std::string::npos) {
      const ssize_t got = ::read(in, chunk.data(), chunk.size());
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return 0;
      buffer.append(chunk.data(), static_cast<size_t>(got));
      continue;
    }
    const std::string line = buffer.substr(0, end);
    buffer.erase(0, end + 1);
    const auto reply = [&]() -> Result<Json> {
      const Json request = F8_TRY(parse_message(line, "request to a worker"));
      return answer(**backend, session, request, out);
    }();
    const bool fatal = !reply && reply.error().code == ErrorCode::kCuda;
    const Json json = reply ? *reply : error_json(reply.error(), fatal);
    if (!write_all(out, one_line(json))) return 1;
    // Nothing is taken down: destroying CUDA objects in a broken context can hang.
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
  const double until = seconds() + timeout_s;
  while (true) {
    const size_t end = buffer_.find('\n');
    if (end != std::string::npos) {
      Line line{.kind = Line::Kind::kText, .text = buffer_.substr(0, end)};
      buffer_.erase(0, end + 1);
      return line;
    }
    if (options_.tick && options_.tick()) return {.kind = Line::Kind::kInterrupted, .text = {}};
    const double left = until - seconds();
    if (left <= 0) return {.kind = Line::Kind::kTimeout, .text = {}};
    pollfd poll_in{.fd = child_.in, .events = POLLIN, .revents = 0};
    const int ready = ::poll(&poll_in, 1, static_cast<int>(1e3 * std::min(left, kTickS)) + 1);
    if (ready <= 0) continue;
    std::array<char, 4096> chunk;
    const ssize_t got = ::read(child_.in, chunk.data(), chunk.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return {.kind = Line::Kind::kEnd, .text = {}};
    buffer_.append(chunk.data(), static_cast<size_t>(got));
  }
}

bool Worker::send(const std::string& line) {
  // A worker that is gone must be an error here, not a signal.
  const auto previous = std::signal(SIGPIPE, SIG_IGN);
  const bool sent = write_all(child_.out, line);
  std::signal(SIGPIPE, previous);
  return sent;
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
  buffer_.clear();
  if (WIFSIGNALED(status)) {
    return fmt::format("ended by signal {} ({})", WTERMSIG(status), ::strsignal(WTERMSIG(status)));
  }
  return fmt::format("exited with status {}", WEXITSTATUS(status));
}

void Worker::stop() {
  if (child_.pid >= 0) (void)reap();
}

Status Worker::start() {
  if (child_.pid >= 0) return {};
  child_ = F8_TRY(spawn_());
  ++starts_;
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
  return {};
}

Result<int> Worker::heuristics(const Problem& gemm, bool bf16) {
  F8_TRY(start());
  const bool sent = send(one_line({{"do", "heuristics"}, {"problem", gemm.key()}, {"bf16", bf16}}));
  const Line line =
      sent ? read_line(options_.cell_timeout_s) : Line{.kind = Line::Kind::kEnd, .text = {}};
  if (line.kind == Line::Kind::kInterrupted) {
    stop();
    return fail(ErrorCode::kInterrupted, "interrupted");
  }
  if (line.kind != Line::Kind::kText) {
    return fail(ErrorCode::kCuda, "cuBLASLt's heuristics for {}: the worker process {}", gemm.key(),
                reap());
  }
  const Json json = F8_TRY(parse_message(line.text, "a worker's answer"));
  if (json.value("is", "") == "count") return json.value("value", 0);
  if (json.value("fatal", false)) stop();
  return fail(parse_error_code(json.value("code", "")), "{}", json.value("message", ""));
}

Result<GroupReply> Worker::measure(const GroupRequest& request) {
  F8_TRY(start());
  GroupReply reply;
  int subject = -1;
  const auto lost = [&](Loss::Kind kind, std::string reason) {
    reply.loss = Loss{.kind = kind, .subject = subject, .reason = std::move(reason)};
    return reply;
  };
  if (!send(one_line(to_json(request)))) {
    return lost(Loss::Kind::kCrash, "the worker process " + reap());
  }
  while (true) {
    const Line line = read_line(options_.cell_timeout_s);
    switch (line.kind) {
      case Line::Kind::kInterrupted:
        stop();
        return fail(ErrorCode::kInterrupted, "interrupted");
      case Line::Kind::kTimeout:
        (void)reap();
        return lost(Loss::Kind::kTimeout,
                    fmt::format("no sign of life for {:.3g} s; the worker process was ended",
                                options_.cell_timeout_s));
      case Line::Kind::kEnd:
        return lost(Loss::Kind::kCrash, "the worker process " + reap());
      case Line::Kind::kText:
        break;
    }
    const Json json = F8_TRY(parse_message(line.text, "a worker's answer"));
    const std::string is = json.value("is", "");
    if (is == "begin") {
      subject = json.value("subject", -1);
    } else if (is == "outcomes") {
      for (const Json& result : json.at("results")) {
        reply.results.push_back(F8_TRY(parse_result(result)));
      }
      if (reply.results.size() != request.subjects.size()) {
        return fail(ErrorCode::kInternal, "a worker answered {} of {} subjects",
                    reply.results.size(), request.subjects.size());
      }
      return reply;
    } else if (is == "error") {
      const std::string message = json.value("message", "");
      if (json.value("fatal", false)) {
        (void)reap();
        return lost(Loss::Kind::kCrash, message);
      }
      // About this group, and the worker is well: nobody alone is to blame.
      for (size_t i = 0; i < request.subjects.size(); ++i) {
        tuning_db::TrialResult result;
        result.state = tuning_db::TrialState::kLaunchError;
        result.reason = message;
        reply.results.push_back(std::move(result));
      }
      return reply;
    }
  }
}

}  // namespace f8::tuner
