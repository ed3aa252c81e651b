#include "codegen/nvrtc.hpp"

#include <nvrtc.h>

#include <chrono>
#include <utility>

#include "base/dynlib.hpp"
#include "codegen/ptxas_log.hpp"

namespace f8::codegen {
namespace {

constexpr const char* kVersion = "NVRTC of CUDA 13.0";
constexpr const char* kRemedy =
    "install NVRTC of CUDA 13 (scripts/setup does), or add its folder to LD_LIBRARY_PATH";

struct Api {
  decltype(&nvrtcVersion) version;
  decltype(&nvrtcGetErrorString) error_string;
  decltype(&nvrtcCreateProgram) create_program;
  decltype(&nvrtcDestroyProgram) destroy_program;
  decltype(&nvrtcCompileProgram) compile_program;
  decltype(&nvrtcGetProgramLogSize) log_size;
  decltype(&nvrtcGetProgramLog) log;
  decltype(&nvrtcGetCUBINSize) cubin_size;
  decltype(&nvrtcGetCUBIN) cubin;
  decltype(&nvrtcGetPTXSize) ptx_size;
  decltype(&nvrtcGetPTX) ptx;
};

Result<Api> load_api() {
  const DynamicLibrary library = F8_TRY(DynamicLibrary::open("libnvrtc.so.13", kVersion, kRemedy));
  Api api{};
  F8_TRY(library.resolve("nvrtcVersion", api.version));
  F8_TRY(library.resolve("nvrtcGetErrorString", api.error_string));
  F8_TRY(library.resolve("nvrtcCreateProgram", api.create_program));
  F8_TRY(library.resolve("nvrtcDestroyProgram", api.destroy_program));
  F8_TRY(library.resolve("nvrtcCompileProgram", api.compile_program));
  F8_TRY(library.resolve("nvrtcGetProgramLogSize", api.log_size));
  F8_TRY(library.resolve("nvrtcGetProgramLog", api.log));
  F8_TRY(library.resolve("nvrtcGetCUBINSize", api.cubin_size));
  F8_TRY(library.resolve("nvrtcGetCUBIN", api.cubin));
  F8_TRY(library.resolve("nvrtcGetPTXSize", api.ptx_size));
  F8_TRY(library.resolve("nvrtcGetPTX", api.ptx));

  // libnvrtc opens its builtins by name, without our rpath; it takes those that are loaded already.
  int major = 0;
  int minor = 0;
  if (api.version(&major, &minor) == NVRTC_SUCCESS) {
    const std::string builtins = f8::format("libnvrtc-builtins.so.{}.{}", major, minor);
    static_cast<void>(DynamicLibrary::open(builtins.c_str(), kVersion, kRemedy));
  }
  return api;
}

Result<const Api*> nvrtc() {
  static const Result<Api> api = load_api();
  if (!api) return std::unexpected(api.error());
  return &*api;
}

ErrorCode error_code(nvrtcResult result) {
  switch (result) {
    case NVRTC_ERROR_OUT_OF_MEMORY:
      return ErrorCode::kOutOfMemory;
    case NVRTC_ERROR_COMPILATION:
    case NVRTC_ERROR_INVALID_OPTION:
      return ErrorCode::kCompile;
    case NVRTC_ERROR_BUILTIN_OPERATION_FAILURE:  // libnvrtc-builtins does not lie beside libnvrtc
      return ErrorCode::kEnvironment;
    default:
      return ErrorCode::kInternal;
  }
}

class Program {
 public:
  [[nodiscard]] static Result<Program> compile(const KernelSource& source) {
    const Api& api = *F8_TRY(nvrtc());
    Program program(api, source.key);
    const std::string name = source.entry + ".cu";
    F8_TRY(program.check("nvrtcCreateProgram",
                         api.create_program(&program.handle_, source.source.c_str(), name.c_str(),
                                            0, nullptr, nullptr)));
    std::vector<const char*> options;
    for (const std::string& option : source.options) options.push_back(option.c_str());
    const nvrtcResult compiled =
        api.compile_program(program.handle_, static_cast<int>(options.size()), options.data());
    auto log = program.fetch<std::string>("nvrtcGetProgramLog", api.log_size, api.log);
    if (log) program.log_ = std::move(*log);
    while (!program.log_.empty() && program.log_.back() == '\0') program.log_.pop_back();
    if (compiled != NVRTC_SUCCESS) {
      return fail(error_code(compiled), "kernel {} does not compile ({}): {}", source.key,
                  api.error_string(compiled), summarize_errors(program.log_));
    }
    if (!log) return std::unexpected(log.error());  // unread, it could hide a C75xx line
    return program;
  }

