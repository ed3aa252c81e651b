// Natural keys: hashes of canonical text, equal on every machine for equal values. A key is what a
// merge and a lookup match, so the text below is part of the database format.
#include <fcntl.h>
#include <sys/random.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <ctime>

#include "base/hash.hpp"
#include "base/text.hpp"
#include "tuning_db/json/json_text.hpp"
#include "tuning_db/rows.hpp"

namespace f8::tuning_db {
namespace {

constexpr std::array<std::string_view, 10> kStates = {
    "planned",       "running",      "ok",    "noisy",   "pruned",
    "compile_error", "launch_error", "wrong", "timeout", "quarantined"};

constexpr std::array<std::string_view, 5> kImpls = {"generated", "cublaslt", "bf16_cublaslt",
                                                    "float8", "bf16"};

constexpr size_t kMaxConfigBytes = 100;
constexpr std::string_view kDigitsAndLetters = "0123456789abcdefghijklmnopqrstuvwxyz";
constexpr std::string_view kDigits = kDigitsAndLetters.substr(0, 10);

// A key cannot fail; text that is no JSON is refused where it is stored.
std::string canonical_or_raw(const std::string& text) {
  auto canonical = canonical_json(text);
  return canonical ? *std::move(canonical) : text;
}

// Hashes an array, whose JSON marks where each part ends.
std::string hash_fields(nlohmann::json fields) {
  return hash_hex(dump(fields));
}

}  // namespace

std::string dump(const nlohmann::json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

Result<std::string> canonical_json(std::string_view text) {
  return dump(F8_TRY(parse_json(text, quote(text))));
}

std::string key(const DeviceClass& d) {
  return hash_fields({"device", d.name, d.cc, d.sm_count, d.l2_bytes, d.mem_bytes, d.mem_clock_mhz,
                      d.sm_clock_max_mhz, d.power_limit_w, d.mig});
}

std::string Toolchain::key() const {
  return hash_fields({"toolchain", driver, cuda_runtime, nvrtc, cublaslt, nccl, tool_version,
                      git_sha, git_dirty, codegen_abi});
}

std::string Method::key() const {
  return hash_fields({"method", fidelity, canonical_or_raw(spec)});
}

std::string Candidate::key() const {
  return hash_fields({"candidate", to_string(impl), canonical_or_raw(config), source_hash});
}

std::optional<std::string> Candidate::kernel_config() const {
  const auto json = parse_json(config, "it").value_or(nullptr);
  if (!json.is_object()) return std::nullopt;
  const auto text = json.find("config");
  if (text != json.end() && text->is_string()) return text->get<std::string>();
  const auto number = json.find("heuristic");
  if (number == json.end() || !number->is_number_integer()) return std::nullopt;
  return f8::format("h{}", number->get<int64_t>());
}

std::string_view to_string(Impl impl) {
  return kImpls[static_cast<size_t>(impl)];
}

Result<Impl> parse_impl(std::string_view text) {
  for (size_t i = 0; i < kImpls.size(); ++i) {
    if (kImpls[i] == text) return static_cast<Impl>(i);
  }
  return fail(ErrorCode::kCorrupt, "unknown implementation {}; one of {}", quote(text),
              fmt::join(kImpls, ", "));
}

std::string to_string(const PartKernel& kernel) {
  return f8::format("{}:{}", to_string(kernel.provider), kernel.config);
}

const PartKernel* find_kernel(const std::vector<PartKernel>& kernels, std::string_view part) {
  const auto found = std::ranges::find(kernels, part, &PartKernel::part);
  return found == kernels.end() ? nullptr : &*found;
}

double tflops_of(const Problem& problem, const Timing& timing) {
  return problem.flops() / timing.median_ns / 1e3;
}

const Accuracy* find_accuracy(const std::vector<Accuracy>& accuracy, std::string_view data,
                              std::string_view tensor) {
  const auto found = std::ranges::find_if(
      accuracy, [&](const Accuracy& a) { return a.data == data && a.tensor == tensor; });
  return found == accuracy.end() ? nullptr : &*found;
}

Result<PartKernel> parse_part_kernel(std::string_view part, std::string_view text) {
  std::string_view config = text;
  const std::string_view provider = take_until(config, ':');
  for (const Provider p : {Provider::kGenerated, Provider::kCublasLt}) {
    if (provider != to_string(p)) continue;
    const bool heuristic = p == Provider::kCublasLt;
    const bool has_form = heuristic
                              ? config.starts_with('h') && config.size() > 1 && config.size() <= 6
                              : !config.empty() && config.size() <= kMaxConfigBytes;
    const std::string_view rest = heuristic && has_form ? config.substr(1) : config;
    const std::string_view allowed = heuristic ? kDigits : kDigitsAndLetters;
    if (has_form && rest.find_first_not_of(allowed) == std::string_view::npos) {
      return PartKernel{std::string(part), p, std::string(config)};
    }
  }
  return fail(ErrorCode::kCorrupt,
              "kernel {}; it is generated: and a configuration, or cublaslt:h and a number",
              quote(text));
}

std::string hash_unit(std::string_view unit_uuid) {
  return hash_fields({"unit", unit_uuid});
}

std::string_view to_string(TrialState s) {
  return kStates[static_cast<size_t>(s)];
}

bool is_terminal(TrialState s) {
  return s != TrialState::kPlanned && s != TrialState::kRunning;
}

Result<TrialState> parse_trial_state(std::string_view text) {
  for (size_t i = 0; i < kStates.size(); ++i) {
    if (kStates[i] == text) return static_cast<TrialState>(i);
  }
  return fail(ErrorCode::kCorrupt, "unknown trial state {}", quote(text));
}

std::string new_uuid() {
  std::array<unsigned char, 16> bytes{};
  // At most 256 bytes are never interrupted nor short once the pool is ready.
  while (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
  }
  bytes[6] = static_cast<unsigned char>((bytes[6] & 0x0f) | 0x40);
  bytes[8] = static_cast<unsigned char>((bytes[8] & 0x3f) | 0x80);
  std::string uuid;
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) uuid += '-';
    uuid += f8::format("{:02x}", bytes[i]);
  }
  return uuid;
}

std::string timestamp() {
  using namespace std::chrono;
  const auto now = system_clock::now();
  const std::time_t seconds = system_clock::to_time_t(now);
  const auto ms = duration_cast<milliseconds>(now.time_since_epoch()).count() % 1000;
  std::tm utc{};
  ::gmtime_r(&seconds, &utc);
  return f8::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z", utc.tm_year + 1900,
                    utc.tm_mon + 1, utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec, ms);
}

}  // namespace f8::tuning_db
