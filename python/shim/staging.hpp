// Ops of an emulated device with tensors of a GPU. The device computes on the CPU and reads the
// memory there: what an op reads is copied to the CPU, in the order of the current stream, and what it
// returns and writes is copied back. The bits are those of a call with CPU tensors.
//
// Bit 11 of a config stages CPU tensors too, so that tests without a GPU run this code.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "python/shim/base/config.hpp"
#include "python/shim/base/tensors.hpp"

namespace float8_torch {

// The places of an op's arguments, from 0.
struct Roles {
  int config = 0;
  uint32_t written = 0;  // bits of the tensors that it writes
  int scales = -1;       // a part of a scale state, or a list of parts; -1: none
  int more_scales = -1;  // another part
};

class Staging {
 public:
  // `where` is the device of the tensors. Throws while its stream is captured.
  explicit Staging(Device where);
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  ~Staging();

  [[nodiscard]] Tensor read(const Tensor& tensor) const;
  [[nodiscard]] Tensor written(const Tensor& tensor);
  // A part of a copy of the whole scale state, whose first step is to come where the state's is.
  [[nodiscard]] Tensor part_of_state(const Tensor& part);
  // Copies back what was written.
  void finish() const;
  [[nodiscard]] Tensor result(const Tensor& tensor) const;

 private:
  struct Written {
    Tensor original, copy;
    bool is_state = false;
  };
  Device where_;
  std::vector<Written> written_;
};

// Calls an op's kernel, staged where the config is that of an emulated device and the tensors are not
// on the CPU.
template <auto kKernel, Roles kRoles>
struct Staged;

template <class Result, class... Args, Result (*kKernel)(Args...), Roles kRoles>
struct Staged<kKernel, kRoles> {
  static Result call(Args... args) {
    const std::tuple<const Args&...> all{args...};
    const Config config = config_of(std::get<kRoles.config>(all));
    if (!config.emulate()) return kKernel(std::forward<Args>(args)...);
    const Device where = device_of(first(std::get<0>(all)));
    if (!where.is_cuda() && !config.staged()) return kKernel(std::forward<Args>(args)...);
    Staging staging(where);
    return staged(staging, all, std::index_sequence_for<Args...>());
  }

 private:
  static Config config_of(int64_t bits) { return Config(bits); }
  static Config config_of(const std::vector<int64_t>& bits) {
    return Config(bits.empty() ? 0 : bits.front());
  }
  static const Tensor& first(const Tensor& tensor) { return tensor; }
  // The kernel refuses an empty list.
  static Tensor first(const std::vector<Tensor>& list) {
    return list.empty() ? empty_bytes(0, {}) : list.front();
  }

  template <size_t kIndex>
  static Tensor argument(Staging& staging, const Tensor& tensor) {
    if constexpr (kIndex == kRoles.scales || kIndex == kRoles.more_scales)
      return staging.part_of_state(tensor);
    if constexpr ((kRoles.written >> kIndex & 1) != 0) return staging.written(tensor);
    return staging.read(tensor);
  }
  template <size_t kIndex>
  static std::vector<Tensor> argument(Staging& staging, const std::vector<Tensor>& list) {
    std::vector<Tensor> copies;
    for (const Tensor& each : list) copies.push_back(argument<kIndex>(staging, each));
    return copies;
  }
  template <size_t kIndex, class Value>
  static std::optional<Value> argument(Staging& staging, const std::optional<Value>& value) {
    if (!value) return std::nullopt;
    return argument<kIndex>(staging, *value);
  }
  template <size_t kIndex>
  static int64_t argument(Staging&, int64_t value) {
    return kIndex == kRoles.config ? Config(value).without_staging() : value;
  }
  template <size_t kIndex>
  static std::vector<int64_t> argument(Staging&, std::vector<int64_t> values) {
    if (kIndex == kRoles.config) {
      for (int64_t& value : values) value = Config(value).without_staging();
    }
    return values;
  }
  template <size_t kIndex>
  static std::vector<double> argument(Staging&, std::vector<double> values) {
    return values;
  }
  template <size_t kIndex>
  static bool argument(Staging&, bool value) {
    return value;
  }
  template <size_t kIndex>
  static double argument(Staging&, double value) {
    return value;
  }

  static Tensor result(const Staging& staging, const Tensor& tensor) {
    return staging.result(tensor);
  }
  static std::vector<Tensor> result(const Staging& staging, const std::vector<Tensor>& list) {
    std::vector<Tensor> copies;
    for (const Tensor& each : list) copies.push_back(staging.result(each));
    return copies;
  }
  template <class... Each>
  static std::tuple<Each...> result(const Staging& staging, const std::tuple<Each...>& all) {
    return std::apply([&](const auto&... each) { return std::tuple{result(staging, each)...}; },
                      all);
  }
  static bool result(const Staging&, bool value) { return value; }

  template <size_t... kIndex>
  static Result staged(Staging& staging, const std::tuple<const Args&...>& all,
                       std::index_sequence<kIndex...>) {
    const std::tuple<std::remove_cvref_t<Args>...> copies{
        argument<kIndex>(staging, std::get<kIndex>(all))...};
    if constexpr (std::is_void_v<Result>) {
      std::apply(kKernel, copies);
      staging.finish();
    } else {
      const Result on_cpu = std::apply(kKernel, copies);
      staging.finish();
      return result(staging, on_cpu);
    }
  }
};

}  // namespace float8_torch
