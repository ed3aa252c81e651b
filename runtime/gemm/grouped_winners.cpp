#include "runtime/gemm/grouped_winners.hpp"

#include "tuning_db/estimate/tuning_table.hpp"

namespace f8::runtime {
namespace {

struct Winner {
  Shape group;  // as grouped_winners() takes it
  const char* config;
};

// Measured on an H100, 2026-11-27, all candidates of at least 128 x 128 tiles at each shape with even and
// Zipf routing, bf16 results: the least product of both times. The shapes are of Qwen3-30B-A3B, of
// DeepSeek-V3 with 64 and 8 experts, and of Llama-4-Scout.
constexpr Winner kOfRows[] = {
    {{512, 768, 2048}, "128x128s6c1x2w2pg8"},   {{512, 2048, 768}, "128x128s6c1x2w2pg8"},
    {{1024, 2048, 7168}, "128x256s3c1x1w2g16"}, {{1040, 8192, 5120}, "128x128s6c1x2w2pg16"},
    {{4096, 7168, 2048}, "128x128s6c1x1w2pg8"}, {{4096, 2048, 7168}, "128x128s6c1x2w2pg8"}};
constexpr Winner kOfKFast[] = {
    {{768, 2048, 512}, "128x192s4c1x1w2pg8"},    {{2048, 768, 512}, "128x192s4c1x1w2pg8"},
    {{2048, 7168, 1024}, "128x256s3c2x1w2g16"},  {{8192, 5120, 1040}, "128x256s3c2x1w2g16"},
    {{7168, 2048, 4096}, "128x128s6c1x2w2pg16"}, {{2048, 7168, 4096}, "128x128s6c1x2w2pg16"}};
constexpr Winner kOfKPrecise[] = {
    {{768, 2048, 512}, "192x128s4c1x1w3g4"},    {{2048, 768, 512}, "192x128s4c1x1w3g4"},
    {{2048, 7168, 1024}, "128x256s3c1x1w2g16"}, {{8192, 5120, 1040}, "128x256s3c2x1w2g16"},
    {{7168, 2048, 4096}, "256x128s3c1x1w2g4"},  {{2048, 7168, 4096}, "128x256s3c1x2w2g16"}};

}  // namespace

std::vector<NearbyWinner> grouped_winners(const codegen::GemmSpec& spec, Shape group) {
  std::vector<NearbyWinner> found;
  if (is_block(spec.scale)) return found;
  const std::span<const Winner> all = spec.groups == codegen::GemmGroups::kM ? std::span(kOfRows)
                                      : spec.fast                            ? std::span(kOfKFast)
                                                  : std::span(kOfKPrecise);
  for (const Winner& winner : all) {
    if (const auto config = parse_gemm_config(winner.config)) {
      found.push_back({*config, octaves_between(winner.group, group)});
    }
  }
  return found;
}

}  // namespace f8::runtime
