#include "recipes/gemm_kernel.hpp"

#include <atomic>
#include <charconv>
#include <optional>

#include "base/number.hpp"
#include "base/text.hpp"

namespace f8 {
namespace {

std::atomic<uint64_t> parsed_kernels = 0;

// Takes `word` and the positive integer after it.
bool take_number(std::string_view& text, std::string_view word, int& out) {
  if (!take(text, word)) return false;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  if (error != std::errc() || out < 1) return false;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return true;
}

bool take_tile(std::string_view& text, GemmConfig& c) {
  bool good = take_number(text, "", c.tile_m) && take_number(text, "x", c.tile_n) &&
              take_number(text, "s", c.stages) && take_number(text, "c", c.cluster_m) &&
              take_number(text, "x", c.cluster_n);
  if (good && text.starts_with('k')) good = take_number(text, "k", c.split_k);
  good = good && take_number(text, "w", c.warpgroups);
  c.pingpong = good && take(text, "p");
  return good;
}

}  // namespace

std::string tile_key(const GemmConfig& c) {
  return f8::format("{}x{}s{}c{}x{}{}w{}{}", c.tile_m, c.tile_n, c.stages, c.cluster_m, c.cluster_n,
                    c.split_k > 1 ? f8::format("k{}", c.split_k) : "", c.warpgroups,
                    c.pingpong ? "p" : "");
}

Result<GemmConfig> parse_gemm_tile(std::string_view text) {
  std::string_view rest = text;
  GemmConfig c;
  if (take_tile(rest, c) && rest.empty()) return c;
  return fail(ErrorCode::kInvalidArgument, "tile {}: expected a form such as 128x256s4c2x1w2",
              quote(text));
}

std::string key(const GemmConfig& c) {
  return f8::format("{}g{}", tile_key(c), c.raster_group);
}

Result<GemmConfig> parse_gemm_config(std::string_view text) {
  parsed_kernels.fetch_add(1, std::memory_order_relaxed);
  std::string_view rest = text;
  GemmConfig c;
  if (take_tile(rest, c) && take_number(rest, "g", c.raster_group) && rest.empty()) return c;
  return fail(ErrorCode::kInvalidArgument,
              "GEMM configuration {}: expected a form such as 128x256s4c2x1w2g8 "
              "(tile_m x tile_n, stages, cluster, warpgroups, p for ping-pong, raster group)",
              quote(text));
}

std::string_view to_string(Provider p) {
  return p == Provider::kGenerated ? "generated" : "cublaslt";
}

std::string config_text(const GemmKernel& kernel) {
  if (kernel.provider == Provider::kGenerated) return key(kernel.config);
  if (kernel.heuristic == kRankedFirst) return "ranked first";
  return f8::format("h{}", kernel.heuristic);
}

Result<GemmKernel> parse_gemm_kernel(Provider provider, std::string_view config) {
  GemmKernel kernel{.provider = provider};
  if (provider == Provider::kGenerated) {
    kernel.config = F8_TRY(parse_gemm_config(config));
    return kernel;
  }
  parsed_kernels.fetch_add(1, std::memory_order_relaxed);
  std::string_view number = config;
  const bool named = take(number, "h");
  const auto heuristic = number_of<int>(number);
  if (!named || !heuristic || *heuristic < 0) {
    return fail(ErrorCode::kInvalidArgument, "cublaslt config {}: expected h and a number, as h0",
                quote(config));
  }
  kernel.heuristic = *heuristic;
  return kernel;
}

uint64_t parsed_gemm_kernels() {
  return parsed_kernels.load(std::memory_order_relaxed);
}

}  // namespace f8