  Program(Program&& other) noexcept
      : api_(other.api_),
        key_(std::move(other.key_)),
        log_(std::move(other.log_)),
        handle_(std::exchange(other.handle_, nullptr)) {}
  Program& operator=(Program&&) = delete;
  ~Program() {
    if (handle_ != nullptr) api_.destroy_program(&handle_);
  }

  [[nodiscard]] const std::string& log() const { return log_; }
  [[nodiscard]] Result<std::string> ptx() const {
    std::string text = F8_TRY(fetch<std::string>("nvrtcGetPTX", api_.ptx_size, api_.ptx));
    while (!text.empty() && text.back() == '\0') text.pop_back();
    return text;
  }
  [[nodiscard]] Result<std::vector<std::byte>> cubin() const {
    auto image =
        F8_TRY(fetch<std::vector<std::byte>>("nvrtcGetCUBIN", api_.cubin_size, api_.cubin));
    if (image.empty()) {
      return fail(ErrorCode::kCompile,
                  "kernel {} has no cubin; its options must name a real architecture, as in "
                  "--gpu-architecture=sm_90a",
                  key_);
    }
    return image;
  }

 private:
  Program(const Api& api, std::string key) : api_(api), key_(std::move(key)) {}

  [[nodiscard]] Status check(const char* call, nvrtcResult result) const {
    if (result == NVRTC_SUCCESS) return {};
    return fail(error_code(result), "kernel {}: {} failed: {}", key_, call,
                api_.error_string(result));
  }

  template <class Bytes, class SizeCall, class GetCall>
  [[nodiscard]] Result<Bytes> fetch(const char* call, SizeCall size_call, GetCall get_call) const {
    size_t size = 0;
    F8_TRY(check(call, size_call(handle_, &size)));
    Bytes bytes(size, {});
    if (size > 0) F8_TRY(check(call, get_call(handle_, reinterpret_cast<char*>(bytes.data()))));
    return bytes;
  }

  const Api& api_;
  std::string key_;
  std::string log_;
  nvrtcProgram handle_ = nullptr;
};

}  // namespace

Result<NvrtcVersion> nvrtc_version() {
  const Api& api = *F8_TRY(nvrtc());
  NvrtcVersion version;
  if (const nvrtcResult result = api.version(&version.major, &version.minor);
      result != NVRTC_SUCCESS) {
    return fail(error_code(result), "nvrtcVersion failed: {}", api.error_string(result));
  }
  return version;
}

Result<Cubin> compile(const KernelSource& source) {
  const auto start = std::chrono::steady_clock::now();
  const Program program = F8_TRY(Program::compile(source));
  if (const std::string_view line = find_c75_line(program.log()); !line.empty()) {
    return fail(ErrorCode::kCompile,
                "kernel {} is refused, its wgmma is serialised or its setmaxnreg ignored: {}",
                source.key, line);
  }
  const PtxasReport report = parse_ptxas_log(program.log(), source.entry);
  Cubin cubin;
  cubin.key = source.key;
  cubin.entry = source.entry;
  cubin.image = F8_TRY(program.cubin());
  cubin.log = program.log();
  cubin.registers = report.registers;
  cubin.spill_bytes = report.spill_bytes;
  cubin.smem_bytes = report.smem_bytes;
  cubin.compile_ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  return cubin;
}

Result<std::string> compile_to_ptx(const KernelSource& source) {
  return F8_TRY(Program::compile(source)).ptx();
}

}  // namespace f8::codegen
