#include "recipes/model/filter_rule.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "base/text.hpp"

namespace f8 {
namespace {

// torchao's rules, by the names of its recipes.
constexpr std::array kTensorwiseBoxes = {KnBox{1024, 4096}};
constexpr std::array kRowwiseBoxes = {KnBox{2048, 0}, KnBox{0, 1024}, KnBox{4096, 2048}};
struct TorchaoRule {
  std::string_view recipe;
  std::span<const KnBox> boxes;
};
constexpr std::array kTorchaoRules = {TorchaoRule{"tensorwise", kTensorwiseBoxes},
                                      TorchaoRule{"rowwise", kRowwiseBoxes}};

bool holds(const KnBox& box, const NamedLinear& layer) {
  return (box.n_max == 0 || layer.out_features <= box.n_max) &&
         (box.k_max == 0 || layer.in_features <= box.k_max);
}

}  // namespace

Result<FilterPolicy> parse_filter_policy(std::string_view text) {
  if (text == "measured") return FilterPolicy::kMeasured;
  if (text == "torchao") return FilterPolicy::kTorchao;
  return fail(ErrorCode::kInvalidArgument, "policy {}; use measured or torchao", quote(text));
}

std::string_view to_string(FilterPolicy policy) {
  return policy == FilterPolicy::kMeasured ? "measured" : "torchao";
}

std::string_view to_string(Evidence evidence) {
  switch (evidence) {
    case Evidence::kMeasured:
      return "measured";
    case Evidence::kInterpolated:
      return "interpolated";
    case Evidence::kModelled:
      return "modelled";
    case Evidence::kRule:
      break;
  }
  return "rule";
}

Result<Evidence> parse_evidence(std::string_view text) {
  for (const Evidence e :
       {Evidence::kMeasured, Evidence::kInterpolated, Evidence::kModelled, Evidence::kRule}) {
    if (text == to_string(e)) return e;
  }
  return fail(ErrorCode::kCorrupt, "evidence {}; measured, interpolated, modelled or rule",
              quote(text));
}

Result<NameFilter> name_filter(std::span<const std::string> filter_fqns) {
  NameFilter filter;
  for (const std::string& name : filter_fqns) {
    if (name.empty()) {
      return fail(ErrorCode::kInvalidArgument,
                  "filter_fqns has an empty name, which would match every layer; remove it");
    }
    if (name == kAutoFlag) {
      filter.automatic = true;
    } else {
      filter.names.push_back(name);
    }
  }
  return filter;
}

std::string kept_by_name_or_size(const NameFilter& filter, const NamedLinear& layer) {
  for (const std::string& name : filter.names) {
    if (layer.fqn.find(name) != std::string::npos) {
      return f8::format("kept in bf16: its name holds \"{}\" of filter_fqns", name);
    }
  }
  if (!layer.kept.empty()) return layer.kept;
  const bool experts = layer.is_experts();
  for (const auto& [what, value] :
       {std::pair(experts ? "the experts' dim" : "K (in_features)", layer.in_features),
        std::pair(experts ? "the experts' hidden_dim" : "N (out_features)", layer.out_features)}) {
    if (value % kFp8Alignment != 0) {
      return f8::format("kept in bf16: {} {} is not a multiple of {}", what, value, kFp8Alignment);
    }
  }
  return {};
}

std::string to_string(const KnBox& box) {
  if (box.k_max == 0) return f8::format("N <= {}", box.n_max);
  if (box.n_max == 0) return f8::format("K <= {}", box.k_max);
  return f8::format("N <= {} and K <= {}", box.n_max, box.k_max);
}

std::span<const KnBox> torchao_boxes(const Recipe& recipe) {
  for (const TorchaoRule& rule : kTorchaoRules) {
    if (same_settings(recipe, recipe_of_label(rule.recipe))) return rule.boxes;
  }
  return {};
}

Status check_torchao_rule(const Recipe& recipe) {
  if (!torchao_boxes(recipe).empty()) return {};
  return fail(ErrorCode::kInvalidArgument,
              "torchao has no {} rule for recipe {}; use policy measured, or leave the flag out",
              kAutoFlag, recipe.name);
}

Verdict torchao_verdict(const Recipe& recipe, const NamedLinear& layer) {
  if (layer.is_experts()) {
    return {false,
            "kept in bf16: torchao has no rule for experts; policy measured decides for them"};
  }
  const std::string rule = settings_label(recipe);
  for (const KnBox& box : torchao_boxes(recipe)) {
    if (!holds(box, layer)) continue;
    const std::string n = f8::format("N {} <= {}", layer.out_features, box.n_max);
    const std::string k = f8::format("K {} <= {}", layer.in_features, box.k_max);
    return {false,
            f8::format("kept in bf16 by torchao's {} rule: {}{}{}", rule, box.n_max == 0 ? "" : n,
                       box.n_max == 0 || box.k_max == 0 ? "" : " and ", box.k_max == 0 ? "" : k)};
  }
  return {true, f8::format("converted: K and N are above the limits of torchao's {} rule", rule)};
}

Verdict speedup_verdict(const SpeedupInterval& interval, double margin, std::string_view basis) {
  const double need = 1 + margin;
  const bool convert = interval.lo > need;
  const char* words = convert              ? "converted"
                      : interval.hi > need ? "ambiguous, kept in bf16"
                                           : "kept in bf16";
  const std::string sure = convert ? f8::format("at least {:.3f}", interval.lo)
                           : interval.hi > need
                               ? f8::format("{:.3f} to {:.3f}", interval.lo, interval.hi)
                               : f8::format("at most {:.3f}", interval.hi);
  return {convert, f8::format("{}: {}, need > {:.4g}; {}", words, sure, need, basis)};
}

Status check_filter(std::span<const NamedLinear> layers, int64_t tokens, double margin) {
  if (tokens < 1 || tokens > kMaxDim) {
    return fail(ErrorCode::kInvalidArgument, "tokens is {}; it must be 1 to {}", tokens, kMaxDim);
  }
  if (!(margin >= 0 && margin < 10)) {
    return fail(ErrorCode::kInvalidArgument, "margin is {}; it must be 0 or more, e.g. 0.02",
                margin);
  }
  for (const NamedLinear& layer : layers) {
    const auto out_of_range = [](int64_t v) { return v < 1 || v > kMaxDim; };
    if (out_of_range(layer.in_features) || out_of_range(layer.out_features) || layer.count < 1) {
      return fail(ErrorCode::kInvalidArgument,
                  "layer {}: in_features {}, out_features {}, count {}; all must be 1 or more",
                  layer.fqn, layer.in_features, layer.out_features, layer.count);
    }
    if (layer.groups.experts < 0 || layer.groups.experts > kMaxExperts) {
      return fail(
          ErrorCode::kInvalidArgument,
          "layer {}: {} experts; a call has at most {}: share them among expert-parallel ranks",
          layer.fqn, layer.groups.experts, kMaxExperts);
    }
    const double rows = layer.tokens_share * static_cast<double>(tokens);
    if (!(rows <= static_cast<double>(kMaxDim))) {
      return fail(ErrorCode::kInvalidArgument,
                  "layer {}: {} tokens make {:.0f} rows of experts; there are at most {}",
                  layer.fqn, tokens, rows, kMaxDim);
    }
  }
  return {};
}

}  // namespace f8
