#include "codegen/cache_lock.hpp"

#include <sys/file.h>
#include <sys/utsname.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <thread>

#include "base/log.hpp"

namespace f8::codegen {
namespace {

std::string host_name() {
  utsname names{};
  return ::uname(&names) == 0 ? names.nodename : "";
}

// The process that wrote its name into the lock.
struct Holder {
  pid_t pid = 0;  // 0: unknown
  std::string host;
};

void sign(int lock) {
  const std::string text = f8::format("{} {}\n", ::getpid(), host_name());
  // Without its name a lock is as good.
  if (::ftruncate(lock, 0) != 0) return;
  if (::pwrite(lock, text.data(), text.size(), 0) < 0) return;
}

Holder read_holder(int lock) {
  std::array<char, 128> buffer;
  const ssize_t n = ::pread(lock, buffer.data(), buffer.size(), 0);
  const std::string_view text(buffer.data(), n < 0 ? 0 : static_cast<size_t>(n));
  Holder holder;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), holder.pid);
  const std::string_view rest(end, static_cast<size_t>(text.data() + text.size() - end));
  const bool sound = error == std::errc() && holder.pid > 0 && rest.size() > 2 &&
                     rest.front() == ' ' && rest.back() == '\n';
  if (!sound) return {};
  holder.host = rest.substr(1, rest.size() - 2);
  const bool printable =
      std::ranges::all_of(holder.host, [](char c) { return c > ' ' && c < 127; });
  return printable ? holder : Holder{};
}

bool is_stopped(const Holder& holder) {
  if (holder.pid == 0 || holder.host != host_name()) return false;
  auto status = f8::read_file(f8::format("/proc/{}/stat", holder.pid));
  if (!status) return false;
  const size_t name_end = status->rfind(") ");
  return name_end != std::string::npos && name_end + 2 < status->size() &&
         ((*status)[name_end + 2] == 'T' || (*status)[name_end + 2] == 't');
}

std::string describe(const Holder& holder) {
  if (holder.pid == 0) return "another process";
  return f8::format("process {} on {}{}", holder.pid, holder.host,
                    is_stopped(holder) ? ", which is stopped" : "");
}

std::string remedy(const Holder& holder) {
  if (holder.pid == 0) return "if it hangs, end it";
  return f8::format("if it hangs, end it: kill -9 {}", holder.pid);
}

double seconds(std::chrono::milliseconds time) {
  return std::chrono::duration<double>(time).count();
}

// False where patience ended first.
bool wait_for(int lock, const std::string& kernel, const fs::path& file,
              const LockPatience& patience) {
  constexpr std::chrono::milliseconds kLongestNap(50);
  const auto start = std::chrono::steady_clock::now();
  std::chrono::milliseconds nap(2);
  bool said = false;
  while (::flock(lock, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) return false;
    const auto waited = std::chrono::steady_clock::now() - start;
    if (waited >= patience.give_up_after) {
      const Holder holder = read_holder(lock);
      log_warning(
          "the lock of kernel {} was held for {} s by {}; the kernel is compiled here too; {}",
          kernel, seconds(patience.give_up_after), describe(holder), remedy(holder));
      return false;
    }
    if (!said && waited >= patience.say_after) {
      said = true;
      const Holder holder = read_holder(lock);
      log_warning(
          "waiting {} s at most for the lock of kernel {} ({}), held by {}, to compile the kernel "
          "once; {}",
          seconds(patience.give_up_after), kernel, file.string(), describe(holder), remedy(holder));
    }
    std::this_thread::sleep_for(nap);
    nap = std::min(nap * 2, kLongestNap);
  }
  return true;
}

}  // namespace

std::optional<KeyLock> KeyLock::take(const CacheDirectory& cache, const std::string& key,
                                     const std::string& kernel, const LockPatience& patience) {
  const std::string name = key + ".lock";
  Descriptor file(::openat(cache.fd.get(), name.c_str(),
                           O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC,
                           0600));
  if (!file.is_open()) {
    if (errno == ENOENT) return std::nullopt;
    return KeyLock(Descriptor());
  }
  struct stat info {};
  if (::fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode)) return KeyLock(Descriptor());
  if (!wait_for(file.get(), kernel, cache.path / name, patience)) return KeyLock(Descriptor());
  sign(file.get());
  return KeyLock(std::move(file));
}

KeyLock::~KeyLock() {
  // A forked child may share the descriptor, and closing would not unlock.
  if (file_.is_open()) ::flock(file_.get(), LOCK_UN);
}

}  // namespace f8::codegen
